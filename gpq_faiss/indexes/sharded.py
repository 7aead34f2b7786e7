"""One index over the shards of a manifest, with the results of one file with all items.

Without lists, the best results of the shards are merged. With lists, which all shards share, the lists to probe are chosen by the items
of all shards; each shard then searches those lists.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..errors import MismatchError
from ..store import codebooks_fingerprint
from .best import Best
from .file import FileIndex
from .filters import Filter
from .manifest import Manifest
from .memory import MemoryIndex
from .plan import KINDS, Plan
from .probing import Probing
from .ranges import LIMIT, check_min_score, too_many
from .threads import check_k, check_nprobe, check_threads


class MergedIndex(ABC):
    """Common base of sharded indexes: checks, choice of lists, and merging.

    Attributes:
        manifest: of the shards.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: if known.
        centroids: float32 [lists, M*d] of the common lists, else None.
        sizes: int64 [lists], items per list over all shards.
        nprobe: default number of lists to probe; 0 if there are none.
    """

    def __init__(
        self, manifest: Manifest, codebooks: Floats, centroids: Floats | None, sizes: Ids, nprobe: int
    ) -> None:
        """For sub-classes; see the attributes."""
        self.manifest = manifest
        self.codebooks = codebooks
        self.width = int(codebooks.shape[0] * codebooks.shape[2])
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = manifest.model_fingerprint
        self.centroids, self.sizes = centroids, sizes
        self.nprobe = min(nprobe, self.lists)

    @cached_property
    def _probing(self) -> Probing:
        assert self.centroids is not None
        return Probing(self.centroids, self.sizes)

    @abstractmethod
    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        """Results of ``method`` of every shard, in any order: ``search``, ``range_search``, ``list_counts`` or ``code_of``."""

    @abstractmethod
    def close(self) -> None:
        """Release resources; searches then fail."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ntotal(self) -> int:
        """Number of items."""
        return self.manifest.ntotal

    @property
    def plan(self) -> Plan:
        """Search options."""
        return KINDS["ivf" if self.lists else "exact"]

    @property
    def lists(self) -> int:
        """Number of lists; 0 if there are none."""
        return 0 if self.centroids is None else len(self.sizes)

    def describe(self) -> str:
        """One-line description of the search."""
        kind = "ivf, " if self.lists else ""
        return f"{kind}{len(self.manifest.shards)} shards, {self.ntotal:,} items"

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1, or there are no lists."""
        return check_nprobe(nprobe, self.nprobe, self.lists, str(self.manifest.path))

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists to probe, at most all. Raises as :meth:`check_nprobe`."""
        self.nprobe = self.check_nprobe(nprobe)

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
        lists: Ids | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, as :meth:`.file.FileIndex.search` of one file with all items.

        Raises:
            UsageError, DataError: see there; or a missing, damaged or modified shard.
        """
        k = check_k(k, self.ntotal)
        check_threads(threads)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        if lists is None:
            lists = self._lists(queries, self.check_nprobe(nprobe), k, where)
        best = Best(len(queries), k)
        for D, ids in self._answers("search", queries, k, where=where, threads=threads, lists=lists):
            best.take(slice(None), D, ids, 0)
        return best.D, best.found

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
        lists: Ids | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with at least ``min_score``, as :meth:`.file.FileIndex.range_search` of one file with all items.

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        min_score = check_min_score(min_score)
        check_threads(threads)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        if lists is None and nprobe is not None and self.check_nprobe(nprobe) < self.lists:
            lists = self._lists(queries, self.check_nprobe(nprobe), 0, where)
        owners, scores, found = [np.empty(0, np.int64)], [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        total = 0
        options = {"where": where, "limit": limit, "threads": threads, "lists": lists}
        for lims, D, ids in self._answers("range_search", queries, min_score, **options):
            total += len(ids)
            if total > limit:
                raise too_many(min_score, limit)
            owners.append(np.repeat(np.arange(len(queries)), np.diff(lims)))
            scores.append(D)
            found.append(ids)
        owner, D, ids = np.concatenate(owners), np.concatenate(scores), np.concatenate(found)
        order = np.lexsort((ids, -D, owner))
        counts = np.bincount(owner, minlength=len(queries))
        return np.concatenate([[0], np.cumsum(counts)]).astype(np.int64), D[order], ids[order]

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id."""
        return next((code for code in self._answers("code_of", item) if code is not None), None)

    def list_counts(self, where: Filter, numbers: Ids) -> Ids:
        """Number of passing items in each of these lists, int64."""
        counts: Ids = np.sum(list(self._answers("list_counts", where, numbers)), axis=0, dtype=np.int64)
        return counts

    def _lists(self, xq: Floats, nprobe: int, k: int, where: Filter | None) -> Ids | None:
        """Lists to probe per query, by the items of all shards; None without lists."""
        if not self.lists:
            return None
        if where is None:
            return self._probing.lists(xq, nprobe, k)
        known = np.full(self.lists, -1, np.int64)

        def count(numbers: Ids) -> Ids:
            new = np.unique(numbers[known[numbers] < 0])
            if len(new):
                known[new] = self.list_counts(where, new)
            return known[numbers]

        return self._probing.lists(xq, nprobe, k, count)


class ShardedIndex(MergedIndex):
    """The shards of a manifest in this process, created by :func:`.opening.open_shards`."""

    def __init__(self, manifest: Manifest, opened: Sequence[MemoryIndex | FileIndex]) -> None:
        """From the indexes of the shards, in order. Raises MismatchError: different lists."""
        first = opened[0]
        self.opened = list(opened)
        centroids = first.centroids if isinstance(first, FileIndex) else None
        sizes = np.zeros(first.lists, np.int64)
        for shard, index in zip(manifest.shards, opened, strict=True):
            own = index.centroids if isinstance(index, FileIndex) else None
            same_lists(manifest, centroids, own, shard.file)
            if isinstance(index, FileIndex) and own is not None:
                sizes += index.sizes
        super().__init__(manifest, first.codebooks, centroids, sizes, max(i.nprobe for i in opened))

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        for shard, index in zip(self.manifest.shards, self.opened, strict=True):
            if method == "list_counts":
                where, numbers = args
                assert isinstance(index, FileIndex)
                count = index.count(where)
                yield np.zeros(len(numbers), np.int64) if count is None else count(numbers)
            elif method == "code_of":
                if shard.first_id <= args[0] <= shard.last_id:
                    yield index.code_of(*args)
            else:
                own = {key: value for key, value in options.items() if key != "lists" or index.lists}
                first, second = args
                if method == "search":
                    second = min(second, index.ntotal)
                yield getattr(index, method)(first, second, **own)

    def close(self) -> None:
        for index in self.opened:
            index.close()


def same_lists(manifest: Manifest, one: Floats | None, other: Floats | None, file: str = "one") -> None:
    """Raises MismatchError: a shard's centroids differ from those of earlier shards."""
    if (one is None) != (other is None) or (
        one is not None and other is not None and not np.array_equal(one, other)
    ):
        raise MismatchError(
            f"{manifest.path}: shard {file} has other lists than the others: build all shards together, or with the same centroids"
        )

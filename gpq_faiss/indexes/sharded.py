"""One index over the shards of a manifest, with the results of one file with all items: the results of the shards are merged."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..store import codebooks_fingerprint
from .best import Best
from .file import FileIndex
from .filters import Filter
from .manifest import Manifest
from .memory import MemoryIndex
from .ranges import LIMIT, check_limit, check_min_score, too_many
from .threads import check_k, check_nprobe, check_threads


class MergedIndex(ABC):
    """Common base of sharded indexes: checks and merging.

    Attributes:
        manifest: of the shards.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: if known.
        width: D of the queries.
    """

    def __init__(self, manifest: Manifest, codebooks: Floats) -> None:
        """For sub-classes; see the attributes."""
        self.manifest = manifest
        self.codebooks = codebooks
        self.width = int(codebooks.shape[0] * codebooks.shape[2])
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = manifest.model_fingerprint

    @abstractmethod
    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        """Results of ``method`` of every shard, in any order: ``search``, ``range_search``, ``bound`` or ``code_of``."""

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

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{len(self.manifest.shards)} shards, {self.ntotal:,} items"

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, as :meth:`.memory.MemoryIndex.search` of all items; ``nprobe`` counts in each shard.

        Raises:
            UsageError, DataError: see there; or a missing, damaged or modified shard.
        """
        k = check_k(k, self.ntotal)
        check_threads(threads)
        check_nprobe(nprobe)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        best = Best(len(queries), k)
        # A view: what one shard has found spares work in the next.
        floor = best.D[:, -1] if floor is None else floor
        options = {"where": where, "threads": threads, "nprobe": nprobe, "floor": floor}
        for D, ids in self._answers("search", queries, k, **options):
            best.take(slice(None), D, ids)
        return best.D, best.found

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """As :meth:`.memory.MemoryIndex.bound`."""
        k = check_k(k, self.ntotal)
        check_nprobe(nprobe)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        left: Floats = np.max(list(self._answers("bound", queries, k, nprobe=nprobe)), axis=0)
        return left

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with at least ``min_score``, as :meth:`.memory.MemoryIndex.range_search` of all items.

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        min_score = check_min_score(min_score)
        check_limit(limit)
        check_threads(threads)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        owners, scores, found = [np.empty(0, np.int64)], [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        total = 0
        options = {"where": where, "limit": limit, "threads": threads}
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


class ShardedIndex(MergedIndex):
    """The shards of a manifest in this process, created by :func:`.opening.open_shards`."""

    def __init__(self, manifest: Manifest, opened: Sequence[MemoryIndex | FileIndex]) -> None:
        """From the indexes of the shards, in order."""
        self.opened = list(opened)
        super().__init__(manifest, opened[0].codebooks)

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        for shard, index in zip(self.manifest.shards, self.opened, strict=True):
            if method == "code_of":
                if shard.first_id <= args[0] <= shard.last_id:
                    yield index.code_of(*args)
                continue
            first, second = args
            if method in ("search", "bound"):
                second = min(second, index.ntotal)
            yield getattr(index, method)(first, second, **options)

    def close(self) -> None:
        for index in self.opened:
            index.close()

"""One index over the shards of a manifest, with the results of one file with all items: the results of the shards are merged."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import numpy as np

from ..codes.checks import Codes, Floats, Ids
from .base import Index, Limits, too_many
from .codeword_lists import best_first
from .file import FileIndex
from .filters import Filter
from .manifest import Manifest
from .memory import MemoryIndex


def merged(one: tuple[Floats, Ids], other: tuple[Floats, Ids], k: int) -> tuple[Floats, Ids]:
    """Of two results, scores and ids [Q, n], the ``k`` best of every query, ties by ascending id."""
    D, ids = np.concatenate([one[0], other[0]], axis=1), np.concatenate([one[1], other[1]], axis=1)
    order = np.lexsort((ids, -D), axis=1)[:, :k]
    return np.take_along_axis(D, order, axis=1), np.take_along_axis(ids, order, axis=1)


class MergedIndex(Index):
    """Common base of sharded indexes: merging.

    Attributes:
        manifest: of the shards.
    """

    def __init__(self, manifest: Manifest, codebooks: Floats) -> None:
        """For sub-classes; see the attributes."""
        super().__init__(codebooks, manifest.model_fingerprint)
        self.manifest = manifest

    @abstractmethod
    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        """Results of ``method`` of every shard, in any order: ``search``, ``range_search``, ``bound`` or ``code_of``."""

    @property
    def ntotal(self) -> int:
        return self.manifest.ntotal

    def describe(self) -> str:
        return f"{len(self.manifest.shards)} shards, {self.ntotal:,} items"

    def _search(self, xq: Floats, k: int, **limits: Unpack[Limits]) -> tuple[Floats, Ids]:
        D, found = np.full((len(xq), k), -np.inf, np.float32), np.full((len(xq), k), -1, np.int64)
        # A view: what one shard has found spares work in the next.
        if limits["floor"] is None:
            limits["floor"] = D[:, -1]
        for scores, ids in self._answers("search", xq, k, **limits):
            new = (scores >= D[:, -1:]).any(axis=1)
            D[new], found[new] = merged((D[new], found[new]), (scores[new], ids[new]), k)
        return D, found

    def _bound(self, xq: Floats, k: int, nprobe: int) -> Floats:
        left: Floats = np.max(list(self._answers("bound", xq, k, nprobe=nprobe)), axis=0)
        return left

    def _range_search(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> Iterator[tuple[Floats, Ids]]:
        parts, total = [], 0
        options = {"where": where, "limit": limit, "threads": threads}
        for part in self._answers("range_search", xq, min_score, **options):
            parts.append(part)
            total += len(part[2])
            if total > limit:
                raise too_many(min_score, limit)
        for q in range(len(xq)):
            own = [slice(lims[q], lims[q + 1]) for lims, _, _ in parts]
            D = np.concatenate([part[1][rows] for part, rows in zip(parts, own, strict=True)])
            ids = np.concatenate([part[2][rows] for part, rows in zip(parts, own, strict=True)])
            yield best_first(D, ids)

    def code_of(self, item: int) -> Codes | None:
        return next((code for code in self._answers("code_of", item) if code is not None), None)


class ShardedIndex(MergedIndex):
    """The shards of a manifest in this process, created by :func:`.opening.open_shards`."""

    def __init__(self, manifest: Manifest, opened: Sequence[MemoryIndex | FileIndex]) -> None:
        """From the indexes of the shards, in order."""
        self.opened = list(opened)
        super().__init__(manifest, opened[0].codebooks)

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        for shard, index in zip(self.manifest.shards, self.opened, strict=True):
            if method == "code_of" and not shard.first_id <= args[0] <= shard.last_id:
                continue
            given = (args[0], min(args[1], index.ntotal)) if method in ("search", "bound") else args
            yield getattr(index, method)(*given, **options)

    def close(self) -> None:
        for index in self.opened:
            index.close()

"""Searching lists that stay on disk: only the lists nearest to a query are read (:mod:`.probing`).

Opening reads the header and the sizes of the lists. A search reads each list once for all queries of a batch that look
at it, and searches it exactly: scores are exact, and within the lists looked at so are
the results, ties ordered by id. What is approximate is which lists those are; with all of them the answer equals brute
force. With a filter, the ids of a list are read first, to see how many items pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.bits import check_codes
from ..codes.checks import Floats, Ids, check_count, check_recall, check_vectors
from ..codes.encode import decode
from ..codes.keys import read_keys
from ..faissio.io import read_sidecar
from ..faissio.listfile import ListFile
from ..faissio.rowfile import IndexFile
from .file import ALIGNED, FAST_BATCH, Best, FileEngine
from .filters import Filter, mask_of
from .items import Items, Names
from .probing import Probing, operating_points
from .proof import Known, ProvenSearch
from .ranges import Part, check_least, collect
from .scanners import FastScan
from .threads import check_block, omp_threads

_SAMPLE = 128
_VISIT_BYTES = 64
"""What a list that a query looks at takes while it is put in order."""


class ListEngine(FileEngine):
    """An index file with lists, searched in place. Made by :func:`.file.open_disk`; the file must stay as it is.

    Attributes:
        lists: how many.
        nprobe: lists that a query looks at, unless :meth:`search` is told otherwise.
        points: operating points of the last :meth:`tune`.
    """

    kind = "disk-ivf"

    def __init__(self, source: IndexFile, memory: int, file: ListFile) -> None:
        self._file = file
        super().__init__(source, memory, file.codebooks, file.n)
        self.lists = len(file.sizes)
        self.nprobe = min(file.nprobe, self.lists)
        self.points: tuple[dict[str, float], ...] = ()
        self._probing = Probing(file.centroids, file.sizes)
        self._first: dict[int, int] = {}
        # A build in a stream notes whether ids ascend in every list. Were that wrong, ties would be in another order.
        stated = read_sidecar(source.path)
        self._ascending = stated is not None and stated["extra"].get("ascending") is True

    @property
    def sizes(self) -> Ids:
        """Items of each list, int64 [lists]."""
        return self._file.sizes

    def nearest_lists(self, xq: Floats, nprobe: int) -> Ids:
        """The lists nearest to each query that hold an item, nearest first: int64 [Q, min(nprobe, such lists)]."""
        return self._probing.nearest(xq, nprobe)

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1."""
        if nprobe is None:
            return self.nprobe
        return min(check_count(nprobe, "nprobe"), self.lists)

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
        block: int = 1024,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items in the lists nearest to every query: ``nprobe``, and more where these hold fewer than ``k``.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal; a place without an item, as a filter may leave it, gets score -inf and id -1.
            nprobe: default: :attr:`nprobe`; ``lists`` gives the exact answer.
            where, threads: as :meth:`.memory.Engine.search`.
            block: queries at a time; each list is read once for each block.

        Returns:
            D float32 [Q, k], larger first; I int64 [Q, k], equal scores by ascending id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``block`` out of range, or a budget that is too small.
            DataError: unfit queries or filter; codes in the file that no model has; the file was written to since it was
                opened.
        """
        queries, k, workers, block = self.prelude(xq, k, threads, block)
        nprobe = self.check_nprobe(nprobe)
        # k lists hold k items; a filter may leave too few in all lists
        block = self._fewer(block, self.lists if where is not None else min(self.lists, max(nprobe, k)))
        count = self._count(where)
        D = np.empty((len(queries), k), np.float32)
        found = np.empty((len(queries), k), np.int64)
        with self.unchanged(), omp_threads(threads):
            for start in range(0, len(queries), block):
                part = slice(start, start + block)
                nearest = self._probing.lists(queries[part], nprobe, k, count)
                best = self._search(queries[part], k, nearest, where, workers)
                D[part], found[part] = best.D, best.found
        return D, found

    def _search(self, xq: Floats, k: int, nearest: Ids, where: Filter | None, workers: int) -> Best:
        rows = max(ALIGNED, self.rows_for(self._row_bytes(), workers, len(xq), k) // ALIGNED * ALIGNED)
        best = Best(len(xq), k)
        known = Known.of(xq, self.codebooks)
        visits = _visits(nearest, self._file.sizes)

        def one(visit: tuple[int, NDArray[np.int64]]) -> None:
            faiss.omp_set_num_threads(1)  # of this thread alone
            number, asked = visit
            size = int(self._file.sizes[number])
            for start in range(0, size, rows):
                items = self._items(number, start, min(size, start + rows), where)
                if not len(items):
                    continue
                stages = ("fastscan",) if items.scan or len(asked) >= FAST_BATCH else ("fused",)
                search = ProvenSearch(items.codes, self.codebooks, stages, first=self._first, fast=items.scan)
                n = min(k, search.n)
                step = search.block_rows(n)
                for s in range(0, len(asked), step):
                    some = asked[s : s + step]
                    floor = best.floor(some, ties=True)
                    keys = search.search_keys(xq[some], n, floor, known.take(some))
                    scores, at = read_keys(keys)
                    best.take(some, scores, items.ids_at(at), number)

        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(one, visits):
                pass
        return best

    def _count(self, where: Filter | None) -> Callable[[Ids], Ids] | None:
        """How many items of lists pass a filter; each list is looked through once."""
        if where is None:
            return None
        passing = np.full(self.lists, -1, np.int64)
        step = self.rows_for(64, 1, 1, 1)

        def count(numbers: Ids) -> Ids:
            for number in np.unique(numbers).tolist():
                if passing[number] < 0:
                    size = int(self._file.sizes[number])
                    passing[number] = 0
                    for start in range(0, size, step):
                        ids = self._file.ids(self._handle, number, start, min(size, start + step))
                        own = np.sort(ids).astype(np.int64)
                        passing[number] += int(mask_of(where, Names(len(own), own)).sum())
            return passing[numbers]

        return count

    def _fewer(self, block: int, nprobe: int) -> int:
        """Queries at a time, so that the numbers of the lists that they look at take no more than an eighth of the budget."""
        return max(1, min(block, self.memory // (8 * _VISIT_BYTES * nprobe)))

    def _row_bytes(self) -> int:
        size = (self.M + 1) // 2
        return size * 6 + 40

    def _items(self, number: int, start: int, stop: int, where: Filter | None) -> _Part:
        """Rows of a list, in the order of their ids; packed as they lie in the file where they can be."""
        packed = where is None and self._file.form == "ivf-fastscan"
        ids = np.empty(0, np.int64)
        if not (packed and self._ascending):
            ids = self._file.ids(self._handle, number, start, stop)
        if packed and (self._ascending or bool((ids[1:] > ids[:-1]).all())):
            scan = self.scan(self._file.rows)
            codes = self.fill(scan, stop - start, self._file.packed_at(number, start))
            if not self._ascending:
                return _Part(codes, ids.__getitem__, scan)
            # where they are known to ascend, only those of the results are read
            return _Part(codes, partial(self._file.some_ids, self._handle, number, start, stop), scan)
        plain = self._file.codes(self._handle, number, start, stop)
        items = Items.ordered(check_codes(plain[:], self.M, self.K, what=str(self.path)), ids)
        if where is not None:
            items = items.keep(mask_of(where, items))
        return _Part(items.codes, items.ids.__getitem__, None)

    def range_search(
        self,
        xq: ArrayLike,
        least: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = 10_000_000,
        threads: int | None = None,
        block: int = 64,
    ) -> tuple[Ids, Floats, Ids]:
        """All items that score at least ``least``, as :meth:`.memory.Engine.range_search`.

        Args:
            nprobe: only those in so many of the nearest lists (default: all lists).

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        self.check_open()
        least = check_least(least)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        nprobe = self.lists if nprobe is None else self.check_nprobe(nprobe)
        block = self._fewer(block, nprobe if where is None else self.lists)
        count = None if nprobe == self.lists else self._count(where)
        rows = max(ALIGNED, self.rows_for(self._row_bytes(), 1, block, 1) // ALIGNED * ALIGNED)

        def parts() -> Iterator[Part]:
            for first in range(0, len(queries), block):
                nearest = self._probing.lists(queries[first : first + block], nprobe, 0, count)
                for number, asked in _visits(nearest, self._file.sizes):
                    size = int(self._file.sizes[number])
                    for start in range(0, size, rows):
                        items = self._items(number, start, min(size, start + rows), where)
                        if len(items):
                            search = ProvenSearch(items.codes, self.codebooks, ("fastscan",), fast=items.scan)
                            yield asked + first, search, items.ids_at

        with self.unchanged(), omp_threads(threads):
            return collect(parts(), queries, least, limit)

    # Choosing nprobe -------------------------------------------------------------------------------------------------

    def sample_queries(self, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
        """Queries where there are none, as :func:`.tune.sample_queries`, of items drawn from the lists.

        Returns:
            float32 [min(n, ntotal), M*d].
        """
        rng = np.random.default_rng([seed, 1])
        n = min(n, self.ntotal)
        ends = np.cumsum(self._file.sizes)
        rows = (
            rng.choice(self.ntotal, n, replace=False)
            if self.ntotal < 1 << 24
            else rng.integers(0, self.ntotal, n)
        )
        x = np.empty((n, self.width), np.float32)
        with self.unchanged():
            for i, row in enumerate(np.sort(rows).tolist()):
                number = int(np.searchsorted(ends, row, side="right"))
                at = int(row - (ends[number] - self._file.sizes[number]))
                first = at // ALIGNED * ALIGNED
                x[i] = decode(
                    self._file.codes(self._handle, number, first, at + 1)[at - first : at - first + 1],
                    self.codebooks,
                )[0]
        parts = x.reshape(n, self.M, self.d)
        move = rng.standard_normal(parts.shape)
        parts = parts + noise * move / np.linalg.norm(move, axis=2, keepdims=True)
        unit = parts / np.maximum(np.linalg.norm(parts, axis=2, keepdims=True), 1e-12)
        return np.ascontiguousarray(unit.reshape(n, -1), dtype=np.float32)

    def tune(
        self,
        recall: float,
        *,
        k: int = 10,
        queries: ArrayLike | None = None,
        threads: int | None = None,
    ) -> list[dict[str, float]]:
        """Set the least nprobe that reaches a recall, and say what others give (:func:`.probing.operating_points`).

        Args:
            recall: mean share of the exact top ``k``, ties ordered by id, above 0 and at most 1.
            queries: [Q, M*d] like those to come (default: :meth:`sample_queries`).

        Returns:
            Operating points, by ascending nprobe: ``nprobe``, ``recall``, ``seconds_per_query`` (all queries as one
            batch), ``share`` of the items looked at. The chosen one is the first whose recall suffices.

        Raises:
            UsageError: ``recall`` or ``k`` out of range.
            DataError: unfit queries.
        """
        check_recall(recall)
        with self.unchanged():
            return self._tune(recall, k, queries, threads)

    def _tune(
        self, recall: float, k: int, queries: ArrayLike | None, threads: int | None
    ) -> list[dict[str, float]]:
        xq = self.sample_queries() if queries is None else queries
        xq, k, workers, block = self.prelude(xq, min(k, self.ntotal), threads, 1024)
        block = self._fewer(block, self.lists)
        list_of = np.empty((len(xq), k), np.int32)
        for s in range(0, len(xq), block):
            nearest = self.nearest_lists(xq[s : s + block], self.lists)
            list_of[s : s + block] = self._search(xq[s : s + block], k, nearest, None, workers).part
        chosen, points = operating_points(
            self._probing, xq, k, list_of, recall, lambda n: self.search(xq, k, nprobe=n, threads=threads)
        )
        self.nprobe, self.points = chosen, tuple(points)
        return points


class _Part:
    """Rows of a list in the order of their ids; ``read`` gives the ids at positions."""

    def __init__(self, codes: Any, read: Callable[[Ids], Ids], scan: FastScan | None) -> None:
        self.codes, self.read, self.scan = codes, read, scan

    def __len__(self) -> int:
        return len(self.codes)

    def ids_at(self, positions: Ids) -> Ids:
        """Ids of positions; -1 stays -1."""
        return np.where(positions < 0, -1, self.read(np.maximum(positions, 0)))


def _visits(nearest: Ids, sizes: Ids) -> list[tuple[int, NDArray[np.int64]]]:
    """Each list that any query looks at, with the rows of these queries; lists near to some query first."""
    nprobe = nearest.shape[1]
    flat = nearest.reshape(-1)
    order = np.argsort(flat, kind="stable")
    numbers, starts = np.unique(flat[order], return_index=True)
    rows = np.split(order // nprobe, starts[1:])
    ranks = np.minimum.reduceat((order % nprobe), starts) if len(order) else order
    first = np.argsort(ranks, kind="stable")
    return [
        (int(numbers[i]), rows[i].astype(np.int64))
        for i in first
        if numbers[i] >= 0 and sizes[numbers[i]] > 0
    ]

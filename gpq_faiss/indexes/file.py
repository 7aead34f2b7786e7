"""An index over a file that stays on disk: codes are read in blocks, each searched exactly.

Opening reads the header alone. A search holds a block of codes a thread, packs it for FastScan (or takes float tables
where a batch is too small to pay for that), and merges the best of all blocks: equal to a search in memory to the bit.
What a block must beat to matter is known from the blocks before, which makes most proofs short. A file of the fastscan
form needs no packing; and where the budget holds all packed codes of a file without ids, they are kept for the searches to
come.

Of a file with lists, each list that some query of a batch looks at is read once, and searched for those queries. The answer
is exact within the lists looked at (:mod:`.probing`); with all of them it is that of the exact search. A file without lists
is one list that every query looks at.

A search looks before and after whether the file was written to, and fails if it was.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.bits import check_codes
from ..codes.blocks import PackedCodes
from ..codes.checks import Floats, Ids, check_count, check_recall, check_vectors
from ..codes.keys import read_keys
from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import Header, read_header
from ..faissio.io import read_sidecar, sidecar_path
from ..faissio.source import IndexFile
from ..inputs import parse_bytes
from ..store import codebooks_fingerprint
from .filters import Filter, mask_of
from .items import IdMap, Items
from .probing import Probing
from .proof import ProvenSearch, QueryTables
from .ranges import Part, check_min_score, collect
from .scanners import FastScan
from .threads import check_block, check_k, check_threads, omp_threads
from .tune import OperatingPoint, operating_points, stand_in_queries

MEMORY = "1GB"
LEAST_ROWS = 4096
FAST_BATCH = 4  # queries from which packing a block for FastScan pays
MOST_ROWS = 1 << 21  # a block that is read anew for every batch, and one that is kept (measured)
KEPT_ROWS = 1 << 23
ALIGNED = 384  # FastScan's own blocks, of 32 to 128 codes, stay whole
_VISIT_BYTES = 64
"""What a list that a query looks at takes while it is put in order."""
_SAMPLE = 128  # stand-ins for queries
_TINY = np.finfo(np.float32).tiny

Rows = slice | NDArray[np.int64]
"""Some of the queries of a batch."""


class Best:
    """The best so far of some queries, filled part by part. Safe to use from several threads.

    Attributes:
        D: float32 [Q, k], larger first; -inf where nothing was found.
        found: int64 [Q, k], equal scores by ascending id; -1 there.
        list_of: int32 [Q, k], the list that each came from.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.D = np.full((queries, k), -np.inf, np.float32)
        self.found = np.full((queries, k), -1, np.int64)
        self.list_of = np.zeros((queries, k), np.int32)
        self._lock = threading.Lock()

    def floor(self, rows: Rows, *, ties: bool) -> Floats:
        """What an item must exceed to enter, float32; with ``ties`` one of the same score might, having a smaller id."""
        with self._lock:
            kth: Floats = self.D[rows, -1]
        if not ties:
            return kth
        # not the number next to 0, which programs that flush such small ones take for 0
        return np.where(kth == 0, -_TINY, np.nextafter(kth, np.float32(-np.inf)))

    def take(self, rows: Rows, scores: Floats, ids: Ids, number: int) -> None:
        """Merge results [n, any] of the queries ``rows`` in a list; missing ones are -inf and -1."""
        with self._lock:
            k = self.D.shape[1]
            own = np.arange(len(self.D))[rows]
            enters = scores >= self.D[own, -1:]
            new = enters.any(axis=1)
            if not new.any():  # as mostly
                return
            few = int(enters.sum(axis=1).max())
            own, scores, ids = own[new], scores[new, :few], ids[new, :few]
            D = np.concatenate([self.D[own], scores], axis=1)
            found = np.concatenate([self.found[own], ids], axis=1)
            order = np.lexsort((found, -D), axis=1)[:, :k]
            self.D[own] = np.take_along_axis(D, order, axis=1)
            self.found[own] = np.take_along_axis(found, order, axis=1)
            numbers = np.concatenate([self.list_of[own], np.full(scores.shape, number, np.int32)], axis=1)
            self.list_of[own] = np.take_along_axis(numbers, order, axis=1)


class Visit(NamedTuple):
    """Rows ``start:stop`` of list ``number``, to be searched for the queries ``asked`` (None: all)."""

    number: int
    start: int
    stop: int
    asked: NDArray[np.int64] | None

    def rows(self, start: int, stop: int) -> Rows:
        """The ``start``-th to ``stop``-th of the queries."""
        return slice(start, stop) if self.asked is None else self.asked[start:stop]


class Block(NamedTuple):
    """Rows of a list, ready to be searched; ``ids_at`` makes ids of positions, -1 of -1."""

    search: ProvenSearch
    ids_at: Callable[[Ids], Ids]


class FileIndex:
    """An index file searched in place. Made by :func:`open_file`; the file must stay as it is.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, where the sidecar names it.
        memory: budget in bytes.
        lists: how many; 0 where there are none.
        nprobe: lists that a query looks at unless :meth:`search` is told otherwise; 0 where there are none.
        points: operating points of the last :meth:`tune`.

    Raises:
        DataError: there are no items.
        MismatchError: the sidecar is of another file.
    """

    def __init__(self, source: IndexFile, memory: int, header: Header) -> None:
        path, stated = source.path, read_sidecar(source.path)
        self.path = path
        self.memory = memory
        self.ntotal = header.n
        self.codebooks = header.codebooks
        self.M, self.K, self.d = (int(size) for size in header.codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(header.codebooks)
        self.model_fingerprint: str | None = None
        # A build in a stream notes whether ids ascend in every list. Were that wrong, ties would be in another order.
        self._ascending = False
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != source.size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was meant"
                )
            self._ascending = stated["extra"].get("ascending") is True
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        self._header = header
        self._source = source
        self._probing = None if header.centroids is None else Probing(header.centroids, header.sizes)
        self.lists = 0 if self._probing is None else len(header.sizes)
        self.nprobe = min(header.nprobe, self.lists)
        self.points: tuple[OperatingPoint, ...] = ()
        self._lock = threading.Lock()
        self._own = threading.local()
        self._first: dict[int, int] = {}
        self._kept: dict[tuple[int, int], ProvenSearch] = {}

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> str:
        """``disk``, or ``disk-ivf`` with lists."""
        return "disk-ivf" if self.lists else "disk"

    @property
    def sizes(self) -> Ids:
        """Items of each list, int64 [lists]; without lists of the one that all are in."""
        return self._header.sizes

    def describe(self) -> str:
        """How it searches, for people."""
        return f"{self.kind}, {self.ntotal:,} items in place"

    def close(self) -> None:
        """Give the file back; nothing can be searched then. Also at the end of a ``with``."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_open(self) -> None:
        """Raises UsageError: after :meth:`close`."""
        if self._source.closed:
            raise UsageError(f"{self.path} was closed: open it again")

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Around a search: what is found, or raised, is of the file that was opened.

        Raises:
            UsageError: after :meth:`close`.
            DataError: the file was written to since it was opened.
        """
        self._check_file()
        try:
            yield
        except Exception:
            self._check_file()  # what a search meets in a changed file may be anything
            raise
        self._check_file()

    def _check_file(self) -> None:
        self.check_open()
        self._source.check()

    # Searching --------------------------------------------------------------------------------------------------------

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
        """The ``k`` best items of every query; of lists the nearest ``nprobe``, and more where these hold fewer than ``k``.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal; a place without an item, as a filter may leave it, gets score -inf and id -1.
            nprobe: lists that a query looks at (default: :attr:`nprobe`); all of them give the exact answer.
            where, threads: as :meth:`.memory.MemoryIndex.search`.
            block: queries at a time; codes are read once for each block.

        Returns:
            D float32 [Q, k], larger first; I int64 [Q, k], equal scores by ascending id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``block`` out of range, or a budget that is too small.
            DataError: unfit queries or filter; codes in the file that no model has; the file was written to since it was
                opened.
        """
        queries, k, workers, block = self._prelude(xq, k, threads, block)
        nprobe = self.check_nprobe(nprobe)
        # k lists hold k items; a filter may leave too few in all lists
        block = self._fewer(block, self.lists if where is not None else min(self.lists, max(nprobe, k)))
        count = self._count(where)
        D = np.empty((len(queries), k), np.float32)
        found = np.empty((len(queries), k), np.int64)
        with self.unchanged(), omp_threads(threads):
            for start in range(0, len(queries), block):
                part = slice(start, start + block)
                best = self._search(
                    queries[part], k, self._asked(queries[part], nprobe, k, count), where, workers
                )
                D[part], found[part] = best.D, best.found
        return D, found

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = 10_000_000,
        threads: int | None = None,
        block: int = 64,
    ) -> tuple[Ids, Floats, Ids]:
        """All items that score at least ``min_score``, as :meth:`.memory.MemoryIndex.range_search`.

        The results are held in memory, beside the budget.

        Args:
            nprobe: only those in so many of the nearest lists (default: all lists).

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        self.check_open()
        min_score = check_min_score(min_score)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        nprobe = self.lists if nprobe is None else self.check_nprobe(nprobe)
        count = None if nprobe == self.lists else self._count(where)
        if self.lists:
            block = self._fewer(block, nprobe if where is None else self.lists)
            rows = self.block_rows(1, block, 1)
        else:
            block, rows = len(queries), self.block_rows(1, len(queries), 1)

        def parts() -> Iterator[Part]:
            for first in range(0, len(queries), block):
                some = queries[first : first + block]
                for visit in self._visits(self._asked(some, nprobe, 0, count), rows):
                    held = self._block(visit, where, fast=True)
                    if held is None:
                        continue
                    asked = np.arange(len(some)) if visit.asked is None else visit.asked
                    # without lists one at a time, for memory's sake
                    for own in [asked] if self.lists else asked[:, None]:
                        yield Part(own + first, held.search, held.ids_at)

        with self.unchanged(), omp_threads(threads):
            return collect(parts(), queries, min_score, limit)

    def _search(
        self,
        xq: Floats,
        k: int,
        asked: list[tuple[int, NDArray[np.int64] | None]],
        where: Filter | None,
        workers: int,
    ) -> Best:
        keep = where is None and self.resident(workers, len(xq), k)
        rows = self.kept_rows(workers) if keep else self.block_rows(workers, len(xq), k)
        # Ids that count up: a tie in a later block loses, and earlier blocks are done. Else it might win.
        counting = self._header.id_starts is None
        best = Best(len(xq), k)
        tables = QueryTables.of(xq, self.codebooks) if self.K == 16 else None
        waiting: list[tuple[Rows, Floats, Ids, int]] = []

        def one(visit: Visit) -> None:
            faiss.omp_set_num_threads(1)  # of this thread alone
            queries = len(xq) if visit.asked is None else len(visit.asked)
            held = self._block(visit, where, fast=queries >= FAST_BATCH or keep, keep=keep)
            if held is None:
                return
            n = min(k, held.search.n)
            step = held.search.block_rows(n)
            for start in range(0, queries, step):
                some = visit.rows(start, min(queries, start + step))
                floor = best.floor(some, ties=not counting)
                own = None if tables is None else tables.take(some)
                scores, at = read_keys(held.search.search_keys(xq[some], n, floor, own))
                result = some, scores, held.ids_at(at), visit.number
                if counting:
                    waiting.append(result)
                else:
                    best.take(*result)

        visits = list(self._visits(asked, rows))
        wave = workers if counting else max(1, len(visits))
        with ThreadPoolExecutor(workers) as pool:
            for first in range(0, len(visits), wave):  # no more results wait than there are threads
                for _ in pool.map(one, visits[first : first + wave]):
                    pass
                for result in waiting:
                    best.take(*result)
                waiting.clear()
        return best

    def _asked(
        self, xq: Floats, nprobe: int, k: int, count: Callable[[Ids], Ids] | None
    ) -> list[tuple[int, NDArray[np.int64] | None]]:
        """Each list that any query looks at, with the rows of these queries; lists near to some query first."""
        if self._probing is None:
            return [(0, None)]
        nearest = self._probing.lists(xq, nprobe, k, count)
        order = np.argsort(nearest.reshape(-1), kind="stable")
        numbers, starts = np.unique(nearest.reshape(-1)[order], return_index=True)
        rows = np.split(order // nearest.shape[1], starts[1:])
        ranks = np.minimum.reduceat(order % nearest.shape[1], starts) if len(order) else order
        first = np.argsort(ranks, kind="stable")
        return [
            (int(numbers[i]), rows[i].astype(np.int64))
            for i in first
            if numbers[i] >= 0 and self.sizes[numbers[i]] > 0
        ]

    def _visits(self, asked: list[tuple[int, NDArray[np.int64] | None]], rows: int) -> Iterator[Visit]:
        """The lists in blocks of about so many rows, whole blocks of FastScan."""
        rows = max(ALIGNED, rows // ALIGNED * ALIGNED)
        for number, queries in asked:
            size = int(self.sizes[number])
            for start in range(0, size, rows):
                yield Visit(number, start, min(size, start + rows), queries)

    def _block(self, visit: Visit, where: Filter | None, *, fast: bool, keep: bool = False) -> Block | None:
        """Rows of a list in the order of their ids; packed as they lie in the file where they can be. None: nothing passes.

        Args:
            fast: pack them for FastScan where they are not packed.
            keep: for later searches; only of a file without ids.

        Raises:
            DataError: bits set that no code of this model has.
        """
        number, start, stop, _ = visit
        header, counting = self._header, self._header.id_starts is None
        if keep and (kept := self._kept_block(start, stop)) is not None:
            return Block(kept, partial(_counted, start))
        packed = where is None and header.packing == "fastscan"
        ids = np.empty(0, np.int64)
        if not (counting or (packed and self._ascending)):
            ids = header.ids(self._source, number, start, stop)
        if packed and (counting or self._ascending or bool((ids[1:] > ids[:-1]).all())):
            scan = FastScan.empty(self.codebooks, header.rows) if keep else self._scan()
            at = header.packed_at(number, start)
            codes: PackedCodes = scan.fill(stop - start, lambda held: self._source.fill(held, at))
            search = ProvenSearch(codes, self.codebooks, ("fastscan",), first=self._first, fast=scan)
            read = ids.__getitem__
            if self._ascending and not counting:  # only those of the results are read
                read = partial(header.some_ids, self._source, number, start, stop)
            ids_at: Callable[[Ids], Ids] = partial(_counted, start) if counting else partial(_read_at, read)
        else:
            plain = header.codes(self._source, number, start, stop)
            plain = check_codes(plain, self.M, self.K, what=str(self.path))
            if counting and where is not None:
                ids = np.arange(start, stop, dtype=np.int64)
            items = Items.ordered(plain, ids if not counting or where is not None else None)
            if where is not None:
                items = items.keep(mask_of(where, items))
            if not len(items):
                return None
            stages = ("fastscan",) if fast else ("fused",)
            search = ProvenSearch(items.codes, self.codebooks, stages, first=self._first)
            ids_at = items.ids_at if not counting or where is not None else partial(_counted, start)
        if keep:
            search.keep_packed()
            with self._lock:
                if any(stop > a and b > start for a, b in self._kept):
                    self._kept.clear()  # blocks of another size, of a search with other threads
                self._kept[start, stop] = search
        return Block(search, ids_at)

    def _kept_block(self, start: int, stop: int) -> ProvenSearch | None:
        with self._lock:
            return self._kept.get((start, stop))

    def _scan(self) -> FastScan:
        """This thread's scanner, to be filled; its memory is used again and again."""
        scan: FastScan | None = getattr(self._own, "scan", None)
        if scan is None:
            scan = self._own.scan = FastScan.empty(self.codebooks, self._header.rows)
        return scan

    def _count(self, where: Filter | None) -> Callable[[Ids], Ids] | None:
        """How many items of lists pass a filter; each list is looked through once."""
        if where is None or not self.lists:
            return None
        passing = np.full(self.lists, -1, np.int64)
        step = self.rows_for(64, 1, 1, 1)

        def count(numbers: Ids) -> Ids:
            for number in np.unique(numbers).tolist():
                if passing[number] < 0:
                    size = int(self.sizes[number])
                    passing[number] = 0
                    for start in range(0, size, step):
                        ids = self._header.ids(self._source, number, start, min(size, start + step))
                        own = np.sort(ids).astype(np.int64)
                        passing[number] += int(mask_of(where, IdMap(len(own), own)).sum())
            return passing[numbers]

        return count

    # Memory -----------------------------------------------------------------------------------------------------------

    def _prelude(
        self, xq: ArrayLike, k: int, threads: int | None, block: int
    ) -> tuple[Floats, int, int, int]:
        """Checked queries, k, number of threads, and queries at a time, for which half of the budget may go.

        Raises as :meth:`.memory.MemoryIndex.search`.
        """
        self.check_open()
        k = check_k(k, self.ntotal)
        check_block(block)
        check_threads(threads)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        workers = min(threads or int(faiss.omp_get_max_threads()), os.cpu_count() or 1)
        return queries, k, workers, max(1, min(block, self.memory // (2 * self.query_bytes(workers, k))))

    def query_bytes(self, threads: int, k: int) -> int:
        """What a query takes: its tables and results."""
        return k * 12 * (4 + 2 * threads) + self.M * self.K * 72

    def rows_for(self, row_bytes: int, threads: int, queries: int, k: int) -> int:
        """Rows of ``row_bytes`` that each thread may hold beside what the queries take.

        Raises:
            UsageError: the budget does not even hold the results.
        """
        rows = (self.memory - queries * self.query_bytes(threads, k)) // (threads * row_bytes)
        if rows < LEAST_ROWS:
            raise UsageError(
                f"a memory budget of {self.memory:,} bytes is too small for {queries:,} queries with k = {k:,}: raise "
                "it, or search fewer at a time"
            )
        return int(min(rows, MOST_ROWS))

    def block_rows(self, threads: int, queries: int, k: int) -> int:
        """Rows a block: what one row takes in memory, in each thread. Raises as :meth:`rows_for`."""
        size = self._header.code_size
        if self.lists:
            return self.rows_for(size * 6 + 40, threads, queries, k)
        mapped = self._header.id_starts is not None
        row = size * 5 + 40 if mapped else size * (3 if self._header.packing == "fastscan" else 4)
        rows = self.rows_for(row, threads, queries, k)
        return max(LEAST_ROWS, min(rows, -(-self.ntotal // threads)))

    def resident(self, threads: int, queries: int, k: int) -> bool:
        """Whether the budget holds all codes packed, beside a block a thread: they are then kept for later searches.

        The file must be without ids, or these would have to be kept as well.
        """
        if self._header.id_starts is not None or self.K != 16:
            return False
        size = self._header.code_size
        needed = int(self.ntotal * size * 1.05) + threads * self.kept_rows(threads) * size * 3
        return self.memory - needed > queries * self.query_bytes(threads, k)

    def kept_rows(self, threads: int) -> int:
        """Rows a block that is kept."""
        return max(LEAST_ROWS, min(KEPT_ROWS, -(-self.ntotal // threads)))

    def _fewer(self, block: int, nprobe: int) -> int:
        """Queries at a time, so that the numbers of the lists that they look at take no more than an eighth of the budget."""
        return max(1, min(block, self.memory // (8 * _VISIT_BYTES * nprobe))) if self.lists else block

    # Lists ------------------------------------------------------------------------------------------------------------

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1, or there are no lists."""
        if nprobe is None:
            return self.nprobe
        if not self.lists:
            raise UsageError(f"{self.path} has no lists: nprobe belongs to kind 'ivf'")
        return min(check_count(nprobe, "nprobe"), self.lists)

    def set_nprobe(self, nprobe: int) -> None:
        """Lists that each query looks at from now on, at most all. Raises as :meth:`check_nprobe`."""
        self.nprobe = self.check_nprobe(nprobe)

    def nearest_lists(self, xq: Floats, nprobe: int) -> Ids:
        """The lists nearest to each query that hold an item, nearest first: int64 [Q, min(nprobe, such lists)]."""
        assert self._probing is not None
        return self._probing.nearest(xq, nprobe)

    def codes(self, number: int, start: int, stop: int) -> NDArray[np.uint8]:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        return self._header.codes(self._source, number, start, stop)

    def sample_queries(self, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
        """Queries where there are none (:func:`.tune.stand_in_queries`): float32 [min(n, ntotal), M*d]."""
        ends = np.cumsum(self.sizes)

        def codes_at(rows: Ids) -> Any:
            numbers = np.searchsorted(ends, rows, side="right")
            starts = rows - (ends[numbers] - self.sizes[numbers])
            read = self._header.codes
            return np.concatenate(
                [
                    read(self._source, number, at, at + 1)
                    for number, at in zip(numbers.tolist(), starts.tolist(), strict=True)
                ]
            )

        with self.unchanged():
            return stand_in_queries(self.ntotal, codes_at, self.codebooks, n, noise=noise, seed=seed)

    def tune(
        self,
        recall: float,
        *,
        k: int = 10,
        queries: ArrayLike | None = None,
        threads: int | None = None,
    ) -> list[OperatingPoint]:
        """Set the least nprobe that reaches a recall, and say what others give (:func:`.tune.operating_points`).

        Args:
            recall: mean share of the exact top ``k``, ties ordered by id, above 0 and at most 1.
            queries: [Q, M*d] like those to come (default: :meth:`sample_queries`).

        Returns:
            Operating points, by ascending nprobe. The chosen one is the first whose recall suffices.

        Raises:
            UsageError: no lists, or ``recall`` or ``k`` out of range.
            DataError: unfit queries.
        """
        check_recall(recall)
        if self._probing is None:
            raise UsageError(f"{self.path} has no lists, so no nprobe to tune: build it with kind 'ivf'")
        with self.unchanged():
            given = self.sample_queries() if queries is None else queries
            xq, k, workers, block = self._prelude(given, min(k, self.ntotal), threads, 1024)
            block = self._fewer(block, self.lists)
            list_of = np.empty((len(xq), k), np.int32)
            for s in range(0, len(xq), block):
                asked = self._asked(xq[s : s + block], self.lists, k, None)
                list_of[s : s + block] = self._search(xq[s : s + block], k, asked, None, workers).list_of
            chosen, points = operating_points(
                self._probing, xq, k, list_of, recall, lambda n: self.search(xq, k, nprobe=n, threads=threads)
            )
        self.nprobe, self.points = chosen, tuple(points)
        return points


def _counted(start: int, positions: Ids) -> Ids:
    """Ids of rows that count up from ``start``."""
    return np.where(positions < 0, -1, positions + start)


def _read_at(read: Callable[[Ids], Ids], positions: Ids) -> Ids:
    return np.where(positions < 0, -1, read(np.maximum(positions, 0)))


def open_file(path: str | Path, memory: str | int = MEMORY) -> FileIndex:
    """Open an index file without reading its rows.

    Its SHA-256 is not compared, which would read all of it; sizes and fingerprints are.

    Args:
        memory: for the arrays of a search: bytes, or ``"2GB"``.

    Raises:
        DataError: missing, damaged, empty, or of a form that cannot be searched in place.
        MismatchError: its sidecar is of another file.
        UsageError: an unreadable budget.
    """
    budget = parse_bytes(memory)
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is no file: an index file is needed (gpq index, or faiss.write_index)")
    source = IndexFile(path)
    try:
        return FileIndex(source, budget, read_header(source))
    except BaseException:
        source.close()
        raise

"""An index over a file that stays on disk: codes are read in blocks, each searched exactly.

Opening reads only the header. A search reads a block of codes per thread, packs it for FastScan (or uses float tables for small
batches), and merges the results of all blocks: bit-equal to a search in memory. The threshold from earlier blocks makes most proofs
short. Files in FastScan form need no packing; packed codes of a file without ids are cached if they fit in the budget.

With lists, each list that some query of a batch probes is read once and searched for those queries. Results are exact within the
probed lists (:mod:`.probing`); with all lists they equal the exact search. A file without lists is treated as one list.

A search checks before and after whether the file was modified, and fails if so.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.checks import Codes, Floats, Ids, check_count, check_recall, check_vectors
from ..codes.keys import read_keys
from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import Header, read_header
from ..faissio.io import read_sidecar, sidecar_path
from ..faissio.source import IndexFile
from ..inputs import parse_bytes
from ..store import codebooks_fingerprint
from .best import Best, Rows
from .blocks import BlockReader, Visit
from .budget import Budget
from .filters import Filter, mask_of
from .items import IdMap
from .plan import KINDS, Plan
from .probing import Probing
from .proof import QueryTables
from .ranges import LIMIT, Part, check_min_score, collect
from .threads import check_block, check_k, check_nprobe, check_threads, omp_threads
from .tune import OperatingPoint, operating_points, sample_queries_of

MEMORY = "1GB"
FAST_BATCH = 4  # minimum queries for packing blocks for FastScan
ALIGNED = 384  # keeps FastScan's blocks, of 32 to 128 codes, whole
_SAMPLE = 128  # sample queries
_IDS = 1 << 20  # ids per block of a scan

Asked = list[tuple[int, NDArray[np.int64] | None]]
"""Lists, each with the rows of the queries that probe it (None: all)."""


class FileIndex:
    """An index file searched in place, created by :func:`open_file`. The file must not change.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if the sidecar names it.
        budget: memory budget of a search.
        lists: number of lists; 0 if there are none.
        nprobe: default number of lists to probe; 0 if there are none.
        points: operating points of the last :meth:`tune`.

    Raises:
        DataError: an empty index.
        MismatchError: the sidecar belongs to another file.
    """

    def __init__(self, source: IndexFile, header: Header, budget: Budget) -> None:
        path, stated = source.path, read_sidecar(source.path)
        self.path = path
        self.budget = budget
        self.ntotal = header.n
        self.codebooks = header.codebooks
        self.M, self.K, self.d = (int(size) for size in header.codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(header.codebooks)
        self.model_fingerprint: str | None = None
        # Recorded by streaming builds: whether ids ascend in every list, which determines the order of ties.
        ascending = False
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != source.size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was intended"
                )
            ascending = stated["extra"].get("ascending") is True
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        self._header = header
        self._source = source
        self._probing = None if header.centroids is None else Probing(header.centroids, header.sizes)
        self.lists = 0 if self._probing is None else len(header.sizes)
        self.nprobe = min(header.nprobe, self.lists)
        self.points: tuple[OperatingPoint, ...] = ()
        self._blocks = BlockReader(source, header, ascending=ascending)

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Search options."""
        return KINDS["ivf" if self.lists else "exact"]

    @property
    def sizes(self) -> Ids:
        """Items per list, int64 [lists]; without lists a single one."""
        return self._header.sizes

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{'disk-ivf' if self.lists else 'disk'}, {self.ntotal:,} items in place"

    def close(self) -> None:
        """Close the file, also at the end of a ``with`` block; searches then fail."""
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
        """Context of a search that checks that the file is unchanged.

        Raises:
            UsageError: after :meth:`close`.
            DataError: the file was written to since it was opened.
        """
        self._check_file()
        try:
            yield
        except Exception:
            self._check_file()  # a modified file may cause any error
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
        lists: Ids | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query; with lists, of the nearest ``nprobe``, and more if these have fewer than ``k`` items.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal; if fewer items pass a filter, rows are padded with score -inf and id -1.
            nprobe: lists to probe (default: :attr:`nprobe`); all lists give the exact result.
            where, threads: as :meth:`.memory.MemoryIndex.search`.
            block: queries per block; codes are read once per block.
            lists: int64 [Q, any], lists to probe per query, padded with -1: for a shard, whose index chooses them.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``block`` out of range, or too small a budget.
            DataError: invalid queries, filter or codes; the file was modified since it was opened.
        """
        queries, k, workers, block = self._prelude(xq, k, threads, block)
        nprobe = self.check_nprobe(nprobe)
        # k non-empty lists have k items, but a filter may leave too few
        most = self.lists if where is not None else min(self.lists, max(nprobe, k))
        block = self.budget.fewer(block, most if lists is None else lists.shape[1])
        count = self.count(where) if lists is None else None
        D = np.empty((len(queries), k), np.float32)
        found = np.empty((len(queries), k), np.int64)
        with self.unchanged(), omp_threads(threads):
            for start in range(0, len(queries), block):
                part = slice(start, start + block)
                near = self._near(queries[part], nprobe, k, count) if lists is None else lists[part]
                best = self._search(queries[part], k, self._asked(near), where, workers)
                D[part], found[part] = best.D, best.found
        return D, found

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
        block: int = 64,
        lists: Ids | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with a score of at least ``min_score``, as :meth:`.memory.MemoryIndex.range_search`.

        Results are in memory, in addition to the budget.

        Args:
            nprobe: search only this many of the nearest lists (default: all).
            lists: as :meth:`search`.

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        self.check_open()
        min_score = check_min_score(min_score)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        nprobe = self.lists if nprobe is None else self.check_nprobe(nprobe)
        count = None if nprobe == self.lists or lists is not None else self.count(where)
        # Without lists the file is read once for all queries.
        block = (
            self.budget.fewer(block, nprobe if where is None else self.lists) if self.lists else len(queries)
        )
        rows = self.budget.block_rows(1, block, 1)

        def parts() -> Iterator[Part]:
            for first in range(0, len(queries), block):
                some = queries[first : first + block]
                near = self._near(some, nprobe, 0, count) if lists is None else lists[first : first + block]
                for visit in self._visits(self._asked(near), rows):
                    held = self._blocks.read(visit, where, fast=True)
                    if held is None:
                        continue
                    asked = np.arange(len(some)) if visit.asked is None else visit.asked
                    # without lists one at a time, to limit memory
                    for own in [asked] if self.lists else asked[:, None]:
                        yield Part(own + first, held.search, held.ids_at)

        with self.unchanged(), omp_threads(threads):
            return collect(parts(), queries, min_score, limit)

    def _search(
        self,
        xq: Floats,
        k: int,
        asked: Asked,
        where: Filter | None,
        workers: int,
    ) -> Best:
        budget = self.budget
        keep = where is None and budget.resident(workers, len(xq), k)
        rows = budget.kept_rows(workers) if keep else budget.block_rows(workers, len(xq), k)
        # With consecutive ids a tie in a later block loses; else it might win.
        counting = self._header.id_starts is None
        best = Best(len(xq), k)
        tables = QueryTables.of(xq, self.codebooks) if self.K == 16 else None
        waiting: list[tuple[Rows, Floats, Ids, int]] = []

        def one(visit: Visit) -> None:
            faiss.omp_set_num_threads(1)  # for this thread only
            queries = len(xq) if visit.asked is None else len(visit.asked)
            held = self._blocks.read(visit, where, fast=queries >= FAST_BATCH or keep, keep=keep)
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
            for first in range(0, len(visits), wave):  # limits pending results to the number of threads
                for _ in pool.map(one, visits[first : first + wave]):
                    pass
                for result in waiting:
                    best.take(*result)
                waiting.clear()
        return best

    def _near(self, xq: Floats, nprobe: int, k: int, count: Callable[[Ids], Ids] | None) -> Ids | None:
        """Lists to probe per query; None without lists."""
        return None if self._probing is None else self._probing.lists(xq, nprobe, k, count)

    def _asked(self, nearest: Ids | None) -> Asked:
        """Each probed list with the rows of its queries; lists nearest to some query first."""
        if nearest is None:
            return [(0, None)]
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

    def _visits(self, asked: Asked, rows: int) -> Iterator[Visit]:
        """The lists in blocks of about this many rows, keeping FastScan's blocks whole."""
        rows = max(ALIGNED, rows // ALIGNED * ALIGNED)
        for number, queries in asked:
            size = int(self.sizes[number])
            for start in range(0, size, rows):
                yield Visit(number, start, min(size, start + rows), queries)

    def count(self, where: Filter | None) -> Callable[[Ids], Ids] | None:
        """Function from list numbers to the number of passing items; each list is scanned once. None without filter or lists."""
        if where is None or not self.lists:
            return None
        passing = np.full(self.lists, -1, np.int64)
        step = self.budget.rows_for(64, 1, 1, 1)

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

    def _prelude(
        self, xq: ArrayLike, k: int, threads: int | None, block: int
    ) -> tuple[Floats, int, int, int]:
        """Checked queries, k, number of threads, and queries per block within half of the budget.

        Raises as :meth:`.memory.MemoryIndex.search`.
        """
        self.check_open()
        k = check_k(k, self.ntotal)
        check_block(block)
        check_threads(threads)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        workers = min(threads or int(faiss.omp_get_max_threads()), os.cpu_count() or 1)
        return queries, k, workers, self.budget.queries(block, workers, k)

    # Lists ------------------------------------------------------------------------------------------------------------

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1, or there are no lists."""
        return check_nprobe(nprobe, self.nprobe, self.lists, str(self.path))

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists to probe, at most all. Raises as :meth:`check_nprobe`."""
        self.nprobe = self.check_nprobe(nprobe)

    def nearest_lists(self, xq: Floats, nprobe: int) -> Ids:
        """The nearest non-empty lists per query, nearest first: int64 [Q, min(nprobe, non-empty lists)]."""
        assert self._probing is not None
        return self._probing.nearest(xq, nprobe)

    @property
    def centroids(self) -> Floats | None:
        """Centroids float32 [lists, M*d]; None without lists."""
        return self._header.centroids

    def id_blocks(self, rows: int = _IDS) -> Iterator[Ids]:
        """Yield the ids of all items in file order, int64, in blocks of ``rows``."""
        with self.unchanged():
            for number, start, stop in self._spans(rows):
                yield self._header.ids(self._source, number, start, stop)

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id. Scans all ids."""
        with self.unchanged():
            for number, start, stop in self._spans(_IDS):
                at = np.flatnonzero(self._header.ids(self._source, number, start, stop) == item)
                if len(at):
                    row = start + int(at[0])
                    return np.asarray(self.codes(number, row, row + 1)[0])
        return None

    def _spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield list number, first row and end of blocks of all rows."""
        for number in np.flatnonzero(self.sizes).tolist():
            size = int(self.sizes[number])
            for start in range(0, size, rows):
                yield number, start, min(size, start + rows)

    def codes(self, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        return self._header.codes(self._source, number, start, stop)

    def sample_queries(self, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
        """Sample queries, in place of real ones (:func:`.tune.sample_queries_of`): float32 [min(n, ntotal), M*d]."""
        ends = np.cumsum(self.sizes)

        def codes_at(rows: Ids) -> Codes:
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
            return sample_queries_of(self.ntotal, codes_at, self.codebooks, n, noise=noise, seed=seed)

    def tune(
        self,
        recall: float,
        *,
        k: int = 10,
        queries: ArrayLike | None = None,
        threads: int | None = None,
    ) -> list[OperatingPoint]:
        """Set the smallest nprobe that reaches a recall, as :meth:`.memory.MemoryIndex.tune`."""
        check_recall(recall)
        if self._probing is None:
            raise UsageError(f"{self.path} has no lists, so no nprobe to tune: build it with kind 'ivf'")
        with self.unchanged():
            given = self.sample_queries() if queries is None else queries
            xq, k, workers, block = self._prelude(given, min(k, self.ntotal), threads, 1024)
            block = self.budget.fewer(block, self.lists)
            list_of = np.empty((len(xq), k), np.int32)
            for s in range(0, len(xq), block):
                asked = self._asked(self._near(xq[s : s + block], self.lists, k, None))
                list_of[s : s + block] = self._search(xq[s : s + block], k, asked, None, workers).list_of
            chosen, points = operating_points(
                self._probing, xq, k, list_of, recall, lambda n: self.search(xq, k, nprobe=n, threads=threads)
            )
        self.nprobe, self.points = chosen, tuple(points)
        return points


def open_file(path: str | Path, memory: str | int = MEMORY, *, rows: int | None = None) -> FileIndex:
    """Open an index file without reading its rows.

    Sizes and fingerprints are checked, but not its SHA-256, which would read the whole file.

    Args:
        memory: budget of a search: bytes, or ``"2GB"``.
        rows: maximum codes per block (default: by memory and speed).

    Raises:
        DataError: missing, damaged, empty, or not searchable in place.
        MismatchError: its sidecar belongs to another file.
        UsageError: an invalid budget.
    """
    budget = parse_bytes(memory)
    if rows is not None:
        check_count(rows, "rows at a time")
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is not a file: an index file is needed (gpq index, or faiss.write_index)")
    source = IndexFile(path)
    try:
        header = read_header(source)
        return FileIndex(source, header, Budget(budget, header, rows))
    except BaseException:
        source.close()
        raise

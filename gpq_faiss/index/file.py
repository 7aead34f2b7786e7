"""Searching an index that stays on disk: codes are read in blocks, each searched exactly.

Opening reads the header alone. A search holds a block of codes a thread, packs it for FastScan (or takes float tables
where a batch is too small to pay for that), and merges the best of all blocks: equal to a search in memory to the bit.
What a block must beat to matter is known from the blocks before, which makes most proofs short. A file of the fastscan
form needs no packing; and where the budget holds all packed codes, they are kept for the searches to come.

A search looks before and after whether the file was written to, and fails if it was.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..codes.bits import check_codes
from ..codes.blocks import PackedCodes
from ..codes.checks import Floats, Ids, check_vectors
from ..codes.keys import read_keys
from ..errors import DataError, MismatchError, UsageError
from ..faissio.io import read_sidecar, sidecar_path
from ..faissio.rowfile import IndexFile, RowFile, read_frame
from ..inputs import parse_bytes
from ..store import codebooks_fingerprint
from .filters import Filter, mask_of
from .items import Items
from .proof import Known, ProvenSearch
from .ranges import Part, check_least, collect
from .scanners import FastScan
from .threads import check_block, check_k, check_threads, omp_threads

MEMORY = "1GB"
LEAST_ROWS = 4096
FAST_BATCH = 4  # queries from which packing a block for FastScan pays
MOST_ROWS = 1 << 21  # a block that is read anew for every batch, and one that is kept (measured)
KEPT_ROWS = 1 << 23
ALIGNED = 384
_TINY = np.finfo(np.float32).tiny


class Best:
    """The best so far of some queries, filled part by part. Safe to use from several threads.

    Attributes:
        D: float32 [Q, k], larger first; -inf where nothing was found.
        found: int64 [Q, k], equal scores by ascending id; -1 there.
        part: int32 [Q, k], the part that each came from.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.D = np.full((queries, k), -np.inf, np.float32)
        self.found = np.full((queries, k), -1, np.int64)
        self.part = np.zeros((queries, k), np.int32)
        self._lock = threading.Lock()

    def floor(self, rows: Any, *, ties: bool) -> Floats:
        """What an item must exceed to enter, float32; with ``ties`` one of the same score might, having a smaller id."""
        with self._lock:
            kth: Floats = self.D[rows, -1]
        if not ties:
            return kth
        # not the number next to 0, which programs that flush such small ones take for 0
        return np.where(kth == 0, -_TINY, np.nextafter(kth, np.float32(-np.inf)))

    def take(self, rows: Any, scores: Floats, ids: Ids, part: int = 0) -> None:
        """Merge results [n, any] of the queries ``rows`` in a part; missing ones are -inf and -1."""
        with self._lock:
            k = self.D.shape[1]
            rows = np.arange(len(self.D))[rows]
            enters = scores >= self.D[rows, -1:]
            new = enters.any(axis=1)
            if not new.any():  # as mostly
                return
            few = int(enters.sum(axis=1).max())
            rows, scores, ids = rows[new], scores[new, :few], ids[new, :few]
            D = np.concatenate([self.D[rows], scores], axis=1)
            found = np.concatenate([self.found[rows], ids], axis=1)
            order = np.lexsort((found, -D), axis=1)[:, :k]
            self.D[rows] = np.take_along_axis(D, order, axis=1)
            self.found[rows] = np.take_along_axis(found, order, axis=1)
            parts = np.concatenate([self.part[rows], np.full(scores.shape, part, np.int32)], axis=1)
            self.part[rows] = np.take_along_axis(parts, order, axis=1)


class FileEngine:
    """What the engines of files have in common.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, where the sidecar names it.
        memory: budget in bytes.
    """

    kind: str

    def __init__(self, source: IndexFile, memory: int, codebooks: Floats, n: int) -> None:
        path = source.path
        stated = read_sidecar(path)
        self.path = path
        self.memory = memory
        self.ntotal = n
        self.codebooks = codebooks
        self.M, self.K, self.d = (int(size) for size in codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint: str | None = None
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != source.size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was meant"
                )
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        self._lock = threading.Lock()
        self._own = threading.local()
        self._handle = source

    def close(self) -> None:
        """Give the file back; nothing can be searched then. Also at the end of a ``with``."""
        self._handle.close()

    def check_open(self) -> None:
        """Raises UsageError: after :meth:`close`."""
        if self._handle.closed:
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
        self._handle.check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def way(self) -> str:
        """How it searches, for people."""
        return f"{self.kind}, {self.ntotal:,} items in place"

    def scan(self, rows: int) -> FastScan:
        """This thread's scanner, to be filled; its memory is used again and again."""
        scan: FastScan | None = getattr(self._own, "scan", None)
        if scan is None:
            scan = self._own.scan = FastScan.empty(self.codebooks, rows)
        return scan

    def fill(self, scan: FastScan, n: int, at: int) -> PackedCodes:
        """``n`` codes that lie packed at byte ``at`` of the file, read into a scanner.

        Raises:
            DataError: the file has become shorter.
        """

        return scan.fill(n, lambda held: self._handle.fill(held, at))

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

    def prelude(self, xq: ArrayLike, k: int, threads: int | None, block: int) -> tuple[Floats, int, int, int]:
        """Checked queries, k, number of threads, and queries at a time, for which half of the budget may go.

        Raises as :meth:`.memory.Engine.search`.
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


class DiskEngine(FileEngine):
    """An index file in rows, searched in place. Made by :func:`open_disk`; the file must stay as it is."""

    kind = "disk"

    def __init__(self, source: IndexFile, memory: int, file: RowFile) -> None:
        self._file = file
        super().__init__(source, memory, file.codebooks, file.n)
        self._first: dict[int, int] = {}
        self._kept: dict[tuple[int, int], ProvenSearch] = {}

    def block_rows(self, threads: int, queries: int, k: int) -> int:
        """Rows a block: what one row takes in memory, in each thread. Raises as :meth:`rows_for`."""
        size = self._file.code_size
        row = (
            size * 5 + 40
            if self._file.id_start is not None
            else size * (3 if self._file.form == "fastscan" else 4)
        )
        rows = self.rows_for(row, threads, queries, k)
        return max(LEAST_ROWS, min(rows, -(-self.ntotal // threads)))

    def resident(self, threads: int, queries: int, k: int) -> bool:
        """Whether the budget holds all codes packed, beside a block a thread: they are then kept for later searches.

        The file must be without an id map, or its ids would have to be kept as well.
        """
        if self._file.id_start is not None or self.K != 16:
            return False
        size = self._file.code_size
        rows = self.kept_rows(threads)
        needed = int(self.ntotal * size * 1.05) + threads * rows * size * 3
        return self.memory - needed > queries * self.query_bytes(threads, k)

    def kept_rows(self, threads: int) -> int:
        """Rows a block that is kept."""
        return max(LEAST_ROWS, min(KEPT_ROWS, -(-self.ntotal // threads)))

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        where: Filter | None = None,
        threads: int | None = None,
        block: int = 1024,
    ) -> tuple[Floats, Ids]:
        """As :meth:`.memory.Engine.search`; the file is read once for every ``block`` queries.

        Raises:
            UsageError, DataError: see there; codes in the file that no model has; a budget that is too small; the file
                was written to since it was opened.
        """
        queries, k, workers, block = self.prelude(xq, k, threads, block)
        D = np.empty((len(queries), k), np.float32)
        found = np.empty((len(queries), k), np.int64)
        with self.unchanged():
            for start in range(0, len(queries), block):
                part = slice(start, start + block)
                D[part], found[part] = self._search(queries[part], k, where, workers)
        return D, found

    def _search(self, xq: Floats, k: int, where: Filter | None, workers: int) -> tuple[Floats, Ids]:
        keep = where is None and self.resident(workers, len(xq), k)
        rows = self.kept_rows(workers) if keep else self.block_rows(workers, len(xq), k)
        rows = max(
            ALIGNED, rows // ALIGNED * ALIGNED
        )  # FastScan's own blocks, of 32 to 128 codes, stay whole
        counting = self._file.id_start is None
        fast = len(xq) >= FAST_BATCH or self._file.form == "fastscan" or keep
        stages = ("fastscan",) if fast else ("fused",)
        best = Best(len(xq), k)
        known = Known.of(xq, self.codebooks) if self.K == 16 else None
        every = slice(None)

        def one(start: int) -> None:
            faiss.omp_set_num_threads(1)  # of this thread alone
            stop = min(self.ntotal, start + rows)
            # Ids that count up: a tie in a later block loses, and earlier blocks are done. Else it might win.
            floor = best.floor(every, ties=not counting)
            if where is None and counting:
                search, own = self._block(start, stop, stages, keep), None
            else:
                items = self.items(start, stop)
                if where is not None:
                    items = items.keep(mask_of(where, items))
                if not len(items):
                    return
                own = items.ids
                search = ProvenSearch(items.codes, self.codebooks, stages, first=self._first)
            n = min(k, search.n)
            step = search.block_rows(n)
            for s in range(0, len(xq), step):
                part = slice(s, s + step)
                scores, at = read_keys(
                    search.search_keys(xq[part], n, floor[part], None if known is None else known.take(part))
                )
                ids = at + start if own is None else own[at]
                ids[at < 0] = -1
                waiting.append((start, part, scores, ids))

        waiting: list[tuple[int, slice, Floats, Ids]] = []
        starts = range(0, self.ntotal, rows)
        with ThreadPoolExecutor(workers) as pool:
            for first in range(0, len(starts), workers):  # no more results wait than there are threads
                for _ in pool.map(one, starts[first : first + workers]):
                    pass
                for _, part, scores, ids in waiting:
                    best.take(part, scores, ids)
                waiting.clear()
        return best.D, best.found

    def _block(self, start: int, stop: int, stages: tuple[str, ...], keep: bool) -> ProvenSearch:
        """A search of rows whose ids count up, kept where it may be."""
        name = (start, stop)
        with self._lock:
            if name in self._kept:
                return self._kept[name]
        if self._file.form == "fastscan":
            scan = FastScan.empty(self.codebooks, self._file.rows) if keep else self.scan(self._file.rows)
            codes = self.fill(scan, stop - start, self._file.packed_at(start))
            search = ProvenSearch(codes, self.codebooks, stages, first=self._first, fast=scan)
        else:
            plain = self._file.codes(self._handle, start, stop)
            plain = check_codes(plain, self.M, self.K, what=str(self.path))
            search = ProvenSearch(plain, self.codebooks, stages, first=self._first)
        if keep:
            search.keep_packed()
            with self._lock:
                if any(stop > a and b > start for a, b in self._kept):
                    self._kept.clear()  # blocks of another size, of a search with other threads
                self._kept[name] = search
        return search

    def range_search(
        self,
        xq: ArrayLike,
        least: float,
        *,
        where: Filter | None = None,
        limit: int = 10_000_000,
        threads: int | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """As :meth:`.memory.Engine.range_search`; the results are held in memory, beside the budget.

        Raises:
            UsageError, DataError: see there.
        """
        self.check_open()
        least = check_least(least)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        rows = self.block_rows(1, len(queries), 1)

        def parts() -> Iterator[Part]:
            for start in range(0, self.ntotal, rows):
                items = self.items(start, min(self.ntotal, start + rows))
                if where is not None:
                    items = items.keep(mask_of(where, items))
                if len(items):
                    search = ProvenSearch(items.codes, self.codebooks)
                    for q in range(len(queries)):  # one at a time, for memory's sake
                        yield np.array([q]), search, items.ids_at

        with self.unchanged(), omp_threads(threads):
            return collect(parts(), queries, least, limit)

    def items(self, start: int, stop: int) -> Items:
        """Rows ``start:stop`` of the file, checked and in the order of their ids.

        Raises:
            DataError: bits set that no code of this model has.
        """
        codes = check_codes(self._file.codes(self._handle, start, stop), self.M, self.K, what=str(self.path))
        return Items.ordered(codes, self._file.ids(self._handle, start, stop))


def open_disk(path: str | Path, memory: Any = MEMORY) -> Any:
    """Open an index file without reading its rows: forms in rows here, forms with lists by :mod:`.listed`.

    Its SHA-256 is not compared, which would read all of it; sizes and fingerprints are.

    Args:
        memory: for the arrays of a search: bytes, or ``"2GB"``.

    Returns:
        A :class:`DiskEngine`, or a :class:`.listed.ListEngine` where the file has lists.

    Raises:
        DataError: missing, damaged, empty, or of a form that cannot be searched in place.
        MismatchError: its sidecar is of another file.
        UsageError: an unreadable budget.
    """
    from ..faissio.listfile import has_lists, read_lists
    from .listed import ListEngine

    budget = parse_bytes(memory)
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is no file: an index file is needed (gpq index, or faiss.write_index)")
    source = IndexFile(path)
    try:
        if has_lists(path):
            return ListEngine(source, budget, read_lists(source))
        return DiskEngine(source, budget, read_frame(source))
    except BaseException:
        source.close()
        raise

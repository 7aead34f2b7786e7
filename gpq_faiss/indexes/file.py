"""An index over a file that stays on disk.

Opening reads only the header. A file of kind ``ivf`` is searched by its lists: those that are visited are read and kept, as far as the
memory budget allows. Of other files all codes are read for every batch of queries; :func:`gpq_faiss.stages.index.index` converts them.
Results equal those of a search in memory.

A search checks before and after whether the file was modified, and fails if so.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.bits import check_codes
from ..codes.blocks import unpack_blocks
from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..codes.scores import lookup, lookup_columns, lookup_tables, score_tables
from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import Header, read_header
from ..faissio.io import read_sidecar, sidecar_path
from ..faissio.source import IndexFile
from ..faissio.storage import empty_lists
from ..inputs import parse_bytes
from ..store import codebooks_fingerprint
from .best import Best
from .codeword_lists import CodewordLists, ListSearch
from .filters import Filter, mask_of
from .items import IdMap, Items
from .ranges import LIMIT, check_min_score, joined, too_many
from .threads import check_block, check_k, check_nprobe, check_threads, omp_threads

MEMORY = "1GB"
_IDS = 1 << 20  # ids per block of a scan
_MANY = 16  # queries from which a block of codes is sorted into lists
_ROW = 64  # bytes per row of a block: codes, ids, columns, scores
_LEAST_ROWS, _MOST_ROWS = 4096, 1 << 20


class StoredLists(ListSearch):
    """Search of the lists in a file. A list that is visited is read into Faiss, and stays there as long as there is room.

    Args:
        source, header: of a file of kind ``ivf``.
        memory: bytes for lists.
    """

    def __init__(self, source: IndexFile, header: Header, memory: int) -> None:
        super().__init__(header.codebooks)
        words = header.words
        assert words is not None
        self._source, self._header, self._words, self._memory = source, header, words, memory
        self._number = np.argsort(words.keys)  # lists by their names, as in the file only the first are not
        sizes = header.sizes[self._number]
        heads = words.keys[self._number].astype(np.uint64)
        if words.P:
            heads <<= np.uint64(64 - 4 * words.P)
        self._arrange(np.append(0, np.cumsum(sizes)), heads, np.full(len(sizes), words.P), words.P)
        # Faiss keeps ids of 8 bytes, and rounds the size of a list up.
        self._cost = 2 * -(-sizes // header.rows) * header.block + 8 * sizes
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        rest = len(self.Z) - self.P
        units = np.broadcast_to(np.eye(16, dtype=np.float32), (rest, 16, 16))
        self._index = empty_lists(np.zeros((self.lists, rest * 16), np.float32), units)
        self._index.ntotal = self.distinct
        self._there = np.zeros(self.lists, np.bool_)
        self._used = 0

    def _too_large(self, lists: Ids) -> bool:
        return bool(len(lists)) and int(self._cost[lists].max()) > self._memory

    def _scanning(self, lists: Ids) -> Iterator[tuple[Any, slice]]:
        with self._lock:
            needed = int(self._cost[lists[~self._there[lists]]].sum())
            if self._used + needed <= self._memory:
                self._load(lists)
                yield self._index, slice(None)
                return
            ends = np.cumsum(self._cost[lists])
            start = 0
            while start < len(lists):
                before = int(ends[start - 1]) if start else 0
                stop = max(start + 1, int(np.searchsorted(ends, before + self._memory, side="right")))
                self._clear()
                self._load(lists[start:stop])
                yield self._index, slice(start, stop)
                start = stop

    def _load(self, lists: Ids) -> None:
        held, header = self._index.invlists, self._header
        for number in lists[~self._there[lists]].tolist():
            n, at = int(self._sizes[number]), int(self._number[number])
            if n:
                held.resize(number, n)
                size = -(-n // header.rows) * header.block
                self._source.fill(
                    faiss.rev_swig_ptr(held.get_codes(number), size), int(header.code_starts[at])
                )
                faiss.rev_swig_ptr(held.get_ids(number), n)[:] = np.arange(
                    self._begin[number], self._begin[number + 1]
                )
            self._there[number] = True
            self._used += int(self._cost[number])

    def _parts(self, places: Ids) -> Iterator[tuple[int, Ids, NDArray[np.intp]]]:
        """Yield lists of the file, the rows of some places in each, and which of the places these are."""
        lists = np.searchsorted(self._begin, places, side="right") - 1
        for number in np.unique(lists).tolist():
            at = np.flatnonzero(lists == number)
            yield int(self._number[number]), places[at] - self._begin[number], at

    def _span(self, start: int, stop: int) -> Codes:
        parts = [np.empty((0, self._header.code_size), np.uint8)]
        number = int(np.searchsorted(self._begin, start, side="right")) - 1
        while start < stop:
            first, end = int(self._begin[number]), int(self._begin[number + 1])
            last = min(stop, end)
            if last > start:
                parts.append(
                    self._header.codes(self._source, int(self._number[number]), start - first, last - first)
                )
            start, number = max(start, last), number + 1
        return np.concatenate(parts)

    def _at(self, places: Ids) -> Codes:
        header, block = self._header, self._header.block
        blocks = np.empty((len(places), block), np.uint8)
        of = np.searchsorted(self._begin, places, side="right") - 1
        rows = places - self._begin[of]
        at = rows // header.rows
        with self._lock:
            for number in np.unique(of).tolist():
                own = np.flatnonzero(of == number)
                if self._there[number]:
                    packed = self._index.invlists.get_codes(number)
                    held = faiss.rev_swig_ptr(packed, -(-int(self._sizes[number]) // header.rows) * block)
                    blocks[own] = held.reshape(-1, block)[at[own]]
                    continue
                start = int(header.code_starts[self._number[number]])
                for i in own.tolist():
                    self._source.fill(blocks[i], start + int(at[i]) * block)
        every = unpack_blocks(blocks.reshape(-1), len(places) * header.rows, header.held, header.rows)
        stored = every[np.arange(len(places)) * header.rows + rows % header.rows]
        return self._words.whole(stored, self._number[of])

    def _expand(self, scores: Floats, places: Ids, k: int | None, allowed: Any) -> tuple[Floats, Ids]:
        ids = np.empty(len(places), np.int64)
        for number, rows, at in self._parts(places):
            ids[at] = self._header.some_ids(self._source, number, rows)
        order = np.lexsort((ids, -scores))[:k]
        return scores[order], ids[order]

    def allowed(self, where: Filter) -> _Passing:
        """The items that pass a filter, for searches."""
        return _Passing(self, where)

    def ids_of(self, number: int) -> tuple[int, Ids]:
        """The first place of a list, and its ids."""
        n = int(self._sizes[number])
        return int(self._begin[number]), self._header.ids(self._source, int(self._number[number]), 0, n)


class _Passing:
    """As :class:`.codeword_lists.Allowed`; the ids of a list are read and tested when it is visited."""

    def __init__(self, held: StoredLists, where: Filter) -> None:
        self._held, self._where = held, where
        self._bits = np.zeros(-(-held.distinct // 8), np.uint8)
        self._known = np.zeros(held.lists, np.bool_)
        self._lock = threading.Lock()

    def few(self, most: int) -> Ids | None:
        return None

    def ready(self, lists: Ids) -> None:
        with self._lock:
            for number in lists[~self._known[lists]].tolist():
                start, ids = self._held.ids_of(number)
                order = np.argsort(ids, kind="stable")
                at = start + order[mask_of(self._where, IdMap(len(ids), ids[order]))]
                np.bitwise_or.at(self._bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))
                self._known[number] = True

    def span(self, start: int, stop: int) -> NDArray[np.bool_]:
        bits = np.unpackbits(self._bits[start >> 3 : -(-stop // 8)], bitorder="little")
        return bits[start & 7 : (start & 7) + stop - start].astype(np.bool_)

    @property
    def selector(self) -> Any:
        return faiss.IDSelectorBitmap(self._held.distinct, faiss.swig_ptr(self._bits))


class FileIndex:
    """An index file searched in place, created by :func:`open_file`. The file must not change.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if the sidecar names it.
        memory: budget of a search in bytes.

    Raises:
        DataError: an empty index.
        MismatchError: the sidecar belongs to another file.
        UsageError: too small a budget.
    """

    def __init__(self, source: IndexFile, header: Header, memory: int) -> None:
        path, stated = source.path, read_sidecar(source.path)
        self.path = path
        self.memory = memory
        self.ntotal = header.n
        self.codebooks = header.codebooks
        self.M, self.K, self.d = (int(size) for size in header.codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(header.codebooks)
        self.model_fingerprint: str | None = None
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != source.size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was intended"
                )
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        least = _LEAST_ROWS * _ROW
        if memory < least:
            raise UsageError(f"a memory budget of {memory:,} bytes is too small: at least {least:,}")
        self._header, self._source = header, source
        self.lists = None if header.words is None else StoredLists(source, header, memory * 3 // 4)

    # What it is -------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One-line description of the search."""
        lists = "" if self.lists is None else f", {self.lists.lists:,} lists"
        return f"{self.ntotal:,} items in place{lists}"

    def close(self) -> None:
        """Close the file, also at the end of a ``with`` block; searches then fail."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
        if self._source.closed:
            raise UsageError(f"{self.path} was closed: open it again")
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
        """The ``k`` best items of every query.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal; if fewer items pass a filter, rows are padded with score -inf and id -1.
            nprobe, where, threads: as :meth:`.memory.MemoryIndex.search`.
            block: queries per block; without lists codes are read once per block.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``block`` out of range.
            DataError: invalid queries, filter or codes; the file was modified since it was opened.
        """
        self._check_file()
        k = check_k(k, self.ntotal)
        check_block(block)
        check_nprobe(nprobe)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        with self.unchanged(), omp_threads(threads):
            if self.lists is not None:
                allowed = None if where is None else self.lists.allowed(where)
                return self.lists.search(queries, k, allowed=allowed, nprobe=nprobe, threads=threads)
            best = Best(len(queries), k)
            for start in range(0, len(queries), block):
                self._scan(queries[start : start + block], slice(start, start + block), best, where, threads)
        return best.D, best.found

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """As :meth:`.memory.MemoryIndex.bound`."""
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        check_nprobe(nprobe)
        if self.lists is None:
            return np.full(len(queries), -np.inf, np.float32)
        return self.lists.bound(queries, k, nprobe)

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with a score of at least ``min_score``, as :meth:`.memory.MemoryIndex.range_search`.

        Results are in memory, in addition to the budget.

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        self._check_file()
        min_score = check_min_score(min_score)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        with self.unchanged(), omp_threads(threads):
            if self.lists is None:
                return self._scan_range(queries, min_score, where, limit, threads)
            allowed = None if where is None else self.lists.allowed(where)
            return joined(
                (self.lists.range_search(query, min_score, limit, allowed=allowed) for query in queries),
                min_score,
                limit,
            )

    def _scan(self, xq: Floats, rows: slice, best: Best, where: Filter | None, threads: int | None) -> None:
        """Merge the best of all codes into ``rows`` of ``best``."""
        k = best.D.shape[1]
        prepared = lookup_tables(score_tables(xq, self.codebooks))
        paired = self.K <= 16 and self.M > 1

        def one(items: Items) -> None:
            n = min(k, len(items))
            if len(xq) >= _MANY:
                scores, at = CodewordLists(items.codes, self.codebooks).search(xq, n, threads=1)
                best.take(rows, scores, items.ids_at(at))
                return
            columns = lookup_columns(items.codes, self.M, self.K)
            for q, table in enumerate(prepared):
                row = slice(rows.start + q, rows.start + q + 1)
                scores = lookup(table, columns, paired=paired)
                at = np.flatnonzero(scores >= best.D[row, -1])
                if len(at) > n:
                    reached = scores[at]
                    at = at[reached >= np.partition(reached, len(at) - n)[len(at) - n]]
                at = at[np.argsort(-scores[at], kind="stable")][:n]
                if len(at):
                    best.take(row, scores[None, at], items.ids_at(at)[None])

        self._over_blocks(one, where, threads)

    def _scan_range(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> tuple[Ids, Floats, Ids]:
        prepared = lookup_tables(score_tables(xq, self.codebooks))
        paired = self.K <= 16 and self.M > 1
        found: list[list[tuple[Floats, Ids]]] = [[] for _ in xq]
        total, lock = 0, threading.Lock()

        def one(items: Items) -> None:
            nonlocal total
            columns = lookup_columns(items.codes, self.M, self.K)
            for q, table in enumerate(prepared):
                scores = lookup(table, columns, paired=paired)
                at = np.flatnonzero(scores >= min_score)
                with lock:
                    total += len(at)
                    if total > limit:
                        raise too_many(min_score, limit)
                    found[q].append((scores[at], items.ids_at(at)))

        self._over_blocks(one, where, threads)

        def ordered() -> Iterator[tuple[Floats, Ids]]:
            for parts in found:
                scores = np.concatenate([np.empty(0, np.float32), *(part for part, _ in parts)])
                ids = np.concatenate([np.empty(0, np.int64), *(part for _, part in parts)])
                order = np.lexsort((ids, -scores))
                yield scores[order], ids[order]

        return joined(ordered(), min_score, limit)

    def _over_blocks(self, run: Callable[[Items], None], where: Filter | None, threads: int | None) -> None:
        """``run`` for all items that pass, in blocks within the budget, several threads at a time."""
        check_threads(threads)
        workers = min(threads or int(faiss.omp_get_max_threads()), os.cpu_count() or 1)
        step = max(_LEAST_ROWS, min(_MOST_ROWS, self.memory // (_ROW * workers), -(-self.ntotal // workers)))
        step = -(-step // 128) * 128  # keeps FastScan's blocks whole

        def one(start: int) -> None:
            faiss.omp_set_num_threads(1)  # for this thread only
            stop = min(self.ntotal, start + step)
            codes = check_codes(self.codes(0, start, stop), self.M, self.K, what=str(self.path))
            ids = self._header.ids(self._source, 0, start, stop)
            items = Items.ordered(codes, ids)
            if where is not None:
                items = items.keep(mask_of(where, items))
            if len(items):
                run(items)

        with ThreadPoolExecutor(workers) as pool:
            for _ in pool.map(one, range(0, self.ntotal, step)):
                pass

    # Rows -------------------------------------------------------------------------------------------------------------

    def id_blocks(self, rows: int = _IDS) -> Iterator[Ids]:
        """Yield the ids of all items in file order, int64, in blocks of ``rows``."""
        with self.unchanged():
            for number, start, stop in self.spans(rows):
                yield self._header.ids(self._source, number, start, stop)

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id. Scans all ids."""
        with self.unchanged():
            for number, start, stop in self.spans(_IDS):
                at = np.flatnonzero(self._header.ids(self._source, number, start, stop) == item)
                if len(at):
                    row = start + int(at[0])
                    return np.asarray(self.codes(number, row, row + 1)[0])
        return None

    def spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield list number, first row and end of blocks of all rows; without lists there is one."""
        for number in np.flatnonzero(self._header.sizes).tolist():
            size = int(self._header.sizes[number])
            for start in range(0, size, rows):
                yield number, start, min(size, start + rows)

    def codes(self, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        return self._header.codes(self._source, number, start, stop)


def open_file(path: str | Path, memory: str | int = MEMORY) -> FileIndex:
    """Open an index file without reading its rows.

    Sizes and fingerprints are checked, but not its SHA-256, which would read the whole file.

    Args:
        memory: budget of a search: bytes, or ``"2GB"``.

    Raises:
        DataError: missing, damaged, empty, or not searchable in place.
        MismatchError: its sidecar belongs to another file.
        UsageError: an invalid budget.
    """
    budget = parse_bytes(memory)
    if Path(path).exists() and not Path(path).is_file():
        raise DataError(f"{path} is not a file: an index file is needed (gpq index, or faiss.write_index)")
    source = IndexFile(path)
    try:
        return FileIndex(source, read_header(source), budget)
    except BaseException:
        source.close()
        raise

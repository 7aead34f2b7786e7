"""Exact search of lists in a file: what is visited is read, and kept as far as a budget allows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ..codes.bits import check_codes
from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError, UsageError
from ..faissio.header import Header
from .base import too_many
from .codeword_lists import NO_FILTER, ListSearch, all_reaching, best_first, columns_of, grouped, names_of
from .filters import Filter, mask_of
from .items import IdMap
from .near import BLOCK, put
from .threads import in_parallel, workers

_READING = 48  # bytes per item while it is read and sorted, beside three copies of its code
_FIRST_READ, _MOST_READ = 1 << 16, 1 << 22  # items
_KEPT = 128  # items of equal codes that are kept at least
_ALL = 1 << 62
_BLOCK = 1024  # queries for which a list is read once
_BOUNDS = 1 << 24  # bounds of lists that are held at a time


class StoredLists(ListSearch):
    """Search of an index file by id. Lists of kind ``ivf`` are sorted as they are read; the rows of other files are one list, not sorted.

    Args:
        header: of the file.
        memory: budget in bytes. A list that needs more than a part of it is read in pieces.

    Attributes:
        read: bytes of codes and ids that searches have read so far: for benchmarks.
    """

    def __init__(self, header: Header, memory: int) -> None:
        self._header, self.read = header, 0
        words = header.words
        keys = np.zeros(1, np.int64) if words is None else words.keys
        self._number = np.argsort(keys, kind="stable")  # the first lists of a file are not in their order
        P = 0 if words is None else words.P
        super().__init__(header.codebooks, P, names_of(keys[self._number], P), header.sizes[self._number])
        # A piece is what is read at once: a list, or a part of a long one. FastScan's blocks stay whole.
        self._piece = max(128, min(_MOST_READ, memory // 4 // (_READING + 3 * self.T)) // 128 * 128)
        count = -(-self.sizes // self._piece)
        self._first = np.append(0, np.cumsum(count))  # of each list
        self._list = np.repeat(np.arange(self.lists), count)
        self._row = (np.arange(len(self._list)) - self._first[self._list]) * self._piece
        self._size = np.minimum(self._piece, self.sizes[self._list] - self._row)
        room = max(self._piece, memory // 2 // (self.T + 13))
        self._room = n = min(header.n, room, (1 << 32) - 1)
        blocks = np.empty((-(-n // BLOCK), self.T, BLOCK), np.uint8)
        self._rows = blocks, np.empty(n + 1, np.uint32), np.empty(n, np.int64)
        self._ends = np.zeros(len(self._list) + 1, np.int64)
        self._slots = np.zeros(len(self._list) + 1, np.int64)
        self._at = np.empty(len(self._list), np.int64)
        self._pieces = self._first, self._at
        self._lock, self._searching = threading.RLock(), False
        self._needed, self._passing = _KEPT, NO_FILTER
        self._where: Filter | None = None
        self._clear()

    # Reading ----------------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._keep = self._needed
        self._at[:] = -1
        self._held = self._tested = 0

    def _resident(self, lists: Ids) -> Iterator[Ids]:
        """The pieces of lists: first those that are there, then those that have to be read, some at a time."""
        counts = self._first[lists + 1] - self._first[lists]
        ends = np.cumsum(counts)
        pieces = np.arange(counts.sum()) + np.repeat(self._first[lists] - (ends - counts), counts)
        there = self._at[pieces] >= 0
        if there.any():
            self._test()
            yield pieces[there]
        pieces = pieces[~there]
        ends, at = np.cumsum(self._size[pieces]), 0
        while at < len(pieces):
            before = int(ends[at - 1]) if at else 0
            stop = int(np.searchsorted(ends, before + self._piece, side="right"))
            part = pieces[at : max(at + 1, stop)]
            try:
                self._read(part)
            except BaseException:  # also an interruption: what is half there must not be searched
                self._clear()
                raise
            self._test()
            yield part
            at += len(part)

    def _test(self) -> None:
        """Test the items of what was read since the last time."""
        if self._where is None:
            return
        for number in range(self._tested, self._held):
            slots = slice(*self._slots[number : number + 2])
            ids = self._rows[2][slots]
            order = np.argsort(ids, kind="stable")
            own = np.empty(len(ids), np.bool_)
            own[order] = mask_of(self._where, IdMap(len(ids), ids[order]))
            self._passing[slots] = own
        self._tested = self._held

    def _piece_of(self, piece: int) -> tuple[Codes, Ids, Ids]:
        """The distinct codes of a piece in order, where the items of each begin, and the items; of kinds without lists all as they are."""
        number, start = int(self._number[self._list[piece]]), int(self._row[piece])
        stop = start + int(self._size[piece])
        codes, items = self._header.codes(number, start, stop), self._header.ids(number, start, stop)
        self.read += codes.nbytes + items.nbytes
        what = str(self._header.source.path)
        columns = columns_of(check_codes(codes, self.M, self.K, what=what), self.M, self.K)
        if self._header.words is None:
            return columns, np.arange(len(items)), items
        if not (items[1:] > items[:-1]).all():
            order = np.argsort(items, kind="stable")
            columns, items = columns.take(order, axis=0), items.take(order)
        order, starts = grouped(columns[:, self.P // 2 :])
        columns = columns.take(order.take(starts), axis=0)
        # Of equal codes the smallest ids.
        groups = np.diff(starts, append=len(order))
        kept = np.arange(len(order)) - np.repeat(starts, groups) < self._keep
        return columns, np.append(0, np.cumsum(np.minimum(groups, self._keep)))[:-1], items.take(order[kept])

    def _read(self, pieces: Ids) -> None:
        """Append pieces; first forget all others if there is no room."""
        parts = [self._piece_of(piece) for piece in pieces.tolist()]
        columns, items = (np.concatenate([part[i] for part in parts]) for i in (0, 2))
        begin, slots = (np.cumsum([0] + [len(part[i]) for part in parts]) for i in (0, 2))
        starts = np.concatenate([part[1] + slot for part, slot in zip(parts, slots.tolist(), strict=False)])
        blocks, firsts, members = self._rows
        if self._slots[self._held] + len(items) > self._room:
            self._clear()
        slot, row = int(self._slots[self._held]), int(self._ends[self._held])
        put(blocks, row, columns)
        firsts[row : row + len(columns) + 1] = slot + np.append(starts, len(items))
        members[slot : slot + len(items)] = items
        held = slice(self._held, self._held + len(pieces) + 1)
        self._ends[held] = row + begin
        self._slots[held] = slot + slots
        self._at[pieces] = np.arange(self._held, self._held + len(pieces))
        self._held += len(pieces)

    @contextlib.contextmanager
    def _alone(self, k: int, where: Filter | None) -> Iterator[None]:
        """One search at a time, with a filter. Of equal codes, the k items of the smallest ids are enough.

        Raises:
            UsageError: within another, which a filter function would wait for.
        """
        with self._lock:
            if self._searching:
                raise UsageError(
                    "a filter function searches the index in place that it filters: search first, then filter by ids"
                )
            self._searching = True
            self._where, self._tested = where, 0
            self._passing = NO_FILTER if where is None else np.empty(self._room, np.bool_)
            self._needed = max(k, _KEPT) if where is None else _ALL
            if self._needed > self._keep:
                self._clear()
            try:
                yield
            finally:
                self._searching, self._where, self._passing = False, None, NO_FILTER

    # Searching --------------------------------------------------------------------------------------------------------

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        where: Filter | None = None,
        nprobe: int | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """As :meth:`.codeword_lists.CodewordLists.search`, by ids. A list is read once for many queries that reach it."""
        least = self._least(floor, len(xq))
        D = np.full((len(xq), k), -np.inf, np.float32)
        found = np.full((len(xq), k), -1, np.int64)
        step = max(1, min(_BLOCK, _BOUNDS // self.lists))
        with self._alone(k, where):
            for start in range(0, len(xq), step):
                part = slice(start, start + step)
                own, lowest, out = xq[part], least[part], (D[part], found[part])
                if nprobe is None:
                    self._search(own, k, lowest, *out, threads)
                    continue

                def visit(
                    one: slice, lists: Ids, *out: Any, own: Floats = own, least: Floats = lowest
                ) -> None:
                    for pieces in self._resident(lists):
                        self._visit_pieces(own[one], pieces, k, least[one], *out)

                self._probe(own, k, nprobe, *out, visit)
        return D, found

    def _visit_pieces(self, xq: Floats, pieces: Ids, *arguments: Any) -> None:
        """As :meth:`_visit`."""
        self._visit(xq, self._list[pieces], self._at[pieces], self._passing, *arguments)

    def _search(self, xq: Floats, k: int, floor: Floats, D: Floats, found: Ids, threads: int | None) -> None:
        self.searched += len(xq)
        arguments = k, self._passing, workers(len(xq), threads), xq, floor, D, found
        if self._where is None:
            self._listed(*arguments)
        else:
            self._together(np.arange(len(xq)), *arguments)

    def _visit_all(self, k: int, _: Any, count: int, xq: Floats, floor: Floats, *out: Any) -> None:
        """As there; reads lists, those that may make others unnecessary first."""
        (D, _, counts), bounds = out, self.list_bounds(xq)
        done = np.zeros(self.lists, np.bool_)
        lists, reading = np.unique(bounds.argmax(axis=1)), _FIRST_READ
        while len(lists):
            done[lists] = True
            for pieces in self._resident(lists):

                def run(xq: Floats, floor: Floats, *out: Any, pieces: Ids = pieces) -> None:
                    self._visit_pieces(xq, pieces, k, floor, *out)

                in_parallel(run, (xq, floor, *out), min(count, workers(len(xq), count)))
            least = np.where(counts == k, D[:, -1], floor)
            # Lists that are there come first; of the others, the best ones: they may make the rest unnecessary.
            lists = np.flatnonzero((bounds >= least[:, None]).any(axis=0) & ~done)
            above = (bounds[:, lists] - np.where(np.isinf(least), 0, least)[:, None]).max(
                axis=0, initial=-np.inf
            )
            lists = lists[np.argsort(-above, kind="stable")]
            unread = (self.sizes[lists] > 0) & (self._at[self._first[lists].clip(max=len(self._at) - 1)] < 0)
            read = np.cumsum(np.where(unread, self.sizes[lists], 0))
            lists = lists[~unread | (read <= max(reading, read[unread][:1].max(initial=0)))]
            reading *= 4

    def range_search(
        self, query: Floats, min_score: float, limit: int, *, where: Filter | None = None
    ) -> tuple[Floats, Ids]:
        """As :meth:`.codeword_lists.CodewordLists.range_search`, by ids. Raises DataError: more than ``limit``."""
        xq, least = query[None], np.array([min_score], np.float32)
        D, found, left = [np.empty(0, np.float32)], [np.empty(0, np.int64)], limit
        with self._alone(_ALL, where):
            for pieces in self._resident(np.flatnonzero(self.list_bounds(xq)[0] >= least)):

                def visit(*out: Any, pieces: Ids = pieces) -> None:
                    self._visit_pieces(xq, pieces, 0, least, *out)

                try:
                    scores, ids = all_reaching(min_score, left, visit)
                except DataError:
                    raise too_many(min_score, limit) from None
                D.append(scores)
                found.append(ids)
                left -= len(ids)
        return best_first(np.concatenate(D), np.concatenate(found))

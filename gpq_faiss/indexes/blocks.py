"""Blocks of rows of an index file, read and prepared for search."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes
from ..codes.checks import Ids
from ..faissio.header import Header
from ..faissio.source import IndexFile
from ..faissio.storage import Packing
from .best import Rows
from .filters import Filter, mask_of
from .items import Items
from .proof import ProvenSearch
from .scanners import FastScan


class Visit(NamedTuple):
    """Rows ``start:stop`` of list ``number``, to search for the queries ``asked`` (None: all)."""

    number: int
    start: int
    stop: int
    asked: NDArray[np.int64] | None

    def rows(self, start: int, stop: int) -> Rows:
        """The ``start``-th to ``stop``-th of the queries."""
        return slice(start, stop) if self.asked is None else self.asked[start:stop]


class Block(NamedTuple):
    """Rows of a list, prepared for search; ``ids_at`` maps row numbers to ids, -1 to -1."""

    search: ProvenSearch
    ids_at: Callable[[Ids], Ids]


class BlockReader:
    """Reads blocks and caches some. Thread-safe.

    Args:
        source: the file.
        header: of it.
        ascending: whether ids are known to ascend in every list.
    """

    def __init__(self, source: IndexFile, header: Header, *, ascending: bool) -> None:
        self._source, self._header, self._ascending = source, header, ascending
        self._Z = header.codebooks
        self._lock = threading.Lock()
        self._own = threading.local()
        self._first: dict[int, int] = {}
        self._kept: dict[tuple[int, int], ProvenSearch] = {}

    def read(self, visit: Visit, where: Filter | None, *, fast: bool, keep: bool = False) -> Block | None:
        """Rows of a list sorted by id, packed as in the file if possible. None: nothing passes.

        Args:
            fast: pack them for FastScan if needed.
            keep: cache them; only for files without ids.

        Raises:
            DataError: set padding bits.
        """
        number, start, stop, _ = visit
        header, counting = self._header, self._header.id_starts is None
        if keep:
            with self._lock:
                kept = self._kept.get((start, stop))
            if kept is not None:
                return Block(kept, partial(_counted, start))
        packed = where is None and header.packing == "fastscan"
        ids = np.empty(0, np.int64)
        if not (counting or (packed and self._ascending)):
            ids = header.ids(self._source, number, start, stop)
        if packed and (counting or self._ascending or bool((ids[1:] > ids[:-1]).all())):
            block = self._packed(visit, ids, keep=keep)
        else:
            found = self._unpacked(visit, ids, where, "fastscan" if fast else "bytes")
            if found is None:
                return None
            block = found
        if keep:
            self._keep(start, stop, block.search)
        return block

    def _packed(self, visit: Visit, ids: Ids, *, keep: bool) -> Block:
        """Rows in the file's FastScan blocks."""
        number, start, stop, _ = visit
        header = self._header
        scan = FastScan.empty(self._Z, header.rows) if keep else self._scan()
        at = header.packed_at(number, start)
        codes = scan.fill(stop - start, lambda held: self._source.fill(held, at))
        search = ProvenSearch(codes, self._Z, ("fastscan",), first=self._first, fast=scan)
        if header.id_starts is None:
            return Block(search, partial(_counted, start))
        if self._ascending:  # only ids of results are read
            return Block(
                search, partial(_read_at, partial(header.some_ids, self._source, number, start, stop))
            )
        return Block(search, partial(_read_at, ids.__getitem__))

    def _unpacked(self, visit: Visit, ids: Ids, where: Filter | None, packing: Packing) -> Block | None:
        """Passing rows, sorted by id."""
        number, start, stop, _ = visit
        header, counting = self._header, self._header.id_starts is None
        codes = header.codes(self._source, number, start, stop)
        codes = check_codes(codes, int(self._Z.shape[0]), int(self._Z.shape[1]), what=str(self._source.path))
        if counting and where is None:
            search = ProvenSearch(codes, self._Z, (packing,), first=self._first)
            return Block(search, partial(_counted, start))
        items = Items.ordered(codes, np.arange(start, stop, dtype=np.int64) if counting else ids)
        if where is not None:
            items = items.keep(mask_of(where, items))
        if not len(items):
            return None
        return Block(ProvenSearch(items.codes, self._Z, (packing,), first=self._first), items.ids_at)

    def _keep(self, start: int, stop: int, search: ProvenSearch) -> None:
        search.keep_packed()
        with self._lock:
            if any(stop > a and start < b for a, b in self._kept):
                self._kept.clear()  # blocks of another size, from a search with other threads
            self._kept[start, stop] = search

    def _scan(self) -> FastScan:
        """This thread's reusable scanner."""
        scan: FastScan | None = getattr(self._own, "scan", None)
        if scan is None:
            scan = self._own.scan = FastScan.empty(self._Z, self._header.rows)
        return scan


def _counted(start: int, positions: Ids) -> Ids:
    """Ids of rows that count up from ``start``."""
    return np.where(positions < 0, -1, positions + start)


def _read_at(read: Callable[[Ids], Ids], positions: Ids) -> Ids:
    return np.where(positions < 0, -1, read(np.maximum(positions, 0)))

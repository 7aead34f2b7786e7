"""Inverted lists over arrays: the codes are their own inverted file.

Codes are sorted by their codewords. A list holds the codes that begin with the same P codewords: their
look-up table entries, plus the best entry of every other table, bound the scores of all codes of the list.
A search visits the most promising list first, and then those whose bounds reach the k-th score so far. In
a list, codes that cannot be results are skipped 64 at a time, and the others are scored. So results equal
those of brute force on any data.

The arrays are in memory, or mapped from a file (:mod:`.list_file`). The inverted multi-index (Babenko and
Lempitsky, CVPR 2012) has such lists without bounds; PQTable (Matsui et al., TMM 2018) looks codes up
without lists.
"""

from __future__ import annotations

import threading
import zlib
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError
from . import kernels
from .near import BLOCK
from .parallel import number_of_threads, run_parallel

MAX_PREFIX = 4
"""Maximum number of codewords that name a list."""
_TYPICAL_LIST = 2048
"""Number of items that the list of a random item should have at least."""
_SELECTIVE = 32
"""A filter that passes less than this part of the items gets lists of its own."""
_RANGE_ROOM = 4096
_UNFILTERED = np.empty(0, np.bool_)
_LARGE_SCAN = 1 << 24
"""Bytes of codes from which queries visit a list together, as it does not fit a processor's cache."""


class ListArrays(NamedTuple):
    """The arrays of a search: what ``index.lists`` stores.

    A row is a distinct code. The items of row r, the members, are ``members[starts[r]:starts[r + 1]]``.

    Attributes:
        codebooks: float32 [M, K, d].
        names: uint8 [lists, 2], the codewords that name each list, packed (:func:`list_names`).
        ends: int64 [lists + 1], the first row of each list, and the number of rows.
        blocks: uint8 [ceil(rows / 64), T, 64], the codes of 64 rows by column (:func:`code_columns`).
        starts: uint32 or int64 [rows + 1], the first member of each row; [0] if all codes are distinct.
        members: uint32 or int64 [n], ids, ascending in each row.
    """

    codebooks: Floats
    names: Codes
    ends: Ids
    blocks: Codes
    starts: NDArray[Any]
    members: NDArray[Any]


def code_columns(codes: Codes, M: int, K: int) -> Codes:
    """Return codes with a byte for each look-up: two codewords if K <= 16, else one; uint8 [n, T]."""
    if K == 16:
        return codes
    indices = unpack_codes(codes, M, K)
    return pack_codes(indices, 16) if K < 16 else indices


def columns_to_codes(columns: Codes, M: int, K: int) -> Codes:
    """Return packed codes, uint8 [n, code_size]: the inverse of :func:`code_columns`."""
    if K == 16:
        return columns
    return pack_codes(unpack_codes(columns, M, 16) if K < 16 else columns, K)


def first_codewords(columns: Codes, prefix: int) -> Ids:
    """Return the first codewords as one number, the first in the highest bits: int64 [n]."""
    head = np.zeros((len(columns), 2), np.uint8)
    head[:, : columns.shape[1]] = columns[:, :2] << 4 | columns[:, :2] >> 4
    return head.view(">u2")[:, 0].astype(np.int64) >> 4 * (MAX_PREFIX - prefix)


def choose_prefix(counts: Ids, Z: Floats) -> int:
    """Return how many codewords name a list: as many as leave lists that are worth a visit.

    Args:
        counts: int64 [16^4], items by their first four codewords (:func:`first_codewords`).
        Z: float32 [M, K, d].
    """
    M, K = Z.shape[:2]
    if K > 16:
        return 0
    n, prefix = int(counts.sum()), 0
    while prefix < min(MAX_PREFIX, M - 1):
        sizes = counts.reshape(16 ** (prefix + 1), -1).sum(axis=1)
        is_fragmented = np.count_nonzero(sizes) > 8 * n**0.5
        if prefix and (is_fragmented or np.square(sizes.astype(np.float64)).sum() < _TYPICAL_LIST * n):
            break
        prefix += 1
    return prefix


def list_names(keys: Ids, prefix: int) -> Codes:
    """Return the two bytes by which the score of a list is looked up, uint8 [lists, 2].

    Args:
        keys: int64 [lists], the codewords that name each list (:func:`first_codewords`).
    """
    packed = pack_codes(keys[:, None] >> 4 * np.arange(prefix)[::-1] & 15, 16)
    names = np.zeros((len(keys), 2), np.uint8)
    start = int(prefix == 1)  # a single codeword is looked up by the second byte
    names[:, start : start + packed.shape[1]] = packed
    return names


def sort_rows(columns: Codes, ids: Ids) -> tuple[Codes, Ids, Ids]:
    """Sort items by their codewords, the first in front, then by id.

    Returns:
        The sorted columns uint8 [n, T] and ids int64 [n], and the first item of each distinct code.
    """
    is_first = np.empty(len(ids), np.bool_)
    if not kernels.mark_rows(columns, ids, is_first):
        if not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            columns, ids = columns.take(order, axis=0), ids.take(order)
        order = _order(columns)
        columns, ids = columns.take(order, axis=0), ids.take(order)
        kernels.mark_rows(columns, ids, is_first)
    return columns, ids, np.flatnonzero(is_first)


def _order(columns: Codes) -> Ids:
    """Return the stable order of rows uint8 [n, T] by their codewords."""
    n, T = columns.shape
    bits = n.bit_length()
    # Columns and the number of a row form one integer: NumPy sorts such ten times as fast as rows.
    width = (64 - bits) // 8
    order = np.arange(n)
    for stop in range(T, 0, -width):
        numbers = np.zeros(n, np.uint64)
        for t in range(max(0, stop - width), stop):
            column = columns[:, t].take(order)
            numbers = numbers << np.uint64(8) | (column << 4 | column >> 4)
        numbers = numbers << np.uint64(bits) | np.arange(n, dtype=np.uint64)
        numbers.sort()
        order = order.take((numbers & np.uint64((1 << bits) - 1)).view(np.int64))
    return order


def put_rows(blocks: Codes, row: int, columns: Codes) -> None:
    """Write codes uint8 [n, T] to blocks uint8 [any, T, 64] from ``row`` on."""
    n, lane = len(columns), row % BLOCK
    head = min(n, -lane % BLOCK)
    if head:
        blocks[row // BLOCK, :, lane : lane + head] = columns[:head].T
    whole, tail = divmod(n - head, BLOCK)
    block = (row + head) // BLOCK
    if whole:
        part = columns[head : n - tail].reshape(whole, BLOCK, -1)
        blocks[block : block + whole] = part.transpose(0, 2, 1)
    if tail:
        blocks[block + whole, :, :tail] = columns[n - tail :].T


def member_type(low: int, high: int) -> type[np.unsignedinteger[Any] | np.signedinteger[Any]]:
    """Return the type of members with ids from ``low`` to ``high``."""
    return np.uint32 if low >= 0 and high < 1 << 32 else np.int64


class InvertedLists:
    """Exact search over :class:`ListArrays`. Thread-safe.

    Queries are checked by the caller: float32 [Q, M * d], C-contiguous.

    Attributes:
        arrays: the arrays.
        prefix: number of codewords that name a list.
        n, distinct: number of items, and of distinct codes.
    """

    def __init__(self, arrays: ListArrays, prefix: int) -> None:
        self.arrays, self.prefix = arrays, prefix
        self.n, self.distinct = len(arrays.members), int(arrays.ends[-1])
        self.M, self.K = int(arrays.codebooks.shape[0]), int(arrays.codebooks.shape[1])
        names, ends, count = arrays.names, arrays.ends, len(arrays.names)
        # Lists with the same first two codewords are neighbours: their common score is added once.
        pairs = np.zeros(1, np.int64)
        if prefix >= 2:
            pairs = np.flatnonzero(np.append(True, names[1:, 0] != names[:-1, 0]))
        self._pairs = names[pairs, 0].copy(), np.append(pairs, count), np.add.reduceat(np.diff(ends), pairs)
        self._lists = np.arange(count)
        self._pieces = np.arange(count + 1), self._lists
        self._rows = arrays.blocks, arrays.starts, arrays.members
        self._ZT = np.ascontiguousarray(arrays.codebooks.transpose(2, 0, 1))
        self._lock = threading.Lock()
        self._inverse: tuple[Ids, NDArray[Any]] | None = None

    @classmethod
    def build(cls, codes: Codes, ids: Ids, Z: Floats) -> Self:
        """Build lists in memory.

        Args:
            codes: uint8 [n, code_size], checked.
            ids: int64 [n], each once.
            Z: float32 [M, K, d], checked.
        """
        M, K = int(Z.shape[0]), int(Z.shape[1])
        n = len(codes)
        columns, ids, rows = sort_rows(code_columns(codes, M, K), ids)
        counts = np.bincount(first_codewords(columns, MAX_PREFIX), minlength=16**MAX_PREFIX)
        prefix = choose_prefix(counts, Z)
        starts = np.append(rows, n) if len(rows) < n else np.empty(0, np.int64)
        columns = columns.take(rows, axis=0)
        blocks = np.zeros((-(-len(rows) // BLOCK), columns.shape[1], BLOCK), np.uint8)
        put_rows(blocks, 0, columns)
        keys = first_codewords(columns, prefix)
        first_rows = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        arrays = ListArrays(
            codebooks=Z,
            names=list_names(keys[first_rows], prefix),
            ends=np.append(first_rows, len(rows)),
            blocks=blocks,
            starts=starts.astype(member_type(0, n)),
            members=ids.astype(member_type(int(ids.min()), int(ids.max()))),
        )
        return cls(arrays, prefix)

    # Items --------------------------------------------------------------------------------------

    def codes(self, start: int = 0, stop: int | None = None) -> Codes:
        """Return the codes of the members ``start:stop``, uint8 [n, code_size]."""
        stop = self.n if stop is None else stop
        first, last, counts = start, stop, None
        if len(self.arrays.starts):
            starts = self.arrays.starts
            first = int(np.searchsorted(starts, start, side="right")) - 1
            last = int(np.searchsorted(starts, stop, side="left"))
            bounds = starts[first : last + 1].astype(np.int64).clip(start, stop)
            counts = np.diff(bounds)
        blocks = self.arrays.blocks[first // BLOCK : -(-last // BLOCK)]
        columns = blocks.transpose(0, 2, 1).reshape(-1, blocks.shape[1])
        columns = columns[first % BLOCK :][: last - first]
        if counts is not None:
            columns = np.repeat(columns, counts, axis=0)
        return columns_to_codes(np.ascontiguousarray(columns), self.M, self.K)

    def crc(self) -> int:
        """Return the CRC-32 of all codes, and then all ids, in the order of the lists."""
        value = 0
        for start in range(0, self.n, 1 << 20):
            value = zlib.crc32(self.codes(start, min(self.n, start + (1 << 20))), value)
        return zlib.crc32(np.ascontiguousarray(self.arrays.members), value)

    def positions(self, ids: Ids) -> Ids:
        """Return the place of each id among the members, int64 [m]; -1 if it is not there."""
        with self._lock:
            if self._inverse is None:
                order = np.argsort(self.arrays.members, kind="stable")
                kind = member_type(0, self.n)
                self._inverse = self.arrays.members[order], order.astype(kind)
        members, order = self._inverse
        places = np.searchsorted(members, ids).clip(max=self.n - 1)
        return np.where(members[places] == ids, order[places].astype(np.int64), -1)

    # Searching ----------------------------------------------------------------------------------

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        mask: NDArray[np.bool_] | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """Find the k best items of each query: scores float32 [Q, k], ids int64 [Q, k].

        Where fewer than k items pass, scores are -inf and ids -1. Ties are in ascending order of id.

        Args:
            mask: bool [n], the members that may be returned (default: all).
        """
        if mask is not None and 0 < (count := int(np.count_nonzero(mask))) * _SELECTIVE <= self.n:
            return self._subset(mask).search(xq, min(k, count), threads=threads)
        D, ids = np.empty((len(xq), k), np.float32), np.empty((len(xq), k), np.int64)
        passing = _UNFILTERED if mask is None else mask
        count = number_of_threads(len(xq), threads)
        postponed = np.empty(len(xq), np.bool_)
        floor = np.full(len(xq), -np.inf, np.float32)

        def run(*block: Any) -> None:
            lists = self._ZT, self.prefix, self.arrays.names, self._pairs, self._pieces, self.arrays.ends
            kernels.search(*lists, self._rows, passing, k, _LARGE_SCAN // self.arrays.blocks.shape[1], *block)

        run_parallel(run, (xq, floor, D, ids, postponed), count)
        rows = np.flatnonzero(postponed)
        if len(rows):
            thresholds = D[rows, 0]
            part = np.empty((len(rows), k), np.float32), np.empty((len(rows), k), np.int64)
            counts = np.zeros(len(rows), np.int64)

            def visit(*block: Any) -> None:
                self._visit(block[0], k, passing, *block[1:])

            run_parallel(visit, (xq[rows], thresholds, *part, counts), number_of_threads(len(rows), count))
            for q, size in enumerate(counts.tolist()):
                kernels.order(part[0][q], part[1][q], size)
                part[0][q, size:], part[1][q, size:] = -np.inf, -1
            D[rows], ids[rows] = part
        return D, ids

    def _visit(self, xq: Floats, k: int, passing: NDArray[np.bool_], *results: Any) -> None:
        lists = self._ZT, self.prefix, self.arrays.names, self._lists, self._lists, self.arrays.ends
        kernels.visit(xq, *lists, self._rows, passing, k, *results)

    def range_search(
        self, query: Floats, min_score: float, limit: int, *, mask: NDArray[np.bool_] | None = None
    ) -> tuple[Floats, Ids]:
        """Find all items with at least ``min_score`` for a query [M * d]: scores and ids, best first.

        Raises:
            DataError: there are more than ``limit``.
        """
        threshold, room = np.array([min_score], np.float32), min(limit, _RANGE_ROOM)
        passing = _UNFILTERED if mask is None else mask
        while True:
            D, ids = np.empty((1, room), np.float32), np.empty((1, room), np.int64)
            counts = np.zeros(1, np.int64)
            self._visit(query[None], 0, passing, threshold, D, ids, counts)
            size = int(counts[0])
            if size > limit:
                raise DataError(f"more than {limit:,} results")
            if size <= room:
                order = np.lexsort((ids[0, :size], -D[0, :size]))
                return D[0, order], ids[0, order]
            room = size

    def _subset(self, mask: NDArray[np.bool_]) -> InvertedLists:
        """Return lists of the members that pass."""
        places = np.flatnonzero(mask)
        if len(self.arrays.starts):
            rows = np.searchsorted(self.arrays.starts, places, side="right") - 1
        else:
            rows = places
        columns = self.arrays.blocks[rows // BLOCK, :, rows % BLOCK]
        codes = columns_to_codes(columns, self.M, self.K)
        ids = self.arrays.members[places].astype(np.int64)
        return InvertedLists.build(codes, ids, self.arrays.codebooks)

"""Exact search in inverted lists: the codes are their own inverted file.

Codes are sorted by their codewords, so the codes that begin with the same codewords are adjacent.
They form an inverted list, without a coarse quantiser. The look-up tables of a query bound the
scores in a list. A search visits the most promising list first, then those whose bounds reach the
k-th best score so far. Within a list it tests blocks of 64 codes, skips the codes that cannot be
results, and scores the others. So the results equal those of brute force on any data, with ties in
ascending order of id.

The inverted multi-index (Babenko and Lempitsky, CVPR 2012) has such lists without bounds; PQTable
(Matsui et al., TMM 2018) looks codes up without lists.
"""

from __future__ import annotations

import threading
import zlib
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..codes.checks import Codes, Floats, Ids, named_rows
from ..errors import DataError
from . import list_kernels
from .block_scan import BLOCK
from .list_kernels import Lists
from .parallel import in_parallel, thread_count

LEVELS = 4
"""Maximum length of a prefix."""
_TYPICAL = 2048  # minimum expected number of codes in the sub-list of a random code
_MANY = 1 << 24  # bytes of codes that exceed a processor's cache
_FEW = 32  # if at most 1 item in 32 passes a filter, those items get lists of their own
_STEP = 1 << 20  # number of codes read at once
_NO_MASK = np.empty(0, np.bool_)


class ListArrays(NamedTuple):
    """Codes in inverted lists, in memory or mapped (see the drawing in :mod:`.list_kernels`).

    Attributes:
        codebooks: float32 [M, K, d].
        names: uint8 [sub-lists, 2], the two bytes by which a sub-list's score is looked up.
        ends: int64 [sub-lists + 1], the first row of each sub-list, and the number of rows.
        blocks: uint8 [ceil(rows / 64), T, 64], the distinct codes in ascending order.
        starts: uint32 or int64 [rows + 1], the first member of each row, and n; or [0] where all
            codes are distinct.
        members: uint32 or int64 [n], ids, ascending within a row.
        prefix: number of codewords that name a sub-list.
    """

    codebooks: Floats
    names: Codes
    ends: Ids
    blocks: Codes
    starts: NDArray[Any]
    members: NDArray[Any]
    prefix: int


# Order of codes -----------------------------------------------------------------------------------


def columns_of(codes: Codes, M: int, K: int) -> Codes:
    """Return codes with one byte for two codewords if K <= 16, else one byte for each codeword."""
    if K in (16, 256):
        return codes
    indices = unpack_codes(codes, M, K)
    return pack_codes(indices, 16) if K < 16 else indices


def codes_of(columns: Codes, M: int, K: int) -> Codes:
    """Return packed codes: the inverse of :func:`columns_of`."""
    if K in (16, 256):
        return columns
    return pack_codes(unpack_codes(columns, M, 16) if K < 16 else columns, K)


def swap_halves(column: Codes) -> Codes:
    """Swap the halves of bytes, so that the first codeword is in the upper half."""
    swapped: Codes = np.asarray(column << 4 | column >> 4, np.uint8)
    return swapped


def lists_order(columns: Codes, ids: Ids) -> Ids:
    """Return the order of codes in lists: by first codeword, second codeword, ..., and id.

    Args:
        columns: uint8 [n, T] (:func:`columns_of`).
    """
    n, T = columns.shape
    order = np.argsort(ids, kind="stable")
    bits = n.bit_length()
    # Columns and positions are packed into uint64: NumPy sorts numbers ten times as fast as rows.
    width = (64 - bits) // 8
    for stop in range(T, 0, -width):
        keys = np.zeros(n, np.uint64)
        for t in range(max(0, stop - width), stop):
            keys <<= np.uint64(8)
            keys |= swap_halves(columns[:, t].take(order))
        keys <<= np.uint64(bits)
        keys |= np.arange(n, dtype=np.uint64)
        keys.sort()
        order = order.take((keys & np.uint64((1 << bits) - 1)).view(np.int64))
    return order


def sort_codes(columns: Codes, ids: Ids) -> tuple[Codes, Ids, Ids]:
    """Sort codes into the order of lists. Codes that are in order already are not copied.

    Returns:
        Columns and ids, and the position of the first of each distinct code, followed by n: int64
        or uint32 [rows + 1].
    """
    starts: NDArray[Any] = np.empty(len(ids) + 1, np.uint32 if len(ids) < 1 << 32 else np.int64)
    rows = list_kernels.find_rows(columns, ids, starts)
    if rows < 0:
        order = lists_order(columns, ids)
        columns, ids = columns.take(order, axis=0), ids.take(order)
        rows = list_kernels.find_rows(columns, ids, starts)
    return columns, ids, starts[: rows + 1]


def first_words(columns: Codes, P: int) -> NDArray[np.uint16]:
    """Return the first P codewords of each code as a number, the first in the highest bits."""
    words = np.zeros((len(columns), 2), np.uint8)
    words[:, : columns.shape[1]] = swap_halves(columns[:, :2])
    all_words = words.view(">u2")[:, 0].astype(np.uint16)
    return np.asarray(all_words >> 4 * (LEVELS - P), np.uint16)


def count_words(columns: Codes, M: int, K: int) -> Ids:
    """Count codes by their longest possible prefix: int64 [16^levels]."""
    levels = min(LEVELS, M - 1) if K <= 16 else 0
    return np.bincount(first_words(columns, levels), minlength=16**levels)


def choose_prefix(counts: Ids) -> int:
    """Return the length of the longest prefix whose sub-lists are still worth a visit each."""
    n, levels = int(counts.sum()), (len(counts).bit_length() - 1) // 4
    prefix = min(1, levels)
    while prefix < levels:
        sizes = counts.reshape(16 ** (prefix + 1), -1).sum(axis=1)
        squares = np.square(sizes.astype(np.float64)).sum()
        if np.count_nonzero(sizes) > 8 * n**0.5 or squares < _TYPICAL * n:
            break
        prefix += 1
    return prefix


def names_of(words: NDArray[np.uint16], prefix: int) -> Codes:
    """Return the names of sub-lists, uint8 [sub-lists, 2], from their :func:`first_words`."""
    indices = words.astype(np.int64)[:, None] >> 4 * np.arange(prefix)[::-1] & 15
    names = np.zeros((len(words), 2), np.uint8)
    packed = pack_codes(indices, 16)
    first = int(prefix == 1)  # a single codeword is in the second byte
    names[:, first : first + packed.shape[1]] = packed
    return names


# Searching ----------------------------------------------------------------------------------------


class InvertedLists:
    """Exact search of codes in inverted lists. Thread-safe.

    Args:
        arrays: see :class:`ListArrays`.

    Attributes:
        arrays: the arrays.
        n: number of codes.
        distinct: number of distinct codes.
    """

    def __init__(self, arrays: ListArrays) -> None:
        self.arrays = arrays
        self.M, self.K, _ = (int(size) for size in arrays.codebooks.shape)
        self.n, self.distinct = len(arrays.members), int(arrays.ends[-1])
        names, first = arrays.names, np.zeros(1, np.int64)
        if arrays.prefix >= 2:
            first = np.flatnonzero(np.append(True, names[1:, 0] != names[:-1, 0]))
        self._lists = Lists(
            np.ascontiguousarray(arrays.codebooks.transpose(2, 0, 1)),
            arrays.prefix,
            names[first, 0].copy(),
            np.append(first, len(names)),
            names,
            arrays.ends,
            arrays.blocks,
            arrays.starts,
            arrays.members,
            _NO_MASK,
        )
        self._lock = threading.Lock()

    @classmethod
    def build(cls, codes: Codes, ids: Ids, Z: Floats) -> Self:
        """Sort checked codes into lists.

        Args:
            codes: uint8 [n, code_size]. Codes that are in the order of lists are not sorted again.
            ids: int64 [n], each once.
            Z: codebooks, float32 [M, K, d].

        Raises:
            DataError: there are no codes.
        """
        return cls._of_columns(columns_of(codes, *Z.shape[:2]), ids, Z)

    @classmethod
    def _of_columns(cls, columns: Codes, ids: Ids, Z: Floats) -> Self:
        if not len(columns):
            raise DataError("no codes: an index needs at least one item")
        columns, ids, starts = sort_codes(columns, ids)
        rows, T = len(starts) - 1, columns.shape[1]
        blocks = np.zeros((-(-rows // BLOCK), T, BLOCK), np.uint8)
        list_kernels.fill_blocks(blocks, 0, columns, starts)
        prefix = choose_prefix(count_words(columns, *Z.shape[:2]))
        words = first_words(columns.take(starts[:-1], axis=0), prefix)
        first = np.flatnonzero(np.append(True, words[1:] != words[:-1]))
        narrow = ids.min() >= 0 and ids.max() < 1 << 32
        return cls(
            ListArrays(
                Z,
                names_of(words[first], prefix),
                np.append(first, rows),
                blocks,
                starts[:0] if rows == len(ids) else starts,
                ids.astype(np.uint32 if narrow else np.int64),
                prefix,
            )
        )

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        mask: NDArray[np.bool_] | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """Return the k best items of each query.

        Args:
            xq: float32 [Q, M * d], C-contiguous.
            mask: bool [n], the members that may be returned (default: all).
            threads: maximum number of threads (default: Faiss' setting).

        Returns:
            Scores float32 [Q, k] and ids int64 [Q, k], best first, ties in ascending order of id;
            -inf and -1 where fewer items pass the mask.

        Raises:
            DataError: queries have NaN or infinity, or are too large for float32 scores.
        """
        if mask is not None and 0 < np.count_nonzero(mask) * _FEW <= self.n:
            selected = self._only(np.flatnonzero(mask))
            return selected.search(xq, k, threads=threads)
        lists = self._lists if mask is None else self._lists._replace(mask=mask)
        D, ids = np.empty((len(xq), k), np.float32), np.empty((len(xq), k), np.int64)
        status = np.empty(len(xq), np.uint8)
        row_limit = _MANY // lists.blocks.shape[1]

        count = thread_count(len(xq), threads)
        if count == 1:
            unfinished = list_kernels.search(lists, k, row_limit, xq, D, ids, status)
        else:

            def run(*arrays: Any) -> None:
                list_kernels.search(lists, k, row_limit, *arrays)

            in_parallel(run, (xq, D, ids, status), count)
            unfinished = status.any()
        if unfinished:
            self._check(status == list_kernels.NOT_FINITE)
            rows = np.flatnonzero(status)
            arrays = xq[rows], D[rows], ids[rows]

            def together(*arrays: Any) -> None:
                list_kernels.search_together(lists, k, *arrays)

            in_parallel(together, arrays, thread_count(len(rows), threads))
            D[rows], ids[rows] = arrays[1:]
        return D, ids

    def range_search(
        self,
        query: Floats,
        min_score: float,
        limit: int,
        *,
        mask: NDArray[np.bool_] | None = None,
        row: int = 0,
    ) -> tuple[Floats, Ids]:
        """Return scores and ids of all items with a score of at least ``min_score``, best first.

        Args:
            query: float32 [M * d].
            limit: maximum number of results.
            mask: bool [n], the members that may be returned (default: all).
            row: number of the query, for errors.

        Raises:
            DataError: there are more results than ``limit``; or see :meth:`search`.
        """
        lists = self._lists if mask is None else self._lists._replace(mask=mask)
        limit = min(limit, self.n)
        D, ids, count = list_kernels.range_search(lists, limit, query, np.float32(min_score))
        self._check(np.array([count < 0]), row)
        if count > limit:
            raise DataError(
                f"a range search from {min_score:g} has more than {limit:,} results: "
                "raise the minimum score or the limit"
            )
        return D[:count].copy(), ids[:count].copy()

    @staticmethod
    def _check(wrong: NDArray[np.bool_], first_row: int = 0) -> None:
        if wrong.any():
            rows = named_rows(first_row + np.flatnonzero(wrong))
            raise DataError(
                f"queries: NaN, infinity or values too large for float32 scores in {rows}"
            )

    # Items ------------------------------------------------------------------------------------

    def _rows_of(self, positions: Ids) -> Ids:
        """Return the rows of members, int64 [m]."""
        starts = self.arrays.starts
        return np.searchsorted(starts, positions, side="right") - 1 if len(starts) else positions

    def _only(self, positions: Ids) -> Self:
        """Return the lists of a few members, int64 [m] ascending."""
        rows, arrays = self._rows_of(positions), self.arrays
        columns = arrays.blocks[rows // BLOCK, :, rows % BLOCK]
        ids = arrays.members[positions].astype(np.int64)
        return self._of_columns(columns, ids, arrays.codebooks)

    def codes(self, start: int = 0, stop: int | None = None) -> Codes:
        """Return the codes of members ``start:stop``, uint8 [n, code_size]."""
        count = (self.n if stop is None else stop) - start
        columns = np.empty((count, self.arrays.blocks.shape[1]), np.uint8)
        row = int(self._rows_of(np.array([start]))[0])
        list_kernels.read_columns(self._lists, row, start, columns)
        return codes_of(columns, self.M, self.K)

    def positions(self, ids: Ids) -> Ids:
        """Return the position of each id among the members, int64 [m]; -1 if it is missing."""
        order, ordered = self._by_id
        places = np.searchsorted(ordered, ids).clip(max=self.n - 1)
        positions: Ids = np.where(ordered[places] == ids, order[places], -1)
        return positions

    @cached_property
    def _by_id(self) -> tuple[Ids, NDArray[Any]]:
        order = np.argsort(self.arrays.members)
        return order, self.arrays.members[order]

    def crc(self) -> int:
        """Return the CRC-32 of all codes, then of all ids as int64, in the order of the lists."""
        value = 0
        for start in range(0, self.n, _STEP):
            value = zlib.crc32(self.codes(start, min(start + _STEP, self.n)).data, value)
        for start in range(0, self.n, _STEP):
            value = zlib.crc32(self.arrays.members[start : start + _STEP].astype("<i8").data, value)
        return value

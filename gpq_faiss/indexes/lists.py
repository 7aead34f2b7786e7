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

import copy
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..codes.checks import Codes, Floats, Ids, named_rows
from ..compiled import BLOCK
from ..errors import DataError
from . import list_kernels
from .list_kernels import Lists

LEVELS = 4
"""Maximum length of a prefix."""
_MIN_SUBLIST = 2048  # minimum expected number of codes in the sub-list of a random code
_CACHE_BYTES = 1 << 24  # about what a processor's cache holds
_SPARSE = 32  # if at most 1 item in 32 passes a filter, those items get lists of their own
_ROWS = 1 << 20  # number of codes read at once
_MIN_QUERIES = 16  # per thread, as starting a thread takes some 100 microseconds
_NO_MASK = np.empty(0, np.bool_)
_NO_MASK.flags.writeable = False


# Order of codes -----------------------------------------------------------------------------------


def columns_of(codes: Codes, M: int, K: int) -> Codes:
    """Return codes with one byte for two codewords if K <= 16, else one byte for each codeword."""
    if K in (16, 256):
        return codes
    indices = unpack_codes(codes, M, K)
    return pack_codes(indices, 16) if K < 16 else indices


def width_of(M: int, K: int) -> int:
    """Return the number of columns of codes."""
    return (M + 1) // 2 if K <= 16 else M


def codes_of(columns: Codes, M: int, K: int) -> Codes:
    """Return packed codes: the inverse of :func:`columns_of`."""
    if K in (16, 256):
        return columns
    return pack_codes(unpack_codes(columns, M, 16) if K < 16 else columns, K)


def swap_halves(columns: Codes) -> Codes:
    """Swap the halves of bytes, so that the first codeword is in the upper half."""
    return np.asarray(columns << 4 | columns >> 4, np.uint8)


def sort_codes(columns: Codes, ids: Ids) -> tuple[Codes, Ids, Ids]:
    """Sort codes by first codeword, second codeword, ..., and id, unless they are in this order.

    Args:
        columns: uint8 [n, T] (:func:`columns_of`).

    Returns:
        Columns and ids, and the position of the first of each distinct code, followed by n.
    """
    if not _is_sorted(swap_halves(columns), ids):
        order = np.lexsort((ids, *swap_halves(columns).T[::-1]))
        columns, ids = columns.take(order, axis=0), ids.take(order)
    is_new = (columns[1:] != columns[:-1]).any(axis=1)
    return columns, ids, np.concatenate([[0], np.flatnonzero(is_new) + 1, [len(ids)]])


def _is_sorted(columns: Codes, ids: Ids) -> bool:
    """Return whether rows of bytes are in ascending order, and equal ones in that of their ids."""
    rows = np.arange(len(ids) - 1)
    first = (columns[1:] != columns[:-1]).argmax(axis=1)
    previous, following = columns[rows, first], columns[rows + 1, first]
    ascending = np.where(previous == following, ids[:-1] < ids[1:], previous < following)
    return bool(ascending.all())


def first_words(columns: Codes, P: int) -> NDArray[np.uint16]:
    """Return the first P codewords of each code as a number, the first in the highest bits."""
    words = np.zeros((len(columns), 2), np.uint8)
    words[:, : columns.shape[1]] = swap_halves(columns[:, :2])
    all_words = words.view(">u2")[:, 0].astype(np.uint16)
    return np.asarray(all_words >> 4 * (LEVELS - P), np.uint16)


def levels_of(M: int, K: int) -> int:
    """Return the length of the longest possible prefix, which leaves at least one codeword."""
    return min(LEVELS, M - 1) if K <= 16 else 0


def choose_prefix(counts: Ids) -> int:
    """Return the length of the longest prefix whose sub-lists are long and few enough to be visited
    one by one.

    Args:
        counts: int64 [16^levels], numbers of codes by their longest possible prefix.
    """
    n = int(counts.sum())
    levels = (len(counts).bit_length() - 1) // 4
    prefix = min(1, levels)
    while prefix < levels:
        sizes = counts.reshape(16 ** (prefix + 1), -1).sum(axis=1)
        squares = np.square(sizes.astype(np.float64)).sum()
        if np.count_nonzero(sizes) > 8 * n**0.5 or squares < _MIN_SUBLIST * n:
            break
        prefix += 1
    return prefix


def sublists(row_counts: Ids, prefix: int) -> tuple[Codes, Ids]:
    """Return names and ends of the sub-lists (see :class:`.list_kernels.Lists`).

    Args:
        row_counts: int64 [16^prefix], numbers of distinct codes by prefix.
    """
    words = np.flatnonzero(row_counts)
    packed = pack_codes(words[:, None] >> 4 * np.arange(prefix)[::-1] & 15, 16)
    names = np.zeros((len(words), 2), np.uint8)
    first = int(prefix == 1)  # a single codeword is in the second byte
    names[:, first : first + packed.shape[1]] = packed
    return names, np.append(0, np.cumsum(row_counts[words]))


def blocks_of(columns: Codes) -> Codes:
    """Return distinct codes in blocks, uint8 [ceil(n / 64), T, 64], filled up with zeros."""
    padded = np.pad(columns, ((0, -len(columns) % BLOCK), (0, 0)))
    blocks = padded.reshape(-1, BLOCK, columns.shape[1])
    return np.ascontiguousarray(blocks.transpose(0, 2, 1))


# Searching ----------------------------------------------------------------------------------------


class InvertedLists:
    """Exact search of codes in inverted lists, in memory or mapped. Thread-safe.

    The arrays never change. A mask hides items that were removed, or that a filter excludes.

    Args:
        codebooks: float32 [M, K, d].
        prefix, names, ends, blocks, starts, members: see :class:`.list_kernels.Lists`.

    Attributes:
        arrays: the arrays, with a mask.
        n: number of items, hidden or not.
        ntotal: number of items that are not hidden.
    """

    def __init__(
        self,
        codebooks: Floats,
        prefix: int,
        names: Codes,
        ends: Ids,
        blocks: Codes,
        starts: NDArray[Any],
        members: NDArray[Any],
    ) -> None:
        self.codebooks = codebooks
        self.n = self.ntotal = len(members)
        first = np.flatnonzero(np.append(True, names[1:, 0] != names[:-1, 0]))
        transposed = np.ascontiguousarray(codebooks.transpose(2, 0, 1))
        arrays = np.append(first, len(names)), names, ends, blocks, starts, members
        for array in (transposed, *arrays):
            array.flags.writeable = False  # as mapped ones are, so that loops are compiled once
        self.arrays = Lists(transposed, False, prefix, *arrays, _NO_MASK)

    @classmethod
    def build(cls, codes: Codes, ids: Ids, Z: Floats, *, is_l2: bool = False) -> Self:
        """Sort checked codes into lists.

        Args:
            codes: uint8 [n, code_size]. Codes that are in the order of lists are not sorted again.
            ids: int64 [n], each once.
            Z: codebooks, float32 [M, K, d].
            is_l2: whether a score is the negative squared distance, and not the inner product.

        Raises:
            DataError: there are no codes.
        """
        if not len(codes):
            raise DataError("no codes: an index needs at least one item")
        M, K = Z.shape[:2]
        columns, ids, starts = sort_codes(columns_of(codes, M, K), ids)
        levels = levels_of(M, K)
        prefix = choose_prefix(np.bincount(first_words(columns, levels), minlength=16**levels))
        distinct = columns.take(starts[:-1], axis=0)
        names, ends = sublists(np.bincount(first_words(distinct, prefix)), prefix)
        if len(distinct) == len(ids):
            starts = starts[:0]
        starts = starts.astype(number_type(len(ids)))
        members = ids.astype(number_type(int(ids.max()), int(ids.min())))
        lists = cls(Z, prefix, names, ends, blocks_of(distinct), starts, members)
        lists.arrays = lists.arrays._replace(is_l2=is_l2)
        return lists

    def search(self, xq: Floats, k: int, *, threads: int | None = None) -> tuple[Floats, Ids]:
        """Return the k best items of each query.

        Args:
            xq: float32 [Q, M * d], C-contiguous.
            threads: maximum number of threads (default: Faiss' setting).

        Returns:
            Scores float32 [Q, k] and ids int64 [Q, k], best first, ties in ascending order of id;
            -inf and -1 where there are fewer items.

        Raises:
            DataError: queries have NaN or infinity, or are too large for float32 scores.
        """
        lists = self.arrays
        row_limit = _CACHE_BYTES // lists.blocks.shape[1]
        D, ids = np.empty((len(xq), k), np.float32), np.empty((len(xq), k), np.int64)
        status = np.empty(len(xq), np.uint8)
        search = partial(list_kernels.search, lists, k, row_limit)
        if any(_in_parallel(search, (xq, D, ids, status), threads)):
            if (status == list_kernels.NOT_FINITE).any():
                raise not_finite(np.flatnonzero(status == list_kernels.NOT_FINITE))
            rows = np.flatnonzero(status)
            arrays = xq[rows], D[rows], ids[rows]
            _in_parallel(partial(list_kernels.search_together, lists), arrays, threads)
            D[rows], ids[rows] = arrays[1:]
        return D, ids

    def range_search(
        self, xq: Floats, min_scores: NDArray[np.float64], limit: int
    ) -> tuple[Ids, Floats, Ids]:
        """Return all items that score at least the minimum score of a query, in any order.

        Args:
            xq: float32 [Q, M * d], C-contiguous, at least one.
            min_scores: float64 [Q].
            limit: the search stops at more results than this.

        Returns:
            Row of the query int64 [n], score float32 [n] and id int64 [n] of each result.

        Raises:
            DataError: see :meth:`search`.
        """
        results = []
        remaining = limit
        for row, (query, min_score) in enumerate(zip(xq, min_scores, strict=True)):
            room = min(remaining, self.n)
            D, ids, count = list_kernels.range_search(
                self.arrays, room, query, np.float32(min_score)
            )
            if count < 0:
                raise not_finite(np.array([row]))
            results.append((np.full(count, row), D[:count].copy(), ids[:count].copy()))
            remaining -= count
            if remaining < 0:
                break
        rows, scores, members = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
        return rows, scores, members

    # Items ------------------------------------------------------------------------------------

    def codes(self, positions: Ids | None = None) -> Codes:
        """Return the codes of members, uint8 [n, code_size].

        Args:
            positions: int64 [n] (default: all members).
        """
        rows = np.arange(self.n) if positions is None else positions
        if len(self.arrays.starts):
            rows = np.searchsorted(self.arrays.starts, rows, side="right") - 1
        columns = self.arrays.blocks[rows // BLOCK, :, rows % BLOCK]
        return codes_of(columns, *self.codebooks.shape[:2])

    def blocks(self, size: int) -> Iterator[tuple[Codes, Ids]]:
        """Yield codes uint8 [n, code_size] and ids int64 [n] of items that are not hidden.

        A block has at most ``size`` items, and none if all of its items are hidden.
        """
        for start in range(0, self.n, size):
            positions = np.arange(start, min(self.n, start + size))
            if len(self.arrays.mask):
                positions = positions[self.arrays.mask[positions]]
            yield self.codes(positions), self.arrays.members[positions].astype(np.int64)

    def positions(self, ids: Ids) -> Ids:
        """Return the position of each id among the members, int64 [m]; -1 if it is not there."""
        order, ordered = self._by_id
        # Numbers of one type, as searchsorted would copy all ids for others.
        ranks = np.searchsorted(ordered, ids.clip(ordered[0], ordered[-1]).astype(ordered.dtype))
        positions: Ids = np.where(ordered[ranks] == ids, order[ranks], -1)
        if len(self.arrays.mask):
            positions[~self.arrays.mask[positions]] = -1
        return positions

    @cached_property
    def _by_id(self) -> tuple[Ids, NDArray[Any]]:
        """Positions of the members in ascending order of id, and these ids."""
        order = np.argsort(self.arrays.members)
        return order, self.arrays.members[order]

    def filtered(self, ids: Ids, *, deny: bool) -> Self:
        """Return lists in which only the items with these ids, or only the others, are not hidden.

        The arrays are shared, or copied if few items are left.
        """
        positions = self.positions(ids)
        positions = positions[positions >= 0]
        if deny and not len(positions):
            return self
        mask = np.full(self.n, deny)
        mask[positions] = not deny
        if len(self.arrays.mask):
            mask &= self.arrays.mask
        ntotal = int(np.count_nonzero(mask))
        if 0 < ntotal * _SPARSE <= self.n:
            positions = np.flatnonzero(mask)
            ids = self.arrays.members[positions].astype(np.int64)
            codes = self.codes(positions)
            return self.build(codes, ids, self.codebooks, is_l2=self.arrays.is_l2)
        ends = self.arrays.ends if ntotal else np.zeros_like(self.arrays.ends)  # nothing to scan
        for array in (mask, ends):
            array.flags.writeable = False
        lists = copy.copy(self)
        lists.arrays = self.arrays._replace(mask=mask, ends=ends)
        lists.ntotal = ntotal
        return lists

    def crc(self) -> int:
        """Return the CRC-32 of the codes, XOR that of the ids as int64, in the order of lists.

        Items that are hidden do not count.
        """
        codes_crc = 0
        ids_crc = 0
        for codes, ids in self.blocks(_ROWS):
            codes_crc = zlib.crc32(codes.data, codes_crc)
            ids_crc = zlib.crc32(ids.data, ids_crc)
        return codes_crc ^ ids_crc


def number_type(largest: int, smallest: int = 0) -> type[np.uint32 | np.int64]:
    """Return the smallest type of numbers for a range: uint32 or int64."""
    return np.uint32 if smallest >= 0 and largest < 1 << 32 else np.int64


def not_finite(rows: NDArray[Any]) -> DataError:
    """Return the error of queries without finite scores."""
    return DataError(
        f"queries: NaN, infinity or values too large for float32 scores in {named_rows(rows)}"
    )


def _in_parallel(run: Callable[..., Any], arrays: Sequence[Any], threads: int | None) -> list[Any]:
    """Return the results of ``run`` for blocks of up to 256 rows of all arrays, in threads."""
    n = len(arrays[0])
    useful = n // _MIN_QUERIES
    count = 1 if useful < 2 else min(threads or faiss.omp_get_max_threads(), useful)
    if count < 2:
        return [run(*arrays)]
    step = min(256, -(-n // count))
    blocks = [[array[start : start + step] for array in arrays] for start in range(0, n, step)]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, *zip(*blocks, strict=True)))

"""Exact search: the codes are their own inverted file.

Codes are sorted by their codewords. A list holds the codes that begin with the same P codewords. The score of these, plus the best entry of
every other table, bounds the scores of all codes of the list. A search visits the most promising list first, then those whose bounds reach
the k-th score so far, best cells first. In a list, what cannot be a result is passed over, 64 codes at once (:mod:`.near`), and the rest is
scored. So the result equals that of brute force on any data, ties ordered by id.

With ``nprobe`` only that many lists are visited, those of the best bounds; the next bound says how much an item outside them can score
(:meth:`ListSearch.bound`).

:class:`CodewordLists` holds its codes in memory, equal ones once. :mod:`.file` has the lists of an index file, which are read when they are
visited. The inverted multi-index (Babenko and Lempitsky, CVPR 2012) has such lists without bounds; PQTable (Matsui et al., TMM 2018) looks
codes up without lists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..codes.checks import Codes, Floats, Ids
from ..errors import UsageError
from ..faissio.storage import LEVELS, choose_P, first_words
from . import kernels
from .base import too_many
from .near import BLOCK, put
from .threads import in_parallel, workers

NO_FILTER = np.empty(0, np.bool_)
_MANY = 1 << 24  # bytes of codes that come from memory, not from a processor's cache
_ANY = np.full(1, -np.inf, np.float32)


def columns_of(codes: Codes, M: int, K: int) -> Codes:
    """Codes, one byte a table: two codewords where K <= 16, else one."""
    if K == 16:
        return codes
    indices = unpack_codes(codes, M, K)
    return pack_codes(indices, 16) if K < 16 else np.ascontiguousarray(indices)


def grouped(columns: Codes) -> tuple[Ids, Ids]:
    """The stable order of rows uint8 [n, T] by their codewords, the first in front, and where in it each distinct row begins."""
    n, T = columns.shape
    bits = n.bit_length()
    # Columns and a row's place are one number: NumPy sorts such ten times as fast as it orders rows.
    width = (64 - bits) // 8
    order = None
    new = np.zeros(n, np.bool_)
    new[:1] = True
    for stop in range(T, 0, -width):
        numbers = np.zeros(n, np.uint64)
        for t in range(max(0, stop - width), stop):
            numbers <<= np.uint64(8)
            column = columns[:, t] if order is None else columns[:, t].take(order)
            numbers |= (
                column << 4 | column >> 4
            )  # of a pair, the first codeword is in the lower half
        numbers <<= np.uint64(bits)
        numbers |= np.arange(n, dtype=np.uint64)
        numbers.sort()
        places = (numbers & np.uint64((1 << bits) - 1)).view(np.int64)
        order = places if order is None else order.take(places)
    assert order is not None
    numbers >>= np.uint64(bits)
    new[1:] = numbers[1:] != numbers[:-1]
    for t in range(stop, T):
        ordered = columns[:, t].take(order)
        new[1:] |= ordered[1:] != ordered[:-1]
    return order, np.flatnonzero(new)


def names_of(keys: Ids, P: int) -> Codes:
    """The two bytes by which a list's score is looked up, uint8 [lists, 2], from its first P codewords (:func:`first_words`)."""
    packed = pack_codes(keys[:, None] >> 4 * np.arange(P)[::-1] & 15, 16)
    names = np.zeros((len(keys), 2), np.uint8)
    at = int(P == 1)  # a single codeword lies in the second byte
    names[:, at : at + packed.shape[1]] = packed
    return names


class ListSearch:
    """Search of codes in lists. Thread-safe. Queries are those of :meth:`.base.Index._queries`.

    Args:
        Z: codebooks, float32 [M, K, d], checked.
        P: codebooks whose codewords name a list.
        names: uint8 [lists, 2] (:func:`names_of`), in the order of the lists.
        sizes: int64 [lists], codes of each.

    Attributes:
        lists: number of lists.
        scored: codes of the lists that searches have visited so far, and
        searched: number of queries so far: for benchmarks.
    """

    _pieces: tuple[Ids, Ids]  # as arguments of kernels.search
    _ends: Ids
    _rows: tuple[Codes, NDArray[np.uint32], NDArray[Any]]

    def __init__(self, Z: Floats, P: int, names: Codes, sizes: Ids) -> None:
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.P, self.names, self.sizes, self.lists = P, names, sizes, len(names)
        self.T = (
            self.M if self.K > 16 else (self.M + 1) // 2
        )  # tables of a code (:func:`columns_of`)
        self.scored = self.searched = 0
        self._ZT = np.ascontiguousarray(Z.transpose(2, 0, 1))
        cells = np.zeros(1, np.int64)
        if P >= 2:
            cells = np.flatnonzero(np.append(True, names[1:, 0] != names[:-1, 0]))
        self._cells = (
            names[cells, 0].copy(),
            np.append(cells, self.lists),
            np.add.reduceat(sizes, cells),
        )

    @staticmethod
    def _least(floor: Floats | None, queries: int) -> Floats:
        """The lowest scores that count, float32 [Q]. Raises UsageError: not one for each query."""
        if floor is None:
            return _ANY if queries == 1 else np.full(queries, -np.inf, np.float32)
        if np.shape(floor) != (queries,):
            raise UsageError(
                f"floor {np.shape(floor)}: give one score for each of the {queries:,} queries"
            )
        return np.require(floor, np.float32, ["C", "A", "W"])

    def list_bounds(self, xq: Floats) -> Floats:
        """What an item of each list can score at most: float32 [Q, lists]."""
        bounds = np.empty((len(xq), self.lists), np.float32)
        kernels.list_bounds(xq, self._ZT, self.P, self.names, bounds)
        return bounds

    def bound(self, xq: Floats, k: int, nprobe: int) -> Floats:
        """What an item outside the lists that a search with ``nprobe`` visits can score at most: float32 [Q], -inf if there is none."""
        return np.array(
            [self._probed(bounds, k, nprobe)[1] for bounds in self.list_bounds(xq)], np.float32
        )

    def _probed(self, bounds: Floats, k: int, nprobe: int) -> tuple[Ids, np.float32]:
        """The ``nprobe`` lists of the best bounds, and more if these have fewer than ``k`` codes; and the best bound of the others."""
        order = np.argsort(-bounds, kind="stable")
        enough = int(np.searchsorted(self.sizes.take(order).cumsum(), k)) + 1
        count = min(max(nprobe, enough), len(order))
        return order[:count], bounds[order[count]] if count < len(order) else np.float32(-np.inf)

    def _visit(
        self,
        xq: Floats,
        lists: Ids,
        at: Ids,
        passing: NDArray[np.bool_],
        k: int,
        floor: Floats,
        *out: Any,
    ) -> None:
        """Visit lists for all queries (:func:`.kernels.visit`)."""
        about = self._ZT, self.P, self.names
        self.scored += kernels.visit(
            xq, *about, lists, at, self._ends, self._rows, passing, k, floor, *out
        )

    def _listed(
        self,
        k: int,
        passing: NDArray[np.bool_],
        count: int,
        xq: Floats,
        floor: Floats,
        D: Floats,
        found: Ids,
    ) -> None:
        """Fill the results, in ``count`` threads."""

        def run(*own: Any) -> None:
            lists = self._ZT, self.P, self.names, self._cells, self._pieces
            self.scored += kernels.search(*lists, self._ends, self._rows, passing, k, many, *own)

        given_up, many = np.empty(len(xq), np.bool_), _MANY // self.T
        in_parallel(run, (xq, floor, D, found, given_up), count)
        left = given_up.nonzero()[0]
        if len(left):
            self._together(left, k, passing, count, xq, np.maximum(floor, D[:, 0]), D, found)

    def _together(
        self,
        left: Ids,
        k: int,
        passing: NDArray[np.bool_],
        count: int,
        xq: Floats,
        floor: Floats,
        *out: Any,
    ) -> None:
        """Fill the results of the queries ``left``, which visit each list together."""
        D, found = (array[left] for array in out)
        counts = np.zeros(len(left), np.int64)
        self._visit_all(k, passing, count, xq[left], floor[left], D, found, counts)
        for q, some in enumerate(counts.tolist()):
            kernels.order(D[q], found[q], some)
            D[q, some:], found[q, some:] = -np.inf, -1
        out[0][left], out[1][left] = D, found

    def _visit_all(
        self, k: int, passing: NDArray[np.bool_], count: int, xq: Floats, floor: Floats, *out: Any
    ) -> None:
        """Visit all lists for all queries, in ``count`` threads; the results are in any order."""
        lists = np.arange(self.lists)

        def run(xq: Floats, floor: Floats, *own: Any) -> None:
            self._visit(xq, lists, lists, passing, k, floor, *own)

        in_parallel(run, (xq, floor, *out), min(count, workers(len(xq), count)))

    def _probe(
        self, xq: Floats, k: int, nprobe: int, D: Floats, found: Ids, visit: Callable[..., None]
    ) -> None:
        """Fill the results of a search with ``nprobe``: ``visit(query, lists, D, found, count)``."""
        D.fill(-np.inf)
        found.fill(-1)
        for q, bounds in enumerate(self.list_bounds(xq)):
            one, count = slice(q, q + 1), np.zeros(1, np.int64)
            visit(one, self._probed(bounds, k, nprobe)[0], D[one], found[one], count)
            kernels.order(D[q], found[q], int(count[0]))
        self.searched += len(xq)


def all_reaching(
    min_score: float, limit: int, visit: Callable[[Floats, Ids, Ids], None]
) -> tuple[Floats, Ids]:
    """Scores and items of all that ``visit(D, found, count)`` finds, in any order. Raises DataError: more than ``limit``."""
    size = min(limit, 4096)
    while True:
        D, found, count = (
            np.empty((1, size), np.float32),
            np.empty((1, size), np.int64),
            np.zeros(1, np.int64),
        )
        visit(D, found, count)
        size = int(count[0])
        if size > limit:
            raise too_many(min_score, limit)
        if size <= D.shape[1]:
            return D[0, :size], found[0, :size]


def best_first(scores: Floats, items: Ids) -> tuple[Floats, Ids]:
    """Results in the order of their scores, ties by item."""
    order = np.lexsort((items, -scores))
    return scores[order], items[order]


class CodewordLists(ListSearch):
    """Exact search of codes in memory by row number.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d], checked.

    Attributes:
        n: number of codes.
        distinct: number of distinct codes.

    Raises:
        UsageError: 2^32 codes or more.
    """

    def __init__(self, codes: Codes, Z: Floats) -> None:
        M, K = int(Z.shape[0]), int(Z.shape[1])
        self.n = len(codes)
        if self.n >= 1 << 32:
            raise UsageError(f"{self.n:,} codes are too many for one search in memory: use shards")
        columns = columns_of(codes, M, K)
        levels = min(LEVELS, M - 1) if K <= 16 else 0
        P = choose_P(np.bincount(first_words(columns, levels), minlength=16**levels), M, Z)
        order, starts = grouped(columns)
        columns = columns.take(order.take(starts), axis=0)
        self.distinct = len(columns)
        blocks = np.zeros((-(-self.distinct // BLOCK), columns.shape[1], BLOCK), np.uint8)
        put(blocks, 0, columns)
        starts = np.append(starts, self.n) if self.distinct < self.n else starts[:0]
        self._rows = blocks, starts.astype(np.uint32), order.astype(np.uint32)
        keys = first_words(columns, P)
        heads = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))
        self._ends = np.append(heads, self.distinct)
        super().__init__(Z, P, names_of(keys.take(heads), P), np.diff(self._ends))
        self._pieces = np.arange(self.lists + 1), np.arange(self.lists)

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        mask: NDArray[np.bool_] | None = None,
        nprobe: int | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of each checked query [Q, M*d]: scores float32 [Q, k], and row numbers int64 [Q, k].

        Missing results have score -inf and number -1.

        Args:
            mask: bool [n], the items that may be returned (default: all).
            nprobe: visit this many lists, and more if these have fewer than ``k`` codes (default: all that can have a result).
            floor: float32 [Q], items with lower scores may be left out.
        """
        n = len(xq)
        least = self._least(floor, n)
        D, found = np.empty((n, k), np.float32), np.empty((n, k), np.int64)
        passing = NO_FILTER if mask is None else mask.take(self._rows[2])
        if nprobe is not None:

            def probe(xq: Floats, least: Floats, D: Floats, found: Ids) -> None:
                def visit(one: slice, lists: Ids, *out: Any) -> None:
                    self._visit(xq[one], lists, lists, passing, k, least[one], *out)

                self._probe(xq, k, nprobe, D, found, visit)

            in_parallel(probe, (xq, least, D, found), workers(n, threads))
        else:
            self.searched += n
            self._listed(k, passing, workers(n, threads), xq, least, D, found)
        return D, found

    def range_search(
        self, query: Floats, min_score: float, limit: int, *, mask: NDArray[np.bool_] | None = None
    ) -> tuple[Floats, Ids]:
        """Scores and row numbers, best first, of all items with at least ``min_score`` for a checked query [M*d].

        Raises:
            DataError: more than ``limit``.
        """
        xq = query[None]
        passing = NO_FILTER if mask is None else mask.take(self._rows[2])
        least, lists = np.array([min_score], np.float32), np.arange(self.lists)

        def visit(*out: Any) -> None:
            self._visit(xq, lists, lists, passing, 0, least, *out)

        return best_first(*all_reaching(min_score, limit, visit))

"""Search of a single query: shortlist and proof as in :mod:`.proof`, with few numpy calls.

The calls for a batch cost hundreds of microseconds, the arithmetic of one query only a few. Floats are summed in the same order, so
results are bit-equal.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.scores import lookup, lookup_columns
from .scanners import FastScan, loose_bound

_BYTES = 1 << 16
"""Maximum bytes of codes for scoring all if the proof fails, which needs eight times as much memory."""
_SMALLEST, _LARGEST = 1e-30, 1e30  # range of |q|^2 without overflow or underflow in float32


class Found(NamedTuple):
    """The best items of one query.

    Attributes:
        scores: float32 [k], descending.
        positions: int64 [k], row numbers, which order ties.
        proven: whether the shortlist sufficed; otherwise all codes were scored.
        needed: number of relevant candidates.
    """

    scores: Floats
    positions: Ids
    proven: bool
    needed: int


class SingleSearch:
    """Searches codes for one query. Thread-safe.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, 16, d], checked.
        scan: of these codes.
    """

    def __init__(self, codes: Codes, Z: Floats, scan: FastScan) -> None:
        self.codes = codes
        self.scan = scan
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self._by_dimension = np.ascontiguousarray(Z.transpose(2, 0, 1))
        self._pair_starts = (np.arange(codes.shape[1]) * self.K**2)[:, None]  # in the paired tables
        self._few = codes.size <= _BYTES
        self._columns: list[NDArray[np.intp]] | None = None

    def search(self, query: Floats, k: int, wanted: int) -> Found | None:
        """The ``k`` best for a checked query, float32 [M*d]; None if :class:`.proof.ProvenSearch` is needed.

        ``wanted`` (more than ``k``) candidates are shortlisted, unless these are a quarter of the codes.
        """
        wide = query.astype(np.float64)  # float64, without overflow
        squares = float(np.dot(wide, wide))
        if not _SMALLEST < squares < _LARGEST:
            return None
        # Summed over the outer axis, in the order of score_tables. (0 + -0 is 0, as there.)
        products = np.multiply(self._by_dimension, query.reshape(self.M, self.d).T[:, :, None], order="C")
        tables = np.add.reduce(products, axis=0, initial=0)
        pairs = self._pair_tables(tables)
        if 4 * wanted >= len(self.codes):
            return self._best_of_all(pairs, k, None, 0) if self._few else None
        shortlisted, found = self.scan.candidates(query[None], wanted)
        approximate, positions = shortlisted[0], found[0]
        if positions[-1] < 0:
            return None
        positions.sort()  # the stable sort by score below leaves ties in this order
        places = np.add(self.codes.take(positions, axis=0).T, self._pair_starts, order="C")
        scores = np.add.reduce(pairs.take(places), axis=0)  # again over the outer axis, left to right
        order = (-scores).argsort(kind="stable")[:k]
        kth = float(scores[order[-1]])
        slack = loose_bound(tables, squares, self.d)
        needed = int(np.count_nonzero(approximate >= kth - slack))
        if float(approximate[-1]) + slack < kth:
            return Found(scores.take(order), positions.take(order), True, needed)
        return self._best_of_all(pairs, k, kth, needed) if self._few else None

    def _pair_tables(self, tables: Floats) -> Floats:
        """:func:`..codes.scores.lookup_tables` of one query's tables [M, 16], in one row; an odd one is paired with zeros."""
        if self.M % 2:
            tables = np.concatenate([tables, np.zeros((1, self.K), np.float32)])
        return (tables[1::2, :, None] + tables[0::2, None, :]).reshape(-1)

    def _best_of_all(self, pairs: Floats, k: int, least: float | None, needed: int) -> Found:
        """The best of all codes, of which at least ``k`` score ``least``."""
        if self._columns is None:
            self._columns = lookup_columns(self.codes, self.M, self.K)
        scores = lookup(pairs.reshape(len(self._columns), -1), self._columns, paired=True)
        if least is None:
            least = float(np.partition(scores, len(scores) - k)[len(scores) - k])
        positions = np.flatnonzero(scores >= np.float32(least))
        among = scores.take(positions)
        order = (-among).argsort(kind="stable")[:k]
        return Found(among.take(order), positions.take(order), False, needed)

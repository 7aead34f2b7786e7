"""Scores as integers, so that everything after them is exact.

Tables are rounded to multiples of a power of two, 2^-29 of a query's largest possible score; their sums are exact
in any order, and more accurate than float32 sums. Scores of a function keep their float32 bits, mapped to integers
of the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .grouping import Bytes
from .ties import Ints

Keys = NDArray[np.int32]

LAST = np.int32(np.iinfo(np.int32).max)
"""Larger than any key: sorts last."""

_TABLE_ENTRIES = 4096  # of a joint look-up table: 16 KiB, which fit the L1 cache
_TOGETHER = 8  # queries per look-up: reading 32 bytes costs as much as 4
_ROWS = 4096  # codes per block of these
_WIDE = 8192  # minimum number of codes for which that is faster (measured)
_BY_ITEM = 0.6  # minimum share of distinct codes for which sorting items is faster (measured)


class Scorer(Protocol):
    """Computes scores as integers, *smaller is better*."""

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        """Fill ``out`` int32 [q, U]; ``spare`` is scratch of that shape."""
        ...

    def expand(self, code_of: Ints) -> Scorer | None:
        """The scores per item instead of per code, or None if that is slower. The last bit of these keys is 0, and their
        magnitude is below 2^31 - 2."""
        ...


class TableScorer:
    """Sums tables [Q, M, K] over codes [U, M]."""

    def __init__(self, tables: NDArray[np.float32], codes: Bytes) -> None:
        """Check and prepare.

        Raises:
            UsageError: codes of another width than the tables. DataError: codewords out of range, tables not
                finite.
        """
        tables = np.asarray(tables)
        if tables.ndim != 3 or tables.dtype != np.float32:
            raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
        _, m, size = tables.shape
        if codes.shape[1] != m:
            raise UsageError(
                f"codes have {codes.shape[1]} codewords each, the tables {m} codebooks: unpack the codes first"
            )
        if len(codes) and int(codes.max()) >= size:
            raise DataError(f"codeword {codes.max()} is out of range: the codebooks have {size}")
        # Bounds all scores; NaN or infinite if any entry is.
        magnitude = np.maximum(tables.max(axis=2, initial=0.0), -tables.min(axis=2, initial=0.0))
        largest = magnitude.sum(axis=1, dtype=np.float64)
        if not (largest < np.finfo(np.float32).max).all():
            raise DataError(
                "score tables contain NaN, infinity or values too large to add: check the query vectors"
            )
        # The sum stays below 2^29 + M/2, which leaves a bit for relevance and the largest value for "last of
        # all".
        self._exponent = 29 - np.frexp(largest)[1]
        self._tables, self._codes = tables, codes
        # A gather costs the same whatever it reads: one look-up serves as many codebooks as fit a small table.
        step = 1
        while step < m and size ** (step + 1) <= _TABLE_ENTRIES:
            step += 1
        self._chunks: list[tuple[int, int, Ints]] = []
        for start in range(0, m, step):
            stop = min(m, start + step)
            index = np.zeros(len(codes), dtype=np.int64)
            for column in range(start, stop):
                index = index * size + codes[:, column]
            self._chunks.append((start, stop, index))

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        scaled = np.ldexp(self._tables[queries].astype(np.float64), self._exponent[queries, None, None])
        tables = np.rint(scaled).astype(np.int32) * np.int32(-2)  # the last bit stays free
        if out.shape[1] < _WIDE:
            self._fill_rows(tables, out, spare)
            return
        for first in range(0, len(queries), _TOGETHER):
            self._fill_wide(tables[first : first + _TOGETHER], out[first : first + _TOGETHER])

    def _joint(self, tables: Keys, start: int, stop: int) -> Keys:
        """One table [q, K^(stop - start)] for the codebooks from ``start`` to ``stop``."""
        joint: Keys = tables[:, start]
        for column in range(start + 1, stop):
            joint = (joint[:, :, None] + tables[:, None, column]).reshape(len(tables), -1)
        return joint

    def _fill_rows(self, tables: Keys, out: Keys, spare: Keys) -> None:
        for start, stop, index in self._chunks:
            joint = self._joint(tables, start, stop)
            if start == 0:
                np.take(joint, index, axis=1, out=out, mode="clip")  # "clip" writes directly into out
            else:
                np.take(joint, index, axis=1, out=spare, mode="clip")
                np.add(out, spare, out=out)

    def _fill_wide(self, tables: Keys, out: Keys) -> None:
        """The same, looking up the entries of several queries at once."""
        joints = [np.ascontiguousarray(self._joint(tables, a, b).T) for a, b, _ in self._chunks]
        total, part = (np.empty((_ROWS, len(tables)), dtype=np.int32) for _ in range(2))
        for first in range(0, out.shape[1], _ROWS):
            rows = slice(first, min(first + _ROWS, out.shape[1]))
            n = rows.stop - first
            for joint, (start, _, index) in zip(joints, self._chunks, strict=True):
                np.take(joint, index[rows], axis=0, out=part[:n] if start else total[:n], mode="clip")
                if start:
                    np.add(total[:n], part[:n], out=total[:n])
            out[:, rows] = total[:n].T

    def expand(self, code_of: Ints) -> Scorer | None:
        if len(self._codes) < _BY_ITEM * len(code_of):
            return None
        return TableScorer(self._tables, self._codes[code_of])


class FunctionScorer:
    """Scores from a function, of float32 or a type that fits float32 exactly."""

    def __init__(self, function: Callable[[Ints], NDArray[Any]]) -> None:
        self._function = function

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        given = np.asarray(self._function(queries))
        if given.shape != out.shape:
            raise DataError(
                f"the score function returned {given.shape} for {len(queries)} queries: expected {out.shape}"
            )
        floats = out.view(np.float32)
        if given.dtype != np.float32:
            with np.errstate(over="ignore"):
                floats[...] = given
            if not (floats == given).all() and np.isfinite(given).all():
                raise UsageError(
                    f"scores of type {given.dtype} do not fit float32 exactly: round them first, as this creates ties"
                )
            given = floats
        if not np.isfinite(given).all():
            raise DataError("scores contain NaN or infinity: a ranking needs finite scores")
        np.subtract(np.float32(0), given, out=floats)  # 0 - x maps -0.0 to 0.0
        # Bits of floats compare like integers, reversed for negative values.
        np.right_shift(out, 31, out=spare)
        np.bitwise_and(spare, LAST, out=spare)
        np.bitwise_xor(out, spare, out=out)

    def expand(self, code_of: Ints) -> Scorer | None:
        return None

"""Scores as integers, so that everything after them is exact: *smaller is better*.

Tables are rounded to multiples of a power of two, 2^-29 of a query's largest possible score; their sums are exact
in any order, and more accurate than float32 sums. Scores of a function keep their float32 bits, mapped to integers
of the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .grouping import Bytes
from .ties import Ints

Keys = NDArray[np.int32]
Tables = NDArray[np.float32]
ScoreFunction = Callable[[Ints, Bytes], NDArray[Any]]
"""``(query rows int64 [q], distinct codes uint8 [U, W]) -> scores [q, U]``, larger is better."""
Fill = Callable[[Ints, Keys], None]
"""Writes the scores of the queries [q] to int32 [q, U]."""

LAST = np.int32(np.iinfo(np.int32).max)
"""Larger than any key: sorts last."""

_TABLE_ENTRIES = 4096  # of a joint look-up table: 16 KiB, which fit the L1 cache
_TOGETHER = 8  # queries per look-up: reading 32 bytes costs as much as 4
_ROWS = 4096  # codes per block of these


def scores_of(scorer: Tables | ScoreFunction, codes: Bytes) -> Fill:
    """The scores of codes uint8 [U, W] by tables float32 [Q, M, K] (the last bit of these keys is 0) or by a function."""
    return _by_function(scorer, codes) if callable(scorer) else _by_tables(scorer, codes)


def _units(tables: Tables, codes: Bytes) -> Ints:
    """The exponent of each query's unit of score, 2^-29 of its largest possible score, for tables that belong to the codes."""
    if tables.ndim != 3 or tables.dtype != np.float32:
        raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
    _, M, K = tables.shape
    if codes.shape[1] != M:
        raise UsageError(
            f"codes have {codes.shape[1]} codewords each, the tables {M} codebooks: unpack the codes first"
        )
    if len(codes) and int(codes.max()) >= K:
        raise DataError(f"codeword {codes.max()} is out of range: the codebooks have {K}")
    # Bounds all scores; NaN or infinite if any entry is.
    magnitude = np.maximum(tables.max(axis=2, initial=0.0), -tables.min(axis=2, initial=0.0))
    largest = magnitude.sum(axis=1, dtype=np.float64)
    if not (largest < np.finfo(np.float32).max).all():
        raise DataError(
            "score tables contain NaN, infinity or values too large to add: check the query vectors"
        )
    # The sum stays below 2^29 + M/2, which leaves a bit for relevance and the largest value for "last of all".
    exponent: Ints = 29 - np.frexp(largest)[1].astype(np.int64)
    return exponent


def _by_tables(tables: Tables, codes: Bytes) -> Fill:
    tables = np.asarray(tables)
    exponent = _units(tables, codes)
    M, K = tables.shape[1:]
    # A gather costs the same whatever it reads: one look-up serves as many codebooks as fit a small table.
    step = 1
    while step < M and K ** (step + 1) <= _TABLE_ENTRIES:
        step += 1
    chunks: list[tuple[range, Ints]] = []
    for start in range(0, M, step):
        books = range(start, min(M, start + step))
        index = np.zeros(len(codes), dtype=np.int64)
        for m in books:
            index = index * K + codes[:, m]
        chunks.append((books, index))

    def fill(queries: Ints, out: Keys) -> None:
        for first in range(0, len(queries), _TOGETHER):
            some = queries[first : first + _TOGETHER]
            scaled = np.ldexp(tables[some].astype(np.float64), exponent[some, None, None])
            whole = np.rint(scaled).astype(np.int32) * np.int32(-2)  # the last bit stays free
            joints = []
            for books, _ in chunks:
                joint = whole[:, books[0]]
                for m in books[1:]:
                    joint = (joint[:, :, None] + whole[:, None, m]).reshape(len(some), -1)
                joints.append(np.ascontiguousarray(joint.T))
            total, part = (np.empty((_ROWS, len(some)), dtype=np.int32) for _ in range(2))
            for begin in range(0, len(codes), _ROWS):
                rows = slice(begin, min(begin + _ROWS, len(codes)))
                n = rows.stop - begin
                for number, (joint, (_, index)) in enumerate(zip(joints, chunks, strict=True)):
                    # "clip" writes directly into the output
                    np.take(joint, index[rows], axis=0, out=part[:n] if number else total[:n], mode="clip")
                    if number:
                        total[:n] += part[:n]
                out[first : first + _TOGETHER, rows] = total[:n].T

    return fill


def _by_function(function: ScoreFunction, codes: Bytes) -> Fill:
    """Scores of float32, or of a type that fits float32 exactly."""

    def fill(queries: Ints, out: Keys) -> None:
        given = np.asarray(function(queries, codes))
        if given.shape != (len(queries), len(codes)):
            raise DataError(
                f"the score function returned {given.shape} for {len(queries)} queries: expected {(len(queries), len(codes))}"
            )
        floats = out.view(np.float32)
        with np.errstate(over="ignore"):
            floats[...] = given
        if not np.isfinite(given).all():
            raise DataError("scores contain NaN or infinity: a ranking needs finite scores")
        if not (floats == given).all():
            raise UsageError(
                f"scores of type {given.dtype} do not fit float32 exactly: round them first, as this creates ties"
            )
        np.subtract(np.float32(0), floats, out=floats)  # 0 - x maps -0.0 to 0.0
        # Bits of floats compare like integers, reversed for negative values.
        out ^= (out >> 31) & LAST

    return fill

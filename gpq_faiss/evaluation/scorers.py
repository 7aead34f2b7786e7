"""Scores as integers, so that everything after them is exact; a *smaller* integer is a better
score.

Score tables are rounded to multiples of a power of two, 2^-29 of the largest possible score of a
query. Their sums are exact in any order, and more accurate than float32 sums. Scores of a function
keep their float32 bits, mapped to integers of the same order.
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

_MAX_JOINED = 64  # codewords of codebooks that are joined in pairs


def integer_scores(scorer: Tables | ScoreFunction, codes: Bytes) -> Callable[[Ints], Keys]:
    """Return a function from query rows int64 [q] to the scores of all codes, int32 [q, U].

    Args:
        scorer: score tables float32 [Q, M, K], or a :data:`ScoreFunction`.
        codes: uint8 [U, W].

    Raises:
        DataError: tables of another type, or that are not finite; codewords outside of the tables.
            The returned function raises it for scores of another shape, or that are not finite.
        UsageError: codes of another width than the tables. The returned function raises it for
            scores that do not fit float32.
    """
    if callable(scorer):
        return lambda queries: _function_scores(scorer, queries, codes)
    tables = np.asarray(scorer)
    exponents = _exponents(tables, codes)
    M, K = tables.shape[1:]
    # A look-up in a small table of K^2 entries costs as much as one of K, so pairs of codebooks are
    # joined; an odd number of them gets a codebook of zeros.
    odd, joined = M % 2, K <= _MAX_JOINED
    rows: NDArray[Any] = codes
    if joined:
        padded = np.pad(codes, ((0, 0), (0, odd)))
        rows = padded[:, ::2] * np.uint32(K) + padded[:, 1::2]

    def scores(queries: Ints) -> Keys:
        from .kernels import add_entries

        scaled = np.ldexp(tables[queries].astype(np.float64), exponents[queries, None, None])
        entries = -np.rint(scaled).astype(np.int32)
        if joined:
            entries = np.pad(entries, ((0, 0), (0, odd), (0, 0)))
            pairs = entries[:, ::2, :, None] + entries[:, 1::2, None]
            entries = pairs.reshape(len(queries), rows.shape[1], K * K)
        # Queries are the last axis: an item looks up the entries of all of them at once.
        sums: Keys = add_entries(np.ascontiguousarray(np.moveaxis(entries, 0, 2)), rows)
        return np.ascontiguousarray(sums.T)

    return scores


def _exponents(tables: Tables, codes: Bytes) -> Ints:
    """Check that tables fit the codes, and return the exponent of each query's unit of score."""
    if tables.ndim != 3 or tables.dtype != np.float32:
        raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
    _, M, K = tables.shape
    if codes.shape[1] != M:
        raise UsageError(
            f"codes have {codes.shape[1]} codewords each, the tables {M} codebooks: unpack the "
            "codes first"
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
    exponents: Ints = 29 - np.frexp(largest)[1].astype(np.int64)
    return exponents


def _function_scores(function: ScoreFunction, queries: Ints, codes: Bytes) -> Keys:
    """Return the scores of a function, of float32 or a type that fits float32 exactly, as keys."""
    scores = np.asarray(function(queries, codes))
    if scores.shape != (len(queries), len(codes)):
        raise DataError(
            f"the score function returned {scores.shape} for {len(queries)} queries: "
            f"expected {(len(queries), len(codes))}"
        )
    if not np.isfinite(scores).all():
        raise DataError("scores contain NaN or infinity: a ranking needs finite scores")
    with np.errstate(over="ignore"):
        floats = scores.astype(np.float32)
    if not (floats == scores).all():
        raise UsageError(
            f"scores of type {scores.dtype} do not fit float32 exactly: round them first, "
            "as this creates ties"
        )
    # 0 - x maps -0.0 to 0.0. Bits of floats compare like integers, reversed for negative values.
    keys = np.subtract(np.float32(0), floats).view(np.int32)
    keys ^= (keys >> 31) & np.int32(0x7FFFFFFF)
    return keys

"""The inputs of a ranking, in forms that compare exactly: codes, labels and scores.

Codes and labels are rows of bytes. Scores are integers, so that everything after them is exact; a
*smaller* integer is a better score. Score tables are rounded to multiples of a power of two, 2^-29
of the largest possible score of a query. Their sums are exact in any order, and more accurate than
float32 sums. Scores of a function keep their float32 bits, mapped to integers of the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .ties import Ints

Bytes = NDArray[np.uint8]
Tables = NDArray[np.float32]
ScoreFunction = Callable[[Ints, Bytes], NDArray[Any]]
"""``(query rows int64 [q], distinct codes uint8 [U, W]) -> scores [q, U]``, larger is better."""


# Rows ---------------------------------------------------------------------------------------------


def words_of(rows: Bytes, minimum: int = 1) -> NDArray[np.uint64]:
    """Return rows of bytes [N, W] as at least ``minimum`` 64-bit words each, uint64 [words, N].

    The order of the words is that of the bytes.
    """
    width = rows.shape[1]
    wide = np.pad(rows, ((0, 0), (0, 8 * max(minimum, -(-width // 8)) - width)))
    return np.ascontiguousarray(wide.view(">u8").T, np.uint64)


def distinct_rows(rows: Bytes) -> tuple[Bytes, Ints]:
    """Return the distinct rows of uint8 [N, W] in ascending order, and the index of each row.

    An order of magnitude faster than ``np.unique(axis=0)``.
    """
    words = words_of(rows)
    order = np.lexsort(words[::-1])
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (np.diff(words[:, order]) != 0).any(axis=0)
    inverse = np.empty(len(rows), dtype=np.int64)
    inverse[order] = np.cumsum(first) - 1
    return rows[order[first]], inverse


def label_rows(labels: ArrayLike, name: str, length: int) -> Bytes:
    """Return labels of any form as packed rows, uint8 [N, W].

    Items are relevant to each other if their rows have a common bit; a row of zeros is unlabelled.

    Args:
        labels: packed multi-hot rows, uint8 [N, ceil(C / 8)] in the order of ``np.packbits``;
            multi-hot rows, bool [N, C]; or class numbers, integers [N], -1 for unlabelled.
        name: name of the labels in errors.
        length: required number of rows.

    Raises:
        DataError: another shape or type, or class numbers below -1 or too large to pack.
    """
    array = np.asarray(labels)
    fits = array.shape[:1] == (length,)
    if fits and array.ndim == 2 and array.dtype in (np.bool_, np.uint8):
        return np.packbits(array, axis=1) if array.dtype == bool else np.ascontiguousarray(array)
    are_numbers = fits and array.ndim == 1 and array.dtype.kind in "iu"
    if not are_numbers or array.min(initial=0) < -1 or length * int(array.max(initial=0)) > 1 << 35:
        raise DataError(
            f"{name}: {array.dtype} {array.shape} for {length:,} items: give class numbers from 0 "
            "without gaps (-1: unlabelled), or multi-hot rows, bool or packed"
        )
    classes = array.astype(np.int64)
    rows = np.zeros((length, classes.max(initial=0) // 8 + 1), dtype=np.uint8)
    labelled = np.flatnonzero(classes >= 0)
    rows[labelled, classes[labelled] // 8] = 128 >> (classes[labelled] % 8)
    return rows


# Scores -------------------------------------------------------------------------------------------


def integer_scores(
    scorer: Tables | ScoreFunction, codes: Bytes
) -> Callable[[Ints], NDArray[np.int32]]:
    """Return a function from query rows int64 [q] to the scores of all codes, int32 [q, U].

    Args:
        scorer: score tables float32 [Q, M, K], or a :data:`ScoreFunction`.
        codes: uint8 [U, W].

    Raises:
        DataError: tables of another type, or that are not finite; codewords outside of the tables.
            The returned function raises it for scores of another shape, or that are not finite or
            do not fit float32.
        UsageError: codes of another width than the tables.
    """
    if callable(scorer):
        return lambda queries: _function_scores(scorer, queries, codes)
    tables = np.asarray(scorer)
    if tables.ndim != 3 or tables.dtype != np.float32:
        raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
    _, M, K = tables.shape
    if codes.shape[1] != M:
        raise UsageError(
            f"codes have {codes.shape[1]} codewords each, the tables {M} codebooks: unpack the "
            "codes first"
        )
    if codes.max() >= K:
        raise DataError(f"codeword {codes.max()} is out of range: the codebooks have {K}")
    # Bounds all scores; NaN or infinite if any entry is.
    largest = np.abs(tables).max(axis=2, initial=0.0).sum(axis=1, dtype=np.float64)
    if not (largest < np.finfo(np.float32).max).all():
        raise DataError(
            "score tables contain NaN, infinity or values too large to add: check the query vectors"
        )
    exponents = 29 - np.frexp(largest)[1].astype(np.int64)  # of each query's unit of score
    # A look-up in a table of up to 64^2 entries costs as much as one of 64, so pairs of codebooks
    # are joined; an odd number of them gets a codebook of zeros.
    joined = K <= 64
    rows: NDArray[Any] = codes
    if joined:
        rows = np.pad(codes, ((0, 0), (0, M % 2))).astype(np.uint32)
        rows = rows[:, ::2] * K + rows[:, 1::2]

    def scores(queries: Ints) -> NDArray[np.int32]:
        from .kernels import add_entries

        wide = tables[queries].astype(np.float64)
        entries = -np.rint(np.ldexp(wide, exponents[queries, None, None])).astype(np.int32)
        if joined:
            entries = np.pad(entries, ((0, 0), (0, M % 2), (0, 0)))
            pairs = entries[:, ::2, :, None] + entries[:, 1::2, None]
            entries = pairs.reshape(len(queries), rows.shape[1], K * K)
        # Queries are the last axis: an item looks up the entries of all of them at once.
        by_query = np.ascontiguousarray(np.moveaxis(entries, 0, 2))
        return np.ascontiguousarray(add_entries(by_query, rows).T)

    return scores


def _function_scores(function: ScoreFunction, queries: Ints, codes: Bytes) -> NDArray[np.int32]:
    """Return the scores of a function as integers in the reverse order, int32 [q, U].

    Raises:
        DataError: scores of another shape, not finite, or not exactly float32 numbers.
    """
    scores = np.asarray(function(queries, codes))
    if scores.shape != (len(queries), len(codes)):
        raise DataError(
            f"the score function returned {scores.shape} for {len(queries)} queries: "
            f"expected {(len(queries), len(codes))}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        floats = scores.astype(np.float32)
    if not (np.isfinite(floats) & (floats == scores)).all():
        raise DataError(
            f"scores of type {scores.dtype} must be finite and fit float32 exactly: round them "
            "first, as this creates ties"
        )
    # 0 - x maps -0.0 to 0.0. Bits of floats compare like integers, reversed for negative values.
    keys = np.subtract(np.float32(0), floats).view(np.int32)
    keys ^= (keys >> 31) & np.int32(0x7FFFFFFF)
    return keys

"""Scores of codes by table sums, in one fixed order of float32 operations.

:func:`score_tables`, then pairs of codebooks, then left to right: items with equal codes have bit-equal scores for
any batch, block or index."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from .bits import check_codes, unpack_codes
from .checks import Codes, Floats, check_codebooks, check_vectors, named_rows

_SCORE_BLOCK = 32_768


def score_tables(xq: ArrayLike, Z: ArrayLike) -> Floats:
    """Inner product of every query sub-vector with every codeword: float32 [Q, M, K].

    The d products are summed sequentially in float32, without BLAS, so that tables do not depend on the batch.

    Raises:
        DataError: see :func:`check_codebooks`, :func:`check_vectors`; queries so large that a score overflows.
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    queries = check_vectors(xq, M * d, what="queries").reshape(-1, M, d)
    tables = np.zeros((len(queries), M, K), np.float32)
    term = np.empty_like(tables)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(d):
            np.multiply(queries[:, :, j, None], Z[None, :, :, j], out=term)
            tables += term
        largest = np.abs(tables).max(axis=2, initial=0).sum(axis=1)
    if not np.isfinite(largest).all():
        raise DataError(
            f"queries: values too large for float32 scores in {named_rows(np.flatnonzero(~np.isfinite(largest)))}"
        )
    return tables


def _pairs(K: int, M: int) -> bool:
    """Whether tables of two codebooks are summed in advance (K*K entries fit in the L1 cache)."""
    return K <= 16 and M > 1


def lookup_tables(tables: Floats) -> Floats:
    """Score tables [Q, M, K] -> the form that :func:`lookup` reads: codebooks paired where K <= 16."""
    Q, M, K = tables.shape
    if not _pairs(K, M):
        return tables
    if M % 2:
        tables = np.concatenate([tables, np.zeros((Q, 1, K), np.float32)], axis=1)
    # entry a + K * b holds table[2p][a] + table[2p + 1][b]; for K = 16 its place is the code byte itself
    return (tables[:, 1::2, :, None] + tables[:, 0::2, None, :]).reshape(Q, -1, K * K)


def lookup_columns(codes: Codes, M: int, K: int) -> list[NDArray[np.intp]]:
    """Packed codes [..., code_size] -> one array [...] of indices per table of :func:`lookup_tables`."""
    shape = codes.shape[:-1]
    if K == 16 and M > 1:
        return [codes[..., p].astype(np.intp) for p in range(codes.shape[-1])]
    assignment = unpack_codes(codes.reshape(-1, codes.shape[-1]), M, K).astype(np.intp)
    columns = [assignment[:, m].reshape(shape) for m in range(M)]
    if not _pairs(K, M):
        return columns
    return [columns[m] + K * columns[m + 1] if m + 1 < M else columns[m] for m in range(0, M, 2)]


def lookup(table: Floats, columns: list[NDArray[np.intp]], *, paired: bool) -> Floats:
    """Scores of one query: ``table`` [T, entries] summed over ``columns`` (T arrays of one shape), in the fixed order.

    The order is (t0 + t1) + (t2 + t3) + ..., whether the pairs were added beforehand (``paired``) or are here.
    """
    total = np.zeros(columns[0].shape, np.float32)
    part = np.empty_like(total)
    step = 1 if paired else 2
    for t in range(0, len(columns), step):
        # "clip" skips the bounds check; the places come from unpacked codes and cannot be out of range.
        np.take(table[t], columns[t], out=part, mode="clip")
        if not paired and t + 1 < len(columns):
            part += np.take(table[t + 1], columns[t + 1], mode="clip")
        total += part
    return total


def score_codes(xq: ArrayLike, codes: ArrayLike, Z: ArrayLike) -> Floats:
    """Exact asymmetric scores of all codes: float32 [Q, n] = sum_m q_m . Z[m, code_m], larger is better.

    Blockwise: additional memory is bounded. Equal codes have bit-equal scores.

    Raises:
        DataError: see :func:`score_tables`, :func:`check_codes`.

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> xq = np.arange(32, dtype=np.float32)[None]
        >>> score_codes(xq, np.array([[115]], np.uint8), Z).tolist()  # 3 + (16 + 7)
        [[26.0]]
    """
    Z = check_codebooks(Z)
    M, K, _ = Z.shape
    packed = check_codes(codes, M, K)
    tables = lookup_tables(score_tables(xq, Z))
    out = np.empty((len(tables), len(packed)), np.float32)
    for start in range(0, len(packed), _SCORE_BLOCK):
        columns = lookup_columns(packed[start : start + _SCORE_BLOCK], M, K)
        for q, table in enumerate(tables):
            out[q, start : start + len(columns[0])] = lookup(table, columns, paired=_pairs(K, M))
    return out


def score_candidates(xq: ArrayLike, candidates: Codes, Z: ArrayLike) -> Floats:
    """Scores of each query's own codes, uint8 [Q, c, code_size]: float32 [Q, c], bit-identical to those of :func:`score_codes`."""
    M, K, _ = np.shape(Z)
    tables = lookup_tables(score_tables(xq, Z))
    return np.stack(
        [
            lookup(table, lookup_columns(codes, M, K), paired=_pairs(K, M))
            for table, codes in zip(tables, candidates, strict=True)
        ]
    )

"""Scores of codes by table sums, in one fixed order of float32 operations.

:func:`score_tables`, then (t0 + t1) + (t2 + t3) + ...: items with equal codes have bit-equal scores for any batch, block or index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from .bits import check_codes, unpack_codes
from .checks import Floats, check_codebooks, check_vectors, named_rows

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
    tables = score_tables(xq, Z)
    M, K = tables.shape[1:]
    packed = check_codes(codes, M, K)
    out = np.empty((len(tables), len(packed)), np.float32)
    for start in range(0, len(packed), _SCORE_BLOCK):
        indices = unpack_codes(packed[start : start + _SCORE_BLOCK], M, K).T.astype(np.intp)
        for q, table in enumerate(tables):
            total = np.zeros(indices.shape[1], np.float32)
            for m in range(0, M, 2):
                part = table[m].take(indices[m])
                if m + 1 < M:
                    part += table[m + 1].take(indices[m + 1])
                total += part
            out[q, start : start + len(total)] = total
    return out

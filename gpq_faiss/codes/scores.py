"""Scores of codes as sums of table entries, in one fixed order of float32 operations.

The entries t of :func:`score_tables` are summed as (t0 + t1) + (t2 + t3) + ..., so that items with
equal codes have bit-equal scores for any batch, block or index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from .checks import Floats, check_codebooks, check_vectors


def score_tables(xq: ArrayLike, Z: ArrayLike) -> Floats:
    """Return the inner product of every query sub-vector with every codeword: float32 [Q, M, K].

    The d products are summed sequentially in float32, without BLAS, so that tables do not depend on
    the batch. Entries of queries that are too large for float32 are infinite or NaN.

    Args:
        xq: queries, [Q, M*d].
        Z: codebooks, float32 [M, K, d].

    Raises:
        DataError: see :func:`check_codebooks` and :func:`check_vectors`.
    """
    Z = check_codebooks(Z, unit=False)
    M, K, d = Z.shape
    queries = check_vectors(xq, M * d, name="queries").reshape(-1, M, d)
    tables = np.zeros((len(queries), M, K), np.float32)
    term = np.empty_like(tables)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(d):
            np.multiply(queries[:, :, j, None], Z[None, :, :, j], out=term)
            tables += term
    return tables

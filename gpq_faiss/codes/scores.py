"""Scores of codes by table sums, in one fixed order of float32 operations.

:func:`score_tables`, then (t0 + t1) + (t2 + t3) + ...: items with equal codes have bit-equal scores for any batch, block or index.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from .checks import Floats, check_codebooks, check_vectors, named_rows


def score_tables(xq: ArrayLike, Z: ArrayLike) -> Floats:
    """Inner product of every query sub-vector with every codeword: float32 [Q, M, K].

    The d products are summed sequentially in float32, without BLAS, so that tables do not depend on the batch.

    Raises:
        DataError: see :func:`check_codebooks`, :func:`check_vectors`; queries so large that a score overflows.
    """
    Z = check_codebooks(Z, unit=False)
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

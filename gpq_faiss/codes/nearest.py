"""Nearest codewords by one small matrix product per sub-space, several times faster than Faiss' loop.

Rows with a second codeword within rounding error of the best are returned to the caller, who uses Faiss. So codes equal those of
``IndexPQ.add``, bit for bit. (From d = 16 on Faiss uses BLAS, and its choice between such close codewords depends on the batch.)
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDOFF = 2.0**-24  # u of float32


@functools.cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def one_blas_thread() -> AbstractContextManager[Any]:
    """Context that limits BLAS to one thread (process-wide, restored on exit), as the products run in our threads."""
    limiter: AbstractContextManager[Any] = _blas().limit(limits=1)
    return limiter


def tolerance(Z: NDArray[np.float32], largest: float) -> float:
    """Margin within which rounding could make Faiss prefer a second codeword.

    Faiss minimises |x - z|^2 in float32, with an error of at most (d + 3) u 2(|x|^2 + |z|^2) either way it computes it;
    halved, for two codewords, that is 2(d + 3) u (|x|^2 + 1) in terms of x.z - |z|^2 / 2. The product here errs by
    d u |x||z| <= d u (|x|^2 + 1) / 2 per codeword, and leaves |z|^2 / 2 out, which differs by what the norms differ.

    Args:
        Z: float32 [M, K, d], norms within 1e-4 of 1.
        largest: the largest squared norm of a sub-vector.
    """
    d = Z.shape[2]
    squares = np.square(Z, dtype=np.float64).sum(axis=2)
    spread = float((squares.max(axis=1) - squares.min(axis=1)).max()) / 2
    return float(1.1 * (3 * d + 8) * _ROUNDOFF * (largest + 1) + spread)


def nearest(
    x: NDArray[np.float32], Z: NDArray[np.float32], margin: float
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Codeword with the largest inner product in each sub-space, for a block of rows that fits in the cache.

    Args:
        x: float32 [n, M*d].
        Z: float32 [M, K, d].
        margin: see :func:`tolerance`.

    Returns:
        Indices uint8 [M, n]; and bool [n]: rows with another codeword within ``margin`` of the best, whose indices
        are invalid.
    """
    M, K, d = Z.shape
    n = len(x)
    bits = K.bit_length() - 1
    indices = np.zeros((M, n), np.uint8)
    unsure = np.zeros(n, np.bool_)
    scores = np.empty((K, n), np.float32)
    threshold = np.empty(n, np.float32)
    among = np.empty((K, n), np.bool_)
    for m in range(M):
        np.matmul(Z[m], x[:, m * d : (m + 1) * d].T, out=scores)
        np.maximum.reduce(scores, axis=0, out=threshold)
        np.subtract(threshold, np.float32(margin), out=threshold)
        np.greater_equal(scores, threshold, out=among)
        flags = among.view(np.uint8)
        # 256 close codewords overflow to 0, which also differs from 1
        unsure |= np.add.reduce(flags, axis=0, dtype=np.uint8) != 1
        for bit in range(bits):
            # Of a single flag, bit b of its number is set iff it lies in an odd run of 2^b.
            odd = flags.reshape(K >> (bit + 1), 2, 1 << bit, n)[:, 1]
            indices[m] |= np.bitwise_or.reduce(odd, axis=(0, 1)) << np.uint8(bit)
    return indices, unsure

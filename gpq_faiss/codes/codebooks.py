"""Codebooks of GPQ in Faiss, and their byte-fused form.

Shapes: ``Z`` float32 [M, K, d] unit-norm in the last axis (the z' of the paper), ``assignment``
uint8 [N, M], ``codes`` uint8 [N, code_size] with ``code_size = ceil(M * log2(K) / 8)``, bits least
significant first.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, UsageError
from .bits import bits_per_code
from .checks import Floats, check_codebooks


def product_index(centroids: Floats) -> Any:
    """Return an empty, trained IndexPQ (inner product) with these centroids, of any norm.

    Args:
        centroids: float32 [M, K, d]. Those of byte-fused codebooks have norm √2, so they are not
            checked here.
    """
    M, K, d = centroids.shape
    index = faiss.IndexPQ(M * d, M, bits_per_code(K), faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids).ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def inject(Z: ArrayLike) -> Any:
    """Return an empty, trained ``faiss.IndexPQ`` (inner product) with exactly the centroids ``Z``.

    Raises:
        DataError: see :func:`check_codebooks`.

    Examples:
        >>> rng = np.random.default_rng(0)
        >>> Z = rng.standard_normal((4, 16, 8)).astype(np.float32)
        >>> Z /= np.linalg.norm(Z, axis=2, keepdims=True)
        >>> index = inject(Z)
        >>> index.add(Z[:, :5].transpose(1, 0, 2).reshape(5, -1).copy())  # item i: codewords i
        >>> faiss.vector_to_array(index.codes).reshape(5, -1).tolist()
        [[0, 0], [17, 17], [34, 34], [51, 51], [68, 68]]
    """
    return product_index(check_codebooks(Z))


def fuse(Z: ArrayLike) -> Floats:
    """Fuse pairs of 4-bit codebooks into 8-bit codebooks, float32 [ceil(M/2), 256, 2d].

    The codeword of byte b is [Z[2p, b & 15], Z[2p + 1, b >> 4]]. The bytes of the codes, scores and
    ids stay the same. For odd M the last codebook is paired with zeros, so vectors must be padded
    by d zeros (:func:`pad_vectors`).

    Raises:
        UsageError: K is not 16.
        DataError: see :func:`check_codebooks`.

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)  # 2 codebooks of 16 codewords
        >>> fuse(Z).shape
        (1, 256, 32)
        >>> np.array_equal(unfuse(fuse(Z)), Z)
        True
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    if K != 16:
        raise UsageError(f"only codebooks of 16 codewords can be byte-fused: these have {K}")
    if M % 2:
        Z = np.concatenate([Z, np.zeros((1, K, d), np.float32)])
    byte = np.arange(256)
    return np.concatenate([Z[0::2][:, byte & 15], Z[1::2][:, byte >> 4]], axis=2)


def unfuse(fused: ArrayLike) -> Floats:
    """Return the 4-bit codebooks [M, 16, d] of byte-fused ones, float32 [ceil(M/2), 256, 2d].

    The inverse of :func:`fuse`.

    Raises:
        DataError: the codebooks are not byte-fused.
    """
    array = np.asarray(fused)
    half = array.shape[2] // 2
    halves = array[:, :16, :half], array[:, ::16, half : 2 * half]
    Z = np.stack(halves, axis=1).reshape(-1, 16, half)
    if not Z[-1].any():  # the zeros that complete an odd number of codebooks
        Z = Z[:-1]
    Z = check_codebooks(Z, name="byte-fused codebooks")
    if not np.array_equal(fuse(Z), array):
        raise DataError("the 8-bit codebooks do not consist of two 4-bit ones each: not byte-fused")
    return Z


def pad_vectors(x: Floats, width: int) -> Floats:
    """Return ``x`` [n, D] with zeros appended up to ``width`` columns."""
    return np.pad(x, ((0, 0), (0, width - x.shape[1])))

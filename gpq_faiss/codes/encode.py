"""Encoding of vectors by Faiss, and decoding.

Each sub-vector is encoded by the codeword of the largest inner product. Faiss takes the one of the
smallest L2 distance, which is the same, as all codewords have equal norm. (From d = 16 on Faiss
uses BLAS, and its choice between codewords within rounding error depends on the batch.)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError
from .bits import code_size, unpack_codes
from .checks import Codes, Floats, as_array, check_codebooks, check_vectors, named_rows
from .codebooks import product_index

ENCODE_BLOCK = 8192
"""Number of vectors that are encoded at a time."""
_UNSCALED = 1e-4, 1e4  # range of the squared norms of sub-vectors that are encoded as they are


def encode(
    x: ArrayLike, Z: ArrayLike, *, name: str = "vectors to encode", first_row: int = 0
) -> Codes:
    """Encode intra-normalised vectors by the codewords of the largest inner products.

    The codes are those of Faiss (``IndexPQ.add``, ``sa_encode``). Vectors are encoded in blocks, so
    additional memory is bounded, with the number of threads that Faiss is set to use.

    Only the direction of a sub-vector matters. Faiss compares L2 distances in float32, which lose
    the direction of sub-vectors much longer or shorter than codewords; such sub-vectors (norm below
    0.01, or at least 100) are scaled first.

    Args:
        x: numbers [N, M*d]; sub-vectors may have any norm but 0.
        Z: float32 [M, K, d].
        name: how errors name the vectors.
        first_row: number of the first row in errors.

    Returns:
        uint8 [N, code_size]

    Raises:
        DataError: ``Z`` is invalid (:func:`check_codebooks`), or ``x`` has another width, NaN, or a
            zero sub-vector, which has no direction (the rows are named).

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> codes = encode(np.concatenate([Z[0, [3]], Z[1, [7]]], axis=1), Z)
        >>> codes.tolist()  # 3 + 16 · 7
        [[115]]
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    source = as_array(x, name)
    if source.ndim != 2 or len(source) == 0:  # the full check raises the detailed error
        source = check_vectors(source, M * d, name=name)
    index = product_index(Z)
    out = np.empty((len(source), code_size(M, K)), np.uint8)
    for start in range(0, len(source), ENCODE_BLOCK):
        rows = check_vectors(
            source[start : start + ENCODE_BLOCK], M * d, name=name, first_row=first_row + start
        )
        sub_vectors = rows.reshape(-1, M, d)
        squares = np.einsum("nmd,nmd->nm", sub_vectors, sub_vectors)
        extreme = (squares < _UNSCALED[0]) | (squares >= _UNSCALED[1])
        if extreme.any():
            has_zeros = (sub_vectors == 0).all(axis=2).any(axis=1)
            if has_zeros.any():
                names = named_rows(first_row + start + np.flatnonzero(has_zeros))
                raise DataError(
                    f"{name}: a sub-vector of zeros has no direction, in {names}: "
                    "leave these items out"
                )
            # Scaling by a power of two is exact.
            exponents = np.where(extreme, np.frexp(np.abs(sub_vectors).max(axis=2))[1], 0)
            rows = np.ldexp(sub_vectors, -exponents[:, :, None]).reshape(rows.shape)
        out[start : start + ENCODE_BLOCK] = index.pq.compute_codes(rows)
    return out


def decode(codes: ArrayLike, Z: ArrayLike) -> Floats:
    """Return decoded vectors, float32 [N, M*d]: each sub-vector is a codeword of ``Z``.

    Args:
        codes: uint8 [N, code_size].
        Z: float32 [M, K, d], of any norm.

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> np.flatnonzero(decode(np.array([[115]], np.uint8), Z)).tolist()
        [3, 23]
    """
    Z = check_codebooks(Z, unit=False)
    M, K, d = Z.shape
    assignment = unpack_codes(codes, M, K)
    return Z[np.arange(M), assignment].reshape(len(assignment), M * d)

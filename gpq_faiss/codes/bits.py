"""Packed codes: size, packing, unpacking and checks.

Bits are least significant first, as in Faiss."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, UsageError
from .checks import WORDS, Codes, as_array, named_rows


def bits_per_code(K: int) -> int:
    """Bits of one codeword index: log2(K), 2..8.

    Raises:
        UsageError: ``K`` is not a power of two in 4..256.
    """
    if K not in WORDS:
        raise UsageError(f"{K} codewords per codebook: it must be a power of two from 4 to 256")
    return int(K).bit_length() - 1


def code_size(M: int, K: int) -> int:
    """Bytes of one packed code.

    Examples:
        >>> code_size(12, 16), code_size(3, 16)
        (6, 2)
    """
    return (M * bits_per_code(K) + 7) // 8


def check_codes(codes: ArrayLike, M: int, K: int, *, what: str = "codes") -> Codes:
    """``codes`` as C-contiguous uint8 [n, code_size].

    Raises:
        DataError: another type or shape, or set padding bits.
    """
    array = as_array(codes, what)
    size = code_size(M, K)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != size:
        raise DataError(
            f"{what}: {array.dtype} {array.shape}, expected uint8 [n, {size}] ({M} codebooks of {K})"
        )
    spare = 8 * size - M * bits_per_code(K)
    if spare:
        bad = np.flatnonzero(array[:, -1] >> (8 - spare))
        if len(bad):
            raise DataError(
                f"{what}: bits set beyond the last codebook in {named_rows(bad)}: not codes of this model"
            )
    return np.ascontiguousarray(array)


def pack_codes(assignment: ArrayLike, K: int) -> Codes:
    """Codeword indices [N, M], 0 to K - 1, -> packed codes uint8 [N, code_size], with the bit layout of Faiss.

    Examples:
        >>> pack_codes([[1, 2, 3]], 16).tolist()
        [[33, 3]]
    """
    nbits = bits_per_code(K)
    array = np.asarray(assignment).astype(np.uint8, copy=False)
    n, M = array.shape
    if nbits == 8:
        return np.ascontiguousarray(array)
    if nbits == 4:
        codes = np.zeros((n, (M + 1) // 2), np.uint8)
        codes[:] = array[:, 0::2]
        codes[:, : M // 2] |= array[:, 1::2] << 4
        return codes
    bits = (array[:, :, None] >> np.arange(nbits, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(n, M * nbits), axis=1, bitorder="little")


def unpack_codes(codes: ArrayLike, M: int, K: int) -> Codes:
    """Packed codes uint8 [N, code_size] -> codeword indices uint8 [N, M]; the inverse of :func:`pack_codes`.

    Raises:
        DataError: see :func:`check_codes`.

    Examples:
        >>> unpack_codes(pack_codes([[1, 2, 3]], 16), 3, 16).tolist()
        [[1, 2, 3]]
    """
    nbits = bits_per_code(K)
    array = check_codes(codes, M, K)
    n = len(array)
    if nbits == 8:
        return array.copy()
    if nbits == 4:
        assignment = np.empty((n, M), np.uint8)
        assignment[:, 0::2] = array & 15
        assignment[:, 1::2] = array[:, : M // 2] >> 4
        return assignment
    bits = np.unpackbits(array, axis=1, count=M * nbits, bitorder="little").reshape(n, M, nbits)
    return np.asarray((bits << np.arange(nbits, dtype=np.uint8)).sum(axis=2), np.uint8)

"""Packed codes: size, packing, unpacking and checks.

Bits are least significant first, as in Faiss.
"""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, UsageError
from .checks import CODEWORDS, Codes, as_array, named_rows


def bits_per_code(K: int) -> int:
    """Return the number of bits of a codeword index: log2(K), from 2 to 8.

    Raises:
        UsageError: ``K`` is not a power of two from 4 to 256.
    """
    if K not in CODEWORDS:
        raise UsageError(f"{K} codewords per codebook: it must be a power of two from 4 to 256")
    return int(K).bit_length() - 1


def code_size(M: int, K: int) -> int:
    """Return the number of bytes of a packed code.

    Examples:
        >>> code_size(12, 16), code_size(3, 16)
        (6, 2)
    """
    return (M * bits_per_code(K) + 7) // 8


def check_codes(codes: ArrayLike, M: int, K: int, *, name: str = "codes") -> Codes:
    """Return ``codes`` as C-contiguous uint8 [n, code_size].

    Raises:
        DataError: the type or the shape is wrong, or padding bits are set.
    """
    array = as_array(codes, name)
    size = code_size(M, K)
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != size:
        raise DataError(
            f"{name}: {array.dtype} {array.shape}, expected uint8 [n, {size}] "
            f"({M} codebooks of {K})"
        )
    padding_bits = 8 * size - M * bits_per_code(K)
    if padding_bits:
        rows = np.flatnonzero(array[:, -1] >> (8 - padding_bits))
        if len(rows):
            raise DataError(
                f"{name}: bits set beyond the last codebook in {named_rows(rows)}: "
                "they are not codes of this model"
            )
    return np.ascontiguousarray(array)


def pack_codes(assignment: ArrayLike, K: int) -> Codes:
    """Pack codeword indices [N, M], from 0 to K - 1, into codes uint8 [N, code_size].

    Examples:
        >>> pack_codes([[1, 2, 3]], 16).tolist()
        [[33, 3]]
    """
    codes: Codes = faiss.pack_bitstrings(np.asarray(assignment), bits_per_code(K))
    return codes


def unpack_codes(codes: ArrayLike, M: int, K: int) -> Codes:
    """Unpack codes uint8 [N, code_size] into codeword indices uint8 [N, M].

    The inverse of :func:`pack_codes`.

    Raises:
        DataError: see :func:`check_codes`.

    Examples:
        >>> unpack_codes(pack_codes([[1, 2, 3]], 16), 3, 16).tolist()
        [[1, 2, 3]]
    """
    indices = faiss.unpack_bitstrings(check_codes(codes, M, K), M, bits_per_code(K))
    return np.asarray(indices, np.uint8)

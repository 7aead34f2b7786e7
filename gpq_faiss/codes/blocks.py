"""FastScan's blocks of 4-bit codes: packed by Faiss, unpacked here, as Faiss has no function for it."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from .checks import Codes
from .codebooks import product_index


def block_bytes(M: int, rows: int) -> int:
    """Bytes of a block of ``rows`` codes of M 4-bit indices."""
    return rows * (M + M % 2) // 2


def pack_blocks(codes: Codes, M: int, rows: int = 32) -> NDArray[np.uint8]:
    """4-bit codes uint8 [n, ceil(M / 2)] in blocks of ``rows`` codes: uint8 [blocks * block_bytes]."""
    flat = product_index(np.zeros((M, 16, 1), np.float32))  # of any codebooks
    flat.add_sa_codes(np.ascontiguousarray(codes))
    fast: Any = faiss.IndexPQFastScan(flat, rows)  # named: its codes go with it
    return np.asarray(faiss.vector_to_array(fast.codes), np.uint8)


def unpack_blocks(packed: NDArray[np.uint8], n: int, M: int, rows: int) -> Codes:
    """The first ``n`` codes, uint8 [n, ceil(M / 2)], of :func:`pack_blocks`.

    For each byte of the codes and each 32 rows a block has two times 16 bytes: in their lower halves those of rows 0, 8, 1, 9, ..., 7, 15,
    in the upper ones those of rows 16, 24, ..., 23, 31; first the lower halves of the codes' bytes, then the upper ones.
    """
    size = (M + 1) // 2
    halves = packed.reshape(-1, size, rows // 32, 2, 8, 2)
    low, high = halves[:, :, :, 0], halves[:, :, :, 1]
    whole = np.stack([low & 15 | high << 4, low >> 4 | high & 240], axis=3)
    codes = np.ascontiguousarray(whole.transpose(0, 2, 3, 5, 4, 1).reshape(-1, size)[:n])
    if M % 2:
        codes[:, -1] &= 15
    return codes

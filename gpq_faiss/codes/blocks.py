"""FastScan's blocks of codes: packed by Faiss, unpacked here, as Faiss has no function for it.

The layout is not assumed: for each size, Faiss packs a block of known indices, from which the layout is read.
"""

from __future__ import annotations

import functools
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from .bits import pack_indices
from .checks import Codes

_BLOCKS = 1 << 14


def block_bytes(M: int, rows: int) -> int:
    """Bytes of a block of ``rows`` codes of M 4-bit indices."""
    return rows * (M + M % 2) // 2


def pack_blocks(codes: Codes, M: int, rows: int = 32) -> NDArray[np.uint8]:
    """4-bit codes uint8 [n, ceil(M / 2)] in blocks of ``rows`` codes: uint8 [blocks * block_bytes]."""
    flat: Any = faiss.IndexPQ(M, M, 4, faiss.METRIC_INNER_PRODUCT)  # of any codebooks
    faiss.copy_array_to_vector(np.zeros(M * 16, np.float32), flat.pq.centroids)
    flat.is_trained = True
    flat.add_sa_codes(np.ascontiguousarray(codes))
    fast: Any = faiss.IndexPQFastScan(flat, rows)  # named: its codes go with it
    return np.asarray(faiss.vector_to_array(fast.codes), np.uint8)


def unpack_blocks(packed: NDArray[np.uint8], n: int, M: int, rows: int) -> Codes:
    """The first ``n`` codes, uint8 [n, ceil(M / 2)], of :func:`pack_blocks`."""
    low, high = _byte_places(M, rows)
    blocks = packed.reshape(-1, block_bytes(M, rows))
    size = (M + 1) // 2
    out = np.empty((len(blocks), rows * size), np.uint8)
    for start in range(0, len(blocks), _BLOCKS):
        part = blocks[start : start + _BLOCKS]
        halves = np.concatenate([part & 15, part >> 4], axis=1)
        held = out[start : start + len(part)]
        np.take(halves, high, axis=1, out=held, mode="clip")
        held <<= 4
        held |= np.take(halves, low, axis=1, mode="clip")
    if M % 2:
        out.reshape(-1, size)[:, -1] &= 15
    return out.reshape(-1, size)[:n]


@functools.cache
def _byte_places(M: int, rows: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Indices of the lower and upper half of each byte of a block's codes in [all lower halves, all upper halves]."""
    number = 1 + np.arange(rows * M).reshape(rows, M)  # 0 is padding
    found = np.zeros(2 * block_bytes(M, rows), np.int64)  # the number in each half
    for digit in range(-(-(rows * M + 1).bit_length() // 4)):
        block = pack_blocks(pack_indices(((number >> (4 * digit)) & 15).astype(np.uint8), 16), M, rows)
        found += np.concatenate([block & 15, block >> 4]).astype(np.int64) << (4 * digit)
    among = np.full(rows * M + 1, -1, np.intp)
    among[found] = np.arange(len(found))
    if (among[1:] < 0).any():
        raise RuntimeError("this Faiss packs FastScan codes in an unknown order: report its version")
    of = among[1:].reshape(rows, M)
    low, high = of[:, 0::2], of[:, 1::2]
    if M % 2:
        high = np.concatenate([high, low[:, -1:]], axis=1)
    return low.reshape(-1), high.reshape(-1)

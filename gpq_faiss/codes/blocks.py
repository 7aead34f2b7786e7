"""Unpack codes from FastScan's blocks, for which Faiss has no function.

The layout is not assumed: for each size, Faiss packs a block of known indices, from which the layout is read.
"""

from __future__ import annotations

import functools
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from .checks import Codes

_BLOCKS = 1 << 14


@functools.cache
def _places(M: int, rows: int) -> NDArray[np.int64]:
    """Half-byte of index m of row r in a block of ``rows`` codes: int64 [rows, M] (2 * byte + upper half)."""
    number = 1 + np.arange(rows * M).reshape(rows, M)  # 0 is padding
    found: NDArray[np.int64] | None = None
    digits = max(1, -(-(rows * M + 1).bit_length() // 4))
    for digit in range(digits):
        indices = ((number >> (4 * digit)) & 15).astype(np.uint8)
        indices = np.pad(indices, ((0, 0), (0, M % 2)))
        flat: Any = faiss.IndexPQ(M, M, 4, faiss.METRIC_INNER_PRODUCT)
        faiss.copy_array_to_vector(np.zeros(M * 16, np.float32), flat.pq.centroids)
        flat.is_trained = True
        flat.add_sa_codes(np.ascontiguousarray(indices[:, 0::2] | indices[:, 1::2] << 4))
        fast: Any = faiss.IndexPQFastScan(flat, rows)
        block = faiss.vector_to_array(fast.codes)
        halves = np.stack([block & 15, block >> 4], axis=1).reshape(-1).astype(np.int64)
        found = (halves << (4 * digit)) + (0 if found is None else found)
    assert found is not None
    places = np.full(rows * M + 1, -1, np.int64)
    places[found] = np.arange(len(found))
    if (places[1:] < 0).any():
        raise RuntimeError("this Faiss packs FastScan codes in an unknown order: report its version")
    return places[1:].reshape(rows, M)


def block_bytes(M: int, rows: int) -> int:
    """Bytes of a block of ``rows`` codes of M 4-bit indices."""
    return rows * (M + M % 2) // 2


def unpack_blocks(packed: NDArray[np.uint8], n: int, M: int, rows: int) -> Codes:
    """The first ``n`` codes, uint8 [n, ceil(M / 2)], of whole blocks of ``rows`` codes, uint8 [blocks * block_bytes]."""
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
    places = _places(M, rows)
    among = (places >> 1) + (places & 1) * block_bytes(M, rows)
    low, high = among[:, 0::2], among[:, 1::2]
    if M % 2:
        high = np.concatenate([high, low[:, -1:]], axis=1)
    return low.reshape(-1).astype(np.intp), high.reshape(-1).astype(np.intp)

"""Groups of equal rows (codes, label sets), and labels of any form as packed rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from .ties import Ints

Bytes = NDArray[np.uint8]


def words_of(rows: Bytes, minimum: int = 1) -> NDArray[np.uint64]:
    """Return rows of bytes [N, W] as at least ``minimum`` 64-bit words each, uint64 [words, N].

    The order of the words is that of the bytes.
    """
    n, width = rows.shape
    wide = np.zeros((n, 8 * max(minimum, -(-width // 8))), np.uint8)
    wide[:, :width] = rows
    return np.ascontiguousarray(wide.view(">u8").T, np.uint64)


def distinct_rows(rows: Bytes) -> tuple[Bytes, Ints]:
    """Return the distinct rows of uint8 [N, W] in ascending order, and the index of each row.

    An order of magnitude faster than ``np.unique(axis=0)``.
    """
    words = words_of(rows)
    order = np.lexsort(words[::-1])
    first = np.ones(len(rows), dtype=bool)
    first[1:] = (np.diff(words[:, order]) != 0).any(axis=0)
    inverse = np.empty(len(rows), dtype=np.int64)
    inverse[order] = np.cumsum(first) - 1
    return rows[order[first]], inverse


def label_rows(labels: ArrayLike, name: str, length: int) -> Bytes:
    """Return labels of any form as packed rows, uint8 [N, W].

    Items are relevant to each other if their rows have a common bit; a row of zeros is unlabelled.

    Args:
        labels: packed multi-hot, uint8 [N, ceil(C / 8)] in the order of ``np.packbits``; bool
            multi-hot [N, C]; or class numbers [N] with -1 for unlabelled.
        name: name of the labels in errors.
        length: required number of rows.

    Raises:
        DataError: another shape or type, or a negative class number other than -1.
    """
    array = np.asarray(labels)
    if array.ndim not in (1, 2) or len(array) != length:
        raise DataError(
            f"{name}: shape {array.shape} does not fit {length:,} items: give one row per item"
        )
    if array.ndim == 2 and array.dtype == bool:
        return np.packbits(array, axis=1)
    if array.ndim == 2 and array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.ndim == 2 or array.dtype.kind not in "iu" or array.min(initial=0) < -1:
        raise DataError(
            f"{name}: {array.dtype} {array.shape}: give class numbers [N] from 0 (-1: unlabelled), "
            "or multi-hot rows, bool or packed"
        )
    classes = array.astype(np.int64)
    width = int(classes.max(initial=0)) // 8 + 1
    if length * width > 1 << 32:
        raise DataError(
            f"{classes.max() + 1:,} classes are too many to pack: renumber them from 0 without gaps"
        )
    rows = np.zeros((length, width), dtype=np.uint8)
    labelled = np.flatnonzero(classes >= 0)
    rows[labelled, classes[labelled] // 8] = 128 >> (classes[labelled] % 8)
    return rows

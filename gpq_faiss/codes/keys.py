"""Scores and row numbers as single integers, so that an integer sort orders by score, ties by row number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Floats, Ids

Keys = NDArray[np.int64]
"""Score and row number in one integer (:func:`sort_keys`)."""

EMPTY_KEY = np.int64(np.iinfo(np.int64).min)
"""The key of a missing result."""
_LOW = np.int64(0xFFFF_FFFF)
_FLIP = np.int32(0x7FFF_FFFF)


def sort_keys(scores: Floats, positions: NDArray[Any]) -> Keys:
    """int64 keys of the same shape: sorted *descending*, larger scores come first, then smaller row numbers (< 2^32)."""
    bits = (scores + np.float32(0.0)).view(np.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & _FLIP)
    return (ordered.astype(np.int64) << 32) | (_LOW - positions)


def read_keys(keys: Keys) -> tuple[Floats, Ids]:
    """Scores and positions of :func:`sort_keys`; an empty key gives (-inf, -1)."""
    ordered = (keys >> 32).astype(np.int32)
    scores = (ordered ^ ((ordered >> 31) & _FLIP)).view(np.float32)
    positions = _LOW - (keys & _LOW)
    none = keys == EMPTY_KEY
    if none.any():
        scores = np.where(none, np.float32(-np.inf), scores)
        positions = np.where(none, np.int64(-1), positions)
    return scores, positions


def best_keys(keys: Keys, k: int) -> Keys:
    """The ``k`` largest of the last axis, descending."""
    if 4 * k < keys.shape[-1]:
        keys = np.partition(keys, keys.shape[-1] - k, axis=-1)[..., -k:]
    ordered = np.sort(keys, axis=-1)
    return ordered[..., : -k - 1 : -1]

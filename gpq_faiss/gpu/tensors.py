"""Arrays and queries as torch tensors on a device; score and row number as one key.

Imports torch at the top, so only this package imports this module.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..codes.checks import check_vectors
from ..errors import DataError, UsageError

MAX_ROWS = (1 << 31) - 1
"""Maximum number of values that torch sorts on a GPU."""
_LOW = 0xFFFF_FFFF  # the lower half of a key
_FLIP = 0x7FFF_FFFF  # all bits of a float but the sign
_SHIFT = 1 << 32


def tensor_of(array: NDArray[Any]) -> Tensor:
    """Return an array as a CPU tensor, without a copy if it is writable (as torch requires)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def vectors_on(x: ArrayLike | Tensor, D: int, device: torch.device) -> Tensor:
    """Return queries [n, D] as contiguous float32 on ``device``.

    A numpy array is copied. A tensor must be on the device; it is not searched for NaN and infinity
    here, which would cost as much as a search.

    Raises:
        UsageError: a tensor on another device.
        DataError: not numbers, another shape, empty; of an array also NaN or infinity (rows are
            named).
    """
    if not isinstance(x, Tensor):
        return tensor_of(check_vectors(x, D, name="queries", allow_empty=False)).to(device)
    if x.device != device:
        raise UsageError(
            f"queries are on {x.device}, the index on {device}: move them there, "
            "or pass a numpy array"
        )
    if not x.is_floating_point() or x.ndim != 2 or x.shape[1] != D or len(x) == 0:
        raise DataError(
            f"queries: {x.dtype} {tuple(x.shape)}, expected floats [n, {D}], at least one row"
        )
    return x.detach().float().contiguous()


def threshold_of(score: float) -> int:
    """Return the largest key below those of items with at least this score."""
    bits = int(np.float32(score + 0.0).view(np.int32))  # + 0.0 turns -0.0 into 0.0
    return (bits ^ ((bits >> 31) & _FLIP)) * _SHIFT - 1


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Split keys into scores float32 and positions int64.

    The upper half of a key is the score and the lower half the row number, so that larger is
    better.
    """
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & _FLIP)).view(torch.float32)
    positions = _LOW - (keys & _LOW)
    return scores, positions

"""Codes, codebooks and score tables as torch tensors on a device: check, unpack, score.

The float32 operations and their order are those of :mod:`..codes.codebooks`: separate products and sums, no matrix products or fused
multiply-adds. So with IEEE 754 arithmetic, scores are those of :mod:`..codes.scores`, bit for bit, and ties are the same on every
device.

Imports torch at the top, so only this package imports this module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..codes.checks import check_vectors, named_rows
from ..errors import DataError, UsageError

EMPTY_KEY = torch.iinfo(torch.int64).min
"""The key of a missing result."""
MAX_ROWS = (1 << 32) - 1
_LOW = 0xFFFF_FFFF
_FLIP = 0x7FFF_FFFF
_SHIFT = 1 << 32


def tensor_of(array: NDArray[Any]) -> Tensor:
    """An array as a CPU tensor, without copy if the array is writable (as torch requires)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def vectors_on(x: ArrayLike | Tensor, D: int, device: torch.device) -> Tensor:
    """Queries [n, D] as contiguous float32 on ``device``. A numpy array is copied, a tensor must be on the device.

    Raises:
        UsageError: a tensor on another device.
        DataError: not numbers, another shape, empty, NaN or infinity (rows are named).
    """
    if not isinstance(x, Tensor):
        return tensor_of(check_vectors(x, D, what="queries", allow_empty=False)).to(device)
    if x.device != device:
        raise UsageError(
            f"queries are on {x.device}, the index on {device}: move them there, or pass a numpy array"
        )
    if not x.is_floating_point() or x.ndim != 2 or x.shape[1] != D or len(x) == 0:
        raise DataError(f"queries: {x.dtype} {tuple(x.shape)}, expected floats [n, {D}], at least one row")
    x = x.detach().float().contiguous()
    fine = torch.isfinite(x).all(dim=1)
    if not bool(fine.all()):
        bad = (~fine).nonzero()[:, 0].cpu().numpy()
        raise DataError(f"queries: NaN or infinity in {named_rows(bad)}")
    return x


def score_tables_torch(x: Tensor, Z: Tensor) -> Tensor:
    """Inner products of queries [n, M*d] with codewords [M, K, d]: float32 [n, M, K], summed in the order of ``score_tables``.

    Raises:
        DataError: a score would overflow; rows are named.
    """
    M, K, d = Z.shape
    parts = x.reshape(-1, M, d)
    tables = torch.zeros((len(parts), M, K), dtype=torch.float32, device=x.device)
    term = torch.empty_like(tables)
    for j in range(d):
        # two roundings: a fused multiply-add would differ from the CPU
        torch.mul(parts[:, :, j, None], Z[None, :, :, j], out=term)
        tables.add_(term)
    fine = torch.isfinite(tables.abs().amax(dim=2).sum(dim=1))
    if not bool(fine.all()):
        bad = (~fine).nonzero()[:, 0].cpu().numpy()
        raise DataError(f"queries: values too large for float32 scores in {named_rows(bad)}")
    return tables


def fused_tables(tables: Tensor) -> Tensor:
    """Score tables [Q, M, K], float32 -> [Q, T, entries], of the columns of codes: sums of two codebooks each if K <= 16."""
    Q, M, K = tables.shape
    if K > 16:
        return tables
    tables = torch.nn.functional.pad(tables, (0, 16 - K, 0, M % 2))
    pairs = tables[:, 1::2, :, None] + tables[:, 0::2, None, :]
    return pairs.reshape(Q, -1, 256)


def score_columns(tables: Tensor, columns: Tensor, *, paired: bool) -> Tensor:
    """Scores [Q, n] of all queries and codes: tables [Q, T, entries], columns uint8 [T, n]."""
    return _summed(lambda t: tables[:, t].index_select(1, columns[t].int()), len(columns), paired=paired)


def score_places(tables: Tensor, rows: Tensor, columns: Tensor, *, paired: bool) -> Tensor:
    """Scores float32 [r] of codes, columns uint8 [T, r], for one query each, ``rows`` int64 [r]."""
    _, T, entries = tables.shape
    first = rows * (T * entries)
    return _summed(lambda t: torch.take(tables, first + (columns[t].long() + t * entries)), T, paired=paired)


def _summed(entry: Callable[[int], Tensor], T: int, *, paired: bool) -> Tensor:
    """Sum over tables in the order of :mod:`..codes.scores`."""
    total: Tensor | None = None
    step = 1 if paired else 2
    for t in range(0, T, step):
        part = entry(t)
        if not paired and t + 1 < T:
            part += entry(t + 1)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def keys_of(scores: Tensor, positions: Tensor) -> Tensor:
    """Score and row number (< 2^32) in one int64, larger is better."""
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & _FLIP)
    return ordered.long() * _SHIFT + (_LOW - positions)


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Scores float32 and positions int64 of :func:`keys_of`; an empty key gives (-inf, -1)."""
    ordered = (keys >> 32).int()
    scores = (ordered ^ ((ordered >> 31) & _FLIP)).view(torch.float32)
    positions = _LOW - (keys & _LOW)
    none = keys == EMPTY_KEY
    return scores.masked_fill(none, -torch.inf), positions.masked_fill(none, -1)

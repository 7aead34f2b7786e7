"""Codes, codebooks and score tables as torch tensors on a device: check, pack, encode, score.

The float32 operations and their order are those of :mod:`..codes.codebooks`: separate products and sums, no matrix products or fused
multiply-adds. So with IEEE 754 arithmetic, scores are bit-equal to :func:`..codes.scores.score_codes`, and ties are the same on every
device.

Imports torch at the top, so only this package imports this module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..codes.bits import bits_per_code, code_size
from ..codes.checks import check_codebooks, check_vectors, named_rows
from ..codes.encode import ORDINARY, encode
from ..codes.nearest import tolerance
from ..errors import DataError, UsageError
from ..nn.device import resolve_device

EMPTY_KEY = torch.iinfo(torch.int64).min
"""The key of a missing result."""
MAX_ROWS = (1 << 32) - 1
_LOW = 0xFFFF_FFFF
_FLIP = 0x7FFF_FFFF
_SHIFT = 1 << 32
_ENCODE_ENTRIES = 32 << 20  # scores per block


# Devices and tensors -------------------------------------------------------------------------------------------------


def device_of(device: str | int | torch.device) -> torch.device:
    """A torch device by name or GPU number. Raises as :func:`..nn.device.resolve_device`; there is no fall-back."""
    return resolve_device(f"cuda:{device}" if isinstance(device, int) else str(device))


def tensor_of(array: NDArray[Any]) -> Tensor:
    """An array as a CPU tensor, without copy if the array is writable (as torch requires)."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def vectors_on(
    x: ArrayLike | Tensor, D: int, device: torch.device, *, what: str = "queries", allow_empty: bool = False
) -> Tensor:
    """``x`` [n, D] as contiguous float32 on ``device``. A numpy array is copied, a tensor must be on the device.

    Raises:
        UsageError: a tensor on another device.
        DataError: not numbers, another shape, empty (unless allowed), NaN or infinity (rows are named).
    """
    if not isinstance(x, Tensor):
        return tensor_of(check_vectors(x, D, what=what, allow_empty=allow_empty)).to(device)
    if x.device != device:
        raise UsageError(
            f"{what} are on {x.device}, the index on {device}: move them there, or pass a numpy array"
        )
    if not x.is_floating_point():
        raise DataError(f"{what}: dtype {x.dtype}, expected floats")
    if x.ndim != 2:
        raise DataError(f"{what}: shape {tuple(x.shape)}, expected two dimensions [n, {D}]")
    if x.shape[1] != D:
        raise DataError(f"{what}: {x.shape[1]} dimensions, expected {D}: is it from another model?")
    if len(x) == 0 and not allow_empty:
        raise DataError(f"{what}: empty, expected at least one row")
    x = x.detach().float().contiguous()
    fine = torch.isfinite(x).all(dim=1)
    if not bool(fine.all()):
        bad = (~fine).nonzero()[:, 0].cpu().numpy()
        raise DataError(f"{what}: NaN or infinity in {named_rows(bad)}")
    return x


# Packing and encoding ------------------------------------------------------------------------------------------------


def pack_tensor(assignment: Tensor, K: int) -> Tensor:
    """Codeword indices uint8 [n, M] below ``K`` -> packed codes uint8 [n, code_size], as :func:`..codes.bits.pack_codes`."""
    nbits = bits_per_code(K)
    n, M = assignment.shape
    codes = torch.zeros((n, code_size(M, K)), dtype=torch.uint8, device=assignment.device)
    for m in range(M):
        byte, shift = divmod(m * nbits, 8)
        wide = assignment[:, m].to(torch.int32) << shift
        codes[:, byte] |= (wide & 255).to(torch.uint8)
        if shift + nbits > 8:
            codes[:, byte + 1] |= (wide >> 8).to(torch.uint8)
    return codes


def unpack_column(codes: Tensor, m: int, K: int) -> Tensor:
    """Codeword index of codebook ``m`` of packed codes [n, code_size]: uint8 [n]."""
    nbits = bits_per_code(K)
    byte, shift = divmod(m * nbits, 8)
    wide = codes[:, byte].to(torch.int32)
    if shift + nbits > 8:
        wide = wide | (codes[:, byte + 1].to(torch.int32) << 8)
    return ((wide >> shift) & (K - 1)).to(torch.uint8)


def encode_torch(
    x: Tensor, Z: ArrayLike, *, what: str = "vectors to encode", entries: int = _ENCODE_ENTRIES
) -> Tensor:
    """Intra-normalised vectors -> packed codes, both on the device of ``x``: the codes of :func:`..codes.encode.encode`.

    The largest inner product wins; the few rows in which a second codeword is within rounding error (and rows of extreme norm) are
    encoded on the CPU by Faiss. So codes are bit-equal to those of ``encode`` on every device.

    Args:
        x: floats [n, M*d], sub-vectors of any norm but 0.
        Z: float32 [M, K, d], an array on the host.
        entries: scores per block, which bounds the memory (about 16 bytes each).

    Returns:
        uint8 [n, code_size]

    Raises:
        DataError: as :func:`..codes.encode.encode`: invalid codebooks, another width, NaN, a zero sub-vector (rows are named).
    """
    books = check_codebooks(Z)
    M, K, d = books.shape
    x = vectors_on(x, M * d, x.device, what=what, allow_empty=True)
    out = torch.empty((len(x), code_size(M, K)), dtype=torch.uint8, device=x.device)
    on_device = tensor_of(books).to(x.device)
    step = max(1, entries // (M * K))
    for start in range(0, len(x), step):
        block = x[start : start + step]
        squares = torch.linalg.vector_norm(block.reshape(-1, M, d), dim=2).square()
        extreme = (squares >= ORDINARY) | (squares < 1 / ORDINARY)
        near = torch.where(extreme, 0, squares)
        margin = tolerance(books, float(near.max())) if len(block) else 0.0
        scores = raw_tables(block, on_device)
        best, index = scores.max(dim=2)
        close = (scores >= (best - margin)[:, :, None]).sum(dim=2) != 1
        codes = pack_tensor(index.to(torch.uint8), K)
        unsure = (close | extreme).any(dim=1).nonzero()[:, 0]
        if len(unsure):
            rows = block[unsure].cpu().numpy()
            try:
                decided = encode(rows, books, what=what)
            except DataError:
                # the same error, with the caller's row numbers
                encode(block.cpu().numpy(), books, what=what, first_row=start)
                raise
            codes[unsure] = torch.from_numpy(decided).to(x.device)
        out[start : start + step] = codes
    return out


# Scores --------------------------------------------------------------------------------------------------------------


def raw_tables(x: Tensor, Z: Tensor) -> Tensor:
    """Inner products of sub-vectors with codewords, float32 [n, M, K], summed in the order of ``score_tables``.

    Args:
        x: float32 [n, M*d]. Z: float32 [M, K, d] on the same device.
    """
    M, K, d = Z.shape
    parts = x.reshape(-1, M, d)
    tables = torch.zeros((len(parts), M, K), dtype=torch.float32, device=x.device)
    term = torch.empty_like(tables)
    for j in range(d):
        # two roundings: a fused multiply-add would differ from the CPU
        torch.mul(parts[:, :, j, None], Z[None, :, :, j], out=term)
        tables.add_(term)
    return tables


def score_tables_torch(x: Tensor, Z: Tensor) -> Tensor:
    """:func:`raw_tables` of queries. Raises DataError, naming rows: a score would overflow."""
    tables = raw_tables(x, Z)
    fine = torch.isfinite(tables.abs().amax(dim=2).sum(dim=1))
    if not bool(fine.all()):
        bad = (~fine).nonzero()[:, 0].cpu().numpy()
        raise DataError(f"queries: values too large for float32 scores in {named_rows(bad)}")
    return tables


def is_paired(M: int, K: int) -> bool:
    """Whether the entries of two codebooks are summed in one table of K*K, which is small."""
    return K <= 16 and M > 1


def fused_tables(tables: Tensor) -> Tensor:
    """Score tables [Q, M, K], float32 or int32 -> [Q, T, entries]: precomputed sums of two codebooks per table if K <= 16."""
    Q, M, K = tables.shape
    if not is_paired(M, K):
        return tables
    if M % 2:
        tables = torch.cat([tables, tables.new_zeros((Q, 1, K))], dim=1)
    pairs = tables[:, 1::2, :, None] + tables[:, 0::2, None, :]
    return pairs.reshape(Q, -1, K * K)


def columns_of(codes: Tensor, M: int, K: int) -> Tensor:
    """Packed codes [n, code_size] -> indices into :func:`fused_tables`, uint8 [T, n]; for K = 16 the bytes themselves."""
    if is_paired(M, K) and K == 16:
        return codes.t().clone(memory_format=torch.contiguous_format)
    return fused_columns([unpack_column(codes, m, K) for m in range(M)], K)


def fused_columns(columns: Sequence[Tensor], K: int) -> Tensor:
    """As :func:`columns_of`, of codeword indices uint8 [n] of each codebook."""
    M = len(columns)
    if is_paired(M, K):
        columns = [columns[m] + K * columns[m + 1] if m + 1 < M else columns[m] for m in range(0, M, 2)]
    return torch.stack(list(columns))


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

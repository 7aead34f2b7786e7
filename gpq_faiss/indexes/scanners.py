"""Faiss scans of flat codes for shortlists: fast scores with error bounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.blocks import PackedCodes, block_bytes
from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject, inject_fused, pad_vectors
from ..faissio.storage import row_index

_UNIT = float(np.finfo(np.float32).eps)  # twice the relative error of one float32 operation
_TINY = float(np.finfo(np.float32).tiny)
_LEAST_SPAN = 2.0**-100  # minimum span of score tables for FastScan's quantisation


def rounding_bound(xq: Floats, M: int, d: int) -> Floats:
    """Maximum difference of two float32 evaluations of a query's score: float32 [Q].

    Both add 2d + M products in some order; with unit-norm codewords each is within (2d + M + 2) u of the true value
    times sum_m |q_m| (Higham 2002, section 3.1, with Cauchy-Schwarz a sub-space).
    """
    norms = np.sqrt(np.square(xq.reshape(len(xq), M, d), dtype=np.float64).sum(axis=2)).sum(axis=1)
    return np.asarray(rounding_of(norms, M, d), np.float32)


def rounding_of(norms: Any, M: int, d: int) -> Any:
    """:func:`rounding_bound` by the sum of the norms of a query's sub-vectors: a float64, or an array or tensor of them."""
    return 1.01 * (2 * d + M + 2) * (_UNIT * norms + 2 * M * d * _TINY)


def quantisation_bound(tables: Floats) -> Floats:
    """How much a true score can exceed FastScan's, without float rounding: float32 [Q].

    Faiss takes 8-bit steps of (largest span of a table) / 255, counted from each table's least entry, and rounds every
    entry to the nearest. The rounding loss of each entry is known, so the bound is the sum of each table's largest
    loss: about 12 % below half a step per table. Entries near the middle between two steps count as a half.

    Args:
        tables: float32 [Q, M, 16].
    """
    wide = tables.astype(np.float64)
    least = wide.min(axis=2, keepdims=True)
    step = (wide.max(axis=2, keepdims=True) - least).max(axis=1, keepdims=True) / 255
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(step > 0, (wide - least) / step, 0.0)
    loss = steps - np.floor(steps + 0.5)
    loss = np.where(np.abs(loss) > 0.498, 0.502, loss)
    bound = loss.max(axis=2).sum(axis=1) * step[:, 0, 0]
    # the product with 255 sums and the offset, in float32 (scores of M tables, each below 256 steps)
    largest = np.abs(wide).max(axis=2).sum(axis=1) + 255 * tables.shape[1] * step[:, 0, 0]
    bound = bound * (1 + 1e-6) + 8 * tables.shape[1] * _UNIT * largest
    # Faiss divides 255 by the span in float32, which fails for tiny spans.
    return np.where(255 * step[:, 0, 0] > _LEAST_SPAN, bound, np.inf).astype(np.float32)


def fastscan_bound(xq: Floats, tables: Floats, d: int) -> Floats:
    """How much a true score can exceed FastScan's: float32 [Q], for score tables float32 [Q, M, 16]."""
    return quantisation_bound(tables) + 2 * rounding_bound(xq, tables.shape[1], d)


class TableScan:
    """``IndexPQ`` with float tables, exact up to rounding.

    With K = 16 it is byte-fused, which is 4-5 times faster, unless ``fused`` is false.
    """

    def __init__(self, codes: Codes, Z: Floats, *, fused: bool = True) -> None:
        self.M, K, self.d = (int(n) for n in Z.shape)
        # Faiss' kernel for two dimensions does not support four codewords.
        self._wider = (K, self.d) == (4, 2)
        if self._wider:
            Z = np.pad(Z, ((0, 0), (0, 0), (0, 1)))
        self.index: Any = inject_fused(Z) if fused and K == 16 and self.M > 1 else inject(Z)
        self.index.add_sa_codes(codes)

    def candidates(self, xq: Floats, k: int) -> tuple[Floats, Ids]:
        if self._wider:
            xq = np.pad(xq.reshape(-1, self.M, 2), ((0, 0), (0, 0), (0, 1))).reshape(len(xq), -1)
        D, found = self.index.search(pad_vectors(xq, self.index.d), k)
        return D, found

    def slack(self, xq: Floats, tables: Floats) -> Floats:
        return rounding_bound(xq, self.M, self.d)


class FastScan:
    """``IndexPQFastScan``: 8-bit tables in registers, ten times as fast but approximate (K = 16 only)."""

    def __init__(self, codes: Codes, Z: Floats) -> None:
        self.M, _, self.d = (int(n) for n in Z.shape)
        self.index: Any = row_index(codes, None, Z, "fastscan")

    @classmethod
    def of_packed(cls, codes: PackedCodes, Z: Floats) -> FastScan:
        """From codes that are already in blocks, without packing or copies."""
        scan = cls.empty(Z, codes.rows)
        scan.fill(len(codes), lambda held: np.copyto(held, codes.packed))
        return scan

    @classmethod
    def empty(cls, Z: Floats, rows: int) -> FastScan:
        """An empty scanner for :meth:`fill`, with ``rows`` codes per block."""
        scan = cls.__new__(cls)
        scan.M, _, scan.d = (int(n) for n in Z.shape)
        scan.index = faiss.IndexPQFastScan(inject(Z), rows)
        return scan

    def fill(self, n: int, read: Callable[[NDArray[np.uint8]], Any]) -> PackedCodes:
        """Replace the codes by ``n`` codes in blocks, which ``read`` writes into the given array.

        Returns:
            These codes, valid until the next call.
        """
        rows = int(self.index.bbs)
        blocks = -(-n // rows)
        self.index.codes.resize(blocks * block_bytes(self.M, rows))
        held = self._held()
        read(held)
        self.index.ntotal, self.index.ntotal2 = n, blocks * rows
        return PackedCodes(held, n, self.M, rows)

    def _held(self) -> NDArray[np.uint8]:
        table = self.index.codes
        view: NDArray[np.uint8] = faiss.rev_swig_ptr(table.get(), table.size())
        return view

    @property
    def codes(self) -> PackedCodes:
        """The codes inside Faiss, valid as long as this scanner."""
        return PackedCodes(self._held(), int(self.index.ntotal), self.M, int(self.index.bbs))

    def candidates(self, xq: Floats, k: int) -> tuple[Floats, Ids]:
        D, found = self.index.search(xq, k)
        return D, found

    def slack(self, xq: Floats, tables: Floats) -> Floats:
        return fastscan_bound(xq, tables, self.d)


Scanner = TableScan | FastScan

"""Locally optimised product quantisation (Kalantidis and Avrithis, "Locally Optimized Product Quantization for Approximate Nearest
Neighbor Search", CVPR 2014): a rotation and codebooks per cell of a coarse quantiser.

k-means divides the space into cells. The residuals x - c of a cell are rotated to their principal axes R, which are allocated to the M
parts so that the products of variances are balanced (eigenvalue allocation, as in the parametric solution of Ge et al.: axes by
falling variance, each to the part with the smallest product that has room). A product quantiser with 16 codewords per part is
trained on the rotated residuals. The distance of a query to an item is that of the query's residual in the item's cell, R (q - c),
to the codewords, summed over the parts. Cells and codebooks are trained by Faiss.
Unsupervised.

**Code format.** ``bits`` of codewords, followed by the cell number in one or two bytes. The paper stores the cell as the item's
inverted list and counts only the codewords' bits. :attr:`LOPQ.extra_bits` gives the additional information: 6 bits with 64 cells. So
at "12 bits" this method has 18, an advantage over the other methods.

All cells are searched; the paper searches a few, for speed.

Deviations: vectors are scaled to length 1 first, in this method's favour, as for :mod:`gpq_faiss.methods.pq`; the coarse quantiser is
k-means (the paper's second one, a multi-index, is for a billion items); there is a cell per 256 training
vectors, at most 64 (the paper has 1,024 for a million vectors); cells with fewer than :data:`LEAST` vectors use the rotation and
codebooks of all residuals. If M does not divide the width, some parts are zero-padded.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import unpack_codes
from ..data.labels import Labels
from ..errors import DataError, UsageError
from .base import Coder, Codes, Floats, scaled_rows
from .pq import CODEWORDS, NBITS, behind

LEAST = 8 * CODEWORDS
"""Minimum training vectors of a cell for its own codebooks."""
_PER_CELL = 256  # training vectors per cell, on average
_BLOCK_BYTES = 64 << 20  # of temporary arrays


class LOPQ(Coder):
    """Locally optimised product quantiser with M = bits / 4 codebooks of 16 codewords in each cell.

    Args:
        cells: maximum number of cells; see the module docstring.
        iterations: of each k-means.
        normalize: scale vectors to length 1 (a zero vector stays zero).

    Attributes:
        extra_bits: bits of the cell number, in addition to ``bits``; set by :meth:`fit`, as :attr:`code_size`.
        centroids: float32 [cells, width].
        rotations: float32 [cells, padded, width]: a unit row per principal axis, other rows zero.
        codebooks: float32 [cells, M, 16, padded / M].

    Raises:
        UsageError: ``bits`` is not a multiple of 4; ``cells`` not in 1 to 65,536; ``iterations`` below 1.
    """

    name = "lopq"

    def __init__(
        self, bits: int, *, seed: int = 0, cells: int = 64, iterations: int = 25, normalize: bool = True
    ) -> None:
        super().__init__(bits, seed=seed)
        if bits % NBITS:
            raise UsageError(
                f"{self.name}: {bits} bits do not divide into codebooks of {NBITS}: use a multiple of {NBITS}"
            )
        if not 1 <= cells <= 65_536 or iterations < 1:
            raise UsageError(
                f"{self.name}: {cells} cells, {iterations} iterations: use 1 to 65,536 cells and at least 1 iteration"
            )
        self.M = bits // NBITS
        self.cells = cells
        self.iterations = iterations
        self.normalize = normalize
        self.extra_bits = 0
        self._pq_bytes = (bits + 7) // 8
        self.centroids: Floats = np.empty((0, 0), np.float32)
        self.rotations: Floats = np.empty((0, 0, 0), np.float32)
        self.codebooks: Floats = np.empty((0, 0, 0, 0), np.float32)

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            "bits": self.bits,
            "cells": self.cells,
            "iterations": self.iterations,
            "normalize": self.normalize,
        }

    # ------------------------------------------------------------------------------------------------------------- fit

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        del labels
        width = x.shape[1]
        if width < self.M:
            raise UsageError(
                f"{self.name}: {self.bits} bits need {self.M} parts, but the vectors have width {width}"
            )
        if len(x) < CODEWORDS:
            raise DataError(
                f"{self.name}: {len(x)} training vectors are too few for {CODEWORDS} codewords: give at least {CODEWORDS}"
            )
        x = self._scaled(x)
        cells = min(self.cells, max(1, len(x) // _PER_CELL))
        # Faiss' default is 256 points per centroid: use all rows.
        coarse = faiss.Kmeans(
            width,
            cells,
            niter=self.iterations,
            seed=self.seed + 1,
            max_points_per_centroid=len(x),
            min_points_per_centroid=1,
        )
        coarse.train(x)
        self.centroids = np.ascontiguousarray(coarse.centroids, dtype=np.float32)
        self.extra_bits = (cells - 1).bit_length()
        self._cell_type = np.dtype("<u1" if cells <= 256 else "<u2")
        self.code_size = self._pq_bytes + self._cell_type.itemsize
        cell = self._cell_of(x)
        padded = width + -width % self.M
        self.rotations = np.empty((cells, padded, width), np.float32)
        self.codebooks = np.empty((cells, self.M, CODEWORDS, padded // self.M), np.float32)
        common: tuple[Floats, Floats] | None = None
        for c in range(cells):
            rows = np.flatnonzero(cell == c)
            if len(rows) >= min(LEAST, len(x)):
                local = self._trained(x[rows] - self.centroids[c], padded)
            else:
                common = local = common or self._trained(x - self.centroids[cell], padded)
            self.rotations[c], self.codebooks[c] = local

    def _trained(self, residuals: Floats, padded: int) -> tuple[Floats, Floats]:
        """Rotation [padded, width] and codebooks [M, 16, padded / M] for residuals [n, width]."""
        rotation = local_rotation(residuals, self.M, padded)
        pq = self._quantizer(padded)
        # Faiss' default is 256 points per centroid.
        pq.cp.max_points_per_centroid = np.iinfo(np.int32).max // CODEWORDS
        pq.cp.min_points_per_centroid = 1
        pq.train(np.ascontiguousarray(residuals @ rotation.T))
        return rotation, faiss.vector_to_array(pq.centroids).reshape(self.M, CODEWORDS, padded // self.M)

    def _quantizer(self, padded: int) -> Any:
        pq = faiss.ProductQuantizer(padded, self.M, NBITS)
        pq.cp.seed = self.seed + 1
        pq.cp.niter = self.iterations
        return pq

    # ------------------------------------------------------------------------------------------------ encode and score

    def _scaled(self, x: Floats) -> Floats:
        return scaled_rows(x) if self.normalize else x

    def _cell_of(self, x: Floats) -> NDArray[np.int64]:
        """The cell of each scaled vector: int64 [n]."""
        cells: NDArray[np.int64] = faiss.knn(x, self.centroids, 1)[1][:, 0]
        return cells

    def cell_of(self, codes: Codes) -> NDArray[np.int64]:
        """The cell of each code uint8 [n, code_size]: int64 [n]."""
        self._require_fit()
        raw = np.ascontiguousarray(codes[:, self._pq_bytes :]).view(self._cell_type)[:, 0]
        return raw.astype(np.int64)

    def _encode(self, x: Floats) -> Codes:
        codes = np.empty((len(x), self.code_size), np.uint8)
        if not len(x):
            return codes
        x = self._scaled(x)
        cell = self._cell_of(x)
        codes[:, self._pq_bytes :] = cell.astype(self._cell_type)[:, None].view(np.uint8)
        pq = self._quantizer(self.rotations.shape[1])
        for c in np.unique(cell):
            rows = np.flatnonzero(cell == c)
            faiss.copy_array_to_vector(self.codebooks[c].ravel(), pq.centroids)
            local = (x[rows] - self.centroids[c]) @ self.rotations[c].T
            codes[rows, : self._pq_bytes] = pq.compute_codes(np.ascontiguousarray(local))
        return codes

    def decode(self, codes: NDArray[Any]) -> Floats:
        """Reconstructions float32 [n, width] of codes (of the unit-length vectors if ``normalize``)."""
        cell = self.cell_of(codes)
        assignment = unpack_codes(np.ascontiguousarray(codes[:, : self._pq_bytes]), self.M, CODEWORDS)
        words = self.codebooks[cell[:, None], np.arange(self.M), assignment].reshape(len(codes), -1)
        x = self.centroids[cell].copy()
        for c in np.unique(cell):
            x[cell == c] += words[cell == c] @ self.rotations[c]
        return x

    def quantisation_error(self, x: NDArray[Any]) -> float:
        """Mean squared distance between vectors float32 [n, width], scaled as for coding, and their reconstructions."""
        difference = self._scaled(self._inputs(x, "vectors")) - self.decode(self.encode(x))
        return float(np.einsum("nd,nd->", difference, difference, dtype=np.float64) / max(1, len(difference)))

    def _tables(self, xq: Floats, c: int) -> Floats:
        """Negative squared distances float32 [Q, M, 16] of scaled queries to the codewords of cell ``c``."""
        centroids = self.codebooks[c]
        y = ((xq - self.centroids[c]) @ self.rotations[c].T).reshape(len(xq), self.M, 1, -1)
        tables = np.empty((len(y), self.M, CODEWORDS), np.float32)
        block = max(1, _BLOCK_BYTES // centroids.nbytes)
        for i in range(0, len(y), block):
            # From differences: x² - 2xc + c² would lose precision for small distances.
            difference = y[i : i + block] - centroids
            np.einsum("qmkd,qmkd->qmk", difference, difference, out=tables[i : i + block])
        return np.negative(tables, out=tables)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        xq = self._scaled(xq)
        cell = self.cell_of(codes)
        if len(cell) and cell.max() >= len(self.centroids):
            raise DataError(f"{self.name}: a code has cell {cell.max()}, but there are {len(self.centroids)}")
        assignment = unpack_codes(np.ascontiguousarray(codes[:, : self._pq_bytes]), self.M, CODEWORDS)
        scores = np.empty((len(xq), len(codes)), np.float32)
        for c in np.unique(cell):
            rows = np.flatnonzero(cell == c)
            tables = self._tables(xq, int(c))
            local = np.zeros((len(xq), len(rows)), np.float32)
            # Always summed in the order of the parts, so that equal codes have bit-equal scores.
            for m in range(self.M):
                local += tables[:, m, assignment[rows, m]]
            scores[:, rows] = local
        return scores

    # ----------------------------------------------------------------------------------------------------------- index

    def index(self) -> CellShards:
        """``faiss.IndexShards`` with a shard per cell, which ranks exactly as :meth:`score` does; see :class:`CellShards`.

        An ``IndexIVFPQ`` cannot be used: it has one rotation and one set of codebooks for all cells.
        """
        self._require_fit()
        return CellShards(self)


_IndexShards: Any = faiss.IndexShards  # its type annotations are incomplete


class CellShards(_IndexShards):  # type: ignore[misc]
    """A shard per cell: ``IndexIDMap`` of ``IndexPreTransform`` (x, scaled, to R (x - c)) of ``IndexPQ`` (L2).

    Rotations preserve lengths, so distances of different cells are comparable, and merging gives the full ranking. Unlike in Faiss,
    ``add`` puts each vector into the shard of its cell, with ids from ``ntotal`` on. ``faiss.write_index`` cannot write shards, only
    each of them.
    """

    _method: LOPQ | None = None  # Faiss' classes accept only declared attributes

    def __init__(self, method: LOPQ) -> None:
        cells, padded, width = method.rotations.shape
        super().__init__(width, False, False)
        self._method = method
        self.own_indices = True
        for c in range(cells):
            transform = faiss.LinearTransform(width, padded, True)
            faiss.copy_array_to_vector(method.rotations[c].ravel(), transform.A)
            faiss.copy_array_to_vector(-(method.rotations[c] @ method.centroids[c]), transform.b)
            transform.is_trained = True
            pq = faiss.IndexPQ(padded, method.M, NBITS, faiss.METRIC_L2)
            faiss.copy_array_to_vector(method.codebooks[c].ravel(), pq.pq.centroids)
            pq.is_trained = True
            scale = [faiss.NormalizationTransform(width, 2.0)] if method.normalize else []
            chain: Any = behind([*scale, transform], pq)
            shard: Any = faiss.IndexIDMap(chain)
            chain.this.disown()
            shard.own_fields = True
            self.add_shard(shard)
            shard.this.disown()
        self.syncWithSubIndexes()

    def add(self, x: NDArray[Any]) -> None:
        """Add vectors float32 [n, width]."""
        x = np.ascontiguousarray(x, dtype=np.float32)
        assert self._method is not None
        cell, first = self._method._cell_of(self._method._scaled(x)), self.ntotal
        for c in np.unique(cell):
            rows = np.flatnonzero(cell == c)
            self.at(int(c)).add_with_ids(np.ascontiguousarray(x[rows]), first + rows)
        self.syncWithSubIndexes()


def local_rotation(residuals: Floats, M: int, padded: int) -> Floats:
    """Principal axes of residuals [n, width], allocated to M parts of padded / M rows each: float32 [padded, width].

    By falling variance, each axis goes to the part with the smallest product of variances that has room. Variances are in units of
    the smallest, so that factors are at least 1. Unused rows are zero.
    """
    centred = residuals - residuals.mean(axis=0, dtype=np.float64)
    variances, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    # Rank-deficient cells have variances of 0, or slightly negative by rounding.
    variances = np.maximum(variances, max(variances[-1], np.finfo(np.float32).tiny) * 1e-9)
    logs = np.log(variances / variances[0])
    size = padded // M
    parts: list[list[int]] = [[] for _ in range(M)]
    products = np.zeros(M)
    for axis in np.argsort(-variances, kind="stable"):
        open_parts = [m for m in range(M) if len(parts[m]) < size]
        # Ties go to the emptier part: the smallest variance has log 0.
        chosen = min(open_parts, key=lambda m: (products[m], len(parts[m]), m))
        parts[chosen].append(int(axis))
        products[chosen] += logs[axis]
    rotation = np.zeros((padded, residuals.shape[1]), np.float32)
    for m, axes in enumerate(parts):
        rotation[m * size : m * size + len(axes)] = vectors[:, axes].T
    return rotation

"""Locally optimised product quantisation (Kalantidis and Avrithis, "Locally Optimized Product
Quantization for Approximate Nearest Neighbor Search", CVPR 2014): a rotation and codebooks per cell
of a coarse quantiser.

k-means divides the space into cells. The residuals x - c of a cell are rotated to their principal
axes R, which are allocated to the M parts so that the products of variances are balanced (Ge et
al.: axes by falling variance, each to the part with the smallest product that has room); a product
quantiser is trained on them. The distance of a query to an item is that of the query's residual in
the item's cell, R (q - c), to the codewords, summed over the parts. Unsupervised.

**Code format.** ``bits`` of codewords, followed by the cell number in one byte. The paper counts
the codewords' bits alone; with the :attr:`extra_bits` of 64 cells this method has 18 at "12 bits",
an advantage. All cells are searched; the paper searches a few, for speed.

Deviations: vectors are scaled to length 1 and padded as by :mod:`gpq_faiss.methods.faiss_codec`;
the coarse quantiser is k-means (the paper's second one, a multi-index, is for a billion items);
there is a cell per 256 training vectors, at most 64 (the paper: 1,024 for a million); cells with
fewer than :data:`LEAST` vectors use the rotation and codebooks of all residuals.
"""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import NDArray

from ..config import codebooks_for_bits
from ..data.labels import Labels
from ..faissio.kmeans import fit_codebooks, kmeans
from .coders import Coder, Codes, Floats, ProductCoder

K = 16
"""Codewords of a codebook."""
LEAST = 8 * K
"""Minimum training vectors of a cell for its own codebooks."""
_CELLS = 64
"""Maximum number of cells."""
_PER_CELL = 256
"""Training vectors per cell, on average."""


class LOPQ(Coder):
    """Locally optimised product quantiser with M = bits / 4 codebooks of 16 codewords in each cell.
    Faiss has no such index.

    ``centroids``: float32 [cells, width]; ``cells``: of each its :func:`local_rotation`, and the
    quantiser of its rotated residuals.
    """

    name = "lopq"
    unit = True

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.M = codebooks_for_bits(bits, K)
        self.code_size += 1

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        cells = min(_CELLS, max(1, len(x) // _PER_CELL))
        self.centroids = kmeans(x, cells, self.seed + 1)
        self.extra_bits = (cells - 1).bit_length()
        cell = self._cell_of(x)
        residuals = x - self.centroids[cell]
        common = self._local(residuals)
        self.cells = [
            self._local(rows) if len(rows) >= LEAST else common
            for rows in (residuals[cell == c] for c in range(cells))
        ]

    def _local(self, residuals: Floats) -> tuple[Floats, ProductCoder]:
        rotation = local_rotation(residuals, self.M)
        codebooks = fit_codebooks(residuals @ rotation.T, self.M, K, seed=self.seed)
        return rotation, ProductCoder(codebooks, "l2")

    def _in_cell(self, x: Floats, c: int) -> Floats:
        return np.asarray((x - self.centroids[c]) @ self.cells[c][0].T)

    def _cell_of(self, x: Floats) -> NDArray[np.int64]:
        return np.asarray(faiss.knn(x, self.centroids, 1)[1][:, 0])

    def _encode(self, x: Floats) -> Codes:
        codes = np.empty((len(x), self.code_size), np.uint8)
        codes[:, -1] = cell = self._cell_of(x)
        for c in np.unique(cell):
            rows = cell == c
            codes[rows, :-1] = self.cells[c][1].encode(self._in_cell(x[rows], c))
        return codes

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        scores = np.empty((len(xq), len(codes)), np.float32)
        for c in np.unique(codes[:, -1]):
            rows = codes[:, -1] == c
            scores[:, rows] = self.cells[c][1].score(self._in_cell(xq, c), codes[rows, :-1])
        return scores


def local_rotation(residuals: Floats, M: int) -> Floats:
    """Principal axes of residuals [n, width], dealt out to M parts of d rows: float32 [M·d, width].

    d is width / M, rounded up; unused rows are zero.
    """
    d = -(-residuals.shape[1] // M)
    centred = residuals - residuals.mean(axis=0, dtype=np.float64)
    variances, vectors = np.linalg.eigh(centred.T @ centred / len(centred))
    # Rank-deficient cells have variances of 0, or slightly negative by rounding.
    variances = np.maximum(variances, max(variances[-1], np.finfo(np.float32).tiny) * 1e-9)
    # So that the factors of a part's product are at least 1.
    logs = np.log(variances / variances[0])
    rotation = np.zeros((M, d, residuals.shape[1]), np.float32)
    sizes = np.zeros(M, np.int64)
    products = np.zeros(M)  # logarithms of the products of variances
    for axis in np.argsort(-variances, kind="stable"):
        # Ties go to the emptier part: the smallest variance has log 0.
        m = min(np.flatnonzero(sizes < d).tolist(), key=lambda m: (products[m], sizes[m]))
        rotation[m, sizes[m]] = vectors[:, axis]
        sizes[m] += 1
        products[m] += logs[axis]
    return rotation.reshape(M * d, -1)

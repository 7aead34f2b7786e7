"""Optimised product quantisation (Ge, He, Ke and Sun, CVPR 2013): a rotation before the product quantiser.

The rotation R and the codebooks are trained alternately to reduce the quantisation error ||R x - q(R x)||² (the non-parametric
solution, alg. 1): codebooks for the rotated vectors, then R from the singular vectors of X Yᵀ. Training is Faiss's
``OPQMatrix``; then a product quantiser is trained from scratch on the rotated vectors. Unsupervised.

Deviations: the initial rotation is random by seed (Faiss: always the same one; the paper: the parametric solution), and it is trained
with the final 16-codeword codebooks (Faiss' default: 256). If M does not divide the width, vectors are zero-padded; they are scaled
to unit length, as in :mod:`gpq_faiss.methods.pq`.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..data.labels import Labels
from ..errors import UsageError
from .base import Floats
from .pq import PQ, pad


class OPQ(PQ):
    """Rotation and product quantiser.

    Args:
        iterations: of the final k-means.
        normalize: scale vectors to unit length, as :class:`~gpq_faiss.methods.pq.PQ` does.
        rotations: alternations between rotation and codebooks.

    Attributes:
        rotation: float32 [padded, width] with orthonormal columns; a scaled vector x is quantised as ``rotation @ x``.
    """

    name = "opq"

    def __init__(
        self, bits: int, *, seed: int = 0, iterations: int = 25, normalize: bool = True, rotations: int = 50
    ) -> None:
        super().__init__(bits, seed=seed, iterations=iterations, normalize=normalize)
        if rotations < 0:
            raise UsageError(f"{self.name}: {rotations} rotations: it must not be negative")
        self.rotations = rotations
        self.rotation: Floats = np.empty((0, 0), np.float32)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "rotations": self.rotations}

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        del labels
        self._check_fit(x)
        x = self._scaled(x)
        width = self.padded(x.shape[1])
        wide = pad(x, width)
        draw = np.random.default_rng([self.seed, 0]).standard_normal((width, width))
        start = np.linalg.qr(draw)[0].astype(np.float32)
        matrix = faiss.OPQMatrix(width, self.M)
        faiss.copy_array_to_vector(start.ravel(), matrix.A)
        matrix.niter = self.rotations
        matrix.max_train_points = len(wide)  # Faiss' default: 65,536
        inner = self._quantizer(width)
        matrix.pq = inner
        try:
            if self.rotations:
                matrix.train(wide)
        finally:
            matrix.pq = None  # Python frees it
        full = faiss.vector_to_array(matrix.A).reshape(width, width)
        # The padded dimensions are always 0, so their columns have no effect.
        self.rotation = np.ascontiguousarray(full[:, : x.shape[1]])
        self.pq = self._trained(self._to_quantizer(x))

    def _transforms(self) -> list[Any]:
        transform = faiss.LinearTransform(self.width, self.pq.d, False)
        faiss.copy_array_to_vector(self.rotation.ravel(), transform.A)
        transform.is_trained = True
        transform.set_is_orthonormal()
        return [transform]

    def _to_quantizer(self, x: Floats) -> Floats:
        return np.ascontiguousarray(x @ self.rotation.T)

    def _from_quantizer(self, y: Floats) -> Floats:
        return np.ascontiguousarray(y @ self.rotation)

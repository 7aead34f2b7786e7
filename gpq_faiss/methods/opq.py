"""Optimised product quantisation (Ge, He, Ke and Sun, CVPR 2013): a rotation before the product quantiser.

The rotation R and the codebooks are trained alternately to reduce the quantisation error ||R x - q(R x)||² (the non-parametric
solution, alg. 1): codebooks for the rotated vectors, then R from the singular vectors of X Yᵀ. Training is Faiss's
``OPQMatrix``; then a product quantiser is trained from scratch on the rotated vectors. Unsupervised.

Deviations: the initial rotation is random by seed (Faiss: always the same one; the paper: the parametric solution), and it is trained
with the final 16-codeword codebooks (Faiss' default: 256). Vectors are scaled and padded as in :mod:`gpq_faiss.methods.pq`.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from .coders import Floats
from .pq import PQ, untrained_quantizer


class OPQ(PQ):
    """Rotation and product quantiser.

    Attributes:
        rotation: float32 [padded, width] with orthonormal columns; a scaled vector x is quantised as ``rotation @ x``.
    """

    name = "opq"
    rotation: Floats

    def _learn(self, x: Floats) -> None:
        width = self.padded(x.shape[1])
        draw = np.random.default_rng([self.seed, 0]).standard_normal((width, width))
        matrix = faiss.OPQMatrix(width, self.M)
        faiss.copy_array_to_vector(np.linalg.qr(draw)[0].astype(np.float32).ravel(), matrix.A)
        matrix.max_train_points = len(x)  # Faiss' default: 65,536
        inner = untrained_quantizer(width, self.M, seed=self.seed)
        matrix.pq = inner
        try:
            matrix.train(super()._to_quantizer(x))
        finally:
            matrix.pq = None  # Python frees it
        full = faiss.vector_to_array(matrix.A).reshape(width, width)
        # The padded dimensions are always 0, so their columns have no effect.
        self.rotation = np.ascontiguousarray(full[:, : x.shape[1]])
        super()._learn(x)

    def _transforms(self) -> list[Any]:
        transform = faiss.LinearTransform(self.width, self.quantizer.width, False)
        faiss.copy_array_to_vector(self.rotation.ravel(), transform.A)
        transform.is_trained = True
        transform.set_is_orthonormal()
        return [transform]

    def _to_quantizer(self, x: Floats) -> Floats:
        return np.ascontiguousarray(x @ self.rotation.T)

"""Iterative quantisation (Gong, Lazebnik, Gordo and Perronnin, TPAMI 2013): signs of rotated principal components.

The vectors are centred and scaled to unit length, projected onto their first ``bits`` principal components, and rotated as
close as possible to their signs (min ||B - V R||², sect. 3, alternately for B and R). A bit is the sign of a
coordinate; queries are coded as well and compared by Hamming distance. Training is Faiss's ``ITQTransform``.
Unsupervised.

Deviation: the scaling to length 1 is Faiss's; the paper centres the vectors and leaves their lengths as they are.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..data.labels import Labels
from .coders import BinaryMethod, Floats


class ITQ(BinaryMethod):
    """PCA and the rotation of iterative quantisation, 50 alternations between signs and rotation as in the paper."""

    name = "itq"
    _transform: Any

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.least_rows, self.least_width = bits + 1, bits

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        n, width = x.shape
        self._transform = faiss.ITQTransform(width, self.bits, True)
        self._transform.itq.seed = self.seed + 1
        self._transform.max_train_per_dim = -(-n // width)  # Faiss' default: 10 rows per dimension
        self._transform.train(x)

    def _project(self, x: Floats) -> Floats:
        out: Floats = self._transform.apply(x) if len(x) else np.empty((0, self.bits), np.float32)
        return out

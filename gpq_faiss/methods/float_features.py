"""The features themselves, compared by cosine: what any code of them gives up, and what a supervised code has to beat.

No compression: an item keeps all its 32-bit numbers, scaled to length 1, whatever number of bits the codes beside it have. The
cosine is chosen over L2 since it is what deep features are usually compared by, and the better known.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..data.labels import Labels
from .base import Coder, Codes, Floats, unit_rows
from .pq import behind


class FloatFeatures(Coder):
    """Exact cosine similarity of the input vectors; the code is the unit vector as float32 bytes.

    Args:
        bits: not used: a table asks every method for some number of bits. :attr:`bits` is 32 · width after :meth:`fit`.
    """

    name = "float"

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        del labels  # nothing to learn but the width
        self.code_size = 4 * x.shape[1]
        self.bits = 8 * self.code_size

    def index(self) -> Any:
        """Scaling to length 1, then ``faiss.IndexFlatIP``."""
        self._require_fit()
        return behind([faiss.NormalizationTransform(self.width, 2.0)], faiss.IndexFlatIP(self.width))

    def _encode(self, x: Floats) -> Codes:
        return unit_rows(x, self.name).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return dot_rows(unit_rows(xq, self.name), codes.view(np.float32))


def dot_rows(xq: Floats, xb: Floats) -> Floats:
    """Inner products float32 [Q, n] of the rows of ``xq`` [Q, D] and ``xb`` [n, D], equal rows bit-equal.

    BLAS sums in an order that depends on where in the matrix a row stands, so equal items would differ in the last bit and
    break their tie; einsum's plain loop over the last axis takes every pair alike.
    """
    scores: Floats = np.einsum("qd,nd->qn", xq, xb)
    return scores

"""Uncompressed features, compared by cosine: the reference that supervised codes have to beat.

Items keep all their 32-bit numbers, scaled to unit length, whatever the requested number of bits.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..data.labels import Labels, rows_that
from ..errors import DataError
from .coders import Coder, Codes, Floats
from .pq import behind


class FloatFeatures(Coder):
    """Exact cosine similarity of the input vectors; the code is the unit vector as float32 bytes, of 32 · width bits."""

    name = "float"
    unit = True

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        self._store(x.shape[1])

    def _store(self, numbers: int) -> None:
        self.code_size = 4 * numbers
        self.bits = 8 * self.code_size

    def index(self) -> Any:
        """Scaling to length 1, then ``faiss.IndexFlatIP``."""
        self._require_fit()
        return behind([faiss.NormalizationTransform(self.width, 2.0)], faiss.IndexFlatIP(self.width))

    def _stored(self, x: Floats) -> Floats:
        """What is stored of vectors, and compared."""
        zero = np.flatnonzero(~x.any(axis=1))
        if zero.size:
            raise DataError(
                f"{self.name}: {rows_that(zero, 'are')} all zero and have no direction: leave them out"
            )
        return x

    def _encode(self, x: Floats) -> Codes:
        return self._stored(x).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return dot_rows(self._stored(xq), codes.view(np.float32))


def dot_rows(xq: Floats, xb: Floats) -> Floats:
    """Inner products float32 [Q, n] of the rows of ``xq`` [Q, D] and ``xb`` [n, D], bit-equal for equal rows.

    BLAS sums in an order that depends on a row's position, which would break ties of equal items in the last bit; einsum's loop over
    the last axis treats every pair alike.
    """
    scores: Floats = np.einsum("qd,nd->qn", xq, xb)
    return scores

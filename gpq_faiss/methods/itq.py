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
from numpy.typing import NDArray

from ..data.labels import Labels
from ..errors import DataError, UsageError
from .base import Coder, Codes, Floats
from .coders import SignCoder


class BinaryMethod(Coder):
    """A method whose codes are bits compared by Hamming distance; sub-classes implement :meth:`project`.

    Bit i of a code is the sign of coordinate i (1 above 0), in byte i // 8, lowest bit first, as Faiss packs them. The
    padding bits of the last byte are 0 and do not affect distances.
    """

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.code_size = (bits + 7) // 8

    def project(self, x: NDArray[Any]) -> Floats:
        """The coordinates float32 [n, bits] whose signs are the code."""
        return self._project(self._inputs(x, "vectors"))

    def _project(self, x: Floats) -> Floats:
        raise NotImplementedError

    def index(self) -> Any:
        """``faiss.IndexBinaryFlat`` over the code's bits, padded to whole bytes."""
        self._require_fit()
        return faiss.IndexBinaryFlat(8 * self.code_size)

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """The queries' codes, uint8 [Q, code_size], as binary indexes need."""
        return self.encode(xq)

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """As :meth:`.coders.SignCoder.score_tables`, for queries float32 [Q, width]."""
        return SignCoder(self.bits).score_tables(self.project(xq))

    def _encode(self, x: Floats) -> Codes:
        return SignCoder(self.bits).encode(self._project(x))

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return SignCoder(self.bits).score(self._project(xq), codes)


class ITQ(BinaryMethod):
    """PCA and the rotation of iterative quantisation.

    Args:
        iterations: alternations between signs and rotation (50 in the paper).
    """

    name = "itq"

    def __init__(self, bits: int, *, seed: int = 0, iterations: int = 50) -> None:
        super().__init__(bits, seed=seed)
        if iterations < 0:
            raise UsageError(f"{self.name}: {iterations} iterations: it must not be negative")
        self.iterations = iterations
        self._transform: Any = None

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "bits": self.bits, "iterations": self.iterations}

    def rotation(self) -> Floats:
        """Projection and rotation in one, float32 [bits, width], orthonormal rows: coordinates = rotation @ unit vector."""
        self._require_fit()
        flat = faiss.vector_to_array(self._transform.pca_then_itq.A)
        matrix: Floats = flat.reshape(self.bits, self.width)
        return matrix

    def mean(self) -> Floats:
        """Mean subtracted before scaling to unit length, float32 [width]."""
        self._require_fit()
        mean: Floats = faiss.vector_to_array(self._transform.mean)
        return mean

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        del labels
        width = x.shape[1]
        if self.bits > width:
            raise UsageError(
                f"{self.name}: {self.bits} bits need {self.bits} principal components, but the vectors have width {width}: "
                f"use at most {width} bits"
            )
        if len(x) <= self.bits:
            raise DataError(
                f"{self.name}: {len(x)} training vectors are too few for {self.bits} bits: give at least {self.bits + 1}"
            )
        transform = faiss.ITQTransform(width, self.bits, True)
        transform.itq.seed = self.seed + 1
        transform.itq.max_iter = self.iterations
        transform.max_train_per_dim = -(-len(x) // width)  # Faiss' default: 10 rows per dimension
        transform.train(x)
        self._transform = transform

    def _project(self, x: Floats) -> Floats:
        if not len(x):
            return np.empty((0, self.bits), np.float32)
        coordinates: Floats = self._transform.apply(x)
        return coordinates

"""Product quantisation (Jégou, Douze and Schmid, TPAMI 2011): k-means in each of M parts of the vector; and its optimised form.

A vector is split into M parts and each part is coded by the nearest of K = 16 centroids; the distance of a query to a code is the
sum of the squared distances of its parts to the centroids (asymmetric distance, eq. 13), read from M tables. Training, encoding
and index are Faiss's own. Unsupervised. If M does not divide the width, vectors are zero-padded, which does not change distances.

Deviation, in this method's favour: vectors are scaled to unit length first, so that L2 ranks like the cosine. On deep
features that ranks better (CIFAR-10 features: mAP 0.287 against 0.268 at 12 bits, 0.284 against 0.274 at 48).

Optimised product quantisation (Ge, He, Ke and Sun, CVPR 2013) rotates the vectors first. The rotation R and the codebooks are trained
alternately to reduce the quantisation error ||R x - q(R x)||² (the non-parametric solution, alg. 1), by Faiss's ``OPQMatrix``; then a
product quantiser is trained from scratch on the rotated vectors. Deviations: the initial rotation is random by seed (Faiss: always the
same one; the paper: the parametric solution), and it is trained with the final 16-codeword codebooks (Faiss' default: 256).
"""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import faiss
import numpy as np

from ..data.labels import Labels
from ..errors import DataError, UsageError
from .coders import Coder, Codes, Floats, ProductCoder

NBITS = 4
"""Bits per codebook: 16 codewords, as everywhere in the paper's comparison."""
CODEWORDS = 1 << NBITS


class InParts(Coder):
    """A method that codes M = bits / 4 parts of the scaled vector by 16 codewords each. Raises UsageError: not a multiple of 4 bits."""

    unit = True
    K = least_rows = CODEWORDS

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        if bits % NBITS:
            raise UsageError(
                f"{self.name}: {bits} bits do not divide into codebooks of {NBITS}: use a multiple of {NBITS}"
            )
        self.M = self.least_width = bits // NBITS

    def padded(self, width: int) -> int:
        """``width`` rounded up to a multiple of M."""
        return width + -width % self.M


class PQ(InParts):
    """Product quantiser; ``quantizer`` codes the padded vectors."""

    name = "pq"
    quantizer: ProductCoder

    def _to_quantizer(self, x: Floats) -> Floats:
        """What is done before the product quantiser: float32 [n, width] to [n, padded]."""
        return np.pad(x, ((0, 0), (0, -x.shape[1] % self.M)))

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        self.quantizer = ProductCoder(fit_codebooks(self._to_quantizer(x), self.M, seed=self.seed), "l2")

    def _encode(self, x: Floats) -> Codes:
        return self.quantizer.encode(self._to_quantizer(x))

    def _tables(self, x: Floats) -> Floats | None:
        return self.quantizer.score_tables(self._to_quantizer(x))


class OPQ(PQ):
    """Rotation and product quantiser: a scaled vector x is quantised as ``rotation @ x``, float32 [padded, width], orthonormal columns."""

    name = "opq"
    rotation: Floats

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        width = self.padded(x.shape[1])
        draw = np.random.default_rng([self.seed, 0]).standard_normal((width, width))
        matrix = faiss.OPQMatrix(width, self.M)
        faiss.copy_array_to_vector(np.linalg.qr(draw)[0].astype(np.float32).ravel(), matrix.A)
        # Rows are repeated if they are fewer than their numbers: Faiss would write behind the end of an array.
        rows = np.resize(super()._to_quantizer(x), (max(len(x), width), width))
        matrix.max_train_points = len(rows)  # Faiss' default: 65,536
        inner = untrained_quantizer(width, self.M, seed=self.seed)
        matrix.pq = inner
        try:
            matrix.train(rows)
        finally:
            matrix.pq = None  # Python frees it
        # The padded dimensions are always 0, so their columns have no effect.
        full = faiss.vector_to_array(matrix.A).reshape(width, width)
        self.rotation = np.ascontiguousarray(full[:, : x.shape[1]])
        super()._fit(x, labels)

    def _to_quantizer(self, x: Floats) -> Floats:
        return np.ascontiguousarray(x @ self.rotation.T)


def kmeans(x: Floats, K: int, seed: int, *, niter: int = 25, nredo: int = 1) -> Floats:
    """Centroids [K, width] of all rows of ``x``; the best of ``nredo`` runs."""
    # Faiss' default would use at most 256 rows per centroid.
    rows = {"min_points_per_centroid": 1, "max_points_per_centroid": len(x)}
    found = faiss.Kmeans(x.shape[1], K, niter=niter, nredo=nredo, seed=seed, **rows)
    found.train(np.ascontiguousarray(x))
    return np.ascontiguousarray(found.centroids, dtype=np.float32)


def check_rows(x: Sized, K: int) -> None:
    """Raises DataError: fewer rows than codewords."""
    if len(x) < K:
        raise DataError(f"{len(x)} items are too few for {K} codewords: give, or label, at least {K}")


def untrained_quantizer(width: int, M: int, K: int = CODEWORDS, *, seed: int) -> Any:
    """A ``faiss.ProductQuantizer`` that will be trained on all rows."""
    pq = faiss.ProductQuantizer(width, M, K.bit_length() - 1)
    pq.cp.seed = seed + 1  # seed of the initial centroids
    # Faiss' default is 256 points per centroid, 4,096 in all: use all rows.
    pq.cp.max_points_per_centroid = np.iinfo(np.int32).max // K
    pq.cp.min_points_per_centroid = 1  # fewer than 39 only print a warning
    return pq


def fit_codebooks(
    x: Floats, M: int, K: int = CODEWORDS, *, start: Floats | None = None, rows: int | None = None, seed: int
) -> Floats:
    """Codebooks float32 [M, K, d] by k-means in each part of x float32 [n, M·d], from the codebooks ``start`` on (None: random rows), with
    at most ``rows`` rows per codeword. Raises DataError: fewer rows than codewords."""
    check_rows(x, K)
    pq = untrained_quantizer(x.shape[1], M, K, seed=seed)
    if rows is not None:
        pq.cp.max_points_per_centroid = rows
    if start is not None:
        faiss.copy_array_to_vector(np.ascontiguousarray(start, np.float32).ravel(), pq.centroids)
        pq.train_type = faiss.ProductQuantizer.Train_hot_start
    pq.train(np.ascontiguousarray(x, np.float32))
    return np.asarray(faiss.vector_to_array(pq.centroids), np.float32).reshape(M, K, -1)

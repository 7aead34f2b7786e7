"""k-means by Faiss, over whole vectors and in each part of them, on all rows that are given."""

from __future__ import annotations

from collections.abc import Sized

import faiss
import numpy as np

from ..codes.checks import Floats
from ..errors import DataError


def kmeans(x: Floats, K: int, seed: int, *, niter: int = 25, nredo: int = 1) -> Floats:
    """Fit K centroids, float32 [K, width], to all rows of ``x``; the best of ``nredo`` runs."""
    # Faiss' default would use at most 256 rows per centroid.
    clustering = faiss.Kmeans(
        x.shape[1],
        K,
        niter=niter,
        nredo=nredo,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(x),
    )
    clustering.train(x)
    return np.asarray(clustering.centroids)


def check_rows(x: Sized, K: int) -> None:
    """Raise DataError if there are fewer rows than codewords."""
    if len(x) < K:
        raise DataError(
            f"{len(x)} items are too few for {K} codewords: give, or label, at least {K}"
        )


def use_all_rows(pq: faiss.ProductQuantizer, seed: int) -> None:
    """Let a product quantiser be trained on all rows, from centroids by ``seed``."""
    pq.cp.seed = seed + 1
    # Faiss' default is 256 rows per centroid, 4,096 in all.
    pq.cp.max_points_per_centroid = np.iinfo(np.int32).max // pq.ksub
    pq.cp.min_points_per_centroid = 1  # fewer than 39 only print a warning


def fit_codebooks(
    x: Floats,
    M: int,
    K: int,
    *,
    start: Floats | None = None,
    seed: int,
) -> Floats:
    """Fit M codebooks of K codewords, float32 [M, K, d], by k-means in each part of ``x``, float32
    [n, M·d], from the codebooks ``start``, or from random rows by ``seed``.

    Raises:
        DataError: fewer rows than codewords.
    """
    check_rows(x, K)
    pq = faiss.ProductQuantizer(x.shape[1], M, K.bit_length() - 1)
    use_all_rows(pq, seed)
    if start is not None:
        faiss.copy_array_to_vector(start.ravel(), pq.centroids)
        pq.train_type = faiss.ProductQuantizer.Train_hot_start
    pq.train(x)
    return np.asarray(faiss.vector_to_array(pq.centroids)).reshape(M, K, -1)

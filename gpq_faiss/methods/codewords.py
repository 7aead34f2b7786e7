"""Fit codewords whose sums approximate given vectors. Not in the paper.

Every codebook starts with the same k-means centroids, each at a smaller scale than the one before, like the digits of a number. Then
codes (beam search) and codewords (least squares) are updated alternately (Babenko and Lempitsky, "Additive quantization", CVPR 2014).
"""

from __future__ import annotations

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import DataError
from ..nn.additive import assign

_LLOYD_STEPS = 25
_STARTS = 5
"""Restarts of k-means; the best is kept. Missing a class is the costliest failure."""
_ITERATIONS = 10
PLACE = 0.4
"""Initial scale of a codebook relative to the one before."""
_RIDGE = 1e-3
"""Ridge weight. Codewords are determined only up to shifts between codebooks: the shortest are chosen."""


def fit_codewords(targets: Tensor, M: int, K: int, *, seed: int) -> Tensor:
    """Fit codewords float32 [M, K, E], on the CPU, whose sums approximate ``targets``.

    Args:
        targets: float [n, E], n at least K.
        M: codebooks.
        K: codewords per codebook.
        seed: of k-means.

    Raises:
        DataError: fewer targets than codewords, or targets that are not finite.
    """
    x = np.ascontiguousarray(targets.float().cpu().numpy())
    if len(x) < K:
        raise DataError(
            f"{len(x)} items are too few for {K} codewords: give at least {K} items, or use fewer codewords"
        )
    if not np.isfinite(x).all():
        raise DataError("the network's outputs became infinite: lower training.learning_rate")
    scales = PLACE ** np.arange(M, dtype=np.float32)
    start = (scales / scales.sum())[:, None, None] * kmeans(x, K, seed)
    return _alternate(torch.from_numpy(x), torch.from_numpy(start))


def kmeans(x: NDArray[np.float32], K: int, seed: int) -> NDArray[np.float32]:
    """Centroids [K, E]."""
    kmeans = faiss.Kmeans(
        x.shape[1],
        K,
        niter=_LLOYD_STEPS,
        nredo=_STARTS,
        seed=seed,
        min_points_per_centroid=1,
        max_points_per_centroid=len(x),
    )
    kmeans.train(x)
    return np.ascontiguousarray(kmeans.centroids, dtype=np.float32)


def _alternate(x: Tensor, codewords: Tensor) -> Tensor:
    """Update codes and codewords alternately, from ``codewords`` float [M, K, E]. All codebooks are solved jointly, as E is small
    (:func:`.additive.update_codebooks` solves them one at a time, with an orthogonality term)."""
    M, K, E = codewords.shape
    for _ in range(_ITERATIONS):
        chosen = torch.nn.functional.one_hot(assign(x, codewords), K).flatten(1).double()
        gram = chosen.T @ chosen + _RIDGE * torch.eye(M * K, dtype=torch.double)
        codewords = torch.linalg.solve(gram, chosen.T @ x.double()).float().reshape(M, K, E)
    return codewords

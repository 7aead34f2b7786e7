"""Fit codewords whose sums approximate given vectors. Not in the paper.

Every codebook starts with the same k-means centroids, each at a smaller scale than the one before, like the digits of a number. Then
codes (beam search) and codewords (least squares) are updated alternately (Babenko and Lempitsky, "Additive quantization", CVPR 2014).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from ..nn.additive import assign
from .pq import check_rows, kmeans

STARTS = 5
"""Runs of k-means; the best is kept. Missing a class is the costliest failure."""
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
    """
    x = targets.float().cpu()
    check_targets(x, K)
    scales = PLACE ** np.arange(M, dtype=np.float32)
    start = (scales / scales.sum())[:, None, None] * kmeans(x.numpy(), K, seed, nredo=STARTS)
    codewords = torch.from_numpy(start)
    for _ in range(_ITERATIONS):
        codewords = least_squares(x, assign(x, codewords), K)
    return codewords


def least_squares(targets: Tensor, codes: Tensor, K: int) -> Tensor:
    """Codewords float [M, K, E] whose sums by the codes int64 [n, M] have the least squared difference from ``targets`` float [n, E].

    All codebooks are solved jointly, as E is small (:func:`.dtq.update_codebooks` solves them one at a time)."""
    chosen = torch.nn.functional.one_hot(codes, K).flatten(1).double()
    gram = chosen.T @ chosen + _RIDGE * torch.eye(chosen.shape[1], dtype=torch.double, device=chosen.device)
    solved: Tensor = torch.linalg.solve(gram, chosen.T @ targets.double())
    return solved.reshape(codes.shape[1], K, -1).to(targets.dtype)


def check_targets(x: Tensor, K: int) -> None:
    """Raises DataError: fewer items than codewords, or items that are not finite."""
    check_rows(x, K)
    if not torch.isfinite(x).all():
        raise DataError("the network's outputs became infinite: lower training.learning_rate")

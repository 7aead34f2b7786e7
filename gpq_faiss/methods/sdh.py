"""Supervised discrete hashing (Shen, Shen, Liu and Shen, "Supervised Discrete Hashing", CVPR 2015).

Codes B (±1, [n, bits]) from which a linear classifier W predicts the labels, and hash functions F
that predict these codes:

    min over B, W, F   Σ_i ||y_i - Wᵀ b_i||²  +  λ ||W||²  +  ν Σ_i ||b_i - F(x_i)||²

    F(x) = Pᵀ φ(x),    φ(x) = [exp(-||x - a_1||² / σ), ..., exp(-||x - a_m||² / σ)]

with b_i in {-1, 1}^bits and m anchors a_j,

alternately, ``iterations`` times (algorithm 1): P by least squares of B on φ (F-step), W by ridge
regression of the labels on B (G-step), and B bit by bit with the others fixed (B-step, discrete
cyclic coordinate descent), never relaxed:

    z = sgn(q - B' W' w),     with Q = Y Wᵀ + ν F(X);

q, w are the bit's column of Q and row of W; B', W' those of the other bits.

An item's code is sgn(Pᵀ φ(x)). λ = 1, ν = 1e-5 and 5 iterations as in the paper. y is multi-hot.
Supervised: only labelled rows are used.

Deviations, chosen on held-out labelled items: 2,000 anchors (the paper: 1,000), or all labelled
rows, if there are fewer; σ is the mean squared distance of items and anchors, of vectors scaled to
unit length (the paper: a width for each data set); P is a ridge regression with weight 1e-3 (times
the mean squared kernel), as so many similar kernels are nearly singular; kernels are centred, which
gives F a constant.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics.pairwise import euclidean_distances

from ..data.labels import Labels
from .coders import BinaryMethod, Floats

Doubles = NDArray[np.float64]

_ANCHORS = 2000
"""Number of anchors of the kernel."""
_ITERATIONS = 5
"""Alternations of classifier, codes and hash functions."""
_LAMBDA = 1.0
"""λ, weight of the classifier's norm."""
_NU = 1e-5
"""ν, weight of the distance between codes and hash functions."""
_RIDGE = 1e-3
"""Ridge weight of the hash functions."""
_SWEEPS = 10  # over all bits per iteration


class SDH(BinaryMethod):
    """Supervised discrete hashing with RBF kernels."""

    name = "sdh"
    unit = True

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        rows, labels = self._labelled(labels)
        x, y = x[rows], labels.dense(rows).astype(np.float64)
        rng = np.random.default_rng([self.seed, 0])
        self._anchors = x[np.sort(rng.permutation(len(x))[:_ANCHORS])].astype(np.float64)
        distances = self._squared_distances(x)
        self._sigma = float(distances.mean()) or 1.0
        kernels = np.exp(distances / -self._sigma)
        self._mean = kernels.mean(axis=0)
        kernels -= self._mean
        gram = kernels.T @ kernels
        # Relative to the mean of the diagonal, so independent of the number of items; with a floor
        # for equal kernels.
        gram[np.diag_indices(len(gram))] += max(_RIDGE * float(np.trace(gram) / len(gram)), 1e-10)
        # One factorisation for all iterations: P = solver @ B.
        solver = np.linalg.solve(gram, kernels.T)
        codes = np.where(rng.random((len(x), self.bits)) < 0.5, -1.0, 1.0)
        for _ in range(_ITERATIONS):
            W = np.asarray(
                np.linalg.solve(codes.T @ codes + _LAMBDA * np.eye(self.bits), codes.T @ y),
                np.float64,
            )
            codes = discrete_codes(codes, W, y @ W.T + _NU * (kernels @ (solver @ codes)))
        self._P = solver @ codes

    def _project(self, x: Floats) -> Floats:
        kernels = np.exp(self._squared_distances(x) / -self._sigma)
        return np.asarray((kernels - self._mean) @ self._P, np.float32)

    def _squared_distances(self, x: Floats) -> Doubles:
        """Return the squared distances of rows [n, d] and anchors, float64 [n, m]."""
        return np.asarray(
            euclidean_distances(x.astype(np.float64), self._anchors, squared=True), np.float64
        )


def discrete_codes(B: Doubles, W: Doubles, Q: Doubles, sweeps: int = _SWEEPS) -> Doubles:
    """B in ±1 [n, bits] that lowers ||B W||² - 2 Tr(Bᵀ Q) bit by bit (B-step); W [bits, C], Q [n,
    bits].

    Each bit of each item is set to its optimum with the others fixed, in ``sweeps`` passes. A bit
    without effect is unchanged.
    """
    B = B.copy()
    gram = W @ W.T
    for _ in range(sweeps):
        for bit in range(B.shape[1]):
            pull = Q[:, bit] - (B @ gram[:, bit] - B[:, bit] * gram[bit, bit])
            B[:, bit] = np.where(pull == 0, B[:, bit], np.sign(pull))
    return B

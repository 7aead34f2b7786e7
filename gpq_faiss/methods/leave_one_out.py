"""How much noise training inputs need, and how accurate a model will be, from the labels at hand. Not in the paper.

Training a linear model on inputs with Gaussian noise of variance σ² is ridge regression with the weight nσ² (Bishop, "Training with
noise is equivalent to Tikhonov regularization", Neural Computation 1995). The leave-one-out error of a ridge regression is known in closed
form, for every σ at once; so a few labels suffice to choose σ. They also give the accuracy on unseen items, which a perceptron that was
trained on all of them overestimates.

``sklearn.linear_model.RidgeCV`` has the same errors (a test compares them), but keeps them squared, so that predictions take a second fit;
it takes two to four times as long.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 20_000
"""Rows that are used at most: with more labels hardly any noise is needed, and as many as these show that."""
_OF_RIDGE = 1.5
"""A perceptron needs so many times the noise that suits a linear model: it overfits more easily. Measured."""
_LEAST, _MOST, _PER_OCTAVE = 2.0**-5, 2.0**3, 4


@dataclass(frozen=True)
class LeaveOneOut:
    """Estimates by leaving out one labelled item at a time.

    Attributes:
        noise: deviation of Gaussian noise for a perceptron that learns these labels.
        accuracy: share of the items whose class a linear model of all others predicts; an item with several labels counts one over
            their number.
    """

    noise: float
    accuracy: float


def leave_one_out(x: NDArray[np.float32], y: NDArray[np.float32]) -> LeaveOneOut:
    """Estimates from ``x`` float32 [n, W] with labels ``y`` float32 [n, C], 0/1; at most :data:`MOST_ROWS` of them are used."""
    every = -(-len(x) // MOST_ROWS)
    shares = y[::every] / y[::every].sum(axis=1, keepdims=True)
    noise, predicted = least_error(x[::every], shares)
    return LeaveOneOut(
        _OF_RIDGE * noise, float(shares[np.arange(len(shares)), predicted.argmax(axis=1)].mean())
    )


def least_error(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[float, NDArray[np.float64]]:
    """The deviation σ of input noise with the least leave-one-out error of a ridge regression of ``y`` on ``x``, and its predictions.

    With the centred inputs ``X = U S Vᵀ`` and the leverages ``h_i = 1/n + Σ_j U_ij² s_j² / (s_j² + nσ²)`` item i is off by
    ``(y_i - ŷ_i) / (1 - h_i)`` (Allen's PRESS). σ is one of a fixed row of values, four to a doubling, from 1/32 to 8.

    Args:
        x: float32 [n, W], labelled items.
        y: float32 [n, C], targets.

    Returns:
        σ, and float64 [n, C], the prediction for each item from all others.
    """
    n = len(x)
    X = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    Y = y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)
    # Of XXᵀ and XᵀX the smaller one: the same left singular vectors, without an SVD of X.
    if n <= X.shape[1]:
        squares, U = np.linalg.eigh(X @ X.T)
        squares = squares.clip(0)
    else:
        squares, V = np.linalg.eigh(X.T @ X)
        squares = squares.clip(0)
        U = X @ V / np.sqrt(np.maximum(squares, np.finfo(float).tiny))
    kept = squares > squares.max() * max(X.shape) * np.finfo(float).eps
    U, squares = U[:, kept], squares[kept]
    against = U.T @ Y
    steps = int(np.log2(_MOST / _LEAST)) * _PER_OCTAVE
    best, least, off = _LEAST, np.inf, Y
    for sigma in _LEAST * 2.0 ** (np.arange(steps + 1) / _PER_OCTAVE):
        shrunk = U * (squares / (squares + n * sigma**2))
        # One item alone is its own centre: nothing is left to predict it by.
        left = np.maximum(1 - 1 / n - (shrunk * U).sum(axis=1), np.finfo(float).eps)
        missed = (Y - shrunk @ against) / left[:, None]
        error = float((missed**2).sum())
        if error < least:
            best, least, off = float(sigma), error, missed
    return best, y - off

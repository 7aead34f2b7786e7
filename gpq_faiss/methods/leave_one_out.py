"""Estimate the useful input noise and the accuracy of a model from the labels. Not in the paper.

Training a linear model on inputs with Gaussian noise of variance σ² is ridge regression with the
weight nσ² (Bishop, "Training with noise is equivalent to Tikhonov regularization", Neural
Computation 1995). Its leave-one-out error has a closed form for all σ, so a few labels suffice to
choose σ, and to estimate the accuracy on unseen items. ``sklearn.linear_model.RidgeCV`` gives the
same errors (a test compares them) in two to four times the time, and keeps the predictions for
every σ.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MOST_ROWS = 20_000
"""Maximum number of rows used: with more labels hardly any noise is needed."""
_OF_RIDGE = 1.5
"""Noise of a perceptron relative to that of a linear model, as it overfits more easily. Measured.
"""
_LEAST = 2.0**-5
"""The least noise that is tried."""
_GRID = 33
"""Number of noises that are tried, up to 8."""
_PER_OCTAVE = 4
"""Number of noises from one to its double."""


def leave_one_out(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[float, float, float]:
    """The standard deviation of Gaussian noise for a perceptron trained on these labels; the
    accuracy, the share of items whose class a linear model of all others predicts (items with n
    labels count 1/n); and the sum of its squared errors.

    From ``x`` float32 [n, W] with labels ``y`` float32 [n, C], 0/1; at most :data:`MOST_ROWS` of
    them are used.
    """
    stride = -(-len(x) // MOST_ROWS)
    shares = y[::stride] / y[::stride].sum(axis=1, keepdims=True)
    noise, predicted = least_error(x[::stride], shares)
    return (
        _OF_RIDGE * noise,
        float(shares[np.arange(len(shares)), predicted.argmax(axis=1)].mean()),
        float(((shares - predicted) ** 2).sum()),
    )


def least_error(
    x: NDArray[np.float32], y: NDArray[np.float32]
) -> tuple[float, NDArray[np.float64]]:
    """The input noise σ with the least leave-one-out error of a ridge regression of ``y`` float32
    [n, C] on ``x`` float32 [n, W], from a grid, and its prediction for each item from all others,
    float64 [n, C].

    With the centred inputs ``X = U S Vᵀ`` and the leverages ``h_i = 1/n + Σ_j U_ij² s_j² / (s_j² +
    nσ²)`` item i has the error ``(y_i - ŷ_i) / (1 - h_i)`` (Allen's PRESS).
    """
    n = len(x)
    X = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    Y = y.astype(np.float64) - y.mean(axis=0, dtype=np.float64)
    # The smaller of XXᵀ and XᵀX gives the left singular vectors without an SVD of X.
    if n <= X.shape[1]:
        squares, U = np.linalg.eigh(X @ X.T)
    else:
        squares, V = np.linalg.eigh(X.T @ X)
        U = X @ V / np.sqrt(np.maximum(squares, np.finfo(float).tiny))
    nonzero = squares > squares.max() * max(X.shape) * np.finfo(float).eps
    U, squares = U[:, nonzero], squares[nonzero]
    projections = U.T @ Y
    best, least, best_errors = _LEAST, np.inf, Y
    for sigma in _LEAST * 2.0 ** (np.arange(_GRID) / _PER_OCTAVE):
        shrunk = U * (squares / (squares + n * sigma**2))
        # A single item is its own centre: nothing is left to predict it from.
        leverage_complement = np.maximum(1 - 1 / n - (shrunk * U).sum(axis=1), np.finfo(float).eps)
        errors = (Y - shrunk @ projections) / leverage_complement[:, None]
        error = float((errors**2).sum())
        if error < least:
            best, least, best_errors = float(sigma), error, errors
    return best, y - best_errors

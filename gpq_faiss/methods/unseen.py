"""Recognise unlabelled items of classes that no label names. Not in the paper.

Where the labelled items are a random sample of all, nothing tells them from the unlabelled ones.
Where half of the unlabelled items are of other classes, a linear model does, even among items for
which it predicts the same class; that they have other shares of the classes does not matter then.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .leave_one_out import least_error

MOST_CLASSES = 32
"""With more labelled classes, class probabilities describe items of other classes, too."""
LEAST_AUC = 0.57
"""AUC from which items count as of other classes. Measured: at least 0.59 where half of them are,
at most 0.52 where none is (``benchmarks/unseen_classes.py``)."""
MOST_COMPARED = 4000
"""Labelled, and unlabelled, items that are compared."""
_LEAST_PAIRS = 300
"""With fewer items the AUC is too uncertain."""


def has_unseen_classes(
    x: NDArray[np.float32], y: NDArray[np.float32], unlabelled: NDArray[np.float32]
) -> bool:
    """Whether many unlabelled items, float32 [m, W], are of none of the labelled classes.

    The labelled items are ``x`` float32 [n, W] with labels ``y`` float32 [n, C], 0/1.
    """
    return y.shape[1] <= MOST_CLASSES and separation(x, y, unlabelled) >= LEAST_AUC


def separation(
    x: NDArray[np.float32], y: NDArray[np.float32], unlabelled: NDArray[np.float32]
) -> float:
    """Return the leave-one-out AUC of a ridge regression that separates labelled and unlabelled
    items of the same predicted classes; 0.5 if there are too few.
    """
    from sklearn.linear_model import Ridge
    from sklearn.metrics import roc_auc_score

    stride = -(-len(x) // MOST_COMPARED)
    x, y = x[::stride], y[::stride]
    shares = y / y.sum(axis=1, keepdims=True)
    noise, predicted = least_error(x, shares)
    ridge = Ridge(alpha=len(x) * noise**2).fit(x, shares)
    classes = predicted.argmax(axis=1), ridge.predict(unlabelled).reshape(-1, y.shape[1]).argmax(1)
    pairs = []
    for c in range(y.shape[1]):
        rows = [np.flatnonzero(of_side == c) for of_side in classes]
        count = min(map(len, rows))
        pairs.append([r[np.linspace(0, len(r), count, endpoint=False).astype(int)] for r in rows])
    labelled_rows, unlabelled_rows = (np.concatenate(side) for side in zip(*pairs, strict=True))
    if len(labelled_rows) < _LEAST_PAIRS:
        return 0.5
    target = np.repeat(np.array([0, 1], np.float32), len(labelled_rows))
    items = np.concatenate([x[labelled_rows], unlabelled[unlabelled_rows]])
    return float(roc_auc_score(target, least_error(items, target[:, None])[1][:, 0]))

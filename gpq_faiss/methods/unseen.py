"""Recognise unlabelled items of classes that no label names. Not in the paper.

Where the labelled items are a random sample of all, nothing tells them from the unlabelled ones.
Where half of the unlabelled items are of other classes, a linear model does, even among items for
which it predicts the same class; that they have other shares of the classes does not matter then.
A linear model also tells items of another source apart, but these are shifted alike in all classes;
items of other classes lie on different sides of the labelled ones.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from .leave_one_out import least_error

log = logging.getLogger(__name__)

MOST_CLASSES = 32
"""With more labelled classes, class probabilities describe items of other classes, too."""
LEAST_AUC = 0.57
"""AUC from which items count as of other classes. Measured: at least 0.59 where half of them are,
at most 0.52 where none is (``benchmarks/unseen_classes.py``)."""
MOST_COMPARED = 4000
"""Labelled, and unlabelled, items that are compared."""
_LEAST_PAIRS = 300
"""With fewer items the AUC is too uncertain."""
_COMMON_SHIFT = 0.8
"""Share of the shift that all classes have in common, from which items count as of another source.
In trials it was mostly more than 0.85 if a constant was added to all labelled items, and at most
0.4 for eight to ten labelled classes and others without labels, but up to 1 for five."""


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
    items of the same predicted classes; 0.5 if there are too few, or all classes are shifted alike.
    """
    from sklearn.linear_model import Ridge
    from sklearn.metrics import roc_auc_score

    stride = -(-len(x) // MOST_COMPARED)
    x, y = x[::stride], y[::stride]
    shares = y / y.sum(axis=1, keepdims=True)
    noise, predicted = least_error(x, shares)
    foreign = Ridge(alpha=len(x) * noise**2).fit(x, shares).predict(unlabelled)
    classes = predicted.argmax(axis=1), foreign.reshape(-1, y.shape[1]).argmax(axis=1)
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
    auc = float(roc_auc_score(target, least_error(items, target[:, None])[1][:, 0]))
    if auc >= LEAST_AUC and common_shift(x, unlabelled, classes) >= _COMMON_SHIFT:
        log.warning(
            "unlabelled items differ from labelled ones in all classes alike: are both of one "
            "source, and prepared in the same way?"
        )
        return 0.5
    return auc


def common_shift(
    x: NDArray[np.float32],
    unlabelled: NDArray[np.float32],
    classes: tuple[NDArray[np.int64], NDArray[np.int64]],
) -> float:
    """Return the share of the shifts of classes, from labelled to unlabelled items, that is the
    same for all: about 1 if items are of another source; 0 for fewer than eight classes, whose
    shifts may be alike by chance.

    ``classes`` are those of both sides, int64 [n] and [m]; those of fewer than ten items are left
    out. The squared norms of the shifts are reduced by their expected errors.
    """
    sides = [(x[classes[0] == c], unlabelled[classes[1] == c]) for c in np.unique(classes[0])]
    sides = [side for side in sides if min(map(len, side)) >= 10]
    if len(sides) < 8:
        return 0.0
    shifts = np.stack([b.mean(axis=0) - a.mean(axis=0) for a, b in sides])
    error = np.mean([sum(items.var(axis=0).sum() / len(items) for items in side) for side in sides])
    common = np.square(shifts.mean(axis=0)).sum() - error / len(sides)
    return float(common / max(np.square(shifts).sum(axis=1).mean() - error, 1e-12))

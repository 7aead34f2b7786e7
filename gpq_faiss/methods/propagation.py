"""Label propagation over nearest neighbours. Not in the paper.

Nearby items tend to share a class, so labels propagated from neighbour to neighbour inform about
unlabelled items beyond what a classifier of the labels alone can know. The propagation is that of
Zhou et al., "Learning with local and global consistency" (NIPS 2003), over the graph of Iscen et
al., "Label propagation for deep semi-supervised learning" (CVPR 2019), and classes are normalised
to their shares of the labels (Zhu et al., "Semi-supervised learning using Gaussian fields and
harmonic functions", ICML 2003). It is worth its time if labels are few, and if neighbours tell the
class: this is measured on labels that are left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..progress import stage
from .coders import Floats, Rows

log = logging.getLogger(__name__)

LEAST_WEIGHT = 0.15
"""Minimum weight of pseudo-labels relative to labels; below, the neighbour search is not worth its
time."""
LEAST_SHARE = 0.85
"""Minimum accuracy of the neighbours on left-out labels, as a share of a linear model's."""
SAMPLE = 20_000
"""Unlabelled items of a sample that is tried first, where there are more than twice as many."""
LEAST_SHARE_OF_SAMPLE = 0.5
"""Minimum accuracy in the sample: lower than among all items, as fewer neighbours connect the
labels."""
MOST_ITEMS = 100_000
"""Maximum number of items in the neighbour search."""
_MOST_PROBABILITIES = 20_000_000
"""Maximum number of items times classes there (a few arrays of 160 MB)."""
_CHOICE = 5
"""Stream of random numbers, besides those of :mod:`gpq_faiss.training.batches`."""
NEIGHBOURS = 15
"""k of Iscen et al.'s graph."""
GAMMA = 4
"""γ of Iscen et al., the power of the cosine in the weight of a neighbour."""
ALPHA = 0.95
"""α of Zhou et al., the weight of the neighbours against an item's own label."""
ITERATIONS = 50
"""Maximum length of a path in the graph; longer ones would have a total weight of 0.08."""
POWER = 2.0
"""Power of the propagated probabilities, which are too even."""
_LIST = 125
"""Neighbours are searched in inverted lists of about so many items."""
_VISITED = 12
"""Number of lists that are visited: of 58,000 items (CIFAR-10 features) nine of ten neighbours are
found in a third of the time, up to 1,500 items all."""
_FOLDS = 5
"""A fifth of the labels is left out at a time."""
_LEFT_OUT = 400
"""Labels are left out until there have been about so many."""


@dataclass(frozen=True)
class PseudoLabels:
    """Class probabilities of items by propagation.

    Attributes:
        rows: int64 [n], ascending; the labelled items are among them.
        p: float32 [n, C], rows that sum to 1, or zeros for items not connected to a labelled one.
        weight: of their loss, relative to that of the labels.
    """

    rows: Rows
    p: Floats
    weight: float

    def take(self, rows: Rows) -> Floats:
        """Pseudo-labels of the items ``rows``, float32 [m, C]; zeros for unknown ones."""
        positions = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        return np.asarray(self.p[positions] * (self.rows[positions] == rows)[:, None])


def propagate_labels(
    vectors: Callable[[Rows], tuple[Floats, NDArray[np.bool_]]],
    labelled: Rows,
    y: Floats,
    unlabelled: Rows,
    *,
    labels_per_class: float,
    accuracy: float,
    seed: int,
) -> PseudoLabels | None:
    """Propagate labels to unlabelled items, or to as many as can be compared, chosen at random.

    The result is None if that is not worthwhile: labels are many, unlabelled items are few, or
    neighbours predict left-out labels badly (this is logged).

    Args:
        vectors: rows -> float32 [n, width], centred, of the readable ones, and which these are.
        labelled, unlabelled: int64 ascending, the labelled and the unlabelled items.
        y: float32 [L, C], 0/1, labels of the first, at least one each.
        labels_per_class: the weight of pseudo-labels is that of so many labels per class.
        accuracy: of a linear model on unseen items.
        seed: of the choice.
    """
    weight = labels_per_class * y.shape[1] / len(labelled)
    room = min(MOST_ITEMS, _MOST_PROBABILITIES // y.shape[1]) - len(labelled)
    if weight < LEAST_WEIGHT or room < min(len(unlabelled), len(labelled)):
        return None
    pool = np.random.default_rng([seed, _CHOICE]).permutation(unlabelled)[:room]
    rounds = [(len(pool), LEAST_SHARE)]
    if len(pool) > 2 * SAMPLE:
        rounds = [(SAMPLE, LEAST_SHARE_OF_SAMPLE), *rounds]
    for size, least_share in rounds:
        rows = np.union1d(labelled, pool[:size])
        x, readable = vectors(rows)
        rows = rows[readable]
        usable = np.isin(labelled, rows)
        graph = neighbour_graph(x)
        positions = np.searchsorted(rows, labelled[usable])
        share = left_out_accuracy(graph, positions, y[usable], seed)
        if share < least_share * accuracy:
            log.info(
                "labels are not propagated: neighbours predict only %.0f %% of left-out labels",
                100 * share,
            )
            return None
    p = propagate(graph, positions, y[usable])
    log.info(
        "labels propagated to %d items, weight %.2f", p.any(axis=1).sum() - len(positions), weight
    )
    return PseudoLabels(rows, p, weight)


def propagate(graph: Any, labelled: Rows, y: Floats) -> Floats:
    """Class probabilities float32 [n, C], rows that sum to 1, or zeros for items not connected to
    any of the items ``labelled``, int64 [L], with labels ``y`` float32 [L, C], 0/1.

    ``F ← a W F + (1 - a) Y`` is iterated, where W is the graph [n, n] and rows of Y are labels that
    sum to 1, or zeros. Then classes are scaled to their shares of the labels (which should be of a
    random sample), and probabilities are raised to :data:`POWER`.
    """
    start = np.zeros((graph.shape[0], y.shape[1]), np.float32)
    start[labelled] = y / y.sum(axis=1, keepdims=True)
    scores = start
    for _ in range(ITERATIONS):
        scores = ALPHA * (graph @ scores) + (1 - ALPHA) * start
    mass = scores.sum(axis=0)
    scores = scores * np.divide(start.sum(axis=0), mass, out=np.zeros_like(mass), where=mass > 0)
    # Divide rows by their maximum first, or the power would underflow.
    greatest = scores.max(axis=1, keepdims=True)
    p: Floats = np.divide(scores, greatest, out=np.zeros_like(scores), where=greatest > 0) ** POWER
    p /= np.maximum(p.sum(axis=1, keepdims=True), 1)
    return p


def left_out_accuracy(graph: Any, labelled: Rows, y: Floats, seed: int) -> float:
    """Share of left-out labels that propagation from the others predicts; items with n labels count
    1/n."""
    order = np.random.default_rng([seed, _CHOICE]).permutation(len(labelled))
    right, total = 0.0, 0
    for fold in np.array_split(order, min(_FOLDS, len(order))):
        remaining = np.setdiff1d(order, fold)
        # Nothing predicts a class that has no other label.
        asked = fold[y[fold] @ y[remaining].any(axis=0) > 0]
        p = propagate(graph, labelled[remaining], y[remaining])[labelled[asked]]
        hits = y[asked, p.argmax(axis=1)] / y[asked].sum(axis=1)
        right, total = right + float(hits.sum()), total + len(asked)
        if total >= _LEFT_OUT:
            break
    return right / max(total, 1)


def neighbour_graph(x: Floats, k: int = NEIGHBOURS) -> Any:
    """The graph ``D^-½ (A + Aᵀ) D^-½`` float32 [n, n] of ``x`` float32 [n, W], with ``A_ij =
    max(cos(x_i, x_j), 0)^4`` for the k items j nearest to i by cosine, of many items nearly so
    (:data:`_LIST`)."""
    import scipy.sparse  # a tenth of a second, which encoding does without

    n = len(x)
    unit = np.ascontiguousarray(
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    )
    index = faiss.IndexIVFFlat(
        faiss.IndexFlatIP(x.shape[1]), x.shape[1], max(1, n // _LIST), faiss.METRIC_INNER_PRODUCT
    )
    index.cp.min_points_per_centroid, index.cp.max_points_per_centroid = 1, 64
    index.train(unit)
    index.add(unit)
    index.nprobe = _VISITED
    with stage("neighbours"):
        cosines, ids = index.search(unit, min(k + 1, n))
    # An item is usually its own nearest neighbour, but duplicates may come first.
    valid = (ids != np.arange(n)[:, None]) & (ids >= 0)
    valid &= valid.cumsum(axis=1) <= k
    weights = (np.maximum(cosines, 0) ** GAMMA)[valid]
    directed = scipy.sparse.csr_array((weights, (np.nonzero(valid)[0], ids[valid])), shape=(n, n))
    symmetric = (directed + directed.T).tocsr()
    degree = symmetric.sum(axis=1)
    scale = np.divide(1, np.sqrt(degree), out=np.zeros(n, np.float32), where=degree > 0)
    symmetric.data *= (
        scale[np.repeat(np.arange(n), np.diff(symmetric.indptr))] * scale[symmetric.indices]
    )
    return symmetric

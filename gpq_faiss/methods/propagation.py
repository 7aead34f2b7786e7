"""Label propagation over nearest neighbours. Not in the paper.

Nearby items tend to share a class, so labels propagated from neighbour to neighbour inform about unlabelled items beyond what a
classifier of the labels alone can know. The propagation is that of Zhou et al., "Learning with local and global
consistency" (NIPS 2003), over the graph of Iscen et al., "Label propagation for deep semi-supervised learning" (CVPR 2019), and classes are
normalised to their shares of the labels (Zhu et al., "Semi-supervised learning using Gaussian fields and harmonic functions", ICML
2003). Confidences are calibrated by leave-one-out, in closed form.
"""

from __future__ import annotations

import logging
import math

import faiss
import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from ..progress import stage

log = logging.getLogger(__name__)

LEAST_WEIGHT = 0.15
"""Minimum weight of pseudo-labels relative to labels; below, the neighbour search is not worth its time."""
MOST_ITEMS = 100_000
"""Maximum number of items in the neighbour search, which compares all pairs."""
_MOST_PRODUCTS = MOST_ITEMS**2 * 256
"""Maximum multiplications of the search: about a minute on one core."""
_MOST_PROBABILITIES = 20_000_000
"""Maximum items times classes: a few arrays of 160 MB; with 1,000 classes the time doubles."""
_CHOICE = 5
"""Stream of random numbers, beside those of :mod:`gpq_faiss.training.batches`."""
NEIGHBOURS = 15
"""k of Iscen et al.'s graph."""
ALPHA = 0.95
"""α of Zhou et al.: weight of the neighbours, against an item's own label."""
_ROWS = 4096
"""Items per block of the neighbour search."""
GAMMA = 4
"""γ of Iscen et al.: power of the cosine in the weight of a neighbour."""
ITERATIONS = 50
"""Iterations of Zhou et al.; longer paths would have a total weight of 0.08."""
_REACHED = 1e-10
"""Minimum share of an item's mass from its neighbours for their prediction to count."""
_LEFT_OUT = 400
"""Maximum number of labels to leave out."""
_AT_ONCE = 50
"""Labels left out per block, in arrays of 40 MB."""
_POWER, _SPREAD = 2.0, 0.14
"""Prior of the power that calibrates probabilities: its median, and the deviation of its logarithm. With a hundred labels the likelihood
alone determines the power to about a fifth."""
_MOST_POWER = 20.0
_POWERS = 300
_WRONG = 0.01
"""Assumed share of wrong labels, so that a single one cannot outweigh all others."""


def most_items(width: int, classes: int) -> int:
    """Maximum number of items of ``width`` dimensions for :func:`propagate`."""
    return min(MOST_ITEMS, int((_MOST_PRODUCTS / width) ** 0.5), _MOST_PROBABILITIES // classes)


def items_to_compare(
    labelled: NDArray[np.int64],
    others: NDArray[np.int64],
    weight: float,
    *,
    width: int,
    classes: int,
    seed: int,
) -> NDArray[np.int64] | None:
    """Choose the items for :func:`propagate`, so that its time is worth the weight of the pseudo-labels.

    The time is quadratic in the number of items and is kept proportional to the weight: the maximum number of items for weight 1 and
    above, half as many for 1/4. Unlabelled items are chosen at random.

    Args:
        labelled, others: int64, the labelled and the unlabelled items, each once.
        weight: of pseudo-labels in training, relative to labels.
        width, classes: as for :func:`most_items`.
        seed: of the choice.

    Returns:
        int64, ascending, including all of ``labelled``; None if propagation is not worthwhile or not possible (logged).
    """
    if not len(others) or weight <= 0:
        return None
    if weight < LEAST_WEIGHT:
        log.info(
            "labels are not propagated: with this many labels, pseudo-labels would have a weight of only %.2f",
            weight,
        )
        return None
    room = most_items(width, classes) - len(labelled)
    if room < min(len(others), len(labelled)):
        log.warning("labels are not propagated: %d labelled items are too many to compare", len(labelled))
        return None
    room = min(room, math.ceil(MOST_ITEMS * min(weight, 1) ** 0.5))
    if room < len(others):
        log.info("%d of %d unlabelled items take part in label propagation", room, len(others))
        others = np.random.default_rng([seed, _CHOICE]).permutation(others)[:room]
    return np.union1d(labelled, others)


def propagate(
    x: NDArray[np.float32], labelled: NDArray[np.int64], y: NDArray[np.float32]
) -> tuple[NDArray[np.float64], float]:
    """Class probabilities of items from the labels of some of them, and the leave-one-out accuracy.

    With the graph W of :func:`neighbour_graph`, ``F ← a W F + (1 - a) Y`` is iterated a fixed number of times, where rows of Y are
    labels that sum to 1, or zeros for unlabelled items. Then classes are scaled to their shares of the labels (labelled items should
    therefore be a random sample), rows are scaled to sum to 1, and probabilities are raised to the power of :func:`likeliest_power`.

    The power is chosen on labelled items as if they were unlabelled. The result is linear in the labels, F = K Y with a symmetric K, so
    without the label of item i it would be ``F_i - K_ii Y_i`` at that item, and the class sums would be smaller by ``(K 1)_i Y_i``.

    Args:
        x: float32 [n, W], centred.
        labelled: int64 [L], rows of the labelled items, unique.
        y: float32 [L, C], 0/1, at least one 1 per row.

    Returns:
        float64 [n, C], rows that sum to 1, or zeros for items not connected to a labelled one. And the leave-one-out accuracy on
        the labels; 0 if no class has two labels.
    """
    n, classes = len(x), y.shape[1]
    shares = y / y.sum(axis=1, keepdims=True, dtype=np.float64)
    start = np.ones((n, classes + 1))
    start[:, :classes] = 0
    start[labelled, :classes] = shares
    graph = neighbour_graph(x)
    found = start.copy()
    with stage("propagating labels", ITERATIONS, "iteration") as iterating:
        for _ in range(ITERATIONS):
            found = ALPHA * (graph @ found) + (1 - ALPHA) * start
            iterating.advance()
    found, reach = found[:, :classes], found[labelled, classes, None]
    given, mass = shares.sum(axis=0), found.sum(axis=0)

    step = -(-len(labelled) // _LEFT_OUT)
    # Random, so that it is not in step with labels whose classes alternate.
    while math.gcd(step, classes) > 1:
        step += 1
    some = np.arange(0, len(labelled), step)
    own, whole = shares[some], found[labelled[some]]
    left = whole - _self_weights(graph, labelled[some])[:, None] * own
    # If almost nothing else reaches an item, the difference is rounding error.
    largest = whole.max(axis=1, keepdims=True)
    left[(own > 0) & (left < 1e-12 * largest)] = 0
    left[(left < _REACHED * largest).all(axis=1)] = 0
    left = _normalised(left, given - own, mass - reach[some] * own)
    # An item whose class has no other label is always predicted wrong.
    known = ((given - own > 1e-9) & (own > 0)).any(axis=1)
    right = own[known, :][np.arange(int(known.sum())), left[known].argmax(axis=1)]
    pseudo_labels = raised(_normalised(found, given, mass), likeliest_power(left[known], own[known]))
    return pseudo_labels, float(right.mean()) if known.any() else 0.0


def likeliest_power(p: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The power, at least 1, with which probabilities ``p`` [n, C] best predict labels ``y`` [n, C] (rows sum to 1).

    It maximises the log-likelihood (with a share of wrong labels) plus a log-normal prior, which dominates with few labels. (Guo et
    al., "On calibration of modern neural networks", ICML 2017, without a prior.) By grid search: there may be several maxima.
    """
    powers = np.exp(np.linspace(0, np.log(_MOST_POWER), _POWERS))
    likelihoods = [
        float((y * np.log((1 - _WRONG) * raised(p, power) + _WRONG / p.shape[1])).sum()) for power in powers
    ]
    prior = -((np.log(powers / _POWER) / _SPREAD) ** 2) / 2
    return float(powers[np.argmax(likelihoods + prior)])


def raised(p: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Probabilities [n, C] raised to a power and normalised; zero rows stay zero."""
    # Divide rows by their maximum first, or high powers would underflow.
    greatest = p.max(axis=1, keepdims=True, initial=0)
    out: NDArray[np.float64] = np.divide(p, greatest, out=np.zeros_like(p), where=greatest > 0) ** power
    out /= np.maximum(out.sum(axis=1, keepdims=True), 1)
    return out


def _normalised(
    found: NDArray[np.float64], given: NDArray[np.float64], mass: NDArray[np.float64]
) -> NDArray[np.float64]:
    """``found`` [n, C] with classes of total ``mass`` [C] or [n, C] scaled to the ``given`` masses; rows then sum to 1 or are zero."""
    out = found * np.divide(given, mass, out=np.zeros_like(mass), where=mass > 0)
    total = out.sum(axis=1, keepdims=True)
    normalised: NDArray[np.float64] = np.divide(out, total, out=np.zeros_like(out), where=total > 0)
    return normalised


def _self_weights(graph: scipy.sparse.csr_array, at: NDArray[np.int64]) -> NDArray[np.float64]:
    """``K_ii`` [len(at)] of the items ``at``: ``Σ_t (1 - a) aᵗ (Wᵗ)_ii`` and the last term, where W is symmetric, so that
    ``(W²ᵗ)_ii = |Wᵗ e_i|²`` takes half the products."""
    parts = np.empty(len(at))
    with stage("leaving labels out", len(at), "label") as leaving:
        for begin in range(0, len(at), _AT_ONCE):
            rows = at[begin : begin + _AT_ONCE]
            here = np.zeros((graph.shape[0], len(rows)))
            here[rows, np.arange(len(rows))] = 1
            total = np.zeros(len(rows))
            for t in range(ITERATIONS // 2 + 1):
                total += _weight(2 * t) * (here * here).sum(axis=0)
                if 2 * t < ITERATIONS:
                    there = graph @ here
                    total += _weight(2 * t + 1) * (here * there).sum(axis=0)
                    here = there
            parts[begin : begin + _AT_ONCE] = total
            leaving.advance(len(rows))
    return parts


def _weight(steps: int) -> float:
    """Weight of paths of this many steps, after all iterations."""
    return ALPHA**steps * (1 if steps == ITERATIONS else 1 - ALPHA)


def neighbour_graph(x: NDArray[np.float32], k: int = NEIGHBOURS) -> scipy.sparse.csr_array:
    """The graph ``D^-½ (A + Aᵀ) D^-½`` [n, n] of ``x`` float32 [n, W], with ``A_ij = max(cos(x_i, x_j), 0)^4`` for the k items j
    nearest to i by cosine."""
    n = len(x)
    unit = np.ascontiguousarray(
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    )
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(unit)
    cosines = np.empty((n, min(k + 1, n)), np.float32)
    ids = np.empty(cosines.shape, np.int64)
    with stage("neighbours", n) as looking:
        for start in range(0, n, _ROWS):
            block = slice(start, min(start + _ROWS, n))
            cosines[block], ids[block] = index.search(unit[block], cosines.shape[1])
            looking.done = block.stop
    # An item is usually its own nearest neighbour, but duplicates may come first.
    kept = ids != np.arange(n)[:, None]
    kept &= kept.cumsum(axis=1) <= k
    weights = (np.maximum(cosines, 0).astype(np.float64) ** GAMMA)[kept]
    one = scipy.sparse.csr_array((weights, (np.nonzero(kept)[0], ids[kept])), shape=(n, n))
    both = (one + one.T).tocsr()
    degree = both.sum(axis=1)
    scale = np.divide(1, np.sqrt(degree), out=np.zeros(n), where=degree > 0)
    both.data *= scale[np.repeat(np.arange(n), np.diff(both.indptr))] * scale[both.indices]
    return both

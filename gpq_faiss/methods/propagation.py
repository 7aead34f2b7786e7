"""Label propagation over nearest neighbours. Not in the paper.

Items that lie close together tend to be of one class, so that a few labels, propagated from neighbour to neighbour, carry information on
all other items that a classifier of those labels alone cannot have. The propagation is that of Zhou et al., "Learning with local and global
consistency" (NIPS 2003), over the graph of Iscen et al., "Label propagation for deep semi-supervised learning" (CVPR 2019), and classes are
normalised to their shares among the labels (Zhu et al., "Semi-supervised learning using Gaussian fields and harmonic functions", ICML
2003). The confidence of the outcome is calibrated by leaving out one label at a time, in closed form.
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
"""Of pseudo-labels, against the labels themselves. With less, the search for neighbours does not pay."""
MOST_ITEMS = 100_000
"""Items among which neighbours are searched at most: every one is compared with every other."""
_MOST_PRODUCTS = MOST_ITEMS**2 * 256
"""Multiplications in doing so: about a minute of one core."""
_MOST_PROBABILITIES = 20_000_000
"""Items times classes: some arrays of 160 MB, and as much time again with 1,000 classes."""
_CHOICE = 5
"""Stream of random numbers, beside those of :mod:`gpq_faiss.training.batches`."""
NEIGHBOURS = 15
"""k of Iscen et al.'s graph."""
ALPHA = 0.95
"""α of Zhou et al.: weight of the neighbours, against an item's own label."""
_ROWS = 4096
"""Whose neighbours are searched at a time."""
GAMMA = 4
"""γ of Iscen et al.: power of the cosine in the weight of a neighbour."""
ITERATIONS = 50
"""Of Zhou et al.'s iteration. Longer paths than that would weigh 0.08 in all."""
_REACHED = 1e-10
"""Least share of an item's mass that must come from its neighbours for their prediction to count."""
_LEFT_OUT = 400
"""Labels that are left out at most."""
_AT_ONCE = 50
"""Of these, in arrays of 40 MB."""
_POWER, _SPREAD = 2.0, 0.14
"""Prior of the power that calibrates probabilities: its median, and the deviation of its logarithm. With a hundred labels the likelihood
alone determines the power to about a fifth."""
_MOST_POWER = 20.0
_POWERS = 300
_WRONG = 0.01
"""Share of labels that are taken to be wrong, or a single one could outweigh all others."""


def most_items(width: int, classes: int) -> int:
    """Items of ``width`` dimensions that :func:`propagate` is to be given at most."""
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
    """Which items to give :func:`propagate`: their pseudo-labels must be worth the time that it takes.

    That time grows with the square of the items, so as many unlabelled ones are taken as make it grow with the weight: all that
    there may be from weight 1 on, half as many with 1/4. They are chosen by the seed.

    Args:
        labelled, others: int64, the labelled and the unlabelled items, each once.
        weight: of pseudo-labels in the training, against that of the labels.
        width, classes: as of :func:`most_items`.
        seed: of the choice.

    Returns:
        int64, ascending, all of ``labelled`` among them; None: it does not pay, or is not possible; the log says why.
    """
    if not len(others) or weight <= 0:
        return None
    if weight < LEAST_WEIGHT:
        log.info(
            "labels are not propagated: with so many labels, pseudo-labels would have a weight of only %.2f",
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
    """Class probabilities of items from the labels of some of them, and how often they predict a label that is left out.

    With the graph W of :func:`neighbour_graph`, ``F ← a W F + (1 - a) Y`` is done a fixed number of times, where Y holds an item's
    labels, sharing 1 between them, and nothing for items without. Then every class is weighed so that its part of the whole is that
    among the labels, which should therefore be of items drawn as the others are, items to sum to 1, and all is raised to the power of
    :func:`likeliest_power`.

    The power is chosen on labelled items as if they had no label. The outcome is linear in the labels, F = K Y with a symmetric K, so
    without the label of item i it would be ``F_i - K_ii Y_i`` at that item, and the sums of the classes less by ``(K 1)_i Y_i``.

    Args:
        x: float32 [n, W], centred.
        labelled: int64 [L], which of them have labels, each once.
        y: float32 [L, C], 0/1, in each row at least one 1.

    Returns:
        float64 [n, C], rows that sum to 1; zeros for items that no labelled one can be reached from. And the share of the labels, left
        out one at a time, that the others predict; 0 if no class has two labels.
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
    # Not in step with labels whose classes alternate.
    while math.gcd(step, classes) > 1:
        step += 1
    some = np.arange(0, len(labelled), step)
    own, whole = shares[some], found[labelled[some]]
    left = whole - _self_weights(graph, labelled[some])[:, None] * own
    # Where next to nothing else reaches an item, the difference is what rounding leaves.
    largest = whole.max(axis=1, keepdims=True)
    left[(own > 0) & (left < 1e-12 * largest)] = 0
    left[(left < _REACHED * largest).all(axis=1)] = 0
    left = _normalised(left, given - own, mass - reach[some] * own)
    # An item whose class has no other label can only be wrong.
    known = ((given - own > 1e-9) & (own > 0)).any(axis=1)
    right = own[known, :][np.arange(int(known.sum())), left[known].argmax(axis=1)]
    pseudo_labels = raised(_normalised(found, given, mass), likeliest_power(left[known], own[known]))
    return pseudo_labels, float(right.mean()) if known.any() else 0.0


def likeliest_power(p: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The power, 1 at least, by which the probabilities ``p`` [n, C] predict labels ``y`` [n, C], rows that sum to 1, best: with the
    greatest sum of their log-likelihood, some labels taken to be wrong, and of the prior's, a normal distribution of the power's
    logarithm. The prior dominates with few labels and the likelihood with many. (Guo et al., "On calibration of modern neural networks",
    ICML 2017, without a prior.) A grid, since the likelihood may have several maxima.
    """
    powers = np.exp(np.linspace(0, np.log(_MOST_POWER), _POWERS))
    likelihoods = [
        float((y * np.log((1 - _WRONG) * raised(p, power) + _WRONG / p.shape[1])).sum()) for power in powers
    ]
    prior = -((np.log(powers / _POWER) / _SPREAD) ** 2) / 2
    return float(powers[np.argmax(likelihoods + prior)])


def raised(p: NDArray[np.float64], power: float) -> NDArray[np.float64]:
    """Probabilities [n, C] to a power, made to sum to 1 again; rows of zeros stay so."""
    # Each row by its greatest first, or high powers would underflow.
    greatest = p.max(axis=1, keepdims=True, initial=0)
    out: NDArray[np.float64] = np.divide(p, greatest, out=np.zeros_like(p), where=greatest > 0) ** power
    out /= np.maximum(out.sum(axis=1, keepdims=True), 1)
    return out


def _normalised(
    found: NDArray[np.float64], given: NDArray[np.float64], mass: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Rows of ``found`` [n, C] whose classes, of ``mass`` [C] or [n, C] in all, are scaled to the ``given`` masses; rows then sum to 1,
    or are zeros."""
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
    """Of what came over paths of so many steps, after all iterations."""
    return ALPHA**steps * (1 if steps == ITERATIONS else 1 - ALPHA)


def neighbour_graph(x: NDArray[np.float32], k: int = NEIGHBOURS) -> scipy.sparse.csr_array:
    """The graph ``D^-½ (A + Aᵀ) D^-½`` [n, n] of ``x`` float32 [n, W], with ``A_ij = max(cos(x_i, x_j), 0)^4`` for the k items j that are
    nearest to i by the cosine."""
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
    # An item is mostly its own nearest, but equal items may come before it.
    kept = ids != np.arange(n)[:, None]
    kept &= kept.cumsum(axis=1) <= k
    weights = (np.maximum(cosines, 0).astype(np.float64) ** GAMMA)[kept]
    one = scipy.sparse.csr_array((weights, (np.nonzero(kept)[0], ids[kept])), shape=(n, n))
    both = (one + one.T).tocsr()
    degree = both.sum(axis=1)
    scale = np.divide(1, np.sqrt(degree), out=np.zeros(n), where=degree > 0)
    both.data *= scale[np.repeat(np.arange(n), np.diff(both.indptr))] * scale[both.indices]
    return both

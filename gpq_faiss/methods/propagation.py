"""What a few labels say of the items around them: labels propagated over nearest neighbours. Not in the paper.

Items that lie close together tend to be of one class, and a few labels, handed on from neighbour to neighbour, say of all other items
what a classifier of those labels alone cannot know. The propagation is that of Zhou et al., "Learning with local and global
consistency" (NIPS 2003), over the graph of Iscen et al., "Label propagation for deep semi-supervised learning" (CVPR 2019), and classes are
weighed to the shares that they have among the labels (Zhu et al., "Semi-supervised learning using Gaussian fields and harmonic
functions", ICML 2003).
"""

from __future__ import annotations

import faiss
import numpy as np
import scipy.sparse
from numpy.typing import NDArray

MOST_ITEMS = 100_000
"""Items between which neighbours are looked for: every one is compared with every other."""
_MOST_PRODUCTS = MOST_ITEMS**2 * 256
"""Of two numbers, in doing so: about a minute of one core."""
_MOST_PROBABILITIES = 20_000_000
"""Items times classes: some arrays of 160 MB, and as much time again with 1,000 classes."""
NEIGHBOURS = 15
_KEPT = 0.95
"""Share of what an item is told by its neighbours, against its own label."""
_SHARPNESS = 4
"""Power of the cosine by which a neighbour counts."""
_TURNS = 50
"""Times that everything is handed on by one neighbour. What comes from further away would weigh 0.08 in all."""
_MOST_POWER = 50.0
_HALVINGS = 40


def most_items(width: int, classes: int) -> int:
    """Items of ``width`` dimensions that :func:`propagate` is to be given at most."""
    return min(MOST_ITEMS, int((_MOST_PRODUCTS / width) ** 0.5), _MOST_PROBABILITIES // classes)


def propagate(
    x: NDArray[np.float32], labelled: NDArray[np.int64], y: NDArray[np.float32]
) -> NDArray[np.float64]:
    """Class probabilities of items by the labels of some of them.

    With the graph W of :func:`neighbour_graph`, ``F ← a W F + (1 - a) Y`` is done a fixed number of times, where Y holds an item's
    labels, sharing 1 between them, and nothing for items without. Then every class is weighed so that its part of the whole is that
    among the labels, which should therefore be of items drawn as the others are, and items to sum to 1.

    Args:
        x: float32 [n, W], centred.
        labelled: int64 [L], which of them have labels.
        y: float32 [L, C], 0/1, in each row at least one 1.

    Returns:
        float64 [n, C], rows that sum to 1; zeros for items that no labelled one can be reached from.
    """
    Y = np.zeros((len(x), y.shape[1]))
    Y[labelled] = y / y.sum(axis=1, keepdims=True)
    graph = neighbour_graph(x)
    found = Y.copy()
    for _ in range(_TURNS):
        found = _KEPT * (graph @ found) + (1 - _KEPT) * Y
    mass = found.sum(axis=0)
    found *= np.divide(Y.sum(axis=0), mass, out=np.zeros_like(mass), where=mass > 0)
    total = found.sum(axis=1, keepdims=True)
    shares: NDArray[np.float64] = np.divide(found, total, out=np.zeros_like(found), where=total > 0)
    return shares


def neighbour_graph(x: NDArray[np.float32], k: int = NEIGHBOURS) -> scipy.sparse.csr_array:
    """The graph ``D^-½ (A + Aᵀ) D^-½`` [n, n] of ``x`` float32 [n, W], with ``A_ij = max(cos(x_i, x_j), 0)^4`` for the k items j that are
    nearest to i by the cosine."""
    n = len(x)
    unit = np.ascontiguousarray(
        x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.finfo(np.float32).tiny)
    )
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(unit)
    cosines, ids = index.search(unit, min(k + 1, n))
    # An item is mostly its own nearest, but equal items may come before it.
    kept = ids != np.arange(n)[:, None]
    kept &= kept.cumsum(axis=1) <= k
    weights = (np.maximum(cosines, 0).astype(np.float64) ** _SHARPNESS)[kept]
    one = scipy.sparse.csr_array((weights, (np.nonzero(kept)[0], ids[kept])), shape=(n, n))
    both = (one + one.T).tocsr()
    degree = both.sum(axis=1)
    scale = np.divide(1, np.sqrt(degree), out=np.zeros(n), where=degree > 0)
    both.data *= scale[np.repeat(np.arange(n), np.diff(both.indptr))] * scale[both.indices]
    return both


def sharpened(p: NDArray[np.float64], accuracy: float) -> NDArray[np.float64]:
    """Class probabilities [n, C] raised to the power, 1 at least, by which the greatest of a row is ``accuracy`` on average; rows of zeros
    stay so, and where no power is enough it is the greatest that is tried."""
    reached = p.any(axis=1)
    if not reached.any():
        return p
    # Each row by its greatest first, or high powers would leave nothing of it.
    relative = p[reached] / p[reached].max(axis=1, keepdims=True)

    def raised(power: float) -> NDArray[np.float64]:
        even: NDArray[np.float64] = relative**power
        even /= even.sum(axis=1, keepdims=True)
        return even

    low, high = 1.0, _MOST_POWER
    if raised(low).max(axis=1).mean() < accuracy:
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if raised(middle).max(axis=1).mean() < accuracy else (low, middle)
    out = np.zeros_like(p)
    out[reached] = raised(low)
    return out

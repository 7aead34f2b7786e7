"""Neighbour recall: does a ranking find the nearest items of a query, or just items of its class?

Class mAP alone rewards codes that keep only the class: a code of the predicted class number has a
high mAP and gives all queries of a class the same results (Sablayrolles, Douze, Usunier, Jégou,
"How should we evaluate supervised hashing?", ICASSP 2017). So rankings are also measured against
the inputs: ``NN10@100`` is the share of the ten nearest items of a query, by exact cosine of the
inputs, that are among its first 100 results. If rank 100 is inside a group of n items with equal
score, after a items, each of the n is among the first 100 with probability (100 - a) / n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .ranking import rank_codes
from .scorers import Bytes, ScoreFunction, Tables
from .ties import Doubles, Ints

MAX_QUERIES = 400
"""Maximum number of queries to measure."""
NEAREST = 10
"""Number of nearest items of each query."""

_RESOLUTION = 1 << 30  # number of steps of a cosine between 0 and 1
_LOW = np.int64((1 << 32) - 1)  # the lower 32 bits
_MISSING = np.iinfo(np.int64).min  # less than the key of cosine -1


@dataclass(frozen=True)
class NeighbourRecall:
    """Neighbour recall of a ranking.

    Attributes:
        nn10_at_100: mean share of the ten nearest items that are among the first 100 results.
        queries: number of measured queries.
        definition: what is measured, in a sentence.
    """

    nn10_at_100: float
    queries: int
    definition: str


def spaced_queries(total: int) -> Ints:
    """Return the rows of at most 400 of ``total`` queries, evenly spaced, int64 ascending."""
    return np.unique(np.linspace(0, total - 1, min(MAX_QUERIES, total)).astype(np.int64))


def nearest(
    xq: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], n: int = NEAREST
) -> Ints:
    """Return the n items with the largest cosine to each query, nearest first.

    Cosines are rounded to 2^-30, a hundredth of the precision of float32 inputs, and ties go by
    row, so that neither block sizes nor the order of BLAS sums matter. Zero vectors have cosine 0.

    Args:
        xq: float32 [q, W], inputs of the queries.
        blocks: inputs of the database in order, float32 [b, W] each, of which one is in memory.
        n: number of neighbours.

    Returns:
        Database rows, int64 [q, n], padded with -1.
    """
    unit_queries = _unit(xq)
    best = np.full((len(xq), n), _MISSING)
    start = 0
    for x in blocks:
        # The cosine is in the high bits and the row in the low bits, so that larger keys are nearer
        # items, or earlier ones among equals.
        keys = np.rint((unit_queries @ _unit(x).T) * _RESOLUTION).astype(np.int64) << 32
        keys += _LOW - np.arange(start, start + len(x))
        joined = np.concatenate([best, keys], axis=1)
        joined.partition(joined.shape[1] - n, axis=1)
        best = np.sort(joined[:, -n:], axis=1)[:, ::-1]
        start += len(x)
    return np.where(best == _MISSING, -1, _LOW - (best & _LOW))


def _unit(x: NDArray[np.float32]) -> Doubles:
    """Return the rows of x in float64, scaled to length 1."""
    norms = np.linalg.norm(x.astype(np.float64), axis=1, keepdims=True)
    return x / np.where(norms == 0, 1, norms)


def neighbour_recall(
    scorer: Tables | ScoreFunction, codes: Bytes, neighbours: Ints, *, n_queries: int, k: int = 100
) -> NeighbourRecall:
    """Return the share of the neighbours by input that a ranking has among its first k results.

    Args:
        scorer, codes: as for :func:`.ranking.rank_codes`, of all queries.
        neighbours: from :func:`nearest`, of the :func:`spaced_queries`.
        n_queries: Q, the number of all queries.
        k: number of results.

    Raises:
        DataError: scores that are not finite.
        UsageError: codes of another width than the tables.
    """
    queries = spaced_queries(n_queries)
    selected = (lambda q, c: scorer(queries[q], c)) if callable(scorer) else scorer[queries]
    # Each query has a label that only its neighbours share, so that the figure is a recall.
    query_labels = np.packbits(np.eye(len(queries), dtype=bool), axis=1)
    labels = np.zeros((len(codes), query_labels.shape[1]), np.uint8)
    for label, items in zip(query_labels, neighbours, strict=True):
        labels[items[items >= 0]] |= label
    recall = rank_codes(selected, codes, query_labels, labels, ks=[k]).recall[k]
    return NeighbourRecall(
        recall,
        len(queries),
        f"NN{NEAREST}@{k}: share of a query's {NEAREST} nearest items by exact cosine of the "
        f"inputs that are among its first {k} results, expected value over random order within "
        f"ties, mean over {len(queries):,} of {n_queries:,} queries, evenly spaced",
    )

"""Likeness: does a ranking find the items most similar to the query, or just items of its class?

Class mAP alone rewards codes that keep only the class: a code of the predicted class number has a high mAP and gives all queries of a
class the same results (Sablayrolles, Douze, Usunier, Jégou, "How should we evaluate supervised hashing?", ICASSP 2017). So rankings are
measured here against the inputs themselves: ``NN10@100`` is the share of a query's ten nearest items, by exact cosine of the inputs, that
are among its first 100 results. If rank 100 is inside a group of n items with equal score, after a items, each of the n is among the first
100 with probability (100 - a) / n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .grouping import Bytes
from .ranking import rank_codes
from .scorers import ScoreFunction, Tables
from .ties import Ints

MOST_QUERIES = 400
"""Maximum number of queries to measure."""
NEAREST = 10
"""Number of nearest items per query."""

_STEPS = 1 << 30  # resolution of cosines between 0 and 1
_LOW = np.int64((1 << 32) - 1)
_NONE = np.iinfo(np.int64).min  # less than the key of cosine -1


@dataclass(frozen=True)
class Likeness:
    """Likeness of a ranking."""

    nn10_at_100: float
    """Mean share of the ten nearest items that are among the first 100 results."""
    queries: int
    """Number of measured queries."""
    definition: str
    """The definition of the figure, in a sentence."""


def spaced_queries(total: int, most: int = MOST_QUERIES) -> Ints:
    """Indices of at most ``most`` of ``total`` queries, evenly spaced, int64 ascending."""
    return np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))


def nearest(xq: NDArray[np.float32], blocks: Iterable[NDArray[np.float32]], n: int = NEAREST) -> Ints:
    """The ``n`` items with the largest cosine to each query: database rows int64 [q, n], nearest first, padded with -1.

    Cosines are rounded to 2^-30, a hundredth of the precision of float32 inputs; ties go by row. So neither block sizes nor the order of
    BLAS sums matter. Zero vectors have cosine 0.

    Args:
        xq: float32 [q, W], inputs of the queries.
        blocks: inputs of the database in order, float32 [b, W] each; one block is in memory at a time.
        n: number of neighbours.
    """
    unit_queries, best, start = _unit(xq), np.full((len(xq), n), _NONE), 0
    for x in blocks:
        # Cosine in the high bits, row in the low bits: larger keys are nearer items, or earlier ones among equals.
        keys = np.rint((unit_queries @ _unit(x).T) * _STEPS).astype(np.int64) << 32
        keys += _LOW - np.arange(start, start + len(x))
        joined = np.concatenate([best, keys], axis=1)
        joined.partition(joined.shape[1] - n, axis=1)
        best = np.sort(joined[:, -n:], axis=1)[:, ::-1]
        start += len(x)
    return np.where(best == _NONE, -1, _LOW - (best & _LOW))


def _unit(x: NDArray[Any]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    norms[norms == 0] = 1
    wide /= norms[:, None]
    return wide


def likeness(
    scorer: Tables | ScoreFunction,
    codes: Bytes,
    neighbours: Ints,
    *,
    n_queries: int,
    k: int = 100,
    memory: int = 64 << 20,
) -> Likeness:
    """Compare a ranking of a database of codes with the neighbours by input.

    Args:
        scorer, codes: as for :func:`.ranking.rank_codes`, of all the queries.
        neighbours: from :func:`nearest`, of the :func:`spaced_queries`.
        n_queries: Q, the number of all queries.
        k: number of results.
        memory: bytes per block of scores; at least one query per block.

    Raises:
        DataError: scores that are not finite, or neighbours in another database.
        UsageError: codes of another width than the tables.
    """
    queries = spaced_queries(n_queries)
    if not n_queries or len(neighbours) != len(queries) or neighbours.max(initial=-1) >= len(codes):
        raise DataError(
            f"neighbours of {len(neighbours):,} queries do not fit {n_queries:,} and {len(codes):,} codes"
        )
    chosen_scorer = (lambda q, c: scorer(queries[q], c)) if callable(scorer) else scorer[queries]
    # Each query has a label of its own, which its neighbours have too: the figure is their recall.
    own = np.packbits(np.eye(len(queries), dtype=bool), axis=1)
    labels = np.zeros((len(codes), own.shape[1]), np.uint8)
    for query, items in enumerate(neighbours):
        labels[items[items >= 0]] |= own[query]
    share = rank_codes(chosen_scorer, codes, own, labels, ks=[k], memory=memory).recall[k]
    chosen = f"{len(queries):,} of {n_queries:,} queries, evenly spaced"
    if len(queries) == n_queries:
        chosen = f"all {n_queries:,} queries"
    definition = (
        f"NN{NEAREST}@{k}: share of a query's {NEAREST} nearest items by exact cosine of the inputs that are among its first {k} "
        f"results, expected value over random order within ties, mean over {chosen}"
    )
    return Likeness(share, len(queries), definition)

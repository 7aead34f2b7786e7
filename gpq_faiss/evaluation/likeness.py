"""Likeness: does a ranking find the items most similar to the query, or just items of its class?

Class mAP alone rewards codes that keep only the class: a code of the predicted class number has a high mAP and gives all queries of a
class the same results (Sablayrolles, Douze, Usunier, Jégou, "How should we evaluate supervised
hashing?", ICASSP 2017). So rankings are measured here against the inputs themselves:

* ``NN10@100``: the share of a query's ten nearest items, by exact cosine of the inputs, that are among its first 100 results;
* within class: the same with database and ranking restricted to the items that share a label with the query;
* the number of distinct items among the first ten results of all the queries measured.

If rank k is inside a group of n items with equal score, after a items, each of the n is among the first k with probability
(k - a) / n.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .grouping import Bytes, LabelsLike, distinct_rows, label_rows, same_width
from .scorers import Keys, ScoreFunction, Tables, scores_of
from .ties import Ints

MOST_QUERIES = 400
"""Maximum number of queries to measure."""
NEAREST = 10
"""Number of nearest items per query, and of results per query counted for distinctness."""

_STEPS = 1 << 30  # resolution of cosines between 0 and 1
_LOW = np.int64((1 << 32) - 1)
_NONE = np.iinfo(np.int64).min  # keys from here to that of cosine -1 are of no item
_LEAST = np.int64(-_STEPS << 32)


@dataclass(frozen=True)
class Neighbours:
    """Items nearest to some queries by their inputs: the reference for rankings of one split."""

    queries: Ints
    """[q] index of the queries among all."""
    overall: Ints
    """[q, n] database rows, nearest first; padded with -1."""
    within: Ints
    """[q, n] the same among items that share a label with the query; padded with -1."""
    meets: NDArray[np.bool_]
    """[q, S] whether the query shares a label with each distinct label set of the database."""
    set_of: Ints
    """[N] label set of each item."""


@dataclass(frozen=True)
class Likeness:
    """Likeness of a ranking."""

    nn10_at_100: float
    """Mean share of the ten nearest items that are among the first k = 100 results."""
    within_class: float | None
    """The same among items that share a label with the query; 1 if these are at most k. None: no query shares one."""
    distinct_in_tops: int
    """Distinct items among the first ten results of all queries measured, ties by id."""
    queries: int
    """Number of measured queries."""
    definition: str
    """The definition of the figures, in a sentence."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def definition(queries: int, total: int, k: int = 100) -> str:
    """A sentence that defines the figures, for output."""
    chosen = (
        f"all {total:,} queries" if queries == total else f"{queries:,} of {total:,} queries, evenly spaced"
    )
    return (
        f"NN{NEAREST}@{k}: share of a query's {NEAREST} nearest items by exact cosine of the inputs that are among its first {k} "
        f"results, expected value over random order within ties, mean over {chosen}; within class: the same with database and "
        f"ranking restricted to items that share a label with the query; distinct in tops: different items among the first "
        f"{NEAREST} results of all these queries, ties by id"
    )


def spaced_queries(total: int, most: int = MOST_QUERIES) -> Ints:
    """Indices of at most ``most`` of ``total`` queries, evenly spaced, int64 ascending."""
    return np.unique(np.linspace(0, total - 1, min(most, total)).astype(np.int64))


def nearest(
    queries: Ints,
    xq: NDArray[np.float32],
    blocks: Iterable[NDArray[np.float32]],
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    n: int = NEAREST,
) -> Neighbours:
    """The ``n`` items with the largest cosine to each query, among all items and among those that share a label with it.

    Cosines are rounded to 2^-30, a hundredth of the precision of float32 inputs; ties go by row. So neither block sizes nor the order of
    BLAS sums matter. Zero vectors have cosine 0.

    Args:
        queries: int64 [q], their indices among all queries, for the result.
        xq: float32 [q, W], their inputs.
        blocks: inputs of the database in order, float32 [b, W] each; one block is in memory at a time.
        query_labels: of these q queries, see :func:`.grouping.label_rows`.
        database_labels: of the N items.
        n: number of neighbours.

    Raises:
        DataError: inconsistent shapes, or an empty database.
        UsageError: ``n`` below 1.
    """
    if n < 1:
        raise UsageError(f"n = {n} nearest items: it must be at least 1")
    queries, xq = np.asarray(queries, np.int64), np.asarray(xq)
    if xq.ndim != 2 or queries.shape != (len(xq),):
        raise DataError(f"{queries.shape} queries and inputs {xq.shape}: one row [W] per query is needed")
    total = len(np.asarray(getattr(database_labels, "packed", database_labels)))
    of_queries, of_items = same_width(
        label_rows(query_labels, "query labels", len(xq)),
        label_rows(database_labels, "database labels", total),
    )
    sets, set_of = distinct_rows(np.ascontiguousarray(of_items))
    meets = np.array([(sets & row).any(axis=1) for row in of_queries], dtype=bool).reshape(len(xq), len(sets))
    unit_queries = _unit(xq)
    best = [np.full((len(xq), n), _NONE) for _ in range(2)]
    start = 0
    for x in map(np.asarray, blocks):
        if x.ndim != 2 or x.shape[1] != xq.shape[1]:
            raise DataError(f"inputs of the database are {x.shape}: rows of {xq.shape[1]} numbers are needed")
        stop = start + len(x)
        if stop > total:
            raise DataError(f"the database has {total:,} labels, but more inputs")
        # Cosine in the high bits, row in the low bits: larger keys are nearer items, or earlier ones among equals.
        keys = np.rint((unit_queries @ _unit(x).T) * _STEPS).astype(np.int64) << 32
        keys += _LOW - np.arange(start, stop)
        shares = meets[:, set_of[start:stop]]
        # Padding keys differ, as selection among many equal keys is slow.
        without = _NONE + np.arange(len(x))
        best = [_best(best[0], keys), _best(best[1], np.where(shares, keys, without))]
        start = stop
    if start != total or not total:
        raise DataError(f"the database has {total:,} labels, but {start:,} inputs")
    overall, within = (np.where(b < _LEAST, -1, _LOW - (b & _LOW)) for b in best)
    return Neighbours(queries, overall, within, meets, set_of)


def _unit(x: NDArray[Any]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    norms = np.sqrt(np.einsum("nd,nd->n", wide, wide))
    norms[norms == 0] = 1
    wide /= norms[:, None]
    return wide


def _best(best: Ints, keys: Ints) -> Ints:
    """The largest keys of both in every row, as many as ``best`` has, descending."""
    n = best.shape[1]
    joined = np.concatenate([best, keys], axis=1)
    joined.partition(joined.shape[1] - n, axis=1)
    return np.sort(joined[:, -n:], axis=1)[:, ::-1]


def likeness(
    scorer: Tables | ScoreFunction,
    codes: Bytes,
    neighbours: Neighbours,
    *,
    n_queries: int,
    ids: ArrayLike | None = None,
    k: int = 100,
    memory: int = 64 << 20,
) -> Likeness:
    """Compare a ranking of a database of codes with the neighbours by input.

    Args:
        scorer: tables float32 [Q, M, K] or a score function of all the queries, as for :func:`.ranking.rank_codes`. Equal
            codes have equal scores.
        codes: uint8 [N, W]; with tables, codeword numbers.
        neighbours: from :func:`nearest`, for the queries to measure.
        n_queries: Q, the number of all queries.
        ids: int64 [N], order of items with equal scores for counting distinct items; default: the row number.
        k: number of results.
        memory: bytes per block of scores; at least one query per block.

    Raises:
        DataError: codes and neighbours of different databases, scores that are not finite, or no queries.
        UsageError: ``k`` below 1; codes of another width than the tables.
    """
    codes = np.asarray(codes)
    queries, n = neighbours.queries, len(neighbours.set_of)
    if codes.ndim != 2 or codes.dtype != np.uint8 or len(codes) != n:
        raise DataError(f"codes are {codes.dtype} {codes.shape}: uint8 [{n:,}, W] are needed")
    if not len(queries):
        raise DataError("no queries to measure likeness for")
    if k < 1:
        raise UsageError(f"k = {k}: it must be at least 1")
    distinct, code_of = distinct_rows(np.ascontiguousarray(codes))
    fill = scores_of(scorer, distinct)
    counts = np.bincount(code_of, minlength=len(distinct))
    by_id = np.arange(n) if ids is None else np.argsort(np.asarray(ids), kind="stable")
    code_by_id = code_of[by_id]
    found, found_within = [], []
    in_tops = np.zeros(n, dtype=bool)
    step = max(1, memory // (8 * len(distinct)))
    for start in range(0, len(queries), step):
        rows = queries[start : start + step]
        scores = np.empty((len(rows), len(distinct)), dtype=np.int32)
        fill(rows, scores)
        for i, keys in enumerate(scores, start):
            found.append(_share(keys, counts, code_of, neighbours.overall[i], k))
            same = code_of[neighbours.meets[i][neighbours.set_of]]
            if len(same):
                counts_within = np.bincount(same, minlength=len(distinct))
                found_within.append(_share(keys, counts_within, code_of, neighbours.within[i], k))
            in_tops[by_id[_first(keys, counts, code_by_id)]] = True
    return Likeness(
        nn10_at_100=float(np.mean(found)),
        within_class=float(np.mean(found_within)) if found_within else None,
        distinct_in_tops=int(in_tops.sum()),
        queries=len(queries),
        definition=definition(len(queries), n_queries, k),
    )


def _cut(keys: Keys, counts: Ints, k: int) -> tuple[int, int, int]:
    """The key of the k-th item (or the last), the number of items with smaller keys, and with this key.

    Args:
        keys: int32 [U], smaller is better.
        counts: int64 [U], items per key; zeros are ignored.
    """
    some = np.flatnonzero(counts)
    keys, counts = keys[some], counts[some]
    # k codes have at least k items, so the k-th item has one of the k smallest keys.
    most = np.partition(keys, k - 1)[k - 1] if k < len(keys) else keys.max()
    near = np.flatnonzero(keys <= most)
    near = near[np.argsort(keys[near])]
    place = min(int(np.searchsorted(np.cumsum(counts[near]), k)), len(near) - 1)
    last = keys[near[place]]
    return int(last), int(counts[keys < last].sum()), int(counts[keys == last].sum())


def _share(keys: Keys, counts: Ints, code_of: Ints, wanted: Ints, k: int) -> float:
    """Expected share of the items ``wanted`` (rows; -1: none) among the first k."""
    last, before, tied = _cut(keys, counts, k)
    of_wanted = keys[code_of[wanted[wanted >= 0]]]
    at_cut = min(1.0, (k - before) / tied)
    return float(((of_wanted < last) + at_cut * (of_wanted == last)).mean())


def _first(keys: Keys, counts: Ints, code_by_id: Ints) -> Ints:
    """The first results, as indices in id order; ties in that order."""
    last, before, _ = _cut(keys, counts, NEAREST)
    of_items = keys[code_by_id]
    tied = np.flatnonzero(of_items == last)[: NEAREST - before]
    return np.concatenate([np.flatnonzero(of_items < last), tied])

"""Exact and tie-aware measures of the ranking of a whole database, for many queries.

Average precision over U distinct codes needs a sort of U scores, not N. So the database is grouped
by code, and items are counted by (code, label set). The 32-bit integer scores of a query
(:mod:`.scorers`) are sorted together with what identifies them in the low bits (many times faster
than ``argsort``), and compiled loops (:mod:`.kernels`) find the groups of equal scores and measure
them in closed form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from ..progress import stage
from .scorers import (
    Bytes,
    ScoreFunction,
    Tables,
    distinct_rows,
    integer_scores,
    label_rows,
    words_of,
)
from .tables import Shown
from .ties import (
    RECALL_LEVELS,
    Convention,
    Denominator,
    Doubles,
    Ties,
    check_rank,
    harmonic_numbers,
)

_TASK = 128  # number of queries per task of a thread
_SCORES = 1 << 22  # maximum number of scores that a task computes at a time
DEFAULT = Convention()
"""mAP of the full ranking, expected value over random order within ties."""


@dataclass(frozen=True, repr=False)
class RankingResult(Shown):
    """Measures of a ranking.

    Attributes:
        map: mean of ``ap`` over all queries; those without relevant items count 0.
        ap: float64 [Q], average precision of each query.
        precision, recall: k -> mean precision and mean recall of the first k ranks.
        pr_recall, pr_precision: float64 [L], recall levels of the mean precision-recall curve, and
            its interpolated precision; empty if no k was given.
        n_queries, n_database: Q, and the number of items.
        n_distinct: number of distinct codes in the database (of items, if there are no codes).
        queries_without_relevant: number of queries without any relevant item.
        convention: how average precision is computed, in a line.
    """

    map: float
    ap: Doubles
    precision: dict[int, float]
    recall: dict[int, float]
    pr_recall: Doubles
    pr_precision: Doubles
    n_queries: int
    n_database: int
    n_distinct: int
    queries_without_relevant: int
    convention: str

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """Return one row for a table: mAP, then precision and recall.

        Args:
            ks: numbers of ranks to include, if they were measured (default: all).
        """
        measured = [k for k in (self.precision if ks is None else ks) if k in self.precision]
        precision = {f"P@{k}": self.precision[k] for k in measured}
        recall = {f"R@{k}": self.recall[k] for k in measured}
        return [{"mAP": self.map, **precision, **recall}]

    def about(self) -> list[str]:
        """Return lines with the size and the convention of the ranking."""
        lines = [
            f"{self.n_queries:,} queries, {self.n_database:,} items in the database "
            f"({self.n_distinct:,} distinct codes)",
            self.convention,
        ]
        if self.queries_without_relevant:
            lines.append(
                f"{self.queries_without_relevant:,} of {self.n_queries:,} queries have no relevant "
                "item and count 0"
            )
        return lines

    def as_dict(self) -> dict[str, Any]:
        """Return everything except the values of single queries, for JSON."""
        curve = {"recall": self.pr_recall.tolist(), "precision": self.pr_precision.tolist()}
        values = vars(self) | {
            "precision": {str(k): v for k, v in self.precision.items()},
            "recall": {str(k): v for k, v in self.recall.items()},
            "pr_curve": curve,
        }
        return {name: values[name] for name in values if not isinstance(values[name], np.ndarray)}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return cores or 1


def rank_codes(
    scorer: Tables | ScoreFunction,
    codes: Bytes,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    convention: Convention = DEFAULT,
    *,
    ks: Sequence[int] = (),
    exclude: ArrayLike | None = None,
    threads: int = 1,
) -> RankingResult:
    """Rank a database of codes for every query and measure the rankings.

    Items are relevant to a query if they share a label with it.

    Args:
        scorer: tables float32 [Q, M, K] (the score is the sum over m of tables[q, m, code_m]), or
            for other codes a :data:`.scorers.ScoreFunction`. Equal codes have equal scores. Table
            entries are rounded to 2^-29 of the largest possible score of the query and summed
            exactly (float32 sums are 32 times coarser).
        codes: uint8 [N, W]. With tables, W = M codeword numbers below K; with a function, its
            input.
        query_labels, database_labels: class numbers, -1 for unlabelled; or multi-hot rows, bool
            [., C] or packed by ``np.packbits``, as uint8 rows are understood to be. Unlabelled
            items are not relevant.
        convention: order of ties, k and denominator of average precision. Ids are row numbers.
        ks: numbers of ranks of precision and recall. If there are any, the precision-recall curve
            is measured, too; else only average precision, which is faster.
        exclude: int64 [Q], the database row to leave out for each query, or -1.
        threads: number of threads, which does not change the result of score tables.

    Raises:
        UsageError: a k below 1, or codes of another width than the tables.
        DataError: inconsistent shapes, codes out of range, or scores that are not finite.

    Examples:
        >>> codes = np.array([[0], [0], [1], [2]], np.uint8)  # one codebook; two items tie
        >>> tables = np.array([[[3.0, 2.0, 1.0]]], np.float32)  # of one query
        >>> result = rank_codes(tables, codes, query_labels=[1], database_labels=[0, 1, 1, 0])
        >>> round(result.map, 4), result.n_distinct
        (0.7083, 3)
    """
    for k in ks:
        check_rank(k)
    database = _Database(scorer, codes, query_labels, database_labels, convention, exclude)
    n_queries, ranks = database.n_queries, np.array(ks, np.int64)
    levels = RECALL_LEVELS if ks else RECALL_LEVELS[:0]
    measures = np.zeros((n_queries, 2 + len(ks) + len(levels)))

    def measure(start: int) -> int:
        rows = database.order[start : start + _TASK]
        measures[rows] = database.measure(rows, ranks, levels)
        return len(rows)

    tasks = range(0, n_queries, _TASK)
    with ThreadPoolExecutor(threads) as pool, stage("ranking", n_queries, "query") as ranking:
        counts = map(measure, tasks) if threads == 1 else pool.map(measure, tasks)
        for count in counts:
            ranking.update(count)
    ap, relevant, hits, curve = np.split(measures, [1, 2, 2 + len(ks)], axis=1)
    divisor = max(n_queries, 1)
    recall = hits / np.maximum(relevant, 1)
    return RankingResult(
        map=float(ap.sum() / divisor),
        ap=ap[:, 0].copy(),
        precision=dict(zip(ks, (hits.sum(axis=0) / divisor / ranks).tolist(), strict=True)),
        recall=dict(zip(ks, (recall.sum(axis=0) / divisor).tolist(), strict=True)),
        pr_recall=levels,
        pr_precision=curve.sum(axis=0) / divisor,
        n_queries=n_queries,
        n_database=database.n,
        n_distinct=database.n_distinct,
        queries_without_relevant=int((relevant == 0).sum()),
        convention=str(convention),
    )


def rank_scores(
    scores: NDArray[Any],
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    convention: Convention = DEFAULT,
    *,
    ks: Sequence[int] = (),
    exclude: ArrayLike | None = None,
    threads: int = 1,
) -> RankingResult:
    """Rank by scores [Q, N], without codes: for float features, class probabilities or distances.

    Scores must fit float32 exactly (float32, float16, small integers), as rounding would create
    ties. Negate distances. The other arguments and errors are those of :func:`rank_codes`.

    Examples:
        >>> scores = np.array([[3.0, 2.0, 1.0]], np.float32)
        >>> rank_scores(scores, query_labels=[1], database_labels=[0, 1, 1], ks=[2]).precision
        {2: 0.5}
    """
    table, q, n = np.asarray(scores), np.shape(query_labels), np.shape(database_labels)
    if table.shape != q[:1] + n[:1] or table.ndim != 2:
        raise DataError(
            f"scores {table.shape} must be [queries, database items]; labels are {q} and {n}"
        )
    # The code of an item is its number, with bytes in the order of the numbers.
    codes = np.arange(n[0], dtype=">u4").view(np.uint8).reshape(-1, 4)
    return rank_codes(
        lambda rows, _: table[rows],
        codes,
        query_labels,
        database_labels,
        convention,
        ks=ks,
        exclude=exclude,
        threads=threads,
    )


class _Database:
    """A database that is grouped by code and label set, to be ranked for queries.

    What is sorted are *entries*: the distinct codes, each with its number of items; or the single
    items, if ties are in the order of ids.
    """

    def __init__(
        self,
        scorer: Tables | ScoreFunction,
        codes: Bytes,
        query_labels: ArrayLike,
        database_labels: ArrayLike,
        convention: Convention,
        exclude: ArrayLike | None,
    ) -> None:
        """Check and count the database. Arguments and errors are those of :func:`rank_codes`."""
        codes = np.ascontiguousarray(codes)
        if codes.ndim != 2 or codes.dtype != np.uint8 or not 0 < len(codes) <= 1 << 31:
            raise DataError(
                f"codes must be uint8 [N, W] of 1 to 2^31 items, not {codes.dtype} {codes.shape}"
            )
        self.n = len(codes)
        self.n_queries = len(np.atleast_1d(query_labels)) if callable(scorer) else len(scorer)
        queries = label_rows(query_labels, "query labels", self.n_queries)
        labels = label_rows(database_labels, "database labels", self.n)
        excluded = np.full(self.n_queries, -1) if exclude is None else np.asarray(exclude)
        fits = excluded.shape == (self.n_queries,) and excluded.dtype.kind in "iu"
        if not fits or not ((excluded >= -1) & (excluded < self.n)).all():
            raise DataError(
                f"exclude must be {self.n_queries:,} integers: a row of the database of {self.n:,} "
                "items for each query, or -1"
            )
        self._excluded = excluded
        self._ties = get_args(Ties).index(convention.ties)
        self._denominator = get_args(Denominator).index(convention.denominator)
        self._k = convention.k or self.n
        distinct, code_of = distinct_rows(codes)
        self.n_distinct = len(distinct)
        self._scores = integer_scores(scorer, distinct)
        # Entries are single items if their order decides.
        by_id = convention.ties == "id"
        self._entry_of = np.arange(self.n) if by_id else code_of
        self._code_of = code_of if by_id else slice(None)  # of entries
        self._sizes = np.bincount(self._entry_of)
        # Items are counted by (entry, label set); every entry has an item.
        sets, self._set_of_item = distinct_rows(labels)
        pairs, self._counts = np.unique(
            self._entry_of * len(sets) + self._set_of_item, return_counts=True
        )
        entries, self._set_of_pair = np.divmod(pairs, len(sets))
        self._starts = np.searchsorted(entries, np.arange(len(self._sizes)))
        self._query_words = words_of(queries)
        self._set_words = words_of(sets, len(self._query_words))[: len(self._query_words)]
        # Queries are sorted by label set, so that relevant items are counted once per set.
        _, self._query_set = distinct_rows(queries)
        self.order = np.argsort(self._query_set, kind="stable")
        self._block = max(1, min(16, _SCORES // len(self._sizes)))
        self._harmonic = harmonic_numbers(self.n)

    def measure(self, queries: NDArray[Any], ks: NDArray[Any], levels: Doubles) -> Doubles:
        """Measure the rankings of some query rows, in their :attr:`order`.

        Returns:
            float64 [q, 2 + len(ks) + L]: average precision, number of relevant items, expected
            number of them at each k, and precision at each level of recall.
        """
        from . import kernels

        measures = np.zeros((len(queries), 2 + len(ks) + len(levels)))
        counts = np.stack([self._sizes, self._sizes])  # relevant items, and all, of each entry
        buffers = np.empty((2, len(self._sizes)), np.uint64)
        label_set = -1
        for i, (query, row) in enumerate(zip(queries.tolist(), measures, strict=True)):
            if not i % self._block:
                scores = self._scores(queries[i : i + self._block])
            if label_set != self._query_set[query]:
                label_set = self._query_set[query]
                # The label sets that share a label with the query, and the items of each entry that
                # have one of them.
                relevant_sets = np.any(self._set_words & self._query_words[:, query, None], axis=0)
                counts[0] = np.add.reduceat(
                    self._counts * relevant_sets[self._set_of_pair], self._starts
                )
            item = self._excluded[query]
            entry = self._entry_of[item]
            removed = np.array([relevant_sets[self._set_of_item[item]], 1])
            if item < 0:  # no item is left out for this query
                removed[:] = 0
            counts[:, entry] -= removed
            keys = kernels.sort_entries(scores[i % self._block][self._code_of], *buffers)
            groups = kernels.tie_groups(keys, counts, self._ties)
            row[1] = relevant = counts[0].sum()
            row[0] = kernels.average_precision(
                groups, relevant, self._harmonic, self._k, self._denominator
            )
            if len(ks):
                kernels.curves(groups, relevant, ks, levels, row[2:])
            counts[:, entry] += removed
        return measures

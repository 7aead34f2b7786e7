"""Rank a whole database for many queries, exactly, tie-aware, in bounded memory.

Average precision over U distinct codes needs a sort of U scores, not N. So the database is grouped by code, and items are counted by
(code, label set). The 32-bit integer scores of a query (:mod:`.scorers`) are sorted together with what identifies them in the low bits
(many times faster than ``argsort``), and compiled loops (:mod:`.kernels`) find the groups of equal scores and measure them in closed
form.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from ..progress import stage
from .grouping import Bytes, distinct_rows, label_rows, words_of
from .scorers import LAST, ScoreFunction, Tables, scores_of
from .tables import Shown
from .ties import Convention, Denominator, Floats, Ints, Ties, harmonic_numbers

_TASK = 128  # queries per task
_BY_ITEM = 0.6  # minimum share of distinct codes for which sorting items is faster (measured)
_CACHE = 1 << 16  # scores per block, so that buffers fit a core's cache
_TOGETHER = 8  # minimum queries scored together, sharing look-ups
_BYTES = 64  # of all buffers, per score


class Options(TypedDict, total=False):
    """Options of all rankings, see :func:`rank_codes`."""

    ties: Ties
    k: int | None
    denominator: Denominator
    ks: Sequence[int]
    levels: ArrayLike | None
    ids: ArrayLike | None
    exclude: ArrayLike | None
    memory: int
    threads: int


@dataclass(frozen=True, repr=False)
class RankingResult(Shown):
    """Measures of a ranking; ``convention`` describes how they are computed."""

    map: float
    """Mean of ``ap`` over all queries; those without relevant items count 0."""
    ap: Floats
    """[Q] average precision of each query."""
    precision: dict[int, float]
    """Mean precision at each k."""
    recall: dict[int, float]
    """Mean recall at each k."""
    pr_recall: Floats
    """[L] recall levels of the mean precision-recall curve (empty if not requested)."""
    pr_precision: Floats
    """[L] mean interpolated precision at those levels."""
    n_queries: int
    n_database: int
    n_distinct: int
    """Number of distinct codes in the database (of items, if there are no codes)."""
    queries_without_relevant: int
    convention: str

    @property
    def notes(self) -> list[str]:
        """Remarks for the user."""
        missing = self.queries_without_relevant
        return [f"{missing:,} of {self.n_queries:,} queries have no relevant item and count 0"] * bool(
            missing
        )

    def rows(self, ks: Sequence[int] | None = None) -> list[dict[str, Any]]:
        """One row, for a table; ``ks`` of precision and recall (default: all)."""
        there = [k for k in (self.precision if ks is None else ks) if k in self.precision]
        at = {f"P@{k}": self.precision[k] for k in there} | {f"R@{k}": self.recall[k] for k in there}
        return [{"mAP": self.map, **at}]

    def about(self) -> list[str]:
        """Size and convention of the ranking."""
        size = f"{self.n_queries:,} queries, {self.n_database:,} items in the database ({self.n_distinct:,} distinct codes)"
        return [size, self.convention, *self.notes]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything except values per query."""
        counted = ("n_queries", "n_database", "n_distinct", "queries_without_relevant", "convention", "notes")
        return {
            "map": self.map,
            "precision": {str(k): v for k, v in self.precision.items()},
            "recall": {str(k): v for k, v in self.recall.items()},
            "pr_curve": {"recall": self.pr_recall.tolist(), "precision": self.pr_precision.tolist()},
            **{name: getattr(self, name) for name in counted},
        }


def usable_cores() -> int:
    """Number of cores available to this process: the default of ``threads`` on the command line."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def rank_codes(
    scorer: Tables | ScoreFunction,
    codes: Bytes,
    query_labels: ArrayLike,
    database_labels: ArrayLike,
    **options: Unpack[Options],
) -> RankingResult:
    """Rank a database of codes for every query and measure the rankings. Items are relevant if they share a label with
    the query.

    Args:
        scorer: tables float32 [Q, M, K] (score = sum over m of tables[q, m, code_m]), or for other codes a :data:`.scorers.ScoreFunction`.
            Equal codes have equal scores. Table entries are rounded to 2^-29 of the query's largest possible score and summed exactly
            (float32 sums are 32 times coarser).
        codes: uint8 [N, W]. With tables, W = M codeword numbers below K; with a function, its input.
        query_labels, database_labels: see :func:`gpq_faiss.evaluation.grouping.label_rows`; unlabelled items
            are not relevant.
        options: ``ties`` ("expected" value over random order within equal scores, by "id", "best" or "worst" case), ``k`` (mAP@k instead
            of the full ranking), its ``denominator`` ("relevant", "relevant-in-top-k" or "min(k, relevant)"), ``ks`` of precision and
            recall, recall ``levels`` of the mean precision-recall curve, ``ids`` int64 [N] (order of ties="id", default: the row number),
            ``exclude`` int64 [Q] (a database row to leave out per query, or -1), ``memory`` in bytes, ``threads``. The result does
            not depend on the last two.

    Raises:
        UsageError: an unknown convention, a k below 1, codes of another width than the tables.
        DataError: inconsistent shapes, codes out of range, or scores that are not finite.

    Examples:
        >>> codes = np.array([[0], [0], [1], [2]], np.uint8)  # one codebook: the first two items tie
        >>> tables = np.array([[[3.0, 2.0, 1.0]]], np.float32)  # of one query
        >>> result = rank_codes(tables, codes, query_labels=[1], database_labels=[0, 1, 1, 0])
        >>> round(result.map, 4), result.n_distinct
        (0.7083, 3)
    """
    return _Ranking(scorer, codes, query_labels, database_labels, **options).result()


def rank_scores(
    scores: NDArray[Any], query_labels: ArrayLike, database_labels: ArrayLike, **options: Unpack[Options]
) -> RankingResult:
    """:func:`rank_codes` from scores [Q, N], without codes: for float features, class probabilities or distances.

    Scores must fit float32 exactly (float32, float16, small integers), as rounding would create ties. Negate distances.

    Examples:
        >>> scores = np.array([[3.0, 2.0, 1.0]], np.float32)
        >>> rank_scores(scores, query_labels=[1], database_labels=[0, 1, 1], ks=[2]).precision
        {2: 0.5}
    """
    table, q, n = np.asarray(scores), np.shape(query_labels), np.shape(database_labels)
    if table.shape != q[:1] + n[:1] or table.ndim != 2:
        raise DataError(f"scores {table.shape} must be [queries, database items]; labels are {q} and {n}")
    # Every item has a code of its own: its number, whose bytes are in the order of the numbers.
    codes = np.arange(n[0], dtype=">u4").view(np.uint8).reshape(-1, 4)
    return rank_codes(lambda queries, _: table[queries], codes, query_labels, database_labels, **options)


class _Ranking:
    """A ranking, in tasks of some queries each.

    Items are ranked as *entries*: distinct codes with their counts; or single items, if codes hardly repeat, as keys that hold relevance
    sort faster than keys that hold the entry's number; or, with ties="id", single items in the order of ties.
    """

    def __init__(
        self,
        scorer: Tables | ScoreFunction,
        codes: Bytes,
        query_labels: ArrayLike,
        database_labels: ArrayLike,
        *,
        ids: ArrayLike | None = None,
        exclude: ArrayLike | None = None,
        memory: int = 256 << 20,
        threads: int = 1,
        **convention: Any,
    ) -> None:
        """Check and count the database. Arguments and errors as for :func:`rank_codes`."""
        self.convention = Convention(**convention)
        if threads < 1 or memory < 1:
            raise UsageError(f"threads={threads} and memory={memory} must be at least 1")
        codes = np.asarray(codes)
        if codes.ndim != 2 or codes.dtype != np.uint8:
            raise DataError(f"codes must be uint8 [N, W], not {codes.dtype} {codes.shape}")
        if not 0 < len(codes) <= 1 << 31:
            raise DataError(f"{len(codes):,} database items: 1 to 2^31 can be ranked")
        self.n, self._threads = len(codes), threads
        self.n_queries = len(np.atleast_1d(query_labels)) if callable(scorer) else len(scorer)
        queries = label_rows(query_labels, "query labels", self.n_queries)
        labels = label_rows(database_labels, "database labels", self.n)
        none = np.full(self.n_queries, -1)
        self._exclude = none if exclude is None else _integers(exclude, "exclude", self.n_queries)
        if self._exclude.min(initial=0) < -1 or self._exclude.max(initial=-1) >= self.n:
            raise DataError(f"exclude names rows outside the database of {self.n:,}")
        self._ordered = self.convention.ties == "id"
        if self._ordered and ids is not None:
            order = np.argsort(_integers(ids, "ids", self.n))
            if (np.diff(np.asarray(ids)[order]) == 0).any():
                raise DataError("ids must differ: ties cannot be ordered by equal ids")
            codes, labels = codes[order], labels[order]
            self._exclude = np.append(np.argsort(order), -1)[self._exclude]
        distinct, code_of = distinct_rows(np.ascontiguousarray(codes))
        self.n_distinct = len(distinct)
        self._by_item = not (callable(scorer) or self._ordered) and self.n_distinct >= _BY_ITEM * self.n
        self._scored = codes if self._by_item else distinct
        self._scores = scores_of(scorer, self._scored)
        self._entry_of = np.arange(self.n) if self._by_item or self._ordered else code_of
        self._code_of = code_of if self._ordered else slice(None)  # of entries
        self._sizes = np.bincount(self._entry_of)
        # Items are counted by (entry, label set); every entry has an item.
        sets, self._item_set = distinct_rows(labels)
        pairs, self._counts = np.unique(self._entry_of * len(sets) + self._item_set, return_counts=True)
        entries, self._set_of = np.divmod(pairs, len(sets))
        self._starts = np.searchsorted(entries, np.arange(len(self._sizes)))
        self._query_words = words_of(queries)
        self._set_words = words_of(sets, len(self._query_words))[: len(self._query_words)]
        # Queries are sorted by label set, so that relevant items are counted once per set.
        _, self._query_set = distinct_rows(queries)
        self._by_set = np.argsort(self._query_set, kind="stable")
        width = len(self._sizes)
        self._block = max(1, min(max(_CACHE // width, _TOGETHER), memory // threads // (_BYTES * width), 64))
        self._harmonic = harmonic_numbers(self.n)

    def _task(self, start: int) -> Floats:
        """Measures of the queries of the task that begins with this one: average precision, number of relevant items, expected number
        found at each k, and precision at each level of recall, float64 [_TASK, 2 + len(ks) + L]."""
        from . import kernels

        wanted, width, label_set = self.convention, len(self._sizes), -1
        ks, first_level = np.array(wanted.ks, np.int64), 2 + len(wanted.ks)
        order = {"best": kernels.BEST, "worst": kernels.WORST}.get(wanted.ties, 0)
        below = {"relevant-in-top-k": kernels.IN_TOP_K, "min(k, relevant)": kernels.AT_MOST_K}
        cut = wanted.k or self.n, below.get(wanted.denominator, 0)
        queries = self._by_set[start : start + _TASK]
        measures = np.zeros((len(queries), first_level + len(wanted.points)))
        scores = np.empty((self._block, len(self._scored)), np.int32)
        found = np.empty((4, width + 1), np.int64)
        hits, sizes, numbers = self._sizes, self._sizes.copy(), np.arange(width)
        spare = np.empty(width, np.int32 if self._by_item else np.int64)
        for i, query in enumerate(queries.tolist()):
            if not i % self._block:
                block = queries[i : i + self._block]
                self._scores(block, scores[: len(block)])
            if label_set != self._query_set[query]:
                label_set = self._query_set[query]
                # Label sets, and from these items of each entry, that share a label with the query.
                meets = np.any(self._set_words & self._query_words[:, query, None], axis=0)
                hits = np.add.reduceat(self._counts * meets[self._set_of], self._starts)
                bits = hits.astype(np.int32)
            item = self._exclude[query]
            entry, hit = self._entry_of[item], item >= 0 and meets[self._item_set[item]]
            hits[entry] -= hit
            sizes[entry] -= item >= 0
            keys = scores[i % self._block]
            if self._by_item:
                keys |= bits
                if item >= 0:
                    keys[item] = LAST - 1  # behind all others and not relevant: as if absent
            else:
                keys = keys.astype(np.int64)[self._code_of] << 32 | numbers
            keys = kernels.by_score(keys, spare, 0 if self._by_item else 32)
            groups = found[
                :, : kernels.tie_groups(keys, hits, sizes, self._by_item, self._ordered, order, found)
            ]
            out, relevant = measures[i], hits.sum()
            out[:2] = kernels.average_precision(groups, relevant, self._harmonic, *cut), relevant
            kernels.found_at(groups, ks, out[2:first_level])
            kernels.interpolated_precision(groups, relevant, wanted.points, out[first_level:])
            hits[entry] += hit
            sizes[entry] += item >= 0
        return measures

    def result(self) -> RankingResult:
        """Run all tasks and combine their measures."""
        wanted, some = self.convention, max(self.n_queries, 1)
        at = 2 + len(wanted.ks)
        whole = np.zeros((self.n_queries, at + len(wanted.points)))
        tasks = range(0, self.n_queries, _TASK)
        with ThreadPoolExecutor(self._threads) as pool, stage("ranking", self.n_queries, "query") as ranking:
            for one in map(self._task, tasks) if self._threads == 1 else pool.map(self._task, tasks):
                whole[self._by_set[ranking.done : ranking.done + len(one)]] = one
                ranking.advance(len(one))
        relevant, found = whole[:, 1], whole[:, 2:at]
        precision = found.sum(axis=0) / some / np.array(wanted.ks)
        recall = (found / np.maximum(relevant, 1)[:, None]).sum(axis=0) / some
        return RankingResult(
            map=float(whole[:, 0].sum() / some),
            ap=whole[:, 0].copy(),
            precision=dict(zip(wanted.ks, precision.tolist(), strict=True)),
            recall=dict(zip(wanted.ks, recall.tolist(), strict=True)),
            pr_recall=wanted.points,
            pr_precision=whole[:, at:].sum(axis=0) / some,
            n_queries=self.n_queries,
            n_database=self.n,
            n_distinct=self.n_distinct,
            queries_without_relevant=int((relevant == 0).sum()),
            convention=str(wanted),
        )


def _integers(given: ArrayLike, what: str, n: int) -> Ints:
    found = np.asarray(given)
    if found.shape != (n,) or found.dtype.kind not in "iu":
        raise DataError(f"{what} must be {n:,} integers, one per {'query' if what == 'exclude' else 'item'}")
    return found.astype(np.int64)

"""Rank a whole database for many queries, exactly, tie-aware, in bounded memory.

Average precision over U distinct codes needs a sort of U scores, not N. So the database is grouped by code, items
are counted by (label set, code), and queries, sorted by label set, are scored, sorted and summed in blocks
(:mod:`.engine`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from ..progress import stage
from .engine import Engine, Worker
from .grouping import Bytes, LabelsLike, distinct_rows, label_rows, same_width
from .metrics import RECALL_LEVELS, check_ks, check_levels, precision_of, recall_of
from .scorers import FunctionScorer, Scorer, TableScorer
from .tables import Shown
from .ties import (
    Denominator,
    Floats,
    Ints,
    Ties,
    average_precisions,
    check_cut,
    check_ties,
    convention,
    harmonic_numbers,
    interpolated_precision,
)

ScoreFunction = Callable[[Ints, Bytes], NDArray[Any]]
"""``(query rows int64 [q], distinct codes uint8 [U, W]) -> scores [q, U]``, larger is better."""
Spread = Callable[[Sequence[int]], Sequence["Measured"]]
"""Maps tasks to their measures, in order, for example on other machines by :func:`measure_codes`."""
RowFunction = Callable[[Ints], NDArray[Any]]
"""``(query rows int64 [q]) -> scores [q, N]`` for all database rows, larger is better."""

_TASK = 128  # queries per task; fixed, so that results do not depend on the number of threads


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
    notes: tuple[str, ...] = field(default=())

    def rows(self) -> list[dict[str, Any]]:
        """One row, for a table."""
        at = {f"P@{k}": v for k, v in self.precision.items()} | {f"R@{k}": v for k, v in self.recall.items()}
        return [{"mAP": self.map, **at}]

    def about(self) -> list[str]:
        """Size and convention of the ranking."""
        missing = self.queries_without_relevant
        return [
            f"{self.n_queries:,} queries, {self.n_database:,} items in the database ({self.n_distinct:,} distinct codes)",
            self.convention,
            *([f"{missing:,} queries have no relevant item and count 0"] if missing else []),
        ]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: everything except values per query."""
        return {
            "map": self.map,
            "precision": {str(k): v for k, v in self.precision.items()},
            "recall": {str(k): v for k, v in self.recall.items()},
            "pr_curve": {"recall": self.pr_recall.tolist(), "precision": self.pr_precision.tolist()},
            "n_queries": self.n_queries,
            "n_database": self.n_database,
            "n_distinct": self.n_distinct,
            "queries_without_relevant": self.queries_without_relevant,
            "convention": self.convention,
            "notes": list(self.notes),
        }


def usable_cores() -> int:
    """Number of cores available to this process: the default of ``threads`` on the command line."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def rank_codes(  # noqa: PLR0913
    scorer: NDArray[np.float32] | ScoreFunction,
    codes: Bytes,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ks: Sequence[int] = (),
    levels: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    exclude: ArrayLike | None = None,
    memory: int = 256 << 20,
    threads: int = 1,
    spread: Spread | None = None,
) -> RankingResult:
    """Rank a database of codes for every query and measure the rankings. Items are relevant if they share a label with
    the query.

    Args:
        scorer: tables float32 [Q, M, K] (score = sum over m of tables[q, m, code_m]), or a
            :data:`ScoreFunction` for other codes. Each distinct code is scored once, so equal codes have equal
            scores. Table entries are rounded to 2^-29 of the query's largest possible score and summed exactly
            (float32 sums are 32 times coarser).
        codes: uint8 [N, W]. With tables, W = M codeword numbers below K; with a function, its input.
        query_labels, database_labels: see :func:`gpq_faiss.evaluation.grouping.label_rows`; unlabelled items
            are not relevant.
        ties, k, denominator: as in :func:`gpq_faiss.evaluation.metrics.average_precision`.
        ks: the k of precision and recall.
        levels: recall levels of the mean PR curve; usually
            :data:`RECALL_LEVELS`; None: no curve.
        ids: int64 [N], order within ties for ties="id" (default: the row number).
        rows: int64, database rows to rank (default: all). ``exclude`` still refers to the whole database.
        exclude: int64 [Q], a database row to exclude per query (itself, in leave-one-out), or -1.
        memory: bytes for all concurrent blocks; at least one query per block and thread.
        threads: number of threads; the result does not depend on it.
        spread: runs the tasks elsewhere; the result does not depend on it.

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
    plan = _Plan(ties, k, denominator, check_ks(ks), levels, memory, threads)
    ranking = _of_codes(plan, scorer, codes, query_labels, database_labels, ids, rows, exclude)
    return ranking.result((spread or ranking.measure)(ranking.tasks))


def measure_codes(
    scorer: NDArray[np.float32] | ScoreFunction,
    codes: Bytes,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    options: Mapping[str, Any],
    tasks: Sequence[int],
) -> list[Measured]:
    """Measures of some tasks of :func:`rank_codes` with these arguments and options."""
    known = {"ids": None, "rows": None, "exclude": None, "memory": 256 << 20, "threads": 1, **options}
    chosen = known.pop("ids"), known.pop("rows"), known.pop("exclude")
    known["ks"] = check_ks(known["ks"])
    return _of_codes(_Plan(**known), scorer, codes, query_labels, database_labels, *chosen).measure(tasks)


def _of_codes(
    plan: _Plan,
    scorer: NDArray[np.float32] | ScoreFunction,
    codes: Bytes,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    ids: ArrayLike | None,
    rows: ArrayLike | None,
    exclude: ArrayLike | None,
) -> _Ranking:
    codes = np.asarray(codes)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise DataError(f"codes must be uint8 [N, W], not {codes.dtype} {codes.shape}")
    database = _Database.prepare(len(codes), database_labels, rows, ids)
    distinct, code_of = distinct_rows(np.ascontiguousarray(codes[database.rows]))
    prepared: Scorer
    if callable(scorer):
        function = scorer
        prepared, n_queries = FunctionScorer(lambda q: function(q, distinct)), None
    else:
        prepared, n_queries = TableScorer(scorer, distinct), len(scorer)
    return _Ranking(plan, prepared, n_queries, len(distinct), code_of, query_labels, database, exclude)


def rank_scores(  # noqa: PLR0913
    scores: NDArray[Any] | RowFunction,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ks: Sequence[int] = (),
    levels: ArrayLike | None = None,
    ids: ArrayLike | None = None,
    rows: ArrayLike | None = None,
    exclude: ArrayLike | None = None,
    memory: int = 256 << 20,
    threads: int = 1,
) -> RankingResult:
    """:func:`rank_codes` from scores, without codes: for float features, class probabilities or distances.

    ``scores`` is [Q, N], or a :data:`RowFunction` called for blocks of queries, which scores *all* N database rows
    (``rows`` selects among them afterwards). Scores must fit float32 exactly (float32, float16, small integers), as
    rounding would create ties. Negate distances.

    Examples:
        >>> scores = np.array([[3.0, 2.0, 1.0]], np.float32)
        >>> rank_scores(scores, query_labels=[1], database_labels=[0, 1, 1], ks=[2]).precision
        {2: 0.5}
    """
    n = _length(database_labels)
    database = _Database.prepare(n, database_labels, rows, ids)
    whole = len(database.rows) == n
    n_queries: int | None = None
    if callable(scores):
        function = scores
    else:
        table = np.asarray(scores)
        if table.ndim != 2 or table.shape[1] != n:
            raise DataError(f"scores {table.shape} must be [queries, {n:,} database items]")
        n_queries = len(table)
        function = table.__getitem__

    def picked(q: Ints) -> NDArray[Any]:
        block = np.asarray(function(q))
        if block.shape != (len(q), n):
            raise DataError(
                f"the score function returned {block.shape} for {len(q)} queries: expected ({len(q)}, {n})"
            )
        return block if whole else block[:, database.rows]

    plan = _Plan(ties, k, denominator, check_ks(ks), levels, memory, threads)
    code_of = np.arange(len(database.rows), dtype=np.int64)
    scorer = FunctionScorer(picked)
    ranking = _Ranking(plan, scorer, n_queries, len(code_of), code_of, query_labels, database, exclude)
    return ranking.result(ranking.measure(ranking.tasks))


def rank_features(
    queries: NDArray[np.float32],
    database: NDArray[np.float32],
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    **options: Any,
) -> RankingResult:
    """:func:`rank_scores` by inner product of float32 features [Q, D] and [N, D]; normalise them for
    cosines.

    Scores of equal database rows may differ in the last bit, as the order of BLAS sums depends on the row.
    """
    xq, xb = np.asarray(queries, dtype=np.float32), np.asarray(database, dtype=np.float32)
    if xq.ndim != 2 or xb.ndim != 2 or xq.shape[1] != xb.shape[1]:
        raise DataError(
            f"features of queries {xq.shape} and database {xb.shape} must be 2-D and of equal width"
        )
    return rank_scores(lambda q: xq[q] @ xb.T, query_labels, database_labels, **options)


# ---- preparation


@dataclass(frozen=True)
class _Plan:
    """What to measure, and with which resources."""

    ties: Ties
    k: int | None
    denominator: Denominator
    ks: list[int]
    levels: ArrayLike | None
    memory: int
    threads: int

    def __post_init__(self) -> None:
        check_ties(self.ties)
        check_cut(self.k, self.denominator)
        if self.threads < 1 or self.memory < 1:
            raise UsageError(f"threads={self.threads} and memory={self.memory} must be at least 1")


@dataclass(frozen=True)
class _Database:
    """The ranked database rows, with their labels."""

    total: int
    rows: Ints
    labels: Bytes
    ids: Ints | None

    @classmethod
    def prepare(
        cls, total: int, labels: LabelsLike, rows: ArrayLike | None, ids: ArrayLike | None
    ) -> _Database:
        packed = label_rows(labels, "database labels", total)
        chosen = np.arange(total) if rows is None else np.asarray(rows)
        if chosen.dtype == bool:
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or (
            len(chosen) and (chosen.dtype.kind not in "iu" or chosen.min() < 0 or chosen.max() >= total)
        ):
            raise DataError(f"rows must be row numbers below {total:,}")
        if len(np.unique(chosen)) != len(chosen):
            raise DataError("rows contains a database row twice: give each once")
        if not len(chosen):
            raise DataError("the database is empty: nothing to rank")
        if len(chosen) > 1 << 31:
            raise DataError(f"{len(chosen):,} database rows are more than 2^31: rank it in parts")
        key = None
        if ids is not None:
            key = np.asarray(ids)
            if key.shape != (total,) or key.dtype.kind not in "iu":
                raise DataError(f"ids must be {total:,} integers, one per database row")
            key = key[chosen]
            if len(np.unique(key)) != len(key):
                raise DataError("ids must differ: ties cannot be ordered by equal ids")
        return cls(total, chosen.astype(np.int64), packed[chosen], key)


def _length(labels: LabelsLike) -> int:
    return len(labels.packed) if hasattr(labels, "packed") else len(labels)


@dataclass(frozen=True, eq=False)
class Measured:
    """Measures of some queries.

    Attributes:
        rows: int64 [q], the queries.
        ap, without: [q], average precision, and whether there is no relevant item.
        precision, recall: [q, len(ks)].
        curve: [L], the sum of their precision-recall curves.
    """

    rows: Ints
    ap: Floats
    without: NDArray[np.bool_]
    precision: Floats
    recall: Floats
    curve: Floats


class _Ranking:
    """A ranking split into tasks of some queries each, to run here or elsewhere."""

    def __init__(
        self,
        plan: _Plan,
        scorer: Scorer,
        n_queries: int | None,
        n_distinct: int,
        code_of: Ints,
        query_labels: LabelsLike,
        database: _Database,
        exclude: ArrayLike | None,
    ) -> None:
        self.plan, self.n_distinct, self.n = plan, n_distinct, len(database.rows)
        self.n_queries = _length(query_labels) if n_queries is None else n_queries
        query_sets, labels = same_width(
            label_rows(query_labels, "query labels", self.n_queries), database.labels
        )
        order = None
        if plan.ties == "id":
            order = np.argsort(database.rows if database.ids is None else database.ids)
        excluded = _excluded(exclude, self.n_queries, database)
        self._harmonic = harmonic_numbers(self.n)
        self._engine = Engine(
            scorer, code_of, n_distinct, labels, query_sets, self._harmonic, order=order, exclude=excluded
        )
        self._by_set = self._engine.order_of_queries()
        self._block = self._engine.block_size(plan.memory // plan.threads)
        self._levels = np.zeros(0) if plan.levels is None else check_levels(plan.levels)
        self._local = threading.local()

    @property
    def tasks(self) -> range:
        """The first query of each task."""
        return range(0, self.n_queries, _TASK)

    def measure(self, tasks: Sequence[int]) -> list[Measured]:
        """Measures of these tasks, in order."""
        found = []
        queries = sum(min(_TASK, self.n_queries - start) for start in tasks)
        with (
            ThreadPoolExecutor(self.plan.threads) as pool,
            stage("ranking", queries, "query") as ranking,
        ):
            for one in map(self._task, tasks) if self.plan.threads == 1 else pool.map(self._task, tasks):
                found.append(one)
                ranking.advance(len(one.rows))
        return found

    def _task(self, start: int) -> Measured:
        plan, levels = self.plan, self._levels
        plain = plan.ties == "expected" and plan.k is None  # the engine computes this average precision
        listed = not plain or bool(plan.ks) or bool(len(levels))
        if not hasattr(self._local, "worker"):
            self._local.worker = Worker()
        rows = self._by_set[start : start + _TASK]
        place = np.zeros(self.n_queries, np.int64)
        place[rows] = np.arange(len(rows))
        ap, without = np.zeros(len(rows)), np.zeros(len(rows), dtype=bool)
        precision, recall = np.zeros((len(rows), len(plan.ks))), np.zeros((len(rows), len(plan.ks)))
        curve = np.zeros(len(levels))
        for first in range(0, len(rows), self._block):
            for found in self._engine.measure(
                rows[first : first + self._block], self._local.worker, ap=plain, groups=listed
            ):
                at = place[found.rows]
                without[at] = found.relevant == 0
                if found.ap is not None:
                    ap[at] = found.ap
                if found.groups is None:
                    continue
                groups = found.groups.arranged(plan.ties)
                if not plain:
                    ap[at] = average_precisions(groups, self._harmonic, plan.k, plan.denominator)
                if plan.ks:
                    top = groups.top(max(plan.ks))
                    precision[at] = precision_of(top, plan.ks)
                    recall[at] = recall_of(top, plan.ks)
                if len(levels):
                    for line in interpolated_precision(
                        groups, levels
                    ):  # one by one, so that results do not depend on blocks
                        curve += line
        return Measured(rows, ap, without, precision, recall, curve)

    def result(self, measured: Sequence[Measured]) -> RankingResult:
        """Combine the measures of all tasks, in order."""
        plan, n_queries = self.plan, self.n_queries
        ap, without = np.zeros(n_queries), np.zeros(n_queries, dtype=bool)
        precision, recall = np.zeros((n_queries, len(plan.ks))), np.zeros((n_queries, len(plan.ks)))
        for one in measured:
            ap[one.rows], without[one.rows] = one.ap, one.without
            precision[one.rows], recall[one.rows] = one.precision, one.recall
        curves = [one.curve for one in measured]
        return result_of(
            ap,
            without,
            precision,
            recall,
            plan.ks,
            self._levels,
            np.sum(curves, axis=0) / n_queries if curves else np.zeros(len(self._levels)),
            n_database=self.n,
            n_distinct=self.n_distinct,
            ties=plan.ties,
            k=plan.k,
            denominator=plan.denominator,
        )


def result_of(  # noqa: PLR0913
    ap: Floats,
    without: NDArray[np.bool_],
    precision: Floats,
    recall: Floats,
    ks: Sequence[int],
    levels: Floats,
    curve: Floats,
    *,
    n_database: int,
    n_distinct: int,
    ties: Ties,
    k: int | None,
    denominator: Denominator,
) -> RankingResult:
    """Combine measures per query into one result.

    Args:
        ap: [Q]. without: [Q], queries without any relevant item.
        precision, recall: [Q, len(ks)].
        levels, curve: [L], the mean precision-recall curve.
    """
    n_queries, missing = len(ap), int(without.sum())
    notes = (f"{missing:,} of {n_queries:,} queries have no relevant item and count 0",) if missing else ()
    return RankingResult(
        map=float(ap.mean()) if n_queries else 0.0,
        ap=ap,
        precision={at: float(v) for at, v in zip(ks, _means(precision), strict=True)},
        recall={at: float(v) for at, v in zip(ks, _means(recall), strict=True)},
        pr_recall=levels,
        pr_precision=curve,
        n_queries=n_queries,
        n_database=n_database,
        n_distinct=n_distinct,
        queries_without_relevant=missing,
        convention=convention("mAP", ties, k, denominator),
        notes=notes,
    )


def _means(values: Floats) -> Floats:
    result: Floats = values.mean(axis=0) if len(values) else np.zeros(values.shape[1])
    return result


def _excluded(exclude: ArrayLike | None, n_queries: int, database: _Database) -> Ints | None:
    """Excluded rows as indices into the ranked rows; -1 if none (or not ranked anyway)."""
    if exclude is None:
        return None
    given = np.asarray(exclude)
    if given.shape != (n_queries,) or given.dtype.kind not in "iu":
        raise DataError(f"exclude must be {n_queries:,} database rows (or -1), one per query")
    if n_queries and (given.min() < -1 or given.max() >= database.total):
        raise DataError(f"exclude names rows outside the database of {database.total:,}")
    position = np.full(database.total + 1, -1, dtype=np.int64)  # the last entry is for -1
    position[database.rows] = np.arange(len(database.rows))
    result: Ints = position[given]
    return result


__all__ = [
    "RECALL_LEVELS",
    "Measured",
    "RankingResult",
    "measure_codes",
    "rank_codes",
    "rank_features",
    "rank_scores",
    "result_of",
    "usable_cores",
]

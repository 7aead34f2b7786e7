"""Rank a whole database for many queries, exactly, tie-aware, in bounded memory.

Average precision over U distinct codes needs a sort of U scores, not N. So the database is grouped by code, and items are counted by
(code, label set). The 32-bit integer scores of a query (:mod:`.scorers`) are sorted together with what identifies them in the low bits
(several times faster than ``argsort``), one loop finds the groups of equal scores (:mod:`.kernels`), and all measures come from these in
closed form (:mod:`.ties`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self, TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from ..progress import stage
from .grouping import Bytes, LabelsLike, PackedLabels, distinct_rows, label_rows, same_width
from .scorers import LAST, Fill, Keys, ScoreFunction, Tables, scores_of
from .tables import Shown
from .ties import (
    Convention,
    Denominator,
    Floats,
    Groups,
    Ints,
    Ties,
    average_precisions,
    harmonic_numbers,
    interpolated_precision,
    precision_and_recall,
)

RowFunction = Callable[[Ints], NDArray[Any]]
"""``(query rows int64 [q]) -> scores [q, N]`` for all database rows, larger is better."""

_TASK = 128  # queries per task; fixed, so that results do not depend on the number of threads
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

    def rows(self) -> list[dict[str, Any]]:
        """One row, for a table."""
        at = {f"P@{k}": v for k, v in self.precision.items()} | {f"R@{k}": v for k, v in self.recall.items()}
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


@dataclass(frozen=True, eq=False)
class Measured:
    """Measures of some queries, zero where not measured yet.

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

    @classmethod
    def empty(cls, rows: Ints, convention: Convention) -> Self:
        """For these queries."""
        n, at = len(rows), len(convention.ks)
        precision, recall = np.zeros((n, at)), np.zeros((n, at))
        return cls(rows, np.zeros(n), np.zeros(n, bool), precision, recall, np.zeros(len(convention.points)))


def usable_cores() -> int:
    """Number of cores available to this process: the default of ``threads`` on the command line."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def rank_codes(
    scorer: Tables | ScoreFunction,
    codes: Bytes,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    **options: Unpack[Options],
) -> RankingResult:
    """Rank a database of codes for every query and measure the rankings. Items are relevant if they share a label with
    the query.

    Args:
        scorer: tables float32 [Q, M, K] (score = sum over m of tables[q, m, code_m]), or a function
            ``(query rows int64 [q], distinct codes uint8 [U, W]) -> scores [q, U]``, larger is better, for other codes. Each distinct
            code is scored once, so equal codes have equal scores. Table entries are rounded to 2^-29 of the query's largest
            possible score and summed exactly (float32 sums are 32 times coarser).
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
    ranking = Ranking(scorer, codes, query_labels, database_labels, **options)
    return ranking.result(ranking.measure(ranking.tasks))


def rank_scores(
    scores: NDArray[Any] | RowFunction,
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    **options: Unpack[Options],
) -> RankingResult:
    """:func:`rank_codes` from scores, without codes: for float features, class probabilities or distances.

    ``scores`` is [Q, N], or a function ``(query rows int64 [q]) -> scores [q, N]`` called for blocks of queries. Scores must fit
    float32 exactly (float32, float16, small integers), as rounding would create ties. Negate distances.

    Examples:
        >>> scores = np.array([[3.0, 2.0, 1.0]], np.float32)
        >>> rank_scores(scores, query_labels=[1], database_labels=[0, 1, 1], ks=[2]).precision
        {2: 0.5}
    """
    n = _length(database_labels)
    function: RowFunction
    if callable(scores):
        function = scores
    else:
        table = np.asarray(scores)
        if table.shape != (_length(query_labels), n):
            raise DataError(
                f"scores {table.shape} must be [{_length(query_labels):,} queries, {n:,} database items]"
            )
        function = table.__getitem__
    # Every item has a code of its own: its number, whose bytes are in the order of the numbers.
    codes = np.arange(n, dtype=">u4").view(np.uint8).reshape(n, 4)
    return rank_codes(lambda queries, _: function(queries), codes, query_labels, database_labels, **options)


class Ranking:
    """A ranking split into tasks of some queries each, to run here or elsewhere.

    Items are ranked as *entries*: distinct codes with their counts; or single items, if codes hardly repeat, as keys that hold relevance
    sort faster than keys that hold the entry's number; or, with ties="id", single items in the order of ties.
    """

    def __init__(
        self,
        scorer: Tables | ScoreFunction,
        codes: Bytes,
        query_labels: LabelsLike,
        database_labels: LabelsLike,
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
        self.n_queries = _length(query_labels) if callable(scorer) else len(scorer)
        self._queries, self._labels = same_width(
            label_rows(query_labels, "query labels", self.n_queries),
            label_rows(database_labels, "database labels", self.n),
        )
        self._exclude = _excluded(exclude, self.n_queries, self.n)
        distinct, entry_of = distinct_rows(np.ascontiguousarray(codes))
        self.n_distinct = len(distinct)
        self._ordered = self.convention.ties == "id"
        self._by_item = not (callable(scorer) or self._ordered) and self.n_distinct >= _BY_ITEM * self.n
        self._scores = scores_of(scorer, codes if self._by_item else distinct)
        if self._by_item:
            entry_of = np.arange(self.n)
        elif self._ordered:  # the items are numbered in the order of ties
            order = _order(ids, self.n)
            self._scores = _of_items(self._scores, self.n_distinct, entry_of[order])
            entry_of = np.argsort(order)
        self._entry_of, self._sizes = entry_of, np.bincount(entry_of)
        # Items are counted by (entry, label set); every entry has an item.
        sets, set_of = distinct_rows(self._labels)
        pairs, self._counts = np.unique(entry_of * len(sets) + set_of, return_counts=True)
        entries, self._set_of = np.divmod(pairs, len(sets))
        self._set_words, self._query_words = _words(sets), _words(self._queries)
        self._starts = np.searchsorted(entries, np.arange(len(self._sizes)))
        # Queries are sorted by label set, so that relevant items are counted once per set.
        _, self._query_set = distinct_rows(self._queries)
        self._by_set = np.argsort(self._query_set, kind="stable")
        width = len(self._sizes)
        self._block = max(1, min(max(_CACHE // width, _TOGETHER), memory // threads // (_BYTES * width), 64))
        self._harmonic = harmonic_numbers(self.n)

    @property
    def tasks(self) -> range:
        """The first query of each task."""
        return range(0, self.n_queries, _TASK)

    def measure(self, tasks: Sequence[int]) -> list[Measured]:
        """Measures of these tasks, in order."""
        found = []
        queries = sum(min(_TASK, self.n_queries - start) for start in tasks)
        with ThreadPoolExecutor(self._threads) as pool, stage("ranking", queries, "query") as ranking:
            for one in map(self._task, tasks) if self._threads == 1 else pool.map(self._task, tasks):
                found.append(one)
                ranking.advance(len(one.rows))
        return found

    def _task(self, start: int) -> Measured:
        wanted = self.convention
        out = Measured.empty(self._by_set[start : start + _TASK], wanted)
        for at, tied in self._groups(out.rows):
            groups = tied.arranged(wanted.ties)
            out.without[at] = groups.relevant == 0
            out.ap[at] = average_precisions(groups, self._harmonic, wanted.k, wanted.denominator)
            if wanted.ks:
                out.precision[at], out.recall[at] = precision_and_recall(groups, wanted.ks)
            if len(wanted.points):
                # added one by one, so that results do not depend on blocks
                for line in interpolated_precision(groups, wanted.points):
                    out.curve[:] += line
        return out

    def _groups(self, queries: Ints) -> Iterator[tuple[slice, Groups]]:
        """The tie groups of some of the queries at a time, which are sorted by label set."""
        from .kernels import tie_groups

        width, label_set = len(self._sizes), -1
        hits, sizes, numbers = self._sizes, self._sizes.copy(), np.arange(width)
        scores, out = np.empty((self._block, width), np.int32), np.empty((4, self._block * width), np.int64)
        for first in range(0, len(queries), self._block):
            block = queries[first : first + self._block]
            self._scores(block, scores[: len(block)])
            ends, relevant = [0], np.empty(len(block), np.int64)
            for i, query in enumerate(block.tolist()):
                if label_set != self._query_set[query]:
                    label_set, hits = self._query_set[query], self._hits(query)
                    bits = hits.astype(np.int32)
                item, entry, hit = self._without(query)
                hits[entry] -= hit
                sizes[entry] -= item >= 0
                relevant[i], keys = hits.sum(), scores[i]
                if self._by_item:
                    keys |= bits
                    if item >= 0:
                        keys[item] = LAST - 1  # behind all others and not relevant: as if absent
                else:
                    keys = scores[i].astype(np.int64) << 32 | numbers
                keys.sort()
                ends.append(tie_groups(keys, hits, sizes, self._by_item, self._ordered, out, ends[-1]))
                hits[entry] += hit
                sizes[entry] += item >= 0
            before, size, hits_before, found = out[:, : ends[-1]]
            row = np.repeat(np.arange(len(block)), np.diff(ends))
            yield (
                slice(first, first + len(block)),
                Groups(len(block), row, before, size, hits_before, found, relevant),
            )

    def _hits(self, query: int) -> Ints:
        """[U] items of each entry that share a label with the query."""
        meets = np.any(self._set_words & self._query_words[:, query, None], axis=0)
        return np.add.reduceat(self._counts * meets[self._set_of], self._starts)

    def _without(self, query: int) -> tuple[int, int, int]:
        """The item excluded for a query (or -1), its entry, and 1 if it would be relevant."""
        item = -1 if self._exclude is None else int(self._exclude[query])
        hit = item >= 0 and bool((self._labels[item] & self._queries[query]).any())
        return item, int(self._entry_of[item]), int(hit)

    def result(self, measured: Sequence[Measured]) -> RankingResult:
        """Combine the measures of all tasks, in order."""
        return result_of(measured, self.convention, self.n_queries, self.n, self.n_distinct)


def result_of(
    measured: Sequence[Measured], convention: Convention, n_queries: int, n_database: int, n_distinct: int
) -> RankingResult:
    """Combine measures of all queries, in parts, into one result."""
    whole = Measured.empty(np.arange(n_queries), convention)
    for one in measured:
        whole.ap[one.rows], whole.without[one.rows] = one.ap, one.without
        whole.precision[one.rows], whole.recall[one.rows] = one.precision, one.recall
    some = max(n_queries, 1)
    return RankingResult(
        map=float(whole.ap.sum() / some),
        ap=whole.ap,
        precision=dict(zip(convention.ks, (whole.precision.sum(axis=0) / some).tolist(), strict=True)),
        recall=dict(zip(convention.ks, (whole.recall.sum(axis=0) / some).tolist(), strict=True)),
        pr_recall=convention.points,
        pr_precision=sum((one.curve for one in measured), start=whole.curve) / some,
        n_queries=n_queries,
        n_database=n_database,
        n_distinct=n_distinct,
        queries_without_relevant=int(whole.without.sum()),
        convention=str(convention),
    )


def _length(labels: LabelsLike) -> int:
    return len(labels.packed if isinstance(labels, PackedLabels) else labels)


def _of_items(scores: Fill, n_codes: int, code_of: Ints) -> Fill:
    """The scores of items, from those of their codes."""

    def fill(queries: Ints, out: Keys) -> None:
        of_codes = np.empty((len(queries), n_codes), dtype=np.int32)
        scores(queries, of_codes)
        np.take(of_codes, code_of, axis=1, out=out, mode="clip")

    return fill


def _order(ids: ArrayLike | None, n: int) -> Ints:
    """The items in the order of their ids."""
    if ids is None:
        return np.arange(n)
    key = np.asarray(ids)
    if key.shape != (n,) or key.dtype.kind not in "iu":
        raise DataError(f"ids must be {n:,} integers, one per database row")
    if len(np.unique(key)) != n:
        raise DataError("ids must differ: ties cannot be ordered by equal ids")
    return np.argsort(key)


def _excluded(exclude: ArrayLike | None, n_queries: int, n: int) -> Ints | None:
    if exclude is None:
        return None
    given = np.asarray(exclude)
    if given.shape != (n_queries,) or given.dtype.kind not in "iu":
        raise DataError(f"exclude must be {n_queries:,} database rows (or -1), one per query")
    if n_queries and (given.min() < -1 or given.max() >= n):
        raise DataError(f"exclude names rows outside the database of {n:,}")
    return given.astype(np.int64)


def _words(rows: Bytes) -> NDArray[np.uint64]:
    """Rows of bytes [N, W] as columns of 64-bit words [ceil(W / 8), N]."""
    return np.ascontiguousarray(np.pad(rows, ((0, 0), (0, -rows.shape[1] % 8))).view(np.uint64).T)

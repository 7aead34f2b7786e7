"""Retrieval measures as pure functions, tie-aware, with their convention named.

Higher scores are better. Queries without relevant items count 0 and are reported in :attr:`Measure.without_relevant`.

>>> import numpy as np
>>> scores = np.array([[3.0, 2.0, 2.0, 1.0]])
>>> relevant = np.array([[False, True, False, True]])
>>> round(average_precision(scores, relevant).mean, 4)
0.4583

The tie is at ranks 2 and 3, so this is the mean of (1/2 + 2/4)/2 and (1/3 + 2/4)/2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .ties import (
    Denominator,
    Floats,
    Groups,
    Ints,
    Ties,
    average_precisions,
    check_cut,
    check_ties,
    convention,
    found_at,
    groups_of_row,
    harmonic_numbers,
    interpolated_precision,
)

RECALL_LEVELS: Floats = np.linspace(0.0, 1.0, 21)


@dataclass(frozen=True)
class Measure:
    """Values of a measure, one row per query, and how they were computed."""

    values: Floats
    """[Q], or [Q, len(ks)] for measures at several k."""
    convention: str
    without_relevant: int
    """Queries without any relevant item; they count 0."""

    @property
    def mean(self) -> float:
        """The mean over queries (and over k, if there are several)."""
        return float(self.values.mean()) if self.values.size else 0.0


@dataclass(frozen=True)
class Curve:
    """Precision over recall, one row per query."""

    recall: Floats
    """[L] the recall levels, or [Q, N] the expected recall at each rank."""
    precision: Floats
    """[Q, L] or [Q, N]."""
    convention: str
    without_relevant: int


def average_precision(
    scores: ArrayLike,
    relevant: ArrayLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ids: ArrayLike | None = None,
) -> Measure:
    """Average precision of each query.

    Args:
        scores: [Q, N] or [N], larger is better.
        relevant: bool, of the same shape.
        ties: "expected" value over random order within ties (closed form, McSherry & Najork 2008), "id"
            order, or the order that puts relevant items first ("best") or last ("worst"). With the
            denominator "relevant-in-top-k" the last two are not bounds: another relevant item may lower that
            quotient.
        k: cut the ranking at rank ``k`` (mAP@k); None: the full ranking.
        denominator: "relevant" (all relevant items), or with ``k`` "relevant-in-top-k" or "min(k, relevant)".
        ids: [N] for ties="id"; default: the row number.

    Raises:
        UsageError: unknown convention or ``k`` below 1. DataError: different shapes, or scores that are not
            finite.

    Examples:
        >>> scores, relevant = [3.0, 2.0, 2.0, 1.0], [False, True, False, True]
        >>> [round(average_precision(scores, relevant, ties=ties).mean, 4) for ties in ("worst", "expected", "best")]
        [0.4167, 0.4583, 0.5]
    """
    check_cut(k, denominator)
    groups, length = _groups(scores, None, relevant, ties, ids)
    values = average_precisions(groups, harmonic_numbers(length), k, denominator)
    return Measure(values, convention("mAP", ties, k, denominator), _without(groups))


def average_precision_grouped(
    scores: ArrayLike,
    counts: ArrayLike,
    hits: ArrayLike,
    *,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
) -> Measure:
    """:func:`average_precision` of items grouped by code: sorts U scores instead of N.

    Args:
        scores: [Q, U] or [U] score of each distinct code. Codes with equal scores tie, too.
        counts: [U] or [Q, U] items with that code (n_u).
        hits: [Q, U] or [U] relevant items among them (r_u <= n_u).
        ties: as for :func:`average_precision`, without "id".

    Raises:
        UsageError: unknown convention. DataError: invalid shapes or counts.

    Examples:
        >>> round(average_precision_grouped([3.0, 2.0, 1.0], counts=[1, 2, 1], hits=[0, 1, 1]).mean, 4)
        0.4583
    """
    check_cut(k, denominator)
    if ties == "id":
        raise UsageError(
            "ties='id' needs individual items: use average_precision, or rank_codes(..., ties='id')"
        )
    groups, length = _groups(scores, counts, hits, ties, None)
    values = average_precisions(groups, harmonic_numbers(length), k, denominator)
    return Measure(values, convention("mAP", ties, k, denominator), _without(groups))


def precision_at_k(
    scores: ArrayLike,
    relevant: ArrayLike,
    ks: Sequence[int],
    *,
    ties: Ties = "expected",
    ids: ArrayLike | None = None,
) -> Measure:
    """[Q, len(ks)] share of relevant items among the top k (divided by k even if the database is smaller).

    Examples:
        >>> precision_at_k([3.0, 2.0, 2.0, 1.0], [False, True, False, True], [2, 4]).values.tolist()
        [[0.25, 0.5]]
    """
    groups, _ = _groups(scores, None, relevant, ties, ids)
    return Measure(precision_of(groups, ks), convention("precision at k", ties), _without(groups))


def recall_at_k(
    scores: ArrayLike,
    relevant: ArrayLike,
    ks: Sequence[int],
    *,
    ties: Ties = "expected",
    ids: ArrayLike | None = None,
) -> Measure:
    """[Q, len(ks)] share of all relevant items in the top k; 0 without relevant items.

    Examples:
        >>> recall_at_k([3.0, 2.0, 2.0, 1.0], [False, True, False, True], [2, 4]).values.tolist()
        [[0.25, 1.0]]
    """
    groups, _ = _groups(scores, None, relevant, ties, ids)
    return Measure(recall_of(groups, ks), convention("recall at k", ties), _without(groups))


def pr_curve(
    scores: ArrayLike,
    relevant: ArrayLike,
    *,
    levels: ArrayLike | None = RECALL_LEVELS,
    ties: Ties = "expected",
    ids: ArrayLike | None = None,
) -> Curve:
    """Precision over recall.

    Args:
        levels: recall levels in [0, 1] for interpolated precision (the maximum at that recall or beyond, so that
            curves can be averaged), or None for expected precision and recall at every rank.
    """
    groups, length = _groups(scores, None, relevant, ties, ids)
    if levels is not None:
        points = check_levels(levels)
        name = convention("PR curve, interpolated at fixed recall levels", ties)
        return Curve(points, interpolated_precision(groups, points), name, _without(groups))
    found = (
        np.stack([found_at(groups, k) for k in range(1, length + 1)], axis=1)
        if length
        else np.zeros((groups.rows, 0))
    )
    total = groups.relevant[:, None].astype(np.float64)
    recall = np.divide(found, total, out=np.zeros_like(found), where=total > 0)
    return Curve(
        recall, found / np.arange(1, length + 1), convention("PR curve, every rank", ties), _without(groups)
    )


def check_ks(ks: Sequence[int]) -> list[int]:
    """The k of precision and recall, as a list (:class:`UsageError` for one below 1)."""
    result = [int(k) for k in ks]
    for k in result:
        if k < 1:
            raise UsageError(f"k={k} is below 1: it must be at least 1")
    return result


def check_levels(levels: ArrayLike) -> Floats:
    """Recall levels as float64 [L] (:class:`UsageError` unless they rise within [0, 1])."""
    points = np.asarray(levels, dtype=np.float64)
    if (
        points.ndim != 1
        or not len(points)
        or not (0 <= points[0] <= points[-1] <= 1)
        or (np.diff(points) <= 0).any()
    ):
        raise UsageError("recall levels must rise within [0, 1], such as 0, 0.05, ..., 1")
    return points


def precision_of(groups: Groups, ks: Sequence[int]) -> Floats:
    """[rows, len(ks)] expected precision at each k, from tie groups."""
    columns = [found_at(groups, k) / k for k in check_ks(ks)]
    return np.stack(columns, axis=1) if columns else np.zeros((groups.rows, 0))


def recall_of(groups: Groups, ks: Sequence[int]) -> Floats:
    """[rows, len(ks)] expected recall at each k, from tie groups."""
    below = np.maximum(groups.relevant, 1)
    columns = [found_at(groups, k) / below for k in check_ks(ks)]
    return np.stack(columns, axis=1) if columns else np.zeros((groups.rows, 0))


def _without(groups: Groups) -> int:
    return int((groups.relevant == 0).sum())


def _groups(
    scores: ArrayLike, counts: ArrayLike | None, hits: ArrayLike, ties: Ties, ids: ArrayLike | None
) -> tuple[Groups, int]:
    """Check the arrays; tie groups of every row, and the length of the longest ranking."""
    check_ties(ties)
    s: NDArray[Any] = np.atleast_2d(np.asarray(scores))
    h: NDArray[Any] = np.atleast_2d(np.asarray(hits))
    if s.ndim != 2 or s.shape != h.shape:
        raise DataError(f"scores {s.shape} and relevance {h.shape} must have the same shape [queries, items]")
    if not np.isfinite(s).all():
        raise DataError("scores contain NaN or infinity: a ranking needs finite scores")
    if counts is None and h.dtype != bool and not np.isin(h, (0, 1)).all():
        raise DataError("relevance must be true/false (or 0/1) for each item")
    n: Ints | None = None
    if counts is not None:
        n = np.broadcast_to(np.asarray(counts), s.shape).astype(np.int64)
        if (n < 0).any() or (h < 0).any() or (h > n).any():
            raise DataError(
                "the number of relevant items of a code must be between 0 and its number of items: check counts and hits"
            )
    if s.dtype.kind != "f":
        s = s.astype(np.float64)  # so that it can be negated
    if ties == "id" and ids is not None:
        key = np.asarray(ids)
        if key.shape != s.shape[1:] or len(np.unique(key)) != len(key):
            raise DataError(f"ids must be {s.shape[1]} different numbers, one per item")
        order = np.argsort(key)
        s, h = s[:, order], h[:, order]
    h = h.astype(np.int64)
    parts = [
        groups_of_row(s[i], None if n is None else n[i], h[i], by_position=ties == "id")
        for i in range(len(s))
    ]
    row = np.repeat(np.arange(len(s)), [len(part[0]) for part in parts])
    before, size, hits_before, hit = (
        np.concatenate([part[j] for part in parts]) if parts else np.zeros(0, dtype=np.int64)
        for j in range(4)
    )
    groups = Groups(len(s), row, before, size, hits_before, hit, h.sum(axis=1)).arranged(ties)
    length = s.shape[1] if n is None else int(n.sum(axis=1).max(initial=0))
    return groups, length

"""Rankings with ties as lists of tie groups, and measures in closed form.

A code of 12 bits has 4,096 values for 54,000 images, so a ranking is mostly ties, and their order changes mAP by
points. This module works on *tie groups*: runs of items with equal scores. In a group of ``n`` items, ``r`` of them
relevant, after ``a`` items, ``b`` of them relevant, every order of the ``n`` is equally likely, and

    E[sum of precisions at the relevant items of the group]
        = r/n * sum_{i=1..n} (b + 1 + (i-1) (r-1)/(n-1)) / (a + i)
        = r/n * [ (b + 1 - p (a+1)) * (H(a+n) - H(a)) + p n ],      p = (r-1)/(n-1)  (0 for n = 1)

with the harmonic numbers H (McSherry & Najork, "Computing Information Retrieval Performance Measures
Efficiently in the Presence of Tied Scores", ECIR 2008). Cut at rank ``k``, the sum and
both terms end at ``t = min(n, k-a)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError

Ties = Literal["expected", "id", "best", "worst"]
Denominator = Literal["relevant", "relevant-in-top-k", "min(k, relevant)"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_TIE_NAMES = {
    "expected": "expected value over random order within ties",
    "id": "ties by id",
    "best": "relevant items first within ties",
    "worst": "relevant items last within ties",
}
_DENOMINATOR_NAMES = {
    "relevant": "all relevant items",
    "relevant-in-top-k": "the relevant items in the top k",
    "min(k, relevant)": "min(k, all relevant items)",
}

RECALL_LEVELS: Floats = np.linspace(0.0, 1.0, 21)


@dataclass
class Convention:
    """What is measured of rankings, and how.

    Raises:
        UsageError: an unknown or contradictory value.
    """

    ties: Ties = "expected"
    """"expected" value over random order within equal scores, order of "id", or relevant items first ("best") or last ("worst")."""
    k: int | None = None
    """Average precision of the first k ranks (mAP@k) instead of the full ranking."""
    denominator: Denominator = "relevant"
    """Of average precision: all "relevant" items; or with ``k`` "relevant-in-top-k" or "min(k, relevant)"."""
    ks: Sequence[int] = ()
    """The k of precision and recall."""
    levels: ArrayLike | None = None
    """Rising recall levels in [0, 1] of the mean precision-recall curve, such as :data:`RECALL_LEVELS`; None: no curve."""

    def __post_init__(self) -> None:
        self.ks = list(self.ks)
        self.points: Floats = np.asarray(() if self.levels is None else self.levels, dtype=np.float64)
        if self.ties not in get_args(Ties):
            raise UsageError(f"ties={self.ties!r} is unknown: use one of {', '.join(get_args(Ties))}")
        if self.denominator not in get_args(Denominator):
            raise UsageError(
                f"denominator={self.denominator!r} is unknown: use one of {get_args(Denominator)}"
            )
        for k in (*self.ks, *([] if self.k is None else [self.k])):
            if not isinstance(k, int | np.integer) or k < 1:
                raise UsageError(f"k={k!r}: it must be a whole number, at least 1")
        if self.k is None and self.denominator != "relevant":
            raise UsageError(f"denominator={self.denominator!r} belongs to mAP@k: give k, or use 'relevant'")
        p = self.points
        if p.ndim != 1 or not ((p >= 0) & (p <= 1)).all() or not (np.diff(p) > 0).all():
            raise UsageError("recall levels must rise within [0, 1], such as 0, 0.05, ..., 1")

    def __str__(self) -> str:
        """One line for output."""
        start = "mAP, full ranking" if self.k is None else f"mAP@{self.k}, top {self.k} of the ranking"
        return f"{start}, divided by {_DENOMINATOR_NAMES[self.denominator]}, {_TIE_NAMES[self.ties]}"


def harmonic_numbers(n: int) -> Floats:
    """H(0), H(1), ..., H(n) as float64 [n + 1], correct to one or two units in the last place."""
    table = np.zeros(n + 1, dtype=np.float64)
    step = 1 << 20  # in blocks, as extended precision is twice as wide
    carry = np.longdouble(0.0)
    for start in range(1, n + 1, step):
        stop = min(n + 1, start + step)
        sums = np.cumsum(1 / np.arange(start, stop, dtype=np.longdouble)) + carry
        table[start:stop] = sums
        carry = sums[-1]
    return table


@dataclass(frozen=True)
class Groups:
    """The tie groups with relevant items of several rankings, sorted by ranking and rank.

    Groups without relevant items contribute to no measure and are omitted; ``before`` still counts their items.
    """

    rows: int
    """Number of rankings."""
    row: Ints
    """[G] ranking of each group; ascending."""
    before: Ints
    """[G] items ranked above the group (a)."""
    size: Ints
    """[G] items in the group (n)."""
    hits_before: Ints
    """[G] relevant items ranked above the group (b)."""
    hits: Ints
    """[G] relevant items in the group (r >= 1)."""
    relevant: Ints
    """[rows] relevant items in the whole ranking (R)."""

    @property
    def fields(self) -> tuple[Ints, Ints, Ints, Ints]:
        """a, n, b and r."""
        return self.before, self.size, self.hits_before, self.hits

    def top(self, k: int) -> Groups:
        """The groups that overlap the first ``k`` ranks, on which measures at ``k`` depend."""
        near = np.flatnonzero(self.before < k)
        row, before, size = self.row[near], self.before[near], self.size[near]
        return Groups(self.rows, row, before, size, self.hits_before[near], self.hits[near], self.relevant)

    def arranged(self, ties: Ties) -> Groups:
        """Put the relevant items of each group first (``best``) or last (``worst``); otherwise unchanged.

        The relevant part of a group is a group in which every item is relevant, so the closed forms for random order apply
        to fixed orders, too.
        """
        if ties == "best":
            before = self.before
        elif ties == "worst":
            before = self.before + self.size - self.hits
        else:
            return self
        return Groups(self.rows, self.row, before, self.hits, self.hits_before, self.hits, self.relevant)


def precision_sums(groups: Groups, harmonic: Floats, k: int | None = None) -> Floats:
    """[G] expected sum of the precisions at each group's relevant items, up to rank ``k``: the closed form of the module docstring.

    ``harmonic``: :func:`harmonic_numbers` up to at least the length of the ranking.
    """
    a, n, b, r = groups.fields
    t = n if k is None else np.clip(k - a, 0, n)
    after = a + 1.0
    # The difference of two sums of about log(a) loses precision; a single rank avoids it.
    spread = np.where(t == 1, 1.0 / after, harmonic.take(a + t) - harmonic.take(a))
    slope = (r - 1.0) / np.maximum(n - 1.0, 1.0)
    result: Floats = ((b + 1.0 - slope * after) * spread + slope * t) * r / n
    return result


def found_at(groups: Groups, k: int) -> Floats:
    """[rows] expected number of relevant items in the top ``k``."""
    near = groups.top(k)
    weights: Floats = near.hits * (np.minimum(k - near.before, near.size) / near.size)
    return np.bincount(near.row, weights=weights, minlength=groups.rows).astype(np.float64)


def precision_and_recall(groups: Groups, ks: Sequence[int]) -> tuple[Floats, Floats]:
    """Expected precision and recall at each k, [rows, len(ks)] each; 0 without relevant items."""
    found = np.zeros((groups.rows, len(ks)))
    near = groups.top(max(ks, default=0))
    for column, k in enumerate(ks):
        found[:, column] = found_at(near, k)
    return found / np.asarray(ks, dtype=np.float64), found / np.maximum(groups.relevant, 1)[:, None]


def average_precisions(groups: Groups, harmonic: Floats, k: int | None, denominator: Denominator) -> Floats:
    """[rows] expected average precision; 0 for rankings without relevant items (in the top k).

    With the denominator "relevant-in-top-k" both numerator and denominator are random if rank ``k`` is inside a group.
    The value is the expectation of their ratio: a sum over the hypergeometric number of relevant items above the cut,
    given which their ranks are uniform.
    """
    terms = precision_sums(groups, harmonic, k)
    totals = np.bincount(groups.row, weights=terms, minlength=groups.rows)
    relevant = groups.relevant.astype(np.float64)
    if k is None or denominator == "relevant":
        below = relevant
    elif denominator == "min(k, relevant)":
        below = np.minimum(relevant, k)
    else:
        below = found_at(groups, k)
    result = np.divide(totals, below, out=np.zeros(groups.rows), where=below > 0)
    if k is not None and denominator == "relevant-in-top-k":
        cut = (groups.before < k) & (k < groups.before + groups.size) & (groups.hits < groups.size)
        above = np.bincount(groups.row, weights=np.where(cut, 0.0, terms), minlength=groups.rows)
        for g in np.flatnonzero(cut):  # at most one per ranking
            result[groups.row[g]] = _cut_group(groups, int(g), float(above[groups.row[g]]), harmonic, k)
    return result


def _cut_group(groups: Groups, g: int, above: float, harmonic: Floats, k: int) -> float:
    """E[AP@k / relevant in the top k] of the ranking whose group ``g`` straddles rank ``k``; ``above``: sum
    before it."""
    a, n, b, r = (int(field[g]) for field in groups.fields)
    t = k - a
    h = np.arange(max(0, t - (n - r)), min(r, t) + 1, dtype=np.int64)
    log_factorial = np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, n + 1, dtype=np.float64)))))

    def log_choose(top: int, bottom: Ints) -> Floats:
        value: Floats = log_factorial[top] - log_factorial[bottom] - log_factorial[top - bottom]
        return value

    weight = np.exp(log_choose(r, h) + log_choose(n - r, t - h) - log_choose(n, np.asarray([t])))
    weight /= weight.sum()
    inside = np.zeros(len(h))
    some = h > 0
    zeros = np.zeros(int(some.sum()), dtype=np.int64)
    sub = Groups(1, zeros, zeros + a, zeros + t, zeros + b, h[some], zeros[:1])
    inside[some] = precision_sums(sub, harmonic)
    found = b + h
    value = np.divide(above + inside, found, out=np.zeros(len(h)), where=found > 0)
    return float(weight @ value)


def interpolated_precision(groups: Groups, levels: Floats) -> Floats:
    """[rows, L] the highest expected precision at any rank whose expected recall reaches each level.

    Within a group the expected recall is linear and the expected precision monotone, so the maximum is at the first
    rank that reaches the level, the end of its group, or an end of a later group. Rankings without relevant items give 0.
    """
    rows, n_levels = groups.rows, len(levels)
    result = np.zeros((rows, n_levels))
    if not len(groups.row):
        return result
    a, n, b, r = groups.fields
    ends = (b + r) / (a + n)
    best = np.maximum(ends, (b + r / n) / (a + 1))
    later = np.empty_like(best)  # suffix maxima within each ranking
    bounds = np.searchsorted(groups.row, np.arange(rows + 1))
    for start, stop in itertools.pairwise(bounds):
        later[start:stop] = np.maximum.accumulate(best[start:stop][::-1])[::-1]
    # First group whose end reaches the level, for all rankings at once: keys ascend because hits do.
    stride = int(groups.relevant.max()) + 1
    keys = groups.row * stride + b + r
    wanted = np.maximum(levels[None, :] * groups.relevant[:, None], np.finfo(np.float64).tiny)
    whole = np.maximum(np.ceil(wanted - 1e-9), 1).astype(np.int64)
    some = groups.relevant > 0
    g = np.searchsorted(keys, (np.arange(rows)[:, None] * stride + whole)[some])
    rank = a[g] + np.maximum(np.ceil(n[g] * (wanted[some] - b[g]) / r[g] - 1e-9), 1)
    here = (b[g] + r[g] * ((rank - a[g]) / n[g])) / rank
    last = np.append(groups.row[1:] != groups.row[:-1], True)
    after = np.where(last[g], 0.0, np.append(later[1:], 0.0)[g])
    result[some] = np.maximum(np.maximum(here, ends[g]), after)
    return result

"""Compiled loops that measure a sorted ranking.

A code of 12 bits has 4,096 values for 54,000 images, so a ranking is mostly ties, and their order
changes mAP by points. So measures come from *tie groups*, runs of items with equal scores. In a
group of ``n`` items, ``r`` of them relevant, after ``a`` items, ``b`` of them relevant, every order
of the ``n`` is equally likely, and

    E[sum of precisions at the relevant items of the group]
        = r/n * sum_{i=1..n} (b + 1 + (i-1) (r-1)/(n-1)) / (a + i)
        = r/n * [ (b + 1 - p (a+1)) * (H(a+n) - H(a)) + p n ],      p = (r-1)/(n-1)  (0 for n = 1)

with the harmonic numbers H (McSherry & Najork, "Computing Information Retrieval Performance
Measures Efficiently in the Presence of Tied Scores", ECIR 2008). Cut at rank ``k``, the sum and
both terms end at ``t = min(n, k-a)``. Groups without relevant items contribute to no measure.

Ties and denominators are passed as their positions in :data:`.ties.Ties` and
:data:`.ties.Denominator`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled
from .ties import Doubles, Ints

_HIGH, _ENTRY = np.uint64(32), np.uint64((1 << 32) - 1)
_RADIX = 11  # bits that are sorted at a time: 2,048 counters fit the L1 cache
_DIGIT = np.uint64((1 << _RADIX) - 1)
_BEST, _WORST, _BY_ID = 1, 2, 3
_IN_TOP_K, _AT_MOST_K = 1, 2


@compiled
def add_entries(tables: NDArray[Any], codes: NDArray[Any]) -> Any:
    """Return the sums of the entries of tables int32 [M, K, q] that codes [U, M] name, [U, q]."""
    sums = np.zeros((len(codes), tables.shape[2]), np.int32)
    for i in range(len(codes)):
        row = sums[i]
        for m in range(len(tables)):
            entries = tables[m, codes[i, m]]
            for q in range(len(row)):
                row[q] += entries[q]
    return sums


@compiled
def sort_entries(scores: NDArray[Any], keys: NDArray[Any], buffer: NDArray[Any]) -> Any:
    """Sort the entries 0, 1, ... by their scores int32 [U]; equal ones stay in order.

    Returns keys, score << 32 | entry: one of the two uint64 [U] arrays. A radix sort: on some
    processors numpy's sort of integers takes seven times as long.
    """
    for entry in range(len(scores)):
        # Scores are moved to 0 and up, so that their bits are in their order.
        keys[entry] = np.uint64(np.int64(scores[entry]) + (1 << 31)) << _HIGH | np.uint64(entry)
    for p in range(3):
        shift = _HIGH + np.uint64(_RADIX * p)
        ends = np.zeros((1 << _RADIX) + 1, np.uint32)
        for key in keys:
            ends[((key >> shift) & _DIGIT) + np.uint64(1)] += np.uint32(1)
        for digit in range(1 << _RADIX):
            ends[digit + 1] += ends[digit]
        for key in keys:
            digit_of_key = (key >> shift) & _DIGIT
            buffer[ends[digit_of_key]] = key
            ends[digit_of_key] += np.uint32(1)
        keys, buffer = buffer, keys
    return keys


@compiled
def tie_groups(keys: NDArray[Any], counts: Ints, ties: int) -> Any:
    """Return the tie groups with relevant items of one ranking.

    Args:
        keys: uint64 [U], sorted, score << 32 | entry.
        counts: int64 [2, U], number of relevant items and of all items of each entry.
        ties: order within a group. The relevant part of a group is a group in which every item is
            relevant, so the closed forms for random order apply to "best" and "worst", too. With
            "id" each entry is a group.

    Returns:
        int64 [4, groups]: number of items before each group (a) and in it (n), of relevant items
        before it (b) and in it (r).
    """
    groups = np.empty((4, len(keys) + 1), np.int64)
    count, a, b, n, r = np.uint64(0), 0, 0, 0, 0
    current = keys[0] >> _HIGH
    for i in range(len(keys) + 1):
        key = keys[np.uint64(min(i, len(keys) - 1))]
        if key >> _HIGH != current or ties == _BY_ID or i == len(keys):
            # Every group is written, and overwritten by the next one if none of its items is
            # relevant: a branch would be mispredicted.
            groups[0, count] = a + n - r if ties == _WORST else a
            groups[1, count] = r if ties in (_BEST, _WORST) else n
            groups[2, count], groups[3, count] = b, r
            count += np.uint64(r > 0)
            a, b, n, r, current = a + n, b + r, 0, 0, key >> _HIGH
        r += counts[0, key & _ENTRY]
        n += counts[1, key & _ENTRY]
    return groups[:, :count]


@compiled
def _precisions(a: int, n: int, b: int, r: int, t: int, harmonic: Doubles) -> Any:
    """Return the expected sum of precisions at the relevant items among the first t of a group."""
    # The difference of two sums of about log(a) loses precision; a single rank avoids it.
    spread = 1.0 / (a + 1.0) if t == 1 else harmonic[a + t] - harmonic[a]
    slope = (r - 1.0) / max(n - 1.0, 1.0)
    return ((b + 1.0 - slope * (a + 1.0)) * spread + slope * t) * r / n


@compiled
def _cut_group(a: int, n: int, b: int, r: int, k: int, total: float, harmonic: Doubles) -> Any:
    """Return E[AP@k / relevant items in the top k] where rank k is inside a group.

    ``total`` is the sum of precisions before the group. Numerator and denominator are both random:
    the result is a sum over the hypergeometric number h of relevant items above the cut, given
    which their ranks are uniform.
    """
    t = k - a
    scale = math.lgamma(r + 1) + math.lgamma(n - r + 1) + math.lgamma(t + 1)
    scale += math.lgamma(n - t + 1) - math.lgamma(n + 1)
    weights, value = 0.0, 0.0
    for h in range(max(0, t + r - n), min(r, t) + 1):
        ways = math.lgamma(h + 1) + math.lgamma(r - h + 1) + math.lgamma(t - h + 1)
        weight = math.exp(scale - ways - math.lgamma(n - r - t + h + 1))
        precisions = _precisions(a, t, b, h, t, harmonic) if h else 0.0
        value += weight * (total + precisions) / max(b + h, 1)
        weights += weight
    return value / weights


@compiled
def average_precision(
    groups: Ints, relevant: int, harmonic: Doubles, k: int, denominator: int
) -> Any:
    """Return the expected average precision of the first k ranks; 0 if none of them is relevant."""
    total, hits = 0.0, 0.0
    for g in range(groups.shape[1]):
        a, n, b, r = groups[0, g], groups[1, g], groups[2, g], groups[3, g]
        t = min(k - a, n)
        if t <= 0:
            break
        if denominator == _IN_TOP_K and t < n and r < n:
            return _cut_group(a, n, b, r, k, total, harmonic)
        total += _precisions(a, n, b, r, t, harmonic)
        hits += r * (t / n)
    divisor = hits if denominator == _IN_TOP_K else float(relevant)
    divisor = min(divisor, float(k)) if denominator == _AT_MOST_K else divisor
    return total / divisor if divisor > 0 else 0.0


@compiled
def curves(groups: Ints, relevant: int, ks: Ints, levels: Doubles, out: Doubles) -> None:
    """Write points of the curves of a ranking to ``out``, float64 [len(ks) + L].

    First the expected number of relevant items among the first k ranks, for each k. Then the
    highest expected precision at any rank whose expected recall reaches each level. Within a group
    the expected recall is linear and the expected precision monotone, so the maximum is at the
    first rank that reaches the level, the end of its group, or an end of a later group. Rankings
    without relevant items give 0.
    """
    for i, k in enumerate(ks):
        for g in range(groups.shape[1]):
            a, n = groups[0, g], groups[1, g]
            if a >= k:
                break
            out[i] += groups[3, g] * (min(k - a, n) / n)
    needed = np.maximum(np.ceil(levels * relevant - 1e-9), 1.0)
    later, level = 0.0, len(levels) - 1
    for g in range(groups.shape[1] - 1, -1, -1):
        a, n, b, r = groups[0, g], groups[1, g], groups[2, g], groups[3, g]
        later = max(later, (b + r) / (a + n))
        while level >= 0 and b < needed[level]:
            rank = a + max(math.ceil(n * (levels[level] * relevant - b) / r - 1e-9), 1)
            out[len(ks) + level] = max((b + r * ((rank - a) / n)) / rank, later)
            level -= 1
        if n > 1:  # else the first rank is the end
            later = max(later, (b + r / n) / (a + 1))

"""A sorted ranking measured: loops compiled by Numba.

A code of 12 bits has 4,096 values for 54,000 images, so a ranking is mostly ties, and their order changes mAP by points. So measures come
from *tie groups*, runs of items with equal scores. In a group of ``n`` items, ``r`` of them relevant, after ``a`` items, ``b`` of them
relevant, every order of the ``n`` is equally likely, and

    E[sum of precisions at the relevant items of the group]
        = r/n * sum_{i=1..n} (b + 1 + (i-1) (r-1)/(n-1)) / (a + i)
        = r/n * [ (b + 1 - p (a+1)) * (H(a+n) - H(a)) + p n ],      p = (r-1)/(n-1)  (0 for n = 1)

with the harmonic numbers H (McSherry & Najork, "Computing Information Retrieval Performance Measures Efficiently in the Presence of Tied
Scores", ECIR 2008). Cut at rank ``k``, the sum and both terms end at ``t = min(n, k-a)``. Groups without relevant items contribute to no
measure.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled
from .ties import Floats, Ints

_ENTRY = np.uint64((1 << 32) - 1)
_SIGN = np.int64(1 << 31)
_RADIX, _PASSES = 11, 3  # bits sorted at a time: 2,048 counters fit the L1 cache
_DIGIT = np.uint64((1 << _RADIX) - 1)
_TINY = np.finfo(np.float64).tiny
BEST, WORST = 1, 2
"""Order within ties: relevant items first or last; other numbers: random."""
IN_TOP_K, AT_MOST_K = 1, 2
"""Denominators: the relevant items in the top k, or min(k, relevant items); other numbers: all relevant items."""


@compiled
def by_score(keys: NDArray[Any], spare: NDArray[Any], low: int) -> Any:
    """Keys in ascending order of their bits from ``low`` up, 32 of them; equal ones stay in order. Returns one of the two arrays.

    A radix sort: on some processors numpy's sort of integers takes five times as long.
    """
    # Indices are unsigned: signed ones would be tested for those that count from the end.
    counts = np.zeros((_PASSES, 1 << _RADIX), np.uint32)
    for key in keys:
        value = np.uint64((np.int64(key) >> np.int64(low)) + _SIGN)
        for p in range(_PASSES):
            counts[p, (value >> np.uint64(_RADIX * p)) & _DIGIT] += np.uint32(1)
    for p in range(_PASSES):
        places, shift = counts[p], np.uint64(_RADIX * p)
        before = np.uint32(0)
        for digit in range(1 << _RADIX):
            n = places[digit]
            places[digit] = before
            before += n
        for key in keys:
            value = np.uint64((np.int64(key) >> np.int64(low)) + _SIGN)
            place = places[(value >> shift) & _DIGIT]
            spare[place] = key
            places[(value >> shift) & _DIGIT] = place + np.uint32(1)
        keys, spare = spare, keys
    return keys


@compiled
def tie_groups(
    keys: NDArray[Any], hits: Ints, sizes: Ints, by_item: bool, ordered: bool, ties: int, out: Ints
) -> Any:
    """Write the tie groups with relevant items of one ranking.

    Args:
        keys: sorted; with ``by_item`` int32 [N], score << 1 | relevance of each item, else int64 [U], score << 32 | entry.
        hits, sizes: int64 [U], relevant items and items of each entry.
        ordered: equal scores are in the order of the entries, so each is a group of its own.
        ties: order within a group. The relevant part of a group is a group in which every item is relevant, so the closed forms for random
            order apply to "best" and "worst", too.
        out: int64 [4, U + 1]: items before each group (a), items in it (n), relevant items before it (b) and in it (r).

    Returns:
        The number of groups.
    """
    count, a, b, n, r = np.uint64(0), 0, 0, 0, 0
    shift = np.int64(1 if by_item else 32)
    last = np.int64(keys[0]) >> shift
    for i in range(len(keys) + 1):
        key: Any = np.int64(keys[np.uint64(min(i, len(keys) - 1))])
        score = key >> shift
        if score != last or ordered or i == len(keys):
            # Every group is written, and the next one over it if none of its items is relevant: no branch that cannot be foreseen.
            out[0, count] = a + n - r if ties == WORST else a
            out[1, count] = r if ties in (BEST, WORST) else n
            out[2, count], out[3, count] = b, r
            count += np.uint64(r > 0)
            a, b, n, r, last = a + n, b + r, 0, 0, score
        if by_item:
            n += 1
            r += key & 1
        else:
            entry = np.uint64(key) & _ENTRY
            n += sizes[entry]
            r += hits[entry]
    return count


@compiled
def _precisions(a: int, n: int, b: int, r: int, t: int, harmonic: Floats) -> Any:
    """Expected sum of the precisions at the relevant items among the first ``t`` of a group: the closed form above."""
    after = a + 1.0
    # The difference of two sums of about log(a) loses precision; a single rank avoids it.
    spread = 1.0 / after if t == 1 else harmonic[a + t] - harmonic[a]
    slope = (r - 1.0) / max(n - 1.0, 1.0)
    return ((b + 1.0 - slope * after) * spread + slope * t) * r / n


@compiled
def _share(a: int, b: int, h: int, t: int, above: float, harmonic: Floats) -> Any:
    """Average precision divided by the relevant items above the cut, ``h`` of which are in the group."""
    inside = _precisions(a, t, b, h, t, harmonic) if h else 0.0
    return (above + inside) / max(b + h, 1)


@compiled
def _cut_group(a: int, n: int, b: int, r: int, k: int, above: float, harmonic: Floats) -> Any:
    """E[AP@k / relevant items in the top k] where rank ``k`` is inside a group, after precisions of the sum ``above``.

    Numerator and denominator are both random: a sum over the hypergeometric number of relevant items above the cut, given which their
    ranks are uniform. Its weights follow from each other, beginning with the largest.
    """
    t = k - a
    rest = n - r - t
    low, high = max(0, -rest), min(r, t)
    h = mode = min(max((t + 1) * (r + 1) // (n + 2), low), high)
    weight, weights, value = 1.0, 0.0, 0.0
    while h <= high:
        weights += weight
        value += weight * _share(a, b, h, t, above, harmonic)
        weight *= (r - h) * (t - h) / ((h + 1) * (rest + h + 1))
        h += 1
    h, weight = mode, 1.0
    while h > low:
        weight *= h * (rest + h) / ((r - h + 1) * (t - h + 1))
        h -= 1
        weights += weight
        value += weight * _share(a, b, h, t, above, harmonic)
    return value / weights


@compiled
def average_precision(groups: Ints, relevant: int, harmonic: Floats, k: int, denominator: int) -> Any:
    """Expected average precision of the first ``k`` ranks; 0 without relevant items in them."""
    total, found = 0.0, 0.0
    for g in range(groups.shape[1]):
        a, n, b, r = groups[0, g], groups[1, g], groups[2, g], groups[3, g]
        t = min(k - a, n)
        if t <= 0:
            break
        if denominator == IN_TOP_K and t < n and r < n:
            return _cut_group(a, n, b, r, k, total, harmonic)
        total += _precisions(a, n, b, r, t, harmonic)
        found += r * (t / n)
    below = found if denominator == IN_TOP_K else float(relevant)
    if denominator == AT_MOST_K:
        below = min(below, float(k))
    return total / below if below > 0 else 0.0


@compiled
def found_at(groups: Ints, ks: Ints, out: Floats) -> None:
    """Write the expected number of relevant items among the first ``k`` ranks, for each k."""
    for i, k in enumerate(ks):
        for g in range(groups.shape[1]):
            a, n = groups[0, g], groups[1, g]
            if a >= k:
                break
            out[i] += groups[3, g] * (min(k - a, n) / n)


@compiled
def interpolated_precision(groups: Ints, relevant: int, levels: Floats, out: Floats) -> None:
    """Write the highest expected precision at any rank whose expected recall reaches each level.

    Within a group the expected recall is linear and the expected precision monotone, so the maximum is at the first rank that reaches the
    level, the end of its group, or an end of a later group. Rankings without relevant items give 0.
    """
    later, level = 0.0, len(levels) - 1
    for g in range(groups.shape[1] - 1, -1, -1):
        a, n, b, r = groups[0, g], groups[1, g], groups[2, g], groups[3, g]
        end = (b + r) / (a + n)
        while level >= 0:
            wanted = max(levels[level] * relevant, _TINY)
            if max(math.ceil(wanted - 1e-9), 1) <= b:
                break  # reached before this group
            rank = a + max(math.ceil(n * (wanted - b) / r - 1e-9), 1)
            out[level] = max((b + r * ((rank - a) / n)) / rank, end, later)
            level -= 1
        later = max(later, end, (b + r / n) / (a + 1))

"""Compiled loops of exact search in inverted lists.

The distinct codes are the *rows*, sorted by their codewords. The rows that begin with the same two
codewords are an inverted *list*, and those that begin with the same P codewords (the prefix, P from
0 to 4) are a *sub-list*. With P < 2 there is a single list::

    list l                                                 sub-lists first[l] ... first[l + 1] - 1
    sub-list s   names[s], its P codewords                 rows      ends[s] ... ends[s + 1] - 1
    row r        blocks[r // 64, :, r % 64], its code      members   starts[r] ... starts[r + 1] - 1
    member i     members[i], an id, ascending within a row

    block b      | row 64 b        | row 64 b + 1    | ... | row 64 b + 63    |
    column 0     | codewords 0, 1  | codewords 0, 1  | ... | codewords 0, 1   |   a byte each
    column 1     | codewords 2, 3  | codewords 2, 3  | ... | codewords 2, 3   |
    column T - 1 | ...

A byte has the first codeword in its lower half. With more than 16 codewords in a codebook a byte
has one codeword, so the prefix is empty, and there is one sub-list. Without starts all codes are
distinct, and row r is member r.

A query has a *look-up table* (LUT), float32 [M, K], the inner products of its sub-vectors and the
codewords, or their negative squared distances; and a *quantised* LUT (:mod:`.block_scan`). Its
*threshold* is the score that a result needs: the k-th best so far. The bound of a sub-list is the
LUT's sum for its name, plus the best entries of all other codebooks, plus a margin for the order of
float32 additions. Scores add in the order of :mod:`..codes.scores`, so they are equal to those of
brute force to the bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..compiled import BLOCK, compiled, inner
from .block_scan import Number, scan_block

DONE, TOGETHER, NOT_FINITE = np.uint8(0), np.uint8(1), np.uint8(2)
"""Status of a query after :func:`search`."""

# Constants have NumPy types, as Numba compiles a function anew for a literal number. Loops take the
# place of assignments to slices and of array methods, which take seconds to compile.
_EPS = float(np.finfo(np.float32).eps)
_ONLY = np.int64(0)  # index of the query in a group of one
_SMALLEST_SPAN = np.float32(2.0**-90)
_FINER = np.float32(0.97)  # a LUT is quantised again if that shrinks its span by this factor
_GROUP = np.int64(32)  # number of queries that scan the same rows one after the other
_CHUNK = np.int64(128 * BLOCK)  # number of rows that they scan in turn; these fit in a cache
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)  # all codes of a block
_PAIRS, _FOURS, _EIGHTS, _BYTES = (_ALL // np.uint64(divisor) for divisor in (3, 5, 17, 255))


class Lists(NamedTuple):
    """Codes in inverted lists, as drawn above.

    Attributes:
        codebooks: float32 [d, M, K].
        is_l2: whether a score is the negative squared distance, and not the inner product.
        prefix: P, the number of codewords that name a sub-list.
        first: int64 [lists + 1].
        names: uint8 [sub-lists, 2]; the first two codewords, if there are two, are in the first
            byte, and the others in the second.
        ends: int64 [sub-lists + 1]; all 0 if no member may be a result.
        blocks: uint8 [ceil(rows / 64), T, 64].
        starts: uint32 or int64 [rows + 1], or [0] where all codes are distinct.
        members: uint32 or int64 [n].
        mask: bool [n], the members that may be results, or [0] if all may.
    """

    codebooks: Floats
    is_l2: bool
    prefix: int
    first: Ids
    names: Codes
    ends: Ids
    blocks: Codes
    starts: NDArray[Any]
    members: NDArray[Any]
    mask: NDArray[np.bool_]


class Queries(NamedTuple):
    """The state of a group of G queries.

    Attributes:
        luts: float32 [G, M, K].
        name_luts: float32 [G, 256], the scores of the second bytes of sub-lists' names.
        quantised: uint8 [G, M + M % 2, 16].
        spans: float32 [G], range of scores that the quantised LUT covers, from the limit down.
        limits: float32 [G], upper bound of all scores.
        list_tails: float32 [G], upper bound of the score of the codewords after a list's key.
        tails: float32 [G], upper bound of the score of the codewords after a sub-list's name.
        margins: float32 [G], bound of the effect of the order of additions on a score.
        thresholds: float32 [G].
        counts: int64 [G], number of results so far.
        scores, ids: float32 and int64 [G, room], the results so far; if there is no more room, they
            are a heap, of which the worst result is the first.
    """

    luts: Floats
    name_luts: Floats
    quantised: NDArray[np.uint8]
    spans: Floats
    limits: Floats
    list_tails: Floats
    tails: Floats
    margins: Floats
    thresholds: Floats
    counts: Ids
    scores: Floats
    ids: Ids


# Look-up tables -----------------------------------------------------------------------------------


@compiled
def _new_queries(lists: Lists, G: Number, room: Number) -> Queries:
    """Allocate the state of G queries, with room for some results each."""
    _, M, K = lists.codebooks.shape
    return Queries(
        np.empty((G, M, K), np.float32),
        np.empty((G, 256), np.float32),
        np.zeros((G, M + M % 2, 16), np.uint8),
        np.empty(G, np.float32),
        np.empty(G, np.float32),
        np.empty(G, np.float32),
        np.empty(G, np.float32),
        np.empty(G, np.float32),
        np.empty(G, np.float32),
        np.empty(G, np.int64),
        np.empty((G, room), np.float32),
        np.empty((G, room), np.int64),
    )


@inner
def _fill_lut(query: Floats, codebooks: Floats, is_l2: Number, lut: Floats) -> Number:
    """Fill the LUT of a query, and return a bound of the absolute value of all scores.

    The bound is infinite if an entry of the LUT is not finite.
    """
    d, M, K = codebooks.shape
    for m in range(M):
        for k in range(K):
            lut[m, k] = 0
    for j in range(d):
        for m in range(M):
            x = query[m * d + j]
            if is_l2:
                for k in range(K):
                    lut[m, k] -= (x - codebooks[j, m, k]) * (x - codebooks[j, m, k])
            else:
                for k in range(K):
                    lut[m, k] += x * codebooks[j, m, k]
    size = np.float32(0)
    for m in range(M):
        largest = np.float32(0)
        for k in range(K):
            entry = abs(lut[m, k])
            largest = max(largest, entry if entry < np.float32(np.inf) else np.float32(np.inf))
        size += largest
    return size


@inner
def _largest(lut: Floats, m: Number) -> Number:
    """Return the largest entry of a codebook."""
    largest = lut[m, 0]
    for k in range(1, lut.shape[1]):
        largest = max(largest, lut[m, k])
    return largest


@inner
def _begin(lists: Lists, queries: Queries, g: Number, query: Floats, threshold: Number) -> Number:
    """Fill the state of a query except its quantised LUT, and return whether scores are finite."""
    P, lut, name_lut = lists.prefix, queries.luts[g], queries.name_luts[g]
    M, K = lut.shape
    size = _fill_lut(query, lists.codebooks, lists.is_l2, lut)
    margin = np.float32((2 * M + 8) * _EPS) * size
    best_name = np.float32(-np.inf)
    for name in range(256 if P == 4 else 16):
        name_lut[name] = 0
        if P == 4:
            exists = max(name >> 4, name & 15) < K
            name_lut[name] = lut[3, name >> 4] + lut[2, name & 15] if exists else -np.inf
        elif P % 2:
            name_lut[name] = lut[P - 1, name] if name < K else -np.inf
        best_name = max(best_name, name_lut[name])
    limit, tail = margin, margin
    for m in range(M):
        largest = _largest(lut, m)
        limit += largest
        if m >= P:
            tail += largest
    queries.margins[g], queries.limits[g] = margin, limit
    queries.tails[g], queries.list_tails[g] = tail, tail + best_name
    queries.thresholds[g], queries.counts[g] = threshold, 0
    return size < np.float32(np.inf)


@inner
def _quantise(lut: Floats, factor: Number, round_up: Number, quantised: Codes) -> None:
    """Fill a quantised LUT: distances from the best codewords times ``factor``, rounded."""
    M, K = lut.shape
    for m in range(M):
        largest = _largest(lut, m)
        for k in range(K):
            distance = min((largest - lut[m, k]) * factor, np.float32(255))
            truncated = np.int32(distance)
            quantised[m, k] = np.uint8(truncated + (round_up & (np.float32(truncated) < distance)))


@inner
def _quantise_to_threshold(queries: Queries, g: Number) -> None:
    """Quantise a query's LUT so that codes that reach the threshold have distances up to 254."""
    queries.spans[g] = max(queries.limits[g] - queries.thresholds[g], np.float32(0))
    if queries.luts.shape[2] <= 16:
        factor = np.float32(253.999) / max(queries.spans[g], _SMALLEST_SPAN)
        _quantise(queries.luts[g], factor, np.False_, queries.quantised[g])


@inner
def _list_score(lists: Lists, lut: Floats, key: Number) -> Number:
    """Return the score of a list's key, or 0 if lists have no key."""
    return lut[1, key >> 4] + lut[0, key & 15] if lists.prefix >= 2 else np.float32(0)


@inner
def _bound(lists: Lists, queries: Queries, g: Number, sublist: Number) -> Number:
    """Return an upper bound of the scores in a sub-list."""
    score = _list_score(lists, queries.luts[g], lists.names[sublist, 0])
    return score + queries.name_luts[g, lists.names[sublist, 1]] + queries.tails[g]


# Results ------------------------------------------------------------------------------------------


@inner
def _is_better(score: Number, item: Number, other_score: Number, other_item: Number) -> Number:
    """Return whether a result is better: its score is higher, or equal and its id is smaller."""
    return score > other_score or (score == other_score and item < other_item)


@inner
def _sift(scores: Floats, ids: Ids, i: Number, n: Number, score: Number, item: Number) -> None:
    """Put a result in place of result i of a heap of n, and move it down to where it belongs."""
    child = 2 * i + 1
    while child < n:
        right = child + 1
        if right < n and _is_better(scores[child], ids[child], scores[right], ids[right]):
            child = right
        if _is_better(scores[child], ids[child], score, item):
            break
        scores[i], ids[i] = scores[child], ids[child]
        i, child = child, 2 * child + 1
    scores[i], ids[i] = score, item


@inner
def _make_heap(scores: Floats, ids: Ids) -> None:
    """Reorder results to a heap, of which the worst result is the first."""
    for i in range(len(scores) // 2 - 1, -1, -1):
        _sift(scores, ids, np.int64(i), len(scores), scores[i], ids[i])


@inner
def _finish(queries: Queries, g: Number, D: Floats, ids: Ids) -> None:
    """Move the results of a query to float32 and int64 [k], best first, -inf and -1 if missing."""
    heap_scores, heap_ids, n = queries.scores[g], queries.ids[g], queries.counts[g]
    for i in range(n, len(D)):
        heap_scores[i], heap_ids[i] = -np.inf, -1
    if n < len(D):
        _make_heap(heap_scores, heap_ids)
    for last in range(len(D) - 1, -1, -1):
        D[last], ids[last] = heap_scores[0], heap_ids[0]
        score, item = heap_scores[last], heap_ids[last]
        _sift(heap_scores, heap_ids, np.int64(0), last, score, item)


@inner
def _enter(lists: Lists, queries: Queries, g: Number, row: Number, score: Number) -> Number:
    """Add the members of a row to the results, and return the new threshold."""
    starts, scores, ids = lists.starts, queries.scores[g], queries.ids[g]
    n, room = queries.counts[g], len(scores)
    start, end = row, row + np.uint64(1)
    if len(starts):
        start, end = np.uint64(starts[start]), np.uint64(starts[end])
    for i in range(start, min(end, np.uint64(len(lists.members)))):
        item = np.int64(lists.members[i])
        if len(lists.mask) and not lists.mask[i]:
            continue
        if n < room:
            scores[n], ids[n] = score, item
            n += 1
            if n == room:
                _make_heap(scores, ids)
        elif _is_better(score, item, scores[0], ids[0]):
            _sift(scores, ids, np.int64(0), room, score, item)
        else:
            break  # the other members of this row have larger ids
    queries.counts[g] = n
    if n == room:
        queries.thresholds[g] = max(queries.thresholds[g], scores[0])
    return queries.thresholds[g]


# Scans --------------------------------------------------------------------------------------------


@inner
def _distance(
    blocks: Codes, block: Number, lane: Number, quantised: Codes, columns: Number
) -> Number:
    """Return the quantised distance of a code's first columns, at most 255."""
    total = np.int64(0)
    for t in range(columns):
        pair = blocks[block, t, lane]
        total += np.int64(quantised[2 * t, pair & 15]) + np.int64(quantised[2 * t + 1, pair >> 4])
    return min(total, np.int64(255))


@inner
def _score(blocks: Codes, block: Number, lane: Number, lut: Floats) -> Number:
    """Return the score of a code, in float32."""
    increment = np.uint64(1)  # unsigned, as Numba tests signed indices for negative numbers
    M, T = np.uint64(lut.shape[0]), np.uint64(blocks.shape[1])
    score, t = np.float32(0), np.uint64(0)
    while t < T:
        code = np.uint64(blocks[block, t, lane])
        if lut.shape[1] <= 16:
            m = t + t
            pair = lut[m, code & np.uint64(15)]
            if m + increment < M:
                pair = lut[m + increment, code >> np.uint64(4)] + pair
        else:
            pair = lut[t, code]
            t += increment
            if t < T:
                pair += lut[t, np.uint64(blocks[block, t, lane])]
        t += increment
        score += pair
    return score


@inner
def _count_bits(bits: Number) -> Number:
    """Count the set bits of a uint64. LLVM compiles this form to one instruction."""
    bits -= (bits >> np.uint64(1)) & _PAIRS
    bits = (bits & _FOURS) + ((bits >> np.uint64(2)) & _FOURS)
    return (((bits + (bits >> np.uint64(4))) & _EIGHTS) * _BYTES) >> np.uint64(56)


@inner
def _scan(lists: Lists, queries: Queries, g: Number, first: Number, last: Number) -> None:
    """Score the codes of rows ``first:last``, of one sub-list, that may reach the threshold."""
    blocks, lut, quantised = lists.blocks, queries.luts[g], queries.quantised[g]
    paired, common = lut.shape[1] <= 16, lists.prefix // 2  # columns that are equal in the sub-list
    early = min(max(np.int64(2), common + 1), blocks.shape[1])
    base = _distance(blocks, first // BLOCK, first % BLOCK, quantised, common)
    threshold = queries.thresholds[g]
    block, end = first // BLOCK, (last + BLOCK - 1) // BLOCK
    while block < end:
        passed = _ALL
        if paired:
            passed = scan_block(blocks, block, quantised, np.uint8(base), common, early)
            while passed == 0 and block + 1 < end:
                block += 1
                passed = scan_block(blocks, block, quantised, np.uint8(base), common, early)
        start = block * BLOCK
        if start < first:
            passed &= _ALL << np.uint64(first - start)
        if start + BLOCK > last:
            passed &= _ALL >> np.uint64(start + BLOCK - last)
        while passed != 0:
            lane = _count_bits((passed - np.uint64(1)) & ~passed)  # the lowest bit
            passed &= passed - np.uint64(1)
            score = _score(blocks, np.uint64(block), lane, lut)
            if score >= threshold:
                threshold = _enter(lists, queries, g, np.uint64(start) + lane, score)
        if paired and max(queries.limits[g] - threshold, np.float32(0)) < _FINER * queries.spans[g]:
            _quantise_to_threshold(queries, g)
            base = _distance(blocks, first // BLOCK, first % BLOCK, quantised, common)
        block += 1


@inner
def _enough(
    blocks: Codes,
    sampled: tuple[Number, Number, Number],
    quantised: Codes,
    base: Number,
    first: Number,
    k: Number,
) -> Number:
    """Return whether k codes of the blocks ``range(*sampled)`` pass :func:`scan_block`."""
    block, end, stride = sampled
    count, early = np.uint64(0), min(max(np.int64(2), first + 1), blocks.shape[1])
    while block < end and count < np.uint64(k):
        count += _count_bits(scan_block(blocks, block, quantised, np.uint8(base), first, early))
        block += stride
    return count >= np.uint64(k)


@inner
def _first_threshold(lists: Lists, queries: Queries, g: Number, sublist: Number) -> Number:
    """Return a score that k codes of a sub-list reach; -inf if its full blocks have fewer codes.

    Codes of a sample of blocks are counted by a LUT that is rounded *up*. This is far faster than
    entering results one after the other until the threshold is high.
    """
    lut, quantised, common = queries.luts[g], queries.quantised[g], lists.prefix // 2
    blocks, k, (M, K) = lists.blocks, queries.scores.shape[1], lut.shape
    block, end = (lists.ends[sublist] + BLOCK - 1) // BLOCK, lists.ends[sublist + 1] // BLOCK
    if (end - block) * BLOCK < k or M > 127:
        return np.float32(-np.inf)
    best, span = np.float32(0), _SMALLEST_SPAN
    for m in range(M):
        if m < 2 * common:
            pair = np.int64(blocks[block, m // 2, 0])
            best += lut[m, pair >> 4 if m % 2 else pair & 15]
        else:
            largest, smallest = _largest(lut, m), lut[m, 0]
            for j in range(1, K):
                smallest = min(smallest, lut[m, j])
            best += largest
            span += largest - smallest
    sampled = block, end, max(np.int64(1), (end - block) // (k + 8))
    # `low` and `high` are added to each distance: so many less than 254 may a counted one be. The
    # span is quartered while k codes are within 63, which are within 252 of the next span, so that
    # low = 0 counts k codes.
    smallest_span, low, high = span / np.float32(1 << 20), np.int64(0), np.int64(191)
    while True:
        factor = np.float32(254 - M) / span  # all codes are within 254, as rounding adds up to M
        _quantise(lut, factor, np.True_, quantised)
        if span < smallest_span or not _enough(blocks, sampled, quantised, high, common, k):
            break
        span /= np.float32(4)
    for _ in range(6):
        middle = (low + high) // 2
        if _enough(blocks, sampled, quantised, middle, common, k):
            low = middle
        else:
            high = middle
    return best - np.float32(254 - low) / factor - np.float32(2) * queries.margins[g]


# Searches -----------------------------------------------------------------------------------------


@inner
def _best_sublist(lists: Lists, queries: Queries, list_scores: Floats) -> Number:
    """Fill the scores of the first codewords of all lists, and return the best sub-list of the
    best list.
    """
    best = np.int64(0)
    for number in range(len(list_scores)):
        name = lists.names[lists.first[number], 0]
        list_scores[number] = _list_score(lists, queries.luts[_ONLY], name)
        best = np.int64(number) if list_scores[number] > list_scores[best] else best
    sublist, name_lut = lists.first[best], queries.name_luts[_ONLY]
    for number in range(lists.first[best], lists.first[best + 1]):
        if name_lut[lists.names[number, 1]] > name_lut[lists.names[sublist, 1]]:
            sublist = number
    return sublist


@inner
def _order_lists(list_scores: Floats, least: Number, order: Ids) -> Number:
    """Fill ``order`` with the lists that score at least ``least``, best first, and count them."""
    count = 0
    for number in range(len(list_scores)):
        if list_scores[number] >= least:
            i = count
            while i > 0 and list_scores[order[i - 1]] < list_scores[number]:
                order[i] = order[i - 1]
                i -= 1
            order[i] = number
            count += 1
    return count


@inner
def _count_rows(lists: Lists, list_scores: Floats, least: Number) -> Number:
    """Count the rows of the lists that score at least ``least``."""
    rows = np.int64(0)
    for number in range(len(list_scores)):
        if list_scores[number] >= least:
            rows += lists.ends[lists.first[number + 1]] - lists.ends[lists.first[number]]
    return rows


@compiled
def search(
    lists: Lists,
    k: Number,
    row_limit: Number,
    xq: Floats,
    D: Floats,
    ids: Ids,
    status: Codes,
) -> Number:
    """Find the k best members for each query, one query after the other.

    The most promising sub-list yields a first threshold (:func:`_first_threshold`) and is scanned
    first. Then come the lists that reach the threshold, best first.

    Args:
        row_limit: a query, if it is not the only one, whose lists have more rows than this is left
            to :func:`search_together`, which is faster then.
        xq: float32 [Q, M * d].
        D, ids: float32 and int64 [Q, k], filled with the results. If a query is left, its first
            score is one that k members reach.
        status: uint8 [Q], filled with :data:`DONE`, :data:`TOGETHER` for a query that is left, or
            :data:`NOT_FINITE` for one without finite scores.

    Returns:
        The number of queries that are not done.
    """
    remaining, lists_count = 0, len(lists.first) - 1
    list_scores, order = np.empty(lists_count, np.float32), np.empty(lists_count, np.int64)
    queries = _new_queries(lists, 1, k)
    may_leave = len(xq) > 1 and lists.ends[-1] > row_limit
    for q in range(len(xq)):
        status[q] = DONE
        if not _begin(lists, queries, _ONLY, xq[q], np.float32(-np.inf)):
            status[q] = NOT_FINITE
            remaining += 1
            continue
        opened = _best_sublist(lists, queries, list_scores)
        if len(lists.mask) == 0 and lists.codebooks.shape[2] <= 16:
            queries.thresholds[_ONLY] = _first_threshold(lists, queries, _ONLY, opened)
        _quantise_to_threshold(queries, _ONLY)
        _scan(lists, queries, _ONLY, lists.ends[opened], lists.ends[opened + 1])
        tail = queries.list_tails[_ONLY]
        scanned = lists.ends[opened + 1] - lists.ends[opened]
        for i in range(_order_lists(list_scores, queries.thresholds[_ONLY] - tail, order)):
            least = queries.thresholds[_ONLY] - tail
            if list_scores[order[i]] < least:
                break
            if may_leave:
                reached = _count_rows(lists, list_scores, least)
                if reached > row_limit and 16 * scanned >= reached:  # will hardly become fewer
                    status[q], D[q, 0] = TOGETHER, queries.thresholds[_ONLY]
                    remaining += 1
                    break
            for number in range(lists.first[order[i]], lists.first[order[i] + 1]):
                bound = _bound(lists, queries, _ONLY, number)
                if number != opened and bound >= queries.thresholds[_ONLY]:
                    _scan(lists, queries, _ONLY, lists.ends[number], lists.ends[number + 1])
                    scanned += lists.ends[number + 1] - lists.ends[number]
        if status[q] == DONE:
            _finish(queries, _ONLY, D[q], ids[q])
    return remaining


@compiled
def search_together(lists: Lists, xq: Floats, D: Floats, ids: Ids) -> None:
    """Find the k best members for queries that scan each sub-list together, so it is read once.

    Args:
        D, ids: float32 and int64 [Q, k]; the first score of each query is one that k members reach,
            or -inf. They are filled with the results.
    """
    size: Number = min(_GROUP, len(xq))
    queries = _new_queries(lists, size, D.shape[1])
    for begin in range(0, len(xq), _GROUP):
        size = min(_GROUP, len(xq) - begin)
        for g in range(size):
            _begin(lists, queries, g, xq[begin + g], D[begin + g, 0])
            _quantise_to_threshold(queries, g)
        for number in range(len(lists.names)):
            start, end = lists.ends[number], lists.ends[number + 1]
            while start < end:
                stop = min(end, start // BLOCK * BLOCK + _CHUNK)
                for g in range(size):
                    if _bound(lists, queries, g, number) >= queries.thresholds[g]:
                        _scan(lists, queries, g, start, stop)
                start = stop
        for g in range(size):
            _finish(queries, g, D[begin + g], ids[begin + g])


@compiled
def range_search(
    lists: Lists, limit: Number, query: Floats, min_score: Number
) -> tuple[Floats, Ids, Number]:
    """Find all members that score at least ``min_score`` for a query [M * d].

    Returns:
        Scores and ids in any order, and the number of results, at most ``limit`` + 1; -1 if scores
        are not finite.
    """
    queries = _new_queries(lists, 1, limit + 1)
    if not _begin(lists, queries, _ONLY, query, min_score):
        queries.counts[_ONLY] = -1
    _quantise_to_threshold(queries, _ONLY)
    for number in range(len(lists.names)):
        reached = _bound(lists, queries, _ONLY, number) >= queries.thresholds[_ONLY]
        if reached and 0 <= queries.counts[_ONLY] <= limit:
            _scan(lists, queries, _ONLY, lists.ends[number], lists.ends[number + 1])
    return queries.scores[0], queries.ids[0], queries.counts[_ONLY]

"""The loops of exact search over codes in lists, compiled by Numba.

Arrays are those of :class:`.codeword_lists.ListSearch`. The order of float32 operations is that of :mod:`..codes.scores`, so scores are
bit-equal to those of brute force; bounds have a margin for other orders.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba.cpython.unsafe.numbers import trailing_zeros

from ..codes.checks import Codes, Floats, Ids
from ..compiled import compiled, inner
from .near import BLOCK, near

Number = Any
"""An int64 or a float32."""
_EPS = float(np.finfo(np.float32).eps)
_LEAST = np.float32(2.0**-90)
_FINER = np.float32(0.97)  # steps are made anew where they would be finer by this
_JUMP = np.int64(8)  # blocks
_TOGETHER = np.int64(
    32
)  # queries that visit the same codes one after the other, so that these are read once
_SOME = np.int64(
    128 * BLOCK
)  # rows that they visit before the next ones: they fit a processor's cache
_ZERO = np.int64(0)
# Numba compiles a function anew for a literal number: constants are np.int64. And it takes seconds for assignments to slices and for
# methods of arrays: these are loops here.
_WHOLE = np.uint64(0xFFFFFFFFFFFFFFFF)  # all codes of a block
_PAIRS, _FOURS, _EIGHTS, _BYTES = (_WHOLE // np.uint64(part) for part in (3, 5, 17, 255))


@inner
def _tables(query: Floats, ZT: Floats, tables: Floats) -> Number:
    """Fill the score tables of one query, float32 [M, K]; a bound of every score's size."""
    d, M, K = ZT.shape
    for m in range(M):
        for k in range(K):
            tables[m, k] = 0
    for j in range(d):
        for m in range(M):
            x = query[m * d + j]
            for k in range(K):
                tables[m, k] += x * ZT[j, m, k]
    largest = np.float32(0)
    for m in range(M):
        most = np.float32(0)
        for k in range(K):
            most = max(most, abs(tables[m, k]))
        largest += most
    return largest


@inner
def _cell(tables: Floats, name: Number, P: Number) -> Number:
    """The score of the first two codewords of a list, if two or more name it."""
    return tables[1, name >> 4] + tables[0, name & 15] if P >= 2 else np.float32(0)


@inner
def _heads(tables: Floats, margin: Number, P: Number, heads: Floats) -> tuple[Number, Number]:
    """Fill ``heads``, float32 [256], with the scores of the codewords that name a list, without the first two if there are two.

    Returns:
        The best score of all codebooks behind the first P, with the margin, and the best of ``heads``.
    """
    M, K = tables.shape
    top = np.float32(-np.inf)
    for name in range(256 if P == 4 else 16):
        heads[name] = 0
        if P == 4:
            heads[name] = tables[3, name >> 4] + tables[2, name & 15]
        elif P % 2:
            heads[name] = tables[P - 1, name] if name < K else -np.inf
        top = max(top, heads[name])
    behind = np.float32(0)
    for m in range(P, M):
        behind += _most(tables, m)
    return behind + margin, top


@inner
def _most(tables: Floats, m: Number) -> Number:
    """The best entry of a table."""
    most = tables[m, 0]
    for k in range(1, tables.shape[1]):
        most = max(most, tables[m, k])
    return most


@inner
def _make_steps(tables: Floats, factor: Number, up: Number, steps: Any) -> None:
    """Fill ``steps``, uint8 [2 * T, 16]: how far a codeword is behind the best of its codebook, times ``factor``, rounded down, or up."""
    M, K = tables.shape
    for m in range(M):
        most = _most(tables, m)
        for k in range(K):
            step = min((most - tables[m, k]) * factor, np.float32(255))
            whole = np.int32(step)
            steps[m, k] = np.uint8(whole + (up & (np.float32(whole) < step)))


@inner
def _measure(query: Any, least: Number) -> None:
    """Make the steps of a query (:func:`_rows`) for what ``least`` leaves: 254 of them, rounded down, reach as far."""
    tables, top, steps, reach, _ = query
    reach[0] = max(top - least, np.float32(0))
    if tables.shape[1] <= 16:
        _make_steps(tables, np.float32(253.999) / max(reach[0], _LEAST), np.False_, steps)


@inner
def _split(D: Floats, found: Ids, low: Number, high: Number) -> Number:
    """Reorder results ``low:high``: those better than one of them, which is returned, come before it, the others behind it.

    A result is better than another if its score is higher, or equal and its item is smaller.
    """
    last, place = high - 1, low
    at = low + (high - low) * 5 // 8
    score, item = D[at], found[at]
    D[at], found[at] = D[last], found[last]
    for i in range(
        low, last
    ):  # without branches, which a processor would guess wrongly every other time
        other, which = D[i], found[i]
        D[i], found[i] = D[place], found[place]
        D[place], found[place] = other, which
        place += (other > score) | ((other == score) & (which < item))
    D[last], found[last] = D[place], found[place]
    D[place], found[place] = score, item
    return place


@inner
def _keep(D: Floats, found: Ids, n: Number, k: Number) -> None:
    """Reorder n results so that the k best come first, the worst of them in the end."""
    low, high = np.int64(0), n
    while high - low > 1:
        place = _split(D, found, low, high)
        if place < k - 1:
            low = place + 1
        elif place > k - 1:
            high = place
        else:
            break


@compiled
def order(D: Floats, found: Ids, n: Number) -> None:
    """Sort n results, the best first."""
    lows, highs, parts = np.empty(64, np.int64), np.empty(64, np.int64), 1
    lows[0], highs[0] = 0, n
    while parts:
        parts -= 1
        low, high = lows[parts], highs[parts]
        while high - low > 12:
            place = _split(D, found, low, high)
            longer = place - low > high - place
            lows[parts], highs[parts] = (low, place) if longer else (place + 1, high)
            parts += 1
            low, high = (place + 1, high) if longer else (low, place)
    for i in range(1, n):
        score, item, at = D[i], found[i], i
        while at > 0 and (D[at - 1] < score or (D[at - 1] == score and found[at - 1] > item)):
            D[at], found[at] = D[at - 1], found[at - 1]
            at -= 1
        D[at], found[at] = score, item


@inner
def _best(held: Any, n: Number, k: Number, D: Floats, found: Ids) -> Number:
    """Copy the k best of n results into ``D`` and ``found``, float32 and int64 [k], the k-th in the end; how many there are."""
    if n > k:
        _keep(held[0], held[1], n, k)
        n = k
    for i in range(n):
        D[i], found[i] = held[0][i], held[1][i]
    return n


@compiled
def _sorted(held: Any, n: Number, k: Number, D: Floats, found: Ids) -> None:
    """As :func:`_best`, sorted; -inf and -1 where there is no result."""
    n = _best(held, n, k, D, found)
    order(D, found, n)
    for i in range(n, k):
        D[i], found[i] = -np.inf, -1


@inner
def _enter(
    row: Number, score: Number, rows: Any, passing: Any, k: Number, out: Any, n: Number
) -> Number:
    """Put the items of a row behind the n results of ``out``; the new number of results.

    With k > 0 only those that are better than the k-th; where there is no more room, and where there are k for the first time, all but the
    k best go, and the k-th is the last of them. With k = 0 the number counts also those that had no room.
    """
    _, starts, members = rows
    D, found = out
    filtered = len(passing) > 0
    first, end = np.uint64(row), np.uint64(row) + np.uint64(1)
    if len(starts):
        first, end = np.uint64(starts[first]), np.uint64(starts[end])
    for slot in range(first, end):
        item = np.int64(members[slot])
        if filtered and not passing[slot]:
            continue
        if k == 0:
            if n < len(D):
                D[n], found[n] = score, item
            n += 1
        elif n < k or score > D[k - 1] or (score == D[k - 1] and item < found[k - 1]):
            D[n], found[n] = score, item
            n += 1
            if n == k or n == len(D):
                _keep(D, found, n, k)
                n = k
        else:
            break  # the other items of this code are larger
    return n


@inner
def _steps_of(
    blocks: Codes, block: Number, lane: Number, steps: Any, first: Number, last: Number
) -> Number:
    """The steps of a code's columns ``first:last``, at most 255."""
    total = np.int64(0)
    for t in range(first, last):
        code = blocks[block, t, lane]
        total += np.int64(steps[2 * t, code & 15]) + np.int64(steps[2 * t + 1, code >> 4])
    return min(total, np.int64(255))


@inner
def _next(
    blocks: Codes, block: Number, end: Number, steps: Any, base: Number, first: Number
) -> tuple[Number, Number]:
    """The next block before ``end`` with codes that may be results, and which (:func:`.near.near`); none: 0."""
    early, passed = min(max(np.int64(2), first + 1), blocks.shape[1]), np.uint64(0)
    while block < end:
        passed = near(blocks, block, steps, np.uint8(base), first, early)
        if passed != 0:
            break
        block += 1
        while (  # all columns before the first are the same, and codes are in order: so are those between two with one value in it
            first > 0
            and block % _JUMP == 0
            and block + _JUMP < end
            and blocks[block, first, 0] == blocks[block + _JUMP - 1, first, BLOCK - 1]
            and base + _steps_of(blocks, block, _ZERO, steps, first, first + 1) > 254
        ):
            block += _JUMP
    return block, passed


@inner
def _score(blocks: Codes, block: Number, lane: Number, tables: Floats) -> Number:
    """The score of a code, in float32."""
    one = np.uint64(1)  # unsigned, as Numba tests other indices for negative numbers
    M, T = np.uint64(tables.shape[0]), np.uint64(blocks.shape[1])
    score, t = np.float32(0), np.uint64(0)
    while t < T:
        code = np.uint64(blocks[block, t, lane])
        if tables.shape[1] <= 16:
            m = t + t
            part = tables[m, code & np.uint64(15)]
            if m + one < M:
                part = tables[m + one, code >> np.uint64(4)] + part
        else:
            part = tables[t, code]
            t += one
            if t < T:
                part += tables[t, np.uint64(blocks[block, t, lane])]
        t += one
        score += part
    return score


@inner
def _ones(bits: Number) -> Number:
    """How many bits of a uint64 are set: one instruction, which LLVM knows by this form."""
    bits -= (bits >> np.uint64(1)) & _PAIRS
    bits = (bits & _FOURS) + ((bits >> np.uint64(2)) & _FOURS)
    return (((bits + (bits >> np.uint64(4))) & _EIGHTS) * _BYTES) >> np.uint64(56)


@inner
def _enough(
    blocks: Codes, places: Any, steps: Any, base: Number, first: Number, k: Number
) -> Number:
    """Whether k codes of the blocks ``range(*places)`` have at most 254 steps (:func:`.near.near`)."""
    block, end, stride = places
    count, early = np.uint64(0), min(max(np.int64(2), first + 1), blocks.shape[1])
    while block < end and count < np.uint64(k):
        count += _ones(near(blocks, block, steps, np.uint8(base), first, early))
        block += stride
    return count >= np.uint64(k)


@inner
def _floor(blocks: Codes, first: Number, last: Number, query: Any, k: Number) -> Number:
    """A score that k codes among rows ``first:last`` have, but for the margin; -inf if whole blocks of them have fewer.

    Codes of some of their blocks are counted by steps rounded *up*, as results that enter one after the other take far longer.
    """
    tables, _, steps, _, varied = query
    M, K = tables.shape
    block, end = (first + BLOCK - 1) // BLOCK, last // BLOCK
    if (end - block) * BLOCK < k or M > 127:
        return np.float32(-np.inf)
    top, reach = np.float32(0), _LEAST
    for m in range(M):
        if m < 2 * varied:
            both = np.int64(blocks[block, m // 2, 0])
            top += tables[m, both >> 4 if m % 2 else both & 15]
        else:
            most, fewest = _most(tables, m), tables[m, 0]
            for j in range(1, K):
                fewest = min(fewest, tables[m, j])
            top += most
            reach += most - fewest
    places = block, end, max(np.int64(1), (end - block) // (k + 8))
    # Codes with at most 63 steps have at most 252 of a quarter of the size, so ``low`` = 0 holds after every round.
    finest, low, high = reach / np.float32(1 << 20), np.int64(0), np.int64(191)
    while True:
        factor = (
            np.float32(254 - M) / reach
        )  # all codes have at most 254 then, as rounding adds less than M
        _make_steps(tables, factor, np.True_, steps)
        if reach < finest or not _enough(blocks, places, steps, high, varied, k):
            break
        reach /= np.float32(4)
    for _ in range(6):
        middle = (low + high) // 2
        if _enough(blocks, places, steps, middle, varied, k):
            low = middle
        else:
            high = middle
    return top - np.float32(254 - low) / factor


@inner
def _rows(
    first: Number,
    last: Number,
    query: Any,
    rows: Any,
    passing: Any,
    k: Number,
    out: Any,
    n: Number,
    least: Number,
) -> tuple[Number, Number]:
    """Score what may be a result among rows ``first:last``; codes with at least ``least`` enter the results (:func:`_enter`).

    Args:
        query: tables, what any code can score at most, steps and their reach, float32 [1] (:func:`_measure`), and the columns that are
            the same in all these rows; if there are any, the rows are in order.
        rows: distinct codes uint8 [blocks, T, 64]; and starts uint32 [rows + 1] and members uint32 or int64 [items]: the items of a row
            are ``members[starts[row]:starts[row + 1]]``, ascending; without starts ``members[row]``, one for each.
        passing: bool [items], or empty if all pass.
        out: D and found, and n, the items in them.
    """
    tables, top, steps, reach, varied = query
    blocks, D = rows[0], out[0]
    paired = tables.shape[1] <= 16
    block, end = first // BLOCK, (last + BLOCK - 1) // BLOCK
    if first == last:
        return n, least
    base = _steps_of(blocks, block, first % BLOCK, steps, _ZERO, varied)
    while block < end:
        passed = _WHOLE
        if paired:
            block, passed = _next(blocks, block, end, steps, base, varied)
            if passed == 0:
                break
        start = block * BLOCK
        if start < first:
            passed &= _WHOLE << np.uint64(first - start)
        if start + BLOCK > last:
            passed &= _WHOLE >> np.uint64(start + BLOCK - last)
        while passed != 0:
            lane = trailing_zeros(passed)  # type: ignore[call-arg,var-annotated]
            passed &= passed - np.uint64(1)
            score = _score(blocks, np.uint64(block), lane, tables)
            if score >= least:
                n = _enter(np.uint64(start) + lane, score, rows, passing, k, out, n)
                if k and n >= k:
                    least = max(least, D[k - 1])
        if paired and max(top - least, np.float32(0)) < _FINER * reach[0]:
            _measure(query, least)
            base = _steps_of(blocks, first // BLOCK, first % BLOCK, steps, _ZERO, varied)
        block += 1
    return n, least


@inner
def _begin(query: Floats, ZT: Floats, P: Number, room: Any) -> Any:
    """Fill the tables of a query; what any code can score at most, what :func:`_heads` returns, and the margin."""
    tables, heads, _, _ = room
    # What the order of additions can make of a score.
    margin = np.float32((2 * len(tables) + 8) * _EPS) * _tables(query, ZT, tables)
    behind, most = _heads(tables, margin, P, heads)
    top = margin
    for m in range(len(tables)):
        top += _most(tables, m)
    return top, behind, most, margin


@compiled
def _room(M: Number, K: Number) -> Any:
    """Room for the tables of a query."""
    steps = np.zeros((M + M % 2, 16), np.uint8)
    return np.empty((M, K), np.float32), np.empty(256, np.float32), steps, np.empty(1, np.float32)


@compiled
def squared_size(x: Floats) -> Number:
    """The sum of all squares of float32 [n, d]; not finite if a number is not."""
    a = b = c = e = np.float32(0)  # four, as each waits for its last addition
    d = x.shape[1]
    for row in range(len(x)):
        for j in range(0, d - 3, 4):
            a += x[row, j] * x[row, j]
            b += x[row, j + 1] * x[row, j + 1]
            c += x[row, j + 2] * x[row, j + 2]
            e += x[row, j + 3] * x[row, j + 3]
        for j in range(d - d % 4, d):
            a += x[row, j] * x[row, j]
    return a + b + c + e


@compiled
def list_bounds(xq: Floats, ZT: Floats, P: Number, names: Codes, bounds: Floats) -> None:
    """Fill ``bounds``, float32 [Q, lists], with what an item of each list can score at most."""
    room = _room(ZT.shape[1], ZT.shape[2])
    tables, heads, _, _ = room
    for q in range(len(xq)):
        _, behind, _, _ = _begin(xq[q], ZT, P, room)
        for number in range(len(names)):
            bounds[q, number] = (
                _cell(tables, names[number, 0], P) + heads[names[number, 1]] + behind
            )


@compiled
def visit(
    xq: Floats,
    ZT: Floats,
    P: Number,
    names: Codes,
    lists: Ids,
    at: Ids,
    ends: Ids,
    rows: Any,
    passing: Any,
    k: Number,
    floor: Floats,
    D: Floats,
    found: Ids,
    counts: Ids,
) -> Number:
    """Visit some lists for all queries, as far as their bounds reach the k-th score so far. Many queries read codes once.

    Args:
        xq: float32 [Q, M * d].
        ZT: codebooks, float32 [d, M, K].
        lists: int64 [n], numbers of the lists, and ``at``, int64 [n], where each is in ``ends``.
        ends: int64 [any], the first row of each list, and the number of all.
        rows, passing: as :func:`_rows`.
        floor: float32 [Q], scores below do not count.
        D: float32 [Q, k], found: int64 [Q, k], counts: int64 [Q]: the best so far, of k the worst in the end. With k = 0 float32
            [Q, any] and int64 [Q, any], which take what they can of all items that reach ``floor``, of which ``counts`` is the number.

    Returns:
        Rows of the lists that were visited.
    """
    M, K, done = ZT.shape[1], ZT.shape[2], 0
    together: Number = min(_TOGETHER, len(xq))
    tables, heads = np.empty((together, M, K), np.float32), np.empty((together, 256), np.float32)
    steps, reach = (
        np.zeros((together, M + M % 2, 16), np.uint8),
        np.empty((together, 1), np.float32),
    )
    scores, items = (
        np.empty((together, 2 * k + 8), np.float32),
        np.empty((together, 2 * k + 8), np.int64),
    )
    tops, behind, least = np.empty((3, together), np.float32)
    for first in range(0, len(xq), _TOGETHER):
        some: Number = min(_TOGETHER, len(xq) - first)
        for g in range(some):
            q = first + g
            n, least[g] = counts[q], floor[q]
            if k and n == k:
                least[g] = max(least[g], D[q, k - 1])
            for i in range(n if k else 0):
                scores[g, i], items[g, i] = D[q, i], found[q, i]
            tops[g], behind[g], _, _ = _begin(
                xq[q], ZT, P, (tables[g], heads[g], steps[g], reach[g])
            )
            _measure((tables[g], tops[g], steps[g], reach[g], P // 2), least[g])
        for i in range(len(lists)):
            name = names[lists[i]]
            low, end = ends[at[i]], ends[at[i] + 1]
            while low < end:
                high = min(end, low // BLOCK * BLOCK + _SOME)
                for g in range(some):
                    if _cell(tables[g], name[0], P) + heads[g, name[1]] + behind[g] < least[g]:
                        continue
                    q, query = first + g, (tables[g], tops[g], steps[g], reach[g], P // 2)
                    out = (scores[g], items[g]) if k else (D[q], found[q])
                    counts[q], least[g] = _rows(
                        low, high, query, rows, passing, k, out, counts[q], least[g]
                    )
                    done += high - low
                low = high
        for g in range(some if k else 0):
            q = first + g
            counts[q] = _best((scores[g], items[g]), counts[q], k, D[q], found[q])
    return done


@inner
def _best_list(
    tables: Floats, heads: Floats, P: Number, names: Codes, value: Codes, first: Ids, bounds: Floats
) -> Any:
    """Fill ``bounds`` with the scores of the cells (:func:`search`); the best cell, and its best list."""
    best = _ZERO
    for c in range(len(value)):
        bounds[c] = _cell(tables, value[c], P)
        best = np.int64(c) if bounds[c] > bounds[best] else best
    opened = first[best]
    for number in range(first[best], first[best + 1]):
        if heads[names[number, 1]] > heads[names[opened, 1]]:
            opened = number
    return best, opened


@inner
def _reached(bounds: Floats, least: Number, cells: Ids, codes: Ids) -> Number:
    """Codes of the cells whose bounds are at least ``least``."""
    count = np.int64(0)
    for i in range(len(cells)):
        if bounds[cells[i]] >= least:
            count += codes[cells[i]]
    return count


@inner
def _best_first(bounds: Floats, least: Number, turn: Ids) -> Number:
    """Fill ``turn`` from its second place on with the cells whose bounds are at least ``least``, best first; their number and 1."""
    turns = 1
    for cell in range(len(bounds)):
        if bounds[cell] >= least:
            at = turns
            while at > 1 and bounds[turn[at - 1]] < bounds[cell]:
                turn[at] = turn[at - 1]
                at -= 1
            turn[at] = cell
            turns += 1
    return turns


@compiled
def search(
    ZT: Floats,
    P: Number,
    names: Codes,
    cells: Any,
    pieces: Any,
    ends: Ids,
    rows: Any,
    passing: Any,
    k: Number,
    many: Number,
    xq: Floats,
    floor: Floats,
    D: Floats,
    found: Ids,
    given_up: Any,
) -> Number:
    """The ``k`` best items of each query among all lists.

    The most promising list gives a threshold before it is visited (:func:`_floor`), and is the first. Then come the cells (lists with the
    same first two codewords) that reach the threshold, best first.

    Args:
        cells: uint8 [cells], values of the first column; int64 [cells + 1], the first list of each; and int64 [cells], codes of each.
        pieces: int64 [lists + 1], the first piece of each list, and int64 [any], where each piece is in ``ends``; -1: not there.
        D, found, given_up: float32 [Q, k], int64 [Q, k], filled with the results, -inf and -1 where there are none; and bool [Q], the
            queries that are given up, with a score that k items have as the first of ``D``: those that reach a piece that is not there, and
            those among several that reach more than ``many`` codes, for which :func:`visit` is faster. Other arguments as there.

    Returns:
        Rows of the lists that were visited.
    """
    K = ZT.shape[2]
    room = _room(ZT.shape[1], K)
    # More than k, so that many are compared at once (:func:`_enter`).
    held = np.empty(2 * k + 8, np.float32), np.empty(2 * k + 8, np.int64)
    (value, first, codes), (begin, at), (tables, heads, steps, reach) = cells, pieces, room
    bounds, turn = np.empty(len(value), np.float32), np.empty(len(value) + 1, np.int64)
    done = np.int64(0)
    for q in range(len(xq)):
        n, least = np.int64(0), floor[q]
        every, behind, most, margin = _begin(xq[q], ZT, P, room)
        query = tables, every, steps, reach, P // 2
        before, reached = done, _ZERO
        best, opened = _best_list(tables, heads, P, names, value, first, bounds)
        if (
            len(passing) == 0
            and K <= 16
            and begin[opened] < begin[opened + 1]
            and at[begin[opened]] >= 0
        ):
            piece = at[begin[opened]]
            least = max(least, _floor(rows[0], ends[piece], ends[piece + 1], query, k) - 2 * margin)
        _measure(query, least)
        top = behind + most
        turns, turn[0] = 1, -1  # that list
        i, lacks = 0, False
        while i < turns and not lacks:
            c = turn[i]
            i += 1
            if reached > many and 16 * (done - before) >= reached:  # the threshold will hardly rise
                lacks, reached = (
                    _reached(bounds, least - top, turn[i - 1 : turns], codes) > many,
                    _ZERO,
                )
                if lacks:
                    break
            low, high = (opened, opened + 1) if c < 0 else (first[c], first[c + 1])
            cell = bounds[best] if c < 0 else bounds[c]
            if cell + top < least:
                break
            for number in range(low, high):
                if (c >= 0 and number == opened) or cell + heads[names[number, 1]] + behind < least:
                    continue
                for piece in range(begin[number], begin[number + 1]):
                    lacks = at[piece] < 0
                    if lacks:
                        break
                    left, right = ends[at[piece]], ends[at[piece] + 1]
                    n, least = _rows(left, right, query, rows, passing, k, held, n, least)
                    done += right - left
                if lacks:
                    break
            if c < 0:
                turns = _best_first(bounds, least - top, turn)
                if len(xq) > 1:
                    reached = _reached(bounds, least - top, turn[1:turns], codes)
        given_up[q] = lacks
        if lacks:
            D[q, 0] = least
        else:
            _sorted(held, n, k, D[q], found[q])
    return done


@compiled
def mark_rows(columns: Codes, ids: Ids, is_first: Any) -> Any:
    """Mark the first item of each distinct code; whether items are in the order of codewords and ids."""
    n, T = columns.shape
    is_sorted = True
    for i in range(n):
        is_first[i] = True
        if i == 0:
            continue
        t = 0
        while t < T and columns[i, t] == columns[i - 1, t]:
            t += 1
        if t == T:
            is_first[i] = False
            is_sorted &= ids[i] > ids[i - 1]
        else:
            a, b = columns[i - 1, t], columns[i, t]
            is_sorted &= (np.int64(a & 15) << 4 | a >> 4) < (np.int64(b & 15) << 4 | b >> 4)
        if not is_sorted:
            return False
    return True

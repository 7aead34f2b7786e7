"""The loops of exact search over codes in lists, compiled by Numba.

Arrays are those of :class:`.codeword_lists.ListSearch`. The order of float32 operations is that of :mod:`..codes.scores`, so scores are
bit-equal to those of brute force; bounds have a margin for other orders.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..codes.checks import Codes, Floats, Ids
from ..compiled import compiled, inner

Number = Any
"""An int64 or a float32."""
_EPS = float(np.finfo(np.float32).eps)
_TINY = 2.0**-90  # spans of score tables below which FastScan's steps are not representable
# Numba compiles a function anew for a literal number: constants are np.int64. And it takes seconds for assignments to slices and for
# methods of arrays: these are loops here.
_ALL = np.int64(1 << 62)


@inner
def _single(query: Floats, ZT: Floats, single: Floats) -> Number:
    """Fill the score tables of one query, float32 [M, K]; a bound of every score's size."""
    d, M, K = ZT.shape
    for m in range(M):
        for k in range(K):
            single[m, k] = 0
    for j in range(d):
        for m in range(M):
            x = query[m * d + j]
            for k in range(K):
                single[m, k] += x * ZT[j, m, k]
    largest = np.float32(0)
    for m in range(M):
        most = np.float32(0)
        for k in range(K):
            most = max(most, abs(single[m, k]))
        largest += most
    return largest


@inner
def tables(query: Floats, ZT: Floats, single: Floats, columns: Floats, rest: Floats, step: Number) -> Number:
    """Score tables of one query.

    Args:
        query: float32 [M * d].
        ZT: codebooks, float32 [d, M, K].
        single: float32 [M, K], filled with the tables.
        columns: float32 [T, 256], filled with the tables of the columns of codes: sums of two codebooks, or (``step`` 2) the same.
        rest: float32 [T + 1], filled with the best sum of the columns from each on.
        step: columns that are added before they are added to a score.

    Returns:
        A bound of every score's size.
    """
    M, K = single.shape
    T = columns.shape[0]
    largest = _single(query, ZT, single)
    if step == 2:
        for m in range(M):
            for k in range(K):
                columns[m, k] = single[m, k]
    else:
        for t in range(T):
            for b in range(K):
                second = single[2 * t + 1, b] if 2 * t + 1 < M else np.float32(0)
                for a in range(K):
                    columns[t, 16 * b + a] = second + single[2 * t, a]
                if 2 * t + 1 == M:
                    break
    best = np.float32(0)
    rest[T] = 0
    for t in range(T - 1, -1, -1):
        most = columns[t, 0]
        if step == 2:
            for k in range(1, K):
                most = max(most, columns[t, k])
        else:
            for b in range(K if 2 * t + 1 < M else 1):
                for a in range(K):
                    most = max(most, columns[t, 16 * b + a])
        best += most
        rest[t] = best
    return largest


@inner
def _margin(M: Number, largest: Number) -> Number:
    """What the order of additions can make of a score."""
    return np.float32((2 * M + 8) * _EPS) * np.float32(largest)


@inner
def _heads(
    single: Floats, columns: Floats, margin: Number, P: Number, heads: Floats
) -> tuple[Number, Number]:
    """Fill ``heads``, float32 [256], with the scores of the codewords that name a list, without the first two if there are two.

    Returns:
        The best score of all codebooks behind the first P, with the margin, and the best of ``heads``.
    """
    M, K = single.shape
    top = np.float32(-np.inf)
    for k in range(len(heads)):
        if P % 2:
            heads[k] = single[P - 1, k] if k < K else -np.inf
        else:
            heads[k] = columns[1, k] if P == 4 else 0
        top = max(top, heads[k])
    behind = np.float32(0)
    for m in range(P, M):
        most = single[m, 0]
        for k in range(1, K):
            most = max(most, single[m, k])
        behind += most
    return behind + margin, top


@inner
def _split(D: Floats, found: Ids, low: Number, high: Number) -> Number:
    """Reorder results ``low:high``: those better than one of them, which is returned, come before it, the others behind it.

    A result is better than another if its score is higher, or equal and its item is smaller.
    """
    last, place = high - 1, low
    at = low + (high - low) * 5 // 8
    score, item = D[at], found[at]
    D[at], found[at] = D[last], found[last]
    for i in range(low, last):  # without branches, which a processor would guess wrongly every other time
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


@compiled
def _held(k: Number) -> Any:
    """Room for the results of a query: more than k, so that many are compared at once (:func:`_enter`)."""
    return np.empty(2 * k + 8, np.float32), np.empty(2 * k + 8, np.int64)


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
def _enter(row: Number, score: Number, rows: Any, passing: Any, k: Number, out: Any, n: Number) -> Number:
    """Put the items of a row behind the n results of ``out``; the new number of results.

    With k > 0 only those that are better than the k-th; where there is no more room, and where there are k for the first time, all but the
    k best go, and the k-th is the last of them. With k = 0 the number counts also those that had no room.
    """
    _, starts, members = rows
    D, found = out
    filtered = len(passing) > 0
    for slot in range(starts[row], starts[row + 1]):
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
def _rows(
    first: Number,
    last: Number,
    s: Number,
    column: Number,
    query: Any,
    rows: Any,
    passing: Any,
    k: Number,
    out: Any,
    n: Number,
    least: Number,
) -> tuple[Number, Number]:
    """Score rows ``first:last`` from ``column`` on; those with at least ``least`` enter the results (:func:`_enter`).

    Args:
        s: score of the columns before.
        query: tables of the columns, best sums of the columns from each on, margin of bounds, and step (:func:`tables`).
        rows: codes uint8 [rows, T], starts uint32 [rows + 1], members [items] (:class:`.codeword_lists.Rows`).
        passing: bool [items], or empty if all pass.
        out: D, found and n, the items in them.
    """
    columns, rest, margin, step = query
    codes, D = rows[0], out[0]
    T = columns.shape[0]
    enough = least - (rest[column + 1] + margin)
    for row in range(first, last):
        score = s
        if step == 1:
            score += columns[column, codes[row, column]]
            if score < enough:
                continue
            for t in range(column + 1, T):
                score += columns[t, codes[row, t]]
        else:
            for t in range(column, T, 2):
                part = columns[t, codes[row, t]]
                if t + 1 < T:
                    part += columns[t + 1, codes[row, t + 1]]
                score += part
        if score >= least:
            n = _enter(row, score, rows, passing, k, out, n)
        if k and n >= k:
            least = max(least, D[k - 1])
            enough = least - (rest[column + 1] + margin)
    return n, least


@inner
def _list(
    low: Number,
    high: Number,
    s: Number,
    column: Number,
    query: Any,
    tree: Any,
    passing: Any,
    k: Number,
    out: Any,
    n: Number,
    least: Number,
    stack: Any,
    budget: Number,
) -> tuple[Number, Number, Number]:
    """Visit a list, up to ``budget`` rows: its nodes ``low:high`` of the first level of ``tree``, or its rows if there are no levels.

    Returns:
        Items in ``out``, the least score that enters, and rows scored.
    """
    columns, rest, margin, _ = query
    depth, values, children, rows = tree
    if depth == 0:
        n, least = _rows(low, high, s, column, query, rows, passing, k, out, n, least)
        return n, least, high - low
    nodes, ends, scores = stack
    level, scored = 0, np.int64(0)
    nodes[0], ends[0], scores[0] = low, high, s
    while True:
        node, end, before = nodes[level], ends[level], scores[level]
        value, t = values[level], column + level
        bound = rest[t + 1] + margin
        score = before
        while node < end:
            score = before + columns[t, value[node]]
            if score + bound >= least:
                break
            node += 1
        if node == end:
            if level == 0:
                break
            level -= 1
            continue
        nodes[level] = node + 1
        first, last = np.int64(children[level][node]), np.int64(children[level][node + 1])
        if level + 1 < depth:
            level += 1
            nodes[level], ends[level], scores[level] = first, last, score
            continue
        n, least = _rows(first, last, score, t + 1, query, rows, passing, k, out, n, least)
        scored += last - first
        if scored > budget:
            break
    return n, least, scored


@compiled
def _room(M: Number, K: Number, T: Number) -> Any:
    """Room for the tables of a query, and for the way through a tree."""
    single, columns = np.empty((M, K), np.float32), np.empty((T, 256), np.float32)
    rest, heads = np.empty(T + 1, np.float32), np.empty(256, np.float32)
    return (
        single,
        columns,
        rest,
        heads,
        (np.empty(4, np.int64), np.empty(4, np.int64), np.empty(4, np.float32)),
    )


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
def list_bounds(xq: Floats, books: Any, P: Number, names: Codes, T: Number, bounds: Floats) -> None:
    """Fill ``bounds``, float32 [Q, lists], with what an item of each list can score at most."""
    ZT, step = books
    M, K = ZT.shape[1], ZT.shape[2]
    single, columns, rest, heads, _ = _room(M, K, T)
    for q in range(len(xq)):
        margin = _margin(M, tables(xq[q], ZT, single, columns, rest, step))
        behind, _ = _heads(single, columns, margin, P, heads)
        for number in range(len(names)):
            cell = columns[0, names[number, 0]] if P >= 2 else np.float32(0)
            bounds[q, number] = cell + heads[names[number, 1]] + behind


@compiled
def visit(
    xq: Floats,
    books: Any,
    P: Number,
    names: Codes,
    lists: Ids,
    at: Ids,
    ends: Ids,
    tree: Any,
    passing: Any,
    k: Number,
    floor: Floats,
    D: Floats,
    found: Ids,
    counts: Ids,
) -> Number:
    """Visit some lists for all queries, as far as their bounds reach the k-th score so far.

    Args:
        xq: float32 [Q, M * d].
        books: codebooks, float32 [d, M, K], and step (:func:`tables`).
        lists: int64 [n], numbers of the lists, and ``at``, int64 [n], where each is in ``ends``.
        ends: int64 [any], the first node (or row) of each list, and the number of all.
        tree: as :class:`.codeword_lists.Tree`, with the rows in the end.
        floor: float32 [Q], scores below do not count.
        D: float32 [Q, k], found: int64 [Q, k], counts: int64 [Q]: the best so far, of k the worst in the end. With k = 0 float32
            [Q, any] and int64 [Q, any], which take what they can of all items that reach ``floor``, of which ``counts`` is the number.

    Returns:
        Rows that were scored.
    """
    ZT, step = books
    M, K = ZT.shape[1], ZT.shape[2]
    single, columns, rest, heads, stack = _room(M, K, tree[3][0].shape[1])
    done, held = 0, _held(k)
    for q in range(len(xq)):
        margin = _margin(M, tables(xq[q], ZT, single, columns, rest, step))
        behind, _ = _heads(single, columns, margin, P, heads)
        query, out = (columns, rest, margin, step), held if k else (D[q], found[q])
        n, least = counts[q], floor[q]
        for i in range(n if k else 0):
            held[0][i], held[1][i] = D[q, i], found[q, i]
        if k and n == k:
            least = max(least, D[q, k - 1])
        for i in range(len(lists)):
            name = names[lists[i]]
            s = columns[0, name[0]] if P >= 2 else np.float32(0)
            if s + heads[name[1]] + behind < least:
                continue
            if P == 4:
                s += heads[name[1]]
            low, high = ends[at[i]], ends[at[i] + 1]
            n, least, more = _list(low, high, s, P // 2, query, tree, passing, k, out, n, least, stack, _ALL)
            done += more
        counts[q] = _best(held, n, k, D[q], found[q]) if k else n
    return done


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
    books: Any,
    P: Number,
    names: Codes,
    cells: Any,
    pieces: Any,
    ends: Ids,
    tree: Any,
    passing: Any,
    k: Number,
    budget: Number,
    xq: Floats,
    floor: Floats,
    D: Floats,
    found: Ids,
    given_up: Any,
) -> Number:
    """The ``k`` best items of each query among all lists.

    The most promising list gives a first threshold. Then come the cells (lists with the same first two codewords) that reach it, best
    first.

    Args:
        cells: uint8 [cells], values of the first column, and int64 [cells + 1], the first list of each.
        pieces: int64 [lists + 1], the first piece of each list, and int64 [any], where each piece is in ``ends``; -1: not there.
        budget: rows from which on a query is given up, as where it reaches a piece that is not there.
        D, found, given_up: float32 [Q, k], int64 [Q, k], filled with the results, -inf and -1 where there are none; and bool [Q], the
            queries that were given up, which have no results. Other arguments as :func:`visit`.

    Returns:
        Rows that were scored.
    """
    ZT, step = books
    M, K = ZT.shape[1], ZT.shape[2]
    single, columns, rest, heads, stack = _room(M, K, tree[3][0].shape[1])
    (value, first), (begin, at) = cells, pieces
    bounds, turn = np.empty(len(value), np.float32), np.empty(len(value) + 1, np.int64)
    every, held = np.int64(0), _held(k)
    for q in range(len(xq)):
        margin = _margin(M, tables(xq[q], ZT, single, columns, rest, step))
        behind, most = _heads(single, columns, margin, P, heads)
        query = (columns, rest, margin, step)
        best = 0
        for c in range(len(value)):
            bounds[c] = columns[0, value[c]] if P >= 2 else np.float32(0)
            if bounds[c] > bounds[best]:
                best = c
        opened = first[best]
        for number in range(first[best], first[best + 1]):
            if heads[names[number, 1]] > heads[names[opened, 1]]:
                opened = number
        top = behind + most
        n, least, done, turns = np.int64(0), floor[q], np.int64(0), 1
        turn[0] = -1  # that list
        i, lacks = 0, False
        while i < turns and done <= budget and not lacks:
            c = turn[i]
            i += 1
            low, high = (opened, opened + 1) if c < 0 else (first[c], first[c + 1])
            cell = bounds[best] if c < 0 else bounds[c]
            if cell + top < least:
                break
            for number in range(low, high):
                head = heads[names[number, 1]]
                if (c >= 0 and number == opened) or cell + head + behind < least:
                    continue
                s = cell + head if P == 4 else cell
                for piece in range(begin[number], begin[number + 1]):
                    lacks = at[piece] < 0
                    if lacks or done > budget:
                        break
                    left, right = ends[at[piece]], ends[at[piece] + 1]
                    n, least, more = _list(
                        left, right, s, P // 2, query, tree, passing, k, held, n, least, stack, budget - done
                    )
                    done += more
                if lacks or done > budget:
                    break
            if c < 0:
                turns = _best_first(bounds, least - top, turn)
        every += done
        given_up[q] = lacks or done > budget
        if not given_up[q]:
            _sorted(held, n, k, D[q], found[q])
    return every


@compiled
def scan_tables(xq: Floats, ZT: Floats, out: Floats, slack: Floats) -> None:
    """Score tables as queries of FastScan, whose codebooks are unit vectors then, and how much a score can exceed FastScan's.

    FastScan rounds tables to steps: at most 255 for the widest, 65,535 for all.

    Args:
        ZT: codebooks, float32 [d, M, K].
        out: float32 [Q, M * 16]. slack: float32 [Q]. Both are filled.
    """
    M, K = ZT.shape[1], ZT.shape[2]
    single = np.empty((M, K), np.float32)
    for q in range(len(xq)):
        largest = _single(xq[q], ZT, single)
        widest = every = np.float32(0)
        for m in range(M):
            low = high = single[m, 0]
            for k in range(1, K):
                low, high = min(low, single[m, k]), max(high, single[m, k])
            widest = max(widest, high - low)
            every += high - low
            for k in range(16):
                out[q, 16 * m + k] = single[m, k if k < K else 0]  # no code has the others
        size = max(widest / 255, every / 65_535)
        rounding = 8 * (M + 2) * _EPS * (2 * largest + 256 * M * size)
        slack[q] = 0.51 * (M + 1) * size + rounding if 255 * size > _TINY else np.inf


@compiled
def rescore(
    rows: Any,
    k: Number,
    single: Floats,
    places: Ids,
    rough: Floats,
    slack: Floats,
    floor: Floats,
    D: Floats,
    found: Ids,
    unproven: Any,
) -> None:
    """Fill the results with the ``k`` best items of each query among the rows of a shortlist.

    Args:
        single: float32 [Q, M * 16], score tables (:func:`scan_tables`).
        places, rough: int64 [Q, any], padded with -1, and float32 [Q, any], FastScan's scores, descending.
        slack: float32 [Q], how much a score can exceed FastScan's.
        D, found, unproven: as of :func:`search`; and bool [Q], whether a row that is not in the shortlist may be a result.
    """
    width, passing = single.shape[1], np.empty(0, np.bool_)
    codes, starts, members = rows
    size = places.shape[1]
    scores, slots = np.empty(size, np.float32), np.empty(size, np.int64)
    items, held = np.empty(size, np.int64), _held(k)
    for q in range(len(single)):
        n, least = np.int64(0), floor[q]
        there = 0
        while there < size and places[q, there] >= 0:
            scores[there] = 0
            there += 1
        # What is far apart in memory is read first, without branches, so that a processor fetches many at once.
        for t in range(codes.shape[1]):
            at = 32 * t
            for i in range(there):
                code = codes[places[q, i], t]
                part = single[q, at + (code & 15)]
                if at + 16 < width:
                    part = single[q, at + 16 + (code >> 4)] + part
                scores[i] += part
        for i in range(there):
            slots[i] = starts[places[q, i]]
        for i in range(there):
            items[i] = members[slots[i]]
        for i in range(there):
            # ``least`` as the k-th score so far; the first item of a row is its smallest.
            if scores[i] > least or (scores[i] == least and (n < k or items[i] < held[1][k - 1])):
                n = _enter(places[q, i], scores[i], rows, passing, k, held, n)
                if n >= k:
                    least = max(least, held[0][k - 1])
        _sorted(held, n, k, D[q], found[q])
        if n >= k:
            least = max(least, D[q, k - 1])
        unproven[q] = places[q, -1] < 0 or rough[q, -1] + slack[q] >= least

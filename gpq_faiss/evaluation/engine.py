"""The sort behind a ranking: blocks of queries in; average precisions, or tie groups, out.

Scores are 32-bit integers (:mod:`.scorers`) of *entries*, which are distinct codes or single items. There are two ways of sorting:

* by a 64-bit key of the score and, in the low bits, the entry's number, so that a plain sort gives the permutation; several
  times faster than ``argsort``. Best if codes repeat.
* by a 32-bit key of an item's score and, in the last bit, its relevance, which is all that average precision needs. Best if
  codes hardly repeat.

Full rankings with the expected value over ties, the usual case, need no list of tie groups. The closed form of
:mod:`.ties` for a group of n items, r of them relevant, with A items and B relevant items up to and including the
group, is

    (r/n * B - r/n * p * A) * (H(A) - H(A-n)) + r p,        p = (r-1)/(n-1)  (0 for n = 1)

(the constants of the first bracket cancel), and r/n, r/n * p and the sum of r p over all codes are the same
for all queries of one label set. So every code is treated as a group; if different codes have equal scores,
which is rare, their terms are replaced by that of their joint group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .grouping import Bytes, Relevance, distinct_rows
from .scorers import LAST, Fill, Keys
from .ties import Floats, Groups, Ints, harmonic_numbers, precision_sums

_LOW = np.int64((1 << 32) - 1)
_CACHE = 1 << 16  # scores sorted and summed per block, so that buffers fit a core's cache
_TOGETHER = 8  # minimum queries scored together, sharing look-ups
_BYTES = 72  # of all buffers, per score


class Found(NamedTuple):
    """Measures of some queries."""

    relevant: Ints
    """[q] relevant items in the database."""
    ap: Floats | None
    """[q] expected average precision of the full ranking, where requested."""
    groups: Groups | None
    """The tie groups, where requested."""


class _Counts(NamedTuple):
    """The database as a label set sees it."""

    total: int
    """Relevant items."""
    packed: NDArray[Any]
    """[U] relevant items << 32 | items, for a single look-up and sum; with relevance in the keys int32 [N], 1 if relevant, and
    nothing else."""
    share: Floats
    """[U] r/n."""
    slope: Floats
    """[U] r/n * p."""
    constant: float
    """Sum of r p."""


class _Thread(threading.local):
    """Buffers of one thread, allocated once and reused, and the counts of its last label set."""

    def __init__(self) -> None:
        self.arrays: dict[str, NDArray[Any]] = {}
        self.label_set = -1
        self.counts: _Counts

    def buffer(self, name: str, dtype: type, rows: int, width: int) -> NDArray[Any]:
        """Scratch [rows, width] of this name."""
        array = self.arrays.get(name)
        if array is None or len(array) < rows:
            array = self.arrays[name] = np.empty((rows, width), dtype=dtype)
        return array[:rows]


class Engine:
    """Ranks blocks of queries over one database of N items, which are U entries."""

    def __init__(
        self,
        scores: Fill,
        entry_of: Ints,
        width: int,
        labels: Bytes,
        queries: Bytes,
        exclude: Ints | None,
        *,
        relevance_in_keys: bool,
        ordered: bool,
    ) -> None:
        """Count the database.

        Args:
            scores: of the entries.
            entry_of: [N] entry of each item.
            width: U.
            labels, queries: packed label rows [N, W] and [Q, W].
            exclude: None, or [Q] the item excluded for each query, or -1.
            relevance_in_keys: sort items by keys with their relevance; the last bit of all scores must be 0.
            ordered: equal scores are in the order of the entries, which are items.
        """
        self._scores, self._entry_of, self._width = scores, entry_of, width
        self._labels, self._queries, self._exclude = labels, queries, exclude
        self._relevance_in_keys, self._ordered = relevance_in_keys, ordered
        _, self._set_of = distinct_rows(queries)
        self._sizes = np.bincount(entry_of, minlength=width).astype(np.int64)
        self._relevance = Relevance(labels, entry_of, width)
        self._numbers = np.arange(width, dtype=np.int64)
        self._ranks = np.arange(1, len(entry_of) + 1, dtype=np.float64)
        self._inverse = 1.0 / self._ranks
        self._single = width == len(entry_of)
        self.harmonic = harmonic_numbers(len(entry_of))
        self._thread = _Thread()

    def order_of_queries(self) -> Ints:
        """All queries, sorted by label set, so that relevant items are counted once per set."""
        return np.argsort(self._set_of, kind="stable")

    def block_size(self, memory: int) -> int:
        """Queries per block within ``memory`` bytes and the cache; at least one."""
        best = max(_CACHE // self._width, _TOGETHER)
        return int(np.clip(min(best, memory // (_BYTES * self._width)), 1, 64))

    def measure(self, block: Ints, *, ap: bool, groups: bool) -> Iterator[Found]:
        """Rank the queries ``block`` (in :meth:`order_of_queries`) and yield measures of a few at a time.

        Args:
            ap: compute the expected average precision of the full ranking.
            groups: compute the tie groups.
        """
        scores = self._buffer("scores", np.int32, len(block))
        self._scores(block, scores)
        part = 1 if self._relevance_in_keys else max(1, _CACHE // self._width)
        one = self._items if self._relevance_in_keys else self._entries
        for start in range(0, len(block), part):
            rows = slice(start, start + part)
            yield one(block[rows], scores[rows], ap, groups)

    def _buffer(self, name: str, dtype: type, rows: int = 1) -> NDArray[Any]:
        return self._thread.buffer(name, dtype, rows, self._width)

    def _counts(self, query: int) -> _Counts:
        thread = self._thread
        if thread.label_set != self._set_of[query]:
            hits = self._relevance.hits(self._queries[query])
            if self._relevance_in_keys:
                none = np.zeros(0)
                thread.counts = _Counts(int(hits.sum()), hits.astype(np.int32), none, none, 0.0)
            else:
                share, slope, repeated = _shares(hits, self._sizes)
                packed = (hits << 32) | self._sizes
                thread.counts = _Counts(int(hits.sum()), packed, share, slope, float(repeated.sum()))
            thread.label_set = int(self._set_of[query])
        return thread.counts

    def _excluded(self, query: int) -> tuple[int, int]:
        """The item excluded for a query (or -1), and 1 if it would be relevant."""
        item = -1 if self._exclude is None else int(self._exclude[query])
        return item, int(item >= 0 and bool((self._labels[item] & self._queries[query]).any()))

    # ---- items, by keys with their relevance

    def _items(self, block: Ints, scores: Keys, ap: bool, groups: bool) -> Found:
        """Rank by one query's scores [1, N], which become the keys."""
        query, keys = int(block[0]), scores[0]
        counts, (item, hit) = self._counts(query), self._excluded(query)
        relevant = counts.total - hit
        keys |= counts.packed
        if item >= 0:
            keys[item] = LAST - 1  # behind all others and not relevant: as if absent
        keys.sort()
        hit_bits = self._buffer("hit", bool)[0]
        np.bitwise_and(keys, 1, out=hit_bits.view(np.int8), casting="unsafe")
        places = np.flatnonzero(hit_bits)
        # Relevant items come last within a score, so a run of equal scores with both has one step, in the last bit only.
        step = self._buffer("step", np.int32)[0]
        np.bitwise_xor(keys[1:], keys[:-1], out=step[1:])
        step[:1] = 0
        low = np.flatnonzero(step.take(places) == 1)
        middle = places[low]
        first = np.searchsorted(keys, keys[middle] - 1)
        last = np.searchsorted(keys, keys[middle], side="right") - 1
        hits = last - middle + 1
        zeros = np.zeros(len(low), dtype=np.int64)
        mixed = Groups(1, zeros, first, last - first + 1, low, hits, np.array([relevant]))
        value = self._item_ap(places, mixed) if ap else 0.0
        return Found(
            mixed.relevant,
            np.array([value]) if ap else None,
            _item_groups(places, mixed) if groups else None,
        )

    def _item_ap(self, places: Ints, mixed: Groups) -> float:
        """From the ranks of relevant items, and the ties with other items."""
        relevant = int(mixed.relevant[0])
        if not relevant:
            return 0.0
        terms = self._inverse.take(places)
        terms *= self._ranks[: len(places)]
        total = float(terms.sum())
        if len(mixed.row):
            low = mixed.hits_before
            bounds = np.stack([low, low + mixed.hits], axis=1).ravel()
            inside = np.add.reduceat(np.append(terms, 0.0), bounds)[::2]
            total += float((precision_sums(mixed, self.harmonic) - inside).sum())
        return total / relevant

    # ---- entries, by keys with their numbers

    def _entries(self, block: Ints, scores: Keys, ap: bool, groups: bool) -> Found:
        b = len(block)
        keys: Ints = self._buffer("keys", np.int64, b)
        np.left_shift(scores, 32, out=keys, dtype=np.int64)
        keys |= self._numbers
        keys.sort(axis=1)
        index: Ints = self._buffer("index", np.int64, b)
        np.bitwise_and(keys, _LOW, out=index)
        packed: Ints = self._buffer("packed", np.int64, b)
        share: Floats = self._buffer("share", np.float64, b)
        slope: Floats = self._buffer("slope", np.float64, b)
        relevant, constant = np.zeros(b, dtype=np.int64), np.zeros(b)
        for i, query in enumerate(block.tolist()):
            counts, (item, hit) = self._counts(query), self._excluded(query)
            relevant[i], constant[i] = counts.total - hit, counts.constant
            np.take(counts.packed, index[i], out=packed[i], mode="clip")
            if ap:
                np.take(counts.share, index[i], out=share[i], mode="clip")
                if not self._single:
                    np.take(counts.slope, index[i], out=slope[i], mode="clip")
            if item >= 0:
                entry = self._entry_of[item]
                at = int((index[i] == entry).argmax())
                had, size = int(counts.packed[entry] >> 32), int(counts.packed[entry] & _LOW)
                shares, slopes, repeated = _shares(np.array([had - hit, had]), np.array([size - 1, size]))
                packed[i, at] -= (hit << 32) + 1
                share[i, at], slope[i, at] = shares[0], slopes[0]
                constant[i] += repeated[0] - repeated[1]
        sums: Ints = index  # no longer needed
        np.cumsum(packed, axis=1, out=sums)
        tied = np.zeros(0, dtype=np.int64)
        if not self._ordered:
            change: Ints = self._buffer("change", np.int64, b)
            np.bitwise_xor(keys[:, 1:], keys[:, :-1], out=change[:, :-1])
            change[:, -1] = -1
            same: NDArray[np.bool_] = self._buffer("same", bool, b)
            np.less_equal(change.view(np.uint64), np.uint64(_LOW), out=same)
            tied = np.flatnonzero(same)
        values = None
        if ap:
            terms = self._entry_terms(sums, share, slope)
            values = terms.sum(axis=1)
            values += constant
            if len(tied):
                values += self._tie_corrections(tied, terms, packed, sums)
            np.divide(values, relevant, out=values, where=relevant > 0)
            values[relevant == 0] = 0.0
        return Found(relevant, values, _entry_groups(tied, packed, sums, relevant) if groups else None)

    def _entry_terms(self, sums: Ints, share: Floats, slope: Floats) -> Floats:
        """[b, U] the part of each entry's closed form that depends on its rank. Overwrites ``share``."""
        b = len(sums)
        whole: Ints = self._buffer("whole", np.int64, b)
        number: Floats = self._buffer("number", np.float64, b)
        step: Floats = self._buffer("difference", np.float64, b)
        np.right_shift(sums, 32, out=whole)
        np.copyto(number, whole)
        share *= number
        np.bitwise_and(sums, _LOW, out=whole)
        if self._single:  # every entry is one item or none: H(A) - H(A-1) = 1/A, exactly
            np.subtract(whole, 1, out=whole)
            share *= np.take(self._inverse, whole, out=step, mode="clip")
            return share
        np.copyto(number, whole)
        slope *= number
        share -= slope
        np.take(self.harmonic, whole, out=step, mode="clip")
        np.subtract(step[:, 1:], step[:, :-1], out=number[:, 1:])
        number[:, 0] = step[:, 0]
        share *= number
        return share

    def _tie_corrections(self, tied: Ints, terms: Floats, packed: Ints, sums: Ints) -> Floats:
        """[b] correction for groups of different entries with equal scores: their term less those of their entries.

        Args:
            tied: flat indices of entries with the same score as the next one.
            terms, packed, sums: [b, U] in rank order.
        """
        b, width = terms.shape
        first, last = _runs_of(tied)
        members = np.concatenate([tied, last])  # disjoint
        counts = packed.reshape(-1).take(members)
        _, _, repeated = _shares(counts >> 32, counts & _LOW)
        single = terms.reshape(-1).take(members) + repeated
        flat = sums.reshape(-1)
        before = flat.take(first) - packed.reshape(-1).take(first)
        here = flat.take(last) - before
        some = here > _LOW
        row, before, here = first[some] // width, before[some], here[some]
        group = Groups(b, row, before & _LOW, here & _LOW, before >> 32, here >> 32, row)
        together = precision_sums(group, self.harmonic)
        # an empty bincount has integer type
        result = np.bincount(row, weights=together, minlength=b).astype(np.float64)
        result -= np.bincount(members // width, weights=single, minlength=b)
        return result


def _shares(hits: Ints, sizes: Ints) -> tuple[Floats, Floats, Floats]:
    """``(r/n, r/n * p, r p)`` with p = (r-1)/(n-1), for groups of n items, r of them relevant."""
    r, n = hits.astype(np.float64), sizes.astype(np.float64)
    share = r / np.maximum(n, 1.0)
    p = np.maximum(r - 1.0, 0.0) / np.maximum(n - 1.0, 1.0)
    return share, share * p, r * p


def _item_groups(places: Ints, mixed: Groups) -> Groups:
    """Tie groups of a ranking of items, given the ranks of relevant items and the ties with other items."""
    n, low = len(places), mixed.hits_before
    before, size, hits = places, np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    before[low], size[low], hits[low] = mixed.before, mixed.size, mixed.hits
    # each tie is represented by its first relevant item
    step = np.zeros(n + 1, dtype=np.int64)
    step[low + 1] -= 1
    step[low + mixed.hits] += 1
    kept = np.cumsum(step)[:-1] >= 0
    zeros, hits_before = np.zeros(n, dtype=np.int64), np.arange(n)
    return Groups(1, zeros[kept], before[kept], size[kept], hits_before[kept], hits[kept], mixed.relevant)


def _entry_groups(tied: Ints, packed: Ints, sums: Ints, relevant: Ints) -> Groups:
    """Tie groups of rankings of entries [b, U]. Changes ``packed``."""
    b, width = packed.shape
    flat, flat_sums = packed.reshape(-1), sums.reshape(-1)
    first, last = _runs_of(tied)
    # The counts of each run of equal scores move to its last entry; only the few tied entries are touched.
    total = flat_sums[last] - flat_sums[first] + flat[first]
    flat[tied] = 0
    flat[last] = total
    places = np.flatnonzero(flat > _LOW)
    here = flat.take(places)
    before = flat_sums.take(places) - here
    return Groups(b, places // width, before & _LOW, here & _LOW, before >> 32, here >> 32, relevant)


def _runs_of(tied: Ints) -> tuple[Ints, Ints]:
    """First and last index of each run of equal scores; ``tied`` are the indices that equal the next one."""
    new = np.ones(len(tied), dtype=bool)
    new[1:] = tied[1:] != tied[:-1] + 1
    return tied[new], tied[np.append(new[1:], True)[: len(tied)]] + 1

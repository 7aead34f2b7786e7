"""The sort behind a ranking: blocks of queries in; average precisions, or tie groups, out.

Scores are 32-bit integers (:mod:`.scorers`). There are two ways of sorting:

* by entry (a distinct code): a 64-bit key of the score and, in the low bits, the entry's number, so that a plain
  sort gives the permutation; several times faster than ``argsort``. Best if codes repeat.
* by item: a 32-bit key of the score and, in the last bit, the item's relevance, which is all that average
  precision needs. Best if codes hardly repeat.

Full rankings with the expected value over ties, the usual case, need no list of tie groups. The closed form of
:mod:`.ties` for a group of n items, r of them relevant, with A items and B relevant items up to and including the
group, is

    (r/n * B - r/n * p * A) * (H(A) - H(A-n)) + r p,        p = (r-1)/(n-1)  (0 for n = 1)

(the constants of the first bracket cancel), and r/n, r/n * p and the sum of r p over all codes are the same
for all queries of one label set. So every code is treated as a group; if different codes have equal scores,
which is rare, their terms are replaced by that of their joint group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .grouping import Bytes, Relevance, distinct_rows
from .scorers import LAST, Keys, Scorer
from .ties import Floats, Groups, Ints, precision_sums

_LOW = np.int64((1 << 32) - 1)
_CACHE = 1 << 16  # scores sorted and summed per block, so that buffers fit a core's cache
_TOGETHER = 8  # minimum queries scored together, sharing look-ups
_BYTES = 72  # of all buffers, per score


class _Workspace:
    """Buffers of one thread, allocated once and reused."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, dtype: type, rows: int, width: int) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None or array.shape[0] < rows:
            array = self._arrays[name] = np.empty((rows, width), dtype=dtype)
        return array[:rows]


class Worker:
    """State of one thread: buffers, and counts of the last label set."""

    def __init__(self) -> None:
        self.buffer = _Workspace()
        self.label_set = -1
        self.total = 0
        """Relevant items."""
        self.counts: NDArray[Any] = np.zeros(0)
        """By entry: int64 [U], relevant items << 32 | items. By item: int32 [N], 1 if relevant."""
        self.share: Floats = np.zeros(0)
        """By entry: r/n."""
        self.slope: Floats = np.zeros(0)
        """By entry: r/n * p."""
        self.constant = 0.0
        """Sum of r p."""


@dataclass(frozen=True)
class Measured:
    """Measures of a block of queries."""

    rows: Ints
    """[q] the queries."""
    relevant: Ints
    """[q] relevant items in the database."""
    ap: Floats | None
    """[q] expected average precision of the full ranking, where requested."""
    groups: Groups | None
    """The tie groups, where requested."""


class Engine:
    """Ranks blocks of queries over one database."""

    def __init__(
        self,
        scorer: Scorer,
        code_of: Ints,
        n_codes: int,
        labels: Bytes,
        queries: Bytes,
        harmonic: Floats,
        *,
        order: Ints | None,
        exclude: Ints | None,
    ) -> None:
        """Count the database.

        Args:
            scorer: of the distinct codes.
            code_of: [N] code of each item.
            labels, queries: packed label rows [N, W] and [Q, W].
            harmonic: the harmonic numbers up to N.
            order: None, or all items in the order of ties.
            exclude: None, or [Q] the item excluded for each query, or -1.
        """
        _, self._set_of = distinct_rows(queries)
        self._labels, self._queries, self._exclude, self._n_codes = labels, queries, exclude, n_codes
        self._harmonic = harmonic
        self._expand: Ints | None = None
        self._by_id = order is not None
        by_item = None if self._by_id else scorer.expand(code_of)
        self._by_item = by_item is not None
        self._scorer = scorer if by_item is None else by_item
        n = len(code_of)
        if order is not None:
            self._entry_of = np.empty(n, dtype=np.int64)
            self._entry_of[order] = np.arange(n)
            self._expand, self._width = code_of[order], n
        elif self._by_item:
            self._entry_of, self._width = np.arange(n, dtype=np.int64), n
        else:
            self._entry_of, self._width = code_of, n_codes
        self._sizes = np.bincount(self._entry_of, minlength=self._width).astype(np.int64)
        self._relevance = Relevance.count(labels, self._entry_of, self._width)
        self._numbers = np.arange(self._width, dtype=np.int64)
        self._ranks = np.arange(1, n + 1, dtype=np.float64)
        self._inverse = 1.0 / self._ranks
        self._single = self._width == n

    def order_of_queries(self) -> Ints:
        """All queries, sorted by label set, so that relevant items are counted once per set."""
        return np.argsort(self._set_of, kind="stable")

    def block_size(self, memory: int) -> int:
        """Queries per block within ``memory`` bytes and the cache; at least one."""
        best = max(_CACHE // self._width, _TOGETHER)
        return int(np.clip(min(best, memory // (_BYTES * self._width)), 1, 64))

    def measure(self, block: Ints, worker: Worker, *, ap: bool, groups: bool) -> Iterator[Measured]:
        """Rank the queries ``block`` (in :meth:`order_of_queries`) and yield measures of a few at a time.

        Args:
            ap: compute the expected average precision of the full ranking.
            groups: compute the tie groups.
        """
        scores: Keys = worker.buffer("scores", np.int32, len(block), self._n_columns)
        self._scorer.fill(block, scores, worker.buffer("spare", np.int32, len(block), self._n_columns))
        part = 1 if self._by_item else max(1, _CACHE // self._width)
        one = self._items if self._by_item else self._entries
        for start in range(0, len(block), part):
            rows = slice(start, min(len(block), start + part))
            yield one(block[rows], scores[rows], worker, ap, groups)

    @property
    def _n_columns(self) -> int:
        return self._width if self._by_item else self._n_codes

    def _select(self, label_set: int, query: int, worker: Worker) -> None:
        """Update the counts of ``worker`` for the label set of ``query``."""
        if worker.label_set == label_set:
            return
        hits = self._relevance.hits(self._queries[query])
        worker.total = int(hits.sum())
        if self._by_item:
            worker.counts = hits.astype(np.int32)
        else:
            # Both counts of an entry in one integer, for a single look-up and sum.
            worker.counts = (hits << 32) | self._sizes
            worker.share, worker.slope, repeated = _shares(hits, self._sizes)
            worker.constant = float(repeated.sum())
        worker.label_set = label_set

    def _runs(self, block: Ints, worker: Worker) -> Iterator[tuple[int, int]]:
        """Each run (start, stop) of queries with equal label sets, with the set's counts in ``worker``."""
        start = 0
        while start < len(block):
            label_set = int(self._set_of[block[start]])
            stop = start + 1
            while stop < len(block) and self._set_of[block[stop]] == label_set:
                stop += 1
            self._select(label_set, int(block[start]), worker)
            yield start, stop
            start = stop

    def _excluded(self, query: int) -> tuple[int, int]:
        """The item excluded for a query (or -1), and 1 if it would be relevant."""
        item = -1 if self._exclude is None else int(self._exclude[query])
        return item, int(item >= 0 and bool((self._labels[item] & self._queries[query]).any()))

    # ---- by item

    def _items(self, block: Ints, scores: Keys, worker: Worker, ap: bool, groups: bool) -> Measured:
        """Convert one query's scores [1, N] to keys, in place."""
        query = int(block[0])
        self._select(int(self._set_of[query]), query, worker)
        keys = scores[0]
        keys |= worker.counts
        item, hit = self._excluded(query)
        relevant = worker.total - hit
        if item >= 0:
            keys[item] = LAST - 1  # behind all others and not relevant: as if absent
        keys.sort()
        hit_bits: NDArray[np.bool_] = worker.buffer("hit", bool, 1, self._width)[0]
        np.bitwise_and(keys, 1, out=hit_bits.view(np.int8), casting="unsafe")
        places = np.flatnonzero(hit_bits)
        ties = _Ties.find(keys, places, worker.buffer("spare", np.int32, 1, self._width)[0])
        value = self._item_ap(places, ties, relevant) if ap else 0.0
        return Measured(
            block,
            np.array([relevant]),
            np.array([value]) if ap else None,
            _item_groups(places, ties, relevant) if groups else None,
        )

    def _item_ap(self, places: Ints, ties: _Ties, relevant: int) -> float:
        if not relevant:
            return 0.0
        terms = self._inverse.take(places)
        terms *= self._ranks[: len(places)]
        total = float(terms.sum())
        if len(ties.first):
            bounds = np.stack([ties.low, ties.high], axis=1).ravel()
            inside = np.add.reduceat(np.append(terms, 0.0), bounds)[::2]
            zeros = np.zeros(len(bounds) // 2, dtype=np.int64)
            tied = Groups(
                1, zeros, ties.first, ties.last - ties.first + 1, ties.low, ties.high - ties.low, zeros
            )
            total += float((precision_sums(tied, self._harmonic) - inside).sum())
        return total / relevant

    # ---- by entry

    def _entries(self, block: Ints, scores: Keys, worker: Worker, ap: bool, groups: bool) -> Measured:
        b, width = len(block), self._width
        if self._expand is not None:
            out = worker.buffer("items", np.int32, b, width)
            scores = np.take(scores, self._expand, axis=1, out=out, mode="clip")
        keys: Ints = worker.buffer("keys", np.int64, b, width)
        np.left_shift(scores, 32, out=keys, dtype=np.int64)
        keys |= self._numbers
        keys.sort(axis=1)
        index: Ints = worker.buffer("index", np.int64, b, width)
        np.bitwise_and(keys, _LOW, out=index)
        packed: Ints = worker.buffer("packed", np.int64, b, width)
        share: Floats = worker.buffer("share", np.float64, b, width)
        slope: Floats = worker.buffer("slope", np.float64, b, width)
        relevant, constant = np.zeros(b, dtype=np.int64), np.zeros(b)
        for start, stop in self._runs(block, worker):
            parts = (
                (slice(start, stop),)
                if self._exclude is None
                else (slice(i, i + 1) for i in range(start, stop))
            )
            for part in parts:
                with _LeftOut(worker, self._entry_of, *self._excluded(int(block[part.start]))):
                    relevant[part], constant[part] = worker.total, worker.constant
                    np.take(worker.counts, index[part], out=packed[part], mode="clip")
                    if ap:
                        np.take(worker.share, index[part], out=share[part], mode="clip")
                        if not self._single:
                            np.take(worker.slope, index[part], out=slope[part], mode="clip")
        sums: Ints = index  # no longer needed
        np.cumsum(packed, axis=1, out=sums)
        tied = np.zeros(0, dtype=np.int64)
        if not self._by_id:
            change: Ints = worker.buffer("change", np.int64, b, width)
            np.bitwise_xor(keys[:, 1:], keys[:, :-1], out=change[:, :-1])
            change[:, -1] = -1
            same: NDArray[np.bool_] = worker.buffer("same", bool, b, width)
            np.less_equal(change.view(np.uint64), np.uint64(_LOW), out=same)
            tied = np.flatnonzero(same)
        values = None
        if ap:
            terms = self._entry_terms(sums, share, slope, worker)
            values = terms.sum(axis=1)
            values += constant
            if len(tied):
                values += self._tie_corrections(tied, terms, packed, sums)
            np.divide(values, relevant, out=values, where=relevant > 0)
            values[relevant == 0] = 0.0
        return Measured(
            block, relevant, values, _entry_groups(tied, packed, sums, relevant) if groups else None
        )

    def _entry_terms(self, sums: Ints, share: Floats, slope: Floats, worker: Worker) -> Floats:
        """[b, U] the part of each entry's closed form that depends on its rank. Overwrites ``share``."""
        b, width = sums.shape
        whole: Ints = worker.buffer("whole", np.int64, b, width)
        number: Floats = worker.buffer("number", np.float64, b, width)
        step: Floats = worker.buffer("step", np.float64, b, width)
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
        np.take(self._harmonic, whole, out=step, mode="clip")
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
        together = precision_sums(group, self._harmonic)
        # an empty bincount has integer type
        result = np.bincount(row, weights=together, minlength=b).astype(np.float64)
        result -= np.bincount(members // width, weights=single, minlength=b)
        return result


class _LeftOut:
    """Context in which the counts of ``worker`` exclude one item."""

    def __init__(self, worker: Worker, entry_of: Ints, item: int, hit: int) -> None:
        self._worker, self._item, self._hit = worker, item, hit
        self._entry = int(entry_of[item])

    def __enter__(self) -> None:
        if self._item >= 0:
            worker, e = self._worker, self._entry
            self._kept = worker.total, worker.constant, worker.counts[e], worker.share[e], worker.slope[e]
            had, size = int(worker.counts[e] >> 32), int(worker.counts[e] & _LOW)
            worker.counts[e] -= (self._hit << 32) + 1
            share, slope, repeated = _shares(
                np.array([had - self._hit, had]), np.array([size - 1, size], dtype=np.int64)
            )
            worker.share[e], worker.slope[e] = share[0], slope[0]
            worker.total -= self._hit
            worker.constant += float(repeated[0] - repeated[1])

    def __exit__(self, *_: object) -> None:
        if self._item >= 0:
            w, e = self._worker, self._entry
            w.total, w.constant, w.counts[e], w.share[e], w.slope[e] = self._kept


def _shares(hits: Ints, sizes: Ints) -> tuple[Floats, Floats, Floats]:
    """``(r/n, r/n * p, r p)`` with p = (r-1)/(n-1), for groups of n items, r of them relevant."""
    r, n = hits.astype(np.float64), sizes.astype(np.float64)
    share = r / np.maximum(n, 1.0)
    p = np.maximum(r - 1.0, 0.0) / np.maximum(n - 1.0, 1.0)
    return share, share * p, r * p


@dataclass(frozen=True)
class _Ties:
    """Runs of equal scores with both relevant and other items. In other runs the order does not matter."""

    first: Ints
    """Rank of the first item of each run."""
    last: Ints
    """Rank of its last item."""
    low: Ints
    """Relevant items before it."""
    high: Ints
    """Relevant items up to its end; above ``low``."""

    @classmethod
    def find(cls, keys: Keys, places: Ints, spare: Keys) -> _Ties:
        """From the sorted keys [N] and the ranks of relevant items; ``spare`` is scratch [N]."""
        # Relevant items come last within a score, so a mixed run has one step, in the last bit only.
        np.bitwise_xor(keys[1:], keys[:-1], out=spare[1:])
        spare[:1] = 0
        low = np.flatnonzero(spare.take(places) == 1)
        middle = places[low]
        score = keys[middle]
        first = np.searchsorted(keys, score - 1)
        last = np.searchsorted(keys, score, side="right") - 1
        return cls(first, last, low, low + (last - middle + 1))


def _item_groups(places: Ints, ties: _Ties, relevant: int) -> Groups:
    """Tie groups of a ranking of items, given the ranks of relevant items."""
    n = len(places)
    row, before, hits_before = np.zeros(n, dtype=np.int64), places, np.arange(n)
    size, hits = np.ones(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    total = np.array([relevant])
    if not len(ties.first):
        return Groups(1, row, before, size, hits_before, hits, total)
    before[ties.low] = ties.first
    size[ties.low] = ties.last - ties.first + 1
    hits[ties.low] = ties.high - ties.low
    step = np.zeros(n + 1, dtype=np.int64)  # each tie is represented by its first relevant item
    step[ties.low + 1] -= 1
    step[ties.high] += 1
    kept = np.cumsum(step)[:-1] >= 0
    return Groups(1, row[kept], before[kept], size[kept], hits_before[kept], hits[kept], total)


def _entry_groups(tied: Ints, packed: Ints, sums: Ints, relevant: Ints) -> Groups:
    """Tie groups of rankings of entries [b, U]. Changes ``packed``."""
    b, width = packed.shape
    flat, flat_sums = packed.reshape(-1), sums.reshape(-1)
    _merge_ties(tied, flat, flat_sums)
    places = np.flatnonzero(flat > _LOW)
    here = flat.take(places)
    before = flat_sums.take(places) - here
    bounds = np.searchsorted(places, np.arange(b + 1) * width)
    row = np.repeat(np.arange(b), np.diff(bounds))
    return Groups(b, row, before & _LOW, here & _LOW, before >> 32, here >> 32, relevant)


def _runs_of(tied: Ints) -> tuple[Ints, Ints]:
    """First and last index of each run of equal scores; ``tied`` are the indices that equal the next one."""
    if not len(tied):
        return tied, tied
    new = np.ones(len(tied), dtype=bool)
    new[1:] = tied[1:] != tied[:-1] + 1
    ends = np.append(np.flatnonzero(new)[1:] - 1, len(tied) - 1)
    return tied[new], tied[ends] + 1


def _merge_ties(tied: Ints, counts: Ints, sums: Ints) -> None:
    """Move the counts of each run of equal scores to its last entry, in place.

    Only the few different codes with equal scores are touched.
    """
    if not len(tied):
        return
    first, last = _runs_of(tied)
    total = sums[last] - sums[first] + counts[first]
    counts[tied] = 0
    counts[last] = total

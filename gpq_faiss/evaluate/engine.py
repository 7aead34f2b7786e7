"""The sort behind a ranking: blocks of queries in, tie groups out. Whole numbers throughout, so nothing is
approximate.

Scores become 32-bit whole numbers first. Tables are rounded to multiples of a power of two, 2^-29 of the
largest score a query can have; their sums are then exact in any order, and nearer to the true inner product
than float32 sums are. Scores of a function keep their float32 bits, mapped so that whole numbers compare as
the floats do. Two ways of sorting follow:

* by entry (a distinct code): a 64-bit key holds the score and, below it, the entry's number, so that a plain
sort
  carries its own permutation; several times faster than ``argsort``. Best where codes repeat.
* by item: a 32-bit key holds the score and, in the last bit, whether the item is relevant. No permutation is
needed at
  all, since that bit is everything an average precision asks of an item. Best where codes hardly repeat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .grouping import Bytes, Relevance, distinct_rows
from .ties import Groups, Ints

Keys = NDArray[np.int32]

_LOW = np.int64((1 << 32) - 1)
_LAST = np.int32(np.iinfo(np.int32).max)
_CACHE = 1 << 15  # scores a block: the buffers then stay in a core's own cache (twice as fast at 12 bits) ...
_FEW, _LARGE = (
    8,
    1 << 17,
)  # ... but rather up to 8 queries a block, if that is no more than this: calls cost too
_BYTES = 48  # of all buffers together, a score
_TABLE_ENTRIES = 4096  # of a joint look-up table: 16 KiB, which stay in the first-level cache
_BY_ITEM = 0.45  # share of distinct codes from which sorting items is faster (measured)


class Scorer(Protocol):
    """Gives scores as whole numbers, *smaller is better*."""

    spare_bit: bool
    """Whether the last bit of every key is 0, and their magnitude below 2^31 - 2."""

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        """Fill ``out`` int32 [q, U]; ``spare`` is scratch of that shape."""
        ...

    def expand(self, code_of: Ints) -> Scorer | None:
        """The same scores for every item rather than for every code, or None where that costs more than it
        gives."""
        ...


class TableScorer:
    """Adds up tables [Q, M, K] for codes [U, M]."""

    spare_bit = True

    def __init__(self, tables: NDArray[np.float32], codes: Bytes) -> None:
        """Check and prepare.

        Raises:
            UsageError: codes of another width than the tables. DataError: codewords out of range, tables not
                finite.
        """
        tables = np.asarray(tables)
        if tables.ndim != 3 or tables.dtype != np.float32:
            raise DataError(f"tables must be float32 [Q, M, K], not {tables.dtype} {tables.shape}")
        _, m, size = tables.shape
        if codes.shape[1] != m:
            raise UsageError(
                f"codes have {codes.shape[1]} codewords each, the tables {m} codebooks: unpack the codes first"
            )
        if len(codes) and int(codes.max()) >= size:
            raise DataError(f"codeword {codes.max()} is out of range: the codebooks have {size}")
        # No score exceeds this sum of magnitudes, which also is NaN or infinite if any entry is.
        largest = np.abs(tables).max(axis=2, initial=0.0).sum(axis=1, dtype=np.float64)
        if not (largest < np.finfo(np.float32).max).all():
            raise DataError(
                "score tables hold NaN, infinity or values too large to add: check the query vectors"
            )
        # The sum stays below 2^29 + M/2, which leaves a bit for relevance and the largest value for "last of
        # all".
        self._exponent = 29 - np.frexp(largest)[1]
        self._tables, self._codes = tables, codes
        # A gather costs the same whatever it gathers: one look-up serves as many codebooks as fit a small
        # table.
        step = 1
        while size ** (step + 1) <= _TABLE_ENTRIES:
            step += 1
        self._chunks: list[tuple[int, int, Ints]] = []
        for start in range(0, m, step):
            stop = min(m, start + step)
            index = np.zeros(len(codes), dtype=np.int64)
            for column in range(start, stop):
                index = index * size + codes[:, column]
            self._chunks.append((start, stop, index))

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        scaled = np.ldexp(self._tables[queries].astype(np.float64), self._exponent[queries, None, None])
        tables = np.rint(scaled).astype(np.int32) * np.int32(-2)  # the last bit stays free
        for start, stop, index in self._chunks:
            chunk = tables[:, start]
            for column in range(start + 1, stop):
                chunk = (chunk[:, :, None] + tables[:, None, column]).reshape(len(queries), -1)
            if start == 0:
                np.take(chunk, index, axis=1, out=out, mode="clip")  # "clip" writes straight into out
            else:
                np.take(chunk, index, axis=1, out=spare, mode="clip")
                np.add(out, spare, out=out)

    def expand(self, code_of: Ints) -> Scorer | None:
        if len(self._codes) < _BY_ITEM * len(code_of):
            return None
        return TableScorer(self._tables, self._codes[code_of])


class FunctionScorer:
    """Scores that a function gives, float32 or what fits float32 exactly."""

    spare_bit = False

    def __init__(self, function: Callable[[Ints], NDArray[Any]]) -> None:
        self._function = function

    def fill(self, queries: Ints, out: Keys, spare: Keys) -> None:
        given = np.asarray(self._function(queries))
        if given.shape != out.shape:
            raise DataError(
                f"the score function gave {given.shape} for {len(queries)} queries: expected {out.shape}"
            )
        floats = out.view(np.float32)
        if given.dtype != np.float32:
            with np.errstate(over="ignore"):
                floats[...] = given
            if not (floats == given).all() and np.isfinite(given).all():
                raise UsageError(
                    f"scores of type {given.dtype} do not fit float32 exactly: round them yourself, as it makes ties"
                )
            given = floats
        if not np.isfinite(given).all():
            raise DataError("scores hold NaN or infinity: a ranking needs finite scores")
        np.subtract(np.float32(0), given, out=floats)  # 0 - x, as -x would tell -0.0 from 0.0
        # The bits of floats compare like whole numbers, but backwards where negative.
        np.right_shift(out, 31, out=spare)
        np.bitwise_and(spare, _LAST, out=spare)
        np.bitwise_xor(out, spare, out=out)

    def expand(self, code_of: Ints) -> Scorer | None:
        return None


class _Workspace:
    """The buffers of one thread, made at first use and used again for every block."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}

    def __call__(self, name: str, dtype: type, rows: int, width: int) -> NDArray[Any]:
        array = self._arrays.get(name)
        if array is None or array.shape[0] < rows:
            array = self._arrays[name] = np.empty((rows, width), dtype=dtype)
        return array[:rows]


class Worker:
    """What one thread keeps from block to block: buffers, and what the last label set needs."""

    def __init__(self) -> None:
        self.buffer = _Workspace()
        self.label_set = -1
        self.counts: NDArray[Any] = np.zeros(0)
        self.total = 0


class Engine:
    """Ranks blocks of queries over one database."""

    def __init__(
        self,
        scorer: Scorer,
        code_of: Ints,
        n_codes: int,
        labels: Bytes,
        queries: Bytes,
        *,
        order: Ints | None,
        exclude: Ints | None,
    ) -> None:
        """Count the database.

        Args:
            scorer: of the distinct codes.
            code_of: [N] code of each item.
            labels, queries: packed label rows [N, W] and [Q, W].
            order: None, or all items in the order that ties take.
            exclude: None, or [Q] the item that is left out for each query, or -1.
        """
        _, self._set_of = distinct_rows(queries)
        self._labels, self._queries, self._exclude, self._n_codes = labels, queries, exclude, n_codes
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

    def order_of_queries(self) -> Ints:
        """All queries, those of one label set together, so that the items relevant to it are counted once."""
        return np.argsort(self._set_of, kind="stable")

    def block_size(self, memory: int) -> int:
        """Queries a block within ``memory`` bytes, and no more than the cache can use; at least one."""
        best = max(_CACHE // self._width, min(_FEW, _LARGE // self._width))
        return int(np.clip(min(best, memory // (_BYTES * self._width)), 1, 64))

    def groups(self, block: Ints, worker: Worker) -> Groups:
        """Tie groups of the rankings of the queries ``block`` (in :meth:`order_of_queries`)."""
        return self._items(block, worker) if self._by_item else self._entries(block, worker)

    def _runs(self, block: Ints, worker: Worker) -> Iterator[tuple[int, int]]:
        """Each run of queries with one label set as (start, stop), with ``worker`` holding that set's
        counts."""
        start = 0
        while start < len(block):
            label_set = int(self._set_of[block[start]])
            stop = start + 1
            while stop < len(block) and self._set_of[block[stop]] == label_set:
                stop += 1
            if worker.label_set != label_set:
                hits = self._relevance.hits(self._queries[block[start]])
                worker.total = int(hits.sum())
                # One number holds both counts of an entry, so that one look-up and one sum serve both.
                worker.counts = hits.astype(np.int32) if self._by_item else (hits << 32) | self._sizes
                worker.label_set = label_set
            yield start, stop
            start = stop

    def _excluded(self, query: int) -> tuple[int, int]:
        """The item that is left out for a query (or -1), and 1 if it would have been relevant."""
        item = -1 if self._exclude is None else int(self._exclude[query])
        return item, int(item >= 0 and bool((self._labels[item] & self._queries[query]).any()))

    # ---- by item

    def _items(self, block: Ints, worker: Worker) -> Groups:
        b, width = len(block), self._width
        keys: Keys = worker.buffer("keys", np.int32, b, width)
        self._scorer.fill(block, keys, worker.buffer("spare", np.int32, b, width))
        relevant = np.zeros(b, dtype=np.int64)
        for start, stop in self._runs(block, worker):
            keys[start:stop] |= worker.counts
            relevant[start:stop] = worker.total
        if self._exclude is not None:
            for i, query in enumerate(block):
                item, hit = self._excluded(int(query))
                relevant[i] -= hit
                if item >= 0:
                    keys[i, item] = _LAST - 1  # behind all others, and not relevant: as good as absent
        keys.sort(axis=1)
        hit_bits: NDArray[np.bool_] = worker.buffer("hit", bool, b, width)
        np.bitwise_and(keys, 1, out=hit_bits.view(np.int8), casting="unsafe")
        places = np.flatnonzero(hit_bits)
        bounds = np.searchsorted(places, np.arange(b + 1) * width)
        counts = np.diff(bounds)
        row = np.repeat(np.arange(b), counts)
        before = places - row * width
        hits_before = np.arange(len(places)) - np.repeat(bounds[:-1], counts)
        size, hits = np.ones(len(places), dtype=np.int64), np.ones(len(places), dtype=np.int64)
        # Neighbours differ in the last bit at most: one score.
        change: Keys = worker.buffer("spare", np.int32, b, width)
        np.bitwise_xor(keys[:, 1:], keys[:, :-1], out=change[:, 1:])
        change[:, 0] = 2
        same: NDArray[np.bool_] = worker.buffer("same", bool, b, width)
        np.less(change.view(np.uint32), 2, out=same)
        tied = np.flatnonzero(same) - 1
        if not len(tied):
            return Groups(b, row, before, size, hits_before, hits, relevant)
        first, last = _runs_of(tied)
        low, high = np.searchsorted(places, first), np.searchsorted(places, last, side="right")
        some = high > low
        first, last, low, high = first[some], last[some], low[some], high[some]
        before[low] -= places[low] - first
        size[low] = last - first + 1
        hits[low] = high - low
        step = np.zeros(len(places) + 1, dtype=np.int64)  # each tie keeps its first relevant item for all
        step[low + 1] -= 1
        step[high] += 1
        kept = np.cumsum(step)[:-1] >= 0
        return Groups(b, row[kept], before[kept], size[kept], hits_before[kept], hits[kept], relevant)

    # ---- by entry

    def _entries(self, block: Ints, worker: Worker) -> Groups:
        b, width = len(block), self._width
        scores: Keys = worker.buffer("scores", np.int32, b, self._n_codes)
        self._scorer.fill(block, scores, worker.buffer("spare", np.int32, b, self._n_codes))
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
        relevant = np.zeros(b, dtype=np.int64)
        for start, stop in self._runs(block, worker):
            relevant[start:stop] = worker.total
            if self._exclude is None:
                np.take(worker.counts, index[start:stop], out=packed[start:stop], mode="clip")
                continue
            for i in range(start, stop):
                item, hit = self._excluded(int(block[i]))
                relevant[i] -= hit
                less = (hit << 32) + 1 if item >= 0 else 0
                worker.counts[self._entry_of[item]] -= less
                np.take(worker.counts, index[i], out=packed[i], mode="clip")
                worker.counts[self._entry_of[item]] += less
        sums: Ints = index  # its work is done
        np.cumsum(packed, axis=1, out=sums)
        flat, flat_sums = packed.reshape(-1), sums.reshape(-1)
        if not self._by_id:
            keys >>= 32
            same: NDArray[np.bool_] = worker.buffer("same", bool, b, width)
            same[:, -1] = False
            np.equal(keys[:, 1:], keys[:, :-1], out=same[:, :-1])
            _merge_ties(np.flatnonzero(same), flat, flat_sums)
        hit_bits: NDArray[np.bool_] = worker.buffer("hit", bool, b, width)
        np.greater(packed, _LOW, out=hit_bits)
        places = np.flatnonzero(hit_bits)
        here = flat.take(places)
        before = flat_sums.take(places) - here
        bounds = np.searchsorted(places, np.arange(b + 1) * width)
        row = np.repeat(np.arange(b), np.diff(bounds))
        return Groups(b, row, before & _LOW, here & _LOW, before >> 32, here >> 32, relevant)


def _runs_of(tied: Ints) -> tuple[Ints, Ints]:
    """First and last place of each run of equal scores; ``tied`` are the places that equal the next one."""
    new = np.ones(len(tied), dtype=bool)
    new[1:] = tied[1:] != tied[:-1] + 1
    ends = np.append(np.flatnonzero(new)[1:] - 1, len(tied) - 1)
    return tied[new], tied[ends] + 1


def _merge_ties(tied: Ints, counts: Ints, sums: Ints) -> None:
    """Give the last of each run of equal scores the counts of the whole run, and the others none, in place.

    Different codes with equal scores are few, so only they are touched.
    """
    if not len(tied):
        return
    first, last = _runs_of(tied)
    total = sums[last] - sums[first] + counts[first]
    counts[tied] = 0
    counts[last] = total

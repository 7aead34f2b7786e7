"""Exact search: the codes are their own inverted file.

Codes are sorted by their codewords. A list is a range of this order whose codes begin with the same codewords. The score of these, plus the
best entry of every other table, bounds the scores of all codes of the list. A search

1. scores some codes of the most promising list: the k-th best of them is a threshold that the k-th best of all cannot be below;
2. visits only the lists whose bound reaches the threshold. FastScan, with 8-bit tables of the codebooks behind the first :attr:`P`,
   shortlists k' > k codes of them;
3. scores the shortlist exactly. If the k-th score exceeds all that a code outside the shortlist can have, the result is proven.
   Otherwise k' grows, and finally all codes of these lists are scored.

So the result equals that of brute force on any data, ties ordered by id. With ``nprobe`` it visits only that many lists, those of the best
bounds, and the next bound says how much an item outside them can score (:meth:`ListSearch.bound`).

:class:`CodewordLists` holds its codes in memory, equal ones once, and splits a list by the next codebook as long as it has more than
:data:`CAP` codes. :mod:`.file` has the lists of an index file, which are read when they are visited. The inverted multi-index (Babenko and
Lempitsky, CVPR 2012) has such lists without bounds; PQTable (Matsui et al., TMM 2018) looks codes up without lists.
"""

from __future__ import annotations

import functools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, pack_codes, pack_indices, unpack_codes
from ..codes.blocks import block_bytes
from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject
from ..codes.scores import lookup, lookup_columns, lookup_tables, score_tables
from ..errors import UsageError
from ..faissio.storage import empty_lists, packed_rows
from .ranges import too_many
from .threads import check_threads, in_parallel

CAP = 4096
"""Maximum codes of a list that can be split further."""
SMALL = 4096
"""Number of distinct codes up to which all are scored."""
_DENSE = 4096  # combinations of first codewords whose scores are held in one table
_TYPICAL = 2048  # codes that the list of a random code should have at least, for the choice of P
_SAMPLE = 512  # codes scored for the first threshold
_REFINE = 32_768  # codes in the lists to visit from which a better threshold is looked for first
_FIRST = 16_384  # codes that are shortlisted for it
_BLOCK = 32_768
_ROWS = 32  # codes of a FastScan block
_EPS = float(np.finfo(np.float32).eps)
_TINY = 2.0**-90  # spans of score tables below which FastScan's steps are not representable
_LARGE = 1e30  # |q|^2 from which scores might overflow
_MOST = 8192  # maximum candidates in excess of k


class Allowed:
    """The items of a :class:`CodewordLists` that may be returned.

    Attributes:
        rows: bool [n].
        mask: bool [distinct]: whether any row of a code may.
    """

    def __init__(self, rows: NDArray[np.bool_], mask: NDArray[np.bool_]) -> None:
        self.rows, self.mask = rows, mask
        self._bits: NDArray[np.uint8] | None = None

    def few(self, most: int) -> Ids | None:
        """The places that pass, if they are at most so many."""
        places = np.flatnonzero(self.mask)
        return places if len(places) <= most else None

    def ready(self, lists: Ids) -> None:
        """To be called before the lists are searched."""

    def span(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Which of the places ``start:stop`` pass."""
        return self.mask[start:stop]

    @property
    def selector(self) -> Any:
        """For Faiss."""
        if self._bits is None:
            self._bits = np.packbits(self.mask, bitorder="little")  # must outlive the selector
        return faiss.IDSelectorBitmap(len(self.mask), faiss.swig_ptr(self._bits))


class ListSearch(ABC):
    """Search of codes in lists, by their *places*: positions in the order of their codewords. Thread-safe.

    Args:
        Z: codebooks, float32 [M, K, d], checked.

    Attributes:
        distinct: number of places.
        P: codebooks that all lists share and FastScan does not hold.
        lists: number of lists.
        visited: codes in the lists that searches have visited so far, and
        searched: number of queries so far: for benchmarks.
    """

    def __init__(self, Z: Floats) -> None:
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self._by_dimension = np.ascontiguousarray(Z.transpose(2, 0, 1))
        self._offsets = (np.arange((self.M + 1) // 2) * 256)[:, None]
        self._paired = self.K == 16 and self.M > 1
        self._more: dict[int, int] = {}
        self._spared, self._reached = 1.0, 0.0
        self.visited = self.searched = self.distinct = 0
        self.P = self.lists = 0

    def _arrange(self, begin: Ids, heads: NDArray[np.uint64], depth: Ids, P: int) -> None:
        """Set the lists.

        Args:
            begin: int64 [lists + 1], the place where each list begins, and the number of places.
            heads: uint64 [lists], ascending: the codewords of each list, the first in the highest bits.
            depth: int64 [lists], how many codewords a list has, at least P.
        """
        bits = bits_per_code(self.K)
        self.P, self.lists, self.distinct = P, len(heads), int(begin[-1])
        self._begin, self._sizes = begin, np.diff(begin)
        self._dense = max(level for level in range(P + 1) if level < 2 or self.K**level <= _DENSE)
        shift = np.uint64(64 - bits * self._dense)
        cell_of = (heads >> shift if self._dense else heads * np.uint64(0)).astype(np.int64)
        self._cells = np.searchsorted(cell_of, np.arange(self.K**self._dense + 1))
        self._empty = np.where(np.diff(self._cells) > 0, 0, -np.inf).astype(np.float32)
        # Places in the tables, which get a last column with their best entries, of the codewords behind those of the dense cells.
        self._deepest = int(depth.max())
        self._places = np.empty((self._deepest - self._dense, self.lists), np.int64)
        for row, m in enumerate(range(self._dense, self._deepest)):
            codeword = (heads >> np.uint64(64 - bits * (m + 1))) & np.uint64(self.K - 1)
            self._places[row] = m * (self.K + 1) + np.where(m < depth, codeword.astype(np.int64), self.K)

    @abstractmethod
    def _span(self, start: int, stop: int) -> Codes:
        """Codes of the places ``start:stop``."""

    @abstractmethod
    def _at(self, places: Ids) -> Codes:
        """Codes of some places."""

    @abstractmethod
    def _scanning(self, lists: Ids) -> Iterator[tuple[Any, slice]]:
        """Yield Faiss indexes that have these lists, and which of them each has."""

    @abstractmethod
    def _expand(
        self, scores: Floats, places: Ids, k: int | None, allowed: Allowed | None
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items (None: all) of places with descending scores, best first; ties by id."""

    def _count(self, places: Ids) -> int:
        """Items of some places."""
        return len(places)

    def _too_large(self, lists: Ids) -> bool:
        """Whether one of these lists cannot be given to Faiss."""
        return False

    # Searching -------------------------------------------------------------------------------------------------------

    def search(
        self,
        xq: Floats,
        k: int,
        *,
        allowed: Any = None,
        nprobe: int | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of each checked query [Q, M*d]: scores float32 [Q, k], and ids int64 [Q, k], padded with -inf and -1.

        Args:
            allowed: the items that may be returned (default: all), an :class:`Allowed` or the like.
            nprobe: visit this many lists, and more if these have fewer than ``k`` codes (default: all that can have a result).
        """
        D = np.full((len(xq), k), -np.inf, np.float32)
        found = np.full((len(xq), k), -1, np.int64)
        most = min(k, self.distinct)

        def run(part: slice) -> None:
            for q in range(part.start, min(part.stop, len(xq))):
                scores, ids = self._expand(*self._one(xq[q], most, allowed, nprobe), k, allowed)
                D[q, : len(ids)], found[q, : len(ids)] = scores, ids

        if len(xq) == 1:  # in this thread, without the cost of a pool
            check_threads(threads)
            run(slice(0, 1))
        else:
            in_parallel(run, len(xq), 256, threads)
        return D, found

    def bound(self, xq: Floats, k: int, nprobe: int) -> Floats:
        """What an item outside the lists that a search with ``nprobe`` visits can score at most: float32 [Q], -inf if there is none."""
        if not self.lists:
            return np.full(len(xq), -np.inf, np.float32)
        left = [_Bounds(self, self._tables(query)[0]).first(min(k, self.distinct), nprobe)[2] for query in xq]
        return np.array(left, np.float32)

    def range_search(
        self, query: Floats, min_score: float, limit: int, *, allowed: Any = None
    ) -> tuple[Floats, Ids]:
        """Scores and ids, best first, of all items with at least ``min_score`` for a checked query [M*d].

        Raises:
            DataError: more than ``limit``.
        """
        tables, prepared = self._tables(query)
        scores, places = self._reaching(tables, prepared, min_score, limit, allowed)
        if allowed is None and self._count(places) > limit:
            raise too_many(min_score, limit)
        order = (-scores).argsort(kind="stable")
        scores, ids = self._expand(scores[order], places[order], None, allowed)
        if len(ids) > limit:
            raise too_many(min_score, limit)
        return scores, ids

    def _reaching(
        self, tables: Floats, prepared: Floats, least: float, limit: int, allowed: Any
    ) -> tuple[Floats, Ids]:
        """Scores and places of all codes with at least the score ``least``. Raises DataError: more than ``limit``."""
        return self._all(prepared, _Bounds(self, tables).reaching(least)[0], least, allowed, limit)

    def _tables(self, query: Floats) -> tuple[Floats, Floats]:
        """Score tables [M, K], and :func:`..codes.scores.lookup_tables` of them [T, entries], of one query."""
        if np.vdot(query, query) < _LARGE:  # no table overflows
            # Summed over the outer axis: in the order of score_tables.
            products = np.multiply(self._by_dimension, query.reshape(self.M, self.d).T[:, :, None], order="C")
            tables: Floats = np.add.reduce(products, axis=0, initial=0)
        else:
            tables = score_tables(query[None], self.Z)[0]  # which names the fault
        if self._paired and self.M % 2 == 0:
            return tables, (tables[1::2, :, None] + tables[0::2, None, :]).reshape(-1, 256)
        return tables, lookup_tables(tables[None])[0]

    def _score(self, prepared: Floats, codes: Codes) -> Floats:
        """Exact scores of codes [c, code_size]: float32 [c]."""
        if self._paired and len(codes) > 1:  # the sum over the outer axis is from left to right
            scores: Floats = np.add.reduce(prepared.take(np.add(codes.T, self._offsets, order="C")), axis=0)
            return scores
        return lookup(prepared, lookup_columns(codes, self.M, self.K), paired=self.K <= 16 and self.M > 1)

    def _one(self, query: Floats, k: int, allowed: Any, nprobe: int | None = None) -> tuple[Floats, Ids]:
        """Scores, descending, and places of at least all codes that score as much as the k-th best."""
        tables, prepared = self._tables(query)
        self.searched += 1
        there = None if allowed is None else allowed.few(max(4 * k, _REFINE))
        if there is not None:
            return _best(self._score(prepared, self._at(there)), there, k, at=True)
        bounds = _Bounds(self, tables)
        if nprobe is not None:
            lists, heads, _ = bounds.first(k, nprobe)
            threshold = -np.inf
        else:
            threshold = -np.inf if 4 * k >= self.distinct else self._sampled(bounds, prepared, k, allowed)
            lists, heads = bounds.reaching(threshold)
        items = int(self._sizes.take(lists).sum())
        if allowed is not None:
            allowed.ready(lists)
        able = self.K <= 16 and not self._too_large(lists)
        scan = _Scan(bounds, tables, allowed) if able else None
        # A better threshold first, unless it has not spared much of late (codes without structure); tried again now and then.
        if (
            scan is not None
            and nprobe is None
            and items > _REFINE
            and (self._spared > 0.1 or self.searched % 32 == 0)
        ):
            most = bounds.best(lists, heads)
            found, _ = scan.shortlist(most, heads.take(np.searchsorted(lists, most)), k + 16)
            if len(found) >= k:
                scores = self._score(prepared, self._at(found))
                threshold = max(threshold, float(np.partition(scores, len(scores) - k)[len(scores) - k]))
                lists, heads = bounds.reaching(threshold)
            before, items = items, int(self._sizes.take(lists).sum())
            self._spared += 0.1 * (1 - items / before - self._spared)
        self.visited += items
        if nprobe is None and allowed is None:
            self._reached += 0.1 * (items / self.distinct - self._reached)
        more = self._more.get(k, 16)
        while scan is not None and 8 * (k + more) < max(items, 8 * _SAMPLE) and more <= _MOST:
            found, reach = scan.shortlist(lists, heads, k + more)
            scores = self._score(prepared, self._at(found))
            best = _best(scores, found, k, at=True)
            if len(best[0]) >= k and reach < best[0][-1]:
                # nine in ten queries or more should be proven at first try
                self._more[k] = max(8, more - more // 32)
                return best
            self._more[k] = min(_MOST, self._more.get(k, 16) + max(1, more // 4))
            more *= 4
        scores, places = self._all(prepared, lists, threshold, allowed)
        return _best(scores, places, k, at=True)

    def _sampled(self, bounds: _Bounds, prepared: Floats, k: int, allowed: Any) -> float:
        """A score that the ``k``-th best is not below."""
        start = int(self._begin[bounds.top()])
        stop = min(self.distinct, start + max(_SAMPLE if allowed is None else 4 * _SAMPLE, 2 * k))
        start = max(0, min(start, stop - 2 * k))
        codes = self._span(start, stop)
        if allowed is not None:
            first, last = np.searchsorted(self._begin, [start + 1, stop]) - [1, 0]
            allowed.ready(np.arange(first, last))
            codes = codes[allowed.span(start, stop)]
        if len(codes) < k:
            return -np.inf
        scores = self._score(prepared, codes)
        return float(np.partition(scores, len(scores) - k)[len(scores) - k])

    def _all(
        self, prepared: Floats, lists: Ids, least: float, allowed: Any, limit: int | None = None
    ) -> tuple[Floats, Ids]:
        """Scores and places of all codes of these lists with at least the score ``least``, blockwise."""
        kept, at = [np.empty(0, np.float32)], [np.empty(0, np.int64)]
        if not len(lists):
            return kept[0], at[0]
        if allowed is not None:
            allowed.ready(lists)
        begin, stop = self._begin[lists], self._begin[lists + 1]
        found = 0
        joined = np.append(True, begin[1:] != stop[:-1])  # neighbouring lists are one range
        for low, high in zip(begin[joined].tolist(), stop[np.append(joined[1:], True)].tolist(), strict=True):
            for start in range(low, high, _BLOCK):
                end = min(high, start + _BLOCK)
                scores = self._score(prepared, self._span(start, end))
                reached = scores >= least
                if allowed is not None:
                    reached &= allowed.span(start, end)
                places = np.flatnonzero(reached)
                kept.append(scores[places])
                at.append(start + places)
                found += len(places)
                if limit is not None and found > limit:
                    raise too_many(least, limit)
        return np.concatenate(kept), np.concatenate(at)


class CodewordLists(ListSearch):
    """Exact search of codes in memory by row number.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d], checked.

    Attributes:
        n: number of codes.
        distinct: number of distinct codes.
        lists: number of lists; 0 if there are few distinct codes, which are all scored.

    Raises:
        UsageError: 2^32 codes or more.
    """

    def __init__(self, codes: Codes, Z: Floats) -> None:
        if len(codes) >= 1 << 32:
            raise UsageError(f"{len(codes):,} codes are too many for one search in memory: use shards")
        super().__init__(Z)
        self.n = len(codes)
        words = _words(codes, self.M, self.K)
        order, starts = _grouped(words)
        self._members = order if self.n >= 1 << 31 else order.astype(np.int32)
        self._starts: Ids | None = None if len(starts) == self.n else np.append(starts, self.n)
        first = order[starts]
        self.codes = codes[first]
        self.distinct = len(first)
        if self.distinct > SMALL and self.M > 1:
            self._split(words[0][first])
        else:
            self._columns = lookup_columns(self.codes, self.M, self.K)
        self._whole: Any = None
        # Few combinations of codewords: their scores are sums of whole tables. The order of additions is that of scores up to 3 codebooks.
        self._combined: Ids | None = None
        if self.M <= 3 and self.K**self.M <= _DENSE:
            shift = np.uint64(64 - bits_per_code(self.K) * self.M)
            self._combined = (words[0][first] >> shift).astype(np.int64)

    def allowed(self, mask: NDArray[np.bool_]) -> Allowed:
        """The rows of ``mask``, bool [n], for a search."""
        by_code = mask[self._members]
        if self._starts is not None:
            by_code = np.logical_or.reduceat(by_code, self._starts[:-1])
        return Allowed(mask, by_code)

    def _split(self, keys: NDArray[np.uint64]) -> None:
        """Choose P, and make lists of the distinct codes, by the first word of their keys, ascending."""
        bits = bits_per_code(self.K)
        levels = min(self.M, 64 // bits)
        n = len(keys)

        def starts_at(level: int) -> Ids:
            heads = keys >> np.uint64(64 - bits * level)
            return np.append(0, 1 + np.flatnonzero(heads[1:] != heads[:-1]))

        P = 1
        begin = starts_at(1)
        while min(levels, self.M, 5) > P + 1 and self.K ** (P + 1) <= 1 << 16:
            finer = starts_at(P + 1)
            sizes = np.diff(finer, append=n)
            if len(finer) > n // 8 or np.square(sizes).sum() < _TYPICAL * n:
                break
            P, begin = P + 1, finer
        depth = np.full(len(begin), P)
        for level in range(P + 1, levels + 1):
            large = (np.diff(begin, append=n) > CAP) & (depth == level - 1)
            if not large.any():
                break
            finer = starts_at(level)
            of = np.searchsorted(begin, finer, side="right") - 1
            finer = finer[large[of]]
            made = np.concatenate([begin[~large], finer])
            depth = np.concatenate([depth[~large], np.full(len(finer), level)])
            place = np.argsort(made)
            begin, depth = made[place], depth[place]
        self._arrange(np.append(begin, n), keys[begin], depth, P)
        if self.K <= 16:
            self._fill()

    def _fill(self) -> None:
        """Copy what is behind the first P codewords of all codes into Faiss' lists.

        The query of this index is a row of score tables: its codewords are unit vectors.
        """
        rest = self.M - self.P
        units = np.broadcast_to(np.eye(16, dtype=np.float32), (rest, 16, 16)).copy()
        # A quantiser is not asked, as searches name their lists.
        index = empty_lists(np.zeros((self.lists, rest * 16), np.float32), units)
        width = block_bytes(rest, _ROWS)
        at = 0
        while at < self.lists:
            stop = max(
                at + 1, int(np.searchsorted(self._begin, self._begin[at] + (1 << 20), side="right")) - 1
            )
            sizes = self._sizes[at:stop]
            blocks = -(-sizes // _ROWS)
            first = np.cumsum(blocks) - blocks
            codes = self.codes[self._begin[at] : self._begin[stop]]
            held = np.zeros((int(blocks.sum()) * _ROWS, (rest + 1) // 2), np.uint8)
            shift = first * _ROWS - (self._begin[at:stop] - self._begin[at])
            held[np.arange(len(codes)) + np.repeat(shift, sizes)] = pack_codes(
                unpack_codes(codes, self.M, self.K)[:, self.P :], 16
            )
            packed = packed_rows(held, rest, _ROWS)
            rows = np.arange(self._begin[at], self._begin[stop])
            for number, row, size, block in zip(
                range(at, stop),
                (self._begin[at:stop] - self._begin[at]).tolist(),
                sizes.tolist(),
                first.tolist(),
                strict=True,
            ):
                index.invlists.add_entries(
                    number, size, faiss.swig_ptr(rows[row:]), faiss.swig_ptr(packed[block * width :])
                )
            at = stop
        index.ntotal = self.distinct
        self._index = index

    def _span(self, start: int, stop: int) -> Codes:
        return self.codes[start:stop]

    def _at(self, places: Ids) -> Codes:
        return self.codes.take(places, axis=0)

    def _scanning(self, lists: Ids) -> Iterator[tuple[Any, slice]]:
        yield self._index, slice(None)

    def _count(self, places: Ids) -> int:
        return (
            len(places)
            if self._starts is None
            else int((self._starts[places + 1] - self._starts[places]).sum())
        )

    def _reaching(
        self, tables: Floats, prepared: Floats, least: float, limit: int, allowed: Any
    ) -> tuple[Floats, Ids]:
        if self.lists:
            return super()._reaching(tables, prepared, least, limit, allowed)
        scores = lookup(prepared, self._columns, paired=self.K <= 16 and self.M > 1)
        places = np.flatnonzero(scores >= least)
        return scores[places], places

    def _one(
        self, query: Floats, k: int, allowed: Allowed | None, nprobe: int | None = None
    ) -> tuple[Floats, Ids]:
        if self.lists:
            # Where lists spare nothing (codes without structure) all codes are scanned; the lists are tried again now and then.
            if self._reached > 0.5 and allowed is None and nprobe is None and self.searched % 32:
                best = self._scanned(query, k)
                if best is not None:
                    return best
            return super()._one(query, k, allowed, nprobe)
        self.searched += 1
        self.visited += self.distinct
        if self._combined is not None:
            tables = self._tables(query)[0]
            cells = tables[0]
            for table in tables[1:]:
                cells = np.add.outer(cells, table).reshape(-1)
            scores = cells.take(self._combined)
        else:
            scores = lookup(self._tables(query)[1], self._columns, paired=self.K <= 16 and self.M > 1)
        return _best(scores, None if allowed is None else np.flatnonzero(allowed.mask), k)

    def _scanned(self, query: Floats, k: int) -> tuple[Floats, Ids] | None:
        """As :meth:`_one` by a scan of all codes; None if that proves nothing."""
        more = self._more.get(-k, 16)
        if self.K > 16 or 8 * (k + more) > self.distinct:
            return None
        if self._whole is None:
            flat = inject(np.broadcast_to(np.eye(16, dtype=np.float32), (self.M, 16, 16)))
            codes = self.codes if self.K == 16 else pack_indices(unpack_codes(self.codes, self.M, self.K), 16)
            flat.add_sa_codes(codes)
            self._whole = faiss.IndexPQFastScan(flat)
        tables, prepared = self._tables(query)
        row, slack = _scan_query(tables, _Spans(tables), 0)
        self.searched += 1
        self.visited += self.distinct
        for _ in range(2):
            D, found = self._whole.search(row.reshape(1, -1), k + more)
            places = np.sort(found[0])
            if places[0] < 0:
                break
            best = _best(self._score(prepared, self._at(places)), places, k, at=True)
            if float(D[0, -1]) + slack < best[0][-1]:
                self._more[-k] = max(8, more - more // 32)
                return best
            self._more[-k] = min(_MOST, self._more.get(-k, 16) + max(1, more // 4))
            more *= 4
        self._reached = 0.0  # the lists may do better
        return None

    def _expand(
        self, scores: Floats, places: Ids, k: int | None, allowed: Allowed | None
    ) -> tuple[Floats, Ids]:
        tied = bool((scores[1:] == scores[:-1]).any())
        if self._starts is None:
            rows = self._members.take(places)
        else:
            begin = self._starts.take(places)
            sizes = self._starts.take(places + 1) - begin
            if k is not None and allowed is None:
                np.minimum(sizes, k, out=sizes)
                if not tied:  # up to the code with the k-th item
                    reached = int(sizes.cumsum().searchsorted(k)) + 1
                    scores, begin, sizes = scores[:reached], begin[:reached], sizes[:reached]
            ends = sizes.cumsum()
            at = np.arange(int(ends[-1]) if len(ends) else 0) + (begin - (ends - sizes)).repeat(sizes)
            rows = self._members.take(at)
            scores = scores.repeat(sizes)
        if allowed is not None:
            passing = allowed.rows.take(rows)
            scores, rows = scores[passing], rows[passing]
        if tied:
            order = np.lexsort((rows, -scores))
            scores, rows = scores[order], rows[order]
        return scores[:k], rows[:k].astype(np.int64)


class _Spans:
    """Largest and smallest entries of one query's tables [M, K]."""

    def __init__(self, tables: Floats) -> None:
        self.maxima = np.maximum.reduce(tables, axis=1)
        self.high: list[float] = self.maxima.tolist()
        self.low: list[float] = np.minimum.reduce(tables, axis=1).tolist()
        self.largest = sum(map(max, self.high, map(operator.neg, self.low)))


class _Bounds(_Spans):
    """Scores of the first codewords, and the bounds of lists, for one query's tables [M, K]."""

    def __init__(self, held: ListSearch, tables: Floats) -> None:
        super().__init__(tables)
        self.held = held
        # Floats are added in other orders here than in scores.
        self.margin = (2 * held.M + 8) * _EPS * self.largest
        self.tables = np.concatenate([tables, self.maxima[:, None]], axis=1).reshape(-1)
        cells = tables[0] if held._dense else np.zeros(1, np.float32)
        for m in range(1, held._dense):
            cells = np.add.outer(cells, tables[m]).reshape(-1)
        self.cells = cells + held._empty
        self.rest = sum(self.high[held._dense :]) + self.margin
        self.tail = sum(self.high[held._deepest :]) + self.margin

    def top(self) -> int:
        """The list of the best bound in the best cell."""
        held = self.held
        cell = int(self.cells.argmax())
        first, stop = int(held._cells[cell]), int(held._cells[cell + 1])
        if stop - first == 1 or not len(held._places):
            return first
        return first + int(np.add.reduce(self.tables.take(held._places[:, first:stop]), axis=0).argmax())

    def reaching(self, threshold: float) -> tuple[Ids, Floats]:
        """The lists, ascending, whose bound reaches ``threshold``, and the scores of their first P codewords."""
        held = self.held
        cells = np.flatnonzero(self.cells >= threshold - self.rest)
        if len(cells) == 0:
            return cells, np.empty(0, np.float32)
        begin = held._cells.take(cells)
        counts = held._cells.take(cells + 1) - begin
        ends = counts.cumsum()
        lists = np.arange(int(ends[-1])) + (begin - (ends - counts)).repeat(counts)
        heads = self.cells.take(cells).repeat(counts)
        if len(held._places):
            parts = self.tables.take(held._places.take(lists, axis=1))
            keep = np.flatnonzero(np.add.reduce(parts, axis=0) + heads >= threshold - self.tail)
            lists, heads = lists.take(keep), heads.take(keep)
            for row in range(held.P - held._dense):
                heads += parts[row].take(keep)
        else:
            keep = np.flatnonzero(counts)
        return lists, heads

    def best(self, lists: Ids, heads: Floats) -> Ids:
        """Some of these lists, with the best bounds and about :data:`_FIRST` codes, ascending."""
        order = (-self._of(lists, heads)).argsort()
        enough = int(np.searchsorted(self.held._sizes.take(lists.take(order)).cumsum(), _FIRST)) + 1
        return np.sort(lists.take(order[:enough]))

    def first(self, k: int, nprobe: int) -> tuple[Ids, Floats, float]:
        """The ``nprobe`` lists of the best bounds, and more if these have fewer than ``k`` codes, ascending; the scores of their first P
        codewords; and the best bound of the others, -inf if there are none."""
        lists, heads = self.reaching(-np.inf)
        bounds = self._of(lists, heads)
        order = (-bounds).argsort(kind="stable")
        enough = int(np.searchsorted(self.held._sizes.take(lists.take(order)).cumsum(), k)) + 1
        count = max(nprobe, enough)
        left = float(bounds[order[count]] + self.tail) if count < len(order) else -math.inf
        chosen = np.sort(order[:count])
        return lists.take(chosen), heads.take(chosen), left

    def _of(self, lists: Ids, heads: Floats) -> Floats:
        """Bounds of lists, without what is the same for all."""
        held = self.held
        behind = held._places[max(0, held.P - held._dense) :].take(lists, axis=1)
        bounds: Floats = heads + np.add.reduce(self.tables.take(behind), axis=0)
        return bounds


def _scan_query(tables: Floats, spans: _Spans, P: int) -> tuple[Floats, float]:
    """The query of an index of the codebooks behind the first P whose codewords are unit vectors, [M - P, 16], and how much a score can
    exceed FastScan's."""
    M, K = tables.shape
    rest = tables[P:]
    if K < 16:  # no code has the others
        rest = np.concatenate([rest, np.repeat(rest[:, :1], 16 - K, axis=1)], axis=1)
    # Tables are rounded to steps, at most 255 for the widest, and 65,535 for all and the heads.
    step = max(
        max(map(operator.sub, spans.high[P:], spans.low[P:])) / 255,
        (sum(spans.high) - sum(spans.low)) / 65_535,
    )
    count = M - P
    rounding = 8 * (count + 2) * _EPS * (2 * spans.largest + 256 * count * step)
    slack = 0.51 * (count + 1) * step + rounding if 255 * step > _TINY else math.inf
    return np.ascontiguousarray(rest), slack


class _Scan:
    """FastScan of lists for one query."""

    def __init__(self, bounds: _Bounds, tables: Floats, allowed: Any) -> None:
        self.held = held = bounds.held
        self.query, self.slack = _scan_query(tables, bounds, held.P)
        self.lowest = sum(bounds.low[held.P :])
        self.selector = None if allowed is None else allowed.selector

    def shortlist(self, lists: Ids, heads: Floats, k: int) -> tuple[Ids, float]:
        """The ``k`` best of these lists by FastScan's scores: places of codes, ascending, fewer if there are no more; and how much
        a code that is not among them can score.
        """
        parts = [
            self._shortlist(index, lists[part], heads[part], k) for index, part in self.held._scanning(lists)
        ]
        if len(parts) == 1:
            return parts[0]
        return np.sort(np.concatenate([found for found, _ in parts])), max(reach for _, reach in parts)

    def _shortlist(self, index: Any, lists: Ids, heads: Floats, k: int) -> tuple[Ids, float]:
        count = len(lists)
        params = _params(count) if self.selector is None else _params.__wrapped__(count, self.selector)
        D, found = np.empty(k, np.float32), np.empty(k, np.int64)
        index.search_preassigned_c(
            1,
            faiss.swig_ptr(self.query),
            k,
            faiss.swig_ptr(lists),
            faiss.swig_ptr(heads),
            faiss.swig_ptr(D),
            faiss.swig_ptr(found),
            False,
            params,
        )
        if found[-1] >= 0:
            found.sort()
            return found, float(D[-1]) + self.slack
        found = found[found >= 0]
        found.sort()
        # Faiss leaves out codes with the lowest possible score.
        return found, float(heads.min()) + self.lowest + self.slack


@functools.cache
def _params(nprobe: int, selector: Any = None) -> Any:
    """Search parameters of Faiss, which searches only read."""
    return faiss.SearchParametersIVF(nprobe=nprobe, sel=selector)  # type: ignore[call-arg]  # stub lacks it


def _best(scores: Floats, places: Ids | None, k: int, *, at: bool = False) -> tuple[Floats, Ids]:
    """Of these scores the ``k`` best and all that tie with the k-th, descending, and their places.

    Args:
        places: with ``at`` those of the scores; without, indices of the scores that count (default: all).
    """
    if places is not None and not at:
        scores = scores[places]
    n = len(scores)
    if n > max(4 * k, 512):
        if n >= 128 * k:  # k parts have a score as large as the k-th largest of their maxima
            parts = np.maximum.reduce(scores[: n // 64 * 64].reshape(-1, 64), axis=1)
            least = np.partition(parts, len(parts) - k)[len(parts) - k]
        else:
            least = np.partition(scores, n - k)[n - k]
        among = np.flatnonzero(scores >= least)
        order = among[(-scores.take(among)).argsort(kind="stable")]
    else:
        order = (-scores).argsort(kind="stable")
    if len(order) > k:
        ordered = scores.take(order)
        stop = k
        while stop < len(ordered) and ordered[stop] == ordered[k - 1]:
            stop += 1
        order = order[:stop]
    return scores.take(order), order if places is None else places.take(order)


def _words(codes: Codes, M: int, K: int) -> list[NDArray[np.uint64]]:
    """Codeword indices as keys, the first codebook in the highest bits: uint64 [n] each, 64 / log2(K) codebooks a word."""
    bits = bits_per_code(K)
    each = 64 // bits
    words = [np.zeros(len(codes), np.uint64) for _ in range(-(-M // each))]
    for start in range(0, len(codes), 1 << 20):
        part = slice(start, start + (1 << 20))
        indices = unpack_codes(codes[part], M, K)
        for m in range(M):
            words[m // each][part] |= indices[:, m].astype(np.uint64) << np.uint64(64 - bits * (m % each + 1))
    return words


def _grouped(words: list[NDArray[np.uint64]]) -> tuple[Ids, Ids]:
    """Rows in the order of their keys, equal keys by row, and where in it each distinct key begins."""
    order = np.argsort(words[0]) if len(words) == 1 else np.lexsort(words[::-1])
    new = np.ones(len(order), np.bool_)
    new[1:] = False
    for word in words:
        ordered = word[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    starts = np.flatnonzero(new)
    if len(words) == 1 and len(starts) < len(order):
        # quicksort is not stable: sort rows within equal keys
        group = np.cumsum(new, dtype=np.uint64) << np.uint64(32)
        order = (np.sort(group | order.astype(np.uint64)) & np.uint64(0xFFFF_FFFF)).astype(np.int64)
    return order, starts

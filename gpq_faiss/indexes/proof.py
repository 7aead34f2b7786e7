"""Exact top k by shortlist and proof.

A scanner (a Faiss index) shortlists k' > k rows with approximate scores, and bounds by how much the true score of any other row can
exceed the last approximate one. Candidates are re-scored in the fixed order of :func:`..codes.scores.score_codes`; if the k-th exact
score is above that bound, the top k are *proven*. Otherwise k' grows, then a more precise scanner is used, and finally all codes are
scored for that query.

Ties are ordered by row number.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codes.blocks import PackedCodes
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids
from ..codes.keys import EMPTY_KEY, Keys, best_keys, read_keys, sort_keys
from ..codes.scores import lookup, lookup_columns, lookup_tables, score_prepared, score_tables
from ..errors import UsageError
from ..faissio.storage import Packing
from .scanners import FastScan, Scanner, TableScan, fastscan_bound

FULL = 8192
"""Number of rows up to which scoring all is faster than shortlist and proof (measured)."""
CANDIDATE_BYTES = 64 << 20
"""Maximum bytes of the candidates of a block of queries."""
_SCORE_BLOCK = 32_768
_ROUNDS = 3
_FEW = 32
_NOTES = 32  # queries in small batches between updates of the number of candidates
_WIDEST = 64  # share of the codes from which scoring all is as fast as a shortlist
_NO_KEYS = np.empty(0, np.int64)


def score_all(
    prepared: Floats, codes: Codes | PackedCodes, M: int, K: int, k: int, floor: Floats | None = None
) -> Keys:
    """Keys [Q, k] of the best of all codes, blockwise, in bounded memory.

    Codes that score at most their query's ``floor``, float32 [Q], may be missing.
    """
    paired = K <= 16 and M > 1
    Q, n = len(prepared), len(codes)
    pools: list[list[Keys]] = [[] for _ in range(Q)]
    sizes = [0] * Q
    least = np.full(Q, -np.inf, np.float32) if floor is None else floor.copy()
    limit = 2 * k + _SCORE_BLOCK

    def reduce(q: int) -> None:
        kept = best_keys(np.concatenate([_NO_KEYS, *pools[q]]), k)
        pools[q], sizes[q] = [kept], len(kept)
        if len(kept) == k:
            least[q] = max(least[q], read_keys(kept[-1:])[0][0])

    for start in range(0, n, _SCORE_BLOCK):
        columns = lookup_columns(np.asarray(codes[start : start + _SCORE_BLOCK]), M, K)
        for q in range(Q):
            scores = lookup(prepared[q], columns, paired=paired)
            if least[q] > -np.inf:
                # a later row loses ties, so only larger scores can enter
                places = np.flatnonzero(scores > least[q])
            elif k < len(scores):
                places = np.flatnonzero(scores >= np.partition(scores, len(scores) - k)[len(scores) - k])
            else:
                places = np.arange(len(scores))
            if len(places):
                pools[q].append(sort_keys(scores[places], start + places))
                sizes[q] += len(places)
                if sizes[q] >= k and (least[q] == -np.inf or sizes[q] > limit):
                    reduce(q)
    out = np.full((Q, k), EMPTY_KEY, np.int64)
    for q in range(Q):
        reduce(q)
        out[q, : sizes[q]] = pools[q][0]
    return out


def candidate_bytes(wanted: int, size: int) -> int:
    """Bytes for scoring ``wanted`` candidates of a query, with codes of ``size`` bytes."""
    return wanted * (size * 17 + 32)


class Decided(NamedTuple):
    """Result of a shortlist for some queries (:func:`decide`).

    Attributes:
        best: int64 keys [q, min(k, c)], best first, padded with empty keys.
        exact: float32 [q, c], exact scores of the candidates, padded with -inf.
        reach: float32 [q, c], upper bounds of their scores.
        kth: float32 [q], the k-th exact score; -inf if there are fewer.
        proven: bool [q], whether the best k are proven.
    """

    best: Keys
    exact: Floats
    reach: Floats
    kth: Floats
    proven: NDArray[np.bool_]


def decide(
    prepared: Floats,
    codes: Codes | PackedCodes,
    shape: tuple[int, int],
    shortlist: tuple[Floats, Ids],
    slack: Floats,
    k: int,
) -> Decided:
    """Score candidates exactly, and determine for which queries the ``k`` best are proven.

    Args:
        prepared: float32 [q, T, entries], :func:`..codes.scores.lookup_tables` of the queries.
        shape: M and K.
        shortlist: approximate scores float32 [q, c], descending, and rows int64 [q, c], padded with -1.
        slack: float32 [q], bound on how much an exact score can exceed the approximate one.
    """
    approximate, found = shortlist
    full = found[:, -1] >= 0
    if full.all():
        exact = score_prepared(prepared, codes[found], *shape)
        keys = sort_keys(exact, found)
    else:
        there, at = found >= 0, np.maximum(found, 0)
        exact = np.where(there, score_prepared(prepared, codes[at], *shape), np.float32(-np.inf))
        keys = np.where(there, sort_keys(exact, at), EMPTY_KEY)
    best = best_keys(keys, min(k, found.shape[1]))
    some = found.shape[1] >= k
    kth = read_keys(best[:, -1])[0] if some else np.full(len(found), -np.inf, np.float32)
    # All others score at most the last approximate score plus the slack. A tie with the k-th does not suffice, as the other
    # item might have a smaller id.
    reach = approximate + slack[:, None]
    return Decided(best, exact, reach, kth, full & (reach[:, -1] < kth))


@dataclass(frozen=True)
class QueryTables:
    """Tables of some queries, computed once for searches over many parts.

    Attributes:
        tables: :func:`..codes.scores.score_tables`.
        prepared: :func:`..codes.scores.lookup_tables` of these.
        slack: of :class:`FastScan`; None if not computed yet.
    """

    tables: Floats
    prepared: Floats
    slack: Floats | None = None

    @classmethod
    def of(cls, xq: Floats, Z: Floats) -> QueryTables:
        """For checked queries and codebooks of 16 codewords."""
        tables = score_tables(xq, Z)
        return cls(tables, lookup_tables(tables), fastscan_bound(xq, tables, int(Z.shape[2])))

    def take(self, rows: Any) -> QueryTables:
        """Of some of the queries."""
        slack = None if self.slack is None else self.slack[rows]
        return QueryTables(self.tables[rows], self.prepared[rows], slack)


class ProvenSearch:
    """Exact search over codes; ties are ordered by row number.

    Args:
        codes: uint8 [n, code_size], checked; may be in FastScan's blocks.
        Z: codebooks, float32 [M, K, d], checked.
        packings: packings of scanners, in order of use: ``fastscan`` for K = 16 (and fewer than 2^31 rows), tables of ``bytes``, or
            of ``4-bit``. Scanners are built on first use.
        first: initial number of candidates per k; learnt, and shared by searches over parts of an index.
        fast: an existing scanner of these codes.

    Attributes:
        queries: number of queries so far.
        retried: of these, queries whose first candidates did not prove the top k.
        rescored: of these, queries re-scored with float tables.
        brute_forced: of these, queries with all codes scored.
        exhaustive: queries for which all codes were scored right away, as that is faster.

    Raises:
        UsageError: 2^32 codes or more, beyond the range of keys.
    """

    COUNTS = ("queries", "exhaustive", "retried", "rescored", "brute_forced")

    def __init__(
        self,
        codes: Codes | PackedCodes,
        Z: Floats,
        packings: tuple[Packing, ...] = ("fastscan", "bytes"),
        *,
        first: dict[int, int] | None = None,
        fast: FastScan | None = None,
    ) -> None:
        self.codes = codes
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.n = len(codes)
        if self.n >= 1 << 32:
            raise UsageError(f"{self.n:,} codes are too many for one search in memory: search them from disk")
        able = self.K == 16 and self.M <= MAX_CODEBOOKS and self.n < 1 << 31
        self.packings: tuple[Packing, ...] = tuple(p for p in packings if p != "fastscan" or able) or (
            "bytes",
        )
        self._scanners: dict[Packing, Scanner] = {} if fast is None else {"fastscan": fast}
        self._first: dict[int, int] = {} if first is None else first
        self._lock = threading.Lock()
        self._notes: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        self.queries = self.retried = self.rescored = self.brute_forced = self.exhaustive = 0

    def scanner(self, packing: Packing) -> Scanner:
        """The scanner of this packing, built on first use."""
        with self._lock:
            if packing not in self._scanners:
                codes = self.codes
                if packing != "fastscan":
                    plain = codes[:] if isinstance(codes, PackedCodes) else codes
                    self._scanners[packing] = TableScan(plain, self.Z, fused=packing == "bytes")
                elif isinstance(codes, PackedCodes):
                    self._scanners[packing] = FastScan.of_packed(codes, self.Z)
                else:
                    self._scanners[packing] = FastScan(codes, self.Z)
            return self._scanners[packing]

    def count_on(self, other: ProvenSearch) -> None:
        """Add the counters of another search of the same items."""
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def keep_packed(self) -> None:
        """Keep only FastScan's blocks, and drop the codes they were packed from."""
        scan = self.scanner("fastscan")
        assert isinstance(scan, FastScan)
        self.codes = scan.codes

    def prepare(self, k: int) -> None:
        """Build the first scanner for ``k`` in advance."""
        if not self._in_full(self._start(k)):
            self.scanner(self.packings[0])

    def _start(self, k: int) -> int:
        return self._first.get(k, k + max(32, k // 2 if self.packings[0] == "fastscan" else k // 4))

    def _in_full(self, wanted: int) -> bool:
        return self.n <= FULL or 4 * wanted >= self.n

    def block_rows(self, k: int) -> int:
        """Queries per block, for bounded memory."""
        wanted = self._start(k)
        full = self._in_full(wanted)
        held = self.n * 24 if full else candidate_bytes(wanted, self.codes.shape[1])
        tables = self.M * self.K * 64 + (self.K**2 * self.M * 4 if self.K <= 16 else 0)
        return max(
            1,
            CANDIDATE_BYTES // (min(held, 24 * (2 * k + _SCORE_BLOCK)) + tables if full else held + tables),
        )

    def search_keys(
        self, xq: Floats, k: int, floor: Floats | None = None, query_tables: QueryTables | None = None
    ) -> Keys:
        """Keys int64 [Q, k] of the ``k`` best of checked queries [Q, M*d], best first; one block of queries.

        Args:
            floor: float32 [Q]; codes that score at most this may be missing (empty keys), because enough better ones are known. It
                makes the proof easier.
            query_tables: of these queries, if already computed.
        """
        if query_tables is None:
            tables = score_tables(xq, self.Z)
            query_tables = QueryTables(tables, lookup_tables(tables))
        out = np.full((len(xq), k), EMPTY_KEY, np.int64)
        self.queries += len(xq)
        wanted = self._start(k)
        open_ = np.arange(len(xq))
        # If every query has a floor, few codes reach it: fewer than k candidates suffice.
        floored = floor is not None and len(self.packings) == 1 and bool(np.isfinite(floor).all())
        if floored:
            wanted = self._first.get(-k, _FEW)
        if 4 * wanted >= self.n if floored and self.packings[0] in self._scanners else self._in_full(wanted):
            self.exhaustive += len(xq)
        else:
            open_ = self._prove(xq, query_tables, k, wanted, out, floor)
            self.brute_forced += len(open_)
        if len(open_):
            least = None if floor is None else floor[open_]
            out[open_] = score_all(query_tables.prepared[open_], self.codes, self.M, self.K, k, least)
        return out

    def _prove(
        self,
        xq: Floats,
        query_tables: QueryTables,
        k: int,
        wanted: int,
        out: Keys,
        floor: Floats | None,
    ) -> NDArray[np.intp]:
        """Fill the proven rows of ``out``; returns the others."""
        open_ = np.arange(len(xq))
        tied: list[NDArray[np.intp]] = []
        for number, packing in enumerate(self.packings):
            last = number + 1 == len(self.packings)
            slack = query_tables.slack if packing == "fastscan" else None
            if slack is None:
                slack = self.scanner(packing).slack(xq, query_tables.tables)
            if number:
                self.rescored += len(open_)
                wanted = k + max(32, k // 4)
            # With a single scanner, add candidates as long as that is cheaper than scoring all codes.
            alone = len(self.packings) == 1 and floor is not None
            floored = alone and floor is not None and bool(np.isfinite(floor).all())
            widest = _WIDEST if self.n > FULL else 8
            most = 4 ** (_ROUNDS - 1) * (k + max(32, k // 4))
            for attempt in range(_ROUNDS if last or number == 0 else 1) if not alone else itertools.count():
                if not len(open_) or 4 * wanted >= self.n or (alone and widest * wanted > self.n):
                    break
                proven = np.zeros(len(open_), np.bool_)
                reaching = np.zeros(len(open_), np.int64)
                needed = np.zeros(len(open_), np.int64)
                step = max(1, CANDIDATE_BYTES // candidate_bytes(wanted, self.codes.shape[1]))
                for start in range(0, len(open_), step):
                    part = slice(start, start + step)
                    proven[part], reaching[part], needed[part] = self._shortlist(
                        self.scanner(packing),
                        xq,
                        slack,
                        query_tables.prepared,
                        open_[part],
                        k,
                        wanted,
                        out,
                        floor,
                    )
                if number == attempt == 0:
                    self.retried += int((~proven).sum())
                    self._adapt(-k if floored else k, wanted, needed, proven, least=1 if alone else 8)
                # Stop if ties with the k-th fill four times the candidates, or exceed the maximum of the next scanner.
                hopeless = np.zeros(len(open_), np.bool_)
                if not alone and attempt:
                    end = not last and attempt + 1 == _ROUNDS
                    hopeless = ~proven & (reaching >= (min(wanted, most) if end else wanted))
                tied.append(open_[hopeless])
                open_ = open_[~proven & ~hopeless]
                wanted *= 4
        return np.sort(np.concatenate([open_, *tied]))

    def _shortlist(  # noqa: PLR0913
        self,
        scanner: Scanner,
        xq: Floats,
        slack: Floats,
        prepared: Floats,
        rows: NDArray[np.intp],
        k: int,
        wanted: int,
        out: Keys,
        floor: Floats | None,
    ) -> tuple[NDArray[np.bool_], NDArray[np.intp], NDArray[np.intp]]:
        """One round for some queries, filling the proven rows of ``out``.

        Returns:
            Per query: whether proven; the number of candidates that reach the k-th score; the number of relevant candidates.
        """
        shortlist = scanner.candidates(np.ascontiguousarray(xq[rows]), wanted)
        best, exact, reach, kth, proven = decide(
            prepared[rows], self.codes, (self.M, self.K), shortlist, slack[rows], k
        )
        if floor is not None:
            proven |= (reach[:, -1] <= floor[rows]) & (shortlist[1][:, -1] >= 0)
            kth = np.maximum(kth, floor[rows])
        out[rows[proven], : best.shape[1]] = best[proven]
        return proven, (exact >= kth[:, None]).sum(axis=1), (reach >= kth[:, None]).sum(axis=1)

    def _adapt(
        self, k: int, wanted: int, needed: NDArray[Any], proven: NDArray[np.bool_], least: int = 8
    ) -> None:
        """Choose the next k' so that nine in ten queries are proven at the first attempt. Affects only speed.

        ``k`` is negative for searches with floors.
        """
        if len(needed) < least:
            self._note(k, wanted, list(zip(needed.tolist(), proven.tolist(), strict=True)))
            return
        enough = float(np.quantile(np.where(proven, needed, 2 * wanted), 0.9)) * 1.1 + 8
        low, high = k + max(8, k // 10) if k > 0 else _FEW // 2, 16 * abs(k) + 256
        self._first[k] = int(min(max(enough, low, wanted // 2), high))

    def _note(self, k: int, wanted: int, seen: list[tuple[int, bool]]) -> None:
        """Collect statistics of small batches until there are enough to choose k'."""
        notes = self._notes.setdefault((k, wanted), [])
        notes += seen
        if len(notes) >= _NOTES:
            self._notes.clear()
            needed, proven = zip(*notes, strict=True)
            self._adapt(k, wanted, np.array(needed), np.array(proven))

    def range_keys(self, xq: Floats, min_score: float, most: int | None = None) -> list[Keys]:
        """For each checked query the keys of all codes with at least ``min_score``, best first; one block.

        With ``most`` it stops soon after that many results, so that the caller can detect the excess.
        """
        tables = score_tables(xq, self.Z)
        prepared = lookup_tables(tables)
        out: list[Keys] = [np.empty(0, np.int64)] * len(xq)
        open_ = np.arange(len(xq))
        wanted = 256
        held = 0
        while len(open_) and self.n > FULL and 8 * wanted < self.n and wanted <= 1 << 14:
            scanner = self.scanner(self.packings[0])
            approximate, found = scanner.candidates(np.ascontiguousarray(xq[open_]), wanted)
            exact = score_prepared(prepared[open_], self.codes[found], self.M, self.K)
            slack = scanner.slack(xq[open_], tables[open_])
            proven = (approximate[:, -1] + slack < min_score) & (found[:, -1] >= 0)
            for at in np.flatnonzero(proven):
                keep = exact[at] >= min_score
                out[open_[at]] = np.sort(sort_keys(exact[at, keep], found[at, keep]))[::-1]
                held += int(keep.sum())
            open_ = open_[~proven]
            if most is not None and held > most:
                return out
            wanted *= 8
        if len(open_):
            parts: list[list[Keys]] = [[] for _ in open_]
            for start in range(0, self.n, _SCORE_BLOCK):
                columns = lookup_columns(np.asarray(self.codes[start : start + _SCORE_BLOCK]), self.M, self.K)
                for row, q in enumerate(open_.tolist()):
                    scores = lookup(prepared[q], columns, paired=self.K <= 16 and self.M > 1)
                    places = np.flatnonzero(scores >= min_score)
                    parts[row].append(sort_keys(scores[places], start + places))
                    held += len(places)
                if most is not None and held > most:
                    break
            for row, q in enumerate(open_.tolist()):
                out[q] = np.sort(np.concatenate(parts[row]))[::-1]
        return out

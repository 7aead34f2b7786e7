"""Exact top k by shortlist and proof.

A scanner (Faiss, in any of its forms) shortlists k' > k positions with approximate scores, and bounds by how much the
true score of any other position can exceed the last approximate one. The shortlisted are scored again in the fixed order
of :func:`..codes.scores.score_codes`; once the k-th exact score lies above that bound, the top k are *proven*. Otherwise k'
grows, then the next, more precise scanner takes over, and at last all codes of that query are scored.

Positions stand in for ids: rows must be in the order in which ties are to be given.
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
from .single import SingleSearch

FULL = 8192
"""Rows up to which scoring everything is cheaper than shortlisting and proving (measured)."""
CANDIDATE_BYTES = 64 << 20
"""What the candidates of a block of queries may take."""
_SCORE_BLOCK = 32_768
_ROUNDS = 3
_FEW = 32
_ONE_MOST = 4096  # k from which one query gains nothing by itself (measured)
_NOTES = 32  # queries in small batches after which the number of candidates is chosen again
_WIDEST = 64  # part of the codes from which scoring all of them is as cheap as shortlisting that many
_NO_KEYS = np.empty(0, np.int64)


def score_all(
    prepared: Floats, codes: Codes | PackedCodes, M: int, K: int, k: int, floor: Floats | None = None
) -> Keys:
    """Keys [Q, k] of the best of all codes, blockwise: memory is bounded by the block and a few k a query.

    What scores at most its query's ``floor``, float32 [Q], may be left out.
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
                # a later position loses a tie, so only what lies above the k-th can still enter
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
    """What ``wanted`` candidates of a query, codes of ``size`` bytes, take while they are scored."""
    return wanted * (size * 17 + 32)


class Decided(NamedTuple):
    """What a shortlist gives for some queries (:func:`decide`).

    Attributes:
        best: int64 keys [q, min(k, c)], best first, empty ones where fewer were found.
        exact: float32 [q, c], exact scores of the shortlisted; -inf where there is none.
        reach: float32 [q, c], what each of them could have scored at most.
        kth: float32 [q], the k-th exact score; -inf where there are fewer.
        proven: bool [q], nothing that was not shortlisted belongs among the best k.
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
    """Score what was shortlisted exactly, and see for which queries that proves the ``k`` best.

    Args:
        prepared: float32 [q, T, entries], :func:`..codes.scores.lookup_tables` of the queries.
        shape: M and K.
        shortlist: approximate scores float32 [q, c], larger first, and positions int64 [q, c], -1 behind the last.
        slack: float32 [q], by how much an exact score can exceed the approximate one.
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
    # Whatever was not shortlisted scores at most the last approximate score plus the slack. A tie with the k-th is not
    # good enough: the item outside might come first in the order of ids.
    reach = approximate + slack[:, None]
    return Decided(best, exact, reach, kth, full & (reach[:, -1] < kth))


@dataclass(frozen=True)
class QueryTables:
    """Tables of some queries, made once for searches over many parts.

    Attributes:
        tables: :func:`..codes.scores.score_tables`.
        prepared: :func:`..codes.scores.lookup_tables` of these.
        slack: of :class:`FastScan`; None where it is not made yet.
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
    """Exact search over codes whose positions order ties.

    Args:
        codes: uint8 [n, code_size], checked; may lie in FastScan's blocks.
        Z: codebooks, float32 [M, K, d], checked.
        packings: how codes lie for what shortlists, one after the other: ``fastscan`` where K = 16 (and the rows fit its
            2^31), tables of ``bytes`` in any case, or of ``4-bit``. Scanners are built when first needed.
        first: how many candidates to begin with, for each k; learnt, and shared by searches over parts of one whole.
        fast: the scanner of these very codes, where there is one.

    Attributes:
        queries: searched so far.
        retried: of these, whose first candidates did not prove the top k.
        rescored: of these, scored again by float tables.
        brute_forced: of these, with all codes scored.
        exhaustive: queries for which everything was scored at once, since that is cheaper (for one query by itself: with
            few codes, or once few codes have failed the proof).

    Raises:
        UsageError: 2^32 codes or more, of which a key cannot hold the position.
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
        self._single: SingleSearch | None = None
        self._notes: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        self.queries = self.retried = self.rescored = self.brute_forced = self.exhaustive = 0

    def scanner(self, packing: Packing) -> Scanner:
        """The scanner of codes that lie so, built on first use."""
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
        """Add what happened in another search of the same items to the counts of this."""
        for name in self.COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def keep_packed(self) -> None:
        """Hold FastScan's blocks alone, and no longer the codes that they were made of."""
        scan = self.scanner("fastscan")
        assert isinstance(scan, FastScan)
        self.codes = scan.codes

    def prepare(self, k: int) -> None:
        """Build what a search for ``k`` starts with, so that the first query does not pay for it."""
        if not self._in_full(self._start(k)):
            self.scanner(self.packings[0])

    def _start(self, k: int) -> int:
        return self._first.get(k, k + max(32, k // 2 if self.packings[0] == "fastscan" else k // 4))

    def _in_full(self, wanted: int) -> bool:
        return self.n <= FULL or 4 * wanted >= self.n

    def block_rows(self, k: int) -> int:
        """Queries at a time for bounded memory."""
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
            floor: float32 [Q]; what scores at most this is of no interest and may be missing (an empty key), because as
                many better ones are known from elsewhere. It makes the proof easier.
            query_tables: of these queries, where they were made before.
        """
        if query_tables is None:
            tables = score_tables(xq, self.Z)
            query_tables = QueryTables(tables, lookup_tables(tables))
        out = np.full((len(xq), k), EMPTY_KEY, np.int64)
        self.queries += len(xq)
        wanted = self._start(k)
        open_ = np.arange(len(xq))
        # Where every query has its floor, few codes reach it: fewer candidates than k will do, even of few codes.
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

    def search_one(self, query: Floats, k: int) -> tuple[Floats, Ids] | None:
        """Scores float32 [k] and positions int64 [k] of the ``k`` best of one checked query [M*d].

        The answer of :meth:`search_keys`, faster. None where that is needed.
        """
        if k > _ONE_MOST or self.packings[0] != "fastscan" or not isinstance(self.codes, np.ndarray):
            return None
        if self._single is None:
            scan = self.scanner("fastscan")
            assert isinstance(scan, FastScan)
            self._single = SingleSearch(self.codes, self.Z, scan)
        wanted = self._start(k)
        found = self._single.search(query, k, wanted)
        if found is None:
            return None
        self.queries += 1
        self.exhaustive += not found.proven
        if found.needed:
            self._note(k, wanted, [(found.needed, found.proven)])
        return found.scores, found.positions

    def raw_keys(self, xq: Floats, k: int) -> Keys:
        """FastScan's own scores in its own order, ties by position; empty where it gave nothing."""
        self.queries += len(xq)
        scores, found = self.scanner("fastscan").candidates(xq, k)
        return best_keys(np.where(found >= 0, sort_keys(scores, np.maximum(found, 0)), EMPTY_KEY), k)

    def _prove(
        self,
        xq: Floats,
        query_tables: QueryTables,
        k: int,
        wanted: int,
        out: Keys,
        floor: Floats | None,
    ) -> NDArray[np.intp]:
        """Fill the rows of ``out`` that can be proven; returns the others."""
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
            # With one scanner alone, widening goes on as long as it is cheaper than scoring everything.
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
                # Where ties with the k-th still fill four times the candidates, there is no end of them in sight; and
                # where they are more than the next scanner would ever take, it need not begin.
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
        """One round for some queries, filling the rows of ``out`` that it proves.

        Returns:
            Of each query: whether proven; how many candidates reach the k-th score (all, where ties fill them); how many
            could have mattered.
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
        """Choose the next k' so that nine queries in ten are proven at first try. Changes speed, never answers.

        ``k`` is negative where floors were known.
        """
        if len(needed) < least:
            self._note(k, wanted, list(zip(needed.tolist(), proven.tolist(), strict=True)))
            return
        enough = float(np.quantile(np.where(proven, needed, 2 * wanted), 0.9)) * 1.1 + 8
        low, high = k + max(8, k // 10) if k > 0 else _FEW // 2, 16 * abs(k) + 256
        self._first[k] = int(min(max(enough, low, wanted // 2), high))

    def _note(self, k: int, wanted: int, seen: list[tuple[int, bool]]) -> None:
        """Keep what is needed, and whether it was proven, of too few queries to choose by, until there are enough."""
        notes = self._notes.setdefault((k, wanted), [])
        notes += seen
        if len(notes) >= _NOTES:
            self._notes.clear()
            needed, proven = zip(*notes, strict=True)
            self._adapt(k, wanted, np.array(needed), np.array(proven))

    def range_keys(self, xq: Floats, min_score: float, most: int | None = None) -> list[Keys]:
        """For each checked query the keys of all codes that score at least ``min_score``, best first; one block.

        With ``most`` it stops soon after as many in all, and gives those it has: what wanted no more knows that there are.
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

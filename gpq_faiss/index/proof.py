"""Exact top k by nomination and proof.

A scanner (Faiss, in any of its forms) nominates k' > k positions with approximate scores, and bounds by how much the
true score of any other position can exceed the last approximate one. The nominated are scored again in the fixed order
of :func:`.codebooks.score_codes`; once the k-th exact score lies above that bound, the top k are *proven*. Otherwise k'
grows, then the next, more precise scanner takes over, and at last all codes of that query are scored.

Positions stand in for ids: rows must be in the order in which ties are to be given.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from .checks import Codes, Floats, Ids
from .codebooks import (
    inject,
    inject_fused,
    lookup,
    lookup_columns,
    lookup_tables,
    pad_vectors,
    score_prepared,
    score_tables,
)
from .layout import vector_view
from .packing import PackedCodes, block_bytes

Keys = NDArray[np.int64]
"""Score and position in one integer, so that one integer sort orders by score, then by position (:func:`sort_keys`)."""

FULL = 8192
"""Rows up to which scoring everything is cheaper than nominating and proving (measured)."""
_CANDIDATE_BYTES = 64 << 20
_SCORE_BLOCK = 32_768
_ROUNDS = 3
_FEW = 32
_WIDEST = 64  # part of the codes from which scoring all of them is as cheap as nominating that many
_LOW = np.int64(0xFFFF_FFFF)
_FLIP = np.int32(0x7FFF_FFFF)
_UNIT = float(np.finfo(np.float32).eps)  # twice the relative error of one float32 operation
_TINY = float(np.finfo(np.float32).tiny)
EMPTY_KEY = np.int64(np.iinfo(np.int64).min)
"""The key of a place without a result."""
_NO_KEYS = np.empty(0, np.int64)


def rounding_bound(xq: Floats, M: int, d: int) -> Floats:
    """How far two float32 evaluations of a query's score can lie apart: float32 [Q].

    Both add 2d + M products in some order; with unit-norm codewords each is within (2d + M + 2) u of the true value
    times sum_m |q_m| (Higham 2002, section 3.1, with Cauchy-Schwarz a sub-space).
    """
    norms = np.sqrt(np.square(xq.reshape(len(xq), M, d), dtype=np.float64).sum(axis=2)).sum(axis=1)
    operations = 2 * d + M + 2
    bound = 1.01 * operations * (_UNIT * norms + 2 * M * d * _TINY)
    return np.asarray(bound, np.float32)


def quantisation_bound(tables: Floats) -> Floats:
    """How much a true score can exceed FastScan's, rounding of floats apart: float32 [Q].

    Faiss takes 8-bit steps of (largest span of a table) / 255, counted from each table's least entry, and rounds every
    entry to the nearest. What rounding took from each entry is known, so the bound is the sum of each table's largest
    loss: about 12 % below half a step a table. Entries near the middle between two steps count as a half, since Faiss'
    own float arithmetic decides where they go.

    Args:
        tables: float32 [Q, M, 16].
    """
    wide = tables.astype(np.float64)
    least = wide.min(axis=2, keepdims=True)
    step = (wide.max(axis=2, keepdims=True) - least).max(axis=1, keepdims=True) / 255
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.where(step > 0, (wide - least) / step, 0.0)
    loss = steps - np.floor(steps + 0.5)
    loss = np.where(np.abs(loss) > 0.498, 0.502, loss)
    bound = loss.max(axis=2).sum(axis=1) * step[:, 0, 0]
    # the product with 255 sums and the offset, in float32 (scores of M tables, each below 256 steps)
    largest = np.abs(wide).max(axis=2).sum(axis=1) + 255 * tables.shape[1] * step[:, 0, 0]
    return np.asarray(bound * (1 + 1e-6) + 8 * tables.shape[1] * _UNIT * largest, np.float32)


def sort_keys(scores: Floats, positions: NDArray[Any]) -> Keys:
    """int64 keys of the same shape: larger score first when sorted *descending*, then the smaller position (< 2^32)."""
    bits = (scores + np.float32(0.0)).view(np.int32)  # + 0.0 makes one of the two zeros
    ordered = bits ^ ((bits >> 31) & _FLIP)
    return (ordered.astype(np.int64) << 32) | (_LOW - positions)


def read_keys(keys: Keys) -> tuple[Floats, Ids]:
    """Scores and positions of :func:`sort_keys`; an empty key gives (-inf, -1)."""
    ordered = (keys >> 32).astype(np.int32)
    scores = (ordered ^ ((ordered >> 31) & _FLIP)).view(np.float32)
    positions = _LOW - (keys & _LOW)
    none = keys == EMPTY_KEY
    if none.any():
        scores = np.where(none, np.float32(-np.inf), scores)
        positions = np.where(none, np.int64(-1), positions)
    return scores, positions


def best_keys(keys: Keys, k: int) -> Keys:
    """The ``k`` largest of the last axis, descending."""
    if 4 * k < keys.shape[-1]:
        keys = np.partition(keys, keys.shape[-1] - k, axis=-1)[..., -k:]
    ordered = np.sort(keys, axis=-1)
    return ordered[..., : -k - 1 : -1]


class Scanner(Protocol):
    """What nominates."""

    def candidates(self, xq: Floats, k: int) -> tuple[Floats, Ids]:
        """Approximate scores [Q, k] and positions [Q, k] of the best by them."""

    def slack(self, xq: Floats, tables: Floats) -> Floats:
        """float32 [Q]: no true score exceeds its approximate score by more."""


class TableScan:
    """``IndexPQ``: float tables, so only rounding separates its scores from the true ones.

    With K = 16 it is byte-fused, which scans 4-5 times faster, unless ``fused`` is false.
    """

    def __init__(self, codes: Codes, Z: Floats, *, fused: bool = True) -> None:
        self.M, K, self.d = (int(n) for n in Z.shape)
        self.index: Any = inject_fused(Z) if fused and K == 16 and self.M > 1 else inject(Z)
        self.index.add_sa_codes(codes)

    @property
    def codes(self) -> Codes:
        """The codes inside Faiss: a view, valid as long as this scanner."""
        return vector_view(self.index.codes, np.uint8).reshape(-1, self.index.code_size)

    def candidates(self, xq: Floats, k: int) -> tuple[Floats, Ids]:
        D, found = self.index.search(pad_vectors(xq, self.index.d), k)
        return D, found

    def slack(self, xq: Floats, tables: Floats) -> Floats:
        return rounding_bound(xq, self.M, self.d)


class FastScan:
    """``IndexPQFastScan``: tables of 8-bit steps in registers, ten times as fast and a little coarse (K = 16 only)."""

    def __init__(self, codes: Codes, Z: Floats) -> None:
        self.M, _, self.d = (int(n) for n in Z.shape)
        flat = inject(Z)
        flat.add_sa_codes(codes)
        self.index: Any = faiss.IndexPQFastScan(flat)

    @classmethod
    def of_packed(cls, codes: PackedCodes, Z: Floats) -> FastScan:
        """Of codes that are in blocks already: one copy in memory, nothing is packed anew."""
        scan = cls.empty(Z, codes.rows)
        scan.fill(len(codes), lambda held: np.copyto(held, codes.packed))
        return scan

    @classmethod
    def empty(cls, Z: Floats, rows: int) -> FastScan:
        """Without codes, for :meth:`fill`; ``rows`` codes a block."""
        scan = cls.__new__(cls)
        scan.M, _, scan.d = (int(n) for n in Z.shape)
        scan.index = faiss.IndexPQFastScan(inject(Z), rows)
        return scan

    def fill(self, n: int, read: Callable[[NDArray[np.uint8]], Any]) -> PackedCodes:
        """Take ``n`` codes in blocks, which ``read`` puts into the array that it is given, in place of those before.

        Returns:
            These codes, valid until the next call.
        """
        rows = int(self.index.bbs)
        blocks = -(-n // rows)
        self.index.codes.resize(blocks * block_bytes(self.M, rows))
        held = self._held()
        read(held)
        self.index.ntotal, self.index.ntotal2 = n, blocks * rows
        return PackedCodes(held, n, self.M, rows)

    def _held(self) -> NDArray[np.uint8]:
        table = self.index.codes
        view: NDArray[np.uint8] = faiss.rev_swig_ptr(table.get(), table.size())
        return view

    @property
    def codes(self) -> PackedCodes:
        """The codes inside Faiss, valid as long as this scanner."""
        return PackedCodes(self._held(), int(self.index.ntotal), self.M, int(self.index.bbs))

    def candidates(self, xq: Floats, k: int) -> tuple[Floats, Ids]:
        D, found = self.index.search(xq, k)
        return D, found

    def slack(self, xq: Floats, tables: Floats) -> Floats:
        return quantisation_bound(tables) + 2 * rounding_bound(xq, self.M, self.d)


def score_all(
    prepared: Floats, codes: Codes | PackedCodes, M: int, K: int, k: int, floor: Floats | None = None
) -> Keys:
    """Keys [Q, k] of the best of all codes, blockwise: memory is bounded by the block and a few k a query.

    ``codes`` may be a memory map. What scores at most its query's ``floor``, float32 [Q], may be left out.
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


@dataclass(frozen=True)
class Known:
    """What a search needs to know of its queries, to be found once for searches over many parts.

    Attributes:
        tables: :func:`.codebooks.score_tables`.
        prepared: :func:`.codebooks.lookup_tables` of these.
        slack: of :class:`FastScan`.
    """

    tables: Floats
    prepared: Floats
    slack: Floats

    @classmethod
    def of(cls, xq: Floats, Z: Floats) -> Known:
        """For checked queries and codebooks of 16 codewords."""
        tables = score_tables(xq, Z)
        slack = quantisation_bound(tables) + 2 * rounding_bound(xq, int(Z.shape[0]), int(Z.shape[2]))
        return cls(tables, lookup_tables(tables), slack)

    def take(self, rows: Any) -> Known:
        """Of some of the queries."""
        return Known(self.tables[rows], self.prepared[rows], self.slack[rows])


class ProvenSearch:
    """Exact search over codes whose positions order ties.

    Args:
        codes: uint8 [n, code_size], checked; may be a memory map, or lie in FastScan's blocks.
        Z: codebooks, float32 [M, K, d], checked.
        stages: what nominates: ``fastscan`` first where K = 16 (and the rows fit its 2^31), ``fused`` tables in any
            case, or ``flat`` ones. Scanners are built when first needed.
        first: how many candidates to begin with, for each k; learnt, and shared by searches over parts of one whole.
        fast: the scanner of these very codes, where there is one.

    Attributes:
        queries: searched so far.
        widened: of these, whose first candidates did not prove the top k.
        tabled: of these, handed on from FastScan to float tables.
        scored_in_full: of these, with all codes scored.
        direct: queries for which everything was scored at once, since that is cheaper.

    Raises:
        UsageError: 2^32 codes or more, of which a key cannot hold the position.
    """

    def __init__(
        self,
        codes: Codes | PackedCodes,
        Z: Floats,
        stages: tuple[str, ...] = ("fastscan", "fused"),
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
        able = self.K == 16 and self.n < 1 << 31
        self.stages = tuple(stage for stage in stages if stage != "fastscan" or able)
        self._scanners: dict[str, Scanner] = {} if fast is None else {"fastscan": fast}
        self._first: dict[int, int] = {} if first is None else first
        self._lock = threading.Lock()
        self.queries = self.widened = self.tabled = self.scored_in_full = self.direct = 0

    def scanner(self, stage: str) -> Scanner:
        """The scanner of a stage, built on first use."""
        with self._lock:
            if stage not in self._scanners:
                codes = self.codes
                if stage != "fastscan":
                    plain = codes[:] if isinstance(codes, PackedCodes) else codes
                    self._scanners[stage] = TableScan(plain, self.Z, fused=stage == "fused")
                elif isinstance(codes, PackedCodes):
                    self._scanners[stage] = FastScan.of_packed(codes, self.Z)
                else:
                    self._scanners[stage] = FastScan(codes, self.Z)
            return self._scanners[stage]

    def keep_packed(self) -> None:
        """Hold FastScan's blocks alone, and no longer the codes that they were made of (a map, say)."""
        scan = self.scanner("fastscan")
        assert isinstance(scan, FastScan)
        self.codes = scan.codes

    def prepare(self, k: int) -> None:
        """Build what a search for ``k`` starts with, so that the first query does not pay for it."""
        if not self._in_full(self._start(k)):
            self.scanner(self.stages[0])

    def _start(self, k: int) -> int:
        return self._first.get(k, k + max(32, k // 2 if self.stages[0] == "fastscan" else k // 4))

    def _in_full(self, wanted: int) -> bool:
        return self.n <= FULL or 4 * wanted >= self.n

    def block_rows(self, k: int) -> int:
        """Queries at a time for bounded memory."""
        wanted = self._start(k)
        full = self._in_full(wanted)
        held = (self.n if full else wanted) * 24 if full else wanted * (self.codes.shape[1] * 17 + 32)
        tables = self.M * self.K * 64 + (self.K**2 * self.M * 4 if self.K <= 16 else 0)
        return max(
            1,
            _CANDIDATE_BYTES // (min(held, 24 * (2 * k + _SCORE_BLOCK)) + tables if full else held + tables),
        )

    def search_keys(
        self, xq: Floats, k: int, floor: Floats | None = None, known: Known | None = None
    ) -> Keys:
        """Keys int64 [Q, k] of the ``k`` best of checked queries [Q, M*d], best first; one block of queries.

        Args:
            floor: float32 [Q]; what scores at most this is of no interest and may be missing (an empty key), because as
                many better ones are known from elsewhere. It makes the proof easier.
            known: what depends on the queries alone, where it is there.
        """
        if known is None:
            tables = score_tables(xq, self.Z)
            prepared, slack = lookup_tables(tables), None
        else:
            tables, prepared, slack = known.tables, known.prepared, known.slack
        out = np.full((len(xq), k), EMPTY_KEY, np.int64)
        self.queries += len(xq)
        wanted = self._start(k)
        open_ = np.arange(len(xq))
        # Where every query has its floor, few codes reach it: fewer candidates than k will do, even of few codes.
        floored = floor is not None and len(self.stages) == 1 and bool(np.isfinite(floor).all())
        if floored:
            wanted = self._first.get(-k, _FEW)
        if 4 * wanted >= self.n if floored and self.stages[0] in self._scanners else self._in_full(wanted):
            self.direct += len(xq)
        else:
            open_ = self._prove(xq, tables, prepared, k, wanted, out, floor, slack)
            self.scored_in_full += len(open_)
        if len(open_):
            least = None if floor is None else floor[open_]
            out[open_] = score_all(prepared[open_], self.codes, self.M, self.K, k, least)
        return out

    def _prove(
        self,
        xq: Floats,
        tables: Floats,
        prepared: Floats,
        k: int,
        wanted: int,
        out: Keys,
        floor: Floats | None,
        slack: Floats | None,
    ) -> NDArray[np.intp]:
        """Fill the rows of ``out`` that can be proven; returns the others."""
        open_ = np.arange(len(xq))
        tied: list[NDArray[np.intp]] = []
        for number, stage in enumerate(self.stages):
            last = number + 1 == len(self.stages)
            if slack is None or stage != "fastscan":
                slack = self.scanner(stage).slack(xq, tables)
            if number:
                self.tabled += len(open_)
                wanted = k + max(32, k // 4)
            # With one stage alone, widening goes on as long as it is cheaper than scoring everything.
            alone = len(self.stages) == 1 and floor is not None
            floored = alone and floor is not None and bool(np.isfinite(floor).all())
            widest = _WIDEST if self.n > FULL else 8
            for attempt in range(_ROUNDS if last or number == 0 else 1) if not alone else itertools.count():
                if not len(open_) or 4 * wanted >= self.n or (alone and widest * wanted > self.n):
                    break
                proven = np.zeros(len(open_), np.bool_)
                saturated = np.zeros(len(open_), np.bool_)
                needed = np.zeros(len(open_), np.int64)
                step = max(1, _CANDIDATE_BYTES // (wanted * (self.codes.shape[1] * 17 + 32)))
                for start in range(0, len(open_), step):
                    part = slice(start, start + step)
                    proven[part], saturated[part], needed[part] = self._nominate(
                        self.scanner(stage), xq, slack, prepared, open_[part], k, wanted, out, floor
                    )
                if number == attempt == 0:
                    self.widened += int((~proven).sum())
                    self._adapt(-k if floored else k, wanted, needed, proven, least=1 if alone else 8)
                # Where ties with the k-th still fill four times the candidates, there is no end of them in sight.
                hopeless = saturated & ~proven if attempt and not alone else np.zeros(len(open_), np.bool_)
                tied.append(open_[hopeless])
                open_ = open_[~proven & ~hopeless]
                wanted *= 4
        return np.sort(np.concatenate([open_, *tied]))

    def _nominate(
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
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_], NDArray[np.intp]]:
        """One round for some queries, filling the rows of ``out`` that it proves.

        Returns:
            Of each query: whether proven; whether all candidates reach the k-th score, so that ties fill them; how many
            candidates could have mattered.
        """
        approximate, found = scanner.candidates(np.ascontiguousarray(xq[rows]), wanted)
        exact = score_prepared(prepared[rows], self.codes[found], self.M, self.K)
        best = best_keys(sort_keys(exact, found), min(k, wanted))
        kth = read_keys(best[:, -1])[0] if wanted >= k else np.full(len(rows), -np.inf, np.float32)
        # Whatever was not nominated scores at most the last approximate score plus the slack. A tie with the k-th is
        # not good enough: the item outside might come first in the order of ids.
        reach = approximate + slack[rows, None]
        proven = reach[:, -1] < kth
        if floor is not None:
            proven |= reach[:, -1] <= floor[rows]
            kth = np.maximum(kth, floor[rows])
        proven &= found[:, -1] >= 0
        out[rows[proven], : best.shape[1]] = best[proven]
        return proven, exact.min(axis=1) >= kth, (reach >= kth[:, None]).sum(axis=1)

    def _adapt(
        self, k: int, wanted: int, needed: NDArray[Any], proven: NDArray[np.bool_], least: int = 8
    ) -> None:
        """Choose the next k' so that nine queries in ten are proven at first try. Changes speed, never answers.

        ``k`` is negative where floors were known.
        """
        if len(needed) < least:
            return
        enough = float(np.quantile(np.where(proven, needed, 2 * wanted), 0.9)) * 1.1 + 8
        low, high = k + max(8, k // 10) if k > 0 else _FEW // 2, 16 * abs(k) + 256
        self._first[k] = int(min(max(enough, low, wanted // 2), high))

    def range_keys(self, xq: Floats, least: float) -> list[Keys]:
        """For each checked query the keys of all codes that score at least ``least``, best first; one block."""
        tables = score_tables(xq, self.Z)
        prepared = lookup_tables(tables)
        out: list[Keys] = [np.empty(0, np.int64)] * len(xq)
        open_ = np.arange(len(xq))
        wanted = 256
        while len(open_) and self.n > FULL and 8 * wanted < self.n and wanted <= 1 << 14:
            scanner = self.scanner(self.stages[0])
            approximate, found = scanner.candidates(np.ascontiguousarray(xq[open_]), wanted)
            exact = score_prepared(prepared[open_], self.codes[found], self.M, self.K)
            slack = scanner.slack(xq[open_], tables[open_])
            proven = (approximate[:, -1] + slack < least) & (found[:, -1] >= 0)
            for at in np.flatnonzero(proven):
                keep = exact[at] >= least
                out[open_[at]] = np.sort(sort_keys(exact[at, keep], found[at, keep]))[::-1]
            open_ = open_[~proven]
            wanted *= 8
        if len(open_):
            parts: list[list[Keys]] = [[] for _ in open_]
            for start in range(0, self.n, _SCORE_BLOCK):
                columns = lookup_columns(np.asarray(self.codes[start : start + _SCORE_BLOCK]), self.M, self.K)
                for row, q in enumerate(open_.tolist()):
                    scores = lookup(prepared[q], columns, paired=self.K <= 16 and self.M > 1)
                    places = np.flatnonzero(scores >= least)
                    parts[row].append(sort_keys(scores[places], start + places))
            for row, q in enumerate(open_.tolist()):
                out[q] = np.sort(np.concatenate(parts[row]))[::-1]
        return out

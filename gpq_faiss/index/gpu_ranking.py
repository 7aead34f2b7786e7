"""Average precision of whole rankings on a device: tie-aware, multi-label, at bounded memory.

The numbers are those of ``gpq_faiss.evaluate.ranking.rank_codes``: tables are rounded to the same whole numbers, so the
same items tie, and each tie counts with its expected value over random order (McSherry & Najork, "Computing Information
Retrieval Performance Measures Efficiently in the Presence of Tied Scores", ECIR 2008). Only the order of the last
float64 additions differs. Arrays in, arrays out; items that share both code and labels are one entry with a count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..errors import DataError, UsageError
from .gpu import MEMORY
from .gpu_arrays import device_of, tensor_of
from .items import Groups

_ENTRIES = 4096  # places of a look-up table that serves several codebooks
_CELL = (
    96  # bytes an entry and query need at most: score, its sort with places, counts, sums, the dense result
)
_ROWS = 1024
_CELLS = 1 << 30  # entries a block, at most: torch's nonzero takes fewer than 2^31
_TABLE = 1 << 20  # harmonic numbers from a table; beyond, their expansion is exact to float64
_EULER = 0.5772156649015329


@dataclass(frozen=True)
class DeviceRanking:
    """Average precisions and what they are of.

    Attributes:
        ap: float64 [Q], expected over random order within ties, whole ranking, divided by all relevant items; 0 for a
            query without any.
        relevant: int64 [Q], items relevant to each query.
        n_database: items.
        n_entries: distinct (code, labels) pairs, which is what was sorted.
    """

    ap: NDArray[np.float64]
    relevant: NDArray[np.int64]
    n_database: int
    n_entries: int

    @property
    def map(self) -> float:
        """Mean of :attr:`ap` over all queries."""
        return float(self.ap.mean()) if len(self.ap) else 0.0

    @property
    def queries_without_relevant(self) -> int:
        """Queries without any relevant item."""
        return int((self.relevant == 0).sum())


def rank_on_device(
    tables: ArrayLike | Tensor,
    codes: NDArray[np.uint8],
    query_labels: NDArray[Any],
    labels: NDArray[Any],
    *,
    counts: ArrayLike | None = None,
    device: str | int | torch.device,
    memory: int = MEMORY,
) -> DeviceRanking:
    """Rank a database of codes for every query on a device, and measure the rankings.

    Args:
        tables: float32 [Q, M, K], score = sum over m of tables[q, m, code_m], larger is better; an array or a tensor.
        codes: uint8 [N, M], codeword numbers below K (:func:`.codebooks.unpack_codes`).
        query_labels, labels: of queries [Q, W] and items [N, W], packed multi-hot uint8 (``np.packbits``) or bool
            [., C]. Two are relevant if they share a label; a zero row never is.
        counts: int [N], how many items a row stands for (default: one).
        device: ``cuda:N``, a GPU's number, or ``cpu``. The caller names it; there is no fall-back.
        memory: bytes for what is held at once, beyond the database.

    Raises:
        DeviceError: no such GPU.
        DataError: shapes that do not belong together, codes out of range, tables not finite, an empty database.
        UsageError: the memory does not hold one query's ranking.
    """
    place = device_of(device)
    code_rows, sizes, label_rows = _entries(codes, labels, counts)
    queries = _packed(query_labels, "query labels")
    width = max(queries.shape[1], label_rows.shape[1])
    wide = (width + 7) // 8 * 8
    given = tables if isinstance(tables, Tensor) else tensor_of(np.ascontiguousarray(tables))
    if given.ndim != 3 or given.dtype != torch.float32:
        raise DataError(f"tables must be float32 [Q, M, K], not {given.dtype} {tuple(given.shape)}")
    Q, M, K = given.shape
    if len(queries) != Q:
        raise DataError(f"query labels: {len(queries):,} rows do not belong to {Q:,} queries")
    if code_rows.shape[1] != M:
        raise DataError(
            f"codes have {code_rows.shape[1]} codewords each, the tables {M} codebooks: unpack the codes first"
        )
    if int(code_rows.max()) >= K:
        raise DataError(f"codeword {code_rows.max()} is out of range: the codebooks have {K}")
    P = len(code_rows)
    if memory < _CELL * P:
        raise UsageError(
            f"a ranking of {P:,} entries needs {_CELL * P:,} bytes, {memory:,} are allowed: raise memory"
        )
    total = int(sizes.sum())
    held = _Entries(
        _columns(code_rows, K, place),
        torch.from_numpy(sizes).to(place),
        torch.from_numpy(_words(label_rows, wide)).to(place),
        _Harmonic(total, place),
    )
    query_words = torch.from_numpy(_words(queries, wide)).to(place)
    ap = np.zeros(Q)
    relevant = np.zeros(Q, np.int64)
    step = max(1, min(_ROWS, memory // (_CELL * P), _CELLS // P))
    for start in range(0, Q, step):
        rows = slice(start, min(Q, start + step))
        values, found = held.rank(_whole(given[rows].to(place), start), query_words[rows])
        ap[rows], relevant[rows] = values.cpu().numpy(), found.cpu().numpy()
    return DeviceRanking(ap, relevant, total, P)


def _packed(labels: NDArray[Any], what: str) -> NDArray[np.uint8]:
    array = np.asarray(labels)
    if array.ndim != 2 or array.dtype not in (np.uint8, np.bool_):
        raise DataError(
            f"{what}: {array.dtype} {array.shape}, expected packed uint8 [n, bytes] or bool [n, classes]"
        )
    return np.packbits(array, axis=1) if array.dtype == np.bool_ else array


def _entries(
    codes: NDArray[np.uint8], labels: NDArray[Any], counts: ArrayLike | None
) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.uint8]]:
    """Distinct (code, labels): codes uint8 [P, M], counts int64 [P], packed labels uint8 [P, W]."""
    array, packed = np.asarray(codes), _packed(labels, "database labels")
    if array.ndim != 2 or array.dtype != np.uint8:
        raise DataError(f"codes must be uint8 [N, M], not {array.dtype} {array.shape}")
    if len(array) == 0:
        raise DataError("the database is empty: nothing to rank")
    if len(packed) != len(array):
        raise DataError(f"database labels: {len(packed):,} rows do not belong to {len(array):,} codes")
    groups = Groups.of(np.ascontiguousarray(np.concatenate([array, packed], axis=1)))
    sizes = groups.sizes
    if counts is not None:
        given = np.asarray(counts)
        if given.dtype.kind not in "iu" or given.shape != (len(array),) or int(given.min()) < 1:
            raise DataError(f"counts must be {len(array):,} whole numbers of at least 1, one a code")
        sizes = np.add.reduceat(given.astype(np.int64)[groups.members], groups.starts[:-1])
    M = array.shape[1]
    return groups.codes[:, :M], sizes.astype(np.int64), groups.codes[:, M:]


def _words(packed: NDArray[np.uint8], width: int) -> NDArray[np.int64]:
    """Packed rows as int64 words [n, width / 8], zeros appended: relevance is then a few ANDs."""
    rows = np.zeros((len(packed), width), np.uint8)
    rows[:, : packed.shape[1]] = packed
    return rows.view(np.int64)


def _chunks(M: int, K: int) -> Iterator[tuple[int, int]]:
    """Codebooks [start, stop) that share a look-up table."""
    step = 1
    while K ** (step + 1) <= _ENTRIES:
        step += 1
    for start in range(0, M, step):
        yield start, min(M, start + step)


def _columns(codes: NDArray[np.uint8], K: int, device: torch.device) -> Tensor:
    """Place of each entry in each look-up table, int32 [chunks, P]."""
    columns = []
    for start, stop in _chunks(codes.shape[1], K):
        place = np.zeros(len(codes), np.int32)
        for m in range(start, stop):
            place = place * np.int32(K) + codes[:, m]
        columns.append(place)
    return torch.from_numpy(np.stack(columns)).to(device)


def _whole(tables: Tensor, first: int) -> Tensor:
    """Tables as whole numbers int32 [q, M, K] whose sums stay below 2^30: multiples of 2^-29 of the largest score that
    the query can have, as the ranking on the CPU takes them, so that the same scores are equal."""
    largest = tables.abs().amax(dim=2).cpu().numpy().sum(axis=1, dtype=np.float64)
    fine = largest < np.finfo(np.float32).max
    if not fine.all():
        bad = first + int(np.argmin(fine))
        raise DataError(f"score tables hold NaN, infinity or values too large to add, in query {bad}")
    factor = np.ldexp(1.0, 29 - np.frexp(largest)[1])
    scaled = tables.double() * torch.from_numpy(factor).to(tables.device)[:, None, None]
    return scaled.round().int()


class _Harmonic:
    """Differences of harmonic numbers H(a + t) - H(a), float64, for rankings of up to ``n`` items."""

    def __init__(self, n: int, device: torch.device) -> None:
        size = min(n, _TABLE)
        sums = np.cumsum(1 / np.arange(1, size + 1, dtype=np.longdouble))
        table = np.concatenate([[0.0], sums]).astype(np.float64)
        self.size = size
        self.table = torch.from_numpy(table).to(device)

    def _at(self, n: Tensor) -> Tensor:
        x = n.clamp_min(self.size).double()
        # the next term is below 1e-26
        beyond = x.log() + _EULER + 0.5 / x - 1 / (12 * x * x)
        return torch.where(n <= self.size, self.table[n.clamp_max(self.size)], beyond)

    def between(self, a: Tensor, t: Tensor) -> Tensor:
        """H(a + t) - H(a) for int64 ``a`` >= 0 and ``t`` >= 1, of one shape."""
        low, high = a.double(), (a + t).double()
        above = low.clamp_min(1.0)
        far = torch.log1p(t / above) + 0.5 * (1 / high - 1 / above)
        far -= (1 / (high * high) - 1 / (above * above)) / 12
        near = self._at(a + t) - self._at(a)
        spread = torch.where(a >= self.size, far, near)
        return torch.where(t == 1, 1 / high, spread)


class _Entries:
    """The database on the device."""

    def __init__(self, columns: Tensor, counts: Tensor, words: Tensor, harmonic: _Harmonic) -> None:
        self.columns, self.counts, self.words, self.harmonic = columns, counts, words, harmonic

    def _scores(self, tables: Tensor) -> Tensor:
        """int32 [q, P]: exact sums of whole numbers."""
        q, M, K = tables.shape
        total: Tensor | None = None
        for number, (start, stop) in enumerate(_chunks(M, K)):
            chunk = tables[:, start]
            for m in range(start + 1, stop):
                chunk = (chunk[:, :, None] + tables[:, None, m]).reshape(q, -1)
            part = chunk.index_select(1, self.columns[number])
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def rank(self, tables: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Average precision float64 [q] and relevant items int64 [q] for whole-number tables [q, M, K] and label words
        [q, W]."""
        scores, order = self._scores(tables).sort(dim=1, descending=True)
        q, P = scores.shape
        hit = torch.zeros((q, P), dtype=torch.bool, device=scores.device)
        for word in range(queries.shape[1]):
            hit |= (queries[:, word, None] & self.words[None, :, word]) != 0
        sizes = self.counts[order]
        hits = torch.where(hit.gather(1, order), sizes, 0)
        del order, hit
        last = torch.ones((q, P), dtype=torch.bool, device=scores.device)
        torch.ne(scores[:, 1:], scores[:, :-1], out=last[:, :-1])
        row, column = last.nonzero(as_tuple=True)
        ends, ends_hit = sizes.cumsum(dim=1)[row, column], hits.cumsum(dim=1)[row, column]
        relevant = hits.sum(dim=1)
        first = torch.ones_like(row, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        before = torch.where(first, 0, ends.roll(1))
        hits_before = torch.where(first, 0, ends_hit.roll(1))
        some = (ends_hit > hits_before).nonzero()[:, 0]
        row, column = row[some], column[some]
        a, b = before[some], hits_before[some]
        n, r = ends[some] - a, ends_hit[some] - b
        slope = (r - 1).double() / (n - 1).clamp_min(1)
        sums = (b + 1 - slope * (a + 1)) * self.harmonic.between(a, n) + slope * n
        # summed row by row from a dense array: additions by atomics would come in any order
        dense = torch.zeros((q, P), dtype=torch.float64, device=scores.device)
        dense[row, column] = sums * (r.double() / n)
        return dense.sum(dim=1) / relevant.clamp_min(1), relevant

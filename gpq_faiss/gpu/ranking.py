"""Measure full rankings on a device: tie-aware, multi-label, in bounded memory.

Results equal those of :func:`gpq_faiss.evaluation.ranking.rank_codes`: tables are rounded to the same integers, so the same items tie,
and ties follow the same convention (McSherry & Najork, "Computing Information Retrieval Performance
Measures Efficiently in the Presence of Tied Scores", ECIR 2008). Only the order of the last float64 additions differs.
Scores, sorts, average precision of full rankings and the precision-recall curve are computed on the device; measures at k on the host,
from few tie groups. Items with equal code and labels are one entry with a count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..errors import DataError, UsageError
from ..evaluation.grouping import LabelsLike, distinct_rows, label_rows, same_width
from ..evaluation.ranking import Measured, RankingResult, result_of
from ..evaluation.scorers import check_tables, whole_tables
from ..evaluation.ties import (
    Convention,
    Denominator,
    Groups,
    Ties,
    average_precisions,
    harmonic_numbers,
    precision_and_recall,
)
from .lists import MEMORY
from .tensors import device_of, fused_columns, fused_tables, is_paired, score_columns, tensor_of

_CELL = 256
"""Maximum bytes per entry and query: score, sort, counts, sums, tie groups, dense results."""
_ROWS = 1024
_CELLS = 1 << 30  # maximum entries per block: torch's nonzero supports fewer than 2^31
_FAR = 4096  # ranks from which the expansion of harmonic numbers is exact in float64
_LEAST = float(np.finfo(np.float64).tiny)


def rank_on_device(  # noqa: PLR0913
    tables: ArrayLike,
    codes: NDArray[np.uint8],
    query_labels: LabelsLike,
    database_labels: LabelsLike,
    *,
    device: str | int | torch.device,
    ties: Ties = "expected",
    k: int | None = None,
    denominator: Denominator = "relevant",
    ks: Sequence[int] = (),
    levels: ArrayLike | None = None,
    memory: int | None = None,
) -> RankingResult:
    """Rank a database of codes for every query on a device, and measure the rankings.

    Args:
        tables: float32 [Q, M, K], score = sum over m of tables[q, m, code_m], larger is better.
        codes: uint8 [N, M], codeword numbers below K (:func:`gpq_faiss.codes.bits.unpack_codes`).
        query_labels, database_labels, ties, k, denominator, ks, levels: see
            :func:`gpq_faiss.evaluation.ranking.rank_codes`. The order of ids is that of the rows.
        device: ``cuda:N``, a GPU's number, or ``cpu``; there is no fall-back.
        memory: bytes of working memory, without the database (default: 1 GiB, or the needs of one query).

    Raises:
        DeviceError: no such GPU.
        DataError: inconsistent shapes, codes out of range, tables not finite, or an empty database.
        UsageError: an unknown convention, a k below 1, codes of another width than the tables; ``memory`` too small for one
            query.
    """
    place = device_of(device)
    wanted = Convention(ties, k, denominator, ks, levels)
    tables, codes = np.asarray(tables), np.asarray(codes)
    if codes.ndim != 2 or codes.dtype != np.uint8 or not len(codes):
        raise DataError(f"codes must be uint8 [N, M], and at least one, not {codes.dtype} {codes.shape}")
    exponent = check_tables(tables, codes)
    (Q, M, K), total = tables.shape, len(codes)
    queries, labels = same_width(
        label_rows(query_labels, "query labels", Q), label_rows(database_labels, "database labels", total)
    )
    entries, sizes = np.concatenate([codes, labels], axis=1), np.ones(total, np.int64)
    if ties != "id":
        entries, entry_of = distinct_rows(entries)
        sizes = np.bincount(entry_of)
    P = len(entries)
    memory = max(MEMORY, _CELL * P) if memory is None else memory
    if memory < _CELL * P:
        raise UsageError(
            f"a ranking of {P:,} entries needs {_CELL * P:,} bytes, {memory:,} are allowed: raise memory"
        )
    held = _Entries(
        fused_columns([tensor_of(np.ascontiguousarray(entries[:, m])) for m in range(M)], K).to(place),
        torch.from_numpy(sizes).to(place),
        torch.from_numpy(_words(entries[:, M:])).to(place),
        paired=is_paired(M, K),
        each=ties == "id",
    )
    query_words = torch.from_numpy(_words(queries)).to(place)
    at_most = max((*wanted.ks, *([] if k is None else [k])), default=0)
    first_harmonic = harmonic_numbers(min(total, at_most))
    points = torch.from_numpy(wanted.points).to(place)
    out = Measured.empty(np.arange(Q), wanted)
    step = max(1, min(_ROWS, memory // (_CELL * P), _CELLS // P))
    for start in range(0, Q, step):
        rows = slice(start, min(Q, start + step))
        whole = torch.from_numpy(whole_tables(tables[rows], exponent[rows])).to(place)
        tied = held.rank(fused_tables(whole), query_words[rows]).arranged(ties)
        out.without[rows] = (tied.relevant == 0).cpu().numpy()
        if k is None:
            out.ap[rows] = tied.average_precisions().cpu().numpy()
        if at_most:
            top = tied.top(at_most)
            if k is not None:
                out.ap[rows] = average_precisions(top, first_harmonic, k, denominator)
            out.precision[rows], out.recall[rows] = precision_and_recall(top, wanted.ks)
        if len(points):
            # added one by one, so that results do not depend on blocks
            for line in tied.interpolated_precision(points).cpu().numpy():
                out.curve[:] += line
    return result_of([out], wanted, Q, total, len(distinct_rows(np.ascontiguousarray(entries[:, :M]))[0]))


def _words(packed: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Packed rows as zero-padded int64 words, so that relevance is a few ANDs."""
    return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8))).view(np.int64)


def _harmonic_between(a: Tensor, t: Tensor) -> Tensor:
    """Differences of harmonic numbers H(a + t) - H(a), float64, for int64 ``a`` >= 0 and ``t`` >= 1 of one shape."""
    low, high = a.double(), (a + t).double()
    above = low.clamp_min(1.0)
    # the difference of their expansions; the next term is below 1e-16
    far = torch.log1p(t / above) + 0.5 * (1 / high - 1 / above)
    far -= (1 / (high * high) - 1 / (above * above)) / 12
    near = torch.special.digamma(high + 1) - torch.special.digamma(low + 1)
    return torch.where(t == 1, 1 / high, torch.where(a >= _FAR, far, near))


@dataclass(frozen=True)
class _Tied:
    """Tie groups as in :class:`gpq_faiss.evaluation.ties.Groups`, int64 [G], on the device.

    Attributes:
        place: rank of each group's last entry.
        shape: number of rankings, and entries per ranking.
    """

    row: Tensor
    place: Tensor
    before: Tensor
    size: Tensor
    hits_before: Tensor
    hits: Tensor
    relevant: Tensor
    shape: tuple[int, int]

    def arranged(self, ties: Ties) -> _Tied:
        """As :meth:`gpq_faiss.evaluation.ties.Groups.arranged`."""
        if ties not in ("best", "worst"):
            return self
        before = self.before if ties == "best" else self.before + self.size - self.hits
        return _Tied(
            self.row, self.place, before, self.hits, self.hits_before, self.hits, self.relevant, self.shape
        )

    def top(self, k: int) -> Groups:
        """The groups that measures at ``k`` depend on, on the host."""
        near = (self.before < k).nonzero()[:, 0]
        fields = (self.row, self.before, self.size, self.hits_before, self.hits)
        row, before, size, hits_before, hits = (field[near].cpu().numpy() for field in fields)
        return Groups(self.shape[0], row, before, size, hits_before, hits, self.relevant.cpu().numpy())

    def _dense(self, values: Tensor) -> Tensor:
        """Dense matrix of values float64 [G], zero elsewhere."""
        dense = torch.zeros(self.shape, dtype=torch.float64, device=values.device)
        dense[self.row, self.place] = values
        return dense

    def average_precisions(self) -> Tensor:
        """Expected average precision of the full rankings, float64 [q]; 0 without relevant items."""
        a, n, b, r = self.before, self.size, self.hits_before, self.hits
        slope = (r - 1).double() / (n - 1).clamp_min(1)
        sums = (b + 1 - slope * (a + 1)) * _harmonic_between(a, n) + slope * n
        # summed by row from a dense array, as atomic additions have no fixed order
        return self._dense(sums * (r.double() / n)).sum(dim=1) / self.relevant.clamp_min(1)

    def interpolated_precision(self, levels: Tensor) -> Tensor:
        """As :func:`gpq_faiss.evaluation.ties.interpolated_precision`: float64 [q, L]."""
        q = self.shape[0]
        result = torch.zeros((q, len(levels)), dtype=torch.float64, device=levels.device)
        if not len(self.row):
            return result
        a, n, b, r = (field.double() for field in (self.before, self.size, self.hits_before, self.hits))
        ends = (b + r) / (a + n)
        dense = self._dense(torch.maximum(ends, (b + r / n) / (a + 1)))
        later = dense.flip(1).cummax(dim=1).values.flip(1)[self.row, self.place]
        del dense
        # First group whose end reaches the level, for all rankings at once: keys ascend because hits do.
        stride = int(self.relevant.max()) + 1
        keys = self.row * stride + self.hits_before + self.hits
        wanted = (levels[None, :] * self.relevant[:, None]).clamp_min(_LEAST)
        whole = (wanted - 1e-9).ceil().clamp_min(1).long()
        some = self.relevant > 0
        rows = torch.arange(q, device=levels.device)[:, None]
        g = torch.searchsorted(keys, (rows * stride + whole)[some])
        rank = a[g] + (n[g] * (wanted[some] - b[g]) / r[g] - 1e-9).ceil().clamp_min(1)
        here = (b[g] + r[g] * ((rank - a[g]) / n[g])) / rank
        last = torch.ones_like(self.row, dtype=torch.bool)
        last[:-1] = self.row[1:] != self.row[:-1]
        after = torch.where(last, 0.0, torch.cat([later[1:], later.new_zeros(1)]))[g]
        result[some] = torch.maximum(torch.maximum(here, ends[g]), after)
        return result


class _Entries:
    """The database on the device; with ``each``, entries are single items in the order of ties."""

    def __init__(self, columns: Tensor, counts: Tensor, words: Tensor, *, paired: bool, each: bool) -> None:
        self.columns, self.counts, self.words = columns, counts, words
        self.paired, self.each = paired, each

    def rank(self, tables: Tensor, queries: Tensor) -> _Tied:
        """Tie groups of the rankings for integer tables [q, T, entries] and label words [q, W]."""
        scores = score_columns(tables, self.columns, paired=self.paired)
        scores, order = scores.sort(dim=1, descending=True, stable=self.each)
        q, P = scores.shape
        hit = torch.zeros((q, P), dtype=torch.bool, device=scores.device)
        for word in range(queries.shape[1]):
            hit |= (queries[:, word, None] & self.words[None, :, word]) != 0
        sizes = self.counts[order]
        hits = torch.where(hit.gather(1, order), sizes, 0)
        del order, hit
        last = torch.ones((q, P), dtype=torch.bool, device=scores.device)
        if not self.each:
            torch.ne(scores[:, 1:], scores[:, :-1], out=last[:, :-1])
        del scores
        row, place = last.nonzero(as_tuple=True)
        ends, ends_hit = sizes.cumsum(dim=1)[row, place], hits.cumsum(dim=1)[row, place]
        relevant = hits.sum(dim=1)
        first = torch.ones_like(row, dtype=torch.bool)
        first[1:] = row[1:] != row[:-1]
        before = torch.where(first, 0, ends.roll(1))
        hits_before = torch.where(first, 0, ends_hit.roll(1))
        some = (ends_hit > hits_before).nonzero()[:, 0]
        a, b = before[some], hits_before[some]
        return _Tied(row[some], place[some], a, ends[some] - a, b, ends_hit[some] - b, relevant, (q, P))

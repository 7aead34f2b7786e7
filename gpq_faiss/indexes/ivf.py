"""Inverted lists: only the lists whose centroids are nearest to a query are scanned (:mod:`.probing`).

Items are stored without residuals, so GPQ's codebooks are valid with any coarse quantiser: k-means over decoded
vectors, or given vectors such as the model's class prototypes. Faiss shortlists from the lists, by
FastScan (4-bit) or byte-fused tables; candidates are re-scored, and if that does not prove the top k, all items of these lists are
scored, as in :mod:`.proof`. So results are exact within the probed lists, ties ordered by id; with all lists they equal the exact
search.
"""

from __future__ import annotations

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import pad_vectors
from ..codes.keys import EMPTY_KEY, Keys, read_keys, sort_keys
from ..codes.scores import lookup_tables, score_tables
from ..errors import DataError, UsageError
from ..faissio.storage import Packing, ivf_index
from .lists import IvfSettings
from .probing import Probing
from .proof import CANDIDATE_BYTES, candidate_bytes, decide, score_all
from .scanners import fastscan_bound, rounding_bound

_WIDER = 4  # factor on the number of candidates if the first ones do not suffice


class IvfSearch:
    """Searches lists of row numbers. The counterpart of :class:`.proof.ProvenSearch`.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d].
        ivf: trained.
        list_of: int32 [n], the list of each code.
        packing: packing of codes in the lists.
        items: int64 [n], items of each code (default: one).

    Attributes:
        probing: the order of the lists.
        nprobe: minimum number of lists to probe.
        scored: number of codes scored one by one so far.

    Raises:
        DataError: ``list_of`` is out of range.
        UsageError: 2^32 codes or more, beyond the range of keys.
    """

    def __init__(
        self,
        codes: Codes,
        Z: Floats,
        ivf: IvfSettings,
        list_of: NDArray[np.int32],
        packing: Packing,
        items: Ids | None = None,
    ) -> None:
        assert ivf.centroids is not None
        if len(codes) >= 1 << 32:
            raise UsageError(f"{len(codes):,} codes are too many for lists in memory: search them from disk")
        self.codes = codes
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.fast = packing == "fastscan"
        self.nprobe = ivf.nprobe
        lists = len(ivf.centroids)
        if len(list_of) and not 0 <= list_of.min() <= list_of.max() < lists:
            raise DataError(
                f"list_of names lists {list_of.min()} to {list_of.max()}: there are {lists}, counted from 0"
            )
        self.index = ivf_index(codes, None, Z, ivf.centroids, packing, list_of)
        self._sizes = np.bincount(list_of, minlength=lists)
        held = self._sizes if items is None else np.bincount(list_of, items, lists).astype(np.int64)
        self.probing = Probing(ivf.centroids, held)
        # codes in the order of their lists
        self._rows = np.argsort(list_of, kind="stable").astype(np.uint32)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.scored = 0

    def prepare(self, k: int) -> None:
        """No-op: the lists exist."""

    def block_rows(self, k: int) -> int:
        """Queries per block, for bounded memory."""
        held = candidate_bytes(2 * k + 64, int(self.codes.shape[1])) + self.M * self.K * 80
        held += 24 * min(len(self._sizes), max(k, self.nprobe))  # k lists have at least k items
        return max(1, CANDIDATE_BYTES // held)

    def search_keys(self, xq: Floats, k: int, items: int | None = None, nprobe: int | None = None) -> Keys:
        """Keys [Q, k] of the best codes in the probed lists; padded with empty keys.

        Args:
            xq: checked queries, float32 [Q, M*d].
            items: minimum total size of the probed lists, if possible (default: ``k``).
            nprobe: minimum number of lists to probe (default: :attr:`nprobe`).
        """
        lists = self.probing.lists(xq, nprobe or self.nprobe, k if items is None else items)
        total = np.where(lists >= 0, self._sizes[lists], 0).sum(axis=1)
        tables = score_tables(xq, self.Z)
        prepared, slack = lookup_tables(tables), self.slack(xq, tables)
        out = np.full((len(xq), k), EMPTY_KEY, np.int64)
        open_ = left = np.arange(len(xq))
        wanted = min(len(self.codes), k + max(32, k // 2) if self.fast else k + max(8, k // 8))
        for attempt in range(2):
            # With so few codes, scoring all is as fast.
            open_ = open_ if attempt == 0 else open_[total[open_] > 4 * wanted]
            step = max(1, CANDIDATE_BYTES // candidate_bytes(wanted, int(self.codes.shape[1])))
            proven = np.zeros(len(xq), np.bool_)
            tied = np.zeros(len(xq), np.bool_)
            for start in range(0, len(open_), step):
                rows = open_[start : start + step]
                shortlist = self.shortlist(xq[rows], wanted, lists[rows])
                found = decide(prepared[rows], self.codes, (self.M, self.K), shortlist, slack[rows], k)
                out[rows] = found.best
                there = shortlist[1] >= 0
                proven[rows] = found.proven | (there.sum(axis=1) == total[rows])
                tied[rows] = (there & (found.exact >= found.kth[:, None])).all(axis=1)
            left = left[~proven[left]]
            open_ = left[~tied[left]]
            wanted *= _WIDER
        for q in left.tolist():
            self._score_all(prepared[q : q + 1], lists[q], k, out[q])
        return out

    def slack(self, xq: Floats, tables: Floats | None = None) -> Floats:
        """float32 [Q]: bound on how much a score can exceed its value in :meth:`shortlist`."""
        if not self.fast:
            return rounding_bound(xq, self.M, self.d)
        return fastscan_bound(xq, score_tables(xq, self.Z) if tables is None else tables, self.d)

    def shortlist(self, xq: Floats, k: int, lists: Ids) -> tuple[Floats, Ids]:
        """Faiss' ``k`` best of each query's lists [Q, P] (-1: none): scores and row numbers [Q, k], padded with -1."""
        padded = np.ascontiguousarray(pad_vectors(xq, self.index.d))
        lists = np.ascontiguousarray(lists)
        nearness = np.zeros(lists.shape, np.float32)
        D, found = np.empty((len(xq), k), np.float32), np.empty((len(xq), k), np.int64)
        params = faiss.SearchParametersIVF(nprobe=lists.shape[1])  # type: ignore[call-arg]  # stub lacks it
        # The Python method uses the index's nprobe, which other threads share.
        self.index.search_preassigned_c(
            len(xq),
            faiss.swig_ptr(padded),
            k,
            faiss.swig_ptr(lists),
            faiss.swig_ptr(nearness),
            faiss.swig_ptr(D),
            faiss.swig_ptr(found),
            False,
            params,
        )
        return D, found

    def _score_all(self, prepared: Floats, lists: Ids, k: int, out: Keys) -> None:
        """Fill the keys [k] of one query by the scores of all codes in its lists."""
        lists = lists[lists >= 0]
        n = int(self._sizes[lists].sum())
        self.scored += n
        out[:] = EMPTY_KEY
        if n == len(self.codes):
            best = score_all(prepared, self.codes, self.M, self.K, k)[0]
        else:
            parts = [self._rows[self._starts[i] : self._starts[i] + self._sizes[i]] for i in lists.tolist()]
            rows = np.sort(np.concatenate(parts)).astype(np.int64)
            scores, at = read_keys(score_all(prepared, self.codes[rows], self.M, self.K, min(k, n))[0])
            best = sort_keys(scores, rows[at])
        out[: len(best)] = best

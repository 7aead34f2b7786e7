"""Exact search: the top k by table sums, ties ordered by id, the same answer whatever the batch or thread count.

Faiss scans the codes fast, but its floats depend on the order in which a kernel adds, and among equal scores it keeps
whichever it met first. So Faiss only nominates: k' > k candidates are scored again in the fixed order of
:func:`.codebooks.score_codes`, and the top k is *proven* once no item outside the candidates can reach the k-th score
(rounding bound below). Otherwise k' grows, and at last all codes of that query are scored.

The scheme needs of a scanner just two things, candidates with approximate scores and a bound on their error; other
index kinds bring their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .checks import Codes, Floats, Ids, check_vectors
from .codebooks import inject, inject_fused, pad_vectors, score_candidates, score_codes, score_tables
from .layout import layout_of, vector_view

BLOCK = 256
_CANDIDATE_BYTES = 64 << 20
_ROUNDS = 3  # widenings, each fourfold, before all codes of a query are scored
_UNIT = float(np.finfo(np.float32).eps)  # twice the relative error of one float32 operation
_TINY = float(np.finfo(np.float32).tiny)


def check_k(k: int, ntotal: int) -> int:
    """A number of results that can be given.

    Raises:
        UsageError: below 1 or above the number of items.
    """
    if isinstance(k, bool) or not isinstance(k, int | np.integer):
        raise UsageError(f"k = {k!r}: it must be a whole number")
    if not 1 <= k <= ntotal:
        raise UsageError(f"k = {k}: it must be from 1 to the {ntotal:,} items of the index")
    return int(k)


@contextlib.contextmanager
def omp_threads(threads: int | None) -> Iterator[None]:
    """Let Faiss use ``threads`` (None: as many as it does already). The setting is process-wide and restored.

    Raises:
        UsageError: fewer than one.
    """
    if threads is None:
        yield
        return
    if threads < 1:
        raise UsageError(f"{threads} threads: it must be at least 1")
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)


def rounding_bound(xq: Floats, M: int, d: int) -> Floats:
    """How far two float32 evaluations of a query's score can lie apart: float32 [Q].

    Both add 2d + M products in some order; with unit-norm codewords each is within (2d + M + 2) u of the true value
    times sum_m |q_m| (Higham 2002, section 3.1, with Cauchy-Schwarz a sub-space).
    """
    norms = np.sqrt(np.square(xq.reshape(len(xq), M, d), dtype=np.float64).sum(axis=2)).sum(axis=1)
    operations = 2 * d + M + 2
    bound = 1.01 * operations * (_UNIT * norms + 2 * M * d * _TINY)
    return np.asarray(bound, np.float32)


def top_k(scores: Floats, rank: NDArray[Any] | None, k: int) -> NDArray[np.intp]:
    """Positions of the ``k`` largest of ``scores`` [n], larger first, equal ones by ``rank`` (None: by position)."""
    n = len(scores)
    if k < n:
        kth = np.partition(scores, n - k)[n - k]
        keep = np.flatnonzero(scores > kth)
        tied = np.flatnonzero(scores == kth)
        missing = k - len(keep)
        if rank is not None and missing < len(tied):
            tied = tied[np.argpartition(rank[tied], missing - 1)[:missing]]
        keep = np.concatenate([keep, tied[:missing]])
    else:
        keep = np.arange(n)
    order = np.lexsort((keep if rank is None else rank[keep], -scores[keep]))
    return keep[order]


class FlatSearch:
    """An index prepared for exact search: a snapshot, unaffected by what happens to the index afterwards.

    It holds a copy of the codes (byte-fused where K = 16, which scans 4-5 times faster) and of the ids.

    Args:
        index: ``IndexPQ``, or ``IndexIDMap``/``IndexIDMap2`` around one.

    Attributes:
        ntotal: items.
        width: D of the queries.
        widened: queries whose first candidates did not prove the top k, so far.
        scored_in_full: of these, how many came to have all codes scored.

    Raises:
        DataError: the index is empty or not sound (:func:`.layout.layout_of`).
    """

    def __init__(self, index: Any) -> None:
        layout = layout_of(index, deep=True)
        if layout.ntotal == 0:
            raise DataError("the index is empty: add codes first (gpq index)")
        self._codebooks = layout.codebooks
        self.M, self.K, self.d = (int(n) for n in layout.codebooks.shape)
        self.width = self.M * self.d
        self.ntotal = layout.ntotal
        fused = self.K == 16 and self.M > 1
        self._scan = inject_fused(layout.codebooks) if fused else inject(layout.codebooks)
        self._scan.add_sa_codes(layout.codes())
        self._codes = vector_view(self._scan.codes, np.uint8).reshape(-1, layout.code_size)
        ids = layout.ids()
        self._ids: Ids | None = None
        self._rank: Ids | None = None
        if layout.mapped:
            self._ids = ids.copy()
            if self.ntotal > 1 and not bool((ids[1:] > ids[:-1]).all()):
                self._rank = np.empty(self.ntotal, np.int64)
                self._rank[np.argsort(ids, kind="stable")] = np.arange(self.ntotal)
        self.widened = 0
        self.scored_in_full = 0

    @property
    def codes(self) -> Codes:
        """The packed codes, uint8 [ntotal, code_size]: a view, to be left as it is."""
        return self._codes

    def search(
        self, xq: ArrayLike, k: int, *, threads: int | None = None, block: int = BLOCK
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query.

        Queries are used as they are (asymmetric): scores are inner products with the codewords, and a positive factor
        on a whole query changes no order.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal.
            threads: Faiss threads for this call; the answer does not depend on it.
            block: queries at a time, at most.

        Returns:
            D float32 [Q, k], larger first; I int64 [Q, k], equal scores by ascending id.

        Raises:
            UsageError: ``k``, ``threads`` or ``block`` out of range.
            DataError: queries empty, of another width, NaN or infinite.
        """
        k = check_k(k, self.ntotal)
        if block < 1:
            raise UsageError(f"block of {block} queries: it must be at least 1")
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        first = self._first_candidates(k)
        # what a block holds: candidates' codes as bytes and as 8-byte places, scores, ids
        held = first * (self._scan.code_size * 9 + 24) if first < self.ntotal else self.ntotal * 12
        block = max(1, min(block, _CANDIDATE_BYTES // held))
        D = np.empty((len(queries), k), np.float32)
        positions = np.empty((len(queries), k), np.int64)
        with omp_threads(threads):
            for start in range(0, len(queries), block):
                part = slice(start, start + block)
                self._block(queries[part], k, first, D[part], positions[part])
        return D, positions if self._ids is None else self._ids[positions]

    def _first_candidates(self, k: int) -> int:
        """k' of the first round; ntotal where nominating would cost more than scoring everything."""
        wanted = k + max(32, k // 4)
        return wanted if 4 * wanted < self.ntotal else self.ntotal

    def _block(self, xq: Floats, k: int, first: int, D: Floats, positions: Ids) -> None:
        """Fill ``D`` and ``positions`` for a block of queries."""
        open_ = np.arange(len(xq))
        wanted = first
        tables = score_tables(xq, self._codebooks) if wanted < self.ntotal else None
        bounds = rounding_bound(xq, self.M, self.d)
        for attempt in range(_ROUNDS):
            if tables is None or not len(open_) or 4 * wanted >= self.ntotal:
                break
            approximate, candidates = self._scan.search(pad_vectors(xq[open_], self._scan.d), wanted)
            exact = score_candidates(tables[open_], self.codes[candidates], self.M, self.K)
            proven = np.zeros(len(open_), bool)
            for row, q in enumerate(open_):
                best = top_k(exact[row], self._order_of(candidates[row]), k)
                # Whatever was not nominated scores at most the last approximate score plus the bound. A tie with the
                # k-th is not good enough: the item outside might have the smaller id.
                if approximate[row, -1] + bounds[q] < exact[row, best[-1]]:
                    D[q], positions[q] = exact[row, best], candidates[row, best]
                    proven[row] = True
            open_ = open_[~proven]
            if attempt == 0:
                self.widened += len(open_)
            wanted *= 4
        if tables is not None:
            self.scored_in_full += len(open_)
        for q in open_:
            scores = score_codes(xq[q : q + 1], self.codes, self._codebooks)[0]
            best = top_k(scores, self._rank, k)
            D[q], positions[q] = scores[best], best

    def _order_of(self, candidates: Ids) -> Ids:
        """What orders ties among candidates: their ids' ranks, or their positions, which is the same order."""
        return candidates if self._rank is None else self._rank[candidates]


def search_index(
    index: Any, xq: ArrayLike, k: int, *, threads: int | None = None, block: int = BLOCK
) -> tuple[Floats, Ids]:
    """Exact top ``k`` of ``index`` for queries [Q, M*d], ties ordered by id: (D float32, I int64), both [Q, k].

    Prepares the index anew on every call (a pass over its codes); for many calls keep a :class:`FlatSearch`.

    Example:
        >>> import numpy as np
        >>> from gpq_faiss.index.codebooks import encode, inject
        >>> Z = np.array([[[1, 0], [0, 1], [-1, 0], [0, -1]]], np.float32)  # one codebook of four directions
        >>> flat = inject(Z)
        >>> flat.add_sa_codes(encode(np.array([[3, 1], [-1, 2], [1, -5]], np.float32), Z))
        >>> D, I = search_index(flat, np.array([[1, 0.5]], np.float32), k=2)
        >>> I.tolist(), D.tolist()
        ([[0, 1]], [[1.0, 0.5]])

    Raises:
        UsageError: ``k``, ``threads`` or ``block`` out of range.
        DataError: an index or queries that are empty, damaged or do not fit each other.
    """
    return FlatSearch(index).search(xq, k, threads=threads, block=block)

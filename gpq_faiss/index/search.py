"""Exact search: the top k by table sums, ties ordered by id, the same answer whatever the batch or thread count.

Faiss scans the codes fast, but its floats depend on the order in which a kernel adds, and among equal scores it keeps
whichever it met first. So Faiss only nominates, and :mod:`.proof` decides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..codes.keys import read_keys
from ..errors import DataError
from ..faissio.layout import layout_of
from .proof import ProvenSearch
from .scanners import TableScan
from .threads import BLOCK, check_block, check_k, omp_threads


class FlatSearch:
    """An index prepared for exact search: a snapshot, unaffected by what happens to the index afterwards.

    It holds a copy of the codes (byte-fused where K = 16, which scans 4-5 times faster) and of the ids. For many
    queries :class:`.memory.Engine` is faster still; this one needs no preparation beyond the copy.

    Args:
        index: any index that :func:`..faissio.layout.layout_of` knows.

    Attributes:
        ntotal: items.
        width: D of the queries.

    Raises:
        DataError: the index is empty or not sound (:func:`..faissio.layout.layout_of`).
    """

    def __init__(self, index: Any) -> None:
        layout = layout_of(index, deep=True)
        if layout.ntotal == 0:
            raise DataError("the index is empty: add codes first (gpq index)")
        self.M, self.K, self.d = (int(n) for n in layout.codebooks.shape)
        self.width = self.M * self.d
        self.ntotal = layout.ntotal
        codes, ids, _ = layout.ordered()
        self._ids: Ids | None = None if ids is None else ids.copy()
        self._proof = ProvenSearch(codes, layout.codebooks, ("fused",))
        scan = self._proof.scanner("fused")
        assert isinstance(scan, TableScan)
        self._proof.codes = scan.codes  # the only copy

    @property
    def codes(self) -> Codes:
        """The packed codes in the order of their ids, uint8 [ntotal, code_size]: a view, to be left as it is."""
        codes = self._proof.codes
        assert isinstance(codes, np.ndarray)
        return codes

    @property
    def widened(self) -> int:
        """Queries whose first candidates did not prove the top k, so far."""
        return self._proof.widened

    @property
    def scored_in_full(self) -> int:
        """Of these, how many came to have all codes scored."""
        return self._proof.scored_in_full

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
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        D = np.empty((len(queries), k), np.float32)
        positions = np.empty((len(queries), k), np.int64)
        with omp_threads(threads):
            step = min(block, self._proof.block_rows(k))
            for start in range(0, len(queries), step):
                part = slice(start, start + step)
                D[part], positions[part] = read_keys(self._proof.search_keys(queries[part], k))
        return D, positions if self._ids is None else self._ids[positions]


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

"""Faiss indexes with inverted lists, made from arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse, pad_vectors


def empty_ivfpq(centroids: Floats, books: Floats, *, by_residual: bool) -> Any:
    """An ``IndexIVFPQ`` by inner product around these centroids, trained, without items.

    Args:
        centroids: float32 [lists, at most M*d]; padded with zeros.
        books: float32 [M, K, d].
    """
    M, K, d = (int(n) for n in books.shape)
    quantizer: Any = faiss.IndexFlatIP(M * d)
    quantizer.add(np.ascontiguousarray(pad_vectors(centroids, M * d)))
    ivf: Any = faiss.IndexIVFPQ(
        quantizer, M * d, len(centroids), M, K.bit_length() - 1, faiss.METRIC_INNER_PRODUCT
    )
    quantizer.this.disown()
    ivf.own_fields = True
    ivf.by_residual = by_residual
    faiss.copy_array_to_vector(np.ascontiguousarray(books).ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    return ivf


def rows_of_lists(list_of: NDArray[np.int32], lists: int) -> Iterator[tuple[int, Ids]]:
    """Each list with the rows, ascending, that are in it; ``list_of`` int32 [n]."""
    order = np.argsort(list_of, kind="stable")
    bounds = np.searchsorted(list_of[order], np.arange(lists + 1))
    for number in range(lists):
        yield number, order[bounds[number] : bounds[number + 1]]


def fill_list(ivf: Any, number: int, codes: Codes, ids: Ids) -> None:
    """Append codes uint8 [n, code_size] with ids [n] to a list (``ntotal`` stays as it is)."""
    if not len(codes):
        return
    own = np.ascontiguousarray(ids, dtype=np.int64)  # names of their own: a pointer keeps nothing alive
    rows = np.ascontiguousarray(codes)
    ivf.invlists.add_entries(number, len(rows), faiss.swig_ptr(own), faiss.swig_ptr(rows))


def ivf_index(
    codes: Codes,
    ids: NDArray[np.int64] | None,
    Z: Floats,
    centroids: Floats,
    form: str,
    list_of: NDArray[np.int32],
) -> Any:
    """The Faiss index of these lists: ``IndexIVFPQFastScan`` (4-bit) or ``IndexIVFPQ`` (byte-fused), no residuals."""
    M = int(Z.shape[0])
    fused = form == "fused" and M > 1
    books = fuse(Z) if fused else Z
    ivf = empty_ivfpq(centroids, books, by_residual=False)
    for number, rows in rows_of_lists(list_of, len(centroids)):
        fill_list(ivf, number, codes[rows], rows if ids is None else ids[rows])
    ivf.ntotal = len(codes)
    if fused or form == "fused":
        return ivf
    fast = faiss.IndexIVFPQFastScan(ivf)
    # the quantizer passes to the copy, which outlives the original
    fast.quantizer = ivf.quantizer
    ivf.own_fields = False
    fast.own_fields = True
    return fast

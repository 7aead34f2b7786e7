"""The forms in which Faiss can hold the same codes, and the way from each to each without encoding again.

=================  ==============================================================================================
form               Faiss index (around it an ``IndexIDMap2`` where items have ids of their own; lists keep ids anyway)
=================  ==============================================================================================
``flat``           ``IndexPQ``, 4-bit (or whatever K asks for)
``fused``          ``IndexPQ``, 8-bit, byte-fused codebooks, the same bytes
``fastscan``       ``IndexPQFastScan``
``ivf-fastscan``   ``IndexIVFPQFastScan``, by_residual False
``ivf-fused``      ``IndexIVFPQ``, 8-bit, byte-fused codebooks, by_residual False
=================  ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse, inject, inject_fused, pad_vectors
from ..errors import UsageError


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


Form = Literal["flat", "fused", "fastscan", "ivf-fastscan", "ivf-fused"]
FORMS: tuple[Form, ...] = ("flat", "fused", "fastscan", "ivf-fastscan", "ivf-fused")


def check_form(form: str, K: int, M: int) -> None:
    """Raises UsageError: an unknown form, or one that codebooks of this size do not have."""
    if form not in FORMS:
        raise UsageError(f"form {form!r}: choose from {', '.join(FORMS)}")
    if K != 16 and form != "flat":
        raise UsageError(f"form {form!r} needs 16 codewords a codebook, these have {K}: use 'flat'")
    if M == 1 and form.endswith("fused"):
        raise UsageError(f"form {form!r} needs two codebooks or more, there is one: use 'flat' or 'fastscan'")


def faiss_form(
    form: Form,
    codes: Codes,
    ids: Ids | None,
    Z: Floats,
    *,
    centroids: Floats | None = None,
    list_of: NDArray[np.int32] | None = None,
    nprobe: int = 1,
) -> Any:
    """A Faiss index of checked codes.

    Args:
        ids: int64 [n], or None where an id is a position.
        centroids: float32 [lists, M*d], for the forms with lists; ``list_of`` int32 [n]: the list of each code; ``nprobe``:
            lists that a query looks at unless told otherwise.

    Raises:
        UsageError: see :func:`check_form`.
    """
    M, K, _ = (int(n) for n in Z.shape)
    check_form(form, K, M)
    if form.startswith("ivf"):
        assert centroids is not None
        assert list_of is not None
        index = ivf_index(codes, ids, Z, centroids, form.removeprefix("ivf-"), list_of)
        index.nprobe = nprobe
        return index
    inner = inject_fused(Z) if form == "fused" else inject(Z)
    if form != "fastscan":
        if ids is None:
            inner.add_sa_codes(codes)
            return inner
        mapped = faiss.IndexIDMap2(inner)
        mapped.add_sa_codes(codes, ids)
        return mapped
    inner.add_sa_codes(codes)
    fast: Any = faiss.IndexPQFastScan(inner)
    if ids is None:
        return fast
    # An id map must be made around an empty index and cannot take packed codes, so its index is exchanged.
    fresh: Any = faiss.IndexPQFastScan(inject(Z))
    outer: Any = faiss.IndexIDMap2(fresh)
    outer.index = fast
    fast.this.disown()
    outer.own_fields = True
    outer.ntotal = fast.ntotal
    faiss.copy_array_to_vector(np.ascontiguousarray(ids, dtype=np.int64), outer.id_map)
    outer.construct_rev_map()
    return outer

"""Storage forms of codes in Faiss indexes: three packings, with or without inverted lists.

=============  ===============  ==============================================================================
packing        lists            Faiss index
=============  ===============  ==============================================================================
``4-bit``      no               ``IndexPQ`` with the model's codebooks (of log2 K bits, where K is not 16)
``bytes``      no               ``IndexPQ``, 8-bit, byte-fused codebooks, the same bytes
``fastscan``   no               ``IndexPQFastScan``
``bytes``      yes              ``IndexIVFPQ``, 8-bit, byte-fused codebooks, by_residual False
``fastscan``   yes              ``IndexIVFPQFastScan``, by_residual False
=============  ===============  ==============================================================================

An index without lists is in an ``IndexIDMap2`` if items have explicit ids; lists store ids anyway. Code bytes are the same in all forms,
so they can be converted without encoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse, inject, inject_fused, pad_vectors
from ..errors import UsageError

Packing = Literal["4-bit", "bytes", "fastscan"]


@dataclass(frozen=True)
class Storage:
    """A storage form.

    Attributes:
        packing: ``4-bit`` (with the original codebooks), ``bytes`` (byte-fused, :func:`..codes.codebooks.fuse`) or
            ``fastscan`` (in FastScan's blocks).
        lists: whether they are in inverted lists.
    """

    packing: Packing = "4-bit"
    lists: bool = False

    @property
    def name(self) -> str:
        """The name in sidecars and in ``gpq info``."""
        return ("ivf-" if self.lists else "") + _NAMES[self.packing]

    def check(self, K: int, M: int) -> None:
        """Raises UsageError: not available for codebooks of this size."""
        if self == Storage("4-bit", lists=True):
            raise UsageError("4-bit codes in lists: lists hold FastScan's blocks or byte-fused codes")
        if K != 16 and self.packing != "4-bit":
            raise UsageError(
                f"form {self.name!r} needs 16 codewords per codebook, these have {K}: use 'flat'"
            )
        if M == 1 and self.packing == "bytes":
            raise UsageError(
                f"form {self.name!r} needs two codebooks or more, there is one: use 'flat' or 'fastscan'"
            )


_NAMES: dict[Packing, str] = {"4-bit": "flat", "bytes": "fused", "fastscan": "fastscan"}
STORAGES = {
    storage.name: storage
    for storage in (
        Storage("4-bit"),
        Storage("bytes"),
        Storage("fastscan"),
        Storage("fastscan", lists=True),
        Storage("bytes", lists=True),
    )
}
"""Storage forms by their names in sidecars."""


def empty_ivfpq(centroids: Floats, books: Floats, *, by_residual: bool) -> Any:
    """An empty, trained ``IndexIVFPQ`` (inner product) with these centroids.

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
    """Yield each list with its rows, ascending; ``list_of`` int32 [n]."""
    order = np.argsort(list_of, kind="stable")
    bounds = np.searchsorted(list_of[order], np.arange(lists + 1))
    for number in range(lists):
        yield number, order[bounds[number] : bounds[number + 1]]


def fill_list(ivf: Any, number: int, codes: Codes, ids: Ids) -> None:
    """Append codes uint8 [n, code_size] with ids [n] to a list (without updating ``ntotal``)."""
    if not len(codes):
        return
    own = np.ascontiguousarray(ids, dtype=np.int64)  # named, as pointers do not keep arrays alive
    rows = np.ascontiguousarray(codes)
    ivf.invlists.add_entries(number, len(rows), faiss.swig_ptr(own), faiss.swig_ptr(rows))


def ivf_index(
    codes: Codes,
    ids: Ids | None,
    Z: Floats,
    centroids: Floats,
    packing: Packing,
    list_of: NDArray[np.int32],
    *,
    nprobe: int = 1,
) -> Any:
    """The Faiss index of checked codes in lists: ``IndexIVFPQFastScan`` or (``bytes``) ``IndexIVFPQ``, no residuals.

    Args:
        ids: int64 [n], or None where an id is a position.
        centroids: float32 [lists, M*d].
        list_of: int32 [n], the list of each code.
        nprobe: default number of lists to probe.
    """
    in_bytes = packing == "bytes"
    books = fuse(Z) if in_bytes and len(Z) > 1 else Z
    ivf = empty_ivfpq(centroids, books, by_residual=False)
    for number, rows in rows_of_lists(list_of, len(centroids)):
        fill_list(ivf, number, codes[rows], rows if ids is None else ids[rows])
    ivf.ntotal = len(codes)
    if in_bytes:
        ivf.nprobe = nprobe
        return ivf
    fast = faiss.IndexIVFPQFastScan(ivf)
    # the quantizer passes to the copy, which outlives the original
    fast.quantizer = ivf.quantizer
    ivf.own_fields = False
    fast.own_fields = True
    fast.nprobe = nprobe
    return fast


def row_index(codes: Codes, ids: Ids | None, Z: Floats, packing: Packing) -> Any:
    """The Faiss index of checked codes without lists.

    Args:
        ids: int64 [n], or None where an id is a position.
    """
    inner = inject_fused(Z) if packing == "bytes" else inject(Z)
    if packing != "fastscan":
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

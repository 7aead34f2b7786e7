"""Forms of codes in Faiss indexes.

============  ============================================================================================================
form          Faiss index
============  ============================================================================================================
``flat``      ``IndexPQ`` with the model's codebooks (of log2 K bits, where K is not 16)
``fused``     ``IndexPQ``, 8-bit, byte-fused codebooks, the same bytes
``fastscan``  ``IndexPQFastScan``
``ivf``       ``IndexIVFPQFastScan`` by residual behind a ``RemapDimensionsTransform``, in an ``IndexPreTransform``: the lists
              are made of the first P codewords (:class:`WordLists`), and hold the other M - P codebooks
============  ============================================================================================================

All but ``ivf`` are in an ``IndexIDMap2`` if items have explicit ids; lists store ids anyway. The scores are the same in all forms, so
codes can be converted without encoding. Earlier versions wrote lists by k-means without residuals, ``ivf-fastscan`` and ``ivf-fused``,
which are still read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_indices, unpack_codes
from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject, inject_fused
from ..errors import UsageError

Form = Literal["flat", "fused", "fastscan", "ivf"]
FORMS: tuple[Form, ...] = ("flat", "fused", "fastscan", "ivf")
OLD_LISTS = ("ivf-fastscan", "ivf-fused")
"""Forms of earlier versions."""
LEVELS = 4
"""Maximum codebooks of a list's name."""
_TYPICAL = 2048
"""Items that the list of a random item should have at least, for the choice of P."""


def check_form(form: str, M: int, K: int) -> Form:
    """``form``, if codes of M codebooks of K codewords can be stored so. Raises UsageError: not, or an unknown form."""
    if form not in FORMS:
        raise UsageError(f"kind {form!r}: choose from {', '.join(FORMS)}")
    if K != 16 and form != "flat":
        raise UsageError(f"kind {form!r} needs 16 codewords per codebook, these have {K}: use 'flat'")
    if M == 1 and form == "fused":
        raise UsageError("kind 'fused' needs two codebooks or more, there is one: use 'flat' or 'fastscan'")
    return form


# Lists made of codewords ----------------------------------------------------------------------------------------------


def first_words(codes: Codes, M: int, P: int) -> NDArray[np.int64]:
    """The first P of M codewords of 4-bit codes as one number, the first in the highest bits: int64 [n]."""
    key = np.zeros(len(codes), np.int64)
    for m in range(P):
        key <<= 4
        key |= (codes[:, m // 2] >> (4 * (m % 2))) & 15
    return key


def choose_P(counts: Ids, M: int, Z: Floats) -> int:
    """How many codebooks name the lists: as many as leave lists that are worth a visit.

    Args:
        counts: int64 [16^levels], items by their first ``levels`` codewords (:func:`first_words`), ``levels`` at most :data:`LEVELS`.
        Z: codebooks, float32 [M, 16, d].
    """
    n = int(counts.sum())
    most = min(LEVELS, M - 1, (len(counts).bit_length() - 1) // 4)
    distinct = [
        len(np.unique(book, axis=0)) == 16 for book in Z[:most]
    ]  # equal codewords could not be told apart
    P = 0
    while most > P and distinct[P]:
        sizes = counts.reshape(16 ** (P + 1), -1).sum(axis=1)
        if P and (
            np.count_nonzero(sizes) > 8 * n**0.5 or np.square(sizes.astype(np.float64)).sum() < _TYPICAL * n
        ):
            break
        P += 1
    return P


@dataclass(frozen=True, eq=False)
class WordLists:
    """Inverted lists whose names are the first P codewords of their items.

    The first 16 lists, filled or not, have one codeword number throughout, so that all codewords of these codebooks are in the file; the
    others are in ascending order. Without P there is one list.

    Attributes:
        Z: codebooks, float32 [M, 16, d].
        words: uint8 [lists, P].
    """

    Z: Floats
    words: NDArray[np.uint8]

    @classmethod
    def of(cls, counts: Ids, Z: Floats) -> Self:
        """The lists for items with these first words (:func:`choose_P`)."""
        P = choose_P(counts, len(Z), Z)
        if not P:
            return cls(Z, np.zeros((1, 0), np.uint8))
        sizes = counts.reshape(16**P, -1).sum(axis=1)
        same = np.arange(16) * ((16**P - 1) // 15)
        keys = np.concatenate([same, np.setdiff1d(np.flatnonzero(sizes), same)])
        return cls(Z, np.stack([(keys >> 4 * (P - 1 - m)) & 15 for m in range(P)], axis=1).astype(np.uint8))

    @property
    def P(self) -> int:
        """Codebooks that name a list."""
        return int(self.words.shape[1])

    @property
    def rest(self) -> Floats:
        """The codebooks in the lists, float32 [M - P, 16, d]."""
        return self.Z[self.P :]

    @cached_property
    def keys(self) -> Ids:
        """:func:`first_words` of each list, int64 [lists]."""
        key = np.zeros(len(self.words), np.int64)
        for m in range(self.P):
            key = key << 4 | self.words[:, m]
        return key

    def list_of(self, codes: Codes) -> NDArray[np.int32]:
        """The list of each code, int32 [n]; -1 if there is none."""
        number = np.full(16**self.P, -1, np.int32)
        number[self.keys] = np.arange(len(self.keys))
        return number[first_words(codes, len(self.Z), self.P)]

    def stored(self, codes: Codes) -> Codes:
        """The codewords behind the first P of each code, packed: uint8 [n, ceil((M - P) / 2)]."""
        if self.P % 2 == 0:
            return np.ascontiguousarray(codes[:, self.P // 2 :])
        return pack_indices(unpack_codes(codes, len(self.Z), 16)[:, self.P :], 16)

    def whole(self, stored: Codes, lists: Ids) -> Codes:
        """Codes from :meth:`stored` ones [n, any] and the list of each, int64 [n]."""
        M = len(self.Z)
        rest = unpack_codes(stored, M - self.P, 16)
        return pack_indices(np.concatenate([self.words[lists], rest], axis=1), 16)

    # Faiss wants sub-vectors of equal width: those of the first P codebooks are spread over the others, whose codewords are 0 there.

    @cached_property
    def dimensions(self) -> NDArray[np.int32]:
        """The dimension of a query at each place of a vector in the index, int32 [M - P, width]; -1 for zeros."""
        M, _, d = (int(n) for n in self.Z.shape)
        P, rest = self.P, M - self.P
        spare = -(-P * d // rest)
        places = np.full((rest, d + spare), -1, np.int32)
        places[:, :d] = (P + np.arange(rest))[:, None] * d + np.arange(d)
        first = np.full(rest * spare, -1, np.int32)
        first[: P * d] = np.arange(P * d)
        places[:, d:] = first.reshape(rest, spare)
        return places

    @cached_property
    def centroids(self) -> Floats:
        """Centroids of the lists in the index, float32 [lists, (M - P) * width]."""
        M, _, d = self.Z.shape
        x = np.zeros((len(self.words), M * d), np.float32)
        for m in range(self.P):
            x[:, m * d : (m + 1) * d] = self.Z[m][self.words[:, m]]
        at = self.dimensions.reshape(-1)
        return np.where(at >= 0, x[:, np.maximum(at, 0)], np.float32(0))

    def index(self, nprobe: int | None = None) -> Any:
        """The empty index. ``nprobe``: lists that plain Faiss visits (default: :meth:`nprobe`)."""
        rest, width = self.dimensions.shape
        d = int(self.Z.shape[2])
        books = np.zeros((rest, 16, width), np.float32)
        books[:, :, :d] = self.rest
        fast = empty_lists(self.centroids, books)
        fast.nprobe = nprobe or self.nprobe()
        moved: Any = faiss.RemapDimensionsTransform(len(self.Z) * d, rest * width, False)  # type: ignore[arg-type]  # stub is of another
        faiss.copy_array_to_vector(self.dimensions.reshape(-1), moved.map)
        moved.is_trained = True
        index: Any = faiss.IndexPreTransform(moved, fast)
        return index

    def nprobe(self) -> int:
        """The default number of lists for plain Faiss: a 64th, at least 16."""
        return min(len(self.words), max(16, len(self.words) // 64))


def empty_lists(centroids: Floats, books: Floats) -> Any:
    """An empty, trained ``IndexIVFPQFastScan`` by residual (inner product).

    Args:
        centroids: float32 [lists, M*d]. books: float32 [M, 16, d].
    """
    M, _, d = (int(n) for n in books.shape)
    quantizer: Any = faiss.IndexFlatIP(M * d)
    quantizer.add(np.ascontiguousarray(centroids))
    index: Any = faiss.IndexIVFPQFastScan(quantizer, M * d, len(centroids), M, 4, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()
    index.own_fields = True
    index.by_residual = True
    faiss.copy_array_to_vector(np.ascontiguousarray(books).ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def packed_rows(codes: Codes, M: int, rows: int = 32) -> NDArray[np.uint8]:
    """4-bit codes of M codebooks in FastScan's blocks of ``rows``."""
    units = np.broadcast_to(np.eye(16, dtype=np.float32), (M, 16, 16))
    packer = inject(units)
    packer.add_sa_codes(np.ascontiguousarray(codes))
    fast: Any = faiss.IndexPQFastScan(packer, rows)  # named: its codes go with it
    return np.asarray(faiss.vector_to_array(fast.codes), np.uint8)


def fill_list(index: Any, number: int, codes: Codes, ids: Ids, M: int) -> None:
    """Fill an empty list of an ``IndexIVFPQFastScan`` with 4-bit codes of M codebooks (without updating ``ntotal``)."""
    if len(codes):
        own = np.ascontiguousarray(ids, dtype=np.int64)  # named, as pointers do not keep arrays alive
        packed = packed_rows(codes, M, int(index.bbs))
        index.invlists.add_entries(number, len(codes), faiss.swig_ptr(own), faiss.swig_ptr(packed))


# Whole indexes --------------------------------------------------------------------------------------------------------


def faiss_index(codes: Codes, ids: Ids | None, Z: Floats, form: Form) -> Any:
    """The Faiss index of checked codes.

    Args:
        ids: int64 [n], or None where an id is a position.
    """
    if form == "ivf":
        return _in_lists(codes, ids, Z)
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


def _in_lists(codes: Codes, ids: Ids | None, Z: Floats) -> Any:
    levels = min(LEVELS, len(Z) - 1)
    lists = WordLists.of(np.bincount(first_words(codes, len(Z), levels), minlength=16**levels), Z)
    outer = lists.index()
    inner: Any = faiss.downcast_index(outer.index)
    list_of = lists.list_of(codes)
    order = np.argsort(list_of, kind="stable")
    bounds = np.searchsorted(list_of[order], np.arange(len(lists.words) + 1))
    stored = lists.stored(codes)
    for number in range(len(lists.words)):
        rows = order[bounds[number] : bounds[number + 1]]
        fill_list(inner, number, stored[rows], rows if ids is None else ids[rows], len(lists.rest))
    inner.ntotal = outer.ntotal = len(codes)
    return outer

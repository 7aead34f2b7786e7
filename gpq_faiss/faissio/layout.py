"""Verification of Faiss indexes before use.

Faiss checks little after reading: a file with wrong ids, a centroid array of the wrong size or another metric gives wrong results or
out-of-bounds reads. :func:`layout_of` accepts the forms that this package writes and anything built from them with plain Faiss, and
rejects others by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import check_codes, code_size
from ..codes.blocks import block_bytes, unpack_blocks
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids, check_codebooks, repeated_id
from ..codes.codebooks import unfuse
from ..errors import DataError
from ..store import codebooks_fingerprint
from .storage import LEVELS, WordLists

_ST_PQ = 0  # IndexPQ::ST_PQ, asymmetric table sums


@dataclass(frozen=True)
class Layout:
    """A verified index.

    Attributes:
        index: as given, with its id map or transform if it has one.
        inner: the index inside: ``IndexPQ``, ``IndexPQFastScan``, ``IndexIVFPQ`` or ``IndexIVFPQFastScan``.
        form: of the codes (:mod:`.storage`), possibly one of :data:`.storage.OLD_LISTS`.
        codebooks: float32 [M, K, d], unit-norm; for byte-fused ones the 4-bit ones.
        mapped: whether the index has explicit ids (else ids are row numbers).
        words: the lists of form ``ivf``.
    """

    index: Any
    inner: Any
    form: str
    codebooks: Floats
    mapped: bool
    words: WordLists | None = None

    @property
    def ntotal(self) -> int:
        """Number of items."""
        return int(self.inner.ntotal)

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return code_size(int(self.codebooks.shape[0]), int(self.codebooks.shape[1]))

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the codebooks, as in all files of this package."""
        return codebooks_fingerprint(self.codebooks)

    def _lists(self) -> tuple[Any, list[int]]:
        """The inverted lists and their sizes."""
        lists: Any = faiss.downcast_InvertedLists(self.inner.invlists)
        return lists, [int(lists.list_size(number)) for number in range(int(self.inner.nlist))]

    def codes(self) -> Codes:
        """The packed codes, uint8 [ntotal, code_size]; of forms flat and fused a view, valid until the index changes
        or is freed."""
        M = int(self.codebooks.shape[0])
        if self.form in ("flat", "fused"):
            return vector_view(self.inner.codes, np.uint8).reshape(-1, self.code_size)
        if self.form == "fastscan":
            packed = faiss.vector_to_array(self.inner.codes)
            return unpack_blocks(packed, self.ntotal, M, int(self.inner.bbs))
        parts = [np.empty((0, self.code_size), np.uint8)]
        lists, sizes = self._lists()
        for number, n in enumerate(sizes):
            if not n:
                continue
            if self.form == "ivf-fused":
                parts.append(faiss.rev_swig_ptr(lists.get_codes(number), n * self.code_size).reshape(n, -1))
                continue
            rows, size = int(lists.n_per_block), int(lists.block_size)
            held = faiss.rev_swig_ptr(lists.get_codes(number), -(-n // rows) * size)
            if self.words is None:
                parts.append(unpack_blocks(held, n, M, rows))
            else:
                stored = unpack_blocks(held, n, M - self.words.P, rows)
                parts.append(self.words.whole(stored, np.full(n, number)))
        return np.concatenate(parts)

    def ids(self) -> Ids:
        """The items' ids, int64 [ntotal], in the order of the codes; of an id map a view, as :meth:`codes`."""
        if not self.mapped:
            return np.arange(self.ntotal, dtype=np.int64)
        if not self.form.startswith("ivf"):
            return vector_view(self.index.id_map, np.int64)
        lists, sizes = self._lists()
        parts = [faiss.rev_swig_ptr(lists.get_ids(i), n) for i, n in enumerate(sizes) if n]
        return np.concatenate([np.empty(0, np.int64), *parts])


def vector_view(vector: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A numpy view of a C++ vector, valid until that changes or is freed."""
    size = int(vector.size())
    if size == 0:
        return np.empty(0, dtype)
    view: NDArray[Any] = faiss.rev_swig_ptr(vector.data(), size)
    return view


def layout_of(index: Any, *, what: str = "index", deep: bool = False) -> Layout:  # noqa: PLR0912 - each branch is a check
    """Verify all sizes of a Faiss index that a search relies on.

    Args:
        index: ``IndexPQ`` or ``IndexPQFastScan``, or ``IndexIDMap``/``IndexIDMap2`` around one; lists made of codewords
            (:class:`.storage.WordLists`); ``IndexIVFPQ`` or ``IndexIVFPQFastScan`` without residuals.
        what: name of the index in errors.
        deep: also check all codes and ids for padding bits and repeated ids; used for files.

    Raises:
        DataError: another kind of index or metric, not trained, codewords that are not unit-norm, arrays whose
            sizes contradict each other, codes out of range, repeated ids.
    """
    inner, mapped, moved, ivf = _unwrapped(index, what)
    pq = inner.pq
    M, K, d, nbits = int(pq.M), int(pq.ksub), int(pq.dsub), int(pq.nbits)
    if not (
        2 <= nbits <= 8
        and 1 << nbits == K
        and M >= 1
        and d >= 1
        and M * d == pq.d == inner.d
        and (moved or index.d == inner.d)
    ):
        raise DataError(
            f"{what}: {M} codebooks of {K} in {pq.d} dimensions contradict {index.d}: it is damaged"
        )
    if int(pq.code_size) != code_size(M, K) or inner.code_size != pq.code_size:
        raise DataError(
            f"{what}: codes of {inner.code_size} bytes contradict {M} codebooks of {K}: it is damaged"
        )
    fast = isinstance(inner, faiss.IndexPQFastScan | faiss.IndexIVFPQFastScan)
    if fast:
        _check_fastscan(inner, M, K, what)
    if ivf:
        _check_lists(inner, M, fast, what, by_residual=moved)
        if index.ntotal != inner.ntotal:
            raise DataError(f"{what}: {inner.ntotal} items contradict {index.ntotal}: it is damaged")
    else:
        stated, held = int(inner.ntotal) * int(inner.code_size), int(inner.codes.size())
        if fast:
            rows = int(inner.bbs)
            stated = -(-int(inner.ntotal) // rows) * block_bytes(M, rows)
        if held != stated or inner.ntotal != index.ntotal:
            raise DataError(f"{what}: {held} bytes of codes contradict {index.ntotal} items: it is damaged")
    if mapped and index.id_map.size() != index.ntotal:
        raise DataError(f"{what}: {index.id_map.size()} ids contradict {index.ntotal} items: it is damaged")
    if isinstance(inner, faiss.IndexPQ) and inner.search_type != _ST_PQ:  # type: ignore[attr-defined]  # stub lacks it
        raise DataError(
            f"{what}: set to Hamming or polysemous search, which GPQ codes do not support: build it again"
        )
    if pq.centroids.size() != M * K * d:
        raise DataError(f"{what}: {pq.centroids.size()} centroid values, not {M} x {K} x {d}: it is damaged")
    centroids = np.asarray(faiss.vector_to_array(pq.centroids), np.float32).reshape(M, K, d)
    if moved:
        words = _words(index, inner, centroids, what)
        layout = Layout(index, inner, "ivf", words.Z, True, words)
    else:
        form, codebooks = _codebooks(centroids, what)
        if fast and form == "fused":
            raise DataError(f"{what}: its FastScan codebooks are byte-fused: it is damaged")
        form = "fastscan" if fast else form
        if ivf and form == "flat":
            raise DataError(f"{what}: 4-bit codes in lists that are not FastScan's: build it again")
        layout = Layout(index, inner, f"ivf-{form}" if ivf else form, codebooks, mapped or ivf)
    if deep and layout.ntotal:
        check_codes(layout.codes(), *layout.codebooks.shape[:2], what=what)
        ids = layout.ids() if layout.mapped else None
        if ids is not None and bool((ids == -1).any()):
            raise DataError(f"{what}: an item has the id -1, which marks a missing result: give it another")
        repeated = None if ids is None else repeated_id(ids)
        if repeated is not None:
            raise DataError(f"{what}: id {repeated} occurs more than once: every item needs its own")
    return layout


def _unwrapped(index: Any, what: str) -> tuple[Any, bool, bool, bool]:
    """The index inside; whether it is in an id map, behind a transform, and has lists. Raises DataError: another kind of index."""
    inner: Any = index
    mapped = False
    if isinstance(index, faiss.IndexIDMap):  # IndexIDMap2 is a subclass
        inner, mapped = faiss.downcast_index(index.index), True
    moved = isinstance(index, faiss.IndexPreTransform)
    if moved:
        inner = faiss.downcast_index(index.index) if index.index is not None else None
    ivf = isinstance(inner, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan) and not mapped
    if not (ivf or (isinstance(inner, faiss.IndexPQ | faiss.IndexPQFastScan) and not moved)):
        name = type(inner).__name__ if inner is not None else "nothing"
        raise DataError(f"{what}: holds {name}, not the product-quantised codes (IndexPQ) of a GPQ model")
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise DataError(
            f"{what}: its metric is not inner product, the only one GPQ codes have: export the model again"
        )
    if not inner.is_trained or not index.is_trained:
        raise DataError(f"{what}: not trained, so it holds no codebooks: export the model again")
    return inner, mapped, moved, ivf


def _check_fastscan(inner: Any, M: int, K: int, what: str) -> None:
    """Checks for FastScan. Raises DataError."""
    rows = int(inner.bbs)
    whole = isinstance(inner, faiss.IndexPQFastScan)
    if (
        K != 16
        or M > MAX_CODEBOOKS
        or rows not in (32, 64, 96, 128)
        or int(inner.M) != M
        or int(inner.ksub) != K
        or int(inner.nbits) != 4
        or int(inner.M2) != M + M % 2
        or int(inner.implem) != 0
        or int(inner.qbs) != 0
        or (whole and int(inner.ntotal2) != -(-int(inner.ntotal) // rows) * rows)
    ):
        raise DataError(
            f"{what}: its FastScan settings contradict each other or name a kernel: build it again"
        )


def _check_lists(ivf: Any, M: int, fast: bool, what: str, *, by_residual: bool) -> None:
    """Checks of coarse quantiser and inverted lists. Raises DataError."""
    lists = int(ivf.nlist)
    quantizer: Any = faiss.downcast_index(ivf.quantizer) if ivf.quantizer is not None else None
    # A factory string gives IndexFlat with its metric, where a constructor gives IndexFlatIP.
    flat = isinstance(quantizer, faiss.IndexFlat)
    if not flat or quantizer.metric_type != faiss.METRIC_INNER_PRODUCT:
        name = type(quantizer).__name__ + (" by another metric" if flat else "")
        raise DataError(
            f"{what}: its coarse quantiser is {name}, expected a flat one by inner product (IndexFlatIP)"
        )
    if (
        lists < 1
        or int(quantizer.ntotal) != lists
        or int(quantizer.d) != int(ivf.d)
        or int(quantizer.codes.size()) != lists * int(ivf.d) * 4
        or int(ivf.nprobe) < 1
    ):
        raise DataError(
            f"{what}: {quantizer.ntotal} coarse centroids contradict {lists} lists: it is damaged"
        )
    if bool(ivf.by_residual) != by_residual:
        raise DataError(
            f"{what}: by_residual is {bool(ivf.by_residual)}, but only lists made of codewords (gpq index --kind ivf) hold residuals: "
            "build it again"
        )
    if ivf.direct_map.type != 0:
        raise DataError(
            f"{what}: it has a direct map, which is not supported: remove it (set_direct_map_type)"
        )
    held: Any = faiss.downcast_InvertedLists(ivf.invlists) if ivf.invlists is not None else None
    expected: Any = faiss.BlockInvertedLists if fast else faiss.ArrayInvertedLists  # type: ignore[attr-defined]
    if type(held) is not expected or int(held.nlist) != lists:
        raise DataError(
            f"{what}: its lists are {type(held).__name__}, expected {expected.__name__} of {lists}"
        )
    if fast and (
        int(held.n_per_block) != int(ivf.bbs) or int(held.block_size) != block_bytes(M, int(ivf.bbs))
    ):
        raise DataError(f"{what}: its blocks contradict codes of {M} indices: it is damaged")
    if not fast and int(held.code_size) != int(ivf.code_size):
        raise DataError(
            f"{what}: its lists hold codes of {held.code_size} bytes, not {ivf.code_size}: it is damaged"
        )
    # Faiss checks on reading that each list has as many codes as ids; Python could check it only with a copy.
    total = sum(int(held.list_size(number)) for number in range(lists))
    if total != int(ivf.ntotal):
        raise DataError(f"{what}: its lists hold {total:,} items, not {ivf.ntotal:,}: it is damaged")


def _words(index: Any, ivf: Any, centroids: Floats, what: str) -> WordLists:
    """The lists of form ``ivf``. Raises DataError: other ones."""
    wrong = DataError(f"{what}: its lists are not those of 'gpq index --kind ivf': build it again")
    chain = [faiss.downcast_VectorTransform(index.chain.at(i)) for i in range(int(index.chain.size()))]
    if len(chain) != 1 or not isinstance(chain[0], faiss.RemapDimensionsTransform):
        raise wrong
    moved: Any = chain[0]
    rest, _, width = (int(n) for n in centroids.shape)
    places = np.asarray(faiss.vector_to_array(moved.map), np.int64)
    # The first place is of the first dimension behind those of the P codebooks that name a list.
    if not (
        moved.d_in == index.d
        and moved.d_out == ivf.d == rest * width == len(places)
        and 0 <= places[0] < index.d
        and (index.d - int(places[0])) % rest == 0
    ):
        raise wrong
    first = int(places[0])
    d = (index.d - first) // rest
    if d > width or first % d or first // d > LEVELS:
        raise wrong
    P = first // d
    quantizer: Any = faiss.downcast_index(ivf.quantizer)
    vectors = faiss.vector_to_array(quantizer.codes).view(np.float32).reshape(int(quantizer.ntotal), -1)
    if (P and len(vectors) < 16) or (P == 0 and len(vectors) != 1):
        raise wrong
    x = np.zeros((len(vectors), index.d), np.float32)
    there = places >= 0
    x[:, np.clip(places[there], 0, index.d - 1)] = vectors[:, there]
    names = x[:, :first].reshape(len(x), P, d)
    Z = np.concatenate([names[:16].transpose(1, 0, 2), centroids[:, :, :d]]) if P else centroids[:, :, :d]
    words = np.empty((len(x), P), np.uint8)
    for m in range(P):
        words[:, m] = (names[:, m, None] == Z[m]).all(axis=2).argmax(axis=1)  # exactly: others may be near
    made = WordLists(check_codebooks(Z, what=what), words)
    keys = made.keys
    if (
        not np.array_equal(made.dimensions.reshape(-1), places)
        or not np.array_equal(made.centroids, vectors)
        or centroids[:, :, d:].any()
        or len(np.unique(keys)) != len(keys)
        or (P and not (np.array_equal(words[:16], np.repeat(np.arange(16)[:, None], P, axis=1))))
    ):
        raise wrong
    return made


def _codebooks(centroids: Floats, what: str) -> tuple[str, Floats]:
    try:
        return "flat", check_codebooks(centroids, what=what)
    except DataError as plain:
        try:
            return "fused", unfuse(centroids)
        except DataError:
            raise plain from None

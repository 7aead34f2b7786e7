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
from .storage import Packing, Storage

_ST_PQ = 0  # IndexPQ::ST_PQ, asymmetric table sums
_MAX_M = MAX_CODEBOOKS


@dataclass(frozen=True)
class Layout:
    """A verified index.

    Attributes:
        index: as given, with its id map if it has one.
        flat: the index inside: ``IndexPQ``, ``IndexPQFastScan``, ``IndexIVFPQ`` or ``IndexIVFPQFastScan``.
        storage: storage form of the codes.
        codebooks: float32 [M, K, d], unit-norm; for byte-fused ones the 4-bit ones.
        mapped: whether the index has explicit ids (else ids are row numbers).
    """

    index: Any
    flat: Any
    storage: Storage
    codebooks: Floats
    mapped: bool

    @property
    def described(self) -> tuple[str, int, Floats]:
        """Name of the form, number of items and codebooks, for the sidecar."""
        return self.storage.name, self.ntotal, self.codebooks

    @property
    def ntotal(self) -> int:
        """Number of items."""
        return int(self.flat.ntotal)

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return int(self.flat.code_size)

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the codebooks, as in all files of this package."""
        return codebooks_fingerprint(self.codebooks)

    @property
    def centroids(self) -> Floats | None:
        """float32 [lists, M*d] of the coarse quantiser; None without lists."""
        if not self.storage.lists:
            return None
        quantizer: Any = faiss.downcast_index(self.flat.quantizer)
        vectors = faiss.vector_to_array(quantizer.codes).view(np.float32).reshape(int(quantizer.ntotal), -1)
        M, _, d = self.codebooks.shape
        return np.ascontiguousarray(vectors[:, : M * d])

    def codes(self) -> Codes:
        """The packed codes, uint8 [ntotal, code_size]; without lists and blocks a view, valid until the index changes
        or is freed."""
        if not self.storage.lists and self.storage.packing != "fastscan":
            return vector_view(self.flat.codes, np.uint8).reshape(-1, self.code_size)
        M = int(self.codebooks.shape[0])
        if not self.storage.lists:
            packed = faiss.vector_to_array(self.flat.codes)
            return unpack_blocks(packed, self.ntotal, M, int(self.flat.bbs))
        parts = [np.empty((0, self.code_size), np.uint8)]
        lists: Any = faiss.downcast_InvertedLists(self.flat.invlists)
        for number in range(int(self.flat.nlist)):
            n = int(lists.list_size(number))
            if not n:
                continue
            if self.storage.packing == "fastscan":
                rows, size = int(lists.n_per_block), int(lists.block_size)
                held = faiss.rev_swig_ptr(lists.get_codes(number), -(-n // rows) * size)
                parts.append(unpack_blocks(held, n, M, rows))
            else:
                parts.append(faiss.rev_swig_ptr(lists.get_codes(number), n * self.code_size).reshape(n, -1))
        return np.concatenate(parts)

    def ids(self) -> Ids:
        """The items' ids, int64 [ntotal], in the order of the codes; of an id map a view, as :meth:`codes`."""
        if not self.mapped:
            return np.arange(self.ntotal, dtype=np.int64)
        if self.storage.lists:
            lists: Any = faiss.downcast_InvertedLists(self.flat.invlists)
            sizes = [int(lists.list_size(i)) for i in range(int(self.flat.nlist))]
            parts = [faiss.rev_swig_ptr(lists.get_ids(i), n) for i, n in enumerate(sizes) if n]
            return np.concatenate([np.empty(0, np.int64), *parts])
        return vector_view(self.index.id_map, np.int64)

    def list_numbers(self) -> NDArray[np.int32] | None:
        """List of each code, int32 [ntotal], in the order of :meth:`codes`; None without lists."""
        if not self.storage.lists:
            return None
        sizes = [int(self.flat.invlists.list_size(i)) for i in range(int(self.flat.nlist))]
        return np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)

    def ordered(self) -> tuple[Codes, Ids | None, NDArray[np.int32] | None]:
        """Codes, ids and lists of the items in ascending order of id; views as :meth:`codes` if already sorted.

        Ids are None if they are row numbers, lists if there are none.
        """
        codes, list_of = self.codes(), self.list_numbers()
        if not self.mapped:
            return codes, None, list_of
        ids = self.ids()
        if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            order = np.argsort(ids, kind="stable")
            codes, ids = codes[order], ids[order]
            list_of = None if list_of is None else list_of[order]
        return codes, ids, list_of


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
        index: ``IndexPQ`` or ``IndexPQFastScan``, or ``IndexIDMap``/``IndexIDMap2`` around one; ``IndexIVFPQ`` or
            ``IndexIVFPQFastScan`` without residuals.
        what: name of the index in errors.
        deep: also check all codes and ids for padding bits and repeated ids; used for files.

    Raises:
        DataError: another kind of index or metric, not trained, codewords that are not unit-norm, arrays whose
            sizes contradict each other, codes out of range, repeated ids.
    """
    inner: Any = index
    mapped = False
    if isinstance(index, faiss.IndexIDMap):  # IndexIDMap2 is a subclass
        inner, mapped = faiss.downcast_index(index.index), True
    ivf = isinstance(inner, faiss.IndexIVFPQ | faiss.IndexIVFPQFastScan) and not mapped
    if not ivf and not isinstance(inner, faiss.IndexPQ | faiss.IndexPQFastScan):
        name = type(inner).__name__ if inner is not None else "nothing"
        raise DataError(f"{what}: holds {name}, not the product-quantised codes (IndexPQ) of a GPQ model")
    if inner.metric_type != faiss.METRIC_INNER_PRODUCT or index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise DataError(
            f"{what}: its metric is not inner product, the only one GPQ codes have: export the model again"
        )
    if not inner.is_trained or not index.is_trained:
        raise DataError(f"{what}: not trained, so it holds no codebooks: export the model again")
    pq = inner.pq
    M, K, d, nbits = int(pq.M), int(pq.ksub), int(pq.dsub), int(pq.nbits)
    if not (
        2 <= nbits <= 8 and 1 << nbits == K and M >= 1 and d >= 1 and M * d == pq.d == inner.d == index.d
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
        _check_lists(inner, M, fast, what)
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
    packing, codebooks = _codebooks(centroids, what)
    if fast and packing == "bytes":
        raise DataError(f"{what}: its FastScan codebooks are byte-fused: it is damaged")
    layout = Layout(index, inner, Storage("fastscan" if fast else packing, ivf), codebooks, mapped or ivf)
    if deep and layout.ntotal:
        check_codes(layout.codes(), int(codebooks.shape[0]), int(codebooks.shape[1]), what=what)
        ids = layout.ids() if layout.mapped else None
        if ids is not None and bool((ids == -1).any()):
            raise DataError(f"{what}: an item has the id -1, which marks a missing result: give it another")
        repeated = None if ids is None else repeated_id(ids)
        if repeated is not None:
            raise DataError(f"{what}: id {repeated} occurs more than once: every item needs its own")
    return layout


def _check_fastscan(inner: Any, M: int, K: int, what: str) -> None:
    """Checks for FastScan. Raises DataError."""
    rows = int(inner.bbs)
    whole = isinstance(inner, faiss.IndexPQFastScan)
    if (
        K != 16
        or M > _MAX_M
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


def _check_lists(ivf: Any, M: int, fast: bool, what: str) -> None:
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
    if ivf.by_residual:
        raise DataError(
            f"{what}: its codes are residuals, but the model's codebooks encode vectors: build it with by_residual "
            "= False"
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


def _codebooks(centroids: Floats, what: str) -> tuple[Packing, Floats]:
    try:
        return "4-bit", check_codebooks(centroids, what=what)
    except DataError as plain:
        try:
            return "bytes", unfuse(centroids)
        except DataError:
            raise plain from None

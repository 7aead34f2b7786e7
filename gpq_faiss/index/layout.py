"""What a Faiss index holds, verified: the one place that looks inside an index before it is believed.

Faiss checks little after reading: a file with the ids of another index, a centroid array of the wrong size or another
metric opens well and answers nonsense, or reads beyond its arrays. :func:`layout_of` accepts the forms that this
package writes and anything built from them with plain Faiss, and refuses the rest by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..store import codebooks_fingerprint
from .checks import Codes, Floats, Ids, check_codebooks, check_codes, code_size
from .codebooks import codebooks_of, unfuse

Kind = Literal["flat", "fused"]
_ST_PQ = 0  # IndexPQ::ST_PQ, asymmetric table sums


@dataclass(frozen=True)
class Layout:
    """A verified index.

    Attributes:
        index: as given, with its id map if it has one.
        flat: the ``IndexPQ`` inside.
        kind: ``flat`` (the codebooks as they are) or ``fused`` (byte-fused, :func:`.codebooks.fuse`).
        codebooks: float32 [M, K, d], unit-norm; of a fused index the 4-bit ones.
        mapped: whether the index has ids of its own (else an id is a position).
    """

    index: Any
    flat: Any
    kind: Kind
    codebooks: Floats
    mapped: bool

    @property
    def ntotal(self) -> int:
        """Items."""
        return int(self.flat.ntotal)

    @property
    def code_size(self) -> int:
        """Bytes of one code."""
        return int(self.flat.code_size)

    @property
    def fingerprint(self) -> str:
        """Of the codebooks, as in every file of this package."""
        return codebooks_fingerprint(self.codebooks)

    def codes(self) -> Codes:
        """The packed codes, uint8 [ntotal, code_size]: a view, valid until the index changes or goes."""
        return vector_view(self.flat.codes, np.uint8).reshape(-1, self.code_size)

    def ids(self) -> Ids:
        """The items' ids, int64 [ntotal], in the order of the codes: a view if ``mapped``, as :meth:`codes`."""
        if not self.mapped:
            return np.arange(self.ntotal, dtype=np.int64)
        return vector_view(self.index.id_map, np.int64)


def vector_view(vector: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """A numpy view on a C++ vector, valid until that changes or goes (an empty vector has no address)."""
    size = int(vector.size())
    if size == 0:
        return np.empty(0, dtype)
    view: NDArray[Any] = faiss.rev_swig_ptr(vector.data(), size)
    return view


def layout_of(index: Any, *, what: str = "index", deep: bool = False) -> Layout:
    """Look into a Faiss index and verify every size that a search relies on.

    Args:
        index: ``IndexPQ``, or ``IndexIDMap``/``IndexIDMap2`` around one.
        what: names the index in the errors.
        deep: also look at every code and id (one pass over them): spare bits and repeated ids. Files get this.

    Raises:
        DataError: another kind of index or metric, not trained, codewords that are not unit-norm, arrays whose
            sizes contradict each other, codes out of range, repeated ids.
    """
    inner: Any = index
    mapped = False
    if isinstance(index, faiss.IndexIDMap):  # IndexIDMap2 is a subclass
        inner, mapped = faiss.downcast_index(index.index), True
    if not isinstance(inner, faiss.IndexPQ):
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
    if inner.codes.size() != inner.ntotal * inner.code_size or inner.ntotal != index.ntotal:
        raise DataError(
            f"{what}: {inner.codes.size()} bytes of codes contradict {index.ntotal} items: it is damaged"
        )
    if mapped and index.id_map.size() != index.ntotal:
        raise DataError(f"{what}: {index.id_map.size()} ids contradict {index.ntotal} items: it is damaged")
    if inner.search_type != _ST_PQ:  # type: ignore[attr-defined]  # stub lacks it
        raise DataError(
            f"{what}: set to a Hamming or polysemous search, which GPQ codes do not have: build it again"
        )
    centroids = codebooks_of(inner)
    kind, codebooks = _codebooks(centroids, what)
    layout = Layout(index, inner, kind, codebooks, mapped)
    if deep and layout.ntotal:
        check_codes(layout.codes(), M, K, what=what)
        repeated = repeated_id(layout.ids()) if mapped else None
        if repeated is not None:
            raise DataError(f"{what}: id {repeated} occurs more than once: every item needs its own")
    return layout


def _codebooks(centroids: Floats, what: str) -> tuple[Kind, Floats]:
    try:
        return "flat", check_codebooks(centroids, what=what)
    except DataError as plain:
        try:
            return "fused", unfuse(centroids)
        except DataError:
            raise plain from None


def repeated_id(ids: Ids) -> int | None:
    """An id that occurs more than once, or None."""
    if len(ids) < 2 or bool((ids[1:] > ids[:-1]).all()):  # ascending, as ids mostly are: no sort needed
        return None
    ordered = np.sort(ids)
    again = np.flatnonzero(ordered[1:] == ordered[:-1])
    return int(ordered[again[0]]) if len(again) else None

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

import dataclasses
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject, inject_fused
from ..errors import DataError, UsageError
from ..faissio.forms import ivf_index
from ..faissio.layout import layout_of
from .lists import IvfSettings, assign

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
    ivf: IvfSettings | None = None,
    list_of: NDArray[np.int32] | None = None,
) -> Any:
    """A Faiss index of checked codes.

    Args:
        ids: int64 [n], or None where an id is a position.
        ivf: trained settings, for the forms with lists; ``list_of`` int32 [n]: the list of each code, where known.

    Raises:
        UsageError: see :func:`check_form`.
    """
    M, K, _ = (int(n) for n in Z.shape)
    check_form(form, K, M)
    if form.startswith("ivf"):
        assert ivf is not None
        assert ivf.centroids is not None
        if list_of is None:
            list_of = assign(codes, Z, ivf.centroids)
        index = ivf_index(codes, ids, Z, ivf.centroids, form.removeprefix("ivf-"), list_of)
        index.nprobe = ivf.nprobe
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


def convert(index: Any, form: Form, *, ivf: IvfSettings | None = None, what: str = "index") -> Any:
    """Another form of a Faiss index: the same ids with the same codes, bit for bit; nothing is encoded again.

    Into lists, ``ivf`` says how they are made; an index that has lists keeps them where ``ivf`` is not given. Out of
    lists, the items come in the order of their ids.

    Args:
        index: any that :func:`..faissio.layout.layout_of` knows; it stays as it is.
        what: names it in the errors.

    Raises:
        DataError: the index is not sound, or (into lists) empty.
        UsageError: see :func:`check_form`; ``ivf`` settings out of range.
    """
    layout = layout_of(index, what=what, deep=True)
    Z = layout.codebooks
    check_form(form, int(Z.shape[1]), int(Z.shape[0]))
    codes, ids, list_of = layout.codes(), layout.ids() if layout.mapped else None, None
    if layout.kind.startswith("ivf"):
        codes, ids, list_of = layout.ordered()
        if ids is not None and len(ids) and ids[0] == 0 and ids[-1] == len(ids) - 1:
            ids = None
    if form.startswith("ivf"):
        if not len(codes):
            raise DataError(f"{what} is empty: lists need codes (gpq index)")
        part = form.removeprefix("ivf-")
        if ivf is None and list_of is not None:
            ivf = IvfSettings(centroids=layout.centroids, nprobe=int(layout.flat.nprobe))
        else:
            ivf, list_of = ivf or IvfSettings(), None
        ivf = dataclasses.replace(ivf, form="fused" if part == "fused" else "fastscan").trained(codes, Z)
    return faiss_form(form, codes, ids, Z, ivf=ivf, list_of=list_of)

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

from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import inject, inject_fused
from ..errors import UsageError
from ..faissio.forms import ivf_index
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

"""Conversion of codes to a Faiss index. Faiss itself writes all bytes.

============  ===============================================================================
kind          Faiss index
============  ===============================================================================
``flat``      ``IndexPQ`` with the codebooks of the model
``fused``     ``IndexPQ`` of 8 bits with byte-fused codebooks: equal bytes, four times as fast
``fastscan``  ``IndexPQFastScan``: fast, but approximate: its 8-bit tables share one scale
``ivf``       ``IndexIVFPQ``, not by residual: the first codeword of a code selects its list
============  ===============================================================================

An ``IndexIVFPQ`` stores the ids itself. The others are in an ``IndexIDMap2``, unless the ids are
the positions of the items.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import faiss
import numpy as np

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse, product_index
from ..errors import UsageError

Kind = Literal["flat", "fused", "fastscan", "ivf"]
KINDS: tuple[Kind, ...] = get_args(Kind)
METRICS = {faiss.METRIC_INNER_PRODUCT: "inner product", faiss.METRIC_L2: "L2"}


def check_kind(kind: str, M: int, K: int) -> Kind:
    """Return ``kind`` if it can store codes of M codebooks of K codewords.

    Raises:
        UsageError: the kind is unknown, or does not fit the codebooks.
    """
    if kind not in KINDS:
        raise UsageError(f"kind {kind!r}: choose from {', '.join(KINDS)}")
    if K != 16 and kind != "flat":
        raise UsageError(
            f"kind {kind!r} needs 16 codewords per codebook, these have {K}: use 'flat'"
        )
    return kind


def to_faiss(codes: Codes, ids: Ids | None, Z: Floats, kind: Kind = "flat") -> Any:
    """Return a plain Faiss index (inner product) of checked codes.

    Args:
        codes: uint8 [n, code_size].
        ids: int64 [n], or None where the id of an item is its position.
        Z: codebooks, float32 [M, K, d].
    """
    if kind == "ivf":
        return _to_ivf(codes, np.arange(len(codes)) if ids is None else ids, Z)
    filled: Any = product_index(fuse(Z) if kind == "fused" else Z)
    empty: Any = faiss.clone_index(filled)
    filled.add_sa_codes(codes)
    if kind == "fastscan":
        filled, empty = faiss.IndexPQFastScan(filled), faiss.IndexPQFastScan(empty)
    if ids is None:
        return filled
    mapped: Any = faiss.IndexIDMap2(empty)
    faiss.copy_array_to_vector(np.ascontiguousarray(ids, np.int64), mapped.id_map)
    mapped.index, mapped.ntotal = filled, len(codes)
    mapped.referenced_objects = [filled]  # Faiss does not own it
    mapped.construct_rev_map()
    return mapped


def _to_ivf(codes: Codes, ids: Ids, Z: Floats) -> Any:
    """Return an ``IndexIVFPQ`` with a list for each first codeword, of which two are visited."""
    M, K, d = (int(size) for size in Z.shape)
    centroids = np.zeros((K, M * d), np.float32)
    centroids[:, :d] = Z[0]
    ivf: Any = faiss.index_factory(M * d, f"IVF{K},PQ{M}x4np", faiss.METRIC_INNER_PRODUCT)
    ivf.quantizer.add(centroids)
    ivf.by_residual = False
    faiss.copy_array_to_vector(np.ascontiguousarray(Z).ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    # Faiss expects the number of its list before each code: the first codeword, the lower half.
    ivf.add_sa_codes(np.hstack([codes[:, :1] & 15, codes]), ids)
    ivf.nprobe = K // 8
    return ivf

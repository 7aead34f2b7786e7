"""Conversion of codes to a Faiss index, and back. Faiss itself reads and writes all bytes.

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

import contextlib
from typing import Any, Literal, NamedTuple, get_args

import faiss
import numpy as np

from ..codes.bits import check_codes, code_size
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids, check_codebooks, check_unique
from ..codes.codebooks import fuse, product_index, unfuse
from ..errors import DataError, UsageError

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
    if M == 1 and kind == "fused":
        raise UsageError("kind 'fused' needs two codebooks or more, there is one: use 'flat'")
    return kind


# To Faiss -----------------------------------------------------------------------------------------


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
    faiss.copy_array_to_vector(np.ascontiguousarray(codes).ravel(), filled.codes)
    filled.ntotal = len(codes)
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
    quantizer = faiss.IndexFlatIP(M * d)
    quantizer.add(centroids)
    ivf: Any = faiss.IndexIVFPQ(quantizer, M * d, K, M, 4, faiss.METRIC_INNER_PRODUCT)
    ivf.referenced_objects = [quantizer]
    ivf.by_residual = False
    faiss.copy_array_to_vector(np.ascontiguousarray(Z).ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    for number in range(K):
        rows = np.flatnonzero(codes[:, 0] & 15 == number)  # the first codeword: the lower half
        list_ids, list_codes = np.ascontiguousarray(ids[rows]), codes[rows]
        ivf.invlists.add_entries(
            number, len(rows), faiss.swig_ptr(list_ids), faiss.swig_ptr(list_codes)
        )
    ivf.ntotal = len(codes)
    ivf.nprobe = K // 8
    return ivf


# From Faiss ---------------------------------------------------------------------------------------


class Contents(NamedTuple):
    """The contents of an index of product codes.

    Attributes:
        codes: uint8 [n, code_size].
        ids: int64 [n], each once.
        codebooks: float32 [M, K, d]; byte-fused ones are returned as 4-bit ones.
        metric: ``faiss.METRIC_INNER_PRODUCT`` or ``faiss.METRIC_L2``.
        kind: ``flat`` or ``fused``.
    """

    codes: Codes
    ids: Ids
    codebooks: Floats
    metric: int
    kind: Kind


def from_faiss(index: Any, name: str = "the index") -> Contents:
    """Return the contents of an ``IndexPQ``, possibly in an ``IndexIDMap`` or ``IndexIDMap2``.

    Args:
        name: how errors name the index.

    Raises:
        DataError: the index is of another kind or not trained, or an id repeats or is -1.
    """
    inner = faiss.downcast_index(index)
    id_map: Ids | None = None
    if isinstance(inner, faiss.IndexIDMap):  # or its subclass IndexIDMap2
        id_map = faiss.vector_to_array(inner.id_map)
        inner = faiss.downcast_index(inner.index)
    if type(inner) is not faiss.IndexPQ or not 2 <= inner.pq.nbits <= 8:
        raise DataError(
            f"{name} is {describe(index)}, not codes of a product quantiser "
            "(IndexPQ of 2 to 8 bits): search it by Faiss itself, or index its codes by gpq index"
        )
    if inner.metric_type not in METRICS or not inner.is_trained:
        raise DataError(f"{name} is not trained, or its metric is neither inner product nor L2")
    M, K, d, n = inner.pq.M, inner.pq.ksub, inner.pq.dsub, inner.ntotal
    centroids = faiss.vector_to_array(inner.pq.centroids)
    codes = faiss.vector_to_array(inner.codes)
    sizes = len(centroids), len(codes), n if id_map is None else len(id_map)
    if M > MAX_CODEBOOKS or sizes != (M * K * d, n * code_size(M, K), n):
        raise DataError(f"{name} is damaged: its sizes contradict each other")
    codebooks = check_codebooks(centroids.reshape(M, K, d), name=name, unit=False)
    codes = check_codes(codes.reshape(n, code_size(M, K)), M, K, name=name)
    ids = np.arange(n) if id_map is None else id_map
    check_unique(ids, name)
    kind: Kind = "flat"
    if K == 256 and inner.metric_type == faiss.METRIC_INNER_PRODUCT:
        with contextlib.suppress(DataError):  # codebooks of 8 bits that are not byte-fused
            codebooks, kind = unfuse(codebooks), "fused"
    return Contents(codes, ids, codebooks, inner.metric_type, kind)


def describe(index: Any) -> str:
    """Name the classes of an index for errors: ``IndexIDMap around IndexIVFFlat``."""
    inner = faiss.downcast_index(index)
    names = [type(inner).__name__]
    while isinstance(inner, faiss.IndexIDMap | faiss.IndexPreTransform):
        inner = faiss.downcast_index(inner.index)
        names.append(type(inner).__name__)
    return " around ".join(names)

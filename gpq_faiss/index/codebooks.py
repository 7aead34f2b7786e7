"""GPQ codebooks as Faiss sees them: checked, injected, read back, packed, encoded, scored.

Shapes used everywhere here: ``Z`` float32 [M, K, d] unit-norm in the last axis (the z' of the paper), ``assignment``
uint8 [N, M], ``codes`` uint8 [N, code_size] with ``code_size = ceil(M * log2(K) / 8)``, bits least significant first.

Scores follow one fixed order of float32 operations (:func:`score_tables`, then pairs of codebooks, then left to
right), so two items with the same code get bit-identical scores whatever the batch, the block or the index kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError, UsageError
from .checks import (
    Codes,
    Floats,
    bits_per_code,
    check_codebooks,
    check_codes,
    check_vectors,
    code_size,
    named_rows,
)
from .nearest import nearest, one_blas_thread, tolerance

__all__ = [
    "bits_per_code",
    "check_codebooks",
    "check_codes",
    "check_items",
    "check_vectors",
    "code_size",
    "codebooks_of",
    "decode",
    "encode",
    "fuse",
    "inject",
    "inject_fused",
    "items_are_codewords",
    "lookup",
    "lookup_columns",
    "lookup_tables",
    "pack_codes",
    "pad_vectors",
    "score_candidates",
    "score_codes",
    "score_prepared",
    "score_tables",
    "unfuse",
    "unpack_codes",
]

ENCODE_BLOCK = 8192
ORDINARY = 1e4
"""Squared norm of a sub-vector up to which, and from the inverse of which on, it is encoded as it is."""
_ITEM_TOLERANCE = 1e-3  # a coordinate; what a network makes of a codeword is some 1e-7 off
_SCORE_BLOCK = 32_768


def pack_codes(assignment: ArrayLike, K: int) -> Codes:
    """Codeword indices [N, M] -> packed codes uint8 [N, code_size], exactly as Faiss lays out its bits.

    Raises:
        DataError: not integers, not two-dimensional, or an index outside 0..K-1.
    """
    bits_per_code(K)
    array = np.asarray(assignment)
    if array.ndim != 2 or array.shape[1] == 0 or array.dtype.kind not in "iu":
        raise DataError(f"assignment: {array.dtype} {array.shape}, expected integers [items, codebooks]")
    if array.size and (array.min() < 0 or array.max() >= K):
        bad = np.flatnonzero(((array < 0) | (array >= K)).any(axis=1))
        raise DataError(f"assignment: codeword index outside 0..{K - 1} in {named_rows(bad)}")
    return _pack(array.astype(np.uint8, copy=False), K)


def _pack(array: Codes, K: int) -> Codes:
    """:func:`pack_codes` of indices uint8 [N, M] known to be in range."""
    nbits = bits_per_code(K)
    n, M = array.shape
    if nbits == 8:
        return np.ascontiguousarray(array)
    if nbits == 4:
        codes = np.zeros((n, (M + 1) // 2), np.uint8)
        codes[:] = array[:, 0::2]
        codes[:, : M // 2] |= array[:, 1::2] << 4
        return codes
    bits = (array[:, :, None] >> np.arange(nbits, dtype=np.uint8)) & 1
    return np.packbits(bits.reshape(n, M * nbits), axis=1, bitorder="little")


def unpack_codes(codes: ArrayLike, M: int, K: int) -> Codes:
    """Packed codes uint8 [N, code_size] -> codeword indices uint8 [N, M]; the inverse of :func:`pack_codes`.

    Raises:
        DataError: see :func:`check_codes`.
    """
    nbits = bits_per_code(K)
    array = check_codes(codes, M, K)
    n = len(array)
    if nbits == 8:
        return array.copy()
    if nbits == 4:
        assignment = np.empty((n, M), np.uint8)
        assignment[:, 0::2] = array & 15
        assignment[:, 1::2] = array[:, : M // 2] >> 4
        return assignment
    bits = np.unpackbits(array, axis=1, count=M * nbits, bitorder="little").reshape(n, M, nbits)
    return np.asarray((bits << np.arange(nbits, dtype=np.uint8)).sum(axis=2), np.uint8)


def _product_index(centroids: Floats) -> Any:
    """An empty, trained IndexPQ with these centroids, whatever their norm (fused ones have norm sqrt 2)."""
    M, K, d = centroids.shape
    index = faiss.IndexPQ(M * d, M, bits_per_code(K), faiss.METRIC_INNER_PRODUCT)
    faiss.copy_array_to_vector(np.ascontiguousarray(centroids).ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def inject(Z: ArrayLike) -> Any:
    """An empty ``faiss.IndexPQ`` (inner product) that counts as trained and holds ``Z`` bit for bit.

    Raises:
        DataError: see :func:`check_codebooks`.
    """
    return _product_index(check_codebooks(Z))


def inject_fused(Z: ArrayLike) -> Any:
    """As :func:`inject` in the byte-fused form: 8-bit codebooks that read the same code bytes (K = 16 only)."""
    return _product_index(fuse(Z))


def codebooks_of(index: Any) -> Floats:
    """The centroids of an ``IndexPQ`` as float32 [M, K, d], a copy.

    Raises:
        DataError: not an IndexPQ, or its centroid array does not have the size that its product quantizer states.
    """
    if not isinstance(index, faiss.IndexPQ):
        raise DataError(f"{type(index).__name__} holds no codebooks: expected an IndexPQ")
    pq = index.pq
    M, K, d = int(pq.M), int(pq.ksub), int(pq.dsub)
    if pq.centroids.size() != M * K * d:
        raise DataError(
            f"IndexPQ has {pq.centroids.size()} centroid values, not {M} x {K} x {d}: it is damaged"
        )
    return np.asarray(faiss.vector_to_array(pq.centroids), np.float32).reshape(M, K, d)


def fuse(Z: ArrayLike) -> Floats:
    """Two 4-bit codebooks as one 8-bit codebook: float32 [ceil(M/2), 256, 2d], for the same code bytes.

    The codeword of byte b is [Z[2p, b & 15], Z[2p + 1, b >> 4]]. The unpaired last codebook of an odd M gets zeros
    for a partner, so vectors must be padded by d zeros (:func:`pad_vectors`). Scores and ids stay the same.

    Raises:
        UsageError: K is not 16.
        DataError: see :func:`check_codebooks`.
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    if K != 16:
        raise UsageError(f"only codebooks of 16 codewords share a byte two by two: these have {K}")
    if M % 2:
        Z = np.concatenate([Z, np.zeros((1, K, d), np.float32)])
    byte = np.arange(256)
    return np.concatenate([Z[0::2][:, byte & 15], Z[1::2][:, byte >> 4]], axis=2)


def unfuse(fused: ArrayLike) -> Floats:
    """The 4-bit codebooks [M, 16, d] of byte-fused ones [ceil(M/2), 256, 2d]; the inverse of :func:`fuse`.

    Raises:
        DataError: the codebooks are not of that form.
    """
    array = np.asarray(fused)
    if array.dtype != np.float32 or array.ndim != 3 or array.shape[1] != 256 or array.shape[2] % 2:
        raise DataError(f"{array.dtype} {array.shape} are not byte-fused codebooks float32 [n, 256, 2d]")
    half = array.shape[2] // 2
    Z = np.empty((2 * len(array), 16, half), np.float32)
    Z[0::2] = array[:, :16, :half]
    Z[1::2] = array[:, ::16, half:]
    if not Z[-1].any():
        Z = Z[:-1]
    Z = check_codebooks(Z, what="byte-fused codebooks")
    if not np.array_equal(fuse(Z), array):
        raise DataError("8-bit codebooks that are not two 4-bit ones each: not byte-fused codebooks")
    return Z


def pad_vectors(x: Floats, width: int) -> Floats:
    """``x`` [n, D] with zeros appended up to ``width`` columns (the same array where nothing is missing)."""
    missing = width - x.shape[1]
    return x if missing == 0 else np.pad(x, ((0, 0), (0, missing)))


def _first_of_equals(Z: Floats) -> Codes | None:
    """uint8 [M, K]: for each codeword the lowest index of an identical one; None where all differ."""
    M, K, _ = Z.shape
    table = np.empty((M, K), np.uint8)
    repeats = False
    for m in range(M):
        # + 0.0 makes one of the two zeros.
        _, first, inverse = np.unique(Z[m] + np.float32(0.0), axis=0, return_index=True, return_inverse=True)
        table[m] = first[inverse.reshape(-1)]
        repeats |= len(first) < K
    return table if repeats else None


def encode(
    x: ArrayLike,
    Z: ArrayLike,
    *,
    block: int = ENCODE_BLOCK,
    threads: int | None = None,
    what: str = "vectors to encode",
    first_row: int = 0,
) -> Codes:
    """Intra-normalised vectors -> packed codes: the codeword of the largest inner product in each sub-space.

    The codes are those of Faiss (``IndexPQ.add``, ``sa_encode``), found faster (:mod:`.nearest`) wherever rounding
    cannot matter, and by Faiss itself elsewhere. Equal codewords: the lowest index wins. (Faiss alone promises that
    only where it does not go through BLAS.) Memory beyond input and output is bounded.

    Only the direction of a sub-vector counts. Faiss alone compares L2 distances in float32, which lose the direction of
    one that is much longer or shorter than the codewords; such a sub-vector (norm below 0.01, or 100 and more) is brought
    to about unit norm first.

    Args:
        x: [N, M*d] numbers, sub-vectors of any norm but 0.
        Z: float32 [M, K, d].
        block: rows at a time, at most.
        threads: how many; default: as many as Faiss uses.
        what: names the vectors in errors; ``first_row`` is the number of their first row there.

    Returns:
        uint8 [N, code_size]

    Raises:
        DataError: ``Z`` is unfit (:func:`check_codebooks`); ``x`` of another width, NaN, or with a zero sub-vector,
            which has no direction (the rows are named).
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    if block < 1:
        raise UsageError(f"block of {block} rows: it must be at least 1")
    if threads is not None and threads < 1:
        raise UsageError(f"{threads} threads: it must be at least 1")
    source = np.asarray(x)
    if source.ndim != 2 or len(source) == 0:  # the full check words the error
        source = check_vectors(source, M * d, what=what)
    encoder = _Encoder(Z, what)
    out = np.empty((len(source), code_size(M, K)), np.uint8)
    block = min(block, max(256, ENCODE_BLOCK * 16 // K))  # the scores of a block stay in the cache
    starts = range(0, len(source), block)

    def fill(start: int) -> None:
        out[start : start + block] = encoder(source[start : start + block], first_row + start)

    workers = min(threads or int(faiss.omp_get_max_threads()), len(starts))
    with one_blas_thread():
        if workers > 1:
            # numpy lets go of the interpreter in the work that counts
            with ThreadPoolExecutor(workers) as pool:
                for _ in pool.map(fill, starts):  # raises the first error in the order of rows
                    pass
        else:
            for start in starts:
                fill(start)
    return out


class _Encoder:
    """Encodes blocks of rows; safe to call from several threads."""

    def __init__(self, Z: Floats, what: str) -> None:
        self.Z = Z
        self.what = what
        self.first = _first_of_equals(Z)
        self.index = _product_index(Z)
        # Equal codewords are never told apart by the fast way; very small codebooks Faiss searches as fast.
        self.fast = self.first is None and Z.shape[1] > 4

    def __call__(self, block: NDArray[Any], first_row: int) -> Codes:
        """Packed codes of one block, whose rows are numbered from ``first_row`` in errors."""
        M, K, d = self.Z.shape
        rows = check_vectors(block, M * d, what=self.what, first_row=first_row, finite=False)
        parts = rows.reshape(-1, M, d)
        squares = np.einsum("nmd,nmd->nm", parts, parts)
        largest = float(squares.max())
        if not (float(squares.min()) >= 1 / ORDINARY and largest < ORDINARY):  # also where NaN
            self._refuse(rows, first_row)
            # by a power of two, which rounds nothing
            extreme = ~((squares >= 1 / ORDINARY) & (squares < ORDINARY))
            exponents = np.where(extreme, np.frexp(np.abs(parts).max(axis=2))[1], 0)
            parts = np.ldexp(parts, -exponents[:, :, None])
            rows = parts.reshape(rows.shape)
            largest = float(np.einsum("nmd,nmd->nm", parts, parts).max())
        if not self.fast or not largest < ORDINARY:
            return self._slow(rows)
        indices, unsure = nearest(rows, self.Z, tolerance(self.Z, largest))
        codes = _pack(indices.T, K)
        close = np.flatnonzero(unsure)
        if len(close):
            codes[close] = self._slow(rows[close])
        if 2 * len(close) > len(rows):
            self.fast = False  # codewords so alike that the fast way is a detour
        return codes

    def _slow(self, rows: Floats) -> Codes:
        M, K, _ = self.Z.shape
        codes: Codes = self.index.pq.compute_codes(rows)
        if self.first is None:
            return codes
        assignment = unpack_codes(codes, M, K)
        return _pack(np.take_along_axis(self.first.T, assignment.astype(np.intp), axis=0), K)

    def _refuse(self, rows: Floats, first_row: int) -> None:
        """Raise for NaN, infinity and zero sub-vectors; merely extreme values pass."""
        M, _, d = self.Z.shape
        check_vectors(rows, M * d, what=self.what, first_row=first_row)
        directed = np.any(rows.reshape(-1, M, d) != 0, axis=2).all(axis=1)
        if not directed.all():
            bad = first_row + np.flatnonzero(~directed)
            raise DataError(
                f"{self.what}: a sub-vector of zeros has no direction, in {named_rows(bad)}: leave these items out"
            )


def decode(codes: ArrayLike, Z: ArrayLike) -> Floats:
    """The vectors that codes stand for: float32 [N, M*d], each sub-vector a codeword of ``Z``."""
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    assignment = unpack_codes(codes, M, K)
    return Z[np.arange(M), assignment].reshape(len(assignment), M * d)


def items_are_codewords(description: Mapping[str, Any]) -> bool:
    """Whether a model's ``config.json`` declares that the vector of an item is the codewords of its code.

    Earlier models declare only that queries have vectors of their own; the items of these were of that kind.
    """
    return description.get("items_are_codewords", description.get("asymmetric")) is True


def check_items(x: Floats, codes: Codes, Z: Floats, *, what: str, first_row: int = 0) -> None:
    """Refuse vectors that are no items of a model whose items are codewords: such an item equals its reconstruction.

    Args:
        x: float32 [n, M*d].
        codes: uint8 [n, code_size], of :func:`encode`.
        Z: float32 [M, K, d].
        what, first_row: as :func:`encode`.

    Raises:
        DataError: some vector is off its codewords, as those of queries are (the rows are named).
    """
    for start in range(0, len(x), ENCODE_BLOCK):
        part = slice(start, start + ENCODE_BLOCK)
        off = np.abs(x[part] - decode(codes[part], Z)).max(axis=1) > _ITEM_TOLERANCE
        if off.any():
            rows = named_rows(first_row + start + np.flatnonzero(off))
            raise DataError(
                f"{what}: {rows} cannot be items of this model, whose items are codewords; are they query vectors? "
                "Encode the items with gpq encode"
            )


def score_tables(xq: ArrayLike, Z: ArrayLike) -> Floats:
    """Inner product of every query sub-vector with every codeword: float32 [Q, M, K].

    The d products are added one after another in float32, without BLAS, so that a query's table does not depend on
    the batch it comes in.

    Raises:
        DataError: see :func:`check_codebooks`, :func:`check_vectors`; queries so large that a score overflows.
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    queries = check_vectors(xq, M * d, what="queries").reshape(-1, M, d)
    tables = np.zeros((len(queries), M, K), np.float32)
    term = np.empty_like(tables)
    with np.errstate(over="ignore", invalid="ignore"):
        for j in range(d):
            np.multiply(queries[:, :, j, None], Z[None, :, :, j], out=term)
            tables += term
        largest = np.abs(tables).max(axis=2, initial=0).sum(axis=1)
    if not np.isfinite(largest).all():
        raise DataError(
            f"queries: values too large for float32 scores in {named_rows(np.flatnonzero(~np.isfinite(largest)))}"
        )
    return tables


def _pairs(K: int, M: int) -> bool:
    """Whether the tables of two codebooks are added beforehand (K*K entries still sit in the first cache)."""
    return K <= 16 and M > 1


def lookup_tables(tables: Floats) -> Floats:
    """Score tables [Q, M, K] -> the form that :func:`lookup` reads: codebooks paired where K <= 16."""
    Q, M, K = tables.shape
    if not _pairs(K, M):
        return tables
    if M % 2:
        tables = np.concatenate([tables, np.zeros((Q, 1, K), np.float32)], axis=1)
    # entry a + K * b holds table[2p][a] + table[2p + 1][b]; for K = 16 its place is the code byte itself
    return (tables[:, 1::2, :, None] + tables[:, 0::2, None, :]).reshape(Q, -1, K * K)


def lookup_columns(codes: Codes, M: int, K: int) -> list[NDArray[np.intp]]:
    """Packed codes [..., code_size] -> one array [...] of places in :func:`lookup_tables` a table."""
    shape = codes.shape[:-1]
    if K == 16 and M > 1:
        return [codes[..., p].astype(np.intp) for p in range(codes.shape[-1])]
    assignment = unpack_codes(codes.reshape(-1, codes.shape[-1]), M, K).astype(np.intp)
    columns = [assignment[:, m].reshape(shape) for m in range(M)]
    if not _pairs(K, M):
        return columns
    return [columns[m] + K * columns[m + 1] if m + 1 < M else columns[m] for m in range(0, M, 2)]


def lookup(table: Floats, columns: list[NDArray[np.intp]], *, paired: bool) -> Floats:
    """Scores of one query: ``table`` [T, entries] summed over ``columns`` (T arrays of one shape), in the fixed order.

    The order is (t0 + t1) + (t2 + t3) + ..., whether the pairs were added beforehand (``paired``) or are here.
    """
    total = np.zeros(columns[0].shape, np.float32)
    part = np.empty_like(total)
    step = 1 if paired else 2
    for t in range(0, len(columns), step):
        # "clip" skips the bounds check; the places come from unpacked codes and cannot be out of range.
        np.take(table[t], columns[t], out=part, mode="clip")
        if not paired and t + 1 < len(columns):
            part += np.take(table[t + 1], columns[t + 1], mode="clip")
        total += part
    return total


def score_codes(xq: ArrayLike, codes: ArrayLike, Z: ArrayLike) -> Floats:
    """Exact asymmetric scores of all codes: float32 [Q, n] = sum_m q_m . Z[m, code_m], larger is better.

    Blockwise over the codes: beyond the result, memory is bounded. Equal codes get bit-identical scores.

    Raises:
        DataError: see :func:`score_tables`, :func:`check_codes`.
    """
    Z = check_codebooks(Z)
    M, K, _ = Z.shape
    packed = check_codes(codes, M, K)
    tables = lookup_tables(score_tables(xq, Z))
    out = np.empty((len(tables), len(packed)), np.float32)
    for start in range(0, len(packed), _SCORE_BLOCK):
        columns = lookup_columns(packed[start : start + _SCORE_BLOCK], M, K)
        for q, table in enumerate(tables):
            out[q, start : start + len(columns[0])] = lookup(table, columns, paired=_pairs(K, M))
    return out


def score_prepared(prepared: Floats, codes: Codes, M: int, K: int) -> Floats:
    """:func:`score_candidates` of tables that are prepared already: [Q, T, entries] of :func:`lookup_tables`."""
    Q, T, entries = prepared.shape
    columns = lookup_columns(codes, M, K)
    flat = prepared.reshape(-1)
    base = (np.arange(Q) * (T * entries))[:, None]
    total = np.zeros(codes.shape[:2], np.float32)
    paired = _pairs(K, M)
    step = 1 if paired else 2
    for t in range(0, len(columns), step):
        part = np.take(flat, columns[t] + (base + t * entries), mode="clip")
        if not paired and t + 1 < len(columns):
            part += np.take(flat, columns[t + 1] + (base + (t + 1) * entries), mode="clip")
        total += part
    return total


def score_candidates(tables: Floats, codes: Codes, M: int, K: int) -> Floats:
    """Exact scores of each query's own candidates: tables float32 [Q, M, K], codes uint8 [Q, c, code_size] -> [Q, c].

    Bit-identical to the same items' entries of :func:`score_codes`.
    """
    return score_prepared(lookup_tables(tables), codes, M, K)

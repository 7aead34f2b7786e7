"""Vectors to codes and back: the codeword of the largest inner product in each sub-space.

Nearest codewords are found by one small matrix product per sub-space, several times faster than Faiss' loop. Rows with a second codeword
within rounding error of the best go to Faiss, so codes equal those of ``IndexPQ.add``, bit for bit. (From d = 16 on Faiss uses BLAS, and
its choice between such close codewords depends on the batch.)
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import DataError
from .bits import code_size, pack_indices, unpack_codes
from .checks import Codes, Floats, check_codebooks, check_vectors, named_rows
from .codebooks import product_index

ENCODE_BLOCK = 8192
ORDINARY = 1e4
"""Range of squared norms (up to this, from its inverse) of sub-vectors that are encoded without scaling."""
_ROUNDOFF = 2.0**-24  # u of float32
_ITEM_TOLERANCE = 1e-3  # per coordinate; a network's codewords are exact to about 1e-7


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


def encode(x: ArrayLike, Z: ArrayLike, *, what: str = "vectors to encode", first_row: int = 0) -> Codes:
    """Intra-normalised vectors -> packed codes: the codeword of the largest inner product in each sub-space.

    The codes are those of Faiss (``IndexPQ.add``, ``sa_encode``). Ties go to the lowest index. (Faiss guarantees that only without BLAS.)
    Additional memory is bounded; there are as many threads as Faiss is set to use.

    Only the direction of a sub-vector matters. Faiss compares L2 distances in float32, which lose the direction of sub-vectors much
    longer or shorter than codewords; such sub-vectors (norm below 0.01, or at least 100) are scaled first.

    Args:
        x: [N, M*d] numbers, sub-vectors of any norm but 0.
        Z: float32 [M, K, d].
        what: name of the vectors in errors; ``first_row``: number of their first row.

    Returns:
        uint8 [N, code_size]

    Raises:
        DataError: invalid ``Z`` (:func:`check_codebooks`); ``x`` of another width, with NaN, or with a zero sub-vector,
            which has no direction (rows are named).

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> codes = encode(np.concatenate([Z[0, [3]], Z[1, [7]]], axis=1), Z)
        >>> codes.tolist()  # 3 + 16 · 7
        [[115]]
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    source = np.asarray(x)
    if source.ndim != 2 or len(source) == 0:  # the full check raises the detailed error
        source = check_vectors(source, M * d, what=what)
    encoder = _Encoder(Z, what)
    out = np.empty((len(source), code_size(M, K)), np.uint8)
    block = min(ENCODE_BLOCK, max(256, ENCODE_BLOCK * 16 // K))  # the scores of a block stay in the cache
    starts = range(0, len(source), block)

    def fill(start: int) -> None:
        out[start : start + block] = encoder(source[start : start + block], first_row + start)

    workers = min(int(faiss.omp_get_max_threads()), len(starts))
    # numpy releases the interpreter lock in the expensive operations; BLAS has one thread each meanwhile
    with _blas().limit(limits=1), ThreadPoolExecutor(max(1, workers)) as pool:
        for _ in pool.map(fill, starts) if workers > 1 else map(fill, starts):
            pass  # raises the first error in the order of rows
    return out


@functools.cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def tolerance(Z: NDArray[np.float32], largest: float) -> float:
    """Margin within which rounding could make Faiss prefer a second codeword.

    Faiss minimises |x - z|^2 in float32, with an error of at most (d + 3) u 2(|x|^2 + |z|^2) either way it computes it;
    halved, for two codewords, that is 2(d + 3) u (|x|^2 + 1) in terms of x.z - |z|^2 / 2. The product here errs by
    d u |x||z| <= d u (|x|^2 + 1) / 2 per codeword, and leaves |z|^2 / 2 out, which differs by what the norms differ.

    Args:
        Z: float32 [M, K, d], norms within 1e-4 of 1.
        largest: the largest squared norm of a sub-vector.
    """
    d = Z.shape[2]
    squares = np.square(Z, dtype=np.float64).sum(axis=2)
    spread = float((squares.max(axis=1) - squares.min(axis=1)).max()) / 2
    return float(1.1 * (3 * d + 8) * _ROUNDOFF * (largest + 1) + spread)


def nearest(
    x: NDArray[np.float32], Z: NDArray[np.float32], margin: float
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Codeword with the largest inner product in each sub-space, for a block of rows that fits in the cache.

    Args:
        x: float32 [n, M*d].
        Z: float32 [M, K, d].
        margin: see :func:`tolerance`.

    Returns:
        Indices uint8 [M, n]; and bool [n]: rows with another codeword within ``margin`` of the best, whose indices
        are invalid.
    """
    M, K, d = Z.shape
    n = len(x)
    bits = K.bit_length() - 1
    indices = np.zeros((M, n), np.uint8)
    unsure = np.zeros(n, np.bool_)
    scores = np.empty((K, n), np.float32)
    threshold = np.empty(n, np.float32)
    among = np.empty((K, n), np.bool_)
    for m in range(M):
        np.matmul(Z[m], x[:, m * d : (m + 1) * d].T, out=scores)
        np.maximum.reduce(scores, axis=0, out=threshold)
        np.subtract(threshold, np.float32(margin), out=threshold)
        np.greater_equal(scores, threshold, out=among)
        flags = among.view(np.uint8)
        # 256 close codewords overflow to 0, which also differs from 1
        unsure |= np.add.reduce(flags, axis=0, dtype=np.uint8) != 1
        for bit in range(bits):
            # Of a single flag, bit b of its number is set iff it lies in an odd run of 2^b.
            odd = flags.reshape(K >> (bit + 1), 2, 1 << bit, n)[:, 1]
            indices[m] |= np.bitwise_or.reduce(odd, axis=(0, 1)) << np.uint8(bit)
    return indices, unsure


class _Encoder:
    """Encodes blocks of rows. Thread-safe."""

    def __init__(self, Z: Floats, what: str) -> None:
        self.Z = Z
        self.what = what
        self.first = _first_of_equals(Z)
        self.index = product_index(Z)
        # The fast path cannot separate equal codewords; for very small codebooks Faiss is as fast.
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
            # by a power of two, which is exact
            extreme = ~((squares >= 1 / ORDINARY) & (squares < ORDINARY))
            exponents = np.where(extreme, np.frexp(np.abs(parts).max(axis=2))[1], 0)
            parts = np.ldexp(parts, -exponents[:, :, None])
            rows = parts.reshape(rows.shape)
            largest = float(np.einsum("nmd,nmd->nm", parts, parts).max())
        if not self.fast or not largest < ORDINARY:
            return self._slow(rows)
        indices, unsure = nearest(rows, self.Z, tolerance(self.Z, largest))
        codes = pack_indices(indices.T, K)
        close = np.flatnonzero(unsure)
        if len(close):
            codes[close] = self._slow(rows[close])
        if 2 * len(close) > len(rows):
            self.fast = False  # similar codewords make the fast path useless
        return codes

    def _slow(self, rows: Floats) -> Codes:
        M, K, _ = self.Z.shape
        codes: Codes = self.index.pq.compute_codes(rows)
        if self.first is None:
            return codes
        assignment = unpack_codes(codes, M, K)
        return pack_indices(np.take_along_axis(self.first.T, assignment.astype(np.intp), axis=0), K)

    def _refuse(self, rows: Floats, first_row: int) -> None:
        """Raises DataError: NaN, infinity or zero sub-vectors; extreme values are allowed."""
        M, _, d = self.Z.shape
        check_vectors(rows, M * d, what=self.what, first_row=first_row)
        directed = np.any(rows.reshape(-1, M, d) != 0, axis=2).all(axis=1)
        if not directed.all():
            bad = first_row + np.flatnonzero(~directed)
            raise DataError(
                f"{self.what}: a sub-vector of zeros has no direction, in {named_rows(bad)}: leave these items out"
            )


def decode(codes: ArrayLike, Z: ArrayLike) -> Floats:
    """Decoded vectors: float32 [N, M*d], each sub-vector a codeword of ``Z``.

    Examples:
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> np.flatnonzero(decode(np.array([[115]], np.uint8), Z)).tolist()
        [3, 23]
    """
    Z = check_codebooks(Z)
    M, K, d = Z.shape
    assignment = unpack_codes(codes, M, K)
    return Z[np.arange(M), assignment].reshape(len(assignment), M * d)


def items_are_codewords(description: Mapping[str, Any]) -> bool:
    """Whether, according to a model's ``config.json``, item vectors consist of codewords.

    Earlier models only declare that query vectors differ; their items are of that kind.
    """
    return description.get("items_are_codewords", description.get("asymmetric")) is True


def check_items(x: Floats, codes: Codes, Z: Floats, *, what: str, first_row: int = 0) -> None:
    """Check that vectors are items of a model whose item vectors consist of codewords, so equal the reconstruction of their codes.

    Raises:
        DataError: a vector differs from its codewords, as query vectors do (rows are named).
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

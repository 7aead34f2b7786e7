"""Coders made from a trained network's codebooks, and the base of binary codes: NumPy and Faiss, no torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import pack_codes, unpack_codes
from ..codes.checks import check_codebooks
from ..codes.codebooks import inject
from ..codes.encode import encode as encode_unit_norm
from ..codes.scores import score_tables as unit_norm_tables
from ..errors import DataError, UsageError
from .base import Coder, Codes, Floats

Metric = Literal["ip", "l2"]

_BLOCK_BYTES = 32 << 20  # of temporary arrays


def fill(index: Any, codes: Codes) -> Any:
    """Add codes of a coder to its index; returns the index."""
    if isinstance(index, faiss.IndexBinary):
        index.add(codes)
    else:
        index.add_sa_codes(codes)
    return index


def index_pq(codebooks: Floats, metric: int) -> Any:
    """An empty ``faiss.IndexPQ`` with the given codebooks, float32 [M, K, d]."""
    M, K, d = codebooks.shape
    index = faiss.IndexPQ(M * d, M, K.bit_length() - 1, metric)
    faiss.copy_array_to_vector(codebooks.ravel(), index.pq.centroids)
    index.is_trained = True
    return index


def distance_tables(x: Floats, codebooks: Floats) -> Floats:
    """Negative squared distances float32 [Q, M, K] of the parts of each row, x float32 [Q, M·d], to codebooks float32 [M, K, d]."""
    M, K, d = codebooks.shape
    tables = np.empty((len(x), M, K), np.float32)
    parts = x.reshape(len(x), M, 1, d)
    block = max(1, _BLOCK_BYTES // codebooks.nbytes)
    for i in range(0, len(x), block):
        # From differences: x² - 2xc + c² would lose precision for small distances, and vary with the block.
        difference = parts[i : i + block] - codebooks
        np.einsum("qmkd,qmkd->qmk", difference, difference, out=tables[i : i + block])
    return np.negative(tables, out=tables)


def add_entries(tables: Floats, assignment: NDArray[np.uint8]) -> Floats:
    """Scores float32 [Q, n]: sums of entries of tables [Q, M, K], for codeword numbers [n, M]."""
    scores = np.zeros((len(tables), len(assignment)), np.float32)
    # Always summed in the order of the codebooks, so that equal codes have bit-equal scores.
    for m in range(tables.shape[1]):
        scores += tables[:, m, assignment[:, m]]
    return scores


def checked_codebooks(codebooks: Floats) -> Floats:
    """Codebooks as contiguous float32 [M, K, d]; raises DataError: another shape, or not finite."""
    C = np.ascontiguousarray(codebooks, dtype=np.float32)
    if C.ndim != 3 or not 4 <= C.shape[1] <= 256 or C.shape[1] & (C.shape[1] - 1) or not np.isfinite(C).all():
        raise DataError(
            f"codebooks {list(C.shape)}: finite [M, K, d] with K a power of two, 4 to 256, are needed"
        )
    return C


class TableCoder(Coder):
    """Codes of M numbers below K, scored by summing M entries of the query's table."""

    M: int
    K: int

    @abstractmethod
    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """Score of every codeword for every query, float32 [Q, M, K]."""

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return add_entries(self.score_tables(xq), unpack_codes(codes, self.M, self.K))


class ProductCoder(TableCoder):
    """Product codes: M codebooks, one per part of the vector; asymmetric scores. Ties go to the lowest codeword number.

    Args:
        codebooks: float32 [M, K, d], K a power of two from 4 to 256.
        metric: ``ip``: scores are inner products with the codewords; ``l2``: negative squared distances. Encoding always takes the
            nearest codewords in L2.

    Raises:
        DataError: codebooks of another shape, or not finite.
    """

    name = "product codes"

    def __init__(self, codebooks: Floats, metric: Metric = "ip") -> None:
        Z = checked_codebooks(codebooks)
        if metric not in ("ip", "l2"):
            raise UsageError(f"metric {metric!r} is not one of ip, l2")
        self.metric = metric
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.width = self.M * self.d
        super().__init__(self.M * (self.K.bit_length() - 1))
        self.code_size = (self.bits + 7) // 8
        self._unit_norm = metric == "ip" and bool((np.abs(np.linalg.norm(Z, axis=2) - 1) < 1e-3).all())
        self.codebooks = check_codebooks(Z) if self._unit_norm else Z

    def _encode(self, x: Floats) -> Codes:
        if self._unit_norm:
            return encode_unit_norm(x, self.codebooks)
        x = x.reshape(len(x), self.M, self.d)
        half = 0.5 * np.einsum("mkd,mkd->mk", self.codebooks, self.codebooks)
        assignment = np.empty((len(x), self.M), np.uint8)
        block = max(1, _BLOCK_BYTES // (4 * self.M * self.K))
        for i in range(0, len(x), block):
            nearness = np.einsum("nmd,mkd->nmk", x[i : i + block], self.codebooks, optimize=True) - half
            assignment[i : i + block] = nearness.argmax(axis=2)
        return pack_codes(assignment, self.K)

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        xq = self._inputs(xq, "queries")
        if self.metric == "l2":
            return distance_tables(xq, self.codebooks)
        if self._unit_norm:
            return unit_norm_tables(xq, self.codebooks)
        tables: Floats = np.einsum("qmd,mkd->qmk", xq.reshape(len(xq), self.M, self.d), self.codebooks)
        return tables

    def index(self) -> Any:
        """``faiss.IndexPQ`` of the metric."""
        if self._unit_norm:
            return inject(self.codebooks)
        return index_pq(
            self.codebooks, faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else faiss.METRIC_L2
        )


class BinaryMethod(TableCoder):
    """A method whose codes are bits compared by Hamming distance; sub-classes implement :meth:`_project`.

    Bit i of a code is the sign of coordinate i (1 above 0), in byte i // 8, lowest bit first, as Faiss packs them. The padding bits of
    the last byte are 0 and do not affect distances. The score is the negative Hamming distance. Groups of four bits are numbers below
    K = 16, so binary codes are ranked like product codes; the sums are integers.
    """

    K = 16

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.code_size = (bits + 7) // 8
        self.M = 2 * self.code_size

    def project(self, x: NDArray[Any]) -> Floats:
        """The coordinates float32 [n, bits] whose signs are the code."""
        return self._project(self._inputs(x, "vectors"))

    @abstractmethod
    def _project(self, x: Floats) -> Floats: ...

    def _encode(self, x: Floats) -> Codes:
        return np.packbits(self._project(x) > 0, axis=1, bitorder="little")

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """Negative Hamming distances of each four bits of a query to each number below 16, float32 [Q, M, 16]."""
        queries = unpack_codes(self.encode(xq), self.M, self.K)
        different = np.bitwise_count(queries[:, :, None] ^ np.arange(16, dtype=np.uint8)).astype(np.float32)
        return np.asarray(-different)

    def index(self) -> Any:
        """``faiss.IndexBinaryFlat`` over the code's bits, padded to whole bytes."""
        self._require_fit()
        return faiss.IndexBinaryFlat(8 * self.code_size)

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """The queries' codes, uint8 [Q, code_size], as binary indexes need."""
        return self.encode(xq)


class SignCoder(BinaryMethod):
    """One bit per dimension of the vectors."""

    name = "sign codes"

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.width = bits

    def _project(self, x: Floats) -> Floats:
        return x

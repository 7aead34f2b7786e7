"""Coders made from a trained network's codebooks: NumPy arrays, no torch."""

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


class TableCoder(Coder):
    """Codes of M numbers below K, scored by summing M entries of the query's table."""

    M: int
    K: int

    @abstractmethod
    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """Score of every codeword for every query, float32 [Q, M, K]."""

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        tables = self.score_tables(xq)
        assignment = unpack_codes(codes, self.M, self.K)
        scores = np.zeros((len(tables), len(codes)), np.float32)
        # Always summed in the order of the codebooks, so that equal codes have bit-equal scores.
        for m in range(self.M):
            scores += tables[:, m, assignment[:, m]]
        return scores


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
        Z = np.ascontiguousarray(codebooks, dtype=np.float32)
        if (
            Z.ndim != 3
            or not 4 <= Z.shape[1] <= 256
            or Z.shape[1] & (Z.shape[1] - 1)
            or not np.isfinite(Z).all()
        ):
            raise DataError(
                f"codebooks {list(Z.shape)}: finite [M, K, d] with K a power of two, 4 to 256, are needed"
            )
        if metric not in ("ip", "l2"):
            raise UsageError(f"metric {metric!r} is not one of ip, l2")
        self.codebooks = Z
        self.metric = metric
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.width = self.M * self.d
        super().__init__(self.M * (self.K.bit_length() - 1))
        self.code_size = (self.bits + 7) // 8
        self._unit_norm = bool((np.abs(np.linalg.norm(Z, axis=2) - 1) < 1e-3).all())
        if self._unit_norm and metric == "ip":
            self.codebooks = check_codebooks(Z)

    def _encode(self, x: Floats) -> Codes:
        if self._unit_norm and self.metric == "ip":
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
        if self._unit_norm and self.metric == "ip":
            return unit_norm_tables(xq, self.codebooks)
        x = xq.reshape(len(xq), self.M, self.d)
        tables = np.empty((len(x), self.M, self.K), np.float32)
        block = max(1, _BLOCK_BYTES // self.codebooks.nbytes)
        for i in range(0, len(x), block):
            if self.metric == "ip":
                np.einsum("qmd,mkd->qmk", x[i : i + block], self.codebooks, out=tables[i : i + block])
            else:
                # From differences: x² - 2xc + c² would lose precision for small distances.
                difference = x[i : i + block, :, None] - self.codebooks
                np.einsum("qmkd,qmkd->qmk", difference, difference, out=tables[i : i + block])
        return tables if self.metric == "ip" else np.negative(tables, out=tables)

    def index(self) -> Any:
        """``faiss.IndexPQ`` of the metric."""
        if self._unit_norm and self.metric == "ip":
            return inject(self.codebooks)
        metric = faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else faiss.METRIC_L2
        index = faiss.IndexPQ(self.width, self.M, self.K.bit_length() - 1, metric)
        faiss.copy_array_to_vector(self.codebooks.ravel(), index.pq.centroids)
        index.is_trained = True
        return index


class SignCoder(TableCoder):
    """One bit per dimension, 1 above 0 (lowest bit of a byte first, as Faiss packs them), compared by Hamming distance.

    The score is the negative Hamming distance. Groups of four bits are numbers below K = 16, so binary codes are ranked like product
    codes; the sums are integers.

    Args:
        bits: width of the vectors. Padding bits of the last byte are 0.
    """

    name = "sign codes"

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.width = bits
        self.code_size = (bits + 7) // 8
        self.M, self.K = 2 * self.code_size, 16

    def _encode(self, x: Floats) -> Codes:
        return np.packbits(x > 0, axis=1, bitorder="little")

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """Negative Hamming distances of each four bits of a query to each number below 16, float32 [Q, M, 16]."""
        queries = unpack_codes(self.encode(xq), self.M, self.K)
        different: Floats = np.bitwise_count(queries[:, :, None] ^ np.arange(16, dtype=np.uint8)).astype(
            np.float32
        )
        return np.negative(different, out=different)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        queries = self._encode(xq)
        scores = np.empty((len(queries), len(codes)), np.float32)
        block = max(1, _BLOCK_BYTES // max(1, codes.nbytes))
        for i in range(0, len(queries), block):
            different = np.bitwise_count(queries[i : i + block, None] ^ codes)
            scores[i : i + block] = different.sum(axis=2, dtype=np.int32)
        return np.negative(scores, out=scores)

    def index(self) -> Any:
        """``faiss.IndexBinaryFlat`` over the code's bits, padded to whole bytes."""
        return faiss.IndexBinaryFlat(8 * self.code_size)

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """The queries' codes, uint8 [Q, code_size], as binary indexes need."""
        return self.encode(xq)

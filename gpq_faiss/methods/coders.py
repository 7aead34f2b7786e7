"""Coders of given codebooks, and the base of binary codes: NumPy and Faiss, no torch."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, unpack_codes
from ..codes.checks import check_codebooks
from ..codes.codebooks import product_index
from ..codes.encode import encode as encode_unit_norm
from ..codes.scores import score_tables as unit_norm_tables
from ..errors import DataError
from .base import Coder, Codes, Floats

_BLOCK_BYTES = 32 << 20  # of temporary arrays


def index_pq(codebooks: Floats, metric: int) -> Any:
    """An empty ``faiss.IndexPQ`` with the given codebooks, float32 [M, K, d]."""
    index = product_index(codebooks)
    index.metric_type = metric
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

    def score_tables(self, xq: NDArray[Any]) -> Floats:
        """Score of every codeword for every query, float32 [Q, M, K]."""
        return self._tables(self._prepared(xq, "queries"))

    @abstractmethod
    def _tables(self, x: Floats) -> Floats: ...

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        tables, chosen = self._tables(xq), unpack_codes(codes, self.M, self.K)
        scores = np.zeros((len(tables), len(chosen)), np.float32)
        # Always summed in the order of the codebooks, so that equal codes have bit-equal scores.
        for m in range(self.M):
            scores += tables[:, m, chosen[:, m]]
        return scores


class ProductCoder(TableCoder):
    """Product codes: M codebooks, one per part of the vector; the nearest codewords in L2, asymmetric scores.

    Args:
        codebooks: float32 [M, K, d], K a power of two from 4 to 256.
        metric: ``ip``: codewords are unit-norm, and scores inner products; ``l2``: scores are negative squared distances.

    Raises:
        DataError: codebooks of another shape, not finite, or not unit-norm.
    """

    name = "product codes"

    def __init__(self, codebooks: Floats, metric: Literal["ip", "l2"] = "ip") -> None:
        self.metric = metric
        self.codebooks = check_codebooks(codebooks) if metric == "ip" else checked_codebooks(codebooks)
        self.M, self.K, self.d = (int(n) for n in self.codebooks.shape)
        self.width = self.M * self.d
        super().__init__(self.M * bits_per_code(self.K))

    def _encode(self, x: Floats) -> Codes:
        if self.metric == "ip":
            return encode_unit_norm(x, self.codebooks)
        codes: Codes = self.index().sa_encode(x) if len(x) else np.empty((0, self.code_size), np.uint8)
        return codes

    def _tables(self, x: Floats) -> Floats:
        tables = unit_norm_tables if self.metric == "ip" else distance_tables
        return tables(x, self.codebooks)

    def index(self) -> Any:
        """``faiss.IndexPQ`` of the metric."""
        return index_pq(
            self.codebooks, faiss.METRIC_INNER_PRODUCT if self.metric == "ip" else faiss.METRIC_L2
        )


class BinaryMethod(TableCoder):
    """A method whose codes are bits compared by Hamming distance; sub-classes implement :meth:`_project`.

    Bit i of a code is the sign of coordinate i (1 above 0), in byte i // 8, lowest bit first, as Faiss packs them. The padding bits of
    the last byte are 0. The score is the negative Hamming distance. Groups of four bits are numbers below K = 16, so binary codes are
    ranked like product codes; the sums are integers.
    """

    K = 16

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.M = 2 * self.code_size

    def project(self, x: NDArray[Any]) -> Floats:
        """The coordinates float32 [n, bits] whose signs are the code."""
        return self._project(self._prepared(x, "vectors"))

    @abstractmethod
    def _project(self, x: Floats) -> Floats: ...

    def _encode(self, x: Floats) -> Codes:
        return np.packbits(self._project(x) > 0, axis=1, bitorder="little")

    def _tables(self, x: Floats) -> Floats:
        """Negative Hamming distances of each four bits of a query to each number below 16."""
        queries = unpack_codes(self._encode(x), self.M, self.K)
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

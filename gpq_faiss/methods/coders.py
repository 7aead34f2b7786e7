"""From the vectors of a trained network to codes, their scores and the Faiss index: what trained methods end in.

A coder holds plain arrays; it needs no torch. Two codes of equal bytes have bit-equal scores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Metric = Literal["ip", "l2"]

_BLOCK_BYTES = 32 << 20  # of temporary arrays


class Coder(ABC):
    """Codes of vectors float32 [n, width].

    Attributes:
        bits: of a code, those that carry information.
        code_size: bytes of a code.
        width: of the vectors.
    """

    bits: int
    code_size: int
    width: int

    @abstractmethod
    def encode(self, vectors: Floats) -> Codes:
        """Codes uint8 [n, code_size] of vectors float32 [n, width]."""

    @abstractmethod
    def score(self, xq: Floats, codes: Codes) -> Floats:
        """Scores float32 [Q, n] of codes for query vectors float32 [Q, width]; larger is nearer."""

    @abstractmethod
    def index(self) -> Any:
        """A trained, empty Faiss index that ranks as :meth:`score` does; :func:`fill` and :meth:`search_input` feed it."""

    def search_input(self, xq: Floats) -> NDArray[Any]:
        """What :meth:`index` is searched with for query vectors float32 [Q, width]."""
        return xq


def fill(index: Any, codes: Codes) -> Any:
    """Add codes of a coder to its index; returns the index."""
    if isinstance(index, faiss.IndexBinary):
        index.add(codes)
    else:
        index.add_sa_codes(codes)
    return index


class TableCoder(Coder):
    """Codes of M numbers below K, whose score is a sum of M entries of the query's table."""

    M: int
    K: int

    @abstractmethod
    def score_tables(self, xq: Floats) -> Floats:
        """Score of every codeword for every query, float32 [Q, M, K]."""

    def score(self, xq: Floats, codes: Codes) -> Floats:
        """The sum of the entries of the query's table that the code names."""
        tables = self.score_tables(xq)
        assignment = unpack_codes(codes, self.M, self.K)
        scores = np.zeros((len(tables), len(codes)), np.float32)
        # Added in the order of the parts whatever the codes around: equal codes get equal bits.
        for m in range(self.M):
            scores += tables[:, m, assignment[:, m]]
        return scores


class ProductCoder(TableCoder):
    """M codebooks, each over its own part of the vector, and asymmetric scores.

    Args:
        codebooks: float32 [M, K, d], K a power of two from 4 to 256.
        metric: ``ip``: the score is the inner product with the codewords; ``l2``: minus the squared distance. A code is the nearest
            codeword of every part in L2, whatever the metric.

    Raises:
        DataError: codebooks of another form, or not finite.
    """

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
        self.bits = self.M * (self.K.bit_length() - 1)
        self.code_size = (self.bits + 7) // 8
        self._unit_norm = bool((np.abs(np.linalg.norm(Z, axis=2) - 1) < 1e-3).all())
        if self._unit_norm and metric == "ip":
            self.codebooks = check_codebooks(Z)

    def encode(self, vectors: Floats) -> Codes:
        """The nearest codeword of each part (L2; the lowest number of equally near ones)."""
        if self._unit_norm and self.metric == "ip":
            return encode_unit_norm(vectors, self.codebooks)
        x = np.ascontiguousarray(vectors, dtype=np.float32).reshape(len(vectors), self.M, self.d)
        half = 0.5 * np.einsum("mkd,mkd->mk", self.codebooks, self.codebooks)
        assignment = np.empty((len(x), self.M), np.uint8)
        block = max(1, _BLOCK_BYTES // (4 * self.M * self.K))
        for i in range(0, len(x), block):
            nearness = np.einsum("nmd,mkd->nmk", x[i : i + block], self.codebooks, optimize=True) - half
            assignment[i : i + block] = nearness.argmax(axis=2)
        return pack_codes(assignment, self.K)

    def score_tables(self, xq: Floats) -> Floats:
        """Score of every codeword for every query, float32 [Q, M, K]."""
        if self._unit_norm and self.metric == "ip":
            return unit_norm_tables(xq, self.codebooks)
        x = np.ascontiguousarray(xq, dtype=np.float32).reshape(len(xq), self.M, self.d)
        tables = np.empty((len(x), self.M, self.K), np.float32)
        block = max(1, _BLOCK_BYTES // self.codebooks.nbytes)
        for i in range(0, len(x), block):
            if self.metric == "ip":
                np.einsum("qmd,mkd->qmk", x[i : i + block], self.codebooks, out=tables[i : i + block])
            else:
                # From the differences: x² - 2xc + c² would lose the small distances.
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
    """A bit a dimension, 1 above 0 (lowest bit of a byte first, as Faiss packs them), compared by Hamming distance.

    Four bits are a number below K = 16, so that binary codes are ranked as product codes are; the sums are whole numbers.

    Args:
        bits: width of the vectors. The bits that fill up the last byte are 0 in every code.
    """

    def __init__(self, bits: int) -> None:
        if bits < 1:
            raise UsageError(f"{bits} bits: a code has at least 1")
        self.bits = self.width = bits
        self.code_size = (bits + 7) // 8
        self.M, self.K = 2 * self.code_size, 16

    def encode(self, vectors: Floats) -> Codes:
        return np.packbits(np.asarray(vectors) > 0, axis=1, bitorder="little")

    def score_tables(self, xq: Floats) -> Floats:
        """Minus the number of bits in which each four of a query differ from each number below 16, float32 [Q, M, 16]."""
        queries = unpack_codes(self.encode(xq), self.M, self.K)
        different: Floats = np.bitwise_count(queries[:, :, None] ^ np.arange(16, dtype=np.uint8)).astype(
            np.float32
        )
        return np.negative(different, out=different)

    def score(self, xq: Floats, codes: Codes) -> Floats:
        """Minus the Hamming distance."""
        queries = self.encode(xq)
        scores = np.empty((len(queries), len(codes)), np.float32)
        block = max(1, _BLOCK_BYTES // max(1, codes.nbytes))
        for i in range(0, len(queries), block):
            different = np.bitwise_count(queries[i : i + block, None] ^ codes)
            scores[i : i + block] = different.sum(axis=2, dtype=np.int32)
        return np.negative(scores, out=scores)

    def index(self) -> Any:
        """``faiss.IndexBinaryFlat`` over the code's bits, filled up to whole bytes."""
        return faiss.IndexBinaryFlat(8 * self.code_size)

    def search_input(self, xq: Floats) -> NDArray[Any]:
        """The queries' codes: a binary index takes nothing else."""
        return self.encode(xq)

"""Coders turn vectors (features, pixels, or outputs of a trained network) into byte codes: fit,
encode, score.

Higher scores mean nearer items. A score depends only on the query and the bytes of the code: equal
codes have bit-equal scores, so a ranking scores each distinct code once. No torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, Self, cast

import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, unpack_codes
from ..codes.checks import check_codebooks, check_vectors
from ..codes.codebooks import product_index
from ..codes.encode import encode as encode_unit_norm
from ..codes.scores import score_tables as unit_norm_tables
from ..data.labels import Labels
from ..errors import DataError, UsageError

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Rows = NDArray[np.int64]


class Coder(ABC):
    """Codes of ``bits`` bits for similarity search, fitted by ``seed``. Raises UsageError: a number
    of bits that the method cannot have.

    Sub-classes implement ``_fit`` (unless their codewords are given), ``_encode``, and ``_tables``
    (if the score of a code is a sum of M entries of the query's table [M, K]) or ``_score``. Their
    arguments are checked, and scaled if the method is :attr:`unit`.
    """

    name: str = ""
    """Short name, as in :data:`gpq_faiss.methods.registry.METHODS`."""
    unit: bool = False
    """Whether vectors are scaled to length 1 first, so that L2 ranks like the cosine; zero vectors
    stay zero."""
    width: int = 0
    """Length of the input vectors; 0 before :meth:`fit`."""
    code_size: int
    """Bytes per code; those of ``float`` and ``classifier`` are known after :meth:`fit`."""
    extra_bits: int = 0
    """Bits of a code in addition to :attr:`bits`."""
    M: int
    K: int

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        if bits <= 0:
            raise UsageError(f"{self.name}: {bits} bits: a code has at least 1")
        self.bits, self.seed = bits, seed
        self.code_size = (bits + 7) // 8

    def fit(self, x: NDArray[Any], labels: Labels | None = None) -> Self:
        """Learn from labelled and unlabelled rows float32 [N, width]; unsupervised methods ignore
        the labels.

        Raises:
            DataError: rows that are not finite, or missing labels.
            UsageError: a code length that Faiss refuses for these vectors.
        """
        self.width = np.atleast_1d(x).shape[-1]
        self._fit(self._prepared(x, "training vectors"), labels)
        return self

    def encode(self, x: NDArray[Any]) -> Codes:
        """Codes uint8 [n, code_size] of vectors float32 [n, width].

        Raises:
            DataError: rows of another width, not finite, or that cannot be coded (a zero vector has
                no cosine).
        """
        prepared = self._prepared(x, "vectors")
        return self._encode(prepared) if len(x) else np.empty((0, self.code_size), np.uint8)

    def score(self, xq: NDArray[Any], codes: NDArray[Any]) -> Floats:
        """Scores float32 [Q, n] of codes uint8 [n, code_size] for queries float32 [Q, width];
        higher is nearer.
        """
        return self._score(self._prepared(xq, "queries"), np.ascontiguousarray(codes))

    def score_tables(self, xq: NDArray[Any]) -> Floats | None:
        """Scores of codewords per query, float32 [Q, M, K], if the score of a code is a sum of M
        entries; else None."""
        return self._tables(self._prepared(xq, "queries"))

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        raise NotImplementedError

    @abstractmethod
    def _encode(self, x: Floats) -> Codes: ...

    def _tables(self, x: Floats) -> Floats | None:
        return None

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        tables = cast(Floats, self._tables(xq))
        chosen = unpack_codes(codes, self.M, self.K)
        scores = np.zeros((len(tables), len(chosen)), np.float32)
        # Always summed in the order of the codebooks, so that equal codes have bit-equal scores.
        for m in range(self.M):
            scores += tables[:, m, chosen[:, m]]
        return scores

    def _prepared(self, x: NDArray[Any], subject: str) -> Floats:
        """``x`` as finite, C-contiguous float32 [n, width], and scaled."""
        x = check_vectors(x, self.width, name=f"{self.name}: {subject}")
        return scaled_rows(x) if self.unit else x

    def _labelled(self, labels: Labels | None) -> tuple[NDArray[np.int64], Labels]:
        """Rows with labels, ascending, and the labels. Raises DataError: there are none."""
        if labels is None or not labels.has().any():
            raise DataError(
                f"{self.name}: it learns from labels alone, but no item has one: label some items, "
                "or leave the method out"
            )
        return np.flatnonzero(labels.has()), labels


def scaled_rows(x: Floats) -> Floats:
    """Rows of ``x`` scaled to unit length, float32; zero rows stay zero."""
    # float64: a float32 square overflows at 1e19 and vanishes at 1e-23.
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64))
    return np.divide(
        x, np.where(norms, norms, 1)[:, None], out=np.empty_like(x), casting="same_kind"
    )


def dot_rows(xq: Floats, xb: Floats) -> Floats:
    """Return the inner products float32 [Q, n] of rows, bit-equal for equal rows: BLAS sums in an
    order that depends on a row's position."""
    return np.asarray(np.einsum("qd,nd->qn", xq, xb))


def hamming_tables(codes: Codes) -> Floats:
    """Return the negative Hamming distances of each four bits of binary codes uint8 [Q, size] to
    each number below 16, float32 [Q, 2 size, 16]."""
    different = np.bitwise_count(
        unpack_codes(codes, 2 * codes.shape[1], 16)[:, :, None] ^ np.arange(16, dtype=np.uint8)
    )
    return np.asarray(-different.astype(np.float32))


class ProductCoder(Coder):
    """Product codes: M codebooks, one per part of the vector, float32 [M, K, d]; the nearest
    codewords in L2, asymmetric scores: ``ip``, inner products with unit-norm codewords, or ``l2``,
    negative squared distances. Raises DataError: other codebooks.
    """

    name = "product codes"

    def __init__(self, codebooks: Floats, metric: Literal["ip", "l2"] = "ip") -> None:
        self.metric = metric
        self.codebooks = check_codebooks(codebooks, unit=metric == "ip")
        self.M, self.K, self.d = self.codebooks.shape
        self.width = self.M * self.d
        super().__init__(self.M * bits_per_code(self.K))

    def _encode(self, x: Floats) -> Codes:
        if self.metric == "ip":
            return encode_unit_norm(x, self.codebooks)
        return np.asarray(product_index(self.codebooks).sa_encode(x))

    def _tables(self, x: Floats) -> Floats:
        if self.metric == "ip":
            return unit_norm_tables(x, self.codebooks)
        tables = np.empty((len(x), self.M, self.K), np.float32)
        for m, words in enumerate(self.codebooks):
            # From differences: x² - 2xc + c² would lose precision for small distances.
            difference = x[:, None, m * self.d : (m + 1) * self.d] - words
            tables[:, m] = -np.einsum("qkd,qkd->qk", difference, difference)
        return tables


class BinaryMethod(Coder):
    """A method whose codes are bits, compared by Hamming distance; sub-classes implement ``_fit``
    and ``_project``.

    Bit i of a code is the sign of coordinate i (1 above 0), in byte i // 8, lowest bit first, as
    Faiss packs them; padding bits are 0. Four bits are a number below K = 16, so binary codes are
    ranked like product codes, by sums of integers.
    """

    K = 16

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.M = 2 * self.code_size

    def _project(self, x: Floats) -> Floats:
        """The coordinates float32 [n, bits] whose signs are the code."""
        return x

    def _encode(self, x: Floats) -> Codes:
        return np.packbits(self._project(x) > 0, axis=1, bitorder="little")

    def _tables(self, x: Floats) -> Floats:
        return hamming_tables(self._encode(x))


class SignCoder(BinaryMethod):
    """One bit per dimension of the vectors."""

    name = "sign codes"

    def __init__(self, bits: int) -> None:
        super().__init__(bits)
        self.width = bits

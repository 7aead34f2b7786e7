"""Interface of all coding methods: fit, encode, score, and a Faiss index.

A coder turns vectors (features, pixels, or outputs of a trained network) into byte codes. Higher scores mean nearer items. A score
depends only on the query and the bytes of the code: equal codes have bit-equal scores, so a ranking scores each distinct code once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ..data.labels import Labels, rows_that
from ..errors import DataError, MismatchError, UsageError

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


class Coder(ABC):
    """Codes for similarity search.

    Methods that learn from a matrix of vectors (PQ, ITQ ...) implement :meth:`_fit`. Coders made from a trained network's codebooks
    (:mod:`gpq_faiss.methods.coders`) need no fit. Sub-classes implement :meth:`_encode` and :meth:`_score`; their arguments are checked.

    Args:
        bits: code length in bits. ``float`` and ``classifier`` ignore it; their :attr:`bits` is set by :meth:`fit`.
        seed: random seed of :meth:`fit`.

    Raises:
        UsageError: ``bits`` is not positive or not supported by the method; ``seed`` is negative.
    """

    name: str = ""
    """Short name, as in :data:`gpq_faiss.methods.registry.METHODS`."""
    width: int = 0
    """Length of the input vectors; 0 before :meth:`fit`."""
    code_size: int = 0
    """Bytes per code; 0 if unknown before :meth:`fit`."""
    extra_bits: int = 0
    """Bits of a code in addition to :attr:`bits`."""

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        if bits <= 0:
            raise UsageError(f"{self.name}: {bits} bits: a code has at least 1")
        if seed < 0:
            raise UsageError(f"{self.name}: seed {seed}: it must not be negative")
        self.bits = bits
        self.seed = seed

    # ------------------------------------------------------------------------------------------------ what users call

    def fit(self, x: NDArray[Any], labels: Labels | None = None, *, seed: int | None = None) -> Self:
        """Learn from a training set.

        Args:
            x: float32 [N, width], labelled and unlabelled rows of the training set.
            labels: of these rows (unlabelled rows have none); unsupervised methods ignore them.
            seed: overrides the constructor's.

        Raises:
            DataError: rows that are not finite, too few rows, or missing labels.
            UsageError: a code length that vectors of this width cannot have.
        """
        if seed is not None:
            if seed < 0:
                raise UsageError(f"{self.name}: seed {seed}: it must not be negative")
            self.seed = seed
        x = _check(x, self.name, "training vectors")
        if not len(x) or not x.shape[1]:
            raise DataError(f"{self.name}: training vectors are {list(x.shape)}: nothing to learn from")
        if labels is not None and len(labels) != len(x):
            raise DataError(f"{self.name}: {len(x):,} training vectors but {len(labels):,} labels")
        self.width = 0  # so that a failed second fit leaves the coder unfitted
        self._fit(x, labels)
        self.width = x.shape[1]
        return self

    def encode(self, x: NDArray[Any]) -> Codes:
        """Codes uint8 [n, code_size] of vectors float32 [n, width].

        Raises:
            UsageError: not fitted yet.
            DataError: rows that are not finite or cannot be coded (a zero vector has no cosine).
            MismatchError: another width than in training.
        """
        return self._encode(self._inputs(x, "vectors"))

    def score(self, xq: NDArray[Any], codes: NDArray[Any]) -> Floats:
        """Scores float32 [Q, n] of each code for each query; higher is nearer, equal codes have bit-equal scores.

        Args:
            xq: float32 [Q, width], queries.
            codes: uint8 [n, code_size] of :meth:`encode`.

        Raises:
            UsageError, DataError, MismatchError: as for :meth:`encode`, or codes of another size.
        """
        xq = self._inputs(xq, "queries")
        codes = np.asarray(codes)
        if codes.ndim != 2 or codes.dtype != np.uint8:
            raise DataError(
                f"{self.name}: codes are {codes.dtype} {list(codes.shape)}, not uint8 [n, {self.code_size}]"
            )
        if codes.shape[1] != self.code_size:
            raise MismatchError(
                f"{self.name}: codes of {codes.shape[1]} bytes, but this coder's have {self.code_size}: "
                "use codes from this coder"
            )
        return self._score(xq, np.ascontiguousarray(codes))

    def score_tables(self, xq: NDArray[Any]) -> Floats | None:
        """Scores of codewords per query, float32 [Q, M, K], if the score of a code is a sum of M entries; else None.

        Args:
            xq: float32 [Q, width], queries.

        Raises:
            UsageError, DataError, MismatchError: as for :meth:`encode`.
        """
        del xq
        return None

    @abstractmethod
    def index(self) -> Any:
        """A trained, empty ``faiss.Index`` (or ``faiss.IndexBinary``) that ranks as :meth:`score` does.

        Search it with :meth:`search_input`. :func:`gpq_faiss.methods.coders.fill` adds codes; indexes of fitted coders also accept
        :meth:`search_input` of vectors in ``add``.

        Raises:
            UsageError: not fitted yet.
        """

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """Input to search :meth:`index` with, for query vectors float32 [Q, width]; by default the vectors themselves.

        Raises:
            UsageError, DataError, MismatchError: as for :meth:`encode`.
        """
        return self._inputs(xq, "vectors")

    def settings(self) -> dict[str, Any]:
        """All hyper-parameters, JSON-serialisable: equal settings and data give equal codes."""
        return {"method": self.name, "seed": self.seed}

    # ------------------------------------------------------------------------------------------- what sub-classes implement

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        raise UsageError(f"{self.name}: its codewords are fixed: there is nothing to fit")

    @abstractmethod
    def _encode(self, x: Floats) -> Codes: ...

    @abstractmethod
    def _score(self, xq: Floats, codes: Codes) -> Floats: ...

    # --------------------------------------------------------------------------------------------------------- checks

    def _require_fit(self) -> None:
        if not self.width:
            raise UsageError(f"{self.name} is not fitted: call fit first")

    def _inputs(self, x: NDArray[Any], what: str) -> Floats:
        self._require_fit()
        x = _check(x, self.name, what)
        if x.shape[1] != self.width:
            raise MismatchError(
                f"{self.name}: {what} have width {x.shape[1]}, but it was fitted to width {self.width}: "
                "use vectors from the same extractor"
            )
        return x


def _check(x: NDArray[Any], name: str, what: str) -> Floats:
    """``x`` as float32 [n, width], C-contiguous and finite; else raises :class:`DataError`."""
    x = np.asarray(x)
    if x.ndim != 2 or x.dtype.kind not in "fiu":
        raise DataError(f"{name}: {what} are {x.dtype} {list(x.shape)}: numbers [n, width] are needed")
    # A large float64 overflows to infinity here and is rejected below.
    with np.errstate(over="ignore"):
        x = np.ascontiguousarray(x, dtype=np.float32)
    bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
    if bad.size:
        raise DataError(
            f"{name}: {what}: {rows_that(bad, 'hold')} NaN or infinity: repair such rows or leave them out"
        )
    return x


def _norms(x: Floats) -> NDArray[np.float64]:
    # float64: a float32 square overflows at 1e19 and vanishes at 1e-23.
    norms: NDArray[np.float64] = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64))
    return norms


def scaled_rows(x: Floats) -> Floats:
    """Rows of ``x`` scaled to unit length, float32; zero rows stay zero."""
    norms = _norms(x)
    norms[norms == 0] = 1
    return np.divide(x, norms[:, None], out=np.empty_like(x), casting="same_kind")


def unit_rows(x: Floats, name: str) -> Floats:
    """As :func:`scaled_rows`, but zero rows are errors.

    Raises:
        DataError: a zero row.
    """
    zero = np.flatnonzero(~x.any(axis=1))
    if zero.size:
        raise DataError(f"{name}: {rows_that(zero, 'are')} all zero and have no direction: leave them out")
    return scaled_rows(x)

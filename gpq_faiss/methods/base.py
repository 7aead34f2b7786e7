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
    """Codes of ``bits`` bits for similarity search, fitted by ``seed``. Sub-classes implement ``_fit`` (unless their codewords are given),
    ``_encode`` and ``_score``, whose arguments are checked, and scaled if the method is :attr:`unit`.

    Raises:
        UsageError: ``bits`` is not positive or not supported by the method; ``seed`` is negative.
    """

    name: str = ""
    """Short name, as in :data:`gpq_faiss.methods.registry.METHODS`."""
    unit: bool = False
    """Whether vectors are scaled to length 1 first, so that L2 ranks like the cosine; zero vectors stay zero."""
    width: int = 0
    """Length of the input vectors; 0 before :meth:`fit`."""
    code_size: int
    """Bytes per code; those of ``float`` and ``classifier`` are known after :meth:`fit`."""
    extra_bits: int = 0
    """Bits of a code in addition to :attr:`bits`."""

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        if bits <= 0:
            raise UsageError(f"{self.name}: {bits} bits: a code has at least 1")
        if seed < 0:
            raise UsageError(f"{self.name}: seed {seed}: it must not be negative")
        self.bits = bits
        self.seed = seed
        self.code_size = (bits + 7) // 8

    def fit(self, x: NDArray[Any], labels: Labels | None = None) -> Self:
        """Learn from a training set.

        Args:
            x: float32 [N, width], labelled and unlabelled rows of the training set.
            labels: of these rows (unlabelled rows have none); unsupervised methods ignore them.

        Raises:
            DataError: rows that are not finite, too few rows, or missing labels.
            UsageError: a code length that vectors of this width cannot have.
        """
        x = self._checked(x, "training vectors")
        if not x.size:
            raise DataError(f"{self.name}: training vectors are {list(x.shape)}: nothing to learn from")
        if labels is not None and len(labels) != len(x):
            raise DataError(f"{self.name}: {len(x):,} training vectors but {len(labels):,} labels")
        self.width = 0  # so that a failed second fit leaves the coder unfitted
        self._fit(scaled_rows(x) if self.unit else x, labels)
        self.width = x.shape[1]
        return self

    def encode(self, x: NDArray[Any]) -> Codes:
        """Codes uint8 [n, code_size] of vectors float32 [n, width].

        Raises:
            UsageError: not fitted yet.
            DataError: rows that are not finite or cannot be coded (a zero vector has no cosine).
            MismatchError: another width than in training.
        """
        return self._encode(self._prepared(x, "vectors"))

    def score(self, xq: NDArray[Any], codes: NDArray[Any]) -> Floats:
        """Scores float32 [Q, n] of codes uint8 [n, code_size] for queries float32 [Q, width]; higher is nearer.

        Raises:
            UsageError, DataError, MismatchError: as for :meth:`encode`, or codes of another form.
        """
        prepared, codes = self._prepared(xq, "queries"), np.asarray(codes)
        if codes.ndim != 2 or codes.dtype != np.uint8 or codes.shape[1] != self.code_size:
            raise MismatchError(
                f"{self.name}: codes of {codes.dtype} {list(codes.shape)}, but this coder's are uint8 [n, {self.code_size}]: "
                "use codes from this coder"
            )
        return self._score(prepared, np.ascontiguousarray(codes))

    def score_tables(self, xq: NDArray[Any]) -> Floats | None:
        """Scores of codewords per query, float32 [Q, M, K], if the score of a code is a sum of M entries; else None."""
        return None

    def index(self) -> Any:
        """A trained, empty ``faiss.Index`` (or ``faiss.IndexBinary``) for codes, which ranks queries :meth:`search_input` as
        :meth:`score` does.

        Raises:
            DataError: not fitted yet, or Faiss has no such index that it can write.
        """
        raise DataError(f"{self.name}: Faiss has no index of such codes")

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """Input to search :meth:`index` with, for query vectors float32 [Q, width]; by default the vectors themselves."""
        return self._inputs(xq, "queries")

    def settings(self) -> dict[str, Any]:
        """What determines the codes of a training set, JSON-serialisable; the rest is fixed (see ``revision`` in the registry)."""
        return {"method": self.name, "bits": self.bits, "seed": self.seed}

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        raise UsageError(f"{self.name}: its codewords are fixed: there is nothing to fit")

    @abstractmethod
    def _encode(self, x: Floats) -> Codes: ...

    @abstractmethod
    def _score(self, xq: Floats, codes: Codes) -> Floats: ...

    def _require_fit(self) -> None:
        if not self.width:
            raise UsageError(f"{self.name} is not fitted: call fit first")

    def _inputs(self, x: NDArray[Any], what: str) -> Floats:
        """``x`` as float32 [n, width]."""
        self._require_fit()
        x = self._checked(x, what)
        if x.shape[1] != self.width:
            raise MismatchError(
                f"{self.name}: {what} have width {x.shape[1]}, but it was fitted to width {self.width}: "
                "use vectors from the same extractor"
            )
        return x

    def _prepared(self, x: NDArray[Any], what: str) -> Floats:
        """As :meth:`_inputs`, and scaled."""
        x = self._inputs(x, what)
        return scaled_rows(x) if self.unit else x

    def _checked(self, x: NDArray[Any], what: str) -> Floats:
        """``x`` as float32 [n, width], C-contiguous and finite; else raises :class:`DataError`."""
        x = np.asarray(x)
        if x.ndim != 2 or x.dtype.kind not in "fiu":
            raise DataError(
                f"{self.name}: {what} are {x.dtype} {list(x.shape)}: numbers [n, width] are needed"
            )
        # A large float64 overflows to infinity here and is rejected below.
        with np.errstate(over="ignore"):
            x = np.ascontiguousarray(x, dtype=np.float32)
        bad = np.flatnonzero(~np.isfinite(x).all(axis=1))
        if bad.size:
            raise DataError(
                f"{self.name}: {what}: {rows_that(bad, 'hold')} NaN or infinity: repair such rows or leave them out"
            )
        return x

    def _labelled(self, labels: Labels | None) -> tuple[NDArray[np.int64], Labels]:
        """Rows with labels, ascending, and the labels. Raises DataError: there are none."""
        if labels is None or not labels.has().any():
            raise DataError(
                f"{self.name}: it learns from labels alone, but no item has one: label some items, or leave the method out"
            )
        return np.flatnonzero(labels.has()), labels


def scaled_rows(x: Floats) -> Floats:
    """Rows of ``x`` scaled to unit length, float32; zero rows stay zero."""
    # float64: a float32 square overflows at 1e19 and vanishes at 1e-23.
    norms = np.sqrt(np.einsum("nd,nd->n", x, x, dtype=np.float64))
    norms[norms == 0] = 1
    scaled: Floats = np.divide(x, norms[:, None], out=np.empty_like(x), casting="same_kind")
    return scaled

"""Interface of all indexes."""

from __future__ import annotations

from typing import Any, Protocol

from ..codes.checks import Floats
from .filters import Filter
from .ranges import LIMIT


class Index(Protocol):
    """An index in memory, over a file or on a device. Results for the same file are the same everywhere."""

    @property
    def ntotal(self) -> int:
        """Number of items."""

    @property
    def width(self) -> int:
        """D, the width of queries."""

    @property
    def codebooks(self) -> Floats:
        """float32 [M, K, d]."""

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the codebooks."""

    def search(
        self,
        xq: Any,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
    ) -> tuple[Any, Any]:
        """The ``k`` best items of every query [Q, M*d]: scores float32 [Q, k], descending, and ids int64 [Q, k].

        Ties are in ascending order of id; missing results have score -inf and id -1. Results are arrays, or on a device tensors if
        ``xq`` is a tensor.
        """

    def range_search(
        self,
        xq: Any,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """All items with at least ``min_score``; as in Faiss: lims int64 [Q + 1], scores float32, ids int64."""

    def describe(self) -> str:
        """One-line description of the search."""

    def close(self) -> None:
        """Release resources; searches then fail."""

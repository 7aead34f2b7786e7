"""What every index is to those who search it, wherever its codes lie."""

from __future__ import annotations

from typing import Any, Protocol

from ..codes.checks import Floats
from .filters import Filter
from .plan import Plan
from .ranges import LIMIT


class Index(Protocol):
    """An index in memory, over a file or on a device. The same file gives the same answer wherever it is searched."""

    @property
    def ntotal(self) -> int:
        """Items."""

    @property
    def width(self) -> int:
        """D of the queries."""

    @property
    def codebooks(self) -> Floats:
        """float32 [M, K, d]."""

    @property
    def fingerprint(self) -> str:
        """Of the codebooks."""

    @property
    def plan(self) -> Plan:
        """How it searches."""

    @property
    def lists(self) -> int:
        """How many lists; 0 where there are none."""

    def search(
        self,
        xq: Any,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
    ) -> tuple[Any, Any]:
        """The ``k`` best items of every query [Q, M*d]: scores float32 [Q, k], larger first, and ids int64 [Q, k].

        Equal scores come by ascending id; a place without an item has score -inf and id -1. Arrays give arrays, and on a
        device tensors give tensors.
        """

    def range_search(
        self,
        xq: Any,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """All items that score at least ``min_score``: as Faiss lims int64 [Q + 1], scores float32, ids int64."""

    def describe(self) -> str:
        """How it searches, in one line."""

    def close(self) -> None:
        """Give back what it holds open; nothing can be searched then."""

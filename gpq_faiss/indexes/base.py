"""What all indexes on the CPU share: the checks of a search, and what its results are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Self

from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..store import codebooks_fingerprint
from .filters import Filter
from .ranges import LIMIT, check_limit, check_min_score, joined
from .threads import check_k, check_nprobe, check_threads


class Index(ABC):
    """An index in memory, over a file, or over shards. Results for the same items are the same everywhere, bit for bit.

    Scores are those of :func:`..codes.scores.score_codes`, ties ordered by id, for any batch and number of threads. Searching is
    thread-safe.

    Args:
        codebooks: float32 [M, K, d], checked.
        model_fingerprint: of the model, if known.

    Attributes:
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if known.
        width: M * d, the width of queries.
    """

    def __init__(self, codebooks: Floats, model_fingerprint: str | None) -> None:
        self.codebooks = codebooks
        self.M, self.K, self.d = (int(size) for size in codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = model_fingerprint

    @property
    @abstractmethod
    def ntotal(self) -> int:
        """Number of items."""

    @abstractmethod
    def describe(self) -> str:
        """One-line description of the search."""

    @abstractmethod
    def close(self) -> None:
        """Release files and processes, also at the end of a ``with`` block; searches then fail where there were any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id."""

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, in bounded memory.

        Args:
            xq: [Q, M*d]; positive factors do not change the order.
            k: 1..ntotal.
            nprobe: visit only this many lists (of each shard), those of the best bounds, and more if these have fewer than ``k`` codes;
                the result is then exact among their items, and :meth:`bound` says what others can score. Default: the exact result.
            where: search only items that pass this filter; missing results have score -inf and id -1.
            floor: float32 [Q], items with lower scores may be left out: the k-th scores of a search elsewhere, which results have to beat.
            threads: for this call (default: Faiss' setting).

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``where`` out of range.
            DataError: queries empty, of another width, NaN or infinite; an invalid filter; a damaged, missing or modified file.
        """
        k = check_k(k, self.ntotal)
        check_nprobe(nprobe)
        check_threads(threads)
        return self._search(self._queries(xq), k, nprobe, where, floor, threads)

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """What an item can score at most that a search for ``k`` with ``nprobe`` does not visit: float32 [Q], -inf if there is none.

        So a result of which the last score is above it is exact. Raises as :meth:`search`.
        """
        k = check_k(k, self.ntotal)
        check_nprobe(nprobe)
        return self._bound(self._queries(xq), k, nprobe)

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with an exact score of at least ``min_score``.

        Returns:
            As in Faiss: lims int64 [Q + 1], D float32, I int64; results of query i are at lims[i]:lims[i + 1], best first, ties in
            ascending order of id.

        Raises:
            UsageError: ``min_score`` is NaN, or ``limit``, ``threads`` or ``where`` out of range.
            DataError: more than ``limit`` results, or as :meth:`search`.
        """
        min_score = check_min_score(min_score)
        check_limit(limit)
        check_threads(threads)
        found = self._range_search(self._queries(xq), min_score, where, limit, threads)
        return joined(found, min_score, limit)

    def _queries(self, xq: ArrayLike) -> Floats:
        return check_vectors(xq, self.width, what="queries", allow_empty=False)

    # With checked arguments -------------------------------------------------------------------------------------------

    @abstractmethod
    def _search(
        self,
        xq: Floats,
        k: int,
        nprobe: int | None,
        where: Filter | None,
        floor: Floats | None,
        threads: int | None,
    ) -> tuple[Floats, Ids]: ...

    @abstractmethod
    def _bound(self, xq: Floats, k: int, nprobe: int) -> Floats: ...

    @abstractmethod
    def _range_search(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> Iterator[tuple[Floats, Ids]]:
        """Scores and ids of each query."""

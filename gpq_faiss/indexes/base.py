"""What all indexes on the CPU share: the checks of a search, and what its results are."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TypedDict, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_count, check_vectors
from ..codes.scores import score_tables
from ..errors import DataError, UsageError
from ..files import Closing
from ..store.header import codebooks_fingerprint
from .filters import Filter
from .kernels import squared_size

LIMIT = 10_000_000
"""Default limit of results of a range search, at about 50 bytes each: too low a score is an error before half a gigabyte."""
_LARGE = 1e30  # |q|^2 from which scores might overflow
_FLOAT32 = np.dtype(np.float32)
_MOST = float(np.finfo(np.float32).max)


def check_min_score(min_score: float) -> float:
    """The minimum score, clipped to the range of float32. Raises UsageError: not a number, or NaN."""
    number = isinstance(min_score, int | float | np.integer | np.floating) and type(min_score) is not bool
    if not number or np.isnan(min_score):
        shown = "NaN" if number else repr(min_score)
        raise UsageError(f"a range search needs a number as the minimum score, not {shown}")
    value = float(min_score)
    return value if abs(value) <= _MOST else math.copysign(math.inf, value)


def too_many(min_score: float, limit: int) -> DataError:
    """The error for more than ``limit`` results."""
    return DataError(
        f"a range search from {min_score:g} has more than {limit:,} results: raise the minimum score or the limit"
    )


def check_arguments(
    k: int | None, ntotal: int, *, nprobe: int | None = None, limit: int = LIMIT, threads: int | None = None
) -> None:
    """Check what searches have in common. Raises UsageError, naming the argument."""
    if k is not None and not (type(k) is int and 1 <= k <= ntotal):
        check_count(k, f"an index of {ntotal:,} items: k", most=ntotal)
    if nprobe is not None:
        check_count(nprobe, "nprobe")
    if threads is not None:
        check_count(threads, "threads")
    if limit != LIMIT:
        check_count(limit, "limit", least=0, most=1 << 62)


class Limits(TypedDict):
    """See :meth:`Index.search`."""

    nprobe: int | None
    where: Filter | None
    floor: Floats | None
    threads: int | None


class Index(Closing, ABC):
    """An index in memory, over a file, or over shards. Results for the same items are the same everywhere, bit for bit.

    Scores are those of :mod:`..codes.scores`, ties ordered by id, for any batch and number of threads. Searching is
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
        check_arguments(k, self.ntotal, nprobe=nprobe, threads=threads)
        return self._search(self._queries(xq), k, nprobe=nprobe, where=where, floor=floor, threads=threads)

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """What an item can score at most that a search for ``k`` with ``nprobe`` does not visit: float32 [Q], -inf if there is none.

        So a result of which the last score is above it is exact. Raises as :meth:`search`.
        """
        check_arguments(k, self.ntotal, nprobe=nprobe)
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
        check_arguments(None, self.ntotal, limit=limit, threads=threads)
        D, found, counts = [np.empty(0, np.float32)], [np.empty(0, np.int64)], [0]
        for scores, ids in self._range_search(self._queries(xq), min_score, where, limit, threads):
            D.append(scores)
            found.append(ids)
            counts.append(len(ids))
            if sum(counts) > limit:
                raise too_many(min_score, limit)
        return np.cumsum(counts, dtype=np.int64), np.concatenate(D), np.concatenate(found)

    def _queries(self, xq: ArrayLike) -> Floats:
        """Checked queries in the one form for which the loops are compiled."""
        x = xq  # in most calls in that form already
        if not (
            type(x) is np.ndarray
            and x.dtype == _FLOAT32
            and x.ndim == 2
            and x.shape[1] == self.width
            and len(x)
        ):
            x = check_vectors(xq, self.width, what="queries", allow_empty=False, finite=False)
        if not x.flags.carray:
            x = np.require(x, requirements=["A", "W"])
        if not squared_size(x) < _LARGE:  # NumPy's takes two microseconds longer
            score_tables(x, self.codebooks)  # raises the error
        return x

    # With checked arguments -------------------------------------------------------------------------------------------

    @abstractmethod
    def _search(self, xq: Floats, k: int, **limits: Unpack[Limits]) -> tuple[Floats, Ids]: ...

    @abstractmethod
    def _bound(self, xq: Floats, k: int, nprobe: int) -> Floats: ...

    @abstractmethod
    def _range_search(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> Iterator[tuple[Floats, Ids]]:
        """Scores and ids of each query."""

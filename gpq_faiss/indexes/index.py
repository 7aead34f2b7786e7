"""An index of product codes: exact search, in memory or over a mapped file.

An index consists of segments. The first one holds the items of its file. Changes that a service has
made since the file was written are in further, small segments, and a mask over each older segment
hides the items that were removed or replaced (:meth:`Index.apply`). Results equal those of a single
segment with all items bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Self

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..codes.bits import check_codes
from ..codes.checks import (
    Codes,
    Floats,
    Ids,
    check_codebooks,
    check_count,
    check_unique,
    check_vectors,
)
from ..codes.encode import decode
from ..errors import DataError, MismatchError, UsageError
from ..faissio.convert import check_kind, to_faiss
from ..files import Closing
from ..ids import whole_numbers
from ..store.changes import Change
from ..store.items import ChangedItems, ItemSource
from ..store.rows import codebooks_fingerprint
from .lists import InvertedLists

RANGE_LIMIT = 10_000_000
"""Default limit of the results of a range search, which take about 50 bytes each."""
_BLOCK = 1 << 20
_LARGEST = float(np.finfo(np.float32).max)

IdList = ArrayLike | set[int] | frozenset[int] | range


class Index(Closing):
    """Exact search of product codes, made by :meth:`build` or :func:`.opening.open_index`.

    Scores are those of :mod:`..codes.scores`. Ties are in ascending order of id, for any batch and
    any number of threads. Searching is thread-safe. An index is immutable: methods that add or
    remove items return a new index, which shares the arrays of this one.

    Attributes:
        segments: the inverted lists.
        codebooks: float32 [M, K, d].
        fingerprint: fingerprint of the codebooks.
        d: width of a query, M times the width of a codeword.
        metric_type: ``faiss.METRIC_INNER_PRODUCT``, or ``faiss.METRIC_L2`` of foreign indexes.
        ntotal: number of items.
        items: names and labels of the items; None if they are not known.
        contained: identity of a changes file, and number of the last of its changes that the index
            file contains; None if it contains none.
    """

    def __init__(
        self,
        segments: tuple[InvertedLists, ...],
        codebooks: Floats,
        *,
        metric_type: int = faiss.METRIC_INNER_PRODUCT,
        items: ItemSource | None = None,
        contained: tuple[str, int] | None = None,
    ) -> None:
        """Use :meth:`build` or :func:`.opening.open_index`; arguments are not checked here."""
        self.segments = segments
        self.codebooks = codebooks
        self.metric_type = metric_type
        self.items = items
        self.contained = contained
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.M, self.K = int(codebooks.shape[0]), int(codebooks.shape[1])
        self.d = self.M * int(codebooks.shape[2])
        self.ntotal = sum(segment.ntotal for segment in segments)

    @classmethod
    def build(
        cls,
        codes: ArrayLike,
        codebooks: ArrayLike,
        ids: IdList | None = None,
        *,
        metric_type: int = faiss.METRIC_INNER_PRODUCT,
    ) -> Self:
        """Build an index in memory.

        Args:
            codes: uint8 [n, code_size], packed as in Faiss.
            codebooks: float32 [M, K, d].
            ids: int64 [n], each once and not -1 (default: row numbers).

        Raises:
            DataError: codes, codebooks or ids are invalid, or there are no codes.

        Examples:
            >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)  # 2 codebooks of 16
            >>> index = Index.build(np.array([[0x00], [0x21], [0x21]], np.uint8), Z, ids=[7, 8, 9])
            >>> scores, ids = index.search(np.arange(32.0)[None], 3)  # ties by ascending id
            >>> scores.tolist(), ids.tolist()
            ([[19.0, 19.0, 16.0]], [[8, 9, 7]])
            >>> index.search(np.arange(32.0)[None], 1, deny=[8])[1].tolist()
            [[9]]
        """
        Z = check_codebooks(codebooks, unit=False).copy()  # the caller may modify the array
        packed = check_codes(codes, *Z.shape[:2])
        item_ids = np.arange(len(packed)) if ids is None else whole_numbers(ids, "ids")
        if len(item_ids) != len(packed):
            raise DataError(
                f"ids: {len(item_ids):,}, expected {len(packed):,} whole numbers, one for each item"
            )
        check_unique(item_ids, "ids")
        lists = InvertedLists.build(packed, item_ids, Z, is_l2=metric_type == faiss.METRIC_L2)
        return cls((lists,), Z, metric_type=metric_type)

    # Searching ----------------------------------------------------------------------------------

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        allow: IdList | None = None,
        deny: IdList | None = None,
        threads: int | None = None,
    ) -> tuple[Floats, Ids]:
        """Find the k best items of every query.

        Args:
            xq: [Q, d]; of an inner-product index, positive factors do not change the order.
            k: 1 to ntotal.
            allow: search only the items with these ids; unknown ids are ignored.
            deny: leave out the items with these ids; give one of the two.
            threads: number of threads (default: Faiss' setting).

        Returns:
            D float32 [Q, k], scores in descending order, or squared distances in ascending order if
            the metric is L2; I int64 [Q, k], ties in ascending order of id. Where fewer than k
            items pass, ids are -1, and scores -inf (distances inf).

        Raises:
            UsageError: ``k`` or ``threads`` is out of range, or both lists of ids are given.
            DataError: queries are empty, of another width, or not finite; invalid ids.
        """
        check_search(k, self.ntotal, threads)
        queries = self._queries(xq)
        results = [
            segment.search(queries, k, threads=threads) for segment in self._filtered(allow, deny)
        ]
        D, ids = results[0]
        if len(results) > 1:
            D, ids = (np.hstack(arrays) for arrays in zip(*results, strict=True))
            order = np.lexsort((ids, -D), axis=1)[:, :k]
            D, ids = np.take_along_axis(D, order, axis=1), np.take_along_axis(ids, order, axis=1)
        return self._to_metric(D), ids

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        allow: IdList | None = None,
        deny: IdList | None = None,
        limit: int = RANGE_LIMIT,
    ) -> tuple[Ids, Floats, Ids]:
        """Find all items with a score of at least ``min_score``.

        With the metric L2, ``min_score`` is the largest distance.

        Returns:
            lims int64 [Q + 1], D float32, I int64, as in Faiss: the results of query i are at
            ``lims[i]:lims[i + 1]``, best first, ties in ascending order of id.

        Raises:
            UsageError: ``min_score`` is not a number, or ``limit`` is out of range.
            DataError: there are more than ``limit`` results; or see :meth:`search`.
        """
        min_score = check_min_score(min_score, limit)
        queries = self._queries(xq)
        thresholds = np.full(len(queries), self._to_metric(min_score), np.float64)
        results = [
            segment.range_search(queries, thresholds, limit)
            for segment in self._filtered(allow, deny)
        ]
        rows, scores, ids = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
        if len(rows) > limit:
            raise too_many(min_score, limit)
        order = np.lexsort((ids, -scores, rows))
        rows = rows[order]
        lims = np.searchsorted(rows, np.arange(len(queries) + 1))
        return lims, self._to_metric(scores[order]), ids[order]

    def _queries(self, xq: ArrayLike) -> Floats:
        """Check queries, and return them in the form for which the loops are compiled."""
        x: Any = xq  # most calls pass this form already
        is_float32 = type(x) is np.ndarray and x.dtype == np.float32
        if not is_float32 or x.ndim != 2 or x.shape[1] != self.d or not len(x):
            x = check_vectors(xq, self.d, name="queries", allow_empty=False, finite=False)
        queries: Floats = x if x.flags.carray else np.require(x, requirements=["C", "A", "W"])
        return queries

    def _to_metric(self, scores: Any) -> Any:
        """Convert scores to squared distances if the metric is L2, or distances to scores."""
        return 0 - scores if self.metric_type == faiss.METRIC_L2 else scores

    def _filtered(self, allow: IdList | None, deny: IdList | None) -> tuple[InvertedLists, ...]:
        """Return the segments with the items that a search may return."""
        listed = check_filter(allow, deny)
        if listed is None:
            return self.segments
        return tuple(segment.filtered(listed, deny=allow is None) for segment in self.segments)

    # Items --------------------------------------------------------------------------------------

    def blocks(self, size: int = _BLOCK) -> Iterator[tuple[Codes, Ids]]:
        """Yield codes uint8 [n, code_size] and ids int64 [n] of up to ``size`` items at a time."""
        for segment in self.segments:
            yield from segment.blocks(size)

    def items_by_id(self) -> tuple[Codes, Ids]:
        """Return all items by ascending id: codes uint8 [ntotal, code_size], ids int64 [ntotal]."""
        codes, ids = (np.concatenate(arrays) for arrays in zip(*self.blocks(), strict=True))
        order = np.argsort(ids, kind="stable")
        return codes[order], ids[order]

    @property
    def ids(self) -> Ids:
        """Ids of all items in ascending order, int64 [ntotal]."""
        return np.sort(np.concatenate([ids for _, ids in self.blocks()]))

    def code_of(self, number: int) -> Codes | None:
        """Return the code of an item, uint8 [code_size]; None if no item has this id."""
        for segment in self.segments:
            positions = segment.positions(np.array([number], np.int64))
            if positions[0] >= 0:
                return segment.codes(positions).reshape(-1)
        return None

    def reconstruct(self, number: int) -> Floats:
        """Return the decoded vector of an item, float32 [d].

        Raises:
            DataError: no item has this id.
        """
        code = self.code_of(number)
        if code is None:
            raise DataError(f"no item has the id {number}")
        return decode(code[None], self.codebooks).reshape(-1)

    def apply(self, changes: Mapping[int, Change]) -> Self:
        """Return an index with these changes, by id; a change without a code removes the item.

        Names and labels are shared: those of this index change, too.
        """
        if not changes:
            return self
        index = self.remove_ids(list(changes))
        added = {
            number: change.code for number, change in changes.items() if change.code is not None
        }
        segments = [*index.segments]
        build = partial(
            InvertedLists.build, Z=self.codebooks, is_l2=self.metric_type == faiss.METRIC_L2
        )
        if added:
            codes = np.frombuffer(b"".join(added.values()), np.uint8).reshape(len(added), -1)
            segments.append(build(codes, np.array([*added], np.int64)))
        # Segments of changes of about the same size are merged, so that there are few.
        while len(segments) > 2 and segments[-2].ntotal < 2 * segments[-1].ntotal:
            blocks = [block for segment in segments[-2:] for block in segment.blocks(_BLOCK)]
            codes, ids = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
            segments[-2:] = [build(codes, ids)]
        return index._with(tuple(segments), ChangedItems(self.items, changes))

    def _with(self, segments: tuple[InvertedLists, ...], items: ItemSource | None) -> Self:
        """Return an index with these segments and names, and all else as in this one."""
        return type(self)(
            segments,
            self.codebooks,
            metric_type=self.metric_type,
            items=items,
            contained=self.contained,
        )

    def remove_ids(self, ids: IdList) -> Self:
        """Return an index without the items with these ids; unknown ids are ignored."""
        removed = whole_numbers(ids, "ids")
        segments = tuple(segment.filtered(removed, deny=True) for segment in self.segments)
        return self._with(segments, self.items)

    def merge(self, index: Index) -> Self:
        """Return an index with the items of both.

        Raises:
            MismatchError: their codebooks or metrics differ.
            DataError: an id is in both.
        """
        if (self.fingerprint, self.metric_type) != (index.fingerprint, index.metric_type):
            raise MismatchError("indexes with different codebooks cannot be merged")
        check_unique(np.concatenate([self.ids, index.ids]), "merged indexes")
        return self._with((*self.segments, *index.segments), None)

    def to_faiss(self, kind: str = "flat") -> Any:
        """Return a plain Faiss index of the items (:data:`..faissio.convert.KINDS`).

        Raises:
            UsageError: the codebooks do not allow this kind, or the metric is L2.
        """
        if self.metric_type == faiss.METRIC_L2:
            raise UsageError("an index of the metric L2 is not written: it is another program's")
        codes, ids = (np.concatenate(arrays) for arrays in zip(*self.blocks(), strict=True))
        return to_faiss(codes, ids, self.codebooks, check_kind(kind, self.M, self.K))

    def close(self) -> None:
        """Close the file with names and labels."""
        if self.items is not None:
            self.items.close()


def check_search(k: int, ntotal: int, threads: int | None) -> None:
    """Check the arguments of a search. Raises UsageError: one of them is out of range."""
    if not (type(k) is int and 1 <= k <= ntotal):  # most calls need no message
        check_count(k, f"an index of {ntotal:,} items: k", maximum=ntotal)
    if threads is not None:
        check_count(threads, "threads")


def check_filter(allow: IdList | None, deny: IdList | None) -> Ids | None:
    """Return the ids that a search allows or denies, int64 [n]; None if it does neither.

    Raises:
        UsageError: both lists of ids are given.
        DataError: invalid ids.
    """
    if allow is not None and deny is not None:
        raise UsageError("allow and deny exclude each other: give one list of ids")
    if allow is not None:
        return whole_numbers(allow, "allow")
    return None if deny is None else whole_numbers(deny, "deny")


def check_min_score(min_score: float, limit: int) -> float:
    """Return a minimum score within the range of float32.

    Raises:
        UsageError: the score is not a number, or ``limit`` is out of range.
    """
    is_number = isinstance(min_score, int | float | np.integer | np.floating)
    if not is_number or isinstance(min_score, bool) or math.isnan(min_score):
        raise UsageError(f"a range search needs a number as its minimum score, not {min_score!r}")
    check_count(limit, "limit", minimum=0, maximum=1 << 62)
    score = float(min_score)
    return score if abs(score) <= _LARGEST else math.copysign(math.inf, score)


def too_many(min_score: float, limit: int) -> DataError:
    """Return the error of a range search with more than ``limit`` results."""
    return DataError(
        f"a range search from {min_score:g} has more than {limit:,} results: "
        "change the minimum score or the limit"
    )

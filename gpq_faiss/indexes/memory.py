"""An index in memory: built, searched, filtered, changed, written to a file.

Results are bit-equal for any batch and number of threads: scores of :func:`..codes.scores.score_codes`, ties ordered by id.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from ..codes.bits import check_codes
from ..codes.checks import (
    MAX_CODEBOOKS,
    Codes,
    Floats,
    Ids,
    check_codebooks,
    check_vectors,
)
from ..errors import DataError, MismatchError, UsageError
from ..faissio.io import Beside, check_index_output, save_index
from ..faissio.storage import Form, check_form, faiss_index
from ..store import codebooks_fingerprint
from .codeword_lists import CodewordLists
from .filters import Filter, id_list, mask_of
from .items import Items
from .ranges import LIMIT, check_limit, check_min_score, joined
from .threads import BLOCK, check_block, check_k, check_nprobe, check_threads

_FEW = 32  # a filter that passes less than this part of the items has lists of its own


class MemoryIndex:
    """An index in memory, created by :meth:`build` and :func:`.opening.open_in_memory`.

    Searching is thread-safe; modification (:meth:`add`, :meth:`remove`, :meth:`merge`) is not.

    Attributes:
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if known.
        width: D of the queries.
    """

    def __init__(self, items: Items, codebooks: Floats, *, model_fingerprint: str | None = None) -> None:
        """Use :meth:`build` instead; arguments are not checked here."""
        self.codebooks = codebooks
        self.M, self.K, self.d = (int(n) for n in codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = model_fingerprint
        self._items = items
        self._lists: CodewordLists | None = None
        self._lock = threading.Lock()

    @classmethod
    def build(
        cls,
        codes: ArrayLike,
        codebooks: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        model_fingerprint: str | None = None,
    ) -> MemoryIndex:
        """Build an index from packed codes uint8 [n, code_size] and codebooks float32 [M, K, d]. Arrays are copied.

        Args:
            ids: int64 [n], unique, not -1 (default: row numbers).

        Raises:
            UsageError: more than 256 codebooks.
            DataError: invalid codes, codebooks or ids, or no codes.

        Examples:
            >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)  # 2 codebooks of 16 codewords in 16 dimensions
            >>> index = MemoryIndex.build(np.array([[0x00], [0x21], [0x21]], np.uint8), Z, ids=[7, 8, 9])
            >>> scores, ids = index.search(np.arange(32.0)[None], 3)  # ties in ascending order of id
            >>> scores.tolist(), ids.tolist()
            ([[19.0, 19.0, 16.0]], [[8, 9, 7]])
        """
        Z = check_codebooks(codebooks).copy()  # a copy, so that the caller may modify the array
        if len(Z) > MAX_CODEBOOKS:
            raise UsageError(f"{len(Z)} codebooks: at most {MAX_CODEBOOKS}")
        items = Items.make(codes, ids, int(Z.shape[0]), int(Z.shape[1])).apart_from(codes, ids)
        if not len(items):
            raise DataError("no codes: an index needs at least one item")
        return cls(items, Z, model_fingerprint=model_fingerprint)

    # What it holds ---------------------------------------------------------------------------------------------------

    @property
    def ntotal(self) -> int:
        """Number of items."""
        return len(self._items)

    @property
    def ids(self) -> Ids:
        """int64 [ntotal], ascending."""
        return self._items.ids

    @property
    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest id."""
        first, last = self._items.ids_at(np.array([0, self.ntotal - 1])).tolist()
        return first, last

    @property
    def codes(self) -> Codes:
        """uint8 [ntotal, code_size] in the order of :attr:`ids`; do not modify."""
        return self._items.codes

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id."""
        at = int(self._items.positions_of(np.array([item], np.int64))[0])
        return None if at < 0 else self.codes[at]

    @property
    def lists(self) -> CodewordLists:
        """The codes in lists, made on first use."""
        with self._lock:
            if self._lists is None:
                self._lists = CodewordLists(self.codes, self.codebooks)
            return self._lists

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{self.ntotal:,} items in memory"

    def close(self) -> None:
        """No-op: there is no open file."""

    # Searching -------------------------------------------------------------------------------------------------------

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
        block: int = BLOCK,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, in bounded memory.

        Args:
            xq: [Q, M*d]; positive factors do not change the order.
            k: 1..ntotal.
            nprobe: visit only this many lists, those of the best bounds, and more if these have fewer than ``k`` codes; the result is
                then exact among their items, and :meth:`bound` says what others can score. Default: the exact result.
            where: search only items that pass this filter; missing results have score -inf and id -1.
            floor: float32 [Q], items with lower scores may be left out: the k-th scores of a search elsewhere, which results have to beat.
            threads: for this call (default: Faiss' setting).
            block: maximum queries per block.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads``, ``block`` or ``where`` out of range.
            DataError: queries empty, of another width, NaN or infinite; an invalid filter.
        """
        k = check_k(k, self.ntotal)
        check_nprobe(nprobe)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        D, rows = self._searched(queries, k, where, nprobe, floor, threads)
        return D, self._items.ids_at(rows)

    def _searched(
        self,
        xq: Floats,
        k: int,
        where: Filter | None,
        nprobe: int | None,
        floor: Floats | None,
        threads: int | None,
    ) -> tuple[Floats, Ids]:
        """Scores and row numbers of a search."""
        if where is None:
            return self.lists.search(xq, k, nprobe=nprobe, floor=floor, threads=threads)
        mask = mask_of(where, self._items)
        rows = np.flatnonzero(mask)
        if nprobe is not None or not 0 < len(rows) * _FEW <= self.ntotal:
            return self.lists.search(xq, k, mask=mask, nprobe=nprobe, floor=floor, threads=threads)
        D, found = CodewordLists(self.codes[rows], self.codebooks).search(xq, k, floor=floor, threads=threads)
        there = found >= 0
        found[there] = rows[found[there]]
        return D, found

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """What an item can score at most that a search for ``k`` with ``nprobe`` does not visit: float32 [Q], -inf if there is none.

        So a result of which the last score is above it is exact. Raises as :meth:`search`.
        """
        k = check_k(k, self.ntotal)
        check_nprobe(nprobe)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        return self.lists.bound(queries, k, nprobe)

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
            UsageError: ``min_score`` is NaN, or ``threads`` or ``where`` out of range.
            DataError: invalid queries or filter; more than ``limit`` results.
        """
        min_score = check_min_score(min_score)
        check_limit(limit)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        check_threads(threads)
        mask = None if where is None else mask_of(where, self._items)
        lims, D, rows = joined(
            (self.lists.range_search(query, min_score, limit, mask=mask) for query in queries),
            min_score,
            limit,
        )
        return lims, D, self._items.ids_at(rows)

    # Changing --------------------------------------------------------------------------------------------------------

    def add(self, codes: ArrayLike, ids: ArrayLike | None = None) -> None:
        """Append items (default ids: consecutive after the largest, at least 0).

        Raises:
            DataError: invalid codes or ids, or an id in use; the index is then unchanged.
        """
        codes = check_codes(codes, self.M, self.K)
        n = len(codes)
        if ids is None:
            first = max(0, int(self._items.ids[-1]) + 1)
            if first + n > 1 << 63:
                raise DataError("there is no larger id left: give the ids of the items to add")
            ids = np.arange(first, first + n, dtype=np.int64)
        more = Items.make(codes, ids, self.M, self.K)
        self._replace(self._items.join(more, what="items to add"))

    def remove(self, ids: ArrayLike, *, missing: Literal["error", "ignore"] = "error") -> int:
        """Remove items; returns their number.

        Raises:
            DataError: not a list of ids, an unknown id (unless ignored), or no item left; the index is then unchanged.
        """
        wanted = np.unique(id_list(ids, "ids to remove"))
        at = self._items.positions_of(wanted)
        if missing == "error" and bool((at < 0).any()):
            raise DataError(f"id {int(wanted[at < 0][0])} is not in the index: nothing was removed")
        at = at[at >= 0]
        if len(at) == self.ntotal:
            raise DataError("this would remove every item: an index needs at least one")
        if len(at):
            mask = np.ones(self.ntotal, np.bool_)
            mask[at] = False
            self._replace(self._items.keep(mask))
        return len(at)

    def merge(self, *others: MemoryIndex) -> None:
        """Add the items of other indexes in memory, which are not modified.

        Raises:
            MismatchError: other codebooks.
            DataError: a repeated id; the index is then unchanged.
        """
        items = self._items
        for number, other in enumerate(others, 1):
            if not isinstance(other, MemoryIndex):
                raise UsageError(
                    f"shard {number} is a {type(other).__name__}: only indexes in memory can be merged; merge files by gpq index A B"
                )
            if other.fingerprint != self.fingerprint:
                raise MismatchError(
                    f"shard {number} has codebooks {other.fingerprint}, not {self.fingerprint}: encode it with this model"
                )
            items = items.join(other._items, what=f"shard {number}")
        self._replace(items)

    def _replace(self, items: Items) -> None:
        with self._lock:
            self._items, self._lists = items, None

    # Files -----------------------------------------------------------------------------------------------------------

    def to_faiss(self, form: str = "flat") -> Any:
        """A plain Faiss index of the same items, in the order of their ids (``ivf``: within lists).

        Args:
            form: a name in :data:`..faissio.storage.FORMS`.

        Raises:
            UsageError: not possible with these codebooks.
        """
        checked: Form = check_form(form, self.M, self.K)
        return faiss_index(self.codes, self._items.own, self.codebooks, checked)

    def save(
        self,
        path: str | Path,
        form: str = "flat",
        *,
        overwrite: bool = False,
        extra: Mapping[str, Any] | None = None,
        beside: Beside | None = None,
    ) -> Path:
        """Write a plain Faiss index (:meth:`to_faiss`), its sidecar with ``extra``, and the files ``beside`` it.

        Raises:
            OutputExistsError: a file exists and ``overwrite`` is false.
            DataError: writing fails.
            UsageError: see :meth:`to_faiss`.
        """
        return save_index(
            self.to_faiss(form),
            check_index_output(path, overwrite=overwrite),
            model_fingerprint=self.model_fingerprint,
            overwrite=True,
            extra=dict(extra or {}),
            beside=beside,
        )

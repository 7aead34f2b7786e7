"""An index in memory: built, searched, filtered, written to a file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
from numpy.typing import ArrayLike

from ..codes.bits import check_codes
from ..codes.checks import MAX_CODEBOOKS, Codes, Floats, Ids, check_codebooks, check_unique
from ..errors import DataError, UsageError
from ..faissio.io import save_index
from ..faissio.storage import Form, check_form, faiss_index
from .base import Index, Limits
from .codeword_lists import CodewordLists
from .filters import Filter, id_list, mask_of
from .items import Items

_FEW = 32  # a filter that passes less than this part of the items has lists of its own


class MemoryIndex(Index):
    """An index in memory, created by :meth:`build` and :func:`.opening.open_in_memory`. It does not change.

    Attributes:
        items: codes and ids; do not modify.
    """

    def __init__(self, items: Items, codebooks: Floats, *, model_fingerprint: str | None = None) -> None:
        """Use :meth:`build` instead; arguments are not checked here."""
        super().__init__(codebooks, model_fingerprint)
        self.items = items
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
        packed, own = check_codes(codes, *Z.shape[:2]).copy(), None
        if ids is not None:
            own = id_list(ids, "ids").copy()
            if len(own) != len(packed):
                raise DataError(f"ids: {len(own):,}, expected {len(packed):,} whole numbers, one per item")
            check_unique(own, "ids")
        items = Items.ordered(packed, own)
        if not len(items):
            raise DataError("no codes: an index needs at least one item")
        return cls(items, Z, model_fingerprint=model_fingerprint)

    # What it holds ---------------------------------------------------------------------------------------------------

    @property
    def ntotal(self) -> int:
        return len(self.items)

    @property
    def ids(self) -> Ids:
        """int64 [ntotal], ascending."""
        return self.items.ids

    @property
    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest id."""
        first, last = self.items.ids_at(np.array([0, self.ntotal - 1])).tolist()
        return first, last

    @property
    def codes(self) -> Codes:
        """uint8 [ntotal, code_size] in the order of :attr:`ids`; do not modify."""
        return self.items.codes

    def code_of(self, item: int) -> Codes | None:
        at = int(self.items.positions_of(np.array([item], np.int64))[0])
        return None if at < 0 else self.codes[at]

    @property
    def lists(self) -> CodewordLists:
        """The codes in lists, made on first use."""
        lists = self._lists
        if lists is None:
            with self._lock:
                lists = self._lists = self._lists or CodewordLists(self.codes, self.codebooks)
        return lists

    def describe(self) -> str:
        return f"{self.ntotal:,} items in memory"

    # Searching -------------------------------------------------------------------------------------------------------

    def _search(self, xq: Floats, k: int, **limits: Unpack[Limits]) -> tuple[Floats, Ids]:
        lists, mask, rows, where = self.lists, None, None, limits["where"]
        if where is not None:
            mask = mask_of(where, self.items)
            passing = np.flatnonzero(mask)
            if limits["nprobe"] is None and 0 < len(passing) * _FEW <= self.ntotal:
                lists, mask, rows = CodewordLists(self.codes[passing], self.codebooks), None, passing
        nprobe, floor, threads = limits["nprobe"], limits["floor"], limits["threads"]
        D, found = lists.search(xq, k, mask=mask, nprobe=nprobe, floor=floor, threads=threads)
        if rows is not None:
            found[found >= 0] = rows[found[found >= 0]]
        return D, self.items.ids_at(found)

    def _bound(self, xq: Floats, k: int, nprobe: int) -> Floats:
        return self.lists.bound(xq, k, nprobe)

    def _range_search(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> Iterator[tuple[Floats, Ids]]:
        mask = None if where is None else mask_of(where, self.items)
        for query in xq:
            D, found = self.lists.range_search(query, min_score, limit, mask=mask)
            yield D, self.items.ids_at(found)

    # Files -----------------------------------------------------------------------------------------------------------

    def to_faiss(self, form: str = "flat") -> Any:
        """A plain Faiss index of the same items, in the order of their ids (``ivf``: within lists).

        Args:
            form: a name in :data:`..faissio.storage.FORMS`.

        Raises:
            UsageError: not possible with these codebooks.
        """
        checked: Form = check_form(form, self.M, self.K)
        return faiss_index(self.codes, self.items.own, self.codebooks, checked)

    def save(self, path: str | Path, form: str = "flat", *, overwrite: bool = False) -> Path:
        """Write a plain Faiss index (:meth:`to_faiss`) and its sidecar.

        Raises:
            OutputExistsError: a file exists and ``overwrite`` is false.
            DataError: writing fails.
            UsageError: see :meth:`to_faiss`.
        """
        return save_index(
            self.to_faiss(form), path, model_fingerprint=self.model_fingerprint, overwrite=overwrite
        )

"""An index over a file that stays on disk.

Opening reads only the header. A file of kind ``ivf`` is searched by its lists: those that are visited are read and kept, as far as the
memory budget allows. Of other files all codes are read for every block of queries, or once where they fit in the budget;
:func:`gpq_faiss.stages.index.index` converts them.
Results equal those of a search in memory.

A search checks before and after whether the file was modified, and fails if so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Unpack

import numpy as np

from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError, UsageError
from ..faissio.header import Header
from ..faissio.io import open_header
from ..faissio.storage import OLD_LISTS
from ..inputs import parse_bytes
from .base import Index, Limits
from .filters import Filter
from .stored import StoredLists

MEMORY = "1GB"
_IDS = 1 << 20  # ids per block of a scan
_LEAST = 1 << 18  # bytes: some thousand rows at a time


class FileIndex(Index):
    """An index file searched in place within ``memory`` bytes, created by :func:`open_file`. The file must not change.

    Raises:
        DataError: an empty index.
        UsageError: too small a budget.
    """

    def __init__(self, header: Header, model_fingerprint: str | None, memory: int) -> None:
        super().__init__(header.codebooks, model_fingerprint)
        path = header.source.path
        if header.form in OLD_LISTS:
            raise DataError(
                f"{path} has lists of an earlier version, which are not searched in place: convert it (gpq index --kind ivf)"
            )
        if header.n == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        if memory < _LEAST:
            raise UsageError(f"a memory budget of {memory:,} bytes is too small: at least {_LEAST:,}")
        self._header, self._source = header, header.source
        self.lists = StoredLists(header, memory)

    # What it is -------------------------------------------------------------------------------------------------------

    @property
    def ntotal(self) -> int:
        return self._header.n

    def describe(self) -> str:
        lists = f", {self.lists.lists:,} lists" if self.lists.lists > 1 else ""
        return f"{self.ntotal:,} items in place{lists}"

    def close(self) -> None:
        """Close the file, also at the end of a ``with`` block; searches then fail."""
        self._source.close()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context of a search that checks that the file is unchanged.

        Raises:
            UsageError: after :meth:`close`.
            DataError: the file was written to since it was opened.
        """
        self._source.check()
        try:
            yield
        except Exception:
            self._source.check()  # a modified file may cause any error
            raise
        self._source.check()  # not where its caller stops: the file may be closed by then

    # Searching --------------------------------------------------------------------------------------------------------

    def _search(self, xq: Floats, k: int, **limits: Unpack[Limits]) -> tuple[Floats, Ids]:
        with self.unchanged():
            return self.lists.search(xq, k, **limits)

    def _bound(self, xq: Floats, k: int, nprobe: int) -> Floats:
        return self.lists.bound(xq, k, nprobe)

    def _range_search(
        self, xq: Floats, min_score: float, where: Filter | None, limit: int, threads: int | None
    ) -> Iterator[tuple[Floats, Ids]]:
        with self.unchanged():
            for query in xq:
                yield self.lists.range_search(query, min_score, limit, where=where)

    # Rows -------------------------------------------------------------------------------------------------------------

    def id_blocks(self, rows: int = _IDS) -> Iterator[Ids]:
        """Yield the ids of all items in file order, int64, in blocks of ``rows``."""
        with self.unchanged():
            for span in self._header.spans(rows):
                yield self._header.ids(*span)

    def code_of(self, item: int) -> Codes | None:
        """As in every index; reads all ids."""
        with self.unchanged():
            for number, start, stop in self._header.spans(_IDS):
                at = np.flatnonzero(self._header.ids(number, start, stop) == item)
                if len(at):
                    row = start + int(at[0])
                    return np.asarray(self._header.codes(number, row, row + 1)[0])
        return None


def open_file(path: str | Path, memory: str | int = MEMORY) -> FileIndex:
    """Open an index file without reading its rows.

    Sizes and fingerprints are checked, but not its SHA-256, which would read the whole file.

    Args:
        memory: budget of a search: bytes, or ``"2GB"``.

    Raises:
        DataError: missing, damaged, empty, or not searchable in place.
        MismatchError: its sidecar belongs to another file.
        UsageError: an invalid budget.
    """
    budget = parse_bytes(memory)
    header, stated = open_header(path, verify=False)
    try:
        return FileIndex(header, stated.get("model_fingerprint"), budget)
    except BaseException:
        header.source.close()
        raise

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
from typing import Self

import numpy as np
from numpy.typing import ArrayLike

from ..codes.checks import Codes, Floats, Ids, check_vectors
from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import Header, read_header
from ..faissio.io import read_sidecar, sidecar_path
from ..faissio.source import IndexFile
from ..inputs import parse_bytes
from ..store import codebooks_fingerprint
from .filters import Filter
from .ranges import LIMIT, check_limit, check_min_score, joined
from .stored import StoredLists
from .threads import check_block, check_k, check_nprobe, check_threads

MEMORY = "1GB"
_IDS = 1 << 20  # ids per block of a scan
_MANY = 16  # queries from which a block of codes is sorted into lists
_ROW = 64  # bytes per row of a block: codes, ids, columns, scores
_LEAST_ROWS, _MOST_ROWS = 4096, 1 << 20


class FileIndex:
    """An index file searched in place, created by :func:`open_file`. The file must not change.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if the sidecar names it.
        memory: budget of a search in bytes.

    Raises:
        DataError: an empty index.
        MismatchError: the sidecar belongs to another file.
        UsageError: too small a budget.
    """

    def __init__(self, source: IndexFile, header: Header, memory: int) -> None:
        path, stated = source.path, read_sidecar(source.path)
        self.path = path
        self.memory = memory
        self.ntotal = header.n
        self.codebooks = header.codebooks
        self.M, self.K, self.d = (int(size) for size in header.codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(header.codebooks)
        self.model_fingerprint: str | None = None
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != source.size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was intended"
                )
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")
        least = _LEAST_ROWS * _ROW
        if memory < least:
            raise UsageError(f"a memory budget of {memory:,} bytes is too small: at least {least:,}")
        self._header, self._source = header, source
        self.lists = StoredLists(source, header, memory)

    # What it is -------------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One-line description of the search."""
        lists = f", {self.lists.lists:,} lists" if self.lists.lists > 1 else ""
        return f"{self.ntotal:,} items in place{lists}"

    def close(self) -> None:
        """Close the file, also at the end of a ``with`` block; searches then fail."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Context of a search that checks that the file is unchanged.

        Raises:
            UsageError: after :meth:`close`.
            DataError: the file was written to since it was opened.
        """
        self._check_file()
        try:
            yield
        except Exception:
            self._check_file()  # a modified file may cause any error
            raise
        self._check_file()

    def _check_file(self) -> None:
        if self._source.closed:
            raise UsageError(f"{self.path} was closed: open it again")
        self._source.check()

    # Searching --------------------------------------------------------------------------------------------------------

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        floor: Floats | None = None,
        threads: int | None = None,
        block: int = 1024,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query.

        Args:
            xq: [Q, M*d].
            k: 1..ntotal; if fewer items pass a filter, rows are padded with score -inf and id -1.
            nprobe, where, floor, threads: as :meth:`.memory.MemoryIndex.search`.
            block: queries per block; a list is read once per block.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads`` or ``block`` out of range.
            DataError: invalid queries, filter or codes; the file was modified since it was opened.
        """
        self._check_file()
        k = check_k(k, self.ntotal)
        check_block(block)
        check_nprobe(nprobe)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        parts = [slice(at, at + block) for at in range(0, len(queries), block)]
        with self.unchanged():
            results = [
                self.lists.search(
                    queries[part],
                    k,
                    where=where,
                    nprobe=nprobe,
                    floor=None if floor is None else floor[part],
                    threads=threads,
                )
                for part in parts
            ]
        return np.concatenate([D for D, _ in results]), np.concatenate([ids for _, ids in results])

    def bound(self, xq: ArrayLike, k: int, nprobe: int) -> Floats:
        """As :meth:`.memory.MemoryIndex.bound`."""
        k = check_k(k, self.ntotal)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        check_nprobe(nprobe)
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
        """All items with a score of at least ``min_score``, as :meth:`.memory.MemoryIndex.range_search`.

        Results are in memory, in addition to the budget.

        Raises:
            UsageError, DataError: see there and :meth:`search`.
        """
        self._check_file()
        min_score = check_min_score(min_score)
        check_limit(limit)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        check_threads(threads)
        with self.unchanged():
            return joined(
                (self.lists.range_search(query, min_score, limit, where=where) for query in queries),
                min_score,
                limit,
            )

    # Rows -------------------------------------------------------------------------------------------------------------

    def id_blocks(self, rows: int = _IDS) -> Iterator[Ids]:
        """Yield the ids of all items in file order, int64, in blocks of ``rows``."""
        with self.unchanged():
            for number, start, stop in self.spans(rows):
                yield self._header.ids(self._source, number, start, stop)

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id. Scans all ids."""
        with self.unchanged():
            for number, start, stop in self.spans(_IDS):
                at = np.flatnonzero(self._header.ids(self._source, number, start, stop) == item)
                if len(at):
                    row = start + int(at[0])
                    return np.asarray(self.codes(number, row, row + 1)[0])
        return None

    def spans(self, rows: int) -> Iterator[tuple[int, int, int]]:
        """Yield list number, first row and end of blocks of all rows; without lists there is one."""
        for number in np.flatnonzero(self._header.sizes).tolist():
            size = int(self._header.sizes[number])
            for start in range(0, size, rows):
                yield number, start, min(size, start + rows)

    def codes(self, number: int, start: int, stop: int) -> Codes:
        """Codes of rows ``start:stop`` of a list, uint8 [n, code_size]."""
        return self._header.codes(self._source, number, start, stop)


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
    source = IndexFile(path)
    try:
        return FileIndex(source, read_header(source), budget)
    except BaseException:
        source.close()
        raise

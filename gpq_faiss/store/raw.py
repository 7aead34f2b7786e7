"""Rows of unfinished work: a raw file for each column, complete up to the last recorded row whatever kills the process."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import LOCK, Closing, open_own, read_json, write_at, write_json

RECORD = "progress.json"
"""The file that makes the folder worth keeping."""
_log = logging.getLogger(__name__)


class RawRows(Closing):
    """Columns of rows in a folder of unfinished work, which the caller has locked (:func:`..files.unfinished`).

    Args:
        folder: the folder; if nothing in it can be continued, its files are removed.
        columns: column -> type of a row.
        identity: of the work: what was recorded for another cannot be continued.

    Attributes:
        rows: number of rows so far; after construction, those recorded.
        state: the caller's JSON, recorded with exactly these rows.

    Raises:
        OSError: as all methods: the disk is full, say.
    """

    def __init__(self, folder: Path, columns: Mapping[str, np.dtype[Any]], identity: str) -> None:
        self.folder, self._columns, self._identity = folder, dict(columns), identity
        recorded = self._recorded() if (folder / RECORD).exists() else None
        if recorded is None:
            for left in folder.iterdir():
                if left.name != LOCK and not left.is_dir():
                    left.unlink()
        self.rows, self.state = self._committed = recorded or (0, {})
        self._files = {
            name: open_own(folder / f"{name}.raw", keep=self.rows * row.itemsize)
            for name, row in self._columns.items()
        }

    def _recorded(self) -> tuple[int, dict[str, Any]] | None:
        with contextlib.suppress(DataError, KeyError, TypeError, ValueError, OSError):
            found = read_json(self.folder / RECORD, "the progress of unfinished work")
            rows, state = int(found["rows"]), dict(found["state"])
            sizes = {n: (self.folder / f"{n}.raw").stat().st_size for n in self._columns}
            whole = all(sizes[name] >= rows * row.itemsize for name, row in self._columns.items())
            if whole and found["identity"] == self._identity:
                _log.info("%s: resuming after row %s", self.folder, f"{rows:,}")
                return rows, state
        _log.warning("%s is discarded: of another model, data set or version, or damaged", self.folder)
        return None

    def extend(self, blocks: Mapping[str, NDArray[Any]], state: Mapping[str, Any] | None = None) -> None:
        """Append rows, an array of the column's type for each column; they are not recorded yet."""
        for name, row in self._columns.items():
            data = np.ascontiguousarray(blocks[name], row.base)
            write_at(self._files[name], self.rows * row.itemsize, data.reshape(-1))
        # One statement, so that an interrupt finds rows and state either both before or both after.
        self.rows, self.state = self.rows + len(data), self.state if state is None else dict(state)

    def commit(self) -> None:
        """Record the rows so far, which makes them survive a crash."""
        if self._files and self._committed != (self.rows, self.state):
            for file in self._files.values():
                os.fsync(file.fileno())
            record = {"identity": self._identity, "rows": self.rows, "state": self.state}
            write_json(self.folder / RECORD, record)
            self._committed = self.rows, self.state

    def blocks(self, name: str, size: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Start and rows of a column, at most ``size`` at a time. Raises DataError: it is shorter than what was recorded."""
        file, row = self._files[name], self._columns[name]
        for start in range(0, self.rows, size):
            n = min(size, self.rows - start)
            file.seek(start * row.itemsize)
            block = np.fromfile(file, row, n)
            if len(block) < n:
                path = self.folder / f"{name}.raw"
                raise DataError(f"{path} ends after {start + len(block):,} rows: it is truncated")
            yield start, block

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
        self._files = {}

    def remove(self) -> None:
        """Close and remove the files."""
        self.close()
        for name in (RECORD, *(f"{name}.raw" for name in self._columns)):
            (self.folder / name).unlink(missing_ok=True)

"""Resumable writing of features and codes files: rows of unfinished work are a raw file for each column, complete up to the last recorded
row whatever kills the process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import (
    LOCK,
    Closing,
    check_output,
    open_own,
    read_json,
    unfinished,
    versions,
    write_at,
    write_json,
    writing,
)
from ..progress import stage
from .hdf5 import PACKED, Sink, Texts, new_hdf5, write_texts
from .header import FORMAT_VERSION, Header

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


COMMIT_SECONDS = 5.0
"""Time between commits: a forced write per batch would keep a GPU waiting."""
_CHUNK_BYTES = 1 << 20

_NONE = np.empty(0, np.int64)


class RowWriter(RawRows):
    """Writes a file row by row, and can resume an interrupted run; a context manager.

    Unfinished rows with the same header are continued; others are discarded.

    Rows are safe once synced and recorded, which happens every :data:`COMMIT_SECONDS`, on leaving the context (also by an error or
    Ctrl-C) and in :meth:`finish`; ``kill -9`` loses later rows. Memory does not grow with N.

    Args:
        overwrite: replace an existing ``path`` (in :meth:`finish`, not before).

    Raises:
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be written, the disk is full, or another process is writing the file.
    """

    def __init__(self, path: str | Path, header: Header, *, overwrite: bool = False) -> None:
        self.path, self.header = check_output(path, overwrite=overwrite), header
        folder = self.path.with_name(f".{self.path.name}.partial")
        with writing(self.path), contextlib.ExitStack() as stack:
            stack.enter_context(unfinished(folder, self.path, keep=(RECORD,)))
            super().__init__(folder, header.columns(), header.fingerprint())
            stack.callback(super().close)
            self._held = stack.pop_all()
        self._last_commit = time.monotonic()

    def append(
        self,
        values: NDArray[Any],
        ids: NDArray[np.int64],
        labels: NDArray[np.uint8] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Append n rows.

        Args:
            values: float32 or uint8 [n, width], depending on the kind.
            ids: int64 [n].
            labels: uint8 [n, ceil(C/8)], packed; needed where the header has class names.
            state: small JSON (source position, count of bad items), recorded together with these rows.

        Raises:
            DataError: wrong shape or type; unusable values, see :meth:`.header.Header.check_rows`; or the disk is full.
        """
        given: dict[str, Any] = {self.header.kind: values, "ids": ids, "labels": labels}
        blocks = {name: np.asarray(given[name]) for name in self.header.columns()}
        for name, row in self.header.columns().items():
            found = blocks[name]
            if found.dtype != row.base or found.shape[1:] != row.shape:
                needed = f"{row.base} {(len(values), *row.shape)} is needed"
                raise DataError(f"{self.path}: {name}: {found.dtype} {found.shape}, {needed}")
        self.header.check_rows(blocks, f"{self.path} (from row {self.rows:,})")
        with writing(self.path):
            self.extend(blocks, state)
        if time.monotonic() - self._last_commit >= COMMIT_SECONDS:
            self.commit()

    def commit(self) -> None:
        """Make the rows so far survive a crash. Raises DataError: the disk is full."""
        with writing(self.path):
            super().commit()
        self._last_commit = time.monotonic()

    def finish(self, items: NDArray[np.int64] = _NONE, texts: Mapping[str, Texts] | None = None) -> Path:
        """Write the file atomically, with text columns, and remove the partial file.

        Args:
            items: ids of all items, of which rows may be a part; of repeated ones the first counts.
            texts: name -> texts of these items.

        Raises:
            DataError: no rows, or the disk is full (the partial file is kept).
        """
        if self.rows == 0:
            raise DataError(f"{self.path}: there is no row to write")
        self.commit()
        with new_hdf5(self.path, self.folder) as (h5, sink):
            self._fill(h5, sink, items, texts or {})
        self.close()
        return self.path

    def _fill(self, h5: Any, sink: Sink, items: NDArray[np.int64], texts: Mapping[str, Texts]) -> None:
        header = self.header
        for name, row in header.columns().items():
            chunk = min(self.rows, max(1, _CHUNK_BYTES // row.itemsize))
            shape, chunks = (self.rows, *row.shape), (chunk, *row.shape)
            column = h5.create_dataset(name, shape, row.base, chunks=chunks, **PACKED)
            with stage(f"writing {name}", self.rows, "row") as filling:
                for start, block in self.blocks(name, chunk):
                    column[start : start + len(block)] = block
                    sink.check()
                    filling.advance(len(block))
        order = np.argsort(items, kind="stable")
        known = items[order]
        for name in sorted(texts):
            ids = self.blocks("ids", _CHUNK_BYTES // 8)
            write_texts(h5, name, (texts[name][order[np.searchsorted(known, block)]] for _, block in ids))
        h5.create_dataset("codebooks", data=header.codebooks.astype("<f4"), fletcher32=True, chunks=True)
        attributes: dict[str, Any] = {
            "kind": header.kind,
            "format_version": FORMAT_VERSION,
            **header.fingerprints(),
            "header_fingerprint": header.fingerprint(),
            "class_names": json.dumps(header.class_names),
            "multi_label": header.multi_label,
            "extra": json.dumps(header.extra),
            "versions": json.dumps(versions("numpy", "h5py")),
            "ntotal": self.rows,
            "complete": True,
        }
        for name, value in attributes.items():
            # Strings of fixed length lie in the object header, under its checksum; those of variable length in
            # a heap without one, where a flipped bit sent HDF5 2.0 into an endless loop.
            h5.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value

    def close(self) -> None:
        """Close the files, which are kept for a later run unless empty."""
        self._held.close()

    def __exit__(self, kind: object = None, *_: object) -> None:
        try:
            if self.rows:
                # After an error the partial is worth keeping, but a second error must not hide the first.
                with contextlib.suppress(*([DataError] if kind else [])):
                    self.commit()
        finally:
            self.close()

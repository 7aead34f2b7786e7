"""Resumable writing of features and codes files."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..errors import DataError
from ..files import LOCK, check_output, open_own, read_json, unfinished, write_error, write_json
from ..progress import stage
from .hdf5 import PACKED, Sink, new_hdf5, write_at
from .header import FORMAT_VERSION, Header
from .texts import Texts, write_texts

_CHUNK_BYTES = 1 << 20
_PROGRESS = "progress.json"

_log = logging.getLogger(__name__)


class RowWriter:
    """Writes a file row by row, and can resume an interrupted run; a context manager.

    Rows are safe once synced and recorded, which happens every ``commit_seconds``, on leaving the context (also by an error or
    Ctrl-C) and in :meth:`finish`; ``kill -9`` loses later rows. Memory does not grow with N.

    Args:
        path: the output file.
        header: its metadata.
        overwrite: replace an existing ``path`` (in :meth:`finish`, not before).
        resume: continue a partial file with the same header; others are discarded.
        commit_seconds: time between commits; 0 commits every block.

    Attributes:
        rows: number of rows so far; after construction, where to resume.
        state: the caller's JSON recorded with exactly these rows.

    Raises:
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be written, the disk is full, or another process is writing the file.
    """

    def __init__(
        self,
        path: str | Path,
        header: Header,
        *,
        overwrite: bool = False,
        resume: bool = True,
        commit_seconds: float = 1.0,
    ) -> None:
        self.path = check_output(path, overwrite=overwrite)
        self.header = header
        self.rows = 0
        self.state: dict[str, Any] = {}
        self.partial = self.path.with_name(f".{self.path.name}.partial")
        self._commit_seconds = commit_seconds
        self._files: dict[str, IO[bytes]] = {}
        self._held = contextlib.ExitStack()
        try:
            with self._writing():
                self._held.enter_context(unfinished(self.partial, self.path, keep=(_PROGRESS,)))
                self._restore(resume)
        except BaseException:
            self.close()
            raise
        self._committed = self.rows, self.state
        self._last_commit = time.monotonic()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self.path, error) from error

    def _restore(self, resume: bool) -> None:
        progress = self._progress() if resume else None
        if progress is not None:
            self.rows, self.state = progress
        else:
            for entry in self.partial.iterdir():
                if entry.name != LOCK and (entry.is_symlink() or not entry.is_dir()):
                    entry.unlink()
        for name, row in self.header.columns().items():
            file = open_own(self.partial / f"{name}.raw", "r+b" if progress else "w+b", buffering=0)
            self._files[name] = file
            file.truncate(self.rows * row.itemsize)

    def _progress(self) -> tuple[int, dict[str, Any]] | None:
        """Rows and state of a partial file with the same header, or None."""
        file = self.partial / _PROGRESS
        if not file.exists():
            return None
        with contextlib.suppress(DataError, KeyError, TypeError, ValueError, OSError):
            progress = read_json(file, "the progress of a partial file")
            rows, state = int(progress["rows"]), dict(progress["state"])
            columns = self.header.columns().items()
            whole = all(
                (self.partial / f"{n}.raw").stat().st_size >= rows * row.itemsize for n, row in columns
            )
            if whole and progress["header"] == self.header.fingerprint():
                _log.info("%s: resuming after row %s", self.path, f"{rows:,}")
                return rows, state
        _log.warning(
            "%s: its partial file is discarded: of another model, data set or version, or damaged", self.path
        )
        return None

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
            labels: uint8 [n, ceil(C/8)], packed; needed exactly where the header has class names.
            state: small JSON (source position, count of bad items), recorded together with these rows.

        Raises:
            DataError: wrong shape or type, unusable values, or the disk is full.
        """
        given: dict[str, NDArray[Any] | None] = {self.header.kind: values, "ids": ids, "labels": labels}
        columns = self.header.columns()
        if labels is not None and "labels" not in columns:
            raise DataError(f"{self.path}: labels are given but the header has no class names")
        blocks: dict[str, NDArray[Any]] = {}
        for name, row in columns.items():
            array, shape = given[name], (len(values), *row.shape)
            if array is None or array.dtype != row.base or array.shape != shape:
                got = "missing" if array is None else f"{array.dtype} {list(array.shape)}"
                raise DataError(f"{self.path}: {name} are {got}, {row.base} {list(shape)} is needed")
            blocks[name] = np.ascontiguousarray(array, dtype=row.base)
        self.header.check_rows(blocks, f"{self.path} (from row {self.rows:,})")
        with self._writing():
            for name, block in blocks.items():
                write_at(self._files[name], self.rows * columns[name].itemsize, block.reshape(-1))
        # One statement, so that an interrupt finds rows and state either both before or both after.
        self.rows, self.state = self.rows + len(values), self.state if state is None else dict(state)
        if time.monotonic() - self._last_commit >= self._commit_seconds:
            self.commit()

    def commit(self) -> None:
        """Make the rows so far survive a crash.

        Raises:
            DataError: the disk is full.
        """
        if self._committed != (self.rows, self.state):
            with self._writing():
                for file in self._files.values():
                    os.fsync(file.fileno())
            progress = {"header": self.header.fingerprint(), "rows": self.rows, "state": self.state}
            write_json(self.partial / _PROGRESS, progress)
            self._committed = self.rows, self.state
        self._last_commit = time.monotonic()

    def finish(self, texts: Mapping[str, Callable[[NDArray[np.int64]], Texts]] | None = None) -> Path:
        """Write the file atomically, and remove the partial file.

        Args:
            texts: column name -> function from ids [n] to texts.

        Raises:
            DataError: no rows, or the disk is full (the partial file is kept).
        """
        if self.rows == 0:
            raise DataError(f"{self.path}: there is no row to write")
        self.commit()
        with new_hdf5(self.path, self.partial) as (h5, sink):
            self._fill(h5, sink, texts or {})
        self.close()
        return self.path

    def _fill(self, h5: Any, sink: Sink, texts: Mapping[str, Callable[[NDArray[np.int64]], Texts]]) -> None:
        header = self.header
        columns = header.columns()
        for name, row in columns.items():
            chunk = min(self.rows, max(1, _CHUNK_BYTES // row.itemsize))
            shape, chunks = (self.rows, *row.shape), (chunk, *row.shape)
            column = h5.create_dataset(name, shape, row.base, chunks=chunks, **PACKED)
            with stage(f"writing {name}", self.rows, "row") as writing:
                for start, block in self._blocks(name, row, chunk):
                    column[start : start + len(block)] = block
                    sink.check()
                    writing.advance(len(block))
        for name in sorted(texts):
            ids = self._blocks("ids", columns["ids"], _CHUNK_BYTES // 8)
            write_texts(h5, name, (texts[name](block) for _, block in ids))
        h5.create_dataset("codebooks", data=header.codebooks.astype("<f4"), fletcher32=True, chunks=True)
        versions = {"gpq_faiss": __version__, "numpy": np.__version__, "h5py": h5py.__version__}
        attributes: dict[str, Any] = {
            "kind": header.kind,
            "format_version": FORMAT_VERSION,
            "model_fingerprint": header.model_fingerprint,
            "codebooks_fingerprint": header.codebooks_fingerprint,
            "data_fingerprint": header.data_fingerprint,
            "header_fingerprint": header.fingerprint(),
            "class_names": json.dumps(header.class_names),
            "multi_label": header.multi_label,
            "extra": json.dumps(header.extra),
            "versions": json.dumps(versions),
            "ntotal": self.rows,
            "complete": True,
        }
        for name, value in attributes.items():
            # Strings of fixed length lie in the object header, under its checksum; those of variable length in
            # a heap without one, where a flipped bit sent HDF5 2.0 into an endless loop.
            h5.attrs[name] = np.bytes_(value.encode()) if isinstance(value, str) else value

    def _blocks(self, name: str, row: np.dtype[Any], size: int) -> Iterator[tuple[int, NDArray[Any]]]:
        """Start and rows of a column, at most ``size`` at a time. Raises DataError: it is shorter than what was recorded."""
        file = self._files[name]
        for start in range(0, self.rows, size):
            n = min(size, self.rows - start)
            file.seek(start * row.itemsize)
            block = np.fromfile(file, row, n)
            if len(block) < n:
                raise DataError(f"{file.name} ends after {start + len(block):,} rows: it is truncated")
            yield start, block

    def close(self) -> None:
        """Close the partial file, which is kept for a later run unless empty."""
        for file in self._files.values():
            file.close()
        self._files = {}
        self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._files and self.rows:
                # After an error the partial is worth keeping, but a second error must not hide the first.
                with contextlib.suppress(*([DataError] if kind else [])):
                    self.commit()
        finally:
            self.close()

"""Random access to an index: an open file, or a serialised Faiss index in memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_file


def to_bytes(index: Any) -> NDArray[np.uint8]:
    """The bytes of the file of a Faiss index (also a binary one). Raises DataError: Faiss cannot write an index of this kind."""
    write = faiss.serialize_index_binary if isinstance(index, faiss.IndexBinary) else faiss.serialize_index
    try:
        return np.asarray(write(index), np.uint8)
    except (RuntimeError, TypeError) as error:
        raise DataError(f"Faiss cannot write an index of the kind {type(index).__name__}") from error


INDEX_FILE = "an index file (gpq index, or faiss.write_index)"


class IndexFile:
    """An open index file for reading in place. Thread-safe.

    The file is read, not memory-mapped: truncation of a mapped file would kill the process (SIGBUS). Replacing the file under its name has
    no effect here.

    Attributes:
        path: its name at opening, for errors.
        size: its size at opening in bytes.

    Raises:
        DataError: missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path: Path | str = Path(path)
        check_file(Path(path), INDEX_FILE)
        try:
            self._file: BinaryIO = Path(path).open("rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None
        self._mark = self._state()
        self.size = self._mark[0]

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raises DataError: the file was modified since it was opened, by size and modification time."""
        if self._state() != self._mark:
            raise self._changed()

    def _changed(self) -> DataError:
        return DataError(f"{self.path} was changed while it was in use: open it again")

    def fill(self, held: Any, at: int) -> None:
        """Fill the array ``held`` from byte ``at`` on. Raises DataError: the file was truncated, or reading fails."""
        data = memoryview(held).cast("B")
        try:
            while data:
                got = os.preadv(self._file.fileno(), [data], at)
                if not got:
                    raise self._changed()
                data, at = data[got:], at + got
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None

    def read(self, dtype: Any, at: int, count: int) -> NDArray[Any]:
        """``count`` numbers from byte ``at`` on. Raises as :meth:`fill`."""
        held = np.empty(count, dtype)
        if count:
            self.fill(held, at)
        return held

    def bytes(self, at: int, count: int) -> bytes:
        """A few bytes, fewer at the end of the file."""
        try:
            return os.pread(self._file.fileno(), count, at)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._file.closed

    def close(self) -> None:
        """Close the file, also at the end of a ``with`` block."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SerialisedIndex(IndexFile):
    """A Faiss index in memory as the bytes of its file. Raises DataError: Faiss cannot write it."""

    def __init__(self, index: Any, what: str) -> None:
        self.path = what
        self._data = to_bytes(index)
        self.size = len(self._data)

    def fill(self, held: Any, at: int) -> None:
        """As of a file."""
        held.view(np.uint8)[:] = self._data[at : at + held.nbytes]

    def bytes(self, at: int, count: int) -> bytes:
        """As of a file."""
        return self._data[at : at + count].tobytes()

"""Random access to an open index file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_file
from .io import INDEX_FILE


class IndexFile:
    """An open index file for reading in place. Thread-safe.

    The file is read, not memory-mapped: truncation of a mapped file would kill the process (SIGBUS). Replacing the file under its name has
    no effect here.

    Attributes:
        path: its name at opening.
        size: its size at opening in bytes.

    Raises:
        DataError: missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_file(self.path, INDEX_FILE)
        try:
            self._file: BinaryIO = self.path.open("rb")
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

    def from_start(self) -> BinaryIO:
        """The file from its first byte on; for one thread."""
        self._file.seek(0)
        return self._file

    def fill(self, held: Any, at: int) -> None:
        """Fill the array ``held`` from byte ``at`` on.

        Raises:
            DataError: the file was truncated, or reading fails.
        """
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

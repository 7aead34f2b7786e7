"""An index file that is open, read in place at any byte."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Ids
from ..errors import DataError

_SCATTERED = 4096  # bytes that are read in the time that one more call takes


class IndexFile:
    """An index file that is open, to be read in place, also from several threads.

    Everything is copied out of the file and nothing mapped into memory: where a file becomes shorter, reading its map ends
    the process (SIGBUS). What replaces the file under its name is another file, which changes nothing here.

    Attributes:
        path: its name when it was opened.
        size: its bytes then.

    Raises:
        DataError: missing or unreadable.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            why = "not found" if isinstance(error, FileNotFoundError) else error.strerror
            raise DataError(
                f"{path}: {why}: an index file is needed (gpq index, or faiss.write_index)"
            ) from None
        self._mark = self._state()
        self.size = self._mark[0]

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._file.fileno())
        return status.st_size, status.st_mtime_ns

    def check(self) -> None:
        """Raises DataError: the file was written to since it was opened, as far as its size and time of change tell."""
        if self._state() != self._mark:
            raise self._changed()

    def _changed(self) -> DataError:
        return DataError(f"{self.path} was changed while it was in use: open it again")

    def from_start(self) -> BinaryIO:
        """The file, to be read from its first byte on; by one thread."""
        self._file.seek(0)
        return self._file

    def fill(self, held: Any, at: int) -> None:
        """Read from byte ``at`` on until the array ``held`` is full.

        Raises:
            DataError: the file has become shorter, or the disk refuses.
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

    def read_some(self, dtype: Any, at: int, count: int, positions: Ids) -> NDArray[Any]:
        """Of the ``count`` numbers from byte ``at`` on, those at ``positions``. Raises as :meth:`fill`."""
        wanted, where = np.unique(positions, return_inverse=True)
        each = np.dtype(dtype).itemsize
        if len(wanted) * _SCATTERED >= count * each:
            return self.read(dtype, at, count)[positions]
        held = np.empty(len(wanted), dtype)
        for i, position in enumerate(wanted.tolist()):
            self.fill(held[i : i + 1], at + position * each)
        return held[where.reshape(positions.shape)]

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._file.closed

    def close(self) -> None:
        """Give it back; nothing can be read then. Also at the end of a ``with``."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

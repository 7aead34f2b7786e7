"""File I/O below HDF5 with safe error handling."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Any

from ..errors import DataError


def write_at(file: IO[bytes], offset: int, data: Any) -> None:
    """Write all of ``data``, with several calls if needed."""
    view = memoryview(data).cast("B")
    file.seek(offset)
    while view.nbytes:
        written = file.write(view)
        view = view[written:]


def read_exactly(file: IO[bytes], size: int, name: str) -> bytearray:
    """``size`` bytes from the current position.

    Raises:
        DataError: the file ends before.
    """
    data = bytearray(size)
    view = memoryview(data)
    while view.nbytes:
        got = file.readinto(view)  # type: ignore[attr-defined]
        if not got:
            raise DataError(f"{name} ends {len(view):,} bytes early: it is truncated")
        view = view[got:]
    return data


class Sink:
    """A file for h5py's file-object driver that never fails *inside* HDF5.

    After a failed write HDF5 can neither close the file nor leave the process without a crash (measured:
    segmentation fault with HDF5 2.0 on a full disk). So the first error is stored in :attr:`error`, later
    writes are dropped, HDF5 closes normally, and the caller raises the error afterwards. The same for Ctrl-C.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._at = 0
        self._end = 0
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the stored error, if any."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._file.close()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        try:
            if self.error is None:
                write_at(self._file, self._at, data)
        except BaseException as error:
            self.error = error
        self._at += size
        self._end = max(self._end, self._at)
        return size

    def read(self, size: int) -> bytes:
        buffer = bytearray(size)
        self.readinto(buffer)
        return bytes(buffer)

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        got = 0
        try:
            self._file.seek(self._at)
            while got < len(view) and (n := self._file.readinto(view[got:])):
                got += n
        except BaseException as error:
            self.error = self.error or error
        view[got:] = bytes(len(view) - got)
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        try:
            if self.error is None:
                self._file.truncate(self._end)
        except BaseException as error:
            self.error = error
        return self._end

    def flush(self) -> None:
        """No-op: nothing is buffered; :func:`~gpq_faiss.files.atomic_path` syncs the file."""

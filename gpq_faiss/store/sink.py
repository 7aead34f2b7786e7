"""Writing HDF5 files atomically, with safe error handling."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import h5py

from ..files import atomic_path
from .header import CACHE_BYTES

PACKED = {"compression": "gzip", "compression_opts": 1, "shuffle": True, "fletcher32": True}
"""Options of compressed datasets."""


@contextlib.contextmanager
def new_hdf5(path: Path, done_with: Path | None = None) -> Iterator[tuple[Any, Sink]]:
    """Context with a new HDF5 file, which becomes ``path`` at its end, and its :class:`Sink`.

    Args:
        done_with: a folder of unfinished work, removed together with that (:func:`..files.atomic_path`).

    Raises:
        DataError: the file cannot be written.
    """
    with atomic_path(path, done_with=done_with) as temporary:
        sink = Sink(temporary)
        try:
            with h5py.File(sink, "w", libver=("v110", "v110"), rdcc_nbytes=CACHE_BYTES) as h5:
                yield h5, sink
            sink.check()
        except Exception:
            sink.check()  # HDF5's own error follows from the first one
            raise
        finally:
            sink.close()


def write_at(file: IO[bytes], offset: int, data: Any) -> None:
    """Write all of ``data``, with several calls if needed."""
    view = memoryview(data).cast("B")
    file.seek(offset)
    while view.nbytes:
        view = view[file.write(view) :]


class Sink:
    """A file for h5py's file-object driver that never fails *inside* HDF5.

    After a failed write HDF5 can neither close the file nor leave the process without a crash (measured:
    segmentation fault with HDF5 2.0 on a full disk). So the first error is stored in :attr:`error`, later
    writes are dropped, HDF5 closes normally, and the caller raises the error afterwards. The same for Ctrl-C.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b", buffering=0)
        self._at = self._end = 0
        self.error: BaseException | None = None

    def check(self) -> None:
        """Raise the stored error, if any."""
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        self._file.close()

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        if self.error is None:
            with self._kept():
                write_at(self._file, self._at, data)
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
        with self._kept():
            self._file.seek(self._at)
            while got < len(view) and (n := self._file.readinto(view[got:])):
                got += n
        view[got:] = bytes(len(view) - got)
        self._at += len(view)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        if self.error is None:
            with self._kept():
                self._file.truncate(self._end)
        return self._end

    def flush(self) -> None:
        """No-op: nothing is buffered; :func:`~gpq_faiss.files.atomic_path` syncs the file."""

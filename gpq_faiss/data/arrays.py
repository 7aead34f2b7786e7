"""Arrays in ``.npy`` and ``.npz`` files, and matrices read by rows. All sizes are checked before memory is allocated."""

from __future__ import annotations

import contextlib
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..inputs import check_file, check_memory

_HEADER_LIMIT = 10_000  # characters of a .npy header
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip
"""Exceptions of the standard library for damaged zip archives."""


def without_gradient(value: Any) -> Any:
    """A tensor on any device as an array; other objects unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


class NpyHeader(NamedTuple):
    """The header of a ``.npy`` file; ``offset`` is that of the first byte of the array."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int


def npy_header(file: IO[bytes], where: str, size: int) -> NpyHeader:
    """Read the header of a ``.npy`` array, up to the array's first byte; ``size`` is that of the file or archive member, in bytes."""
    try:
        version = npy.read_magic(file)
        read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, fortran, dtype = read(file, max_header_size=_HEADER_LIMIT)
        if version > (2, 0) or any(n < 0 for n in shape):
            raise ValueError(f"version {version}, shape {shape}")
        header = NpyHeader(tuple(int(n) for n in shape), bool(fortran), dtype, file.tell())
    except Exception as error:
        # The header is a Python literal, whose parser has many ways to refuse one (SyntaxError, TokenError, RecursionError ...).
        raise DataError(f"{where} is not a .npy array, or it is truncated ({one_line(error, 80)})") from None
    if dtype.hasobject:
        raise DataError(f"{where} contains Python objects, which are not loaded: save an array of numbers")
    whole = header.offset + math.prod(header.shape) * dtype.itemsize
    if size != whole:
        raise DataError(
            f"{where} is truncated or damaged: {size:,} bytes, its array ends at {whole:,}; copy it again"
        )
    return header


class Matrix(Protocol):
    """An array that is read by rows."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """The rows of a slice with step 1, or at an array of positions (any order, repeats allowed)."""


class NpyArray:
    """A ``.npy`` file. It is mapped anew at each read, so that its pages do not stay in the memory of the process."""

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        size = check_file(path, what)
        try:
            with path.open("rb") as file:
                self.shape, self._fortran, self.dtype, self._offset = npy_header(file, str(path), size)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`Matrix`. Raises DataError: the file has changed."""
        order: Any = "F" if self._fortran else "C"
        try:
            mapped = np.memmap(self.path, self.dtype, "r", self._offset, self.shape, order)
        except (OSError, ValueError) as error:
            raise DataError(f"{self.path} changed while it was read ({one_line(error)})") from None
        return np.array(mapped[rows])


def read_npy(path: Path, what: str) -> NDArray[Any]:
    """The array of a ``.npy`` file; ``what`` is the expected content, for errors."""
    array = NpyArray(path, what)
    nbytes = math.prod(array.shape) * array.dtype.itemsize
    check_memory(nbytes, str(path))
    if not nbytes or not array.shape:  # cannot be mapped
        with path.open("rb") as file:
            return np.asarray(npy.read_array(file, max_header_size=_HEADER_LIMIT))
    return array.read(slice(None))


class HeldArray:
    """An array in memory."""

    def __init__(self, array: NDArray[Any], name: str = "") -> None:
        self.array, self.name = np.ascontiguousarray(array), name
        self.shape, self.dtype = self.array.shape, self.array.dtype

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`Matrix`."""
        return self.array[rows]


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an ``.npz`` file; all its errors become one DataError."""
    check_file(path, "an .npz archive")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ZIP_ERRORS as error:
        why = one_line(error, 80)
        raise DataError(
            f"{path} is not an .npz archive, or it is truncated or damaged ({why}): make it again"
        ) from None


def npz_array(path: Path, names: Sequence[str], memory: int | None = None) -> HeldArray | None:
    """The first of ``names`` in an ``.npz``, its checksum checked; ``memory`` is the budget in bytes (default: free memory)."""
    with _archive(path) as archive:
        there = npz_names(archive)
        name = next((name for name in names if name in there), None)
        if name is None:
            return None
        where, size = f"{path}: {name!r}", archive.getinfo(f"{name}.npy").file_size
        check_memory(size, where, memory, "save it as .npy, which is streamed")
        with archive.open(f"{name}.npy") as file:
            npy_header(file, where, size)
        with archive.open(f"{name}.npy") as file:
            array = npy.read_array(file, max_header_size=_HEADER_LIMIT)
            file.read(1)  # checks the checksum
    return HeldArray(np.asarray(array), name)


def npz_names(archive: zipfile.ZipFile) -> list[str]:
    """Names of the arrays of an ``.npz``."""
    return [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]

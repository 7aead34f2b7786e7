"""Safe loader of ``.npy`` and ``.npz``: checks all sizes before allocating memory."""

from __future__ import annotations

import contextlib
import lzma
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_file, check_memory

_HEADER_LIMIT = 10_000  # characters of a .npy header
_MEMBERS = 10_000  # of an .npz: all headers are read
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

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def npy_header(file: IO[bytes], where: str, size: int) -> NpyHeader:
    """Read the header of a ``.npy`` array, up to the array's first byte; ``size`` is that of the file or archive member, in bytes."""
    start = file.read(8)
    if start[:2] == b"PK":
        raise DataError(f"{where} is a zip archive, not one array: name it .npz, or save one array as .npy")
    if start[:6] == npy.MAGIC_PREFIX and start[6:] not in (b"\1\0", b"\2\0"):
        version = tuple(start[6:])
        raise DataError(f"{where} has the .npy version {version}, of structured arrays: save a plain array")
    read = npy.read_array_header_1_0 if start[6:] == b"\1\0" else npy.read_array_header_2_0
    try:
        if start[:6] != npy.MAGIC_PREFIX:
            raise ValueError(f"it starts with {start!r}")
        shape, fortran, dtype = read(file, max_header_size=_HEADER_LIMIT)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape}")
        header = NpyHeader(tuple(int(n) for n in shape), bool(fortran), dtype, file.tell())
    except Exception as error:
        # The header is a Python literal, whose parser has many ways to refuse one (SyntaxError, TokenError, RecursionError ...).
        why = " ".join(str(error).split())[:80]
        raise DataError(f"{where} is not a .npy array, or it is truncated ({why})") from None
    if dtype.hasobject:
        raise DataError(f"{where} contains Python objects, which are not loaded: save an array of numbers")
    whole = header.offset + header.nbytes
    if size < whole:
        raise DataError(f"{where} is truncated: {size:,} bytes of {whole:,}; copy it again")
    if size > whole:
        raise DataError(
            f"{where} has {size - whole:,} bytes after its array: it is damaged, or contains several"
        )
    return header


def read_npy(path: Path, what: str) -> NDArray[Any]:
    """The array of a ``.npy`` file; ``what`` is the expected content, for errors."""
    size = check_file(path, what)
    try:
        with path.open("rb") as file:
            check_memory(npy_header(file, str(path), size).nbytes, str(path))
            file.seek(0)
            return np.asarray(npy.read_array(file, max_header_size=_HEADER_LIMIT))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open an ``.npz`` file; all its errors become one DataError."""
    check_file(path, "an .npz archive")
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except ZIP_ERRORS as error:
        why = " ".join(str(error).split())[:80]
        raise DataError(
            f"{path} is not an .npz archive, or it is truncated or damaged ({why}): make it again"
        ) from None


def npz_arrays(path: Path) -> dict[str, NpyHeader]:
    """Headers of the arrays of an ``.npz`` by name, without reading the arrays. Raises DataError: not an ``.npz``."""
    out: dict[str, NpyHeader] = {}
    with _archive(path) as archive:
        members = archive.infolist()
        if len(members) > _MEMBERS:
            raise DataError(f"{path} has {len(members):,} members: at most {_MEMBERS:,} arrays are possible")
        for member in members:
            if member.filename.endswith(".npy"):
                with archive.open(member) as file:
                    header = npy_header(file, f"{path}: {member.filename}", member.file_size)
                out[member.filename.removesuffix(".npy")] = header
    return out


def npz_array(path: Path, name: str, memory: int | None = None) -> NDArray[Any]:
    """Read one array of an ``.npz`` and check its checksum; ``memory`` is the budget in bytes (default: free memory)."""
    where = f"{path}: {name!r}"
    with _archive(path) as archive:
        with archive.open(f"{name}.npy") as file:
            nbytes = npy_header(file, where, archive.getinfo(f"{name}.npy").file_size).nbytes
        check_memory(nbytes, where, memory, "save it as .npy, which is streamed")
        with archive.open(f"{name}.npy") as file:
            array = npy.read_array(file, max_header_size=_HEADER_LIMIT)
            file.read(1)  # checks the checksum
    return np.asarray(array)

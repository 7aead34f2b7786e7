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
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_file, check_memory

_HEADER_LIMIT = 10_000  # characters of a .npy header
_MEMBERS = 10_000  # of an .npz: all headers are read
_BLOCK = 1 << 20
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip
"""Exceptions of the standard library for damaged zip archives."""


def without_gradient(value: Any) -> Any:
    """A tensor on any device as an array; other objects unchanged."""
    return value.detach().cpu().numpy() if hasattr(value, "detach") else value


class NpyHeader(NamedTuple):
    """The header of a ``.npy`` file.

    Attributes:
        offset: of the first byte of the array.
    """

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


def npy_header(file: IO[bytes], where: str, size: int) -> NpyHeader:
    """Read the header of a ``.npy`` array, up to the array's first byte.

    Args:
        size: size of the file (or archive member) in bytes, which must match the header.

    Raises:
        DataError: not a plain array, truncated, or with trailing data.
    """
    try:
        start = file.read(2)
        if start == b"PK":
            raise DataError(
                f"{where} is a zip archive, not one array: name it .npz, or save one array as .npy"
            )
        version = np.lib.format.read_magic(_Again(start, file))  # type: ignore[arg-type]
        reader = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, fortran, dtype = reader(file, max_header_size=_HEADER_LIMIT)
        if any(n < 0 for n in shape):
            raise ValueError(f"shape {shape}")
        header = NpyHeader(tuple(int(n) for n in shape), bool(fortran), dtype, file.tell())
    except DataError:
        raise
    except KeyError as error:
        raise DataError(
            f"{where} has the .npy version {error}, of structured arrays: save a plain array"
        ) from None
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


class _Again:
    """A file whose first bytes have already been read."""

    def __init__(self, start: bytes, file: IO[bytes]) -> None:
        self._start, self._file = start, file

    def read(self, n: int) -> bytes:
        start, self._start = self._start[:n], self._start[n:]
        return start + self._file.read(n - len(start))


def read_npy(path: Path, what: str) -> NDArray[Any]:
    """The array of a ``.npy`` file.

    Args:
        what: expected content, for errors.

    Raises:
        DataError: missing, not a plain array, damaged, truncated, or larger than free memory.
    """
    size = check_file(path, what)
    try:
        with path.open("rb") as file:
            header = npy_header(file, str(path), size)
            check_memory(header.nbytes, str(path))
            return _array(file, header, str(path))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _array(file: IO[bytes], header: NpyHeader, where: str) -> NDArray[Any]:
    """Read the array after its header."""
    flat = np.empty(math.prod(header.shape), header.dtype)
    view = memoryview(flat.view(np.uint8) if flat.nbytes else b"")  # type: ignore[arg-type]
    while view.nbytes:
        # In blocks, since the archive reader copies its results.
        got = file.readinto(view[:_BLOCK])  # type: ignore[attr-defined]
        if not got:
            raise DataError(f"{where} was truncated while it was read: start again")
        view = view[got:]
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


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
    """Headers of the arrays of an ``.npz`` by name, without reading the arrays.

    Raises:
        DataError: not an ``.npz``.
    """
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
    """Read one array of an ``.npz`` and check its checksum.

    Args:
        memory: budget in bytes (default: free memory).

    Raises:
        DataError: damaged, or larger than the budget.
    """
    where = f"{path}: {name!r}"
    with _archive(path) as archive:
        try:
            member = archive.getinfo(f"{name}.npy")
        except KeyError:
            raise DataError(f"{path} has no array {name!r}") from None
        with archive.open(member) as file:
            header = npy_header(file, where, member.file_size)
            check_memory(header.nbytes, where, memory, "save it as .npy, which is streamed")
            array = _array(file, header, where)
            file.read(1)  # checks the checksum
    return array

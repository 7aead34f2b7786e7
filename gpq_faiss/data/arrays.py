"""NumPy's own files, read with every size compared before anything is allocated: the one loader of ``.npy`` and ``.npz``."""

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
_MEMBERS = 10_000  # of an .npz: each is opened to see what it is
_BLOCK = 1 << 20
ZIP_ERRORS = (
    zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, OSError, EOFError, NotImplementedError, RuntimeError, ValueError,
)  # fmt: skip
"""What the standard library raises over damaged zip archives."""


def without_gradient(value: Any) -> Any:
    """A tensor, on whatever device, as an array; anything else as it is."""
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
    """The header of an array in ``.npy`` form; leaves ``file`` at the array's first byte.

    Args:
        size: bytes that the file (or the member of an archive) has: as many as the header asks for.

    Raises:
        DataError: not a plain array, truncated, or with something behind it.
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
        raise DataError(f"{where} holds Python objects, which are not loaded: save an array of numbers")
    whole = header.offset + header.nbytes
    if size < whole:
        raise DataError(f"{where} is truncated: {size:,} bytes of {whole:,}; copy it again")
    if size > whole:
        raise DataError(
            f"{where} has {size - whole:,} bytes behind its array: it is damaged, or holds several"
        )
    return header


class _Again:
    """A file whose first bytes have been read already."""

    def __init__(self, start: bytes, file: IO[bytes]) -> None:
        self._start, self._file = start, file

    def read(self, n: int) -> bytes:
        start, self._start = self._start[:n], self._start[n:]
        return start + self._file.read(n - len(start))


def read_npy(path: Path, what: str) -> NDArray[Any]:
    """The array of a ``.npy`` file.

    Args:
        what: what it should be, for errors.

    Raises:
        DataError: missing, no plain array, damaged, truncated, or larger than the memory that is free.
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
    """The array behind its header."""
    flat = np.empty(math.prod(header.shape), header.dtype)
    view = memoryview(flat.view(np.uint8) if flat.nbytes else b"")  # type: ignore[arg-type]
    while view.nbytes:
        # In blocks, since the reader of an archive makes a copy of what it returns.
        got = file.readinto(view[:_BLOCK])  # type: ignore[attr-defined]
        if not got:
            raise DataError(f"{where} was cut off while it was read: start again")
        view = view[got:]
    return flat.reshape(header.shape, order="F" if header.fortran else "C")


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """An ``.npz`` file, whatever is wrong with it as one error."""
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
    """The headers of the arrays of an ``.npz`` by name; nothing else is unpacked.

    Raises:
        DataError: not such an archive.
    """
    out: dict[str, NpyHeader] = {}
    with _archive(path) as archive:
        members = archive.infolist()
        if len(members) > _MEMBERS:
            raise DataError(f"{path} has {len(members):,} members: {_MEMBERS:,} arrays are possible at most")
        for member in members:
            if member.filename.endswith(".npy"):
                with archive.open(member) as file:
                    header = npy_header(file, f"{path}: {member.filename}", member.file_size)
                out[member.filename.removesuffix(".npy")] = header
    return out


def npz_array(path: Path, name: str, memory: int | None = None) -> NDArray[Any]:
    """One array of an ``.npz``, its checksum compared.

    Args:
        memory: budget in bytes; default what is free.

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
            file.read(1)  # at the end the checksum is compared
    return array

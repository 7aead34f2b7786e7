"""Matrices read by rows, from ``.npy`` and ``.npz`` files and memory, and ids. All sizes are checked before memory is allocated."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_memory, reading
from .labels import Rows, errors_of, row_numbers
from .paths import local_path

_HEADER_LIMIT = 10_000  # characters of a .npy header


class Matrix(Protocol):
    """What is read by rows: a slice with step 1, or an array of positions (any order, repeats allowed). Arrays are, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: Any) -> Any: ...


def npy_header(file: IO[bytes], where: str, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Shape and type by the header of a ``.npy`` array; ``size`` is that of the file or archive member, in bytes."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file, max_header_size=_HEADER_LIMIT)
    if dtype.hasobject:
        raise DataError(f"{where} contains Python objects, which are not loaded: save an array of numbers")
    whole = file.tell() + math.prod(shape) * dtype.itemsize
    if size != whole:
        what = f"{size:,} bytes, its array ends at {whole:,}"
        raise DataError(f"{where} is truncated or damaged: {what}; copy it again")
    return shape, dtype


class NpyArray:
    """A ``.npy`` file. It is mapped anew at each read, so that its pages do not stay in the memory of the process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "a .npy array") as size, path.open("rb") as file:
            self.shape, self.dtype = npy_header(file, str(path), size)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        with reading(self.path, "the .npy array that was opened"):
            return np.array(npy.open_memmap(self.path, "r", max_header_size=_HEADER_LIMIT)[rows])


def read_npy(path: Path) -> NDArray[Any]:
    """The array of a ``.npy`` file."""
    array = NpyArray(path)
    check_memory(math.prod(array.shape) * array.dtype.itemsize, str(path))
    return array[...]


def npz_array(path: Path, name: str, memory: int | None = None) -> NDArray[Any]:
    """An array of an ``.npz``, its checksum checked; ``memory`` is the budget in bytes (default: free memory)."""
    with reading(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
        where, size = f"{path}: {name!r}", archive.getinfo(f"{name}.npy").file_size
        check_memory(size, where, memory, "save it as .npy, which is streamed")
        with archive.open(f"{name}.npy") as file:
            npy_header(file, where, size)
            file.seek(0)
            array = np.asarray(npy.read_array(file, max_header_size=_HEADER_LIMIT))
    return array


class JoinedMatrix:
    """Concatenated rows of several files. Raises DataError: they are not matrices of one width."""

    def __init__(self, parts: Sequence[Matrix], files: Sequence[Path]) -> None:
        self._parts, self.dtype = parts, np.result_type(*(part.dtype for part in parts))
        for part, file in zip(parts, files, strict=True):
            if len(part.shape) != 2 or part.shape[1] != parts[0].shape[1]:
                here, there = list(parts[0].shape), list(part.shape)
                raise DataError(f"{files[0]} is {here}, {file} {there}: rows of one width are needed")
        self._starts = np.cumsum([0, *(part.shape[0] for part in parts)])
        self.shape = (int(self._starts[-1]), parts[0].shape[1])

    def __getitem__(self, rows: Rows) -> NDArray[np.float32]:
        at = row_numbers(rows, self.shape[0])
        part_of = np.searchsorted(self._starts, at, side="right") - 1
        out = np.empty((len(at), self.shape[1]), np.float32)
        for i in np.unique(part_of).tolist():
            mine = part_of == i
            out[mine] = self._parts[i][at[mine] - self._starts[i]]
        return out


# Ids --------------------------------------------------------------------------------------------------------------------


def whole_numbers(ids: NDArray[Any], what: str) -> NDArray[np.int64]:
    """An array of integers as int64 [n]. Raises DataError: it is none, or out of range."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        found = f"{ids.dtype} {list(ids.shape)}"
        raise DataError(f"{what}: {found}, expected ids: whole numbers of 64 bits")
    if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 1 << 63:
        raise DataError(f"{what}: {int(ids.max())} does not fit signed 64 bits: use smaller ids")
    return ids.astype(np.int64, copy=False)


def read_ids(path: str | os.PathLike[str], what: str = "ids") -> NDArray[np.int64]:
    """Integers int64 [n] from a ``.npy`` file, or from text with one per line; ``#`` starts a comment. ``what`` names the option,
    for errors."""
    path = local_path(path)
    with errors_of(what):
        if path.suffix == ".npy":
            return whole_numbers(read_npy(path), str(path))
        with reading(path, "a list of ids, one whole number per line") as size:
            check_memory(4 * size, str(path))
            with path.open(encoding="utf-8-sig") as stream:
                words = (word for line in stream for word in line.partition("#")[0].split())
                return np.fromiter(map(int, words), np.int64)

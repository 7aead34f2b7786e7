"""Matrices that are read by rows without holding the file in memory; and files of ids."""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import read_text, reading
from .labels import Rows, errors_of, row_numbers
from .paths import local_path

_HEADER_LIMIT = 10_000  # characters of a .npy header


class Matrix(Protocol):
    """Rows of numbers: indexed by a slice with step 1 or by an array of positions, in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: Any) -> Any: ...


def npy_header(file: IO[bytes], location: str, size: int) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype by the header of a ``.npy`` array of ``size`` bytes."""
    version = npy.read_magic(file)
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, _, dtype = read(file, max_header_size=_HEADER_LIMIT)
    if dtype.hasobject:
        raise DataError(
            f"{location} contains Python objects, which are not loaded: "
            "save an array of numbers or of texts, not of Python objects"
        )
    end = file.tell() + math.prod(shape) * dtype.itemsize
    if size != end:
        raise DataError(
            f"{location} is truncated or damaged: "
            f"{size:,} bytes, its array ends at {end:,}"
            f"; copy it again"
        )
    return shape, dtype


class NpyArray:
    """An array in a ``.npy`` file, mapped anew at each read so that its pages leave memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(path, "a .npy array") as size, path.open("rb") as file:
            self.shape, self.dtype = npy_header(file, str(path), size)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        with reading(self.path, "the .npy array that was opened"):
            return np.array(npy.open_memmap(self.path, "r", max_header_size=_HEADER_LIMIT)[rows])


@dataclass(frozen=True)
class LazyArray:
    """An array of known shape that ``load`` returns when its rows are first needed."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], NDArray[Any]]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return np.asarray(self.load()[rows])


def is_hdf5(array: Any) -> bool:
    """Return whether an object is a data set of an open HDF5 file."""
    return type(array).__module__.partition(".")[0] == "h5py" and hasattr(array, "ndim")


def npz_member(path: Path, name: str) -> LazyArray:
    """Return an array of an ``.npz``, decompressed when it is read."""
    with reading(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
        size = archive.getinfo(f"{name}.npy").file_size
        with archive.open(f"{name}.npy") as file:
            shape, dtype = npy_header(file, f"{path}: {name!r}", size)

    def load() -> NDArray[Any]:
        with reading(path, "the .npz archive that was opened"), np.load(path) as archive:
            return np.asarray(archive[name])

    return LazyArray(shape, dtype, load)


class JoinedMatrix:
    """Concatenated rows of several matrices, read as float32.

    Raises DataError: they are not matrices of one width; ``names`` are those of the parts.
    """

    def __init__(self, parts: Sequence[Matrix], names: Sequence[object] = ()) -> None:
        for chunk, name in zip(parts, names, strict=False):
            if len(chunk.shape) != 2 or chunk.shape[1] != parts[0].shape[1]:
                raise DataError(
                    f"{names[0]} is {list(parts[0].shape)}, {name} {list(chunk.shape)}"
                    f": rows of one width are needed"
                )
        self._parts, self.dtype = parts, np.result_type(*(chunk.dtype for chunk in parts))
        self._starts = np.cumsum([0, *(chunk.shape[0] for chunk in parts)])
        self.shape = (int(self._starts[-1]), parts[0].shape[1])

    def __getitem__(self, rows: Rows) -> NDArray[np.float32]:
        numbers = row_numbers(rows, self.shape[0])
        part_of = np.searchsorted(self._starts, numbers, side="right") - 1
        out = np.empty((len(numbers), self.shape[1]), np.float32)
        for i in np.unique(part_of).tolist():
            mask = part_of == i
            out[mask] = self._parts[i][numbers[mask] - self._starts[i]]
        return out


# Vectors as Faiss' benchmarks keep them (fvecs and its relatives; fbin has a header of n and d)
# -----

VECS = {".fvecs": "<f4", ".ivecs": "<i4", ".bvecs": "u1"}
BINS = {".fbin": "<f4", ".u8bin": "u1", ".i8bin": "i1"}


def open_vecs(path: Path) -> NDArray[Any]:
    """Map a file of :data:`VECS` or :data:`BINS` as [n, d]."""
    suffix = path.suffix.lower()
    if suffix in BINS:
        n, d = np.fromfile(path, "<u4", 2).tolist()
        return np.memmap(path, BINS[suffix], "r", 8, (n, d))
    size = np.dtype(VECS[suffix]).itemsize
    d = int(np.fromfile(path, "<i4", 1)[0])
    return np.memmap(path, VECS[suffix], "r").reshape(-1, d + 4 // size)[:, 4 // size :]


# Ids ----------------------------------------------------------------------------------------------


def whole_numbers(ids: Any, source_name: str) -> NDArray[np.int64]:
    """Return ids as int64 [n]; whole floats and texts of whole numbers are ids, too.

    Raises DataError: not whole numbers of signed 64 bits, in one dimension.
    """
    array = np.asarray(ids)
    try:
        if array.dtype.kind in "OUST":  # whose numbers may be beyond 64 bits, or missing
            texts = [
                cell.decode() if isinstance(cell, bytes) else str(cell) for cell in array.tolist()
            ]
            array = np.array([int(text.strip().removesuffix(".0")) for text in texts], np.int64)
    except (ValueError, OverflowError):
        array = np.array(texts)
    is_whole = array.dtype.kind in "iu"
    if array.dtype.kind == "f":
        is_whole = bool(
            (np.isfinite(array) & (array == np.floor(array)) & (abs(array) < 2**53)).all()
        )
    if array.ndim != 1 or not is_whole:
        raise DataError(
            f"{source_name}: "
            f"{array.dtype} {list(array.shape)}"
            f", expected ids: whole numbers of 64 bits, none missing"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise DataError(
            f"{source_name}: {int(array.max())} does not fit signed 64 bits: use smaller ids"
        )
    return array.astype(np.int64, copy=False)


def read_ids(path: str | os.PathLike[str], source_name: str = "ids") -> NDArray[np.int64]:
    """Read ids int64 [n]: a ``.npy`` file, or text with one per line, where ``#`` starts a comment.

    ``source_name`` names the option in errors.
    """
    path = local_path(path)
    with errors_of(source_name):
        if path.suffix == ".npy":
            return whole_numbers(NpyArray(path)[...], str(path))
        form = "a list of ids, one whole number per line"
        lines = (line.partition("#")[0] for line in read_text(path, form).splitlines())
        with reading(path, form):
            return whole_numbers([word for line in lines for word in line.split()], str(path))

"""Matrices that are read by rows without holding the file in memory; and files of ids."""

from __future__ import annotations

import contextlib
import functools
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import read_text, reading
from .images import without_gradient
from .labels import Rows, errors_of, plain_text, row_numbers


class Matrix(Protocol):
    """Rows of numbers: indexed by a slice with step 1 or by an array of positions, in any order."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    def __getitem__(self, rows: Any) -> Any: ...


@dataclass(frozen=True)
class LazyArray:
    """An array of known shape, which ``load`` returns when it is read."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    load: Callable[[], NDArray[Any]]

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return self.load()[rows]


def npy_array(path: Path) -> Matrix:
    """Map the array in a ``.npy`` file."""
    with reading(path, "a .npy array without Python objects, which are not loaded"):
        array: Matrix = npy.open_memmap(path, "r")
    return array


def npz_arrays(path: Path) -> dict[str, Matrix]:
    """Return the arrays of an ``.npz`` by name, each decompressed when it is first read."""

    @functools.cache
    def load(name: str) -> NDArray[Any]:
        with reading(path, "an .npz archive without Python objects"), np.load(path) as members:
            return np.asarray(members[name])

    arrays: dict[str, Matrix] = {}
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            with archive.open(member) as file:
                is_first = npy.read_magic(file) == (1, 0)
                header = npy.read_array_header_1_0 if is_first else npy.read_array_header_2_0
                shape, _, dtype = header(file)
            name = member.removesuffix(".npy")
            arrays[name] = LazyArray(shape, dtype, functools.partial(load, name))
    return arrays


class JoinedMatrix:
    """Concatenated rows of several matrices, read as float32.

    Raises DataError: they are not matrices of one width; ``names`` are theirs.
    """

    def __init__(self, matrices: Sequence[Matrix], names: Sequence[object]) -> None:
        for matrix, name in zip(matrices, names, strict=True):
            if len(matrix.shape) != 2 or matrix.shape[1] != matrices[0].shape[1]:
                raise DataError(
                    f"{names[0]} is {list(matrices[0].shape)}, {name} {list(matrix.shape)}"
                    f": rows of one width are needed"
                )
        self._matrices, self.dtype = matrices, np.dtype(np.float32)
        self._starts = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
        self.shape = (int(self._starts[-1]), matrices[0].shape[1])

    def __getitem__(self, rows: Rows) -> NDArray[np.float32]:
        numbers = row_numbers(rows, self.shape[0])
        matrix_of = np.searchsorted(self._starts, numbers, side="right") - 1
        out = np.empty((len(numbers), self.shape[1]), np.float32)
        for i in np.unique(matrix_of).tolist():
            mask = matrix_of == i
            out[mask] = self._matrices[i][numbers[mask] - self._starts[i]]
        return out


# Vectors as Faiss' benchmarks keep them (fbin has a header of n and d) ----------------------------

VECS = {".fvecs": "<f4", ".ivecs": "<i4", ".bvecs": "u1", ".fbin": "<f4", ".u8bin": "u1"}


def open_vecs(path: Path) -> dict[str, Matrix]:
    """Map a file of a form of :data:`VECS` as [n, d]."""
    dtype = np.dtype(VECS[path.suffix.lower()])
    if path.suffix.lower().endswith("bin"):
        shape = np.fromfile(path, "<u4", 2).tolist()
        return {"vectors": np.memmap(path, dtype, "r", 8, tuple(shape))}
    header = 4 // dtype.itemsize
    width = int(np.fromfile(path, "<i4", 1)[0]) + header
    return {"vectors": np.memmap(path, dtype, "r").reshape(-1, width)[:, header:]}


# Ids ----------------------------------------------------------------------------------------------


def whole_numbers(ids: Any, source_name: str) -> NDArray[np.int64]:
    """Return ids as int64 [n]; whole floats and texts of whole numbers are ids, too.

    Raises DataError: not whole numbers of signed 64 bits, in one dimension.
    """
    array = np.asarray(ids)
    with contextlib.suppress(ValueError, OverflowError, TypeError), np.errstate(invalid="ignore"):
        if array.dtype.kind in "OUST":  # whose numbers may be beyond 64 bits, or missing
            texts = [plain_text(cell).strip().removesuffix(".0") for cell in array.tolist()]
            return np.array([int(text) for text in texts], np.int64)
        exact = array.dtype.kind in "iu" or (np.abs(array) < 2**53).all()
        numbers = array.astype(np.int64)
        if array.ndim == 1 and exact and (numbers == array).all():
            return numbers
    raise DataError(
        f"{source_name}: {array.dtype} {list(array.shape)}, "
        "expected ids: whole numbers of signed 64 bits, none missing"
    )


def read_ids(ids: Any, source_name: str = "ids") -> NDArray[np.int64]:
    """Return ids int64 [n] of an array, or of a file: ``.npy``, or text with one per line, where
    ``#`` starts a comment.

    ``source_name`` names the option in errors. Raises DataError: as :func:`whole_numbers`.
    """
    if not isinstance(ids, str | os.PathLike):
        return whole_numbers(without_gradient(ids), source_name)
    path = Path(ids).expanduser()
    with errors_of(source_name):
        if path.suffix == ".npy":
            return whole_numbers(npy_array(path)[...], str(path))
        lines = read_text(path, "a list of ids, one whole number per line").splitlines()
        words = [word for line in lines for word in line.partition("#")[0].split()]
        return whole_numbers(words, str(path))

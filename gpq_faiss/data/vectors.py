"""Rows of vectors in ``.npy``, ``.npz``, HDF5 and Parquet files, read in bounded memory.

Files are not memory-mapped: mapped pages count as the process's memory, which matters under a memory limit.
"""

from __future__ import annotations

import hashlib
import os
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import available_memory, check_file, check_memory
from ..store import Hdf5Array
from .arrays import npy_header
from .labels import Rows
from .parquet import decoded_bytes, matrix_of, open_parquet

_RUN_BYTES = 16 << 20
_GAP_BYTES = 64 << 10  # read over rather than seek
_SAMPLED = 64  # blocks of a large file in its fingerprint
_SAMPLE = 64 << 10
_PARQUET = "a Parquet file of vectors"


def file_fingerprint(path: Path) -> str:
    """Hash of a file's content up to 64 MiB; of larger files the size and 64 evenly spaced blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        if size <= 64 << 20:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for i in range(_SAMPLED):
                file.seek(i * (size - _SAMPLE) // (_SAMPLED - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


class Vectors(ABC):
    """N rows of ``width`` numbers."""

    n: int
    width: int

    @abstractmethod
    def read(self, rows: Rows) -> NDArray[Any]:
        """Rows [n, width] of any number type, in the requested order."""


def check_array(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Raises DataError: not a non-empty matrix of numbers."""
    if len(shape) != 2 or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(f"{where} is {dtype} {list(shape)}: numbers [N, width] are needed, one row per item")
    if 0 in shape:
        raise DataError(f"{where} is {list(shape)}: there is no row, or no column")


def gather(
    positions: NDArray[np.int64],
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    run: Callable[[int, int], NDArray[Any]],
) -> NDArray[Any]:
    """Read rows at ``positions`` (any order, repeats allowed) as runs ``(start, stop)`` in file order."""
    wanted, inverse = np.unique(positions, return_inverse=True)
    out = np.empty((len(wanted), shape[1]), dtype)
    row_bytes = dtype.itemsize * shape[1]
    gap, longest = max(1, _GAP_BYTES // row_bytes), max(1, _RUN_BYTES // row_bytes)
    first = 0
    while first < len(wanted):
        end = int(
            np.searchsorted(wanted, wanted[first] + longest)
        )  # at most so far, and up to the first large gap
        jumps = np.flatnonzero(np.diff(wanted[first:end]) > gap)
        last = first + int(jumps[0]) + 1 if jumps.size else end
        block = run(int(wanted[first]), int(wanted[last - 1]) + 1)
        out[first:last] = block[wanted[first:last] - wanted[first]]
        first = last
    return out[inverse]


class NpyVectors(Vectors):
    """A ``.npy`` file, read by seek and readinto.

    Raises:
        DataError: not a matrix of numbers, in Fortran order, truncated, or with trailing data.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        size = check_file(path, "a .npy file of vectors")
        with path.open("rb") as file:
            header = npy_header(file, str(path), size)
        self.dtype, self._offset = header.dtype, header.offset
        check_array(header.shape, self.dtype, str(path))
        if header.fortran:
            raise DataError(
                f"{path} is stored by columns (Fortran order): save it by rows, np.save(path, np.ascontiguousarray(x))"
            )
        self.n, self.width = header.shape
        self._row = self.width * self.dtype.itemsize

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        out = np.empty((stop - start, self.width), self.dtype)
        view = memoryview(out.reshape(-1).view(np.uint8))  # type: ignore[arg-type]
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._offset + start * self._row)
            while view.nbytes:
                got = file.readinto(view)
                if not got:
                    raise DataError(f"{self.path} was truncated while it was read: start again")
                view = view[got:]
        return out

    def read(self, rows: Rows) -> NDArray[Any]:
        positions = np.arange(self.n)[rows] if not isinstance(rows, slice) else None
        if positions is None:
            start, stop, step = rows.indices(self.n)  # type: ignore[union-attr]
            if step == 1:
                return self._run(start, max(start, stop))
            positions = np.arange(start, stop, step)
        return gather(positions, (self.n, self.width), self.dtype, self._run)


class ArrayVectors(Vectors):
    """An array in memory (a member of an ``.npz``, which cannot be read in parts)."""

    def __init__(self, array: NDArray[Any], where: str) -> None:
        check_array(array.shape, array.dtype, where)
        self.array = np.ascontiguousarray(array)
        self.n, self.width = array.shape

    def read(self, rows: Rows) -> NDArray[Any]:
        return self.array[rows]


class Hdf5Vectors(Vectors):
    """A dataset of an HDF5 file."""

    def __init__(self, array: Hdf5Array) -> None:
        check_array(array.shape, array.dtype, f"{array.path}: {array.name!r}")
        self.array = array
        self.n, self.width = array.shape

    def read(self, rows: Rows) -> NDArray[Any]:
        if isinstance(rows, slice) and rows.step not in (None, 1):
            rows = np.arange(self.n)[rows]
        return self.array.read(rows)


class ParquetVectors(Vectors):
    """A list column of a Parquet file, read by row group; the last one or two are cached.

    Args:
        memory: budget in bytes for decoded row groups (default: free memory).

    Raises:
        DataError: rows of different lengths, missing rows, or not numbers; a row group larger than the budget.
    """

    def __init__(self, path: Path, column: str, memory: int | None = None) -> None:
        self.path, self.column = path, column
        with open_parquet(path, _PARQUET) as file:
            meta = file.metadata
            sizes = [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]
            largest = max((decoded_bytes(file, column, [i]) for i in range(len(sizes))), default=0)
        remedy = "write it with smaller row groups, or save it as .npy"
        check_memory(largest, f"a row group of {path}: {column!r}", memory, remedy)
        # A third exists during decoding.
        budget = available_memory() if memory is None else memory
        self._kept = 2 if budget is None or 3 * largest <= budget else 1
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.n = int(self._starts[-1])
        self._cache: OrderedDict[int, NDArray[Any]] = OrderedDict()
        self._lock = threading.Lock()
        self.width = 0
        if self.n == 0:
            raise DataError(f"{path} has no rows")
        first = next(i for i, size in enumerate(sizes) if size)
        self.width = self._group(first).shape[1]

    def _group(self, i: int) -> NDArray[Any]:
        with self._lock:
            if i in self._cache:
                self._cache.move_to_end(i)
                return self._cache[i]
            if len(self._cache) == self._kept:
                self._cache.popitem(last=False)
            block = self._decode(i)
            self._cache[i] = block
            return block

    def _decode(self, i: int) -> NDArray[Any]:
        start = int(self._starts[i])
        where = f"{self.path}: {self.column!r}"
        with open_parquet(self.path, _PARQUET) as file:
            column = file.read_row_group(i, columns=[self.column])[self.column]
            if len(column) != self._starts[i + 1] - start:
                raise DataError(
                    f"{self.path} is damaged (row group {i} has {len(column):,} rows): make it again"
                )
            block = matrix_of(column, where, start=start, width=self.width)
        check_array(block.shape, block.dtype, where)
        return block

    def read(self, rows: Rows) -> NDArray[Any]:
        positions = np.arange(*rows.indices(self.n)) if isinstance(rows, slice) else np.arange(self.n)[rows]
        order = np.argsort(positions, kind="stable")
        group = np.searchsorted(self._starts, positions[order], side="right") - 1
        out = np.empty((len(positions), self.width), np.float32)
        for i in np.unique(group):
            mine = order[group == i]
            with np.errstate(over="ignore"):
                out[mine] = self._group(int(i))[positions[mine] - self._starts[i]]
        return out


def first_of(names: Sequence[str], there: Sequence[str]) -> str | None:
    """The first of ``names`` in ``there``."""
    return next((name for name in names if name in there), None)


class ConcatVectors(Vectors):
    """Concatenated rows of several sources.

    Raises:
        DataError: different widths (names two).
    """

    def __init__(self, parts: Sequence[Vectors], names: Sequence[str]) -> None:
        self.parts = list(parts)
        self.width = parts[0].width
        for part, name in zip(parts, names, strict=True):
            if part.width != self.width:
                raise DataError(f"{names[0]} has rows of {self.width} numbers, {name} of {part.width}")
        self._ends = np.cumsum([part.n for part in parts])
        self.n = int(self._ends[-1])

    def read(self, rows: Rows) -> NDArray[Any]:
        positions = np.arange(self.n)[rows]
        part_of = np.searchsorted(self._ends, positions, side="right")
        types = []
        found = {}
        for part in np.unique(part_of).tolist():
            start = int(self._ends[part]) - self.parts[part].n
            inside = positions[part_of == part] - start
            whole = (
                len(inside)
                and int(inside[-1]) - int(inside[0]) == len(inside) - 1
                and bool((np.diff(inside) == 1).all())
            )
            block = self.parts[part].read(slice(int(inside[0]), int(inside[-1]) + 1) if whole else inside)
            found[part] = block
            types.append(block.dtype)
        out = np.empty((len(positions), self.width), np.result_type(*types) if types else np.float32)
        for part, block in found.items():
            out[part_of == part] = block
        return out

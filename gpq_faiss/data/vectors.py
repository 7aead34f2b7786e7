"""Rows of vectors in ``.npy``, ``.npz``, HDF5 and Parquet files, read in bounded memory.

Files are not memory-mapped: mapped pages count as the process's memory, which matters under a memory limit.
"""

from __future__ import annotations

import hashlib
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import fingerprint
from ..inputs import available_memory, check_file, check_memory
from ..store import Hdf5Array
from .arrays import npy_header
from .base import About, FeatureDataset
from .labels import Rows, row_numbers
from .parquet import decoded_bytes, matrix_of, open_parquet

_RUN_BYTES = 16 << 20
_GAP_BYTES = 64 << 10  # read over rather than seek
_PARQUET = "a Parquet file of vectors"


class Vectors(ABC):
    """N rows of ``width`` numbers."""

    n: int
    width: int

    def read(self, rows: Rows) -> NDArray[Any]:
        """Rows [n, width] of any number type, in the requested order."""
        positions = row_numbers(rows, self.n)
        if len(positions) and (len(positions) == 1 or bool((np.diff(positions) == 1).all())):
            return self._run(int(positions[0]), int(positions[-1]) + 1)
        return self._at(positions) if len(positions) else np.empty((0, self.width), np.float32)

    @abstractmethod
    def _run(self, start: int, stop: int) -> NDArray[Any]:
        """Rows start:stop."""

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        """Rows in any order, repeats allowed: read as runs in file order."""
        wanted, inverse = np.unique(positions, return_inverse=True)
        row_bytes = 8 * self.width
        gap, longest = max(1, _GAP_BYTES // row_bytes), max(1, _RUN_BYTES // row_bytes)
        blocks = []
        first = 0
        while first < len(wanted):
            # At most so far, and up to the first large gap.
            end = int(np.searchsorted(wanted, wanted[first] + longest))
            jumps = np.flatnonzero(np.diff(wanted[first:end]) > gap)
            last = first + int(jumps[0]) + 1 if jumps.size else end
            block = self._run(int(wanted[first]), int(wanted[last - 1]) + 1)
            blocks.append(block[wanted[first:last] - wanted[first]])
            first = last
        return np.concatenate(blocks)[inverse]


def check_array(shape: tuple[int, ...], dtype: np.dtype[Any], where: str) -> None:
    """Raises DataError: not a non-empty matrix of numbers."""
    if len(shape) != 2 or dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise DataError(f"{where} is {dtype} {list(shape)}: numbers [N, width] are needed, one row per item")
    if 0 in shape:
        raise DataError(f"{where} is {list(shape)}: there is no row, or no column")


class NpyVectors(Vectors):
    """A ``.npy`` file. Raises DataError: not a matrix of numbers, in Fortran order, truncated, or with trailing data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        size = check_file(path, "a .npy file of vectors")
        with path.open("rb") as file:
            header = npy_header(file, str(path), size)
        check_array(header.shape, header.dtype, str(path))
        if header.fortran:
            remedy = "save it by rows, np.save(path, np.ascontiguousarray(x))"
            raise DataError(f"{path} is stored by columns (Fortran order): {remedy}")
        self._dtype, self._offset = header.dtype, header.offset
        self.n, self.width = header.shape

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        offset = self._offset + start * self.width * self._dtype.itemsize
        count = (stop - start) * self.width
        out = np.fromfile(self.path, self._dtype, count, offset=offset)
        if len(out) != count:
            raise DataError(f"{self.path} was truncated while it was read: start again")
        return out.reshape(-1, self.width)


class ArrayVectors(Vectors):
    """An array in memory (a member of an ``.npz``, which cannot be read in parts)."""

    def __init__(self, array: NDArray[Any], where: str) -> None:
        check_array(array.shape, array.dtype, where)
        self.array = np.ascontiguousarray(array)
        self.n, self.width = array.shape

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        return self.array[start:stop]

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        return self.array[positions]


class Hdf5Vectors(Vectors):
    """A dataset of an HDF5 file."""

    def __init__(self, array: Hdf5Array) -> None:
        check_array(array.shape, array.dtype, f"{array.path}: {array.name!r}")
        self.array = array
        self.n, self.width = array.shape

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        return self.array.read(slice(start, stop))

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        return self.array.read(positions)


class ParquetVectors(Vectors):
    """A list column of a Parquet file, read by row group; the last one or two are cached. ``memory`` is the budget in bytes for them."""

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
        if self.n == 0:
            raise DataError(f"{path} has no rows")
        self.width = 0
        self.width = self._group(next(i for i, size in enumerate(sizes) if size)).shape[1]

    def _group(self, i: int) -> NDArray[Any]:
        with self._lock:
            if i not in self._cache:
                if len(self._cache) == self._kept:
                    self._cache.popitem(last=False)
                self._cache[i] = self._decode(i)
            self._cache.move_to_end(i)
            return self._cache[i]

    def _decode(self, i: int) -> NDArray[Any]:
        start, where = int(self._starts[i]), f"{self.path}: {self.column!r}"
        with open_parquet(self.path, _PARQUET) as file:
            column = file.read_row_group(i, columns=[self.column])[self.column]
            if len(column) != self._starts[i + 1] - start:
                raise DataError(
                    f"{self.path} is damaged (row group {i} has {len(column):,} rows): make it again"
                )
            block = matrix_of(column, where, start=start, width=self.width)
        check_array(block.shape, block.dtype, where)
        return block

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        return self._at(np.arange(start, stop))

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        group = np.searchsorted(self._starts, positions, side="right") - 1
        out = np.empty((len(positions), self.width), np.float32)
        for i in np.unique(group):
            mine = group == i
            with np.errstate(over="ignore"):
                out[mine] = self._group(int(i))[positions[mine] - self._starts[i]]
        return out


class ConcatVectors(Vectors):
    """Concatenated rows of several sources. Raises DataError: different widths (names two)."""

    def __init__(self, parts: Sequence[Vectors], names: Sequence[str]) -> None:
        self.parts, self.width = list(parts), parts[0].width
        for part, name in zip(parts, names, strict=True):
            if part.width != self.width:
                raise DataError(f"{names[0]} has rows of {self.width} numbers, {name} of {part.width}")
        self._starts = np.concatenate([[0], np.cumsum([part.n for part in parts])]).astype(np.int64)
        self.n = int(self._starts[-1])

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        return self._at(np.arange(start, stop))

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        part_of = np.searchsorted(self._starts, positions, side="right") - 1
        masks = {i: part_of == i for i in np.unique(part_of).tolist()}
        blocks = {i: self.parts[i].read(positions[mask] - self._starts[i]) for i, mask in masks.items()}
        out = np.empty((len(positions), self.width), np.result_type(*blocks.values()))
        for i, mask in masks.items():
            out[mask] = blocks[i]
        return out


@dataclass(kw_only=True)
class FileFeatures(FeatureDataset):
    """Vectors of any source, streamed where it can be."""

    vectors: Vectors

    def _read(self, rows: Rows) -> NDArray[np.float32]:
        # float64 beyond the range of float32 becomes infinity, which the caller reports.
        with np.errstate(over="ignore"):
            return self.vectors.read(rows).astype(np.float32, copy=False)


def file_features(name: str, vectors: Vectors, content: str, about: About) -> FileFeatures:
    """A data set of vectors; ``content`` is their hash."""
    ids = np.arange(vectors.n, dtype=np.int64) if about.ids is None else about.ids
    bare = 0 if about.labels is None else int((~about.labels.has()).sum())
    said = [f"{bare:,} of {vectors.n:,} items are unlabelled"] if bare else []
    mark = "" if about.labels is None else about.labels.fingerprint()
    return FileFeatures(
        name=name,
        ids=ids,
        fingerprint=fingerprint("features", content, str((vectors.n, vectors.width)), mark, ids.tobytes()),
        labels=about.labels,
        official=about.official,
        texts=about.texts,
        notes=[*about.notes, *(["no labels"] if about.labels is None else said)],
        width=vectors.width,
        vectors=vectors,
    )


def features_in_memory(name: str, matrix: NDArray[Any], about: About) -> FileFeatures:
    """:func:`file_features` of the rows of ``matrix``. Raises DataError: not numbers [N, width]."""
    content = hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).hexdigest()
    return file_features(name, ArrayVectors(matrix, name), content, about)

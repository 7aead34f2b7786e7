"""HDF5 files: arrays written by any program, and small files of our own.

Only this package uses h5py. Links to other files are not followed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import atomic_path
from ..inputs import reading

_ROWS_AT_ONCE = 256  # least span of rows that are read together

Texts = NDArray[Any]
"""A column of texts: StringDType [N]."""


def as_texts(values: Iterable[str]) -> Texts:
    """Return a column of texts, without NUL; invalid UTF-8 (in file names) is escaped by
    backslashes."""
    plain = [
        value.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
        for value in (value.replace("\0", "") for value in values)
    ]
    return np.array(plain, dtype=np.dtypes.StringDType())


@contextlib.contextmanager
def open_hdf5(path: Path, content: str = "an HDF5 file with arrays") -> Iterator[Any]:
    """Open a file for reading; ``content`` names the expected content in errors.

    Raises:
        DataError: the file is missing or damaged, even if that shows only in the ``with`` block.
    """
    with reading(path, content), h5py.File(path, "r", locking=False) as h5:
        yield h5


def dataset(h5: Any, name: str) -> Any:
    """Return a dataset that is stored in the open file itself.

    The fingerprint of a file of vectors would not show changes of data in another file.

    Raises:
        DataError: it is missing, not a dataset, or stored in another file.
    """
    link = h5.get(name, getlink=True)
    entry = h5[name] if isinstance(link, h5py.HardLink) else None
    if not isinstance(entry, h5py.Dataset) or entry.external or entry.is_virtual:
        raise DataError(f"the file has no dataset {name!r} (links are not followed)")
    return entry


class Hdf5Array:
    """An array of numbers in an HDF5 file, read by rows.

    The file is opened for each read, so the object can be sent to other processes.

    Attributes:
        shape, dtype: of the dataset.

    Raises:
        DataError: the dataset is missing, or does not hold numbers.
    """

    def __init__(self, path: str | Path, name: str) -> None:
        self.path = Path(path)
        self.name = name
        with open_hdf5(self.path) as h5:
            array = dataset(h5, name)
            if array.dtype.kind not in "iufb" or array.ndim == 0:
                raise DataError(
                    f"{name!r} is {array.dtype} {list(array.shape)}, not an array of numbers"
                )
            self.shape: tuple[int, ...] = tuple(int(size) for size in array.shape)
            self.dtype: np.dtype[Any] = np.dtype(array.dtype)

    def __getitem__(self, rows: slice | NDArray[Any]) -> NDArray[Any]:
        """Return the rows of a slice with step 1, or at positions in any order."""
        with open_hdf5(self.path) as h5:
            array = dataset(h5, self.name)
            if isinstance(rows, slice):
                return np.asarray(array[rows])
            positions, inverse = np.unique(np.arange(self.shape[0])[rows], return_inverse=True)
            # HDF5 is slow for scattered rows, and decompresses a whole chunk for each of them, so
            # all rows between the first and the last one of a span are read together.
            span = max(_ROWS_AT_ONCE, array.chunks[0] if array.chunks else 0)
            groups = np.split(positions, np.flatnonzero(np.diff(positions // span)) + 1)
            blocks = [
                array[group[0] : group[-1] + 1][group - group[0]] for group in groups if len(group)
            ]
            empty = np.empty((0, *self.shape[1:]), self.dtype)
            return np.concatenate([empty, *blocks])[inverse]


def read_arrays(
    path: str | Path, content: str, names: Collection[str] | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read the arrays and attributes of a file written by :func:`write_arrays`.

    Args:
        content: the expected content, for errors.
        names: the arrays to read (default: all).

    Returns:
        The arrays by name, and the attributes as they are stored (JSON as text).

    Raises:
        DataError: the file is missing, empty, truncated or damaged.
    """
    with open_hdf5(Path(path), content) as h5:
        selected = h5.keys() if names is None else h5.keys() & set(names)
        arrays = {str(name): np.asarray(dataset(h5, name)[()]) for name in selected}
        attributes = {
            name: value.item() if isinstance(value, np.generic) else value
            for name, value in h5.attrs.items()
        }
        return arrays, attributes


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]
) -> None:
    """Write arrays, and attributes (as JSON if they are neither text nor numbers), atomically.

    Raises:
        DataError: the file cannot be written.
    """
    with atomic_path(path) as temporary, h5py.File(temporary, "w", locking=False) as h5:
        for name, array in arrays.items():
            # Uncompressed, as HDF5 crashes if compressed data fill the disk.
            h5.create_dataset(name, data=array)
        for name, value in attributes.items():
            h5.attrs[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)

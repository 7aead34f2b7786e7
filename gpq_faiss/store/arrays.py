"""Plain HDF5 files of named arrays, for results."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_memory
from .foreign import dataset, open_hdf5
from .sink import PACKED, new_hdf5

_MAX_BYTES = 4 << 30  # per array


def write_arrays(
    path: str | Path,
    arrays: Mapping[str, NDArray[Any]],
    attributes: Mapping[str, Any],
    *,
    compress: bool = False,
) -> Path:
    """Write ``arrays`` as datasets and ``attributes`` (as JSON if not text or numbers) atomically.

    Args:
        compress: gzip and a checksum for arrays of more than a few bytes.

    Raises:
        DataError: the file cannot be written.
    """
    path = Path(path)
    with new_hdf5(path) as (h5, _):
        for name, array in arrays.items():
            packed = compress and array.ndim and array.nbytes > 64
            h5.create_dataset(name, data=array, **({"chunks": _chunks(array), **PACKED} if packed else {}))
        for name, value in attributes.items():
            h5.attrs[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)
    return path


def _chunks(array: NDArray[Any]) -> tuple[int, ...]:
    """Chunk shape: whole rows, about 1 MiB."""
    row = max(1, array.nbytes // max(1, len(array)))
    return (min(len(array), max(1, (1 << 20) // row)), *array.shape[1:])


def read_arrays(
    path: str | Path, what: str, names: Collection[str] | None = None
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read a file of :func:`write_arrays`: arrays, and attributes as stored (JSON as text).

    Args:
        path: the file.
        what: expected content, for errors.
        names: arrays to read, if they exist; None: all.

    Raises:
        DataError: missing, empty, of another format, truncated or damaged.
    """
    path = Path(path)
    with open_hdf5(path, what) as h5:
        attributes = {
            str(name): value.item() if isinstance(value, np.generic) else value
            for name, value in h5.attrs.items()
        }
        arrays = {}
        for name in h5 if names is None else [name for name in h5 if name in names]:
            found = dataset(h5, name, path)
            size = found.size * found.dtype.itemsize
            if size > _MAX_BYTES:
                raise DataError(f"{path}: {name!r} has more than {_MAX_BYTES >> 30} GiB: {what} is needed")
            check_memory(size, f"{path}: {name!r}")
            arrays[str(name)] = np.asarray(found[()])
    return arrays, attributes

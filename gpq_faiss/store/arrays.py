"""Plain HDF5 files of a few named arrays: results for other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
from numpy.typing import NDArray

from ..files import atomic_path
from .sink import Sink


def write_arrays(path: str | Path, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> Path:
    """Write ``arrays`` as datasets and ``attributes`` (as JSON where they are not text or numbers), wholly or not at all.

    Raises:
        DataError: it cannot be written.
    """
    path = Path(path)
    with atomic_path(path) as temporary:
        sink = Sink(temporary)
        try:
            with h5py.File(sink, "w", libver=("v110", "v110")) as h5:
                for name, array in arrays.items():
                    h5.create_dataset(name, data=array)
                for name, value in attributes.items():
                    h5.attrs[name] = value if isinstance(value, (str, int, float)) else json.dumps(value)
            sink.check()
        finally:
            sink.close()
    return path

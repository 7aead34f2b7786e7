"""Items files of earlier versions, ``index.faiss.items.h5``, read only to convert them.

Packed labels and the columns ``text.NAME`` are in the order of rows. ``ids`` are sorted, and ``rows`` holds the row of each; without
these two, ids are row numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_memory, parse_json
from .hdf5 import dataset, open_hdf5
from .texts import TextColumn, Texts

_BLOCK = 1 << 15
_WHAT = "the names and labels of an index, in the form of an earlier version"

Block = tuple[NDArray[np.int64], dict[str, Texts], NDArray[np.uint8] | None, tuple[str, ...]]
"""Ids [n], text columns [n], packed labels [n, ceil(C/8)] if any, and the names of the C classes."""


def old_items_path(index: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.items.h5``."""
    return Path(f"{index}.items.h5")


def old_items_key(path: Path) -> str:
    """The key of a file, which the index's sidecar has too. Raises DataError: damaged or of another format."""
    with open_hdf5(path, _WHAT) as h5:
        attrs = dict(h5.attrs)
        if attrs.get("kind") != b"items" or int(attrs["format_version"]) != 1:
            raise DataError(f"{path} is not {_WHAT}")
        return str(attrs["key"].decode())


def old_items(path: Path) -> Iterator[Block]:
    """All items in blocks. Raises DataError: the file is damaged."""
    with open_hdf5(path, _WHAT) as h5:
        n, classes = int(h5.attrs["ntotal"]), parse_json(h5.attrs["class_names"])
        if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
            raise DataError("class names are no list of texts")
        columns = TextColumn.all_of(h5, n)
        shape = n, (len(classes) + 7) // 8
        packed = dataset(h5, "labels", np.uint8, shape) if classes else None
        check_memory(40 * n, f"the ids of {n:,} items")
        ids = np.arange(n)
        if "ids" in h5:
            stored, rows = (np.asarray(dataset(h5, name, np.int64, (n,))[()]) for name in ("ids", "rows"))
            if not (stored[1:] > stored[:-1]).all() or not np.array_equal(np.sort(rows), ids):
                raise DataError("ids repeat, or belong to no row")
            ids[rows] = stored
        for start in range(0, n, _BLOCK):
            stop = min(start + _BLOCK, n)
            texts = {name: column.span(start, stop) for name, column in columns.items()}
            yield ids[start:stop], texts, None if packed is None else packed[start:stop], tuple(classes)

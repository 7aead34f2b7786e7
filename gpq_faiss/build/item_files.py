"""The items file beside an index: names, labels and kept columns of its sources."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BusyError, DataError
from ..faissio.io import read_sidecar
from ..files import Closing, atomic_path, fingerprint
from ..indexes.manifest import Manifest, is_manifest, read_manifest
from ..inputs import check_memory, parse_json
from ..progress import stage
from ..store.hdf5 import TextColumn, Texts, dataset, open_hdf5
from ..store.items import Item, Items, Row, as_json, items_path, write_items
from ..store.reader import RowReader
from .shards import Shard

log = logging.getLogger(__name__)

_ROWS = 1 << 15
_OLD = "the names and labels of an index, in the form of an earlier version"


def items_key(shards: Sequence[Shard]) -> str | None:
    """What identifies the names and labels of an index of these sources, also in its sidecar.

    None if a source, an index without an items file, has no data on its items, or none has names or labels.
    """
    keys: list[str] = []
    unknown: list[Path] = []
    named = False
    for shard in shards:
        if shard.kind != "index":
            with RowReader(shard.path) as reader:
                header, columns = reader.header, reader.text_columns
                keys += [f"{header.data_fingerprint} {reader.ntotal}", *header.class_names, *columns]
            named |= bool(header.class_names or columns)
        elif (items := open_items(shard.path)) is None:
            unknown.append(shard.path)
        else:
            with items:
                keys.append(items.key)
            named = True
    if unknown and named:
        log.warning("%s has no names or labels, so the index gets none of any source", unknown[0])
    return None if unknown or not named else fingerprint("items", *keys)


def has_items(index: str | Path, key: str) -> bool:
    """Whether the items file of ``index`` is there, is whole, and has the items with this key."""
    with contextlib.suppress(DataError), Items(items_path(index)) as items:
        return bool(items.key == key == _stated_key(index))
    return False


def write_names(path: Path, shards: Sequence[Shard], key: str) -> None:
    """Write the names and labels of sources to the temporary file ``path``."""
    with stage("writing names"):
        write_items(path, (row for shard in shards for row in _rows_of(shard)), key)


def _rows_of(shard: Shard) -> Iterator[Row]:
    if shard.kind == "index":
        with open_items(shard.path) or contextlib.nullcontext() as items:
            yield from items.rows() if items else ()
        return
    with RowReader(shard.path) as reader:
        for start in range(0, reader.ntotal, _ROWS):
            stop = min(reader.ntotal, start + _ROWS)
            texts, packed = reader.texts(start, stop), reader.labels(start, stop)
            yield from _rows(reader.ids(start, stop), texts, packed, reader.header.class_names)


def _rows(
    ids: NDArray[np.int64],
    texts: Mapping[str, Texts],
    packed: NDArray[np.uint8] | None,
    classes: tuple[str, ...],
) -> Iterator[Row]:
    n = len(ids)
    names = texts["name"].tolist() if "name" in texts else [None] * n
    others = {name: column.tolist() for name, column in texts.items() if name != "name"}
    kept = zip(*others.values(), strict=True)
    columns = [as_json(dict(zip(others, row, strict=True))) for row in kept] if others else [None] * n
    labels: list[str | None] = [None] * n
    if packed is not None:  # most rows have the same labels as others
        distinct, which = np.unique(packed, axis=0, return_inverse=True)
        on = np.unpackbits(distinct, axis=1, count=len(classes)).astype(bool)
        named = [as_json(sorted(classes[c] for c in np.flatnonzero(row))) for row in on]
        labels = [named[number] for number in which.tolist()]
    yield from zip(ids.tolist(), (name or None for name in names), labels, columns, strict=True)


def open_items(index: str | Path) -> Items | None:
    """The items of an index file; None (with a warning) if they are missing, belong to another index, or cannot be converted.

    An items file of an earlier version is converted once.

    Raises:
        DataError: a damaged items file, or it cannot be converted.
    """
    path, old, wanted = items_path(index), Path(f"{index}.items.h5"), _stated_key(index)
    if path.exists():
        items = Items(path)
        if items.key == wanted:
            return items
        items.close()
        why = "belongs to another index"
    elif wanted is None:
        return None
    elif not old.exists():
        why = "is missing"
    elif _old_key(old) != wanted:
        path, why = old, "belongs to another index"
    elif not os.access(path.parent, os.W_OK):
        path, why = old, "has the form of an earlier version, and its folder cannot be written"
    else:
        _convert(old, index, wanted)
        return open_items(index)
    log.warning("%s %s: results of %s come without names; index the codes again", path, why, index)
    return None


def _stated_key(index: str | Path) -> Any:
    """The key of an index's items in its sidecar, or None."""
    return (read_sidecar(index) or {}).get("extra", {}).get("items")


def _convert(old: Path, index: str | Path, key: str) -> None:
    """Write the items file of ``index`` from that of an earlier version, which stays: manifests may name it."""
    path = items_path(index)

    def still_missing(_: tuple[Path, ...]) -> None:
        if path.exists() or _stated_key(index) != key:
            raise BusyError(f"{path} or its index was written meanwhile")

    with stage("converting names"), contextlib.suppress(BusyError):
        with atomic_path(path, before=still_missing) as temporary:
            write_items(temporary, _old_rows(old), key)
        log.info("%s: converted to %s", old, path.name)


def _old_key(path: Path) -> str:
    """The key of an items file of an earlier version. Raises DataError: damaged or of another format."""
    with open_hdf5(path, _OLD) as h5:
        attrs = dict(h5.attrs)
        if attrs.get("kind") != b"items" or int(attrs["format_version"]) != 1:
            raise DataError(f"{path} is not {_OLD}")
        return str(attrs["key"].decode())


def _old_rows(path: Path) -> Iterator[Row]:
    """All items of such a file. Labels and texts are in the order of rows; ``rows`` holds the row of each of the sorted ``ids``, which
    are row numbers if it has none."""
    with open_hdf5(path, _OLD) as h5:
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
        for start in range(0, n, _ROWS):
            stop = min(start + _ROWS, n)
            texts = {name: column.span(start, stop) for name, column in columns.items()}
            yield from _rows(
                ids[start:stop], texts, None if packed is None else packed[start:stop], tuple(classes)
            )


class ShardItems(Closing):
    """Items of the shards of a manifest by id. Only needed files are opened. Thread-safe."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest, self._lock = manifest, threading.Lock()
        self._opened: dict[str, Items | None] = {}

    def lookup(self, ids: NDArray[np.int64]) -> list[Item | None]:
        """Item of each id [n]; None for -1 and unknown ids. Raises DataError: a damaged file of a shard."""
        known: list[Item | None] = [None] * len(ids)
        for shard in self._manifest.shards:
            rows = np.flatnonzero((ids >= shard.first_id) & (ids <= shard.last_id))
            if not len(rows):
                continue
            with self._lock:
                if shard.file not in self._opened:
                    path = self._manifest.file(shard)
                    self._opened[shard.file] = open_items(path) if path.exists() else None
            items = self._opened[shard.file]
            if items is not None:
                for row, item in zip(rows.tolist(), items.lookup(ids[rows]), strict=True):
                    known[row] = item or known[row]
        return known

    def close(self) -> None:
        """Close the files."""
        for items in filter(None, self._opened.values()):
            items.close()


def known_items(index: str | Path) -> Items | ShardItems | None:
    """As :func:`open_items`, also for a manifest."""
    if not is_manifest(index):
        return open_items(index)
    manifest = read_manifest(index)
    return ShardItems(manifest) if any(len(shard.beside) > 1 for shard in manifest.shards) else None

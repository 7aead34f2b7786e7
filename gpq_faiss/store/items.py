"""The items file beside an index: names, labels and kept columns by id, in SQLite.

Table ``items`` has ``id``, ``name``, ``labels`` (a JSON array, null if unknown) and ``columns`` (a JSON object of the kept texts);
``about`` has the ``key`` that the index's sidecar has too. The file is written once and replaced as a whole, together with its index.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..files import Closing
from ..inputs import parse_json
from .sqlite import LARGEST, has_tables, make_tables, open_sqlite, read_errors, write_errors

_WHAT = "the names and labels of an index (written by 'gpq index')"
_VERSION = 2  # version 1 was HDF5
_TABLES = {
    "items": "CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, labels TEXT, columns TEXT)",
    "about": "CREATE TABLE about (key TEXT)",
}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def items_path(index: str | Path) -> Path:
    """Path of the items file of an index: ``index.faiss.items.sqlite``."""
    return Path(f"{index}.items.sqlite")


@dataclass(frozen=True)
class Item:
    """Name, labels (a set: in alphabetical order, wherever they are stored) and texts of an item; an empty name is none."""

    texts: dict[str, str]
    labels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.labels is not None:
            object.__setattr__(self, "labels", tuple(sorted(self.labels)))

    @property
    def name(self) -> str | None:
        """Its path or key, if any."""
        return self.texts.get("name") or None


Row = tuple[int, str | None, str | None, str | None]
"""Id, name, labels and columns as they are stored."""


def item_row(number: int, item: Item) -> Row:
    """The row of an item."""
    columns = {name: text for name, text in item.texts.items() if name != "name"}
    return number, item.name, as_json(item.labels), as_json(columns or None)


def as_json(value: Any) -> str | None:
    """Labels or columns as they are stored."""
    return None if value is None else _ENCODER.encode(value)


def row_item(name: Any, labels: Any, columns: Any) -> Item:
    """The item of :func:`item_row`. Raises ValueError, TypeError: of other types."""
    texts = {} if columns is None else parse_json(columns)
    named = [] if labels is None else parse_json(labels)
    if not isinstance(texts, dict) or not isinstance(named, list):
        raise TypeError("labels or columns are of another type")
    texts |= {} if name is None else {"name": name}
    if not all(isinstance(text, str) for text in (*texts.values(), *named)):
        raise TypeError("a name, label or column is no text")
    return Item(dict(sorted(texts.items())), None if labels is None else tuple(named))


def write_items(path: Path, rows: Iterable[Row], key: str) -> None:
    """Write the items of an index to a new, temporary file; the same rows in the same order give the same bytes.

    Args:
        rows: see :func:`item_row`.
        key: identifies these items; also in the index's sidecar, to detect the file of another index.

    Raises:
        OSError: writing fails; :func:`..files.atomic_path` says where.
    """
    with write_errors(), contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
        # The file is a temporary one until all of it is on disk.
        db.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536; BEGIN"
        )
        make_tables(db, _TABLES, _VERSION)
        db.execute("INSERT INTO about VALUES (?)", (key,))
        db.executemany("INSERT INTO items VALUES (?, ?, ?, ?)", rows)
        db.execute("COMMIT")


class Items(Closing):
    """Items of an index by id, with the ``key`` of :func:`write_items`; a context manager. Thread-safe.

    Raises:
        DataError: as all methods: missing, damaged or of another format.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        with self._guard():
            self._db = open_sqlite(self.path, _WHAT)
            weakref.finalize(self, self._db.close)  # a service's searches may use it longer than its index
            if not has_tables(self._db, _TABLES, _VERSION):
                raise DataError(f"{self.path} is not {_WHAT}: index the codes again")
            self.key = str(self._db.execute("SELECT key FROM about").fetchone()[0])

    def _guard(self) -> contextlib.AbstractContextManager[None]:
        return read_errors(self.path, "index the codes again")

    def lookup(self, ids: NDArray[np.int64]) -> list[Item | None]:
        """Item of each id [n]; None for -1 and unknown ids."""
        known: dict[int, Item] = {}
        with self._lock, self._guard():
            for number in np.unique(ids[ids != -1]).tolist():
                wanted = self._db.execute("SELECT name, labels, columns FROM items WHERE id = ?", (number,))
                for row in wanted:
                    known[number] = row_item(*row)
        return [known.get(number) for number in ids.tolist()]

    def rows(self) -> Iterator[Row]:
        """All items as they are stored, by ascending id."""
        with self._guard():
            yield from self._db.execute("SELECT id, name, labels, columns FROM items ORDER BY id")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

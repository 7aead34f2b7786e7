"""The items file beside an index: names, labels and kept columns by id, in SQLite.

Table ``items`` has ``id``, ``name``, ``labels`` (a JSON array, null if unknown) and ``columns`` (a JSON object of the kept texts);
``about`` has the ``key`` that the index's sidecar has too. The file is written once and replaced as a whole, together with its index.
SQLite files are read with limits, as they may be damaged or foreign, and there is one error for whatever is wrong.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sqlite3
import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..files import Closing
from ..inputs import check_file, parse_json

LARGEST = 16 << 20
"""Maximum bytes of a row."""


def open_sqlite(path: Path, what: str, options: str = "mode=ro&immutable=1") -> sqlite3.Connection:
    """Open an untrusted file, to be used by several threads one at a time. Transactions are begun and ended by the caller.

    Args:
        what: the expected content, for errors.
        options: by default the file is only read, and nobody writes to it.

    Raises:
        DataError: it is missing or no file. Errors of SQLite come with the first statement that reads it.
    """
    if "mode=ro" in options:
        check_file(path, what)
    name = f"file:{quote(os.fsencode(path.absolute()))}?{options}"
    db = sqlite3.connect(name, uri=True, check_same_thread=False, isolation_level=None)
    db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST)
    # Against prepared files: nothing in the schema is run, and every page is checked.
    db.executescript("PRAGMA trusted_schema = OFF; PRAGMA cell_size_check = ON")
    return db


def make_tables(db: sqlite3.Connection, tables: dict[str, str], version: int) -> None:
    """Make these empty tables (name -> SQL), in place of what has their names, within the caller's transaction."""
    for name, sql in tables.items():
        db.execute(f"DROP TABLE IF EXISTS {name}")
        db.execute(sql)
    db.execute(f"PRAGMA user_version = {version}")


def has_tables(db: sqlite3.Connection, tables: dict[str, str], version: int) -> bool:
    """Whether a file has exactly these tables, and no view or trigger in their place, in this version."""
    found = db.execute("SELECT name, sql FROM sqlite_schema WHERE type IN ('table', 'view', 'trigger')")
    there = dict(found.fetchmany(1000))
    (stored,) = db.execute("PRAGMA user_version").fetchone()
    return stored == version and all(there.get(name) == sql for name, sql in tables.items())


@contextlib.contextmanager
def read_errors(path: Path, remedy: str) -> Iterator[None]:
    """Context that turns SQLite's errors, and those of parsing what it read, into one line."""
    try:
        yield
    except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{path} is truncated or damaged ({one_line(error)}): {remedy}") from error


@contextlib.contextmanager
def write_errors() -> Iterator[None]:
    """Context that turns SQLite's errors of writing into OSError, for :func:`..files.write_error`."""
    try:
        yield
    except sqlite3.Error as error:
        full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        raise (OSError(errno.ENOSPC, "") if full else OSError(str(error))) from error


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

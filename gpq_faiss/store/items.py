"""Names, labels and text columns of the items of an index, in SQLite or in a codes file.

``gpq index`` writes ``index.faiss.items.sqlite`` together with the index, and replaces it as a
whole. The table ``items`` has the columns ``id``, ``name``, ``labels`` (a JSON array, null if
unknown) and ``columns`` (a JSON object of texts). The table ``about`` says which index the file
belongs to (number of items, and CRC of codes and ids), which data set the items come from, and
which change of a service the index contains.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..codes.checks import Ids
from ..errors import DataError, one_line
from ..files import Closing
from .changes import Change
from .hdf5 import Texts, as_texts
from .rows import RowReader, row_blocks

_SCHEMA = """
CREATE TABLE items (id INTEGER PRIMARY KEY, name TEXT, labels TEXT, columns TEXT);
CREATE TABLE about (ntotal INTEGER, crc INTEGER, data TEXT, changes TEXT, number INTEGER);
"""
_BLOCK = 1 << 15
_JSON = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))

Row = tuple[int, str | None, str | None, str | None]
"""Id, name, labels and columns as they are stored."""


@dataclass(frozen=True)
class Item:
    """Texts of an item by column (``name``: its path or key), and its labels in alphabetical order.

    Labels are None where they are unknown, as are those of an unlabelled item.
    """

    texts: dict[str, str]
    labels: tuple[str, ...] | None = None

    @property
    def name(self) -> str | None:
        """The path or key of the item, if it has one."""
        return self.texts.get("name") or None


class IndexDescription(NamedTuple):
    """The index that an items file belongs to.

    Attributes:
        ntotal, crc: number of items of the index, and CRC-32 of its codes and ids.
        data: fingerprint of the data set, empty if there are several.
        changes, number: identity of a changes file, and number of the last of its changes that the
            index contains; empty and 0 if it contains none.
    """

    ntotal: int
    crc: int
    data: str = ""
    changes: str = ""
    number: int = 0


def items_path(index: str | Path) -> Path:
    """Return the path of the items file of an index: ``index.faiss.items.sqlite``."""
    return Path(f"{index}.items.sqlite")


CHANGED_DATA = (
    "%s or its labels have changed since they were encoded: pictures are matched by name, "
    "and files with other content are skipped"
)
"""Warning of data whose pictures are shown; its argument is their name."""


class PictureRows:
    """Finds the pictures of indexed items in a data set: files by name and content, others by id.

    Args:
        ids: int64 [N], those of the data set.
        texts: its columns of texts; files have ``name`` and ``file_hash``.

    Attributes:
        are_files: whether the data set has files.
    """

    def __init__(self, ids: Ids, texts: Mapping[str, Texts]) -> None:
        self.are_files = "file_hash" in texts
        self._contents = texts.get("file_hash", as_texts([]))
        keys = (texts["name"] if self.are_files else ids).tolist()
        counts = Counter(keys)
        self._rows = {key: row for row, key in enumerate(keys) if key != "" and counts[key] == 1}

    def find(self, id_: int, item: Item) -> int:
        """Return the row of an item; -1 if its name or id is gone, repeated or of another file."""
        if not self.are_files:
            return self._rows.get(id_, -1)
        row = self._rows.get(item.name, -1)
        return row if row >= 0 and self._contents[row] == item.texts.get("file_hash") else -1


class ItemSource(Closing):
    """A source of the names and labels of the items of an index; this one has none.

    Attributes:
        data_fingerprint: fingerprint of the data set of the items; empty if it is not known.
    """

    data_fingerprint = ""

    def item(self, number: int) -> Item | None:
        """Return the item with an id; None if it is unknown."""
        return None

    def find(self, name: str) -> list[int]:
        """Return the ids of the items with a name, in ascending order."""
        return sorted(row[0] for row in self.rows() if row[1] == name)

    def rows(self) -> Iterator[Row]:
        """Yield all items as they are stored."""
        yield from ()


# Rows of the items file ---------------------------------------------------------------------------


def as_json(value: Any) -> str | None:
    """Return labels or columns as they are stored; None stays None."""
    return None if value is None else _JSON.encode(value)


def _parse(row: Row) -> Item:
    """Return an item of its values as they are stored."""
    _, name, labels, columns = row
    texts = {} if columns is None else json.loads(columns)
    if name is not None:
        texts["name"] = name
    return Item(texts, None if labels is None else tuple(json.loads(labels)))


def write_items(path: Path, rows: Iterable[Row], description: IndexDescription) -> None:
    """Write an items file to a new, temporary path.

    Raises:
        sqlite3.Error: writing fails; :func:`..files.atomic_path` explains it.
    """
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as db:
        # The file is a temporary one until all of it is on disk.
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; BEGIN;" + _SCHEMA)
        db.execute("INSERT INTO about VALUES (?, ?, ?, ?, ?)", description)
        db.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?, ?)", rows)
        db.execute("COMMIT")


class Items(ItemSource):
    """Reader of the items file of an index, by id. Thread-safe.

    Attributes:
        description: the index that the file belongs to.

    Raises:
        DataError: the file is missing, damaged or of another format; also raised by all methods.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        with self._explained():
            # SQLite lets one thread after the other use a connection, but not Python's cache of
            # statements (python/cpython#118172).
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False, cached_statements=0)
            self.description = IndexDescription(*self._db.execute("SELECT * FROM about").fetchone())
        self.data_fingerprint = self.description.data

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn errors of SQLite, and of parsing its values, into a one-line DataError."""
        try:
            yield
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:
            raise DataError(
                f"{self.path} is truncated, damaged or foreign ({one_line(error)}): "
                "index the codes again"
            ) from error

    def item(self, number: int) -> Item | None:
        """Return the item with an id; None if it is unknown."""
        query = "SELECT id, name, labels, columns FROM items WHERE id = ?"
        with self._explained():
            row = self._db.execute(query, (number,)).fetchone()
            return None if row is None else _parse(row)

    def find(self, name: str) -> list[int]:
        """Return the ids of the items with a name, in ascending order."""
        query = "SELECT id FROM items WHERE name = ? ORDER BY id"
        with self._explained():
            return [number for (number,) in self._db.execute(query, (name,))]

    def rows(self) -> Iterator[Row]:
        """Yield all items as they are stored, by ascending id."""
        with self._explained():
            yield from self._db.execute("SELECT id, name, labels, columns FROM items ORDER BY id")

    def close(self) -> None:
        """Close the file."""
        self._db.close()


class RowItems(ItemSource):
    """Names and labels in the rows of a codes or features file, read by id."""

    def __init__(self, reader: RowReader) -> None:
        self.data_fingerprint = reader.header.data_fingerprint
        self._reader = reader
        self._order = np.argsort(reader.ids, kind="stable")

    def item(self, number: int) -> Item | None:
        """Return the item with an id; None if it is unknown."""
        ids = self._reader.ids
        rank = int(np.searchsorted(ids, number, sorter=self._order))
        if rank == len(ids) or ids[self._order[rank]] != number:
            return None
        row = int(self._order[rank])
        return _parse(self._block(row, row + 1)[0])

    def rows(self) -> Iterator[Row]:
        """Yield all items as an items file stores them, in the order of the file."""
        for block in row_blocks(self._reader.ntotal, _BLOCK):
            yield from self._block(block.start, block.stop)

    def _block(self, start: int, stop: int) -> list[Row]:
        """Return the items of rows ``start:stop`` as an items file stores them."""
        reader = self._reader
        missing: list[str | None] = [None] * (stop - start)
        texts = {name: column.tolist() for name, column in reader.texts(start, stop).items()}
        names = [name or None for name in texts.pop("name", missing)]
        columns = labels = missing
        if texts:
            records = zip(*texts.values(), strict=True)
            columns = [as_json(dict(zip(texts, record, strict=True))) for record in records]
        if reader.labels is not None:
            # Many rows have the same labels, so each distinct set is encoded once.
            distinct, inverse = np.unique(reader.labels[start:stop], axis=0, return_inverse=True)
            classes = np.array(reader.header.class_names, dtype=object)
            flags = np.unpackbits(distinct, axis=1, count=len(classes)).astype(bool)
            encoded = [as_json(sorted(classes[row])) if row.any() else None for row in flags]
            labels = [encoded[number] for number in inverse.tolist()]
        return list(zip(reader.ids[start:stop].tolist(), names, labels, columns, strict=True))

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


class ChangedItems(ItemSource):
    """Names and labels of items, some of which have changed since their index was written.

    The name and labels of a changed item come from its change alone. A source that is made from
    another one of this class shares its changes: the other one has the new changes, too.
    """

    def __init__(self, source: ItemSource | None, changes: Mapping[int, Change]) -> None:
        self.source = source or ItemSource()
        self._changes: dict[int, Change] = {}
        if isinstance(source, ChangedItems):
            self.source = source.source
            self._changes = source._changes
        self._changes.update(changes)
        self.data_fingerprint = self.source.data_fingerprint

    def item(self, number: int) -> Item | None:
        """Return the item with an id; None if it is unknown or was removed."""
        change = self._changes.get(number)
        if change is None:
            return self.source.item(number)
        texts = {"name": change.name} if change.name else {}
        return None if change.code is None else Item(texts, change.labels)

    def find(self, name: str) -> list[int]:
        """Return the ids of the items with a name, in ascending order."""
        # A copy, as another thread may add changes meanwhile.
        candidates = {*self.source.find(name), *dict(self._changes)}
        return sorted(
            number for number in candidates if (self.item(number) or Item({})).name == name
        )

    def rows(self) -> Iterator[Row]:
        """Yield all items as an items file stores them: first those that have not changed."""
        for row in self.source.rows():
            if row[0] not in self._changes:
                yield row
        for number, change in self._changes.items():
            if change.code is not None and (change.name, change.labels) != (None, None):
                yield number, change.name, as_json(change.labels), None

    def close(self) -> None:
        """Close the source of the unchanged items."""
        self.source.close()

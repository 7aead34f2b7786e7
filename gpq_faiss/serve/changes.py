"""Changes of an index since its file was written, in a SQLite file beside it.

The last change of every id is a row: its code (none: removed), name and labels, with a checksum. Rows are written by transactions of
SQLite in WAL mode, on disk when they end. The index file takes them up from time to time; their rows are then deleted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Ids
from ..errors import DataError, MismatchError
from ..files import fsync, lock, recover, write_error
from ..store import Item
from ..store.items import item_row, row_item
from ..store.sqlite import check_schema, open_sqlite, read_errors, write_errors
from .old_log import old_log_path, read_old_log

log = logging.getLogger(__name__)

_VERSION = 1
_TABLES = {
    "changes": "CREATE TABLE changes (id INTEGER PRIMARY KEY, number INTEGER, code BLOB, name TEXT, labels TEXT, checksum INTEGER)",
    "about": "CREATE TABLE about (codebooks TEXT, code_size INTEGER)",
}

Change = tuple[int, NDArray[np.uint8] | None, Item | None]
"""An id, its code (None: removed), and its name and labels, if known."""


def changes_path(index: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.changes.sqlite``."""
    return Path(f"{Path(index)}.changes.sqlite")


@dataclass(frozen=True, eq=False)
class Changes:
    """The current state of all changed ids. Immutable.

    Attributes:
        ids: int64 [n], ascending.
        there: bool [n]: added, else removed.
        codes: uint8 [n, code_size], zeros if removed.
        about: object [n]: an :class:`..store.Item` if the item has a name or labels, else None.
    """

    ids: Ids
    there: NDArray[np.bool_]
    codes: Codes
    about: NDArray[Any]

    @classmethod
    def of(cls, changes: Iterable[Change], size: int) -> Changes:
        """Changes in order, with codes of ``size`` bytes; the last one of an id counts."""
        last = sorted({number: (code, about) for number, code, about in changes}.items())
        codes = [np.zeros(size, np.uint8) if code is None else code for _, (code, _) in last]
        about = np.empty(len(last), object)
        about[:] = [item for _, (_, item) in last]
        return cls(
            np.array([number for number, _ in last], np.int64),
            np.array([code is not None for _, (code, _) in last], np.bool_),
            np.array(codes, np.uint8).reshape(-1, size),
            about,
        )

    def then(self, later: Changes) -> Changes:
        """These changes followed by later ones."""
        kept = ~np.isin(self.ids, later.ids)
        order = np.argsort(np.concatenate([self.ids[kept], later.ids]))
        parts = ((getattr(self, field.name), getattr(later, field.name)) for field in fields(self))
        return Changes(*(np.concatenate([mine[kept], others])[order] for mine, others in parts))

    def at(self, number: int) -> int:
        """Index of an id, -1 if unchanged."""
        place = int(np.searchsorted(self.ids, number))
        return place if place < len(self.ids) and self.ids[place] == number else -1

    def __len__(self) -> int:
        return len(self.ids)


def read_changes(index: Path, size: int, fingerprint: str) -> Changes:
    """The changes beside an index with codes of ``size`` bytes and these codebooks.

    Raises:
        DataError: damaged, of another format or version, or unreadable.
        MismatchError: of another model.
    """
    path = changes_path(index)
    before = _before(index, size, fingerprint)
    try:
        if path.exists():
            with (
                _reading(path),
                contextlib.closing(open_sqlite(path, "changes of an index", "mode=ro")) as db,
            ):
                return before.then(_read(db, path, size, fingerprint))
    except DataError:
        if path.exists():  # else a service has just taken them up into the index
            raise
    return before


def _reading(path: Path) -> contextlib.AbstractContextManager[None]:
    return read_errors(path, "restore it, or move it away and lose its changes")


def _before(index: Path, size: int, fingerprint: str) -> Changes:
    """The changes in the log of an earlier version, if there is one."""
    old = old_log_path(index)
    try:
        return Changes.of(read_old_log(old, size, fingerprint) if old.exists() else (), size)
    except DataError:
        if old.exists():  # else a service has just taken them over
            raise
    return Changes.of((), size)


def _read(db: sqlite3.Connection, path: Path, size: int, fingerprint: str) -> Changes:
    if db.execute("SELECT 1 FROM sqlite_schema").fetchone() is None:  # new, or a crash while it was made
        return Changes.of((), size)
    if not check_schema(db, _TABLES, _VERSION):
        raise DataError(f"{path} is not the changes of an index: move it away to serve the index without it")
    if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise ValueError("its pages do not fit together")
    about = db.execute("SELECT codebooks, code_size FROM about").fetchone()
    rows = db.execute("SELECT id, code, name, labels, checksum FROM changes").fetchall()
    if about != (fingerprint, size) and rows:
        raise MismatchError(
            f"{path} holds changes of an index with other codebooks ({about and about[0]}, not {fingerprint}): "
            "serve the index that it belongs to, or move it away"
        )
    return Changes.of((_change(row, size) for row in rows), size)


def _change(row: tuple[Any, ...], size: int) -> Change:
    *values, checksum = row
    number, code, name, labels = values
    if _checksum(*values) != checksum or len(code or b"") not in (0, size):
        raise ValueError("a checksum differs")
    about = None if name is None and labels is None else row_item(name, labels, None)
    return number, None if code is None else np.frombuffer(code, np.uint8), about


def _checksum(number: int, code: bytes | None, name: str | None, labels: str | None) -> int:
    return zlib.crc32(f"{number} {None if code is None else code.hex()} {name} {labels}".encode())


class ChangeFile:
    """The changes beside an index, opened by the one process that may write them.

    Attributes:
        number: of the last transaction.

    Raises:
        DataError: another process writes them; or as :func:`read_changes`, or they cannot be written.
    """

    def __init__(self, index: Path, size: int, fingerprint: str) -> None:
        self.path, self._about = changes_path(index), (fingerprint, size)
        self._stack = contextlib.ExitStack()
        try:
            with self._writing():
                self._lock(index)
                if self.path.is_symlink():
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                with write_errors():
                    self._db = open_sqlite(self.path, "", "mode=rwc")
                self._stack.callback(self._db.close)
            held = self.read()
            with self._writing(), write_errors():
                self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
                if not len(held):
                    self._make()
            (self.number,) = self._db.execute("SELECT ifnull(max(number), 0) FROM changes").fetchone()
            self._take_over(old_log_path(index))
        except BaseException:
            self.close()
            raise

    def _lock(self, index: Path) -> None:
        old = old_log_path(index)  # which a service of an earlier version may have
        for path in (self.path, *([old] if old.exists() else [])):
            file = Path(f"{path}.lock")
            descriptor = lock(file)
            if descriptor is None:
                raise DataError(
                    f"{index} is changed by another process: end it first, or serve without --writable"
                )
            self._stack.callback(os.close, descriptor)
            self._stack.callback(file.unlink, missing_ok=True)
        recover(index)

    def _take_over(self, old: Path) -> None:
        """Write the changes of the log of an earlier version, and remove it. After a crash between the two, later changes stay."""
        if not old.exists():
            return
        fingerprint, size = self._about
        held, changes = self.read(), read_old_log(old, size, fingerprint)
        self.write([change for change in changes if held.at(change[0]) < 0])
        with self._writing():
            old.unlink()
            fsync(old.parent)
        log.info("%s: its %d changes are now in %s", old, len(changes), self.path.name)

    def _make(self) -> None:
        with self._db:
            self._db.execute("BEGIN")
            for name, sql in _TABLES.items():
                self._db.execute(f"DROP TABLE IF EXISTS {name}")
                self._db.execute(sql)
            self._db.execute("INSERT INTO about VALUES (?, ?)", self._about)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise write_error(self.path, error) from error

    def read(self) -> Changes:
        """All changes. Raises DataError, MismatchError: see :func:`read_changes`."""
        fingerprint, size = self._about
        with _reading(self.path):
            return _read(self._db, self.path, size, fingerprint)

    def write(self, changes: Sequence[Change]) -> None:
        """Make changes in order, all on disk on return. Raises DataError: writing fails, and none is made."""
        number = self.number + 1
        rows = []
        for item, code, about in changes:
            _, name, labels, _ = (item, None, None, None) if about is None else item_row(item, about)
            data = None if code is None else code.tobytes()
            rows.append((item, number, data, name, labels, _checksum(item, data, name, labels)))
        with self._writing(), write_errors(), self._db:
            self._db.execute("BEGIN")
            self._db.executemany("REPLACE INTO changes VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.number = number

    def drop(self, number: int) -> None:
        """Delete the changes of all transactions up to ``number``. Raises DataError: writing fails, and all stay."""
        with self._writing(), write_errors():
            self._db.execute("DELETE FROM changes WHERE number <= ?", (number,))

    def close(self) -> None:
        """Close the file; one without changes is removed."""
        with contextlib.suppress(AttributeError, sqlite3.Error):  # it was not opened, or it is no such file
            if self._db.execute("SELECT 1 FROM changes").fetchone() is None:
                self._stack.callback(self.path.unlink, missing_ok=True)
            self._db.execute("PRAGMA journal_mode = DELETE")  # other programs read it without files beside it
        self._stack.close()

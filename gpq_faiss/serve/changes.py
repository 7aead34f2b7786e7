"""Changes of an index since its file was written: transactions of SQLite in a file beside it.

The last change of every id is a row: its code (null: removed), name and labels, with a checksum. Rows are written in WAL mode, on disk
when a transaction ends. The index file takes them up from time to time; their rows are then deleted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError, MismatchError
from ..files import lock, recover, writing
from ..store.items import (
    Item,
    as_json,
    has_tables,
    make_tables,
    open_sqlite,
    read_errors,
    row_item,
    write_errors,
)

_VERSION = 1
_TABLES = {
    "changes": "CREATE TABLE changes (id INTEGER PRIMARY KEY, number INTEGER, code BLOB, name TEXT, labels TEXT, checksum INTEGER)",
    "about": "CREATE TABLE about (codebooks TEXT, code_size INTEGER)",
}


class Change(NamedTuple):
    """The code of an item (None: it was removed), and its name and labels, if known."""

    code: bytes | None
    item: Item | None = None


Changes = Mapping[int, Change]
"""The last change of every changed id."""


def changes_path(index: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.changes.sqlite``."""
    return Path(f"{Path(index)}.changes.sqlite")


def read_changes(index: Path, size: int, fingerprint: str) -> Changes:
    """The changes beside an index with codes of ``size`` bytes and these codebooks.

    Raises:
        DataError: damaged, of another format or version, or unreadable.
        MismatchError: of other codebooks.
    """
    path = changes_path(index)
    _check_no_log(index)
    changes: dict[int, Change] = {}
    try:
        with (
            read_errors(path, "restore it, or move it away and lose its changes"),
            contextlib.closing(open_sqlite(path, "changes of an index", "mode=ro")) as db,
        ):
            if db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise ValueError("its pages do not fit together")
            # New, or a crash while it was made.
            if db.execute("SELECT 1 FROM sqlite_schema").fetchone() is None:
                return {}
            if not has_tables(db, _TABLES, _VERSION):
                raise DataError(
                    f"{path} is not the changes of an index: move it away to serve the index without it"
                )
            about = db.execute("SELECT codebooks, code_size FROM about").fetchone()
            rows = db.execute("SELECT id, code, name, labels, checksum FROM changes")
            for number, code, name, labels, stored in rows:
                if about != (fingerprint, size):
                    raise MismatchError(
                        f"{path} holds changes of an index with other codebooks ({about and about[0]}, not {fingerprint}): "
                        "serve the index that it belongs to, or move it away"
                    )
                if _checksum(number, code, name, labels) != stored or len(code or b"") not in (0, size):
                    raise ValueError("a checksum differs")
                item = None if name is None and labels is None else row_item(name, labels, None)
                changes[number] = Change(code, item)
    except DataError:
        if path.exists():
            raise
        # There are none, or a service has just taken them up into the index.
    return changes


def _check_no_log(index: Path) -> None:
    """Raises DataError: there are changes in the form of an earlier version, which would be lost without a word."""
    log = Path(f"{index}.log")
    if log.exists():
        raise DataError(
            f"{log} has changes in the form of an earlier version: start and end 'gpq serve --writable' of that version, "
            "which writes them into the index, or move the file away and lose them"
        )


def _checksum(number: int, code: bytes | None, name: str | None, labels: str | None) -> int:
    return zlib.crc32(f"{number} {None if code is None else memoryview(code).hex()} {name} {labels}".encode())


class ChangeFile:
    """The changes beside an index, opened by the one process that may write them.

    Attributes:
        number: of the last transaction.

    Raises:
        DataError: another process writes them; or as :func:`read_changes`, or they cannot be written.
    """

    def __init__(self, index: Path, size: int, fingerprint: str) -> None:
        self.path = changes_path(index)
        _check_no_log(index)
        with contextlib.ExitStack() as stack:
            with self._writing():
                file = Path(f"{self.path}.lock")
                descriptor = lock(file)
                if descriptor is None:
                    raise DataError(
                        f"{index} is changed by another process: end it first, or serve without --writable"
                    )
                stack.callback(os.close, descriptor)
                stack.callback(file.unlink, missing_ok=True)
                recover(index)
                if self.path.is_symlink():
                    raise OSError(errno.ELOOP, "")
                self._db = stack.enter_context(contextlib.closing(open_sqlite(self.path, "", "mode=rwc")))
                stack.callback(self._settle)
            held = read_changes(index, size, fingerprint)
            with self._writing():
                self._db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL")
                if not held:
                    with self._db:
                        self._db.execute("BEGIN")
                        make_tables(self._db, _TABLES, _VERSION)
                        self._db.execute("INSERT INTO about VALUES (?, ?)", (fingerprint, size))
            (self.number,) = self._db.execute("SELECT ifnull(max(number), 0) FROM changes").fetchone()
            self.close = stack.pop_all().close

    def _settle(self) -> None:
        """Leave a file that others can read without files beside it, and none without changes."""
        with contextlib.suppress(sqlite3.Error):  # it is no such file, or is being read
            empty = self._db.execute("SELECT 1 FROM changes").fetchone() is None
            self._db.execute("PRAGMA journal_mode = DELETE")
            if empty:
                self.path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        with writing(self.path), write_errors():
            yield

    def write(self, changes: Changes) -> None:
        """Make changes, all on disk on return. Raises DataError: writing fails, and none is made."""
        number = self.number + 1
        rows = []
        for item, (code, about) in changes.items():
            name, labels = (None, None) if about is None else (about.name, as_json(about.labels))
            rows.append((item, number, code, name, labels, _checksum(item, code, name, labels)))
        with self._writing(), self._db:
            self._db.execute("BEGIN")
            self._db.executemany("REPLACE INTO changes VALUES (?, ?, ?, ?, ?, ?)", rows)
        self.number = number

    def drop(self, number: int) -> None:
        """Delete the changes of all transactions up to ``number``. Raises DataError: writing fails, and all stay."""
        with self._writing():
            self._db.execute("DELETE FROM changes WHERE number <= ?", (number,))

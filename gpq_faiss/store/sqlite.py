"""SQLite files: read with limits, as they may be damaged or foreign, and one error for whatever is wrong."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from ..errors import DataError, one_line
from ..inputs import check_file

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

"""Changes of an index since its file was written, in SQLite: ``index.faiss.changes.sqlite``.

The table ``changes`` holds the last change of every id: the number of its transaction, its code
(null if the item was removed), name and labels (a JSON array). The table ``about`` holds the
identity of the file, a random text made with it, and the fingerprint of the codebooks that the
codes belong to. Rows are never deleted, so the index file may be replaced by one of any age: all
changes that it does not contain are applied to it.

The service is the only writer. SQLite's rollback journal keeps each transaction whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock, Timeout

from ..errors import DataError, MismatchError, one_line
from ..files import Closing, atomic_path, writing

_TABLES = """
BEGIN;
CREATE TABLE changes (
    id INTEGER PRIMARY KEY,
    number INTEGER NOT NULL,
    code BLOB CHECK (length(code) = {code_size}),
    name TEXT,
    labels TEXT
) STRICT;
CREATE TABLE about (
    identity TEXT NOT NULL,
    codebooks TEXT NOT NULL,
    code_size INTEGER NOT NULL
) STRICT;
INSERT INTO about VALUES ('{identity}', '{fingerprint}', {code_size});
COMMIT;
"""

NewChange = tuple[bytes | None, str | None, tuple[str, ...] | None]
"""Code (None: remove the item), name and labels."""


class Change(NamedTuple):
    """The last change of an id.

    Attributes:
        number: number of the transaction.
        code: code_size bytes, or None if the item was removed.
        name, labels: name and labels of the item, or None if it has none.
    """

    number: int
    code: bytes | None
    name: str | None
    labels: tuple[str, ...] | None


class Changes(NamedTuple):
    """All changes in a file.

    Attributes:
        identity: a random text made with the file, so that numbers of another file are not taken
            for its own.
        number: number of the last transaction; 0 if there is none.
        by_id: the last change of every changed id.
    """

    identity: str
    number: int
    by_id: dict[int, Change]

    def since(self, contained: tuple[str, int] | None) -> dict[int, Change]:
        """Return the changes that an index does not contain.

        Args:
            contained: identity and number of the last change that the index contains, if any.
        """
        identity, number = contained or ("", 0)
        return {
            id_: change
            for id_, change in self.by_id.items()
            if identity != self.identity or change.number > number
        }


def changes_path(index: str | Path) -> Path:
    """Return the path of the changes of an index: ``index.faiss.changes.sqlite``."""
    return Path(f"{index}.changes.sqlite")


def read_changes(index: str | Path, code_size: int, fingerprint: str) -> Changes | None:
    """Read the changes of an index.

    Args:
        index: path of the index.
        code_size: number of bytes of a code.
        fingerprint: fingerprint of the codebooks of the index.

    Returns:
        The changes, or None if there is no such file.

    Raises:
        MismatchError: the changes belong to other codebooks.
        DataError: the file is damaged, or is not a file of changes.
    """
    path = changes_path(index)
    if not path.exists():
        return None
    try:
        with contextlib.closing(_connect(path)) as db:
            (result,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if result != "ok":
                raise ValueError(result)
            identity, codebooks, size = db.execute("SELECT * FROM about").fetchone()
            rows = db.execute("SELECT id, number, code, name, labels FROM changes")
            by_id = {
                id_: Change(
                    number, code, name, None if labels is None else tuple(json.loads(labels))
                )
                for id_, number, code, name, labels in rows
            }
    except (sqlite3.Error, ValueError, TypeError) as error:
        raise DataError(
            f"{path} cannot be read as changes of an index ({one_line(error)}): "
            "restore it from a backup, or move it away and lose its changes"
        ) from error
    if (codebooks, size) != (fingerprint, code_size):
        raise MismatchError(
            f"{path} holds changes of an index with other codebooks ({codebooks}, not "
            f"{fingerprint}): use the index that it belongs to, or move it away"
        )
    return Changes(identity, max((change.number for change in by_id.values()), default=0), by_id)


def _connect(path: Path) -> sqlite3.Connection:
    """Open an existing file. The caller begins and ends transactions.

    With ``mode=rw`` SQLite rolls back a journal that a killed service left. Files without write
    permission are read all the same.
    """
    uri = f"{path.absolute().as_uri()}?mode=rw"
    return sqlite3.connect(uri, timeout=30, isolation_level=None, check_same_thread=False, uri=True)


class ChangeWriter(Closing):
    """Writer of the changes of an index; one process at a time may have one.

    The file is created if it is missing.

    Args:
        index: path of the index.
        code_size: number of bytes of a code.
        fingerprint: fingerprint of the codebooks of the index.

    Attributes:
        path: path of the file.
        changes: contents of the file; :meth:`write` adds to its ``by_id`` in place.

    Raises:
        DataError: another process writes the changes, or the file cannot be created; or see
            :func:`read_changes`.
        MismatchError: the changes belong to other codebooks.
    """

    def __init__(self, index: str | Path, code_size: int, fingerprint: str) -> None:
        self.path = changes_path(index)
        # The service opens and closes the file in different threads.
        lock = FileLock(f"{self.path}.lock", timeout=0, thread_local=False)
        with contextlib.ExitStack() as stack, writing(self.path):
            try:
                stack.enter_context(lock)
            except Timeout:
                raise DataError(
                    f"{index} is changed by another process: end it first, or serve without "
                    "--writable"
                ) from None
            if not self.path.exists():
                with (
                    atomic_path(self.path) as file,
                    contextlib.closing(sqlite3.connect(file)) as db,
                ):
                    db.executescript(
                        _TABLES.format(
                            identity=secrets.token_hex(16),
                            fingerprint=fingerprint,
                            code_size=code_size,
                        )
                    )
            changes = read_changes(index, code_size, fingerprint)
            assert changes is not None
            self.changes = changes
            self._db = stack.enter_context(contextlib.closing(_connect(self.path)))
            # EXTRA also waits until the removal of the journal is on disk: a journal that came back
            # after a crash would undo a change.
            self._db.execute("PRAGMA synchronous = EXTRA")
            self._status = self.path.stat()
            self._stack = stack.pop_all()

    def write(self, changes: Mapping[int, NewChange]) -> dict[int, Change]:
        """Write changes in one transaction, which is on disk on return.

        Args:
            changes: the new code, name and labels of every id.

        Returns:
            The changes with the number of the transaction.

        Raises:
            DataError: the file was deleted or replaced, or cannot be written; no change was made.
        """
        number = self.changes.number + 1
        rows = [
            (
                id_,
                number,
                code,
                name,
                None if labels is None else json.dumps(labels, ensure_ascii=False),
            )
            for id_, (code, name, labels) in changes.items()
        ]
        if not (self.path.exists() and os.path.samestat(self.path.stat(), self._status)):
            raise DataError(
                f"{self.path} was deleted or replaced while the service runs: no further change is "
                "accepted; put the file back, and restart the service"
            )
        with writing(self.path), self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("REPLACE INTO changes VALUES (?, ?, ?, ?, ?)", rows)
        self.changes = self.changes._replace(number=number)
        written = {id_: Change(number, *change) for id_, change in changes.items()}
        self.changes.by_id.update(written)
        return written

    def close(self) -> None:
        """Close the file, so that other processes can write it."""
        self._stack.close()

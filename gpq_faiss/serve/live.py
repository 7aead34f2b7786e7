"""An index that changes while it is searched: the index file and its file of changes.

The service never writes the index file. Another process may replace it at any time, by an index of
any age: all changes that the new file does not contain are applied to it.
"""

import logging
import threading
from pathlib import Path

from fastapi import HTTPException

from ..codes.bits import code_size
from ..errors import DataError, MismatchError
from ..files import Closing
from ..indexes.index import Index
from ..indexes.opening import open_index
from ..progress import stage
from ..store.changes import Changes, ChangeWriter, changes_path, read_changes
from ..store.items import ItemSource

log = logging.getLogger(__name__)


class LiveIndex(Closing):
    """An index file with its changes. Thread-safe.

    Args:
        path: path of the index.
        fingerprint: fingerprint of the model's codebooks, which the index must share.
        writable: accept changes; one process at a time can do so.

    Attributes:
        index: the index with all changes; a commit or a new file replaces it.
        changes: the last change of every changed id.
        is_complete: whether ``changes`` include those that the index file contains.

    Raises:
        DataError: index or changes are missing or damaged, or another process writes the changes.
        MismatchError: index or changes have other codebooks.
    """

    index: Index

    def __init__(self, path: str | Path, fingerprint: str, *, writable: bool = False) -> None:
        self.path = Path(path)
        self.writable = writable
        self._fingerprint = fingerprint
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._writer: ChangeWriter | None = None
        self._next_id = 0
        self._opened: list[tuple[int, int, int]] = []
        self.reload()

    @property
    def items(self) -> ItemSource:
        """Names and labels of the items."""
        return self.index.items or ItemSource()

    def change(
        self,
        id_: int | None,
        code: bytes | None,
        name: str | None = None,
        labels: tuple[str, ...] | None = None,
    ) -> int:
        """Add or remove an item. On return the change is on disk.

        Args:
            id_: id of the item; None: the next free one.
            code: code of the item to add; None: remove the item.
            name, labels: name and labels of the item to add.

        Returns:
            The id of the item.

        Raises:
            HTTPException: the id to add is in use, or no item has the id to remove; or the change
                cannot be written, and is not made.
        """
        with self._lock:
            assert self._writer is not None
            number = self._next_id if id_ is None else id_
            if number >= 1 << 63:
                raise HTTPException(409, "the largest possible id is in use: give an id")
            is_used = self.index.code_of(number) is not None
            if is_used and code is not None:
                raise HTTPException(
                    409, f"the id {number} is in use: give another, or remove it first"
                )
            if not is_used and code is None:
                raise HTTPException(404, f"no item has the id {number}")
            try:
                changes = self._writer.write({number: (code, name, labels)})
            except DataError as error:
                log.error("%s", error)
                raise HTTPException(507, str(error)) from error
            self._next_id = max(self._next_id, number + 1)
            self.index = self.index.apply(changes)
            return number

    # The index file -----------------------------------------------------------------------------

    def follow(self) -> None:
        """Watch the index file once a second until the index is closed."""
        while not self._closed.wait(1.0):
            self.watch()

    def watch(self) -> None:
        """Open the index again if its file was replaced. Errors are logged."""
        try:
            if self._state() != self._seen:
                self.reload()
        except Exception as error:
            log.error("the index stays as it is: %s", error)

    def _state(self) -> list[tuple[int, int, int]]:
        """Return inode, time and size of each file that another process may write."""
        paths = [self.path] if self.writable else [self.path, changes_path(self.path)]
        states = [path.stat() for path in paths if path.exists()]
        return [(state.st_ino, state.st_mtime_ns, state.st_size) for state in states]

    def reload(self) -> None:
        """Open the index file that is now at the path, with all changes.

        Raises:
            DataError, MismatchError: see the class.
        """
        self._seen = self._state()
        with stage("opening the index"):
            if self._seen[:1] != self._opened:  # not for a change alone
                self._base = open_index(self.path, changes=False)
                self._opened = self._seen[:1]
            index = self._base
            if index.fingerprint != self._fingerprint:
                raise MismatchError(
                    f"{self.path} has other codebooks ({index.fingerprint}) than the model "
                    f"({self._fingerprint}): build the index with this model"
                )
            size = code_size(index.M, index.K)
            with self._lock:
                # Only now: a new file of changes records the codebooks, which are checked above.
                if self.writable and self._writer is None:
                    self._writer = ChangeWriter(self.path, size, index.fingerprint)
                if self._writer is not None:
                    changes = self._writer.changes
                    largest_ids = (int(lists.arrays.members.max()) for lists in index.segments)
                    ids = [self._next_id - 1, *largest_ids, *changes.by_id]
                    self._next_id = max(ids) + 1
                else:
                    no_changes = Changes("", 0, {})
                    changes = read_changes(self.path, size, index.fingerprint) or no_changes
                self.is_complete = not index.contained or index.contained[0] == changes.identity
                self.changes = changes.by_id
                self.index = index.apply(changes.since(index.contained))
        log.info("%s: opened, %d items", self.path, self.index.ntotal)

    def close(self) -> None:
        """Close the file of changes, so that other processes can write it."""
        self._closed.set()
        if self._writer is not None:
            self._writer.close()

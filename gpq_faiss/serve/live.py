"""An index that changes while it is searched: the index file, and the changes beside it.

The file is never written here. It may be replaced at any time, by an index of any age: all changes that it
does not contain are applied to it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import DataError, MismatchError
from ..files import Closing
from ..indexes.index import Index, open_index
from ..progress import stage
from ..store.changes import Change, ChangeWriter, NewChange, changes_path, read_changes

log = logging.getLogger(__name__)

_LARGEST_ID = 2**63 - 1


class RequestError(DataError):
    """A request that fails with a status of HTTP."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ChangeRequest(NamedTuple):
    """A request to add or remove an item.

    Attributes:
        id: of the item; None: the next free one.
        code: of the item to add; None: remove it.
        name, labels: of the item to add, or None.
    """

    id: int | None
    code: bytes | None
    name: str | None = None
    labels: tuple[str, ...] | None = None


class LiveIndex(Closing):
    """An index file with its changes, for many threads.

    Args:
        path: of the index.
        code_size: bytes of a code of the model.
        fingerprint: of the codebooks of the model, which are those of the index.
        writable: whether to accept changes, as the only process.

    Attributes:
        index: the index with all changes; a commit or a new file replaces it.
        changes: the last change of every changed id.

    Raises:
        DataError: index or changes are missing or damaged, or another process writes the changes.
        MismatchError: index or changes have other codebooks.
    """

    index: Index
    changes: dict[int, Change]

    def __init__(
        self, path: str | Path, code_size: int, fingerprint: str, *, writable: bool = False
    ) -> None:
        self.path, self.writable = Path(path), writable
        self._code_size, self._fingerprint = code_size, fingerprint
        self._lock = threading.Lock()
        self._next_id = 0
        self._writer = ChangeWriter(path, code_size, fingerprint) if writable else None
        try:
            self.reload()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let other processes write the changes."""
        if self._writer is not None:
            self._writer.close()

    def commit(self, requests: Sequence[ChangeRequest]) -> list[int | RequestError]:
        """Make changes in order, in one transaction, which is on disk on return.

        Returns:
            For each request the id of the item, or the error that says why it was not changed.
        """
        with self._lock:
            assert self._writer is not None
            next_id = self._next_id
            accepted: dict[int, NewChange] = {}
            answers: list[int | RequestError] = []
            for request in requests:
                id_ = next_id if request.id is None else request.id
                if id_ > _LARGEST_ID:
                    message = "there is no larger id left: give the id of the item"
                    answers.append(RequestError(409, message))
                    continue
                code = accepted[id_][0] if id_ in accepted else self.index.code_of(id_)
                if code is None and request.code is None:
                    answers.append(RequestError(404, f"no item has the id {id_}"))
                elif code is not None and request.code is not None:
                    message = f"the id {id_} is in use: give another, or remove it first"
                    answers.append(RequestError(409, message))
                else:
                    accepted[id_] = request[1:]
                    next_id = max(next_id, id_ + 1)
                    answers.append(id_)
            try:
                changes = self._writer.write(accepted) if accepted else {}
            except DataError as error:
                log.error("%s", error)
                refusal = RequestError(507, str(error))
                return [refusal if isinstance(answer, int) else answer for answer in answers]
            self._next_id = next_id
            self.changes.update(changes)
            self.index = self.index.apply(changes)
            return answers

    # The index file -----------------------------------------------------------------------------

    def watch(self) -> None:
        """Open the index again if its file was replaced; if that fails, log it and keep the old one."""
        try:
            if self.path.exists() and self._state() != self._seen:
                self.reload()
        except Exception as error:
            log.error("the index stays as it is: %s", error)

    def _state(self) -> list[tuple[int, int, int]]:
        """Return inode, time and size of the files that other processes write."""
        paths = [self.path] if self.writable else [self.path, changes_path(self.path)]
        states = [path.stat() for path in paths if path.exists()]
        return [(state.st_ino, state.st_mtime_ns, state.st_size) for state in states]

    def reload(self) -> None:
        """Open the index that is now at the path, with all changes. Raises as the class does."""
        self._seen = self._state()
        with stage("opening the index"):
            index = open_index(self.path)
            if index.fingerprint != self._fingerprint:
                raise MismatchError(
                    f"{self.path} has other codebooks ({index.fingerprint}) than the model "
                    f"({self._fingerprint}): build the index with this model"
                )
            largest_id = -1
            if self._writer is not None:
                largest_id = max(int(ids.max(initial=-1)) for _, ids in index.blocks())
            with self._lock:
                changes = (
                    read_changes(self.path, self._code_size, self._fingerprint)
                    if self._writer is None
                    else self._writer.changes
                )
                self.changes = {} if changes is None else changes.by_id
                identity, number = index.contained or ("", 0)
                if changes is not None:
                    # Again: the file of changes may have been deleted, but what was acknowledged counts.
                    index = index.apply(
                        {
                            id_: change
                            for id_, change in changes.by_id.items()
                            if changes.identity != identity or change.number > number
                        }
                    )
                self.index = index
                self._next_id = max(
                    self._next_id, largest_id + 1, *(id_ + 1 for id_ in self.changes)
                )
        log.info("%s: opened, %d items", self.path, self.index.ntotal)

"""An index that changes while it is searched: the index file, or the shards of a manifest, and the changes beside it.

A search uses one snapshot: the index file and the changes at some moment. Results are those of an exact search of all items at that
moment, ties in ascending order of id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ..build.item_files import ShardItems, known_items, open_items
from ..cluster.connect import connected
from ..cluster.search import ClusterIndex, live_nodes
from ..codes.checks import Codes, Floats, Ids
from ..errors import BusyError, DataError, MismatchError
from ..faissio.io import read_sidecar, save_index, sidecar_path
from ..faissio.storage import FORMS, check_form, faiss_index
from ..files import fingerprint
from ..indexes.filters import Allow, Deny, id_list
from ..indexes.manifest import is_manifest
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_index
from ..indexes.sharded import MergedIndex, merged
from ..progress import stage
from ..store.items import Item, item_row, items_path, write_items
from ..store.items import Items as NamedItems
from .changes import Change, ChangeFile, Changes, read_changes

log = logging.getLogger(__name__)

COMPACT_AFTER = 10_000
"""Default number of changes after which the index file is rewritten."""

Where = Allow | Deny | None
"""Which items a search may return."""

Asked = tuple[int | None, bytes | None, Item | None]
"""An id (None: the next free one), the code to add (None: remove), and name and labels if known."""


class ChangeError(DataError):
    """No item has the id (status 404), it is in use (409), or the change could not be written and was not made (507)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def _missing(number: int) -> ChangeError:
    return ChangeError(404, f"no item has the id {number}")


def _identity(path: Path) -> object:
    with contextlib.suppress(OSError):
        found = os.stat(path)
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


class Snapshot:
    """An index and the changes since it was written, some of which the file may already contain. Immutable.

    Attributes:
        hidden: int64, ascending: the changed ids, not to be found in the index.
        added: those of them that are items, in an index of their own; None: there are none.
        ntotal: number of items.
    """

    def __init__(
        self, index: MemoryIndex | MergedIndex, changes: Changes, named: NamedItems | ShardItems | None = None
    ) -> None:
        self.index, self.changes, self.named = index, changes, named
        self.hidden = np.array(sorted(changes), np.int64)
        self.added: MemoryIndex | None = None
        added = {number: change.code for number, change in changes.items() if change.code is not None}
        if added:
            codes = np.frombuffer(b"".join(added.values()), np.uint8).reshape(len(added), -1)
            self.added = MemoryIndex.build(codes, index.codebooks, [*added])
        self.ntotal = index.ntotal + len(added)
        if isinstance(index, MemoryIndex):  # others have no changes
            self.ntotal -= int((index.items.positions_of(self.hidden) >= 0).sum())

    def about(self, ids: Ids) -> list[Item | None]:
        """Names and labels of each id [n], from the change or the file; None if unknown. Raises DataError: a damaged file."""
        known = [None] * len(ids) if self.named is None else self.named.lookup(ids)
        changed = [self.changes.get(number) for number in ids.tolist()]
        return [one.item if one else item for one, item in zip(changed, known, strict=True)]

    def search(
        self, xq: Floats, k: int, where: Where = None, threads: int | None = None
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, as :meth:`..indexes.base.Index.search`; ``k`` is limited to the number of items."""
        kept: Where = Deny(self.hidden) if len(self.hidden) else None
        if where is not None:
            ids, allowed = id_list(where.ids, "ids"), isinstance(where, Allow)
            kept = Allow(np.setdiff1d(ids, self.hidden)) if allowed else Deny(np.union1d(ids, self.hidden))
        k, most = min(k, self.ntotal), min(k, self.index.ntotal)
        D, found = self.index.search(xq, most, where=kept, threads=threads)
        if self.added is not None:
            most = min(k, self.added.ntotal)
            D, found = merged((D, found), self.added.search(xq, most, where=where, threads=threads), k)
        return D[:, :k], found[:, :k]

    def code_of(self, number: int) -> bytes | Codes | None:
        """Code of an item; None if there is no item with this id."""
        changed = self.changes.get(number)
        return self.index.code_of(number) if changed is None else changed.code

    def code(self, number: int) -> Codes:
        """Code of an item, uint8 [code_size]. Raises ChangeError: no item has this id."""
        code = self.code_of(number)
        if code is None:
            raise _missing(number)
        return np.frombuffer(code, np.uint8)

    def items(self) -> tuple[Codes, Ids]:
        """Codes uint8 [ntotal, code_size] and ids int64 [ntotal] of an index in memory."""
        assert isinstance(self.index, MemoryIndex)
        kept = ~np.isin(self.index.ids, self.hidden)
        codes, ids = self.index.codes[kept], self.index.ids[kept]
        if self.added is None:
            return codes, ids
        return np.concatenate([codes, self.added.codes]), np.concatenate([ids, self.added.ids])


class LiveIndex:
    """An index file with changes, or the shards of a manifest, which are read-only.

    Searches use :attr:`snapshot`, which is replaced atomically by a commit, a compaction or a reload. Thread-safe.

    Args:
        path: the index file or manifest.
        size, fingerprint: of the model: bytes of a code, and of its codebooks, which are those of the index.
        writable: accept changes, as the only process; not of a manifest.
        compact_after: number of changes after which :meth:`maintain` rewrites the index file.
        ray: address of a cluster that searches the shards; None: this process does.
        workers: see :class:`..cluster.search.ClusterIndex`.

    Raises:
        DataError: index or changes are missing, damaged or of another format; or another process writes them.
        MismatchError: of another model.
        UsageError: Ray is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        size: int,
        fingerprint: str,
        *,
        writable: bool = False,
        compact_after: int = COMPACT_AFTER,
        ray: str | None = None,
        workers: int | None = None,
    ) -> None:
        self.path, self.compact_after, self._due = Path(path), compact_after, compact_after
        self._of = self.path, size, fingerprint
        self._writing, self._maintaining = threading.Lock(), threading.Lock()
        self.snapshot: Snapshot
        self._seen: object = None
        self._refused: object = None
        self._file: ChangeFile | None = None
        self._cluster: dict[str, Any] = {"address": ray, "workers": workers}
        with contextlib.ExitStack() as stack:
            self._ray = stack.enter_context(connected(ray))
            if writable:
                self._file = stack.enter_context(contextlib.closing(ChangeFile(*self._of)))
            self.reload()
            self._stack = stack.pop_all()

    def _state(self) -> object:
        """Identity of the index file, its sidecar, and the nodes of the cluster; None if there is no such file."""
        index, nodes = _identity(self.path), self._ray and tuple(live_nodes(self._ray))
        return index and (index, _identity(sidecar_path(self.path)), nodes)

    @property
    def writable(self) -> bool:
        """Whether changes are accepted."""
        return self._file is not None

    def commit(self, asked: Sequence[Asked]) -> list[int | DataError]:
        """Make changes in order; returns for each its id, or why it was not made. The others are on disk together on return."""
        with self._writing:
            assert self._file is not None
            snapshot = self.snapshot
            assert isinstance(snapshot.index, MemoryIndex)
            following = 1 + max(-1, snapshot.index.id_range[1], *snapshot.changes)
            accepted: dict[int, Change] = {}
            answers: list[int | DataError] = []
            for given, code, about in asked:
                number = following if given is None else given
                made = accepted.get(number)
                if number >= 1 << 63:
                    answers.append(ChangeError(409, "there is no larger id left: give the id of the item"))
                elif ((snapshot.code_of(number) if made is None else made.code) is None) == (code is None):
                    why = f"the id {number} is already in use: remove the item first, or give another id"
                    answers.append(_missing(number) if code is None else ChangeError(409, why))
                else:
                    accepted[number] = Change(code, about)
                    following = max(following, number + 1)
                    answers.append(number)
            if accepted:
                try:
                    self._file.write(accepted)
                except DataError as error:
                    refusal = ChangeError(507, str(error))
                    return [refusal if isinstance(answer, int) else answer for answer in answers]
                changes = {**snapshot.changes, **accepted}
                self.snapshot = Snapshot(snapshot.index, changes, snapshot.named)
            return answers

    # The index file ---------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the file at the path is not the one in use, nor one that failed to open."""
        state = self._state()
        return state is not None and state not in (self._seen, self._refused)

    def maintain(self) -> None:
        """Open an index that was put at the path, and rewrite the file if there are many changes. Errors are logged."""
        try:
            if self.stale:
                self.reload()
            if self.writable and len(self.snapshot.changes) >= self._due:
                self._due = 2 * len(self.snapshot.changes)  # the next attempt, if this one fails
                if self.compact():
                    self._due = self.compact_after
        except Exception as error:
            log.error("the index stays as it is, with its changes beside it: %s", error)

    def reload(self) -> None:
        """Open the index that is now at the path, with the changes beside it. Raises as the class; the old one then stays in use."""
        with self._maintaining, stage("opening the index"):
            self._refused = state = self._state()
            # The changes first: a compaction replaces the index, and then deletes them.
            changes = {} if is_manifest(self.path) else read_changes(*self._of)
            index = ClusterIndex(self.path, **self._cluster) if self._ray else open_index(self.path)
            assert isinstance(index, MemoryIndex | MergedIndex)
            if index.fingerprint != self._of[2]:
                raise MismatchError(
                    f"{self.path} has other codebooks ({index.fingerprint}) than the model ({self._of[2]}): "
                    "build the index with this model"
                )
            named = known_items(self.path)
            with self._writing:
                changes = read_changes(*self._of) if self.writable else changes
                self.snapshot = Snapshot(index, changes, named)
                self._seen, self._refused = state, None
        log.info("%s: opened, %d items", self.path, self.snapshot.ntotal)

    def compact(self) -> bool:
        """Rewrite the index file with all changes, and delete these. Searches and commits continue meanwhile.

        Returns whether it was written: not if there are no changes, no item would be left, or the file was replaced. Raises DataError:
        writing fails; nothing is lost.
        """
        with self._maintaining, stage("compacting the index"):
            if self._file is None:
                return False
            with self._writing:
                snapshot, number = self.snapshot, self._file.number
            if not snapshot.changes or not snapshot.ntotal or self._state() != self._seen:
                return False
            codes, ids = snapshot.items()
            options = {"model_fingerprint": snapshot.index.model_fingerprint}
            made = MemoryIndex.build(codes, snapshot.index.codebooks, ids, **options)
            try:
                written = self._save(made, snapshot.changes)
            except BusyError as error:
                log.warning("%s", error)
                return False
            with self._writing:
                self._seen = written
                # Changes already in the file have no further effect: a crash here loses nothing.
                self._file.drop(number)
                self.snapshot = Snapshot(made, read_changes(*self._of), open_items(self.path))
        log.info("%s: written with all changes, %d items", self.path, made.ntotal)
        return True

    def _save(self, made: MemoryIndex, changes: Changes) -> object:
        """Replace the index file, keeping its form, with its names; returns its :meth:`_state`. Raises BusyError: another is there."""
        written: list[object] = []

        def unchanged(files: tuple[Path, ...]) -> None:
            if self._state() != self._seen:
                raise BusyError(
                    f"{self.path} was replaced meanwhile: not compacted, its changes stay beside it"
                )
            written[:] = _identity(files[0]), _identity(files[1]), None  # which renames keep

        stated = read_sidecar(self.path) or {"kind": None, "extra": {}}
        form = stated["kind"] if stated["kind"] in FORMS else "ivf" if stated["kind"] else "flat"
        kept = open_items(self.path) if "items" in stated["extra"] else None
        rows = [item_row(number, item) for number, (_, item) in sorted(changes.items()) if item is not None]
        extra, beside = {}, {}
        with kept or contextlib.nullcontext():
            if kept is not None or rows:
                key = kept.key if kept else fingerprint("items", self._of[2], *map(str, rows))
                old = () if kept is None else (row for row in kept.rows() if row[0] not in changes)
                beside = {items_path(self.path): lambda path: write_items(path, chain(old, rows), key)}
                extra = {"items": key}
            save_index(
                faiss_index(made.codes, made.ids, made.codebooks, check_form(form, made.M, made.K)),
                self.path,
                model_fingerprint=made.model_fingerprint,
                overwrite=True,
                extra=extra,
                beside=beside,
                before=unchanged,
            )
        return tuple(written)

    def close(self, *, compact: bool = True) -> None:
        """Close the file and leave the cluster; with ``compact`` the file is first rewritten with all changes."""
        try:
            if compact:
                self.compact()
        finally:
            self._stack.close()
            self._file = None

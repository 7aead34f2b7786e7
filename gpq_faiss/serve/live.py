"""An index that changes while it is searched: the index file, and the changes beside it.

A search uses one snapshot: the index file and the changes at some moment. Results are those of an exact search of all items at that
moment, ties in ascending order of id.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..build.item_files import open_items
from ..codes.bits import code_size
from ..codes.checks import Codes, Floats, Ids
from ..codes.scores import score_codes
from ..errors import DataError, GpqError, MismatchError
from ..faissio.io import check_index_output, read_sidecar, save_index, sidecar_path
from ..faissio.storage import FORMS, check_form, faiss_index
from ..files import fingerprint, lock, recover, write_error
from ..indexes.filters import Allow, Deny, Filter
from ..indexes.items import Items
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_index
from ..progress import stage
from ..store import Item, codebooks_fingerprint, items_path, write_items
from ..store import Items as NamedItems
from .changes import Change, ChangeLog, Changes, Records, log_path, read_log

log = logging.getLogger(__name__)

COMPACT_AFTER = 10_000
"""Default number of changes after which the index file is rewritten."""


class UnknownItemError(DataError):
    """No item has this id."""


class TakenIdError(DataError):
    """The id is already in use."""


class NotStoredError(DataError):
    """A change could not be written and was not made."""


class ReplacedError(DataError):
    """Another index was put at the path."""


def _identity(path: Path) -> object:
    """Identity of a file; None if missing."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


@dataclass(frozen=True, eq=False)
class Where:
    """Which items a search may return.

    Attributes:
        allow: only these ids, if given.
        deny: none of these.
        passes: ids int64 [n] to bool [n], if given.
        key: equal for equal filters.
    """

    allow: Ids | None = None
    deny: Ids | None = None
    passes: Callable[[Ids], NDArray[np.bool_]] | None = None
    key: object = None

    def mask(self, ids: Ids) -> NDArray[np.bool_]:
        """bool [n]: which of these ids pass."""
        mask = np.ones(len(ids), np.bool_)
        if self.allow is not None:
            mask &= np.isin(ids, self.allow)
        if self.deny is not None:
            mask &= ~np.isin(ids, self.deny)
        if self.passes is not None:
            mask &= self.passes(ids)
        return mask

    def without(self, ids: Ids) -> Filter | None:
        """As an index filter that also excludes these ids. Lists of ids are faster than testing every item."""
        deny = ids if self.deny is None else np.union1d(ids, self.deny)
        if self.passes is not None:
            return replace(self, deny=deny).mask
        if self.allow is not None:
            return Allow(np.setdiff1d(self.allow, deny))
        return Deny(deny) if len(deny) else None


EVERYTHING = Where()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Items at some moment. Immutable.

    Attributes:
        index: of the index file.
        filed: its ids and codes.
        changes: since the file was written.
        hidden: int64, ascending: ids of the file that were changed.
        ntotal: number of items.
        named: names and labels of the file's items, if stored beside it.
    """

    index: MemoryIndex
    filed: Items
    changes: Changes
    hidden: Ids
    ntotal: int
    named: NamedItems | None = None

    @classmethod
    def of(cls, index: MemoryIndex, changes: Changes, named: NamedItems | None = None) -> Snapshot:
        """An index and the changes since it was written, some of which the file may already contain."""
        return cls._of(index, Items.ordered(index.codes, index.ids), changes, named)

    @classmethod
    def _of(cls, index: MemoryIndex, filed: Items, changes: Changes, named: NamedItems | None) -> Snapshot:
        held = filed.positions_of(changes.ids) >= 0
        total = index.ntotal - int(held.sum()) + int(changes.there.sum())
        return cls(index, filed, changes, changes.ids[held], total, named)

    def with_changes(self, changes: Changes) -> Snapshot:
        """The same index with these changes."""
        return Snapshot.of(self.index, changes, self.named)

    def then(self, records: Records) -> Snapshot:
        """This, and later changes."""
        return self._of(self.index, self.filed, self.changes.then(records), self.named)

    def about(self, ids: Ids) -> list[Item | None]:
        """Names and labels of each id [n], from the change or the file; None if unknown."""
        places = [self.changes.at(int(number)) for number in ids]
        beside = [None] * len(ids) if self.named is None else self.named.lookup(ids)
        return [
            item if place < 0 else self.changes.about[place]
            for place, item in zip(places, beside, strict=True)
        ]

    def search(
        self, xq: Floats, k: int, where: Where = EVERYTHING, threads: int | None = None
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query.

        Args:
            xq: float32 [Q, D].
            k: at least 1; limited to the number of items.

        Returns:
            Scores float32 [Q, k'], descending, and ids int64 [Q, k'], ties in ascending order of id; padded with -inf and -1.

        Raises:
            DataError, UsageError: see :meth:`..indexes.memory.MemoryIndex.search`.
        """
        there = self.changes.there & where.mask(self.changes.ids)
        D, found = self.index.search(
            xq, min(k, self.index.ntotal), where=where.without(self.hidden), threads=threads
        )
        if there.any():
            scores = score_codes(xq, self.changes.codes[there], self.index.codebooks)
            ids = np.broadcast_to(self.changes.ids[there], scores.shape)
            D, found = np.concatenate([D, scores], axis=1), np.concatenate([found, ids], axis=1)
            order = np.lexsort((found, -D), axis=1)  # only padding has -inf
            D, found = np.take_along_axis(D, order, axis=1), np.take_along_axis(found, order, axis=1)
        k = min(k, self.ntotal)
        return D[:, :k], found[:, :k]

    def has(self, number: int) -> bool:
        """Whether there is an item with this id."""
        place = self.changes.at(number)
        return bool(self.changes.there[place]) if place >= 0 else self._place(number) >= 0

    def code(self, number: int) -> Codes:
        """uint8 [code_size]. Raises UnknownItemError: no item has this id."""
        if not self.has(number):
            raise UnknownItemError(f"no item has the id {number}")
        place = self.changes.at(number)
        codes, place = (self.changes.codes, place) if place >= 0 else (self.filed.codes, self._place(number))
        return np.asarray(codes[place])

    def _place(self, number: int) -> int:
        return int(self.filed.positions_of(np.array([number], np.int64))[0])

    def next_id(self) -> int:
        """The next free id: larger than all ids, at least 0."""
        filed = len(self.filed) - 1 if self.filed.own is None else int(self.filed.own[-1])
        return max([-1, filed, *(int(number) for number in self.changes.ids[-1:])]) + 1

    def items(self) -> tuple[Codes, Ids]:
        """Codes uint8 [ntotal, code_size] and ids int64 [ntotal]."""
        held = np.ones(len(self.filed), np.bool_)
        held[self.filed.positions_of(self.hidden)] = False
        there = self.changes.there
        codes = np.concatenate([self.filed.codes[held], self.changes.codes[there]])
        return codes, np.concatenate([self.filed.ids[held], self.changes.ids[there]])


Asked = tuple[int | None, Codes | None, Item | None]
"""An id (None: the next free one), a code, and name and labels if known: an item to add. Without a code: an item to remove."""


class LiveIndex:
    """An index file with changes.

    Searches use :attr:`snapshot`, which is replaced atomically by a commit, a compaction or a reload. Thread-safe.

    Args:
        path: the index file.
        codebooks: of the model, float32 [M, K, d], equal to those of the index.
        writable: accept changes, as the only process.
        compact_after: number of changes after which :attr:`due` is true.

    Raises:
        DataError: the index or its log is missing, damaged or of another format; or another process writes to it.
        MismatchError: of another model.
    """

    def __init__(
        self,
        path: str | Path,
        codebooks: Floats,
        *,
        writable: bool = False,
        compact_after: int = COMPACT_AFTER,
    ) -> None:
        self.path, self.compact_after = Path(path), compact_after
        self.fingerprint = codebooks_fingerprint(codebooks)
        self._size = code_size(*codebooks.shape[:2])
        self._writing, self._maintaining = threading.Lock(), threading.Lock()
        self._log: ChangeLog | None = None
        self._recent: list[Records] = []  # since the last compaction began
        self._refused: object = None
        self._lock_file = Path(f"{log_path(self.path)}.lock")
        self._descriptor: int | None = None
        try:
            if writable:
                self._take()
                self._log = ChangeLog(log_path(self.path), self._size, self.fingerprint)
            self._seen = self._state()
            self.snapshot: Snapshot = self._open(self._logged())
        except BaseException:
            self.close(compact=False)
            raise

    def _take(self) -> None:
        try:
            self._descriptor = lock(self._lock_file)
        except OSError as error:
            raise write_error(self._lock_file, error) from error
        if self._descriptor is None:
            raise DataError(
                f"{self.path} is changed by another process: end it first, or serve without --writable"
            )
        for path in (self.path, log_path(self.path)):
            recover(path)

    def _logged(self) -> Changes:
        """The changes on disk. Read before the index, as a compaction replaces the index first and then truncates the log."""
        records = (
            read_log(log_path(self.path), self._size, self.fingerprint)[0]
            if self._log is None
            else self._log.records
        )
        return Changes.none(self._size).then(records)

    def _open(self, changes: Changes) -> Any:
        """A :class:`Snapshot`, or its equivalent in :mod:`.shards`."""
        with stage("opening the index"):
            index = open_index(self.path)
            assert isinstance(index, MemoryIndex)
            if index.fingerprint != self.fingerprint:
                raise MismatchError(
                    f"{self.path} has other codebooks ({index.fingerprint}) than the model ({self.fingerprint}): "
                    "build the index with this model"
                )
            return Snapshot.of(index, changes, open_items(self.path))

    def _state(self) -> object:
        """Identity of the file at the path; None if missing."""
        index = _identity(self.path)
        return index and (index, _identity(sidecar_path(self.path)))

    # Changing --------------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether changes are accepted."""
        return self._log is not None

    @property
    def due(self) -> bool:
        """Whether a compaction is due."""
        return self.writable and len(self.snapshot.changes) >= self.compact_after

    def commit(self, asked: Sequence[Asked]) -> list[int | DataError]:
        """Make changes in order; the successful ones are on disk together on return.

        Returns:
            For each its id, or its error: :class:`UnknownItemError` (remove), :class:`TakenIdError` (add), :class:`NotStoredError`
            (writing failed).
        """
        with self._writing:
            assert self._log is not None
            snapshot, following = self.snapshot, self.snapshot.next_id()
            decided: dict[int, bool] = {}
            accepted: list[Change] = []
            answers: list[int | DataError] = []
            for given, code, about in asked:
                number = following if given is None else given
                if number >= 1 << 63:
                    answers.append(TakenIdError("there is no larger id left: give the id of the item"))
                    continue
                there = decided[number] if number in decided else snapshot.has(number)
                if code is None and not there:
                    answers.append(UnknownItemError(f"no item has the id {number}"))
                elif code is not None and there:
                    answers.append(
                        TakenIdError(
                            f"the id {number} is already in use: remove the item first, or give another id"
                        )
                    )
                else:
                    decided[number] = code is not None
                    following = max(following, number + 1)
                    accepted.append((number, code, about))
                    answers.append(number)
            if not accepted:
                return answers
            try:
                records = self._log.append(accepted)
            except DataError as error:
                refusal = NotStoredError(str(error))
                return [refusal if isinstance(answer, int) else answer for answer in answers]
            self._recent.append(records)
            self.snapshot = snapshot.then(records)
            return answers

    def compact(self) -> bool:
        """Rewrite the index file with all changes, and truncate the log. Searches and commits continue meanwhile.

        Returns:
            Whether it was written: not if there are no changes, no item would be left, or the file was replaced.

        Raises:
            DataError: writing fails; nothing is lost.
        """
        with self._maintaining, stage("compacting the index"):
            if self._log is None:
                return False
            with self._writing:
                snapshot, end = self.snapshot, self._log.end
                self._recent = []
            if not len(snapshot.changes) or not snapshot.ntotal or self._state() != self._seen:
                return False
            index = snapshot.index
            codes, ids = snapshot.items()
            made = MemoryIndex.build(codes, index.codebooks, ids, model_fingerprint=index.model_fingerprint)
            try:
                written = self._save(made, snapshot.changes)
            except ReplacedError:
                log.warning(
                    "%s was replaced meanwhile: not compacted, its changes stay in the log", self.path
                )
                return False
            with self._writing:
                self._seen = written
                # Changes already in the file have no further effect: a crash here loses nothing.
                named = open_items(self.path)
                self.snapshot = Snapshot.of(made, self.snapshot.changes, named)
                self._log.drop_before(end)
                changes = Changes.none(self._size)
                self.snapshot = Snapshot.of(
                    made, changes.then(np.concatenate([self._log.records[:0], *self._recent])), named
                )
        log.info("%s: written with all changes, %d items", self.path, made.ntotal)
        return True

    def _save(self, made: MemoryIndex, changes: Changes) -> object:
        """Replace the index file, keeping its form; returns its :meth:`_state`.

        Raises:
            ReplacedError: another index is at the path, which stays.
        """
        written: object = None

        def unchanged(files: tuple[Path, ...]) -> None:
            nonlocal written
            if self._state() != self._seen:
                raise ReplacedError(f"{self.path} was replaced")
            written = _identity(files[0]), _identity(files[1])  # which renames keep

        stated = read_sidecar(self.path) or {"kind": None, "extra": {}}
        form = stated["kind"] if stated["kind"] in FORMS else "ivf" if stated["kind"] else "flat"
        with contextlib.ExitStack() as stack:
            key, write = self._names(stated["extra"].get("items"), changes, stack)
            save_index(
                faiss_index(made.codes, made.ids, made.codebooks, check_form(form, made.M, made.K)),
                check_index_output(self.path, overwrite=True),
                model_fingerprint=made.model_fingerprint,
                overwrite=True,
                extra={} if key is None else {"items": key},
                beside={} if write is None else {items_path(self.path): write},
                before=unchanged,
            )
        return written

    def _names(
        self, key: str | None, changes: Changes, stack: contextlib.ExitStack
    ) -> tuple[str | None, Callable[[Path], None] | None]:
        """The key of the names and labels with the changes, and what writes their file; None without any, and if it stays as it is."""
        items = None if key is None else open_items(self.path)
        if items is not None:
            stack.callback(items.close)
        ids = changes.ids[changes.there]
        about = zip(ids.tolist(), changes.about[changes.there], strict=True)
        new = [(number, item) for number, item in about if item is not None]
        if items is None and not new:
            return None, None
        if items is None or key is None:
            key = fingerprint("items", self.fingerprint, *map(str, new))
        elif not new and not any(items.lookup(ids)):
            return key, None
        gone = changes.ids.tolist()
        return key, lambda path: write_items(path, new, key, kept=items, without=gone)

    # Reloading -------------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the file at the path is not the one in use, nor one that failed to open."""
        state = self._state()
        return state is not None and state not in (self._seen, self._refused)

    def reload(self, *, only_stale: bool = False) -> bool:
        """Open the index that is now at the path, with the changes of the log. On failure the old one stays in use.

        Args:
            only_stale: do nothing if the file is the one in use.

        Returns:
            Whether it was opened.

        Raises:
            DataError, MismatchError: see the class.
        """
        with self._maintaining:
            if only_stale and not self.stale:
                return False
            state = self._state()
            try:
                opened = self._open(Changes.none(self._size) if self.writable else self._logged())
            except GpqError:
                self._refused = state
                raise
            with self._writing:
                changes = self.snapshot.changes if self.writable else opened.changes
                self.snapshot = opened.with_changes(changes)
                self._seen, self._refused = state, None
        log.info("%s: reloaded, %d items", self.path, self.snapshot.ntotal)
        return True

    def close(self, *, compact: bool = True) -> None:
        """Close the file; with ``compact`` it is first rewritten with all changes."""
        try:
            if compact:
                self.compact()
        finally:
            if self._log is not None:
                self._log.close()
                self._log = None
            if self._descriptor is not None:
                self._lock_file.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = None

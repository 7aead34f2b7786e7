"""An index that changes while it is searched: the index file, and the changes beside it.

A search uses one snapshot: the index file and the changes at some moment. Results are those of an exact search of all items at that
moment, ties in ascending order of id.
"""

from __future__ import annotations

import contextlib
import functools
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
from ..faissio.io import Beside, check_index_output, read_sidecar, save_index, sidecar_path
from ..faissio.storage import FORMS, check_form, faiss_index
from ..files import fingerprint
from ..indexes.filters import Allow, Deny, Filter
from ..indexes.items import Items
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_index
from ..progress import stage
from ..store import Item, codebooks_fingerprint, items_path, write_items
from ..store import Items as NamedItems
from ..store.items import item_row
from .changes import Change, ChangeFile, Changes, read_changes

log = logging.getLogger(__name__)

COMPACT_AFTER = 10_000
"""Default number of changes after which the index file is rewritten."""


class UnknownItemError(DataError):
    """No item has this id."""

    status = 404


class TakenIdError(DataError):
    """The id is already in use."""

    status = 409


class NotStoredError(DataError):
    """A change could not be written and was not made."""

    status = 507


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


class View:
    """Items at some moment, by id."""

    def code_of(self, number: int) -> Codes | None:
        """uint8 [code_size]; None if no item has this id."""
        raise NotImplementedError

    def has(self, number: int) -> bool:
        """Whether there is an item with this id."""
        return self.code_of(number) is not None

    def code(self, number: int) -> Codes:
        """uint8 [code_size]. Raises UnknownItemError: no item has this id."""
        code = self.code_of(number)
        if code is None:
            raise UnknownItemError(f"no item has the id {number}")
        return code


class Snapshot(View):
    """An index and the changes since it was written, some of which the file may already contain. Immutable.

    Attributes:
        index: of the index file.
        changes: since the file was written.
        named: names and labels of the file's items, if stored beside it.
        filed: ids and codes of the file.
        hidden: int64, ascending: ids of the file that were changed.
        ntotal: number of items.
    """

    def __init__(
        self,
        index: MemoryIndex,
        changes: Changes,
        named: NamedItems | None = None,
        filed: Items | None = None,
    ) -> None:
        self.index, self.changes, self.named = index, changes, named
        self.filed = filed or Items.ordered(index.codes, index.ids)
        self.hidden = changes.ids[self.filed.positions_of(changes.ids) >= 0]
        self.ntotal = index.ntotal - len(self.hidden) + int(changes.there.sum())

    def with_changes(self, changes: Changes) -> Snapshot:
        """The same index with these changes."""
        return Snapshot(self.index, changes, self.named, self.filed)

    def about(self, ids: Ids) -> list[Item | None]:
        """Names and labels of each id [n], from the change or the file; None if unknown."""
        known: list[Item | None] = [None] * len(ids) if self.named is None else self.named.lookup(ids)
        for n, number in enumerate(ids.tolist()):
            if (place := self.changes.at(number)) >= 0:
                known[n] = self.changes.about[place]
        return known

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

    def code_of(self, number: int) -> Codes | None:
        place = self.changes.at(number)
        if place >= 0:
            return np.asarray(self.changes.codes[place]) if self.changes.there[place] else None
        place = int(self.filed.positions_of(np.array([number], np.int64))[0])
        return np.asarray(self.filed.codes[place]) if place >= 0 else None

    def next_id(self) -> int:
        """The next free id: larger than all ids, at least 0."""
        filed = len(self.filed) - 1 if self.filed.own is None else int(self.filed.own[-1])
        return 1 + max(-1, filed, *map(int, self.changes.ids[-1:]))

    def items(self) -> tuple[Codes, Ids]:
        """Codes uint8 [ntotal, code_size] and ids int64 [ntotal]."""
        held, there = ~np.isin(self.filed.ids, self.hidden), self.changes.there
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
        DataError: index or changes are missing, damaged or of another format; or another process writes them.
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
        self._refused: object = None
        self._file = ChangeFile(self.path, self._size, self.fingerprint) if writable else None
        try:
            self._seen = self._state()
            self.snapshot: Any = self._open(self._stored())
        except BaseException:
            self.close(compact=False)
            raise

    def _stored(self) -> Changes:
        """The changes on disk. Read before the index, as a compaction replaces the index first and then deletes them."""
        if self._file is not None:
            return self._file.read()
        return read_changes(self.path, self._size, self.fingerprint)

    def _open(self, changes: Changes) -> Any:
        """A :class:`Snapshot`, or its equivalent in :mod:`.shards`."""
        with stage("opening the index"):
            index = open_index(self.path)
            assert isinstance(index, MemoryIndex)
            self._check(index.fingerprint)
            return Snapshot(index, changes, open_items(self.path))

    def _check(self, fingerprint: str) -> None:
        if fingerprint != self.fingerprint:
            raise MismatchError(
                f"{self.path} has other codebooks ({fingerprint}) than the model ({self.fingerprint}): "
                "build the index with this model"
            )

    def _state(self) -> object:
        """Identity of the index file and its sidecar; None if there is no such file."""
        index = _identity(self.path)
        return index and (index, _identity(sidecar_path(self.path)))

    # Changing --------------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether changes are accepted."""
        return self._file is not None

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
            assert self._file is not None
            snapshot, following = self.snapshot, self.snapshot.next_id()
            accepted: dict[int, Change] = {}
            answers: list[int | DataError] = []
            for given, code, about in asked:
                number = following if given is None else given
                if number >= 1 << 63:
                    answers.append(TakenIdError("there is no larger id left: give the id of the item"))
                    continue
                there = accepted[number][1] is not None if number in accepted else snapshot.has(number)
                if code is None and not there:
                    answers.append(UnknownItemError(f"no item has the id {number}"))
                elif code is not None and there:
                    answers.append(
                        TakenIdError(
                            f"the id {number} is already in use: remove the item first, or give another id"
                        )
                    )
                else:
                    accepted[number] = number, code, about
                    following = max(following, number + 1)
                    answers.append(number)
            changes = list(accepted.values())
            try:
                if changes:
                    self._file.write(changes)
            except DataError as error:
                refusal = NotStoredError(str(error))
                return [refusal if isinstance(answer, int) else answer for answer in answers]
            self.snapshot = snapshot.with_changes(snapshot.changes.then(Changes.of(changes, self._size)))
            return answers

    def compact(self) -> bool:
        """Rewrite the index file with all changes, and delete these. Searches and commits continue meanwhile.

        Returns:
            Whether it was written: not if there are no changes, no item would be left, or the file was replaced.

        Raises:
            DataError: writing fails; nothing is lost.
        """
        with self._maintaining, stage("compacting the index"):
            if self._file is None:
                return False
            with self._writing:
                snapshot, number = self.snapshot, self._file.number
            if not len(snapshot.changes) or not snapshot.ntotal or self._state() != self._seen:
                return False
            index = snapshot.index
            codes, ids = snapshot.items()
            made = MemoryIndex.build(codes, index.codebooks, ids, model_fingerprint=index.model_fingerprint)
            try:
                written = self._save(made, snapshot.changes)
            except ReplacedError:
                log.warning("%s was replaced meanwhile: not compacted, its changes stay beside it", self.path)
                return False
            with self._writing:
                self._seen = written
                # Changes already in the file have no further effect: a crash here loses nothing.
                self.snapshot = Snapshot(made, self.snapshot.changes, open_items(self.path))
                self._file.drop(number)
                self.snapshot = self.snapshot.with_changes(self._file.read())
        log.info("%s: written with all changes, %d items", self.path, made.ntotal)
        return True

    def _save(self, made: MemoryIndex, changes: Changes) -> object:
        """Replace the index file, keeping its form, together with its names; returns its :meth:`_state`.

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
        key = stated["extra"].get("items")
        ids, about = changes.ids[changes.there], changes.about[changes.there]
        new = [
            item_row(number, item)
            for number, item in zip(ids.tolist(), about, strict=True)
            if item is not None
        ]
        beside: Beside = {}
        with (None if key is None else open_items(self.path)) or contextlib.nullcontext() as items:
            if items is None:
                key = fingerprint("items", self.fingerprint, *map(str, new)) if new else None
            if new or (items is not None and any(items.lookup(ids))):
                gone = changes.ids.tolist()
                write = functools.partial(write_items, rows=new, key=key, kept=items, without=gone)
                beside = {items_path(self.path): write}
            save_index(
                faiss_index(made.codes, made.ids, made.codebooks, check_form(form, made.M, made.K)),
                check_index_output(self.path, overwrite=True),
                model_fingerprint=made.model_fingerprint,
                overwrite=True,
                extra={} if key is None else {"items": key},
                beside=beside,
                before=unchanged,
            )
        return written

    # Reloading -------------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the file at the path is not the one in use, nor one that failed to open."""
        state = self._state()
        return state is not None and state not in (self._seen, self._refused)

    def reload(self, *, only_stale: bool = False) -> bool:
        """Open the index that is now at the path, with the changes beside it. On failure the old one stays in use.

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
                opened = self._open(Changes.of((), self._size) if self.writable else self._stored())
            except GpqError:
                self._refused = state
                raise
            with self._writing:
                self.snapshot = opened.with_changes(self.snapshot.changes) if self.writable else opened
                self._seen, self._refused = state, None
        log.info("%s: reloaded, %d items", self.path, self.snapshot.ntotal)
        return True

    def close(self, *, compact: bool = True) -> None:
        """Close the file; with ``compact`` it is first rewritten with all changes."""
        try:
            if compact:
                self.compact()
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None

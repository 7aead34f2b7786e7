"""An index that changes while it is searched: the index file, and the changes beside it.

A search sees one snapshot: the index of the file and the changes at some moment. Its answer is that of an exact search of all items
that are there at that moment, equal scores by ascending id.
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

from ..build.item_files import open_items, update_items
from ..codes.bits import code_size
from ..codes.checks import Codes, Floats, Ids
from ..codes.scores import score_codes
from ..errors import DataError, GpqError, MismatchError
from ..faissio.io import check_index_output, read_sidecar, save_index, sidecar_path
from ..faissio.storage import STORAGES, row_index
from ..files import fingerprint, lock, recover, write_error
from ..indexes.filters import Allow, Deny, Filter
from ..indexes.items import Items
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_index
from ..progress import stage
from ..store import Item, codebooks_fingerprint
from ..store import Items as NamedItems
from .changes import Change, ChangeLog, Changes, Records, log_path, read_log

log = logging.getLogger(__name__)

COMPACT_AFTER = 10_000
"""Changes from which on the index file is rewritten."""


class UnknownItemError(DataError):
    """No item has this id."""


class TakenIdError(DataError):
    """An item has this id already."""


class NotStoredError(DataError):
    """The disk refuses a change, which was not made."""


@dataclass(frozen=True, eq=False)
class Where:
    """Which items a search may return.

    Attributes:
        allow: only these ids, if given.
        deny: none of these.
        passes: ids int64 [n] to bool [n], if given: whether each may be returned.
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
        """As an index takes it, without these ids too. Lists of ids alone are quicker than a look at every item."""
        deny = ids if self.deny is None else np.union1d(ids, self.deny)
        if self.passes is not None:
            return replace(self, deny=deny).mask
        if self.allow is not None:
            return Allow(np.setdiff1d(self.allow, deny))
        return Deny(deny) if len(deny) else None


EVERYTHING = Where()


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Items at some moment. Never changed itself.

    Attributes:
        index: of the index file.
        filed: its ids and codes.
        changes: since the file was written.
        hidden: int64, ascending: ids of the file that changes say something else of.
        ntotal: items that are there.
        named: names and labels of the items of the file, where they lie beside it.
    """

    index: MemoryIndex
    filed: Items
    changes: Changes
    hidden: Ids
    ntotal: int
    named: NamedItems | None = None

    @classmethod
    def of(cls, index: MemoryIndex, changes: Changes, named: NamedItems | None = None) -> Snapshot:
        """An index and what was changed since it was written, whether or not the file has some of that already."""
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
        """Names and labels of each id [n], as they came with the item or lie beside the file; None where nothing is known."""
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
            k: at least 1; more than there are items are as many.

        Returns:
            Scores float32 [Q, k'], larger first, and ids int64 [Q, k'], equal scores by ascending id; -inf and -1 where a filter
            leaves too few.

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
            order = np.lexsort((found, -D), axis=1)  # only a place without an item has -inf
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
        """Beyond all ids of the file and of the changes, and not below 0."""
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
"""An id, its code, and its name and labels where they are known: an item to add, under the next free id where none is given. Without a
code: an item to remove."""


class LiveIndex:
    """The index file at a path, and what is changed of it.

    Searches take :attr:`snapshot`, which is replaced as a whole: by a commit, a compaction or a reload. All methods are safe to
    call from several threads.

    Args:
        path: the index file.
        codebooks: of the model, float32 [M, K, d], which must be those of the index.
        kind: how it is searched (:data:`..indexes.plan.KINDS`).
        writable: take changes, as the only process that does.
        compact_after: changes from which on :attr:`due` holds.

    Raises:
        DataError: the index or its log is missing, damaged or foreign; another process changes it.
        MismatchError: they are of another model.
    """

    def __init__(
        self,
        path: str | Path,
        codebooks: Floats,
        *,
        kind: str = "auto",
        writable: bool = False,
        compact_after: int = COMPACT_AFTER,
    ) -> None:
        self.path, self.kind, self.compact_after = Path(path), kind, compact_after
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
        """The changes on disk. Read before the index: a compaction replaces the index first, and then cuts the log."""
        records = (
            read_log(log_path(self.path), self._size, self.fingerprint)[0]
            if self._log is None
            else self._log.records
        )
        return Changes.none(self._size).then(records)

    def _open(self, changes: Changes) -> Any:
        """A :class:`Snapshot`, or what stands for one (:mod:`.shards`)."""
        with stage("opening the index"):
            index = open_index(self.path, self.kind)
            assert isinstance(index, MemoryIndex)
            if index.fingerprint != self.fingerprint:
                raise MismatchError(
                    f"{self.path} has other codebooks ({index.fingerprint}) than the model ({self.fingerprint}): "
                    "build the index with this model"
                )
            return Snapshot.of(index, changes, open_items(self.path))

    def _state(self) -> object:
        """Identity of the file at the path; None where there is none."""

        def of(path: Path) -> object:
            try:
                found = os.stat(path)
            except OSError:
                return None
            return found.st_ino, found.st_mtime_ns, found.st_size

        index = of(self.path)
        return index and (index, of(sidecar_path(self.path)))

    # Changing --------------------------------------------------------------------------------------------------------

    @property
    def writable(self) -> bool:
        """Whether changes are taken."""
        return self._log is not None

    @property
    def due(self) -> bool:
        """Whether a compaction is worth its while."""
        return self.writable and len(self.snapshot.changes) >= self.compact_after

    def commit(self, asked: Sequence[Asked]) -> list[int | DataError]:
        """Make changes, one after another; those that can be made are on disk together when this returns.

        Returns:
            For each its id, or why it could not be made: :class:`UnknownItemError` to remove, :class:`TakenIdError` to add,
            :class:`NotStoredError` where the disk refuses.
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
                        TakenIdError(f"an item has the id {number} already: remove it first, or give another")
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
        """Write the index file anew with all changes, and cut the log. Searches and commits go on meanwhile.

        Returns:
            Whether it was written: not where there is nothing to write, no item would be left, or the file was replaced by another.

        Raises:
            DataError: the disk refuses; nothing is lost.
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
            made = MemoryIndex.build(
                codes,
                index.codebooks,
                ids,
                kind="ivf" if index.kind == "ivf" else self.kind,
                ivf=None if index.ivf is None else replace(index.ivf, list_of=None, points=()),
                model_fingerprint=index.model_fingerprint,
            )
            self._save(made, snapshot.changes)
            with self._writing:
                self._seen = self._state()
                # The changes that the file has now change nothing more, in memory or on disk: a kill here loses nothing.
                named = open_items(self.path)
                self.snapshot = Snapshot.of(made, self.snapshot.changes, named)
                self._log.drop_before(end)
                changes = Changes.none(self._size)
                self.snapshot = Snapshot.of(
                    made, changes.then(np.concatenate([self._log.records[:0], *self._recent])), named
                )
        log.info("%s: written with all changes, %d items", self.path, made.ntotal)
        return True

    def _save(self, made: MemoryIndex, changes: Changes) -> None:
        """Replace the index file, in the form that it has."""
        stated = read_sidecar(self.path) or {"kind": None, "extra": {}}
        storage = STORAGES.get(stated["kind"])
        extra = {key: stated["extra"][key] for key in ("engine", "group") if key in stated["extra"]}
        key = self._save_names(changes, stated["extra"].get("items"))
        if key is not None:
            extra["items"] = key
        # An index without lists keeps its map of ids, even where these count up for now.
        flat = made.kind != "ivf" and not (storage and storage.lists)
        packing = storage.packing if storage else "4-bit"
        save_index(
            row_index(made.codes, made.ids, made.codebooks, packing) if flat else made.to_faiss(storage),
            check_index_output(self.path, overwrite=True),
            model_fingerprint=made.model_fingerprint,
            overwrite=True,
            extra=extra,
        )

    def _save_names(self, changes: Changes, key: str | None) -> str | None:
        """Write the file of names and labels with the changes, and return its key; None where nothing is known of any item.

        It is written before the index, under the key that it had: with the log it is right beside the old index, too.
        """
        items = open_items(self.path) if key is not None else None
        ids = changes.ids[changes.there]
        new = {
            int(i): item
            for i, item in zip(ids, changes.about[changes.there], strict=True)
            if item is not None
        }
        with items or contextlib.nullcontext():
            if items is None and not new:
                return None
            if items is None or key is None:
                key = fingerprint("items", self.fingerprint, *(f"{i} {new[i]}" for i in sorted(new)))
            elif not new and not any(items.lookup(ids)):
                return key
            update_items(self.path, items, changes.ids, new, key)
        return key

    # Reloading -------------------------------------------------------------------------------------------------------

    @property
    def stale(self) -> bool:
        """Whether the file at the path is another than the one that is searched, and not one that was refused."""
        state = self._state()
        return state is not None and state not in (self._seen, self._refused)

    def reload(self, *, only_stale: bool = False) -> bool:
        """Search the index that is at the path now, with the changes of the log. On failure the old one is searched on.

        Args:
            only_stale: do nothing where the file is the one that is searched.

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
        """Let go of the file; with ``compact`` it is written with all changes first."""
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

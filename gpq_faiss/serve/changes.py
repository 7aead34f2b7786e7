"""Changes of an index since its file was written, and the log that stores them.

A log is a header and frames. A frame contains changes that were written and fsynced together, with checksums, followed by names and
labels as JSON. After a crash the last frame may be torn; it was never acknowledged, and is dropped. A damaged frame followed by others
is an error.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Ids
from ..errors import DataError, MismatchError
from ..files import open_own, write_bytes, write_error
from ..inputs import check_file, check_memory, parse_json
from ..store import Item

log = logging.getLogger(__name__)

_MAGIC, _FRAME_MAGIC, _ABOUT_MAGIC = b"GPQLOG1\n", b"GPQF", b"GPQN"
_HEADER = struct.Struct("<8sI16sI")  # magic, bytes of a code, fingerprint of the codebooks, CRC-32 of these
_FRAME = struct.Struct("<4sIII")  # magic, changes, CRC-32 of the changes, CRC-32 of these
_ABOUT = struct.Struct("<I")  # bytes of JSON after the changes, if the magic says so

Records = NDArray[Any]
"""Changes in order: structured array of ``id`` int64, ``there`` uint8, ``code`` uint8 [code_size], and
``about``, an :class:`..store.Item` if the item has a name or labels, else None."""

Change = tuple[int, NDArray[np.uint8] | None, Item | None]
"""An id, its code (None: removed), and its name and labels, if known."""


def record_type(code_size: int) -> np.dtype[Any]:
    """The type of :data:`Records` on disk; ``there`` is 1 for an added item, 0 for a removed one."""
    return np.dtype([("id", "<i8"), ("there", "u1"), ("code", "u1", (code_size,))])


def _held(stored: NDArray[Any], about: Mapping[int, Item]) -> Records:
    """Records from changes on disk, and names and labels by index."""
    kind = stored.dtype
    records = np.empty(len(stored), [*((name, kind[name]) for name in kind.names or ()), ("about", "O")])
    for name in kind.names or ():
        records[name] = stored[name]
    records["about"] = [about.get(place) for place in range(len(stored))]
    return records


def log_path(index: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.log``."""
    return Path(f"{Path(index)}.log")


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
    def none(cls, code_size: int) -> Changes:
        """No changes."""
        codes = np.empty((0, code_size), np.uint8)
        return cls(np.empty(0, np.int64), np.empty(0, np.bool_), codes, np.empty(0, object))

    def then(self, records: Records) -> Changes:
        """These changes followed by later ones; the last one per id counts."""
        ids = np.concatenate([self.ids, records["id"]])
        order = np.argsort(ids, kind="stable")
        ids = ids[order]
        last = np.append(ids[1:] != ids[:-1], True)[: len(ids)]
        order = order[last]
        there = np.concatenate([self.there, records["there"] == 1])[order]
        codes = np.concatenate([self.codes, records["code"]])[order]
        return Changes(ids[last], there, codes, np.concatenate([self.about, records["about"]])[order])

    def at(self, number: int) -> int:
        """Index of an id, -1 if unchanged."""
        place = int(np.searchsorted(self.ids, number))
        return place if place < len(self.ids) and self.ids[place] == number else -1

    def __len__(self) -> int:
        return len(self.ids)


def read_log(path: Path, code_size: int, fingerprint: str) -> tuple[Records, int]:
    """The changes of a log, and its length in bytes without a torn end. No changes and 0 if there is no log.

    Raises:
        DataError: damaged, of another format, or unreadable.
        MismatchError: of another model.
    """
    kind = record_type(code_size)
    if not path.exists():
        return _held(np.empty(0, kind), {}), 0
    check_memory(4 * check_file(path, "the log of an index"), str(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise DataError(f"{path} is not the log of an index: move it away to serve the index without it")
    _, size, model, check = _HEADER.unpack_from(data)
    if check != zlib.crc32(data[: _HEADER.size - 4]):
        raise DataError(f"{path} is damaged in its header: restore it, or move it away and lose its changes")
    if size != code_size or model != fingerprint.encode():
        if len(data) == _HEADER.size:
            return _held(np.empty(0, kind), {}), 0
        raise MismatchError(
            f"{path} holds changes of an index with other codebooks ({model.decode('ascii', 'replace')}, not {fingerprint}): "
            "serve the index that it belongs to, or move it away"
        )
    parts, at = [_held(np.empty(0, kind), {})], _HEADER.size
    while (frame := _frame(data, at, kind)) is not None:
        parts.append(frame[0])
        at = frame[1]
    for magic in (_FRAME_MAGIC, _ABOUT_MAGIC):
        after = data.find(magic, at + 1)
        while after != -1:
            if _frame(data, after, kind) is not None:
                raise DataError(
                    f"{path} is damaged at byte {at:,}, with intact changes after it: restore it, or move it away and lose its changes"
                )
            after = data.find(magic, after + 1)
    if at < len(data):
        log.warning(
            "%s: its last %d bytes are no whole change, which a crash while it was written or damage leaves: they are dropped",
            path,
            len(data) - at,
        )
    return np.concatenate(parts), at


def _frame(data: bytes, at: int, kind: np.dtype[Any]) -> tuple[Records, int] | None:
    """The changes of the frame at byte ``at``, and its end; None if there is no complete frame."""
    if len(data) < at + _FRAME.size:
        return None
    magic, n, check, own = _FRAME.unpack_from(data, at)
    if magic not in (_FRAME_MAGIC, _ABOUT_MAGIC) or own != zlib.crc32(data[at : at + _FRAME.size - 4]):
        return None
    start = at + _FRAME.size
    end = text = start + n * kind.itemsize
    if magic == _ABOUT_MAGIC:
        if len(data) < text + _ABOUT.size:
            return None
        end = text + _ABOUT.size + int(_ABOUT.unpack_from(data, text)[0])
    if n == 0 or len(data) < end or zlib.crc32(data[start:end]) != check:
        return None
    about = parse_json(data[text + _ABOUT.size : end]) if magic == _ABOUT_MAGIC else {}
    return _held(np.frombuffer(data, kind, n, start), {int(i): _item(*one) for i, one in about.items()}), end


def _item(name: str | None, labels: Sequence[str]) -> Item:
    return Item({} if name is None else {"name": name}, tuple(labels) or None)


def _bytes_about(changes: Sequence[Change]) -> bytes:
    """Names and labels of changes by index, as JSON; empty if there are none."""
    about = {
        str(place): [item.name, list(item.labels or ())]
        for place, (_, _, item) in enumerate(changes)
        if item is not None
    }
    if not about:
        return b""
    text = json.dumps(about, ensure_ascii=False, separators=(",", ":")).encode()
    return _ABOUT.pack(len(text)) + text


class ChangeLog:
    """A log opened for writing. The caller must hold a lock.

    Raises:
        DataError, MismatchError: see :func:`read_log`; or the log cannot be written.
    """

    def __init__(self, path: Path, code_size: int, fingerprint: str) -> None:
        self.path, self._kind = path, record_type(code_size)
        head = struct.pack("<8sI16s", _MAGIC, code_size, fingerprint.encode())
        self._header = head + struct.pack("<I", zlib.crc32(head))
        self.records, self.end = read_log(path, code_size, fingerprint)
        self.broken = False
        self._file: IO[bytes] | None = None
        if not self.end:
            write_bytes(path, self._header)
            self.end = len(self._header)
        self._open()

    def _open(self) -> None:
        try:
            self._file = open_own(self.path, "r+b", buffering=0)
            self._cut()
        except OSError as error:
            raise write_error(self.path, error) from error

    def _cut(self) -> None:
        """Drop data after the last complete frame."""
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size != self.end:
            os.ftruncate(self._file.fileno(), self.end)
            os.fsync(self._file.fileno())
        self._file.seek(self.end)

    def append(self, changes: Sequence[Change]) -> Records:
        """Write changes as one frame, on disk on return.

        Raises:
            DataError: writing fails; nothing is written then. After a failed fsync the state is unknown, and further writes fail.
        """
        records = np.zeros(len(changes), self._kind)
        for record, (number, code, _) in zip(records, changes, strict=True):
            record["id"] = number
            if code is not None:
                record["there"], record["code"] = 1, code
        about = _bytes_about(changes)
        payload = records.tobytes() + about
        magic = _ABOUT_MAGIC if about else _FRAME_MAGIC
        head = struct.pack("<4sII", magic, len(records), zlib.crc32(payload))
        frame = memoryview(head + struct.pack("<I", zlib.crc32(head)) + payload)
        if self.broken or self._file is None:
            raise DataError(f"{self.path} could not be written before: start the service again")
        try:
            done = 0
            while done < len(frame):
                done += self._file.write(frame[done:])
        except OSError as error:
            self.broken = True
            with contextlib.suppress(OSError):
                self._cut()
                self.broken = False
            raise write_error(self.path, error) from error
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self.broken = True
            raise write_error(self.path, error) from error
        self.end += len(frame)
        return _held(records, {place: item for place, (_, _, item) in enumerate(changes) if item is not None})

    def drop_before(self, at: int) -> None:
        """Drop the changes before byte ``at``, atomically.

        Raises:
            DataError: writing fails; the log is unchanged.
        """
        assert self._file is not None
        with self.path.open("rb") as file:
            file.seek(at)
            kept = file.read(self.end - at)
        write_bytes(self.path, self._header + kept)
        self._file.close()
        self.end = len(self._header) + len(kept)
        self._open()

    @property
    def empty(self) -> bool:
        """Whether it has no changes."""
        return self.end == len(self._header)

    def close(self) -> None:
        """Close the file; an empty log is removed."""
        if self._file is not None:
            self._file.close()
            self._file = None
            if self.empty and not self.broken:
                with contextlib.suppress(OSError):
                    self.path.unlink()

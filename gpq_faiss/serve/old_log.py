"""Change logs of earlier versions, ``index.faiss.log``, read only to take their changes over.

A log is a header and frames. A frame has changes that were written together, with checksums, then names and labels as JSON if any. A
crash may leave the last frame torn; it was never acknowledged, and is dropped. A damaged frame followed by others is an error.
"""

from __future__ import annotations

import logging
import re
import struct
import zlib
from pathlib import Path

import numpy as np

from ..errors import DataError, MismatchError
from ..inputs import check_file, check_memory, parse_json
from ..store import Item

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<8sI16sI")  # magic, bytes of a code, fingerprint of the codebooks, CRC-32 of these
_FRAME = struct.Struct("<4sIII")  # magic, changes, CRC-32 of the rest of the frame, CRC-32 of these
_MAGICS = re.compile(b"GPQ[FN]")  # N: names and labels follow, after their size in bytes
_REMEDY = "restore it, or move it away and lose its changes"

OldChange = tuple[int, bytes | None, Item | None]
"""Id, code (None: removed), name and labels."""


def old_log_path(index: Path) -> Path:
    """``index.faiss`` -> ``index.faiss.log``."""
    return Path(f"{index}.log")


def read_old_log(index: Path, size: int, fingerprint: str) -> list[OldChange]:
    """The changes in the log of an index, in order; none if there is no log.

    Raises:
        DataError: damaged, or no log.
        MismatchError: of an index with codes of another size than ``size`` bytes, or other codebooks.
    """
    path = old_log_path(index)
    if not path.exists():
        return []
    check_memory(64 * check_file(path, "the changes of an index"), str(path))
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    magic, stated, model, check = _HEADER.unpack_from(data.ljust(_HEADER.size))
    if magic != b"GPQLOG1\n" or check != zlib.crc32(data[: _HEADER.size - 4]):
        raise DataError(f"{path} is damaged in its header, or no log of changes: {_REMEDY}")
    at = _HEADER.size
    if len(data) > at and (stated, model) != (size, fingerprint.encode()):
        raise MismatchError(
            f"{path} holds changes of an index with other codebooks ({model.decode('ascii', 'replace')}, not {fingerprint}): "
            "serve the index that it belongs to, or move it away"
        )
    changes: list[OldChange] = []
    try:
        while (frame := _frame(data, at, size)) is not None:
            changes += frame[0]
            at = frame[1]
        if any(_frame(data, found.start(), size) for found in _MAGICS.finditer(data, at + 1)):
            raise ValueError("with intact changes after it")
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged at byte {at:,} ({error}): {_REMEDY}") from None
    if at < len(data):
        log.warning("%s: its last %d bytes, no whole change, are dropped", path, len(data) - at)
    return changes


def _frame(data: bytes, at: int, size: int) -> tuple[list[OldChange], int] | None:
    """The changes of the frame at byte ``at``, and its end; None if there is no complete frame."""
    start = at + _FRAME.size
    if len(data) < start or not _MAGICS.match(data, at):
        return None
    magic, n, check, own = _FRAME.unpack_from(data, at)
    if own != zlib.crc32(data[at : start - 4]):
        return None
    kind = np.dtype([("id", "<i8"), ("there", "u1"), ("code", "u1", (size,))])
    end = text = start + n * kind.itemsize
    if magic == b"GPQN":
        text += 4
        end = text + int.from_bytes(data[end:text], "little")
    if n == 0 or len(data) < max(text, end) or zlib.crc32(data[start:end]) != check:
        return None
    about = parse_json(data[text:end]) if magic == b"GPQN" else {}
    items = {int(place): _item(*one) for place, one in about.items()}
    return [
        (int(record["id"]), record["code"].tobytes() if record["there"] == 1 else None, items.get(place))
        for place, record in enumerate(np.frombuffer(data, kind, n, start))
    ], end


def _item(name: str | None, labels: list[str]) -> Item:
    texts = {} if name is None else {"name": name}
    if not isinstance(labels, list) or not all(isinstance(text, str) for text in (*texts.values(), *labels)):
        raise TypeError("a name or label is no text")
    return Item(texts, tuple(labels) or None)

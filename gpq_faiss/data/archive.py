"""Read files inside tar archives without extracting them to disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import available_memory
from .images import is_image_name, sampled_content, shown

MAX_UNPACKED = 4 << 30
"""Maximum decompressed size in bytes of a compressed archive in memory."""
MAX_RATIO = 100
"""Maximum ratio of decompressed to compressed size beyond :data:`SMALL_UNPACKED` bytes. Images hardly compress, bombs a thousandfold."""
SMALL_UNPACKED = 64 << 20
MAX_MEMBERS = 5_000_000
MAX_MEMBER_BYTES = 256 << 20
TAR_ERRORS = (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError)
"""Exceptions of the standard library for damaged archives."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """Index of the selected members: sorted ``names`` with ``/``; ``offsets`` and ``sizes`` int64 [N] in ``buffer``, the decompressed
    archive (gzip has no random access), or in the file if it is None; ``others`` is the number of other regular members."""

    path: Path
    names: list[str]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    buffer: memoryview | None = field(repr=False)
    others: int

    def content(self, members: NDArray[np.int64]) -> str:
        """Hash over the members, see :func:`.images.sampled_content`; over all bytes where they are in memory."""
        if self.buffer is not None:
            return hashlib.sha256(self.buffer).hexdigest()
        pieces = zip(self.offsets[members].tolist(), self.sizes[members].tolist(), strict=True)
        return sampled_content((str(self.path), start, size) for start, size in pieces)

    def read(self, i: int) -> bytes:
        """Bytes of member ``i``. Raises DataError: the file has gone or shrunk since it was opened."""
        offset, size = int(self.offsets[i]), int(self.sizes[i])
        if self.buffer is not None:
            return bytes(self.buffer[offset : offset + size])
        try:
            with self.path.open("rb") as stream:
                stream.seek(offset)
                data = stream.read(size)
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror}") from None
        if len(data) != size:
            raise DataError(f"{self.path} is shorter than when it was opened: was it replaced?")
        return data


@dataclass(frozen=True)
class Members:
    """Contents by row of chosen (archive, member) pairs, for :class:`.images.FileImages`."""

    archives: Sequence[Archive]
    chosen: Sequence[tuple[int, int]]

    def __call__(self, row: int) -> bytes:
        archive, member = self.chosen[row]
        return self.archives[archive].read(member)


def _unpack(path: Path) -> io.BytesIO:
    free = available_memory()
    most = min(MAX_UNPACKED, max(SMALL_UNPACKED, MAX_RATIO * path.stat().st_size))
    limit = most if free is None else min(most, free)
    out = io.BytesIO()
    with gzip.open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            if out.tell() + len(block) > limit:
                raise DataError(
                    f"{path} unpacks to more than {limit:,} bytes: unpack it and give folder: its folder"
                )
            out.write(block)
    out.seek(0)
    return out


def _member_name(name: str, path: Path) -> str:
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if name.startswith("/") or ".." in parts or "\\" in name:
        # Harmless, since nothing is extracted, but suspicious.
        raise DataError(f"{path} has a member that points outside of it ({shown(name)}): unsafe archive")
    return "/".join(parts)


def _index(
    path: Path, stream: IO[bytes], wanted: Callable[[str], bool]
) -> tuple[list[tuple[str, int, int]], int]:
    """Name, offset and size of the wanted members, sorted; and the number of others."""
    found: list[tuple[str, int, int]] = []
    others, length = 0, stream.seek(0, io.SEEK_END)
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise DataError(f"{path} has more than {MAX_MEMBERS:,} members: unpack it, give folder:")
            # tarfile keeps all members, which for millions takes more memory than the images.
            archive.members = []  # type: ignore[attr-defined]
            if not member.isreg() or member.issparse():
                continue
            name, size = _member_name(member.name, path), member.size
            if not wanted(name):
                others += 1
                continue
            if size > MAX_MEMBER_BYTES:
                raise DataError(
                    f"{path}: {shown(name)} has {size:,} bytes: too large for an image or a label"
                )
            if member.offset_data + size > length:
                raise DataError(f"{path} is truncated inside {shown(name)}: get it again")
            found.append((name, member.offset_data, size))
    return sorted(found), others


def open_archive(path: Path, wanted: Callable[[str], bool] = is_image_name) -> Archive:
    """Index the members of a ``.tar`` or ``.tar.gz`` (recognised by the content) whose names are ``wanted``; default: images.

    A plain tar stays on disk; a gzipped one is decompressed into memory, within the limits above and of free memory.
    """
    buffer = None
    try:
        with path.open("rb") as stream:
            if stream.read(2) == b"\x1f\x8b":
                memory = _unpack(path)
                buffer = memory.getbuffer()
                found, others = _index(path, memory, wanted)
            else:
                found, others = _index(path, stream, wanted)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} not found: give an archive of images") from None
    except TAR_ERRORS as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is not a readable tar archive ({shown(why)}): damaged or foreign") from None
    twice = next((a[0] for a, b in itertools.pairwise(found) if a[0] == b[0]), None)
    if twice is not None:
        raise DataError(f"{path} has two members named {shown(twice)}: damaged or foreign")
    offsets, sizes = (np.array([one[k] for one in found], dtype=np.int64) for k in (1, 2))
    return Archive(path, [name for name, _, _ in found], offsets, sizes, buffer, others)

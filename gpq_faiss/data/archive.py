"""Read files inside tar archives without extracting them to disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import itertools
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import available_memory
from .images import FileImages, is_image_name, sampled_content, shown

MAX_UNPACKED = 4 << 30
"""Maximum decompressed size in bytes of a compressed archive in memory."""

MAX_RATIO = 100
"""Maximum ratio of decompressed to compressed size beyond :data:`SMALL_UNPACKED` bytes. Images hardly compress, bombs a thousandfold."""

SMALL_UNPACKED = 64 << 20

MAX_MEMBERS = 5_000_000
MAX_MEMBER_BYTES = 256 << 20

_BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """Index of the selected members of an archive.

    Attributes:
        path: the archive.
        names: of the members, sorted, with ``/``, without a leading ``./``.
        offsets, sizes: int64 [N], offset and length in ``buffer``, or in the file if ``buffer`` is None.
        buffer: the decompressed archive, if it is compressed (gzip has no random access).
        others: number of other regular members.
        digest: SHA-256 of the decompressed archive; empty if it is read from the file.
    """

    path: Path
    names: list[str]
    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    buffer: memoryview | None = field(repr=False)
    others: int
    digest: str

    def content(self, members: NDArray[np.int64]) -> str:
        """Hash over the members, see :func:`.images.sampled_content`; over all bytes where they are in memory."""
        path, pieces = str(self.path), zip(self.offsets[members], self.sizes[members], strict=True)
        return self.digest or sampled_content((path, int(start), int(size)) for start, size in pieces)

    def read(self, i: int) -> bytes:
        """Bytes of member ``i``.

        Raises:
            DataError: the file has gone or shrunk since it was opened.
        """
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


def _unpack(path: Path, limit: int) -> io.BytesIO:
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
    path: Path, stream: IO[bytes], length: int, wanted: Callable[[str], bool]
) -> tuple[list[tuple[str, int, int]], int]:
    found: list[tuple[str, int, int]] = []
    others = 0
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise DataError(f"{path} has more than {MAX_MEMBERS:,} members: unpack it, give folder:")
            # tarfile keeps all members, which for millions takes more memory than the images.
            archive.members = []  # type: ignore[attr-defined]
            if not member.isreg() or member.issparse():
                continue
            name = _member_name(member.name, path)
            if not wanted(name):
                others += 1
                continue
            if member.size > MAX_MEMBER_BYTES:
                raise DataError(
                    f"{path}: {shown(name)} has {member.size:,} bytes: too large for an image or a label"
                )
            if member.offset_data + member.size > length:
                raise DataError(f"{path} is truncated inside {shown(name)}: get it again")
            found.append((name, member.offset_data, member.size))
    return found, others


def open_archive(
    path: Path, *, wanted: Callable[[str], bool] = is_image_name, limit: int = MAX_UNPACKED
) -> Archive:
    """Index the members of a ``.tar`` or ``.tar.gz`` (recognised by the content) whose names are ``wanted``; default: images.

    A plain tar stays on disk; a gzipped one is decompressed into memory, up to ``limit`` bytes and :data:`MAX_RATIO` times its size.

    Raises:
        DataError: missing, not a tar archive, damaged, truncated, too large, or with member names that point outside.
    """
    try:
        with path.open("rb") as stream:
            packed = stream.read(2) == b"\x1f\x8b"
        if packed:
            free = available_memory()
            most = max(SMALL_UNPACKED, MAX_RATIO * path.stat().st_size)
            memory = _unpack(path, min(limit, most, limit if free is None else free))
            buffer = memory.getbuffer()
            found, others = _index(path, memory, len(buffer), wanted)
            digest = hashlib.sha256(buffer).hexdigest()
        else:
            buffer, digest = None, ""
            with path.open("rb") as stream:
                found, others = _index(path, stream, path.stat().st_size, wanted)
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path} not found: give an archive of images") from None
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        raise DataError(f"{path} is not a readable tar archive ({shown(why)}): damaged or foreign") from None
    found.sort()
    twice = next((a[0] for a, b in itertools.pairwise(found) if a[0] == b[0]), None)
    if twice is not None:
        raise DataError(f"{path} has two members named {shown(twice)}: damaged or foreign")
    return Archive(
        path=path,
        names=[name for name, _, _ in found],
        offsets=np.array([offset for _, offset, _ in found], dtype=np.int64),
        sizes=np.array([size for _, _, size in found], dtype=np.int64),
        buffer=buffer,
        others=others,
        digest=digest,
    )


@dataclass(kw_only=True)
class ArchiveImages(FileImages):
    """Images decoded from archives; ``paths`` hold ``ARCHIVE!member`` for the messages.

    Attributes:
        archives: the archives.
        members: int64 [N, 2], archive and member number of each image.
    """

    archives: list[Archive] = field(repr=False)
    members: NDArray[np.int64] = field(repr=False)

    def source(self, i: int) -> bytes | str:
        """Encoded bytes of image ``i``."""
        archive, member = self.members[i]
        return self.archives[int(archive)].read(int(member))

    def image_path(self, i: int) -> str | None:
        """None: images in archives have no path."""
        del i
        return None

"""Read files inside tar archives without extracting them to disk."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..errors import DataError, one_line
from ..inputs import available_memory
from .images import BrokenImageError, sampled_content, shown

MAX_RATIO = 100
"""Maximum ratio of decompressed to compressed size beyond :data:`SMALL_UNPACKED` bytes. Images hardly compress, bombs a thousandfold."""
SMALL_UNPACKED = 64 << 20
MAX_MEMBERS = 5_000_000
MAX_MEMBER_BYTES = 256 << 20
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Tar:
    """The regular members of an archive, hidden ones left out: name -> (offset, size), in the order of the archive. The places are in
    ``buffer``, the decompressed archive (gzip has no random access), or in the file if it is None."""

    path: Path
    members: dict[str, tuple[int, int]] = field(repr=False)
    buffer: memoryview | None = field(repr=False)

    def content(self, names: Iterable[str]) -> str:
        """Hash over members, see :func:`.images.sampled_content`; over all bytes where they are in memory."""
        if self.buffer is not None:
            return hashlib.sha256(self.buffer).hexdigest()
        return sampled_content((str(self.path), *self.members[name]) for name in names)

    def read(self, name: str, most: int = MAX_MEMBER_BYTES) -> bytes:
        """Bytes of a member. Raises DataError: too large; the file has gone or shrunk since it was opened."""
        offset, size = self.members[name]
        if size > most:
            raise BrokenImageError(f"{self.path}!{shown(name)}", f"{size:,} bytes are too large")
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


def _unpack(path: Path) -> io.BytesIO:
    most = max(SMALL_UNPACKED, MAX_RATIO * path.stat().st_size)
    free = available_memory()
    limit = most if free is None else min(most, free)
    out = io.BytesIO()
    with gzip.open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            if out.tell() + len(block) > limit:
                raise DataError(f"{path} unpacks to more than {limit:,} bytes: unpack it and give its folder")
            out.write(block)
    return out


def _members(path: Path, stream: IO[bytes]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    length = stream.seek(0, io.SEEK_END)
    stream.seek(0)
    with tarfile.open(fileobj=stream, mode="r:") as archive:
        for count, member in enumerate(archive):
            if count >= MAX_MEMBERS:
                raise DataError(f"{path} has more than {MAX_MEMBERS:,} members: unpack it, give its folder")
            # tarfile keeps all members, which for millions takes more memory than the images.
            archive.members = []  # type: ignore[attr-defined]
            if not member.isreg() or member.issparse():
                continue
            name = "/".join(part for part in member.name.split("/") if part not in {"", "."})
            if member.name.startswith("/") or ".." in name.split("/") or "\\" in name:
                # Harmless, since nothing is extracted, but suspicious.
                raise DataError(
                    f"{path} has a member that points outside of it ({shown(name)}): unsafe archive"
                )
            if member.offset_data + member.size > length:
                raise DataError(f"{path} is truncated inside {shown(name)}: get it again")
            if name in found:
                raise DataError(f"{path} has two members named {shown(name)}: damaged or foreign")
            if not name.rpartition("/")[2].startswith("."):
                found[name] = member.offset_data, member.size
    return found


def open_tar(path: Path) -> Tar:
    """Index the members of a ``.tar``, which stays on disk, or ``.tar.gz`` (recognised by the content), which is decompressed into memory
    within the limits above and of free memory."""
    try:
        with path.open("rb") as stream:
            if stream.read(2) != b"\x1f\x8b":
                return Tar(path, _members(path, stream), None)
            memory = _unpack(path)
            return Tar(path, _members(path, memory), memory.getbuffer())
    except FileNotFoundError:
        raise DataError(f"{path} not found: give an archive of images") from None
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not a readable tar archive ({one_line(error)}): damaged or foreign"
        ) from None

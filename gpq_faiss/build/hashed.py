"""A file written once, with its size and SHA-256."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import BinaryIO, Self


class HashedFile:
    """A new file; a context manager that closes it."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self.size = 0

    def put(self, data: bytes | memoryview) -> None:
        """Write bytes."""
        self._file.write(data)
        self._digest.update(data)
        self.size += memoryview(data).nbytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""
        return self._digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

"""Helpers of the descriptions."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from ...errors import DataError

KNOWN = (
    "a model folder, features.h5, codes.h5, a split, a Faiss index, a manifest of shards, an exported encoder (.onnx, .pt2), .npy or "
    ".npz"
)
"""Supported files, for messages."""
SMALL_JSON = 64 << 20
"""Maximum bytes of a JSON text to detect its kind."""
ENCODER_MEMBER = "/extra/gpq.json"
"""File with the metadata in the PyTorch archive of an exported encoder."""
_HASH_LIMIT = 256 << 20  # checksums of larger archives are not verified


def head(kind: str, path: Path, **more: Any) -> dict[str, Any]:
    """The common entries of every description, then ``more``."""
    return {"kind": kind, "path": str(path), "bytes": size_of(path), **more}


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files)


def check_archive(archive: zipfile.ZipFile, path: Path) -> bool:
    """Verify the checksums of a zip archive; False if it is too large for that.

    Raises:
        DataError: they differ.
    """
    if sum(m.file_size for m in archive.infolist()) > _HASH_LIMIT:
        return False
    broken = archive.testzip()
    if broken is not None:
        raise DataError(f"{path} is damaged (in {broken}): copy or make it again")
    return True


def first_line(error: BaseException) -> str:
    """An error in one short line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160].rstrip(".: ") if lines else type(error).__name__

"""Description of ``.npy`` and ``.npz`` files."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO, Any

from ...data.arrays import ZIP_ERRORS, npy_header
from ...errors import DataError
from .common import ENCODER_MEMBER, check_archive, first_line, head
from .encoder import describe_encoder


def describe_npy(path: Path) -> dict[str, Any]:
    """Shape and type of an ``.npy`` file."""
    with path.open("rb") as file:
        found = _array(file, path.stat().st_size, str(path))
    return head("array", path, **found)


def describe_zip(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file, or an encoder in a PyTorch archive."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.filename.endswith(ENCODER_MEMBER) for m in members):
                return describe_encoder(path)
            if not members or not all(m.filename.endswith(".npy") for m in members):
                raise DataError(
                    f"{path} is a zip archive, but neither .npz nor an encoder of gpq export-encoder"
                )
            verified = check_archive(archive, path)
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(".npy")
                    arrays[name] = _array(file, member.file_size, f"{path} ({name})")
    except ZIP_ERRORS as error:
        raise DataError(
            f"{path} is truncated or damaged ({first_line(error)}): copy or make it again"
        ) from None
    return head("arrays", path, arrays=arrays, verified=verified)


def _array(file: IO[bytes], size: int, what: str) -> dict[str, Any]:
    """Shape and type of an array in NumPy's format, from its header; ``size``: bytes available, with the header."""
    shape, fortran, dtype, _ = npy_header(file, what, size)
    return {"shape": list(shape), "dtype": str(dtype), "order": "Fortran" if fortran else "C"}

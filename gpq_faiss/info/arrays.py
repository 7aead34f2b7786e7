"""NumPy files, and archives of them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import DataError
from .common import ENCODER_MEMBER, check_archive, first_line, head
from .encoder import describe_encoder


def describe_npy(path: Path) -> dict[str, Any]:
    """Shape and type of an ``.npy`` file."""
    with path.open("rb") as file:
        found = _array(file, path.stat().st_size, str(path))
    return head("array", path, **found)


def describe_zip(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file, or the encoder that an archive of PyTorch is."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.filename.endswith(ENCODER_MEMBER) for m in members):
                return describe_encoder(path)
            if not members or not all(m.filename.endswith(".npy") for m in members):
                raise DataError(
                    f"{path} is a zip archive, but neither .npz nor an encoder of gpq export-encoder"
                )
            check_archive(archive, path)
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(".npy")
                    arrays[name] = _array(file, member.file_size, f"{path} ({name})")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(
            f"{path} is truncated or damaged ({first_line(error)}): copy or make it again"
        ) from None
    return head("arrays", path, arrays=arrays)


def _array(file: IO[bytes], size: int, what: str) -> dict[str, Any]:
    """Shape and type of an array in NumPy's format, from its header; ``size`` is what there is, with the header."""
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        if version not in read:
            raise ValueError(f"format version {version}")
        shape, fortran, dtype = read[version](file)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{what} is not a NumPy array, or is damaged ({first_line(error)})") from None
    if dtype.hasobject:
        raise DataError(f"{what} holds Python objects, which are never unpickled: save plain numbers")
    expected = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size != expected:
        raise DataError(
            f"{what} is truncated or damaged: {size:,} bytes where its header asks for {expected:,}"
        )
    return {"shape": [int(n) for n in shape], "dtype": str(dtype), "order": "Fortran" if fortran else "C"}

"""Reading of files, with one clear message for those that are missing or of another form."""

from __future__ import annotations

import codecs
import contextlib
import glob
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DataError, GpqError, one_line


def check_file(path: Path, description: str) -> None:
    """Check that a file which is to be read exists.

    Args:
        description: the expected content, for messages ("a Parquet file").

    Raises:
        DataError: the file is missing, or is a folder or a device.
    """
    if not os.path.isfile(path):
        problem = "is a folder or a device" if os.path.exists(path) else "not found"
        raise DataError(f"{path} {problem}: {description} is expected")


@contextlib.contextmanager
def reading(path: Path, description: str) -> Iterator[None]:
    """Name a file in the errors of the ``with`` block that parses it.

    Parsers raise nearly every exception on malformed bytes; all become DataErrors.

    Args:
        description: the expected content, for messages ("a Parquet file").

    Raises:
        DataError: as :func:`check_file`; or the block failed, so the file is not of this kind.
    """
    check_file(path, description)
    try:
        yield
    except GpqError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except (MemoryError, PermissionError) as error:
        reason = getattr(error, "strerror", None) or "it does not fit in memory"
        raise DataError(f"cannot read {path}: {reason}") from None
    except Exception as error:
        raise DataError(
            f"{path} is not {description}, or it is empty, truncated or damaged "
            f"({one_line(error, 100)}): make or copy it again"
        ) from None


def read_text(path: Path, description: str) -> str:
    """Read a text in UTF-8, or in UTF-16 with a byte-order mark, and remove the mark.

    Raises:
        DataError: as :func:`check_file`; or the file is not such a text.
    """
    form, _ = file_form(path, description)
    if form not in ("text", "csv", "json", "JSON of records", "empty"):
        raise DataError(f"{path} is {form}: a text is expected ({description.rstrip(',')})")
    with reading(path, f"{description} saved as UTF-8"):
        data = path.read_bytes()
        is_wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        text = data.decode("utf-16" if is_wide else "utf-8-sig")
        return text.replace("\r\n", "\n").replace("\r", "\n")


def read_toml(path: Path, description: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        DataError: as :func:`read_text`; or the file is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, f"TOML of {description}"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not TOML: {one_line(error)}") from None


def check_memory(
    needed: int, subject: str, remedy: str = "use a machine with more memory, or a smaller file"
) -> None:
    """Check that a piece of work fits into memory, if the system reports how much is free.

    Args:
        needed: bytes that it needs.
        subject: its name in the message.
        remedy: advice in the message.

    Raises:
        DataError: less memory is free.
    """
    with contextlib.suppress(OSError):
        figures = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(re.findall(r"MemAvailable:\s+(\d+)", figures)[0]) << 10
        if needed > free:
            raise DataError(
                f"{subject}: {needed / 1e9:,.1f} GB of memory are needed, {free / 1e9:,.1f} GB are "
                f"free: {remedy}"
            )


# Forms of files ----------------------------------------------------------------------------------

ENDINGS = {
    ".npy": "npy",
    ".npz": "npz",
    ".h5": "hdf5",
    ".hdf5": "hdf5",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "JSON of records",
    ".mat": "mat",
    ".fvecs": "vecs",
    ".bvecs": "vecs",
}
"""Form of a table by the ending of its file."""
_PICKLE = "it can run code, so it is not loaded: save arrays as .npy, tables as .parquet"
_UNPACK = "extract it, and give what is in it"
_ZIP_STARTS = b"PK\3\4", b"PK\5\6"
_MAGIC: dict[bytes, tuple[str, str]] = {
    codecs.BOM_UTF16_LE: ("csv", ""),
    codecs.BOM_UTF16_BE: ("csv", ""),
    b"\x93NUMPY": ("npy", ""),
    b"\x89HDF": ("hdf5", ""),
    b"PAR1": ("parquet", ""),
    b"ARROW1": ("arrow", ""),
    b"\xff\xff\xff\xff": ("a stream of Arrow", ""),
    b"version https://git-lfs": ("a pointer of Git LFS", "run git lfs pull"),
    **dict.fromkeys(
        (b"<!DOCTYPE", b"<!doctype", b"<html", b"<?xml"),
        ("a page of HTML or XML", "download the file itself"),
    ),
    b"MATLAB 5": ("mat", ""),
    b"MATLAB": ("a MATLAB file of version 7.3", "save it with -v7, or its arrays as .npy"),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF": ("a PDF", "export its table as CSV"),
    b"\xd0\xcf\x11\xe0": ("an Excel sheet", "save it as CSV"),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd"), ("compressed", _UNPACK)),
    **dict.fromkeys(_ZIP_STARTS, ("a zip archive", _UNPACK)),
    **dict.fromkeys((b"Rar!", b"7z\xbc\xaf"), ("an archive", _UNPACK)),
    **dict.fromkeys([bytes((0x80, version)) for version in range(2, 6)], ("a pickle", _PICKLE)),
    **dict.fromkeys(
        (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF"),
        ("an image", "images are read by folder:DIR, or listed in a table of their paths"),
    ),
}
"""First bytes of files -> their form; forms that are not read have a remedy."""
_UNREAD = {
    ".yaml",
    ".yml",
    ".xml",
    ".pkl",
    ".pickle",
    ".xls",
    ".orc",
    ".fbin",
}
"""Endings of forms that are not read."""
_ZIPS = {
    ".npz": ("npz", ""),
    ".xlsx": ("an Excel sheet", "save it as CSV"),
    ".pt": ("a PyTorch file", _PICKLE),
    ".pth": ("a PyTorch file", _PICKLE),
}
"""Zip archives by the endings of their files -> form and remedy."""


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key for sorting by the numbers in names: 2 before 10."""
    return [
        (int(word), "") if word.isdecimal() else (-1, word) for word in re.split(r"(\d+)", name)
    ]


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a path or a pattern (``*``, ``?``, ``[0-9]``) in numeric order.

    Raises DataError: no file matches the pattern.
    """
    text = os.path.expanduser(path)
    is_pattern = glob.has_magic(text) and not os.path.exists(text)
    names = sorted(glob.glob(text), key=natural_order) if is_pattern else [text]
    if not names:
        raise DataError(f"{text}: no file matches this pattern")
    return list(map(Path, names))


def file_form(path: Path, description: str) -> tuple[str, str]:
    """Return the form of a file by its content, else by its ending, ``text`` for other texts; and,
    if no data is read from such files, a remedy.

    Raises DataError: as :func:`check_file`.
    """
    with reading(path, description), path.open("rb") as file:
        head = file.read(512)
    ending = path.suffix.lower()
    if not head:
        return "empty", "make or copy it again"
    if ENDINGS.get(ending) == "vecs":  # begins with the width, which may look like any other form
        return "vecs", ""
    if head[6:10] == b'\0\0{"':  # after the length of the header, 8 bytes
        return "a safetensors file", "save its arrays as .npy or .npz"
    if head[:1] == b"I" and head[:4].isalnum() and b"\0" in head:
        return "a Faiss index", "save the vectors that it was built from as .npy"
    is_text = not re.search(rb"[\0-\x08\x0e-\x1f]", head)
    for start, form_and_remedy in _MAGIC.items():
        # Words such as RIFF may begin a text.
        if head.startswith(start) and not (is_text and start.isalnum()):
            return _ZIPS.get(ending, form_and_remedy) if start in _ZIP_STARTS else form_and_remedy
    if ending not in ENDINGS and (b"\0" in head or ending in _UNREAD):
        return f"a {ending or 'binary'} file", f"save it as one of {', '.join(ENDINGS)}"
    return ENDINGS.get(ending, "text"), ""

"""Reading of files, with one clear message for those that are missing or of another form."""

from __future__ import annotations

import codecs
import contextlib
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

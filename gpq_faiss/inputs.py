"""Safe reading of untrusted files: regular files only, within the available memory."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import re
import resource
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from .errors import DataError, GpqError, UsageError, one_line

_SMALL = 16 << 20  # sizes up to this are not checked
_CONTAINER = "/sys/fs/cgroup/memory"


def check_file(path: Path, description: str) -> int:
    """Return the size in bytes of a file that is to be read.

    Args:
        description: the expected content, for messages ("a Parquet file").

    Raises:
        DataError: the file is missing, a folder, a device or a pipe, or may not be read.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise DataError(f"{path} not found: {description} is expected") from None
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise DataError(
            f"cannot read {path}: {getattr(error, 'strerror', None) or error}"
        ) from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"{path} is a folder: {description} is needed")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(
            f"{path} is a device or a pipe, which may never end: save {description} as a file"
        )
    return status.st_size


@contextlib.contextmanager
def reading(path: Path, description: str) -> Iterator[int]:
    """Yield the size of a file that the ``with`` block parses, and name the file in the block's
    errors.

    Parsers raise nearly every exception on malformed bytes; all become DataErrors.

    Args:
        description: the expected content, for messages ("a Parquet file").

    Raises:
        DataError: as :func:`check_file`; or the block failed, so the file is not of this kind.
    """
    size = check_file(path, description)
    try:
        yield size
    except GpqError as error:
        if str(path) in str(error):
            raise
        raise type(error)(f"{path}: {error}") from error
    except MemoryError:
        raise DataError(
            f"{path} does not fit in memory: make it smaller, or write it in smaller parts"
        ) from None
    except PermissionError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:
        reason = one_line(error, 100)
        raise DataError(
            f"{path} is not {description}, or it is empty, truncated or damaged ({reason}): "
            "make or copy it again"
        ) from None


def read_text(path: Path, description: str) -> str:
    """Read a text in UTF-8, or in UTF-16 with a byte-order mark, and remove the mark.

    Raises:
        DataError: as :func:`check_file`; or the file is not such a text.
    """
    check_memory(4 * check_file(path, description), str(path))
    with reading(path, f"{description} saved as UTF-8"):
        data = path.read_bytes()
        wide = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return (
            data.decode("utf-16" if wide else "utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
        )


def parse_json(text: str | bytes) -> Any:
    """Parse JSON from untrusted text.

    Raises:
        ValueError: not JSON, nested too deeply, or an integer of more than 64 bits.
    """
    try:
        return json.loads(text, parse_int=_whole_number)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _whole_number(digits: str) -> int:
    if len(digits) > 20 or not -(2**63) <= int(digits) < 2**64:
        raise ValueError("a whole number of more than 64 bits")
    return int(digits)


def read_toml(path: Path, description: str) -> dict[str, Any]:
    """Read a TOML file.

    Raises:
        DataError: as :func:`read_text`; or the file is not TOML.
    """
    text = read_text(path, f"TOML of {description}")
    try:
        table = tomllib.loads(text)
        parse_json(json.dumps(table, default=str))  # the size of its numbers
        return table
    except RecursionError:
        reason = "brackets are nested too deeply"
    except ValueError as error:
        long = "set_int_max_str_digits" in str(error)  # Python's advice is for programmers
        reason = "a whole number of more than 64 bits" if long else one_line(error)
    raise DataError(f"{path} is not TOML: {reason}")


def available_memory() -> int | None:
    """Return the bytes that this process may still allocate; None if unknown.

    The limit is the free memory, or that of a container or ``ulimit``.
    """
    limits = []
    with contextlib.suppress(OSError, ValueError, KeyError):
        limits.append(_figures("/proc/meminfo")["MemAvailable:"] << 10)
    with contextlib.suppress(OSError, ValueError, KeyError):  # ValueError: "max"
        limit, used = (int(Path(f"{_CONTAINER}.{name}").read_text()) for name in ("max", "current"))
        # Pages of files do not count as used: they are given back when memory is needed.
        limits.append(limit - used + _figures(f"{_CONTAINER}.stat")["file"])
    with contextlib.suppress(OSError, ValueError):
        address_space = resource.getrlimit(resource.RLIMIT_AS)[0]
        if address_space != resource.RLIM_INFINITY:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
            limits.append(address_space - pages * os.sysconf("SC_PAGE_SIZE"))
    return max(0, min(limits)) if limits else None


def _figures(path: str) -> dict[str, int]:
    """Read a file with a name and a number on each line."""
    lines = (line.split() for line in Path(path).read_text(encoding="ascii").splitlines())
    return {line[0]: int(line[1]) for line in lines if len(line) > 1}


def check_memory(
    needed: int,
    subject: str,
    memory: int | None = None,
    remedy: str = "use a machine with more memory, or make the file smaller",
) -> None:
    """Check that a piece of work fits into memory.

    Args:
        needed: bytes that it needs.
        subject: its name in the message.
        memory: budget in bytes (default: :func:`available_memory`).
        remedy: advice in the message.

    Raises:
        DataError: the budget is too small.
    """
    if memory is None and needed < _SMALL:
        return
    budget = available_memory() if memory is None else memory
    if budget is not None and needed > budget:
        state = "free" if memory is None else "allowed"
        raise DataError(
            f"{subject}: {_size(needed)} of memory are needed, {_size(budget)} are {state}: "
            f"{remedy}"
        )


def _size(number: int) -> str:
    unit, name = next(((u, n) for u, n in ((1e9, "GB"), (1e6, "MB")) if number >= u), (1e3, "kB"))
    return f"{number / unit:,.1f} {name}"


_BYTES = re.compile(r"\s*(\d*\.?\d+(?:e\+?\d+)?)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)


def parse_bytes(text: str | float | np.integer[Any], name: str = "memory") -> int:
    """Return the number of bytes of ``"2GB"``, ``"512 MiB"`` or a number.

    Raises:
        UsageError: another form, or less than a byte; the message calls the value ``name``.

    Examples:
        >>> parse_bytes("2GB"), parse_bytes("1.5 KiB")
        (2000000000, 1536)
    """
    match = _BYTES.fullmatch(str(text))
    if match is not None:
        power = " kmgt".index((match[2] or " ").lower())
        size = float(match[1]) * float(1024 if match[3] else 1000) ** power
        if 1 <= size < float("inf"):
            return int(size)
    raise UsageError(f"{name} {text!r}: write a number of bytes with a unit, such as 2GB or 512MiB")

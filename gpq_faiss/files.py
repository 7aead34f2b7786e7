"""Writing files so that nobody ever sees half of one: temporary name, fsync, ``os.replace``."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import DataError, OutputExistsError, UsageError

_WRITE_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space, or write elsewhere",
    errno.EDQUOT: "the disk quota is used up: free some space, or write elsewhere",
    errno.EACCES: "no permission to write there: choose another folder",
    errno.EPERM: "no permission to write there: choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",  # what making that folder meets
    errno.EISDIR: "that is a folder: name a file",
    errno.ENAMETOOLONG: "the name is too long",
}


def write_error(path: Path, error: OSError) -> DataError:
    """Turn an operating-system error of a write to ``path`` into one line with a remedy."""
    if error.errno is not None:
        why = _WRITE_ERRORS.get(error.errno, os.strerror(error.errno))
    else:
        # HDF5 raises OSError without an errno and hides the cause in its text.
        text = str(error)
        full = "No space left" in text or "errno = 28" in text
        why = _WRITE_ERRORS[errno.ENOSPC] if full else text.splitlines()[0] if text else type(error).__name__
    return DataError(f"cannot write {path}: {why}")


def check_output(path: str | Path, *, overwrite: bool, folder: bool = False) -> Path:
    """Refuse an output that exists (unless ``overwrite``) or whose folder cannot be written; make the folder.

    Stages call this before any work, so that an hour of encoding is not lost to a typo.

    Args:
        path: what is to be written.
        overwrite: whether it may be there already.
        folder: it is a folder, not a file; what is there must be of the same kind to be replaced.

    Raises:
        UsageError: ``path`` is no name (``.``, ``/``).
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be made or written, or ``path`` is of the other kind.
    """
    path = Path(path)
    if path.name in {"", ".."}:
        raise UsageError(f"'{path}' cannot be written: give a name for the {'folder' if folder else 'file'}")
    try:
        if path.exists():
            if not overwrite and (path.is_dir() or path.is_file()):
                raise OutputExistsError(
                    f"{path} exists already: pass --overwrite to replace it, or another --out"
                )
            if not path.is_dir() and not path.is_file():
                raise DataError(f"cannot write {path}: that is a device or a pipe: name a file")
            if path.is_dir() != folder:
                raise write_error(path, OSError(errno.ENOTDIR if folder else errno.EISDIR, ""))
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.parent / f".{path.name}.probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise write_error(path, error) from error
    return path


def _fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; on success it replaces ``path``, on any failure it is removed.

    Raises:
        DataError: the file system refuses (full, read-only, no permission); ``path`` is then as it was.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        yield temporary
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: str | Path, *, overwrite: bool = False) -> Iterator[Path]:
    """As :func:`atomic_path`, for a folder. With ``overwrite`` an existing folder is swapped out, then removed."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for file in temporary.iterdir():
            if file.is_file():
                _fsync(file)
        if overwrite and path.exists():
            os.replace(path, old)
        os.replace(temporary, path)
        _fsync(path.parent)
    except OSError as error:
        if old.exists() and not path.exists():
            os.replace(old, path)
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Replace ``path`` by ``data``, wholly or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_text(path: str | Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8), wholly or not at all."""
    write_bytes(path, text.encode())


def write_json(path: str | Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON, wholly or not at all. NaN is refused: JSON has none."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path, what: str) -> Any:
    """Read JSON; ``what`` names the thing in the error.

    Raises:
        DataError: missing, unreadable or not JSON.
    """
    path = Path(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path} not found: it should hold {what}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        # No text, no JSON, a number of thousands of digits, endless brackets.
        raise DataError(f"{path} is not the JSON of {what} ({error}): it is damaged or foreign") from None


def fingerprint(*parts: bytes | str) -> str:
    """A short name (16 hex digits of SHA-256) for content; parts are length-prefixed, so they cannot run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]

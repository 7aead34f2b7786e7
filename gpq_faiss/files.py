"""Atomic writing: an output is the old one or the new one, never half of it.

An output is made under a temporary name beside its place (``.tmp-RANDOM.NAME``), synced to disk,
and renamed. The next command that writes it removes what a killed process left. Two commands that
write one output do not wait for each other: the last one wins, and the other may fail. Only work
that can be resumed is locked (:func:`unfinished`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import hashlib
import importlib
import json
import os
import platform
import secrets
import shutil
import sqlite3
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import platformdirs
from filelock import FileLock, Timeout

from .errors import DataError, OutputExistsError, UsageError, one_line
from .inputs import reading

_WRITE_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space, or write elsewhere",
    errno.EDQUOT: "the disk quota is used up: free some space, or write elsewhere",
    errno.EACCES: "no permission to write there: choose another folder",
    errno.EPERM: "no permission to write there: choose another folder",
    errno.EROFS: "the file system is read-only: choose another folder",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EEXIST: "a part of the path is a file, not a folder",  # raised by mkdir
}


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the system or of SQLite in the ``with`` block into a DataError that says why
    ``path`` is not written.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        number = errno.ENOSPC if is_full else getattr(error, "errno", None)
        text = one_line(error) if number is None else os.strerror(number)
        raise DataError(f"cannot write {path}: {_WRITE_ERRORS.get(number or 0, text)}") from error


def qrels_path(run: str | Path) -> Path:
    """Return the path of the relevant items beside a TREC run. Raises UsageError: it is that of the
    run itself."""
    qrels = Path(run).with_suffix(".qrels")
    if qrels == Path(run):
        raise UsageError(
            f"{run}: the relevant items are written to {qrels}: name the run otherwise"
        )
    return qrels


def check_output(path: str | Path, *, overwrite: bool, folder: bool = False) -> Path:
    """Check before any work that an output can be written, and create its parent folder.

    Args:
        overwrite: whether it may exist.
        folder: whether the output is a folder; an existing one must be of the same kind.

    Raises:
        UsageError: ``path`` has no name (``.``, ``/``).
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the parent folder cannot be written, or ``path`` is of the other kind.
    """
    path = Path(path)
    kind = "folder" if folder else "file"
    if path.name in {"", ".."}:
        raise UsageError(f"'{path}' cannot be written: give a name for the {kind}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path.is_dir() if folder else path.is_file()):
            raise DataError(f"cannot write {path}: it exists and is not a {kind}: choose another")
        if path.exists() and not overwrite:
            raise OutputExistsError(
                f"{path} exists already: pass --overwrite to replace it, or another --out"
            )
        if not os.access(path.parent, os.W_OK):
            raise OSError(errno.EACCES, "")
    return path


@contextlib.contextmanager
def atomic_path(path: str | Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` if the block succeeds, else is removed.

    Temporary paths that killed processes have left are removed first.

    Args:
        path: a file, or a folder; its parent folder is created if missing.
        folder: whether to make a folder; the temporary file or folder exists when the block begins.

    Raises:
        DataError: writing fails (disk full, read-only, no permission); ``path`` is unchanged.
    """
    path = Path(path)
    temporary = path.with_name(f".tmp-{secrets.token_hex(6)}.{path.name}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".tmp-{'?' * 12}.{glob.escape(path.name)}"):
            _remove(leftover)
        try:
            if folder:
                temporary.mkdir()
            else:
                temporary.touch()
            yield temporary
            for file in [*temporary.rglob("*"), temporary]:
                fsync(file)
            _replace(temporary, path)
            fsync(path.parent)
        finally:
            _remove(temporary)


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _replace(source: Path, target: Path) -> None:
    """Rename ``source`` to ``target``, which may be a folder with files.

    Linux exchanges two folders in one step.
    """
    if source.is_dir() and target.is_dir():
        renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
        current_folder, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        paths = current_folder, os.fsencode(source), current_folder, os.fsencode(target)
        if renameat2 is not None and renameat2(*paths, exchange) == 0:
            return
        shutil.rmtree(target)
    os.replace(source, target)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def unfinished(folder: Path, out: Path, *, keep: Collection[str]) -> Iterator[None]:
    """Lock the folder of unfinished work on ``out`` for a block.

    The folder is created if missing, and removed at the end unless one of the files ``keep`` is in
    it.

    Raises:
        DataError: another process holds the lock, or the folder cannot be created.
    """
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise DataError(f"{out} is being written by another process: wait for it") from None
    try:
        yield
    finally:
        if not any((folder / name).exists() for name in keep):
            shutil.rmtree(folder, ignore_errors=True)
        lock.release()


# Small files --------------------------------------------------------------------------------------


class Closing:
    """An object that is closed at the end of a ``with`` block."""

    def close(self) -> None:
        """Release files and processes, if there are any."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_text(path: str | Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: str | Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON atomically; NaN is an error."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path, contents: str) -> Any:
    """Read JSON; ``contents`` names the expected content in errors.

    Raises:
        DataError: the file is missing, unreadable or not JSON.
    """
    path = Path(path)
    with reading(path, f"the JSON of {contents}"):
        return json.loads(path.read_bytes())


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of this package and of ``packages``, one of which may be ``python``."""
    python = {"python": platform.python_version()}
    names = "gpq_faiss", *packages
    return {name: python.get(name) or importlib.import_module(name).__version__ for name in names}


def fingerprint(*contents: bytes | str) -> str:
    """Return a short name for content: 16 hex digits of SHA-256.

    The length precedes each of the ``contents``, so that they cannot run together.
    """
    digest = hashlib.sha256()
    for content in contents:
        data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]


def content_of(files: Iterable[str | os.PathLike[str]], limit: int = 64 << 20) -> str:
    """Return a hash over sizes and contents of files: all bytes up to ``limit``, else four evenly
    spaced blocks of a quarter of it. Files that cannot be read are left out.
    """
    digest = hashlib.sha256()
    for path in files:
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(b"%d " % size)
            for i in range(4 if size > limit else 1):
                file.seek(i * (size - limit // 4) // 3)
                digest.update(file.read(limit // 4 if size > limit else limit))
    return digest.hexdigest()


def cache_folder() -> Path:
    """Return the folder for downloads and copies."""
    folder = os.environ.get("GPQ_CACHE") or platformdirs.user_cache_dir("gpq-faiss")
    return Path(folder).expanduser()

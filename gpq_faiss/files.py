"""Atomic writing of files, with recovery after crashes.

An output is created in a *workspace*, a private folder ``.NAME.tmp-RANDOM`` beside it, and renamed when complete. Its owner holds a lock:
a workspace with a free lock was left by a killed process, and the next start of the same output removes it. If one rename is not enough
(a file and its sidecar, a folder replacing another, an output and its unfinished work), a journal in the workspace lists the steps, and
the next start completes them.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import glob
import hashlib
import importlib
import json
import logging
import os
import platform
import secrets
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, Self

from .errors import BusyError, DataError, OutputExistsError, UsageError, one_line
from .inputs import parse_json, read_text

log = logging.getLogger(__name__)

_WRITE_ERRORS = {
    (errno.ENOSPC, errno.EDQUOT): "the disk is full: free some space, or write elsewhere",
    (errno.EACCES, errno.EPERM, errno.EROFS): "no permission to write there: choose another folder",
    # EEXIST is what making a folder there meets.
    (errno.ENOTDIR, errno.EEXIST): "a part of the path is a file, not a folder",
    (errno.ELOOP,): "a symbolic link is in the way: remove it",
}

LOCK = "lock"
"""The file by whose lock a folder of unfinished work is its owner's."""
_OWNER, _JOURNAL, _OLD, _GONE = ".owner", ".journal", ".old", ".gone"  # in a workspace, beside the output


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context that turns errors of the operating system into a DataError: ``path`` cannot be written, and why."""
    try:
        yield
    except OSError as error:
        other = one_line(error) if error.errno is None else os.strerror(error.errno)
        why = next((why for numbers, why in _WRITE_ERRORS.items() if error.errno in numbers), other)
        raise DataError(f"cannot write {path}: {why}") from error


def check_output(path: str | Path, *, overwrite: bool, folder: bool = False) -> Path:
    """Check before any work that an output can be written, recover it (:func:`recover`), and create its folder.

    Args:
        overwrite: whether it may exist.
        folder: whether it is a folder; an existing output must be of the same kind.

    Raises:
        UsageError: ``path`` has no name (``.``, ``/``).
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be created or written, or ``path`` is of the other kind.
    """
    path = Path(path)
    if path.name in {"", ".."}:
        raise UsageError(f"'{path}' cannot be written: give a name for the {'folder' if folder else 'file'}")
    with writing(path):
        recover(path)
        if path.exists():
            if not path.is_dir() and not path.is_file():
                raise DataError(f"cannot write {path}: that is a device or a pipe: name a file")
            if not overwrite:
                raise OutputExistsError(
                    f"{path} exists already: pass --overwrite to replace it, or another --out"
                )
            if path.is_dir() != folder:
                raise OSError(errno.ENOTDIR if folder else errno.EISDIR, "")
        with _workspace(path):
            pass
    return path


# Locks, and the folder of unfinished work -----------------------------------------------------------------------------------


def _open(path: str | Path, flags: int) -> int:
    """A descriptor of one of our own files, not through a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def lock(file: Path) -> int | None:
    """Lock ``file``, creating it and its folder if missing. Raises OSError: it cannot be created, or is a symbolic link.

    Returns:
        A descriptor that holds the lock until it is closed or the process ends. None: locked by another process.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Its last owner may remove it, and its folder, between any two of these lines.
        with contextlib.suppress(FileNotFoundError):
            return _take(file)


def _take(file: Path) -> int | None:
    """As :func:`lock`; raises FileNotFoundError where the folder is not, or the file is no longer, there."""
    descriptor = _open(file, os.O_RDWR | os.O_CREAT)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(descriptor).st_ino != file.lstat().st_ino:
            raise FileNotFoundError(file)
        stack.pop_all()
    return descriptor


@contextlib.contextmanager
def unfinished(folder: Path, out: Path, *, keep: Collection[str]) -> Iterator[None]:
    """Context with the locked folder of unfinished work on ``out``, removed on exit unless it has one of the files ``keep``.

    Raises:
        BusyError: locked by another process.
        DataError: it is a symbolic link or cannot be created.
    """
    with writing(folder):
        if folder.is_symlink():
            raise OSError(errno.ELOOP, "")
        descriptor = lock(folder / LOCK)
    if descriptor is None:
        raise BusyError(f"{out} is being written by another process: wait for it")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if any((folder / name).exists() for name in keep):
                (folder / LOCK).unlink()
            elif folder.exists():
                with _workspace(out) as workspace:
                    os.replace(folder, workspace / _GONE)
        os.close(descriptor)


def open_own(path: Path, *, keep: int) -> IO[bytes]:
    """Open a file of unfinished work without a buffer, not through a symbolic link, to go on after its first ``keep`` bytes."""
    file: IO[bytes] = os.fdopen(_open(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    file.truncate(keep)
    file.seek(keep)
    return file


def write_at(file: IO[bytes], offset: int, data: Any) -> None:
    """Write all of ``data``, with several calls if needed."""
    view = memoryview(data).cast("B")
    file.seek(offset)
    while view.nbytes:
        view = view[file.write(view) :]


# Workspaces -----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _workspace(path: Path) -> Iterator[Path]:
    """A new workspace beside ``path``, removed at the end; after an error it stays if its journal has steps to complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = None
    while descriptor is None:
        workspace = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
        # Nothing is made of a name that is taken, by a link too. A sweep may come before the lock, and remove the folder.
        with contextlib.suppress(FileExistsError):
            workspace.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):
                descriptor = _take(workspace / _OWNER)
    try:
        yield workspace
        (workspace / _JOURNAL).unlink(missing_ok=True)
    finally:
        if not (workspace / _JOURNAL).exists():
            shutil.rmtree(workspace, ignore_errors=True)
        os.close(descriptor)


def recover(path: str | Path) -> None:
    """Recover the output ``path`` after killed processes: complete decided writes, remove other leftovers.

    Workspaces of running processes and of other users are not touched. To be called before checking whether an output exists.
    """
    path = Path(path)
    names = glob.glob(f".{glob.escape(path.name)}.tmp-" + 12 * "[0-9a-f]", root_dir=path.parent)
    for workspace in map(path.with_name, names):
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            status = workspace.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            descriptor = _take(workspace / _OWNER) if ours else None
            if descriptor is None:
                continue
            stack.callback(os.close, descriptor)
            if (workspace / _JOURNAL).exists():
                with _publishing(path.parent):
                    _follow(workspace, json.loads((workspace / _JOURNAL).read_text()), ours=False)
            shutil.rmtree(workspace, ignore_errors=True)


@contextlib.contextmanager
def _publishing(folder: Path) -> Iterator[None]:
    """Context, for renames only, in which no other process or thread puts an output into ``folder``, by a lock on the folder itself."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            why = error.strerror
            log.info("%s cannot be locked (%s): let one process at a time write there", folder, why)
        yield
    finally:
        os.close(descriptor)


def _follow(workspace: Path, journal: dict[str, Any], *, ours: bool) -> None:
    """Complete the steps of the journal; ``ours``: this process holds the lock of the unfinished work to remove, else it must be free."""
    parent, outputs = workspace.parent, journal["outputs"]

    def waits(name: str) -> bool:
        # By its number: where two folders were exchanged, the old one lies under the name of the new.
        return (workspace / name).exists() and (workspace / name).stat().st_ino == outputs[name]

    first, *others = outputs
    if waits(first):
        # A file without its sidecar is a valid state; one with the sidecar of another is not.
        for name in others:
            (parent / name).unlink(missing_ok=True)
    for name in filter(waits, outputs):
        _put(workspace / name, parent / name)
    fsync(parent)
    done_with = journal["done_with"]
    if done_with and (parent / done_with).exists():
        held = None if ours else _take(parent / done_with / LOCK)
        if ours or held is not None:
            os.replace(parent / done_with, workspace / _GONE)
        if held is not None:
            os.close(held)


def _put(new: Path, target: Path) -> None:
    """Rename, also over a non-empty folder: the two are exchanged at once where the system can, so that there is one at any time."""
    if new.is_dir() and target.is_dir():
        renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux
        here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
        if renameat2 and renameat2(here, os.fsencode(new), here, os.fsencode(target), exchange) == 0:
            return
        # A kill between the two leaves a gap, which recover() closes.
        os.replace(target, new.with_name(_OLD))
    os.replace(new, target)


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# Outputs --------------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def atomic_paths(
    *paths: str | Path,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths of the same names; on success they replace ``paths``, on any failure they are removed.

    Args:
        paths: files, or one folder, in the same folder, which is created if missing. The first is the main one; the others belong to
            it, and never appear beside another version of it. One of the others that is not written is removed.
        done_with: a folder of unfinished work, locked by the caller, to remove afterwards.
        before: called with the temporary paths directly before they replace ``paths``, while no other output is put into the folder;
            if it raises, nothing is replaced.

    Raises:
        DataError: writing fails (disk full, read-only, no permission); ``paths`` are then unchanged.
    """
    out = Path(paths[0])
    recover(out)
    with writing(out), _workspace(out) as workspace:
        made = tuple(workspace / Path(path).name for path in paths)
        yield made
        written = [path for path in made if path is made[0] or path.exists()]
        for path in written:
            for file in [path, *path.rglob("*")]:
                fsync(file)
        journal = {
            "outputs": {path.name: path.stat().st_ino if path in written else None for path in made},
            "done_with": None if done_with is None else done_with.name,
        }
        with _publishing(out.parent):
            if before is not None:
                before(made)
            if len(made) > 1 or made[0].is_dir() or done_with is not None:
                draft = workspace / f"{_JOURNAL}.new"
                draft.write_text(json.dumps(journal))
                fsync(draft)
                os.replace(draft, workspace / _JOURNAL)
                fsync(workspace)
            _follow(workspace, journal, ours=True)


@contextlib.contextmanager
def atomic_path(path: str | Path, **options: Any) -> Iterator[Path]:
    """As :func:`atomic_paths`, for one file or folder."""
    with atomic_paths(path, **options) as (temporary,):
        yield temporary


class Closing:
    """Closed at the end of a ``with`` block."""

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


def read_json(path: str | Path, what: str) -> Any:
    """Read JSON; ``what`` is the expected content, for errors. Raises DataError: missing, unreadable or not JSON."""
    text = read_text(Path(path), what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not the JSON of {what} ({error}): it is damaged or foreign") from None


def versions(*packages: str) -> dict[str, str]:
    """Versions of this package and of these, one of which may be ``python``, for what a file says of its making."""
    python = {"python": platform.python_version()}
    names = "gpq_faiss", *packages
    return {name: python.get(name) or importlib.import_module(name).__version__ for name in names}


def fingerprint(*parts: bytes | str) -> str:
    """A short name (16 hex digits of SHA-256) for content; parts are length-prefixed, so they cannot run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]

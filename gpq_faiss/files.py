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
import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any

from .errors import BusyError, DataError, OutputExistsError, UsageError, one_line
from .inputs import parse_json, read_text

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows has no flock: nothing is refused there, and nothing swept
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_ELSEWHERE = "no permission to write there: choose another folder"
_NO_FOLDER = "a part of the path is a file, not a folder"
_WRITE_ERRORS = {
    errno.ENOSPC: "the disk is full: free some space, or write elsewhere",
    errno.EDQUOT: "the disk is full: free some space, or write elsewhere",
    errno.EACCES: _ELSEWHERE,
    errno.EPERM: _ELSEWHERE,
    errno.EROFS: _ELSEWHERE,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,  # what making that folder meets
    errno.ELOOP: "a symbolic link is in the way: remove it",
}

LOCK = "lock"
"""The file by whose lock a folder of unfinished work is its owner's."""
_OWNER, _JOURNAL, _OLD, _GONE = ".owner", ".journal", ".old", ".gone"  # in a workspace, beside the output
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


def write_error(path: Path, error: OSError) -> DataError:
    """One-line error with a remedy for an operating-system error on writing ``path``."""
    number, text = error.errno, one_line(error)
    if number is None and ("No space left" in text or "errno = 28" in text):  # HDF5 hides it in its text
        number = errno.ENOSPC
    why = text if number is None else _WRITE_ERRORS.get(number, os.strerror(number))
    return DataError(f"cannot write {path}: {why}")


def check_output(path: str | Path, *, overwrite: bool, folder: bool = False) -> Path:
    """Check that an output can be written, and create its folder.

    Stages call this before any work. Leftovers of killed processes are recovered first (:func:`recover`).

    Args:
        path: the output.
        overwrite: whether it may exist.
        folder: whether it is a folder; an existing output must be of the same kind.

    Raises:
        UsageError: ``path`` is not a name (``.``, ``/``).
        OutputExistsError: ``path`` exists and ``overwrite`` is false.
        DataError: the folder cannot be created or written, or ``path`` is of the other kind.
    """
    path = Path(path)
    if path.name in {"", ".."}:
        raise UsageError(f"'{path}' cannot be written: give a name for the {'folder' if folder else 'file'}")
    try:
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
        path.parent.mkdir(parents=True, exist_ok=True)
        _close_workspace(*_open_workspace(path))
    except OSError as error:
        raise write_error(path, error) from error
    return path


def lock(file: Path) -> int | None:
    """Lock ``file``, creating it and its folder if missing.

    Returns:
        A descriptor that holds the lock until it is closed or the process ends. None: locked by another process.

    Raises:
        OSError: it cannot be created, or is a symbolic link.
    """
    while True:
        file.parent.mkdir(parents=True, exist_ok=True)
        # Its last owner may remove it, and its folder, between any two of these lines.
        with contextlib.suppress(FileNotFoundError):
            return _take(file)


def _take(file: Path) -> int | None:
    """As :func:`lock`; raises FileNotFoundError where the folder is not, or the file is no longer, there."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o666)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if os.fstat(descriptor).st_ino != os.stat(file, follow_symlinks=False).st_ino:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(file))
        stack.pop_all()
    return descriptor


@contextlib.contextmanager
def unfinished(folder: Path, out: Path, *, keep: Collection[str]) -> Iterator[None]:
    """Context with the locked folder of unfinished work on ``out``.

    Args:
        folder: the folder.
        out: the output.
        keep: on exit (also by an error) the folder is removed unless it has one of these files.

    Raises:
        BusyError: locked by another process.
        DataError: it is a symbolic link or cannot be created.
    """
    try:
        if folder.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        descriptor = lock(folder / LOCK)
    except OSError as error:
        raise write_error(folder, error) from error
    if descriptor is None:
        raise BusyError(f"{out} is being written by another process: wait for it")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if any((folder / name).exists() for name in keep):
                (folder / LOCK).unlink()
            elif folder.exists():
                discard(folder, out)
        os.close(descriptor)


def discard(folder: Path, out: Path) -> None:
    """Remove a folder of unfinished work on ``out`` atomically.

    Raises:
        OSError: it cannot be removed.
    """
    workspace, descriptor = _open_workspace(out)
    try:
        os.replace(folder, workspace / _GONE)
    finally:
        _close_workspace(workspace, descriptor)


def open_own(path: Path, mode: str, *, buffering: int = -1) -> IO[bytes]:
    """``open`` for our own binary files; symbolic links are errors."""
    opened: IO[bytes] = open(  # noqa: SIM115
        path, mode, buffering=buffering, opener=lambda name, flags: os.open(name, flags | _NO_LINK, 0o666)
    )
    return opened


def _open_workspace(path: Path) -> tuple[Path, int]:
    """A new workspace beside ``path``, and the descriptor of its lock."""
    while True:
        workspace = path.with_name(f".{path.name}.tmp-{secrets.token_hex(6)}")
        # Of a name that is taken, by a link too, nothing is made. A sweep may come before the lock is ours, and take the folder for
        # a left one.
        with contextlib.suppress(FileExistsError):
            workspace.mkdir(mode=0o700)
            with contextlib.suppress(FileNotFoundError):
                descriptor = _take(workspace / _OWNER)
                if descriptor is not None:
                    return workspace, descriptor


def _close_workspace(workspace: Path, descriptor: int) -> None:
    shutil.rmtree(workspace, ignore_errors=True)
    os.close(descriptor)


def recover(path: str | Path) -> None:
    """Recover the output ``path`` after killed processes: complete decided writes, remove other leftovers.

    Workspaces of running processes and of other users are not touched. To be called before checking whether an output exists.
    """
    path = Path(path)
    if fcntl is None:
        return
    pattern = re.compile(re.escape(f".{path.name}.tmp-") + "[0-9a-f]{12}")
    found: list[Path] = []
    # There may be no such folder, or it may not be read: then nothing is to be found in it.
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        ours = (entry for entry in entries if pattern.fullmatch(entry.name))
        folders = (entry for entry in ours if entry.is_dir(follow_symlinks=False))
        found = [
            path.with_name(e.name) for e in folders if e.stat(follow_symlinks=False).st_uid == os.geteuid()
        ]
    for workspace in found:
        with contextlib.suppress(OSError, ValueError), contextlib.ExitStack() as stack:
            descriptor = _take(workspace / _OWNER)
            if descriptor is None:
                continue
            stack.callback(os.close, descriptor)
            if (workspace / _JOURNAL).exists():
                with publishing(path.parent):
                    _follow(workspace, json.loads((workspace / _JOURNAL).read_text()), ours=False)
            shutil.rmtree(workspace, ignore_errors=True)


def _follow(workspace: Path, journal: dict[str, Any], *, ours: bool) -> None:
    """Complete the steps of the journal.

    Args:
        ours: this process holds the lock of the unfinished work to remove; else it is removed only if unlocked.
    """
    parent = workspace.parent
    # By its number: where two folders were exchanged, the old one lies under the name of the new.
    waiting = [
        name
        for name, number in journal["outputs"].items()
        if (workspace / name).exists() and (workspace / name).stat().st_ino == number
    ]
    first, *others = journal["outputs"]
    if first in waiting:
        # A file without its sidecar is a valid state; one with the sidecar of another is not.
        for name in others:
            (parent / name).unlink(missing_ok=True)
    for name in waiting:
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
    """Rename, also over a non-empty folder, which is moved to the workspace."""
    if not (new.is_dir() and target.is_dir()):
        os.replace(new, target)
    elif not _exchange(new, target):
        # A kill between the two leaves a gap, which recover() closes.
        old = new.with_name(_OLD)
        os.replace(target, old)
        try:
            os.replace(new, target)
        except OSError:
            os.replace(old, target)
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names at once, so that there is a folder at any time; False if the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2  # Linux
    except (OSError, AttributeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if renameat2(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def publishing(folder: Path) -> Iterator[None]:
    """Context in which no other process or thread puts a finished output into ``folder``. It waits for those that do.

    The lock is on the folder itself, so a killed process leaves nothing. It is held for renames only.
    """
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            log.info(
                "%s cannot be locked (%s): let one process at a time write there", folder, error.strerror
            )
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_paths(
    *paths: str | Path,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Iterator[tuple[Path, ...]]:
    """Yield temporary paths of the same names; on success they replace ``paths``, on any failure they are removed.

    Args:
        paths: files, or one folder, in the same folder. The first is the main one; the others belong to it, and never appear
            beside another version of it. One of the others that is not written is removed.
        done_with: a folder of unfinished work, locked by the caller, to remove afterwards.
        before: called with the temporary paths directly before they replace ``paths``, while no other output is put into the folder;
            if it raises, nothing is replaced.

    Raises:
        DataError: writing fails (disk full, read-only, no permission); ``paths`` are then unchanged.
    """
    out = Path(paths[0])
    recover(out)
    try:
        workspace, descriptor = _open_workspace(out)
    except OSError as error:
        raise write_error(out, error) from error
    decided = False
    try:
        made = tuple(workspace / Path(path).name for path in paths)
        yield made
        written = [path for path in made if path is made[0] or path.exists()]
        for path in written:
            for file in [path, *path.rglob("*")] if path.is_dir() else [path]:
                fsync(file)
        journal = {
            "outputs": {path.name: path.stat().st_ino if path in written else None for path in made},
            "done_with": None if done_with is None else done_with.name,
        }
        with publishing(out.parent):
            if before is not None:
                before(made)
            if len(made) > 1 or made[0].is_dir() or done_with is not None:
                draft = workspace / f"{_JOURNAL}.new"
                draft.write_text(json.dumps(journal))
                fsync(draft)
                os.replace(draft, workspace / _JOURNAL)
                fsync(workspace)
                decided = True
            _follow(workspace, journal, ours=True)
            decided = False
    except OSError as error:
        raise write_error(out, error) from error
    finally:
        if decided:  # stopped half-way: the journal stays for the next start
            os.close(descriptor)
        else:
            _close_workspace(workspace, descriptor)


@contextlib.contextmanager
def atomic_path(
    path: str | Path,
    *,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Iterator[Path]:
    """As :func:`atomic_paths`, for one file."""
    with atomic_paths(path, done_with=done_with, before=before) as (temporary,):
        yield temporary


@contextlib.contextmanager
def atomic_folder(
    path: str | Path, *, overwrite: bool = False, done_with: Path | None = None
) -> Iterator[Path]:
    """As :func:`atomic_paths`, for a new folder. With ``overwrite`` an existing one is replaced atomically.

    Raises:
        DataError: writing fails; or ``path`` exists, is not empty, and ``overwrite`` is false.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise write_error(path, error) from error
    with atomic_paths(path, done_with=done_with) as (temporary,):
        temporary.mkdir()
        yield temporary
        if not overwrite and path.is_dir() and any(path.iterdir()):
            raise DataError(f"{path} was created meanwhile: choose another --out, or --overwrite it")


def write_text(path: str | Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8) atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode())


def write_json(path: str | Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON atomically; NaN is an error."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path, what: str) -> Any:
    """Read JSON; ``what`` is the expected content, for errors.

    Raises:
        DataError: missing, unreadable or not JSON.
    """
    text = read_text(Path(path), what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise DataError(f"{path} is not the JSON of {what} ({error}): it is damaged or foreign") from None


def fingerprint(*parts: bytes | str) -> str:
    """A short name (16 hex digits of SHA-256) for content; parts are length-prefixed, so they cannot run together."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()[:16]

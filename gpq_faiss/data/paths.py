"""Paths, patterns and URLs as local files, and a hash of their contents.

fsspec copies a file at a URL to the cache folder. Each opening asks the server for its size and, if
available, its version: another version is copied again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import platformdirs

from ..errors import DataError, one_line
from ..files import atomic_path, fingerprint
from ..progress import stage

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_SECRETS = re.compile(r"(?<=://)[^/?#]*@|[?#].*", re.DOTALL)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL."""
    return _URL.match(os.fspath(path)) is not None


def without_secrets(url: str) -> str:
    """Return a URL without password and query string, for messages and output files."""
    return _SECRETS.sub("", url) if is_url(url) else url


def cache_folder() -> Path:
    """Return the folder of copies of remote files."""
    folder = os.environ.get("GPQ_CACHE") or platformdirs.user_cache_dir("gpq-faiss")
    return Path(folder).expanduser()


def _download(url: str) -> Path:
    """Return the copy of a remote file. Raises DataError, without secrets: it cannot be read."""
    bare = without_secrets(url)
    try:
        import fsspec

        system, remote = fsspec.url_to_fs(url)
        version = fingerprint(url, str(sorted(map(str, system.info(remote).items()))))
        target = cache_folder() / version / os.path.basename(bare)
        if not target.is_file():
            with stage(f"copying {bare}"), atomic_path(target) as temporary:
                system.get_file(remote, str(temporary))
    except Exception as error:  # file systems have errors of their own, HTTP the cause of its own
        reason = _SECRETS.sub("", one_line(error.__cause__ or error))
        raise DataError(f"{bare} cannot be read ({reason})") from None
    return target


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` expanded, or the copy of a URL. Raises DataError: it cannot be
    read.
    """
    return _download(os.fspath(path)) if is_url(path) else Path(path).expanduser()


def _expanded(pattern: str) -> list[str]:
    """Return the names of ``x-{00..12}.tar``, with numbers as wide as the first."""
    match = _RANGE.search(pattern)
    if match is None:
        return [pattern]
    prefix, suffix = pattern[: match.start()], pattern[match.end() :]
    numbers = range(int(match[1]), int(match[2]) + 1)
    return [f"{prefix}{number:0{len(match[1])}d}{suffix}" for number in numbers]


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key for sorting by the numbers in names: 2 before 10."""
    words = re.split(r"(\d+)", name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a path, a pattern (``*``, ``?``, ``[0-9]``, ``{000..009}``) or a URL.

    They are in numeric order. Raises DataError: there is none.
    """
    text = os.path.expanduser(path)
    if os.path.exists(text):
        return [Path(text)]
    names: list[str] = []
    for name in _expanded(text):
        has_magic = glob.has_magic(name) and not is_url(name)
        names += sorted(glob.glob(name), key=natural_order) if has_magic else [name]
    if not names:
        raise DataError(f"{without_secrets(text)}: no file matches this pattern")
    return [local_path(name) for name in names]


def replaces(out: str | Path, text: str, *, whole: bool = False) -> bool:
    """Return whether ``out`` is a file of a path, a pattern or a DATA argument, by whatever name;
    with ``whole`` also whether it is a folder with such a file."""
    patterns = [name for form in (text, text.partition(":")[2]) for name in _expanded(form)]
    names = [file for name in patterns for file in (name, *glob.glob(os.path.expanduser(name)))]
    files = [Path(name).expanduser() for name in names if os.path.isfile(os.path.expanduser(name))]
    paths = {path for file in files for path in (file, *(file.resolve().parents if whole else ()))}
    return os.path.exists(out) and any(os.path.samefile(out, path) for path in paths)


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

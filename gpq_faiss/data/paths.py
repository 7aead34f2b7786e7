"""Paths, patterns and URLs as local files.

A file at a URL is copied once to the cache folder by fsspec. Each opening asks the server for size
and, if available, version: of another one there is another copy.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, GpqError, UsageError, one_line
from ..files import atomic_path, fingerprint
from ..inputs import reading
from ..progress import stage

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_SECRETS = re.compile(r"(?<=://)[^/?#]*@|[?#].*", re.DOTALL)
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 100_000


def blocks(
    file: Any, start: int, size: int, number: int, length: int, whole: int
) -> Iterator[bytes]:
    """Yield ``size`` bytes of an open file up to ``whole``, else ``number`` evenly spaced
    blocks.
    """
    if size <= whole:
        number, length = 1, size
    for i in range(number):
        file.seek(start + (i * (size - length) // (number - 1) if i else 0))
        remaining = length
        while remaining > 0 and (block := file.read(min(remaining, 1 << 20))):
            remaining -= len(block)
            yield block


def file_fingerprint(path: Path) -> str:
    """Return a hash of a file up to 64 MiB, else of its size and 64 evenly spaced blocks of 64
    KiB.
    """
    digest = hashlib.sha256()
    with reading(path, "the file that was opened") as size, path.open("rb") as file:
        digest.update(str(size).encode())
        for block in blocks(file, 0, size, 64, 64 << 10, 64 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether ``path`` is a URL."""
    return _URL.match(os.fspath(path)) is not None


def without_secrets(url: str) -> str:
    """Return a URL without password and signature, for messages and output files."""
    return _SECRETS.sub("", url) if is_url(url) else url


def cache_folder() -> Path:
    """Return the folder of copies of remote files."""
    if folder := os.environ.get("GPQ_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpq-faiss"


@contextlib.contextmanager
def _remote(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the fsspec file system of a URL and the path in it.

    Raises DataError for any error of a file system, in one line and without secrets.
    """
    bare = without_secrets(url)
    options: dict[str, Any] = {}
    try:
        import fsspec

        if url.lower().startswith("http"):
            import aiohttp

            # Large files take more than aiohttp's five minutes, but not a minute without data.
            waiting = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options["client_kwargs"] = {"timeout": waiting, "trust_env": True}
        yield fsspec.core.url_to_fs(url, **options)
    except GpqError:
        raise
    except ImportError as error:
        raise DataError(
            f"reading {bare} needs another package: pip install it ({one_line(error)})"
        ) from None
    except Exception as error:  # file systems have errors of their own
        cause = error.__cause__ or error  # HTTP's error says "not found" for everything
        status = getattr(cause, "status", 404 if isinstance(cause, FileNotFoundError) else None)
        if status == 404:
            raise DataError(f"{bare} not found") from None
        reason = f"{status} {getattr(cause, 'message', '')}" if status else one_line(cause)
        reason = re.sub(
            _URL.pattern + r"[^\s'\"]+", lambda match: without_secrets(match[0]), reason
        )
        raise DataError(f"{bare} cannot be read ({reason})") from None


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with ``~`` expanded, or the copy of a URL. Raises DataError: it cannot be
    read.
    """
    url = os.fspath(path)
    if not is_url(url):
        return Path(url).expanduser()
    bare = without_secrets(url)
    with _remote(url) as (system, remote):
        info = system.info(remote)
        if info.get("type") == "directory":
            raise DataError(f"{bare} is a folder: name a file")
        version = str(sorted((key, str(info[key])) for key in info.keys() - {"name", "url"}))
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", bare.rstrip("/").rpartition("/")[2])[-100:].lstrip(
            "."
        )
        target = cache_folder() / fingerprint(url, version) / (name or "file")
        if not target.is_file():
            with stage(f"copying {bare}"), atomic_path(target) as temporary:
                system.get_file(remote, str(temporary))
    return target


def _expanded(pattern: str) -> Iterator[str]:
    """Expand ``x-{00..12}.tar``, with numbers as wide as the first."""
    match = _RANGE.search(pattern)
    if match is None:
        yield pattern
        return
    for number in range(int(match[1]), int(match[2]) + 1):
        text = f"{number:0{len(match[1])}d}"
        yield from _expanded(f"{pattern[: match.start()]}{text}{pattern[match.end() :]}")


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key for sorting by the numbers in names: 2 before 10."""
    return [
        (int(pattern_part), "") if pattern_part.isdecimal() else (-1, pattern_part)
        for pattern_part in re.split(r"(\d+)", name)
    ]


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """Return the files of a path, a pattern (``*``, ``?``, ``[0-9]``, ``{000..009}``) or a URL.

    They are in numeric order. Raises DataError: there is none.
    """
    text = os.fspath(path)
    text = text if is_url(text) else str(Path(text).expanduser())
    if os.path.exists(text):
        return [Path(text)]
    names: list[str] = []
    for pattern_part in _expanded(text):
        matches = [pattern_part]
        if not is_url(pattern_part):
            matches = glob.glob(pattern_part) if glob.has_magic(pattern_part) else matches
        elif "*" in pattern_part or "[" in pattern_part:  # ? starts a query string
            with _remote(pattern_part) as (system, remote):
                matches = [system.unstrip_protocol(name) for name in system.glob(remote)]
        names += sorted(matches, key=natural_order)
        if len(names) > _MOST_FILES:
            raise UsageError(f"{without_secrets(text)}: more than {_MOST_FILES:,} files")
    if not names:
        raise DataError(f"{without_secrets(text)}: no file matches this pattern")
    return [local_path(name) for name in names]


def replaces(out: str | Path, text: str, *, whole: bool = False) -> bool:
    """Return whether ``out`` is a file of a path, a pattern or a DATA argument, by whatever name;
    with ``whole`` also whether it is a folder with such a file."""
    parts = [
        pattern_part
        for form in (text, text.partition(":")[2])
        for pattern_part in _expanded(os.path.expanduser(form))
    ]
    files = [
        Path(name)
        for pattern_part in parts
        for name in (pattern_part, *glob.glob(pattern_part))
        if os.path.isfile(name)
    ]
    paths = {path for file in files for path in (file, *(file.resolve().parents if whole else ()))}
    return os.path.exists(out) and any(os.path.samefile(out, path) for path in paths)

"""Paths, patterns and URLs as local files.

A file at a URL is copied once to the cache folder, ``$GPQ_CACHE`` or ``gpq-faiss`` in the user's cache folder. Each opening queries the
server for size and, if available, version: of another one there is another copy. An unreachable server is an error.
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


def blocks(file: Any, start: int, size: int, number: int, length: int, whole: int) -> Iterator[bytes]:
    """``size`` bytes of an open file up to ``whole``, else ``number`` evenly spaced blocks of them, of ``length`` bytes."""
    if size <= whole:
        number, length = 1, size
    for i in range(number):
        file.seek(start + (i * (size - length) // (number - 1) if i else 0))
        left = length
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            left -= len(block)
            yield block


def file_fingerprint(path: Path) -> str:
    """Hash of a file's content up to 64 MiB; of larger files the size and 64 evenly spaced blocks of 64 KiB."""
    digest = hashlib.sha256()
    with reading(path, "the file that was opened") as size, path.open("rb") as file:
        digest.update(str(size).encode())
        for block in blocks(file, 0, size, 64, 64 << 10, 64 << 20):
            digest.update(block)
    return digest.hexdigest()[:16]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL."""
    return _URL.match(os.fspath(path)) is not None


def without_secrets(url: str) -> str:
    """``url`` without password and signature, for messages and output files."""
    return _SECRETS.sub("", url) if is_url(url) else url


def cache_folder() -> Path:
    """Folder of copies of remote files."""
    if own := os.environ.get("GPQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpq-faiss"


@contextlib.contextmanager
def _remote(url: str) -> Iterator[tuple[Any, str]]:
    """The fsspec file system of ``url``, and its path there. All errors are of one line: "not found", or "cannot be read (why)"."""
    scheme, bare = url.partition(":")[0].lower(), without_secrets(url)
    options: dict[str, Any] = {}
    try:
        import fsspec

        if scheme in {"http", "https"}:
            import aiohttp

            # No limit for the whole file, but for a minute without data.
            waiting = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            headers = {"Accept-Encoding": "identity"}
            options["client_kwargs"] = {"timeout": waiting, "trust_env": True, "headers": headers}
        if scheme not in fsspec.available_protocols():
            raise UsageError(f"{bare}: there is no file system for {scheme}://")
        yield fsspec.core.url_to_fs(url, **options)
    except GpqError:
        raise
    except ImportError as error:
        what = f"another package ({one_line(error, 120)})"
        raise DataError(f"reading {bare} needs {what}: pip install it, or 'gpq-faiss[remote]'") from None
    except Exception as error:  # file systems have their own errors, for example for credentials
        cause = error.__cause__ or error  # HTTP's says "not found" for everything; the cause has the details
        status = getattr(cause, "status", None)
        if status == 404 or (isinstance(error, FileNotFoundError) and cause is error):
            raise DataError(f"{bare} not found") from None
        why = f"{status} {getattr(cause, 'message', '')}" if status else one_line(cause)
        why = re.sub(_URL.pattern + r"[^\s'\"]+", lambda found: without_secrets(found[0]), why)
        raise DataError(f"{bare} cannot be read ({why})") from None


def local_path(path: str | os.PathLike[str]) -> Path:
    """Local file: a path with ``~`` expanded, or the copy of a URL. Raises DataError: it cannot be copied."""
    url = os.fspath(path)
    if not is_url(url):
        return Path(url).expanduser()
    bare = without_secrets(url)
    with _remote(url) as (system, remote):
        info = system.info(remote)
        if info.get("type") == "directory":
            raise DataError(f"{bare} is a folder: name a file")
        version = str(sorted((key, str(info[key])) for key in info.keys() - {"name", "url"}))
        name = re.sub(r"[^A-Za-z0-9._-]+", "_", bare.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
        target = cache_folder() / fingerprint(url, version) / (name or "file")
        if not target.is_file():
            from fsspec import Callback

            watch, size = Callback(), info.get("size") or 0
            with stage(f"copying {bare}", size, "byte") as copying, atomic_path(target) as new:
                watch.relative_update = copying.advance
                system.get_file(remote, str(new), callback=watch)
    return target


def _expanded(pattern: str) -> Iterator[str]:
    """Expand ``x-{00..12}.tar``, with numbers as wide as the first."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = int(found[1]), int(found[2])
    for number in range(first, last + 1):
        yield from _expanded(f"{pattern[: found.start()]}{number:0{len(found[1])}d}{pattern[found.end() :]}")


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a path, a pattern (``*``, ``?``, ``[0-9]``, ``{000..009}``) or a URL, in numeric order. Raises DataError: none."""
    text = os.fspath(path)
    text = text if is_url(text) else str(Path(text).expanduser())
    if os.path.exists(text):
        return [Path(text)]
    found: list[str] = []
    for part in _expanded(text):
        names = [part]
        if not is_url(part):
            names = glob.glob(part) if glob.has_magic(part) else names
        elif "*" in part or "[" in part:  # ? starts a query string
            with _remote(part) as (system, remote):
                names = [system.unstrip_protocol(name) for name in system.glob(remote)]
        found += sorted(names, key=_natural)
        if len(found) > _MOST_FILES:
            raise UsageError(f"{without_secrets(text)}: more than {_MOST_FILES:,} files")
    if not found:
        raise DataError(f"{without_secrets(text)}: no file matches this pattern")
    return [local_path(name) for name in found]


def replaces(out: str | Path, text: str, *, whole: bool = False) -> bool:
    """Whether ``out`` is a file of a path, a pattern or a DATA argument, by whatever name; ``whole``: or a folder with one."""
    parts = [part for form in (text, text.partition(":")[2]) for part in _expanded(os.path.expanduser(form))]
    files = [Path(one) for part in parts for one in (part, *glob.glob(part)) if os.path.isfile(one)]
    every = {path for one in files for path in (one, *(one.resolve().parents if whole else ()))}
    return os.path.exists(out) and any(os.path.samefile(out, path) for path in every)


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]

"""Paths, patterns and URLs as local files.

A file at a URL is copied once to the cache folder, ``$GPQ_CACHE`` or ``gpq-faiss`` in the user's cache folder. Each opening queries the
server for size and, if available, version; an outdated or modified copy is replaced. An unreachable server is an error.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from ..errors import DataError, UsageError
from ..files import atomic_paths, fingerprint, read_json, write_error
from ..progress import stage

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_MOST_FILES = 100_000
_SAMPLED, _SAMPLE = 64, 64 << 10  # blocks of a large file in its fingerprint, and their bytes
_VERSION = (
    "ETag", "etag", "Content-MD5", "md5Hash", "Digest", "Last-Modified", "LastModified", "mtime", "created",
)  # fmt: skip
"""Keys of a file's version in fsspec file systems."""
_EXTRA = "pip install 'gpq-faiss[remote]'"


def file_fingerprint(path: Path) -> str:
    """Hash of a file's content up to 64 MiB; of larger files the size and 64 evenly spaced blocks."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        if size <= 64 << 20:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for i in range(_SAMPLED):
                file.seek(i * (size - _SAMPLE) // (_SAMPLED - 1))
                digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a URL."""
    return _URL.match(os.fspath(path)) is not None


def without_secrets(url: str) -> str:
    """``url`` without password and signature, for messages and output files."""
    if not is_url(url):
        return url
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.partition("?")[0]
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def cache_folder() -> Path:
    """Folder of copies of remote files."""
    if own := os.environ.get("GPQ_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gpq-faiss"


def remote_error(url: str, error: Exception) -> DataError:
    """One-line error for an exception of an fsspec file system."""
    return DataError(f"{without_secrets(url)} {remote_reason(error)}")


def remote_reason(error: Exception) -> str:
    """Description of an exception of an fsspec file system: "not found", or "cannot be read (why)"."""
    # HTTP's says "not found" for everything; the cause has the details.
    cause = error.__cause__ or error
    status = getattr(cause, "status", None)
    if status == 404 or (isinstance(error, FileNotFoundError) and cause is error):
        return "not found"
    why = (
        f"{status} {cause.message}" if status and hasattr(cause, "message") else " ".join(str(cause).split())
    )
    why = re.sub(r"[a-zA-Z][a-zA-Z0-9+.-]*://[^\s'\"]+", lambda found: without_secrets(found[0]), why)
    return f"cannot be read ({why[:200] or type(cause).__name__})"


def remote_system(url: str) -> tuple[Any, str]:
    """The fsspec file system of ``url``, and its path there. Raises DataError, UsageError: there is none."""
    scheme, shown = url.partition(":")[0].lower(), without_secrets(url)
    http = scheme in {"http", "https"}
    options: dict[str, Any] = {}
    try:
        import fsspec

        if http:
            import aiohttp

            # No limit for the whole file, but for a minute without data.
            waiting = aiohttp.ClientTimeout(total=None, sock_connect=30, sock_read=60)
            headers = {"Accept-Encoding": "identity"}
            options["client_kwargs"] = {"timeout": waiting, "trust_env": True, "headers": headers}
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        own = error.name in {"fsspec", "aiohttp"}
        what = str(error.name) if own else f"another package ({' '.join(str(error).split())[:120]})"
        raise DataError(
            f"reading {shown} needs {what}: {_EXTRA if own or http else 'install that package'}"
        ) from None
    except ValueError:
        raise UsageError(f"{shown}: there is no file system for {scheme}://") from None
    except Exception as error:  # file systems have their own errors, for example for credentials
        raise remote_error(url, error) from None
    return system, str(path)


def version_of(info: dict[str, Any]) -> dict[str, str]:
    """What fsspec knows of a remote file that changes with its content: etag, checksum or time."""
    return {key: str(info[key]) for key in _VERSION if info.get(key)}


def local_path(path: str | os.PathLike[str]) -> Path:
    """Local file: a path with ``~`` expanded, or the copy of a URL. Raises DataError: it cannot be copied."""
    url = os.fspath(path)
    if not is_url(url):
        return Path(url).expanduser()
    system, remote = remote_system(url)
    bare = without_secrets(url)
    try:
        info = system.info(remote)
    except Exception as error:
        raise remote_error(url, error) from None
    if info.get("type") == "directory":
        raise DataError(f"{bare} is a folder: name a file")
    mark = {"size": info.get("size")} | version_of(info)
    name = re.sub(r"[^A-Za-z0-9._-]+", "_", bare.rstrip("/").rpartition("/")[2])[-100:].lstrip(".")
    target = cache_folder() / fingerprint(url) / (name or "file")
    about = target.with_name(f"{target.name}.origin.json")
    if not _is_current(target, about, mark):
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(target, error) from None
        _copy(url, system, remote, (target, about), mark)
    return target


def _is_current(target: Path, about: Path, mark: dict[str, Any]) -> bool:
    try:
        known = read_json(about, "the origin of a copy")
        return bool(known["version"] == mark and known["content"] == file_fingerprint(target))
    except (DataError, OSError, KeyError, TypeError):
        return False


def _copy(url: str, system: Any, remote: str, targets: tuple[Path, Path], mark: dict[str, Any]) -> None:
    import fsspec

    bare, size = without_secrets(url), mark["size"]
    with stage(f"copying {bare}", size or 0, "byte") as copying, atomic_paths(*targets) as (new, about):
        watch = fsspec.Callback()
        watch.relative_update = copying.advance
        try:
            system.get_file(remote, str(new), callback=watch)
            there = new.stat().st_size
        except Exception as error:
            raise remote_error(url, error) from None
        if size is not None and there != size:
            raise DataError(f"{bare} was truncated: {there:,} of {size:,} bytes; start again")
        origin = {"url": bare, "version": mark, "content": file_fingerprint(new)}
        about.write_text(json.dumps(origin, indent=2))


def _expanded(pattern: str) -> Iterator[str]:
    """Expand ``x-{00..12}.tar``, with numbers as wide as the first."""
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    first, last = int(found[1]), int(found[2])
    if last < first or last - first >= _MOST_FILES:
        raise UsageError(f"{pattern}: {found[0]} is not a range of at most {_MOST_FILES:,} numbers")
    for number in range(first, last + 1):
        yield from _expanded(f"{pattern[: found.start()]}{number:0{len(found[1])}d}{pattern[found.end() :]}")


def _globbed(pattern: str) -> Sequence[str]:
    if not is_url(pattern):
        return glob.glob(pattern) if glob.has_magic(pattern) else [pattern]
    if "*" not in pattern and "[" not in pattern:  # ? starts a query string
        return [pattern]
    system, remote = remote_system(pattern)
    try:
        return [system.unstrip_protocol(name) for name in system.glob(remote)]
    except Exception as error:
        raise remote_error(pattern, error) from None


def files_of(path: str | os.PathLike[str]) -> list[Path]:
    """The files of a path, a pattern (``*``, ``?``, ``[0-9]``, ``{000..009}``) or a URL, in numeric order. Raises DataError: none."""
    text = os.fspath(path)
    if not is_url(text):
        file = Path(text).expanduser()
        if file.exists():
            return [file]
        text = str(file)
    found: list[str] = []
    for part in _expanded(text):
        found += sorted(_globbed(part), key=_natural)
        if len(found) > _MOST_FILES:
            raise UsageError(f"{without_secrets(text)}: more than {_MOST_FILES:,} files")
    if not found:
        raise DataError(f"{without_secrets(text)}: no file matches this pattern")
    return [local_path(name) for name in found]


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]

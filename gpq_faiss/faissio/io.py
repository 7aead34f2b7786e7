"""Index files: plain ``faiss.write_index`` files with a small JSON sidecar, and safe reading of both.

``index.faiss`` is a plain Faiss file, readable without this package. ``index.faiss.json`` (the sidecar) identifies model and codebooks,
and has the file's SHA-256, to detect damage and mix-ups. It is missing for files written by plain Faiss.

Sidecar keys: ``format_version``, ``kind``, ``ntotal``, ``codebooks`` (M), ``codewords`` (K), ``subdim`` (d),
``codebooks_fingerprint``, ``model_fingerprint`` (or null), ``bytes``, ``sha256``, ``versions``, ``extra``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import DataError, MismatchError
from ..files import atomic_paths, check_output, read_json, versions, write_json
from ..inputs import check_file
from .header import INDEX_FILE, Contents, Header, IndexFile, read_contents, read_header, to_bytes

FORMAT_VERSION = 1
_SIDECAR_TYPES: dict[str, Any] = {
    **dict.fromkeys(("kind", "codebooks_fingerprint", "sha256"), str),
    **dict.fromkeys(("format_version", "ntotal", "bytes"), int),
    **dict.fromkeys(("versions", "extra"), dict),
    "model_fingerprint": str | None,
}

Beside = Mapping[Path, Callable[[Path], object] | None]
"""Other files of an index, and what writes each to a given path; None removes it."""


# Writing --------------------------------------------------------------------------------------------------------------


def sidecar_path(path: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.json``."""
    return Path(f"{Path(path)}.json")


def check_index_output(path: str | Path, *, overwrite: bool) -> Path:
    """:func:`gpq_faiss.files.check_output` for the index and its sidecar, before any work."""
    path = check_output(path, overwrite=overwrite)
    check_output(sidecar_path(path), overwrite=overwrite)
    return path


def save_index(
    index: Any,
    path: str | Path,
    *,
    model_fingerprint: str | None = None,
    overwrite: bool = False,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Path:
    """Write a Faiss index, its sidecar and the files ``beside`` it, and put all into place at once.

    Args:
        index: a Faiss index, or an iterator over the bytes of its file.
        extra: for the sidecar.
        done_with, before: as for :func:`..files.atomic_paths`.

    Raises:
        DataError: an invalid index (:func:`.header.read_header`), or writing fails; nothing is put into place.
        OutputExistsError: a file exists and ``overwrite`` is false.
    """
    path, beside = check_index_output(path, overwrite=overwrite), beside or {}
    parts: Iterable[Any] = index if isinstance(index, Iterator) else [to_bytes(index).data]
    made = atomic_paths(path, sidecar_path(path), *beside, done_with=done_with, before=before)
    with made as (temporary, temporary_sidecar, *others):
        for write_other, other in zip(beside.values(), others, strict=True):
            if write_other is not None:
                write_other(other)
        with temporary.open("wb", buffering=1 << 20) as file:
            file.writelines(parts)
        with contextlib.closing(IndexFile(temporary)) as source:
            source.path = path
            header = read_header(source)
        M, K, d = (int(n) for n in header.codebooks.shape)
        document = {
            "format_version": FORMAT_VERSION,
            "kind": header.form,
            "ntotal": header.n,
            "codebooks": M,
            "codewords": K,
            "subdim": d,
            "codebooks_fingerprint": header.fingerprint,
            "model_fingerprint": model_fingerprint,
            "bytes": source.size,
            "sha256": file_sha256(temporary),
            "versions": versions("faiss", "numpy"),
            "extra": extra or {},
        }
        write_json(temporary_sidecar, document)
    return path


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, in hex digits. Raises DataError: it cannot be read."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


# Reading --------------------------------------------------------------------------------------------------------------


def open_header(path: str | Path, *, verify: bool) -> tuple[Header, dict[str, Any]]:
    """Open an untrusted index file, without reading its rows.

    Args:
        verify: check the sidecar's SHA-256, if any: about a second per GB.

    Returns:
        The header, whose source is to be closed, and the sidecar; without a sidecar file an empty one.

    Raises:
        DataError: missing, empty, of another format, truncated, damaged, or too large.
        MismatchError: the sidecar belongs to another or an earlier version of the index.
    """
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(contextlib.closing(IndexFile(path)))
        stated = read_sidecar(path) or {}
        if verify and stated:
            check_stated(Path(path), stated)
        header = read_header(source)
        found = (source.size, header.n, header.fingerprint, header.form)
        keys = ("bytes", "ntotal", "codebooks_fingerprint", "kind")
        if stated and found != tuple(stated[key] for key in keys):
            raise _another(Path(path))
        stack.pop_all()
    return header, stated


def load_index(path: str | Path) -> tuple[Contents, dict[str, Any]]:
    """Read an untrusted index file whole. Returns the verified contents, and the sidecar; raises as :func:`open_header`."""
    header, stated = open_header(path, verify=True)
    with contextlib.closing(header.source):
        return read_contents(header), stated


def read_sidecar(path: str | Path) -> dict[str, Any] | None:
    """The sidecar of an index file, without the index; None if missing. Raises DataError: damaged or of another format."""
    sidecar = sidecar_path(path)
    if not sidecar.exists():
        return None
    document = read_json(sidecar, "an index's fingerprints")
    for key, of in _SIDECAR_TYPES.items():
        if not isinstance(document, dict) or not isinstance(document.get(key, ...), of):
            raise DataError(
                f"{sidecar}: {key!r} is missing or damaged: delete the file to use the index as it is"
            )
    if document["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{sidecar}: format {document['format_version']}, this version reads {FORMAT_VERSION}: build the index again"
        )
    found: dict[str, Any] = document
    return found


def check_stated(path: Path, stated: Mapping[str, Any]) -> None:
    """Check size and SHA-256 of an index file against the sidecar ``stated``. Raises MismatchError: they differ."""
    if check_file(path, INDEX_FILE) != stated["bytes"] or file_sha256(path) != stated["sha256"]:
        raise _another(path)


def _another(path: Path) -> MismatchError:
    return MismatchError(
        f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; build it "
        "again, or delete the .json if the change was intended"
    )

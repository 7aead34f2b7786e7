"""Index files: plain ``faiss.write_index`` files with a small JSON sidecar, and safe reading of both.

``index.faiss`` is a plain Faiss file, readable without this package. ``index.faiss.json`` (the sidecar) identifies model and codebooks,
and has the file's SHA-256, to detect damage and mix-ups. It is missing for files written by plain Faiss.

Sidecar keys: ``format_version``, ``kind``, ``ntotal``, ``codebooks`` (M), ``codewords`` (K), ``subdim`` (d),
``codebooks_fingerprint``, ``model_fingerprint`` (or null), ``bytes``, ``sha256``, ``versions``, ``extra``.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import faiss
import numpy as np

from .. import __version__
from ..errors import DataError, MismatchError
from ..files import atomic_paths, check_output, read_json, write_json
from ..inputs import check_file
from .header import Contents, Header, read_contents, read_header
from .source import INDEX_FILE, IndexFile, to_bytes

FORMAT_VERSION = 1
_SIDECAR_TYPES: dict[Any, tuple[str, ...]] = {
    str: ("kind", "codebooks_fingerprint", "sha256"),
    int: ("format_version", "ntotal", "bytes"),
    dict: ("versions", "extra"),
    str | None: ("model_fingerprint",),
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
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> Path:
    """Write a Faiss index and its sidecar atomically, with the files ``beside`` it; ``before`` as :func:`..files.atomic_paths`.

    Raises:
        DataError: an invalid index (:func:`.header.read_header`), or writing fails.
        OutputExistsError: a file exists and ``overwrite`` is false.
    """
    path = check_index_output(path, overwrite=overwrite)
    options: dict[str, Any] = {"extra": extra, "beside": beside, "before": before}
    data = to_bytes(index)
    publish(path, lambda file: file.put(data.data), model_fingerprint=model_fingerprint, **options)
    return path


def publish(
    path: Path,
    write: Callable[[HashedFile], None],
    *,
    model_fingerprint: str | None,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> None:
    """Put the index file that ``write`` fills, its sidecar and the files ``beside`` it into place (:func:`..files.atomic_paths`).

    Raises:
        DataError: what was written is no valid index, or writing fails; nothing is put into place.
    """
    beside = beside or {}
    with atomic_paths(path, sidecar_path(path), *beside, done_with=done_with, before=before) as (
        temporary,
        temporary_sidecar,
        *others,
    ):
        for write_other, other in zip(beside.values(), others, strict=True):
            if write_other is not None:
                write_other(other)
        with contextlib.closing(HashedFile(temporary)) as file:
            write(file)
        with IndexFile(temporary) as source:
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
            "bytes": file.size,
            "sha256": file.sha256,
            "versions": {"gpq_faiss": __version__, "faiss": faiss.__version__, "numpy": np.__version__},
            "extra": extra or {},
        }
        write_json(temporary_sidecar, document)


class HashedFile:
    """A new file with its size and SHA-256."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("wb", buffering=1 << 20)
        self._digest = hashlib.sha256()
        self.size = 0

    def put(self, data: bytes | memoryview) -> None:
        """Write bytes."""
        self._file.write(data)
        self._digest.update(data)
        self.size += memoryview(data).nbytes

    @property
    def sha256(self) -> str:
        """SHA-256 of the content, in hexadecimal digits."""
        return self._digest.hexdigest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


# Reading --------------------------------------------------------------------------------------------------------------


def load_index(path: str | Path, *, verify: bool = True) -> tuple[Contents, dict[str, Any]]:
    """Read an untrusted index file.

    Args:
        verify: check the sidecar's SHA-256, if any: about a second per GB.

    Returns:
        The verified contents, and the sidecar; without a sidecar file an empty one.

    Raises:
        DataError: missing, empty, of another format, truncated, damaged, or too large.
        MismatchError: the sidecar belongs to another or an earlier version of the index.
    """
    with IndexFile(path) as source:
        stated = read_sidecar(path)
        if stated is not None:
            check_stated(Path(path), stated, verify=verify)
        contents = read_contents(source)
        check_header(source, contents.header, stated)
    return contents, stated or {}


def read_sidecar(path: str | Path) -> dict[str, Any] | None:
    """The sidecar of an index file, without the index; None if missing. Raises DataError: damaged or of another format."""
    sidecar = sidecar_path(path)
    if not sidecar.exists():
        return None
    document = read_json(sidecar, "an index's fingerprints")
    if not isinstance(document, dict):
        raise DataError(f"{sidecar} is not the JSON of an index: delete it to use the index as it is")
    for types, keys in _SIDECAR_TYPES.items():
        for key in keys:
            if key not in document or not isinstance(document[key], types):
                raise DataError(
                    f"{sidecar}: {key!r} is missing or damaged: delete the file to use the index as it is"
                )
    if document["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{sidecar}: format {document['format_version']}, this version reads {FORMAT_VERSION}: build the index again"
        )
    return document


def check_stated(path: Path, stated: Mapping[str, Any], *, verify: bool) -> None:
    """Check size, and with ``verify`` SHA-256, of an index file against the sidecar ``stated``. Raises MismatchError: they differ."""
    changed = check_file(path, INDEX_FILE) != stated["bytes"]
    try:
        if verify and not changed:
            with path.open("rb") as file:
                changed = hashlib.file_digest(file, "sha256").hexdigest() != stated["sha256"]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if changed:
        raise _another(path)


def check_header(source: IndexFile, header: Header, stated: Mapping[str, Any] | None) -> None:
    """Check what an open index holds against its sidecar ``stated``, if there is one. Raises MismatchError: they differ."""
    found = (source.size, header.n, header.fingerprint, header.form)
    keys = ("bytes", "ntotal", "codebooks_fingerprint", "kind")
    if stated is not None and found != tuple(stated[key] for key in keys):
        raise _another(Path(source.path))


def _another(path: Path) -> MismatchError:
    return MismatchError(
        f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; build it "
        "again, or delete the .json if the change was intended"
    )

"""Index files: plain ``faiss.write_index`` files with a small JSON sidecar, and safe reading of both.

``index.faiss`` is a plain Faiss file, readable without this package. ``index.faiss.json`` (the sidecar) identifies model and codebooks,
and has the file's SHA-256, to detect damage and mix-ups. It is missing for files written by plain Faiss.

Sidecar keys: ``format_version``, ``kind``, ``ntotal``, ``codebooks`` (M), ``codewords`` (K), ``subdim`` (d),
``codebooks_fingerprint``, ``model_fingerprint`` (or null), ``bytes``, ``sha256``, ``versions``, ``extra``.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from .. import __version__
from ..codes.checks import Floats
from ..errors import DataError, MismatchError
from ..files import atomic_paths, check_output, read_json, write_error, write_json
from ..store import codebooks_fingerprint
from .layout import layout_of

FORMAT_VERSION = 1
_WRITE_CHUNK = 1 << 20
# Other types are rejected before Faiss parses them.
_INNER = {b"IxPq", b"IPfs"}
WRAPPERS = {b"IxMp", b"IxM2"}
LISTS = {b"IwPQ", b"IwPf"}
MOVED = b"IxPT"
_TRANSFORM = b"RmDT"
MAX_WIDTH = 1 << 22
"""Maximum dimensions behind a transform."""
INDEX_TYPES = (*sorted(_INNER | WRAPPERS | LISTS), MOVED)
"""First four bytes of the files that are read."""
_QUANTIZERS = {b"IxFI"}
_FOREIGN = (b"Ix", b"Iw", b"IB", b"IH", b"Il")
_CONSTANTS = struct.pack("<qq", 1 << 20, 1 << 20)  # what Faiss writes after the number of items, for any type
_HEADER_BYTES = 33  # d int32, ntotal int64, two unused int64, is_trained byte, metric int32
_LISTS_BYTES = 16  # number of lists and nprobe, before the coarse quantiser
_LOOP_LIMIT = 1 << 20
_LEAST_LIMIT = 64 << 20
_reading = threading.Lock()


def is_faiss(start: bytes) -> bool:
    """Whether the first 32 bytes of a file are those of a Faiss index, readable here or not."""
    return start[:4] in INDEX_TYPES or start[:2] in _FOREIGN or start[16:32] == _CONSTANTS


def sidecar_path(path: str | Path) -> Path:
    """``index.faiss`` -> ``index.faiss.json``."""
    return Path(f"{Path(path)}.json")


Beside = Mapping[Path, Callable[[Path], object] | None]
"""Other files of an index, and what writes each to a given path; None removes it."""


def write_beside(beside: Beside, paths: Iterable[Path]) -> None:
    """Write the files ``beside`` an index to these temporary paths."""
    for write, path in zip(beside.values(), paths, strict=True):
        if write is not None:
            write(path)


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
    """Write a verified index and its sidecar atomically, with the files ``beside`` it.

    Args:
        before: see :func:`gpq_faiss.files.atomic_paths`.

    Raises:
        DataError: an invalid index (:func:`.layout.layout_of`), or writing fails.
        OutputExistsError: a file exists and ``overwrite`` is false.
    """
    path = check_index_output(path, overwrite=overwrite)
    layout = layout_of(index, what=f"index for {path}")
    sidecar = sidecar_path(path)
    beside = beside or {}
    with atomic_paths(path, sidecar, *beside, before=before) as (temporary, temporary_sidecar, *others):
        write_beside(beside, others)
        size, digest = _write(index, temporary, path)
        write_json(
            temporary_sidecar,
            sidecar_document(*layout.described, size, digest, model_fingerprint, extra or {}),
        )
    return path


def sidecar_document(
    kind: str,
    ntotal: int,
    codebooks: Floats,
    size: int,
    digest: str,
    model_fingerprint: str | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The sidecar of an index file of ``size`` bytes with SHA-256 ``digest``."""
    M, K, d = (int(n) for n in codebooks.shape)
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "ntotal": ntotal,
        "codebooks": M,
        "codewords": K,
        "subdim": d,
        "codebooks_fingerprint": codebooks_fingerprint(codebooks),
        "model_fingerprint": model_fingerprint,
        "bytes": size,
        "sha256": digest,
        "versions": {"gpq_faiss": __version__, "faiss": faiss.__version__, "numpy": np.__version__},
        "extra": extra,
    }


def _write(index: Any, temporary: Path, path: Path) -> tuple[int, str]:
    """``faiss.write_index`` through Python I/O, which detects a full disk reliably."""
    digest = hashlib.sha256()
    failure: list[OSError] = []
    with temporary.open("wb") as file:

        def write(chunk: bytes) -> int:
            try:
                file.write(chunk)
            except OSError as error:
                failure.append(error)
                return 0  # Faiss then stops
            digest.update(chunk)
            return len(chunk)

        try:
            writer = faiss.PyCallbackIOWriter(write, _WRITE_CHUNK)  # type: ignore[attr-defined]  # stub lacks it
            faiss.write_index(index, writer)
        except RuntimeError as error:
            if failure:
                raise write_error(path, failure[0]) from error
            raise DataError(f"cannot write {path}: {_short(error)}") from error
        size = file.tell()
    return size, digest.hexdigest()


def load_index(path: str | Path, *, verify: bool = True) -> tuple[Any, dict[str, Any]]:
    """Read an untrusted index file.

    While Faiss reads, its process-wide limits on array sizes and loops are lowered, also for other threads, and restored afterwards.
    Files are read one at a time.

    Args:
        path: the ``.faiss`` file.
        verify: check the sidecar's SHA-256, if any: about a second per GB.

    Returns:
        The Faiss index (see :mod:`.storage`), and the sidecar. Without a sidecar file the same
        keys are filled from the index, except ``model_fingerprint``, ``sha256`` (None) and ``versions``.

    Raises:
        DataError: missing, empty, of another format, truncated, damaged, or too large.
        MismatchError: the sidecar belongs to another or an earlier version of the index.
    """
    path = Path(path)
    size = _file_size(path)
    _check_type(path)
    sidecar, stated = sidecar_path(path), read_sidecar(path)
    if stated is not None:
        check_file(path, stated, verify=verify)
    # Faiss also counts an optional table for lists of 4-bit codes, which is never built here.
    with reading_limits(max(2 * size, _LEAST_LIMIT)):
        try:
            index = faiss.read_index(str(path))
        except (RuntimeError, MemoryError, OverflowError, ValueError, TypeError) as error:
            raise DataError(f"{path} is truncated or damaged ({_short(error)}): build it again") from error
    layout = layout_of(index, what=str(path), deep=True)
    found = sidecar_document(*layout.described, size, "", None, {})
    if stated is None:
        return index, {**found, "sha256": None, "versions": {}}
    for key in ("codebooks_fingerprint", "ntotal", "kind"):
        if stated[key] != found[key]:
            raise MismatchError(
                f"{path}: {key.replace('_', ' ')} is {found[key]}, but {sidecar.name} says {stated[key]}: "
                "they belong to different indexes; copy both again, or delete the .json to use the index as it is"
            )
    return index, stated


def read_sidecar(path: str | Path) -> dict[str, Any] | None:
    """Read the sidecar of an index file, without the index; None if missing.

    Raises:
        DataError: damaged or of another format.
    """
    sidecar = sidecar_path(path)
    if not sidecar.exists():
        return None
    document = read_json(sidecar, "an index's fingerprints")
    if not isinstance(document, dict):
        raise DataError(f"{sidecar} is not the JSON of an index: delete it to use the index as it is")
    for key, types in _SIDECAR_TYPES.items():
        if key not in document or not isinstance(document[key], types):
            raise DataError(
                f"{sidecar}: {key!r} is missing or damaged: delete the file to use the index as it is"
            )
    if document["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{sidecar}: format {document['format_version']}, this version reads {FORMAT_VERSION}: build the index again"
        )
    return document


def _file_size(path: Path) -> int:
    try:
        if path.is_dir():
            raise DataError(f"{path} is a folder: an index file is needed")
        size = path.stat().st_size
    except OSError as error:
        why = "not found" if isinstance(error, FileNotFoundError) else error.strerror
        raise DataError(f"{path}: {why}: an index file is needed (gpq index, or faiss.write_index)") from None
    if size == 0:
        raise DataError(f"{path} is empty: build the index again")
    return size


def _check_type(path: Path) -> None:
    """Raises DataError: a file of an unsupported type, before Faiss parses it."""
    try:
        with path.open("rb") as file:
            start = file.read(32)
            outer = inner = start[:4]
            file.seek(4)
            if outer == MOVED:
                file.seek(_HEADER_BYTES, 1)
                number, moved, width = struct.unpack("<i4sQ", file.read(16).ljust(16, b"\0"))
                if number != 1 or moved != _TRANSFORM or width > MAX_WIDTH:
                    raise DataError(
                        f"{path}: its codes are behind another transform than that of 'gpq index --kind ivf'"
                    )
                file.seek(4 * width + 9, 1)
                outer = inner = file.read(4)
                if outer not in LISTS:
                    outer = b""
            if outer in WRAPPERS:
                file.seek(_HEADER_BYTES, 1)
                inner = file.read(4)
            elif outer in LISTS:
                file.seek(_HEADER_BYTES + _LISTS_BYTES, 1)
                quantizer = file.read(4)
                if quantizer in _QUANTIZERS:
                    return
                kind = quantizer.decode("ascii", "replace") if quantizer.isalnum() else "damaged"
                raise DataError(
                    f"{path}: its coarse quantiser is of type {kind!r}, expected a flat one (IndexFlatIP)"
                )
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if inner in _INNER:
        return
    if is_faiss(start):
        kind = inner.decode("ascii", "replace") if inner.isalnum() else "damaged"
        raise DataError(f"{path} holds no product-quantised codes (type {kind!r}): a GPQ index is an IndexPQ")
    raise DataError(f"{path} is not a Faiss index: use the output of 'gpq index' or faiss.write_index")


_SIDECAR_TYPES: dict[str, tuple[type, ...]] = {
    "format_version": (int,),
    "kind": (str,),
    "ntotal": (int,),
    "codebooks": (int,),
    "codewords": (int,),
    "subdim": (int,),
    "codebooks_fingerprint": (str,),
    "model_fingerprint": (str, type(None)),
    "bytes": (int,),
    "sha256": (str,),
    "versions": (dict,),
    "extra": (dict,),
}


def check_file(path: Path, stated: dict[str, Any], *, verify: bool) -> None:
    """Check size, and with ``verify`` SHA-256, of an index file against the sidecar ``stated``.

    Raises:
        MismatchError: they differ.
        DataError: the file cannot be read.
    """
    changed = _file_size(path) != stated["bytes"]
    try:
        if verify and not changed:
            with path.open("rb") as file:
                changed = hashlib.file_digest(file, "sha256").hexdigest() != stated["sha256"]
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if changed:
        raise MismatchError(
            f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; build it "
            "again, or delete the .json if the change was intended"
        )


def read_empty(data: bytes, path: Path, *, lists: int = 0) -> Any:
    """Parse ``data``, an index without items: the header of ``path`` with this number of lists.

    Raises:
        DataError: damaged, or with impossible sizes.
    """
    # For lists of 4-bit codes Faiss counts a table of up to 16 times their centroids.
    with reading_limits(max(16 * len(data), _LEAST_LIMIT), max(lists + 1, _LOOP_LIMIT)):
        try:
            return faiss.deserialize_index(np.frombuffer(data, np.uint8))
        except (RuntimeError, MemoryError, OverflowError, ValueError, TypeError) as error:
            raise DataError(f"{path} is damaged: its header cannot be read; build it again") from error


@contextlib.contextmanager
def reading_limits(byte_limit: int, loop_limit: int = _LOOP_LIMIT) -> Iterator[None]:
    """Context with lowered process-wide limits of Faiss' reader, for one reader at a time."""
    with _reading:
        before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
        faiss.set_deserialization_vector_byte_limit(byte_limit)
        faiss.set_deserialization_loop_limit(loop_limit)
        try:
            yield
        finally:
            faiss.set_deserialization_vector_byte_limit(before[0])
            faiss.set_deserialization_loop_limit(before[1])


def _short(error: BaseException) -> str:
    """A Faiss error message without function and file names."""
    text = " ".join(str(error).split())
    for mark in ("failed: ", "' failed", "Error: "):
        if mark in text:
            text = text.split(mark)[-1].strip(": ")
            break
    return text[:120] or type(error).__name__

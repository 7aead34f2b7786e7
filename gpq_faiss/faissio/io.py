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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Self

import faiss
import numpy as np

from .. import __version__
from ..codes.checks import Floats
from ..errors import DataError, MismatchError
from ..files import atomic_paths, check_output, read_json, write_error, write_json
from ..inputs import check_file
from ..store import codebooks_fingerprint
from .layout import Layout, layout_of

FORMAT_VERSION = 1
_WRITE_CHUNK = 1 << 20
# Other types are rejected before Faiss parses them.
_INNER = {b"IxPq", b"IPfs"}
WRAPPERS = {b"IxMp", b"IxM2"}
LISTS = {b"IwPQ", b"IwPf"}
MOVED = b"IxPT"
FLAT = b"IxFI"
HEADER = 37
"""Bytes before what is particular to a type: type, d, number of items, two unused numbers, is_trained, metric."""
_MAX_WIDTH = 1 << 22  # dimensions behind a transform
INDEX_FILE = "an index file (gpq index, or faiss.write_index)"
INDEX_TYPES = (*sorted(_INNER | WRAPPERS | LISTS), MOVED)
"""First four bytes of the files that are read."""
_FOREIGN = (b"Ix", b"Iw", b"IB", b"IH", b"Il")
_CONSTANTS = struct.pack("<qq", 1 << 20, 1 << 20)  # what Faiss writes after the number of items, for any type
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


Contents = tuple[str, int, Floats]
"""Form, number of items and codebooks of an index."""


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
    publish(
        path,
        lambda file: _write(index, file, path),
        (layout.form, layout.ntotal, layout.codebooks),
        model_fingerprint=model_fingerprint,
        extra=extra,
        beside=beside,
        before=before,
    )
    return path


def publish(
    path: Path,
    write: Callable[[HashedFile], None],
    contents: Contents,
    *,
    model_fingerprint: str | None,
    extra: dict[str, Any] | None = None,
    beside: Beside | None = None,
    done_with: Path | None = None,
    before: Callable[[tuple[Path, ...]], None] | None = None,
) -> None:
    """Put the index file that ``write`` fills, its sidecar and the files ``beside`` it into place (:func:`..files.atomic_paths`)."""
    beside = beside or {}
    with atomic_paths(path, sidecar_path(path), *beside, done_with=done_with, before=before) as (
        temporary,
        temporary_sidecar,
        *others,
    ):
        for write_other, other in zip(beside.values(), others, strict=True):
            if write_other is not None:
                write_other(other)
        with HashedFile(temporary) as file:
            write(file)
        document = sidecar_document(*contents, file.size, file.sha256, model_fingerprint, extra or {})
        write_json(temporary_sidecar, document)


def sidecar_document(
    form: str,
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
        "kind": form,
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


class HashedFile:
    """A new file with its size and SHA-256; a context manager that closes it."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _write(index: Any, file: HashedFile, path: Path) -> None:
    """``faiss.write_index`` through Python I/O, which detects a full disk reliably."""
    failure: list[OSError] = []

    def write(chunk: bytes) -> int:
        try:
            file.put(chunk)
        except OSError as error:
            failure.append(error)
            return 0  # Faiss then stops
        return len(chunk)

    try:
        writer = faiss.PyCallbackIOWriter(write, _WRITE_CHUNK)  # type: ignore[attr-defined]  # stub lacks it
        faiss.write_index(index, writer)
    except RuntimeError as error:
        if failure:
            raise write_error(path, failure[0]) from error
        raise DataError(f"cannot write {path}: {_short(error)}") from error


def load_index(path: str | Path, *, verify: bool = True) -> tuple[Layout, dict[str, Any]]:
    """Read an untrusted index file.

    While Faiss reads, its process-wide limits on array sizes and loops are lowered, also for other threads, and restored afterwards.
    Files are read one at a time.

    Args:
        path: the ``.faiss`` file.
        verify: check the sidecar's SHA-256, if any: about a second per GB.

    Returns:
        The verified index, and the sidecar. Without a sidecar file the same
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
        check_stated(path, stated, verify=verify)
    # Faiss also counts an optional table for lists of 4-bit codes, which is never built here.
    with reading(f"{path} is truncated or damaged", 2 * size):
        index = faiss.read_index(str(path))
    layout = layout_of(index, what=str(path), deep=True)
    found = sidecar_document(layout.form, layout.ntotal, layout.codebooks, size, "", None, {})
    if stated is None:
        return layout, {**found, "sha256": None, "versions": {}}
    for key in ("codebooks_fingerprint", "ntotal", "kind"):
        if stated[key] != found[key]:
            raise MismatchError(
                f"{path}: {key.replace('_', ' ')} is {found[key]}, but {sidecar.name} says {stated[key]}: "
                "they belong to different indexes; copy both again, or delete the .json to use the index as it is"
            )
    return layout, stated


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
    size = check_file(path, INDEX_FILE)
    if size == 0:
        raise DataError(f"{path} is empty: build the index again")
    return size


def read_transform(file: BinaryIO, path: Path) -> bytes:
    """Read what is between the header of an index behind a transform and the index.

    Raises:
        DataError: truncated, or not the transform of lists made of codewords.
    """
    start = file.read(16)
    number, kind, width = struct.unpack("<i4sQ", start.ljust(16, b"\0"))
    if number != 1 or kind != b"RmDT" or not 0 < width <= _MAX_WIDTH:
        raise DataError(f"{path} holds no lists of 'gpq index --kind ivf', or it is damaged: build it again")
    more = file.read(4 * width + 9)
    if len(more) < 4 * width + 9:
        raise DataError(f"{path} is truncated: build it again")
    return start + more


def _check_type(path: Path) -> None:
    """Raises DataError: a file of an unsupported type, before Faiss parses it."""
    try:
        with path.open("rb") as file:
            start = file.read(HEADER)
            kind = start[:4]
            if kind == MOVED:
                read_transform(file, path)
                kind = file.read(HEADER)[:4]
            if kind in LISTS:
                file.seek(16, 1)  # number of lists and nprobe
                quantizer = file.read(4)
                if quantizer != FLAT:
                    raise DataError(
                        f"{path}: its coarse quantiser is of type {_name(quantizer)}, expected a flat one (IndexFlatIP)"
                    )
                return
            if kind in WRAPPERS:
                kind = file.read(4)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if kind in _INNER:
        return
    if is_faiss(start):
        raise DataError(
            f"{path} holds no product-quantised codes (type {_name(kind)}): a GPQ index is an IndexPQ"
        )
    raise DataError(f"{path} is not a Faiss index: use the output of 'gpq index' or faiss.write_index")


def _name(kind: bytes) -> str:
    return repr(kind.decode("ascii", "replace") if kind.isalnum() else "damaged")


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


def check_stated(path: Path, stated: dict[str, Any], *, verify: bool) -> None:
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
    with reading(f"{path} is damaged, its header cannot be read", 16 * len(data), lists + 1):
        return faiss.deserialize_index(np.frombuffer(data, np.uint8))


@contextlib.contextmanager
def reading(failure: str, byte_limit: int, loop_limit: int = 0) -> Iterator[None]:
    """Context of a call of Faiss' reader, one at a time, with lowered process-wide limits, but these at least.

    Raises:
        DataError: Faiss cannot read it: ``failure``, and why.
    """
    with _reading:
        before = faiss.get_deserialization_vector_byte_limit(), faiss.get_deserialization_loop_limit()
        faiss.set_deserialization_vector_byte_limit(max(byte_limit, _LEAST_LIMIT))
        faiss.set_deserialization_loop_limit(max(loop_limit, _LOOP_LIMIT))
        try:
            yield
        except (RuntimeError, MemoryError, OverflowError, ValueError, TypeError, AssertionError) as error:
            raise DataError(f"{failure} ({_short(error)}): build it again") from error
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

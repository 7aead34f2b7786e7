"""Description of a path by its content."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import DataError
from .arrays import describe_npy, describe_zip
from .common import KNOWN
from .encoder import SUFFIXES, describe_encoder
from .folders import describe_folder, describe_model, describe_unfinished
from .rows import describe_hdf5, describe_index, describe_json

_MODEL_FILES = {"config.json", "model.safetensors", "metrics.jsonl"}


def info(path: str | Path) -> dict[str, Any]:
    """Describe and verify a file or folder.

    Args:
        path: the file or folder. If it does not exist, an unfinished run of that name is described.

    Returns:
        JSON values. Always: ``kind``, ``path``, ``bytes`` (on disk, the whole folder's for a folder). By kind:

        ``model``: ``method``, ``backbone``, ``input``, ``codebooks``, ``codewords``, ``subdim``, ``bits``,
        ``parameters``, ``classes`` (their number), ``class_names``, ``multi_label``, ``model_fingerprint``,
        ``codebooks_fingerprint``, ``split``, ``data``, ``training``, ``files``, ``versions``.
        ``unfinished training``: ``step``, ``seconds``, ``best_step``, ``validation_map``, ``out``.
        ``unfinished features`` and ``unfinished codes``: ``rows``, ``out``.
        ``features``, ``codes``: as :func:`gpq_faiss.store.describe`, with ``shape`` and ``dtype``.
        ``index``: ``layout``, ``faiss_class``, ``ntotal``, ``bits``, ``code_size``, fingerprints, ``sidecar``, ``verified``
        (whether a sidecar has a SHA-256, which was checked).
        ``shards`` (a manifest): ``ntotal``, fingerprints, ``shards``, ``verified``: each is compared with its SHA-256.
        ``split``: ``protocol``, ``seed``, ``hash``, ``items``, and the number of items per role.
        ``encoder``: ``format``, its metadata (:func:`read_encoder_metadata`).
        ``results`` (HDF5 of ``gpq search``), ``array`` (.npy), ``arrays`` (.npz): ``shape`` and ``dtype`` of each; of .npz also
        ``verified`` (false above 256 MiB unpacked, which is not read).

    Raises:
        DataError: missing, empty, truncated, damaged, or of another kind.
        MismatchError: parts that do not fit together (an index and its sidecar, weights and ``config.json``).
        UsageError: an ONNX file, but neither onnx nor onnxruntime is installed.
    """
    path = Path(path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        if not path.exists():
            partial = path.with_name(f".{path.name}.partial") if path.name else path
            if partial != path and partial.is_dir():
                return describe_unfinished(partial)
            raise DataError(f"{path} not found: {KNOWN} can be described")
        if is_folder:
            return describe_folder(path)
        if not is_file:
            raise DataError(f"{path} is neither a file nor a folder")
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes)")
        with path.open("rb") as file:
            start = file.read(32)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return _describer(path, start)(path)


def _describer(path: Path, start: bytes) -> Callable[[Path], dict[str, Any]]:
    if path.name in _MODEL_FILES and (path.parent / "config.json").is_file():
        return lambda file: describe_model(file.parent)
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return describe_hdf5
    if start.startswith(b"\x93NUMPY"):
        return describe_npy
    if start.startswith(b"PK"):
        return describe_zip
    if start.lstrip().startswith(b"{"):
        return describe_json
    from ...faissio.io import is_faiss

    if is_faiss(start):
        return describe_index
    if path.suffix.lower() == ".onnx":
        return describe_encoder
    return _foreign


def _foreign(path: Path) -> dict[str, Any]:
    hint = SUFFIXES.get(path.suffix.lower()) or {
        ".h5": "HDF5",
        ".hdf5": "HDF5",
        ".npy": "NumPy",
        ".npz": "NumPy",
        ".faiss": "Faiss",
        ".json": "JSON",
    }.get(path.suffix.lower())
    what = (
        f"is not the {hint} file that its name says: it is damaged or foreign"
        if hint
        else "is of an unknown kind"
    )
    raise DataError(f"{path} {what}; {KNOWN} can be described")

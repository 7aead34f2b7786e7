"""Description of files and folders: everything that this package writes, and Faiss indexes.

The kind is detected by content, not by name. Files are read as the stages read them, so that
``info`` also detects damage.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.bits import bits_per_code, code_size
from ..data.arrays import npy_array, npy_header
from ..data.protocols import load_split
from ..encoder import METADATA_FILE, read_encoder_metadata
from ..errors import DataError, MismatchError
from ..faissio.convert import METRICS, from_faiss
from ..faissio.files import read_index
from ..faissio.model import read_description, read_model
from ..files import read_json
from ..indexes.opening import file_kind, open_index
from ..inputs import reading
from ..store.changes import changes_path, read_changes
from ..store.items import items_path
from ..store.rows import PROGRESS, RowReader, codebooks_fingerprint

_SUPPORTED = (
    "a model folder, features.h5, codes.h5, a split, an index, an exported encoder (.onnx, .pt2), "
    ".npy or .npz"
)


def info(path: str | Path) -> dict[str, Any]:
    """Describe and verify a file or folder.

    Args:
        path: the file or folder. If it does not exist, an unfinished run of that name is described.

    Returns:
        JSON values. Always ``kind``, ``path`` and ``bytes`` (of a folder those of all its files).
        ``kind`` is ``model`` (without torch its network is not loaded), ``features``, ``codes``,
        ``index``, ``split``, ``encoder`` (:class:`gpq_faiss.encoder.Metadata`), ``array`` (.npy),
        ``arrays`` (.npz), or ``unfinished``.

    Raises:
        DataError: the file is missing, empty, truncated, damaged, or of another kind.
        MismatchError: parts do not fit together (weights and ``config.json``, an index and its
            changes).
        UsageError: it is an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    try:
        partial = path.with_name(f".{path.name}.partial") if path.name else path
        path = partial if not path.exists() and partial.is_dir() else path
        if not path.is_file() and not path.is_dir():
            raise DataError(f"{path} not found, or no file: {_SUPPORTED} can be described")
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        description = _folder(path) if path.is_dir() else _file(path)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {path}: {reason}") from None
    return {"kind": description["kind"], "path": str(path), "bytes": size, **description}


def _folder(path: Path) -> dict[str, Any]:
    """Describe a model, or unfinished work."""
    if (path / "config.json").exists() or (path / "model.safetensors").exists():
        return _model(path)
    name, file = path.resolve().name, path / PROGRESS
    if not (name.startswith(".") and name.endswith(".partial")):
        raise DataError(
            f"{path} is not a model folder: it has no config.json; {_SUPPORTED} can be described"
        )
    progress = read_json(file, "the progress of an unfinished file") if file.exists() else {}
    rows = {"rows": progress.get("rows")} if isinstance(progress, dict) and progress else {}
    remedy = "the same command continues it (gpq train with --resume)"
    return {"kind": "unfinished", "out": str(path.parent / name[1:-8]), **rows, "remedy": remedy}


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(b"\x93NUMPY"):
        array = npy_array(path)
        return {"kind": "array", **_array(array.shape, array.dtype)}
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return _rows(path)
    if file_kind(path) in ("faiss", "lists"):
        return _index(path)
    if start.lstrip().startswith(b"{"):
        return {"kind": "split", **_split(path)}
    if path.suffix.lower() == ".onnx":
        return _encoder(path)
    if start.startswith(b"PK"):
        return _zip(path)
    raise DataError(
        f"{path} is empty, of an unknown kind, or damaged: {_SUPPORTED} can be described"
    )


def _rows(path: Path) -> dict[str, Any]:
    """Describe a features or codes file."""
    with RowReader(path) as reader:
        header = reader.header
        labelled = 0 if reader.labels is None else int(np.count_nonzero(reader.labels.any(axis=1)))
        return {
            "kind": header.kind,
            "shape": [reader.ntotal, header.width],
            "ntotal": reader.ntotal,
            **_codes(*header.codebooks.shape),
            "labelled": labelled,
            "texts": list(reader.text_columns),
            **header.attributes(),
            "extra": header.extra,
            "versions": reader.versions,
            "classes": len(header.class_names),
            "class_names": list(header.class_names),
        }


def _codes(M: int, K: int, d: int) -> dict[str, int]:
    return {"codebooks": M, "codewords": K, "subdim": d, "bits": M * bits_per_code(K)}


def _model(path: Path) -> dict[str, Any]:
    network: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is not None:
        from ..methods.model import load_model

        loaded = load_model(path).network
        weights = sum(p.numel() for p in loaded.parameters())
        network = {"backbone": loaded.extractors()[0].spec.name, "parameters": weights}
    header, description, file = read_model(path), read_description(path), path / "split.json"
    split = _split(file) if file.is_file() else None  # only evaluation needs it
    if (
        split is not None
        and (description.get("split") or {}).get("hash", split["hash"]) != split["hash"]
    ):
        raise MismatchError(f"{file} is not the split of this model: copy the whole folder again")
    last = (
        "class_names",
        "model_fingerprint",
        "codebooks_fingerprint",
        "data",
        "training",
        "versions",
    )
    return {
        "kind": "model",
        **{key: description.get(key) for key in ("method", "input")},
        **network,
        **_codes(*header.codebooks.shape),
        "classes": len(description["class_names"]),
        **{key: description.get(key) for key in last},
        "split": split,
        "files": {f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
    }


def _array(shape: tuple[int, ...], dtype: object) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype)}


def _zip(path: Path) -> dict[str, Any]:
    """Describe the arrays of an ``.npz`` file, or an encoder in a PyTorch archive."""
    arrays = {}
    with reading(path, "a zip archive"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.filename.endswith(f"/{METADATA_FILE}") for member in members):
            return _encoder(path)
        for member in (member for member in members if member.filename.endswith(".npy")):
            with archive.open(member) as file:
                description = _array(*npy_header(file))
            arrays[member.filename.removesuffix(".npy")] = description
    if not arrays:
        raise DataError(f"{path} is a zip archive without arrays: {_SUPPORTED} can be described")
    return {"kind": "arrays", "arrays": arrays}


def _encoder(path: Path) -> dict[str, Any]:
    metadata = read_encoder_metadata(path)
    shape = _codes(metadata.codebooks, metadata.codewords, metadata.subdim)
    sizes = {"input_shape": ["batch", *metadata.input_shape], "classes": len(metadata.class_names)}
    return {**sizes, **metadata.model_dump(exclude_defaults=True), **shape, "kind": "encoder"}


def _index(path: Path) -> dict[str, Any]:
    """Describe an index, its names, and the changes that a service has made."""
    if file_kind(path) == "faiss":
        contents = from_faiss(read_index(path), str(path))
        if not len(contents.codes):  # of export-faiss: it cannot be searched yet
            return {
                "kind": "index",
                "form": contents.kind,
                "ntotal": 0,
                "metric": METRICS[contents.metric],
                **_codes(*contents.codebooks.shape),
                "codebooks_fingerprint": codebooks_fingerprint(contents.codebooks),
            }
    with open_index(path) as index:
        size = code_size(index.M, index.K)
        changes = read_changes(path, size, index.fingerprint)
        return {
            "kind": "index",
            "form": index.form,
            "ntotal": index.ntotal,
            "dimension": index.d,
            "metric": METRICS[index.metric_type],
            **_codes(*index.codebooks.shape),
            "code_size": size,
            "codebooks_fingerprint": index.fingerprint,
            "names": str(items_path(path)) if index.items is not None else None,
            "changes": str(changes_path(path)) if changes is not None else None,
            "changed_items": 0 if changes is None else len(changes.by_id),
        }


def _split(path: Path) -> dict[str, Any]:
    split = load_split(path)
    named = {"protocol": split.name, "seed": split.seed, "hash": split.hash, "items": split.n}
    roles = {
        role: len(getattr(split, role)) for role in ("query", "labelled", "unlabelled", "database")
    }
    seen_classes = None if split.seen_classes is None else list(split.seen_classes)
    return {**named, **roles, "seen_classes": seen_classes}

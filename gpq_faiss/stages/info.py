"""Description of files and folders: everything that this package writes, and Faiss indexes.

The kind is detected by content, not by name. Files are read as by the stages that use them, so ``info`` also detects damage.
"""

from __future__ import annotations

import importlib.util
import zipfile
from pathlib import Path
from typing import Any

from ..data.arrays import NpyArray, npy_header
from ..data.protocols import load_split
from ..encoder import METADATA_FILE, read_encoder_metadata
from ..errors import DataError, MismatchError
from ..faissio.header import is_faiss
from ..faissio.io import load_index, sidecar_path
from ..faissio.model import read_description, read_model
from ..files import read_json
from ..inputs import reading
from ..store.reader import describe

_KNOWN = (
    "a model folder, features.h5, codes.h5, a split, a Faiss index, a manifest of shards, an exported encoder (.onnx, .pt2), "
    ".npy or .npz"
)


def info(path: str | Path) -> dict[str, Any]:
    """Describe and verify a file or folder.

    Args:
        path: the file or folder. If it does not exist, an unfinished run of that name is described.

    Returns:
        JSON values. Always ``kind``, ``path`` and ``bytes`` (on disk, the whole folder's for a folder). ``kind`` is ``model``
        (without torch its network is not loaded), ``features``, ``codes``, ``index``, ``shards``, ``split``, ``encoder``
        (:class:`gpq_faiss.encoder.Metadata`), ``array`` (.npy), ``arrays`` (.npz), or ``unfinished``. ``verified`` tells of an index
        or shards whether there was a checksum and it matched.

    Raises:
        DataError: missing, empty, truncated, damaged, or of another kind.
        MismatchError: parts that do not fit together (an index and its sidecar, weights and ``config.json``).
        UsageError: an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    try:
        partial = path.with_name(f".{path.name}.partial") if path.name else path
        path = partial if not path.exists() and partial.is_dir() else path
        if not path.is_file() and not path.is_dir():
            raise DataError(f"{path} not found, or no file: {_KNOWN} can be described")
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        found = _folder(path) if path.is_dir() else _file(path)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return {"kind": found["kind"], "path": str(path), "bytes": size, **found}


def _folder(path: Path) -> dict[str, Any]:
    """A model, or unfinished work."""
    if (path / "config.json").exists() or (path / "model.safetensors").exists():
        return _model(path)
    name, file = path.resolve().name, path / "progress.json"
    if not (name.startswith(".") and name.endswith(".partial")):
        raise DataError(f"{path} is not a model folder: it has no config.json; {_KNOWN} can be described")
    progress = read_json(file, "the progress of a partial file") if file.exists() else None
    rows = {"rows": progress.get("rows")} if isinstance(progress, dict) else {}
    remedy = "the same command continues it (gpq train with --resume)"
    return {"kind": "unfinished", "out": str(path.parent / name[1:-8]), **rows, "remedy": remedy}


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(32)
    if start.startswith(b"\x93NUMPY"):
        array = NpyArray(path)
        return {"kind": "array", **_array(array.shape, array.dtype)}
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return describe(path)
    if start.lstrip().startswith(b"{"):
        return _json(path)
    if is_faiss(start):
        return _index(path)
    if path.suffix.lower() == ".onnx":
        return _encoder(path)
    if start.startswith(b"PK"):
        return _zip(path)
    raise DataError(f"{path} is empty, of an unknown kind, or damaged: {_KNOWN} can be described")


def _codes(M: int, K: int, d: int) -> dict[str, int]:
    return {"codebooks": M, "codewords": K, "subdim": d, "bits": M * (K.bit_length() - 1)}


def _model(path: Path) -> dict[str, Any]:
    network: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is not None:
        from ..methods.model import load_model

        loaded = load_model(path).network
        weights = sum(p.numel() for p in loaded.parameters())
        network = {"backbone": loaded.extractors()[0].spec.name, "parameters": weights}
    header, about, file = read_model(path), read_description(path), path / "split.json"
    split = _split(file) if file.is_file() else None  # only evaluation needs it
    if split is not None and (about.get("split") or {}).get("hash", split["hash"]) != split["hash"]:
        raise MismatchError(f"{file} is not the split of this model: copy the whole folder again")
    last = ("class_names", "model_fingerprint", "codebooks_fingerprint", "data", "training", "versions")
    return {
        "kind": "model",
        **{key: about.get(key) for key in ("method", "input")},
        **network,
        **_codes(*header.codebooks.shape),
        "classes": len(about["class_names"]),
        **{key: about.get(key) for key in last},
        "split": split,
        "files": {f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
    }


def _array(shape: tuple[int, ...], dtype: object) -> dict[str, Any]:
    return {"shape": list(shape), "dtype": str(dtype)}


def _zip(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file, or an encoder in a PyTorch archive."""
    arrays = {}
    with reading(path, "a zip archive"), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(member.filename.endswith(f"/{METADATA_FILE}") for member in members):
            return _encoder(path)
        for member in (member for member in members if member.filename.endswith(".npy")):
            with archive.open(member) as file:
                about = _array(*npy_header(file, f"{path}: {member.filename}", member.file_size))
            arrays[member.filename.removesuffix(".npy")] = about
    if not arrays:
        raise DataError(f"{path} is a zip archive without arrays: {_KNOWN} can be described")
    return {"kind": "arrays", "arrays": arrays}


def _encoder(path: Path) -> dict[str, Any]:
    found = read_encoder_metadata(path)
    shape = _codes(found.codebooks, found.codewords, found.subdim)
    sizes = {"input_shape": ["batch", *found.input_shape], "classes": len(found.class_names)}
    return {**sizes, **found.model_dump(exclude_defaults=True), **shape, "kind": "encoder"}


def _index(path: Path) -> dict[str, Any]:
    """A Faiss index and its sidecar."""
    held, sidecar = load_index(path)
    header, beside = held.header, sidecar_path(path)
    stated: dict[str, Any] = {"model_fingerprint": None, "sha256": None, "versions": {}, "extra": {}}
    return {
        "kind": "index",
        "index_kind": header.form,
        "faiss_class": header.faiss_class,
        "ntotal": header.n,
        "dimension": header.width,
        **_codes(*header.codebooks.shape),
        "code_size": header.code_size,
        "own_ids": held.own_ids is not None,
        "codebooks_fingerprint": header.fingerprint,
        **{key: sidecar.get(key, default) for key, default in stated.items()},
        "sidecar": str(beside) if beside.exists() else None,
        "verified": beside.exists(),
    }


def _json(path: Path) -> dict[str, Any]:
    """A split, or a manifest of shards (each verified)."""
    value = read_json(path, "a split or a manifest")
    if isinstance(value, dict) and value.get("kind") == "shards":
        from ..indexes.manifest import read_manifest
        from ..indexes.opening import verify_manifest

        manifest = read_manifest(path)
        verify_manifest(manifest)
        keys = ("ntotal", "codebooks_fingerprint", "model_fingerprint")
        shards = [f"{shard.file} ({shard.ntotal:,} items)" for shard in manifest.shards]
        stated = {key: getattr(manifest, key) for key in keys}
        return {"kind": "shards", **stated, "shards": shards, "verified": True}
    return {"kind": "split", **_split(path)}


def _split(path: Path) -> dict[str, Any]:
    split = load_split(path)
    named = {"protocol": split.name, "seed": split.seed, "hash": split.hash, "items": split.n}
    roles = {role: len(getattr(split, role)) for role in ("query", "labelled", "unlabelled", "database")}
    seen = None if split.seen_classes is None else list(split.seen_classes)
    return {**named, **roles, "seen_classes": seen}

"""Description of files and folders: everything that this package writes, Faiss indexes, and arrays.

The kind is detected by content, not by name. Files are verified as by the stages that use them, so ``info`` also detects damage.
"""

from __future__ import annotations

import importlib.util
import re
import zipfile
from pathlib import Path
from typing import IO, Any

from ..data.arrays import ZIP_ERRORS, npy_header
from ..data.split import load_split
from ..errors import DataError, MismatchError, one_line
from ..exported import METADATA_MEMBER, read_encoder_metadata, verify_archive
from ..faissio.model import read_description, read_model
from ..files import read_json
from ..inputs import parse_json

_MODEL_FILES = {"config.json", "model.safetensors", "metrics.jsonl"}
_MODEL_KEYS = (
    "class_names", "multi_label", "model_fingerprint", "codebooks_fingerprint", "data", "training", "format_version", "versions",
)  # fmt: skip
_UNFINISHED = re.compile(r"^\.(?P<name>.+)\.partial$")
_KNOWN = (
    "a model folder, features.h5, codes.h5, a split, a Faiss index, a manifest of shards, an exported encoder (.onnx, .pt2), .npy or "
    ".npz"
)


def info(path: str | Path) -> dict[str, Any]:
    """Describe and verify a file or folder.

    Args:
        path: the file or folder. If it does not exist, an unfinished run of that name is described.

    Returns:
        JSON values. Always ``kind``, ``path`` and ``bytes`` (on disk, the whole folder's for a folder). ``kind`` is ``model``
        (without torch its network is not loaded), ``features`` or ``codes`` (:func:`gpq_faiss.store.describe`), ``index``,
        ``shards``, ``split``, ``encoder`` (:func:`gpq_faiss.exported.read_encoder_metadata`), ``results`` (of ``gpq search``),
        ``array`` (.npy), ``arrays`` (.npz), or ``unfinished training``, ``unfinished features``, ``unfinished codes``.
        ``verified`` tells whether there was a checksum and it matched: the SHA-256 of an index or shards, the CRCs of archives
        up to 256 MiB.

    Raises:
        DataError: missing, empty, truncated, damaged, or of another kind.
        MismatchError: parts that do not fit together (an index and its sidecar, weights and ``config.json``).
        UsageError: an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    try:
        partial = path.with_name(f".{path.name}.partial") if path.name else path
        if not path.exists() and partial.is_dir():
            path = partial
        if not path.exists():
            raise DataError(f"{path} not found: {_KNOWN} can be described")
        folder = path if path.is_dir() else path.parent
        if path.name in _MODEL_FILES and (folder / "config.json").is_file():
            path = folder
        if not path.is_file() and not path.is_dir():
            raise DataError(f"{path} is neither a file nor a folder")
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        size = sum(file.stat().st_size for file in files)
        found = _folder(path) if path.is_dir() else _file(path, size)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return {"kind": found["kind"], "path": str(path), "bytes": size, **found}


def _file(path: Path, size: int) -> dict[str, Any]:
    if size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    with path.open("rb") as file:
        start = file.read(32)
        if start.startswith(b"\x93NUMPY"):
            file.seek(0)
            return {"kind": "array", **_array(file, size, str(path))}
    if start.startswith(b"\x89HDF\r\n\x1a\n"):
        return _hdf5(path)
    if start.startswith(b"PK"):
        return _zip(path)
    if start.lstrip().startswith(b"{"):
        return _json(path)
    from ..faissio.header import is_faiss

    if is_faiss(start):
        return _index(path)
    if path.suffix.lower() == ".onnx":
        return _encoder(path)
    raise DataError(f"{path} is of an unknown kind, or damaged: {_KNOWN} can be described")


def _codes(shape: tuple[int, ...]) -> dict[str, int]:
    M, K, d = (int(n) for n in shape)
    return {"codebooks": M, "codewords": K, "subdim": d, "bits": M * (K.bit_length() - 1)}


# Folders ---------------------------------------------------------------------------------------------------------


def _folder(path: Path) -> dict[str, Any]:
    if (path / "config.json").exists() or (path / "model.safetensors").exists():
        return _model(path)
    unfinished = _UNFINISHED.match(path.resolve().name)
    if unfinished is None:
        raise DataError(f"{path} is not a model folder: it has no config.json; {_KNOWN} can be described")
    out = str(path.parent / unfinished["name"])
    is_rows = (path / "progress.json").exists() or (path / "ids.raw").exists()
    return _unfinished_rows(path, out) if is_rows else _unfinished_training(path, out)


def _model(path: Path) -> dict[str, Any]:
    network: dict[str, Any] = {}
    if importlib.util.find_spec("torch") is not None:
        from ..nn.model import load_model

        loaded = load_model(path).network
        spec = getattr(getattr(loaded, "backbone", None), "spec", None)
        network = {
            "backbone": getattr(spec, "name", None),
            "parameters": sum(p.numel() for p in loaded.parameters()),
            "dtype": str(next(loaded.parameters()).dtype).removeprefix("torch."),
        }
    header, about = read_model(path), read_description(path)
    split = None  # only evaluation needs it
    if (path / "split.json").is_file():
        split, stated = _split(path / "split.json"), (about.get("split") or {}).get("hash")
        if stated not in (None, split["hash"]):
            raise MismatchError(
                f"{path / 'split.json'} (hash {split['hash']}) is not the split of this model ({stated}): "
                "copy the whole folder again"
            )
    return {
        "kind": "model",
        **{key: about.get(key) for key in ("method", "input")},
        **network,
        **_codes(header.codebooks.shape),
        "classes": len(about["class_names"]),
        **{key: about.get(key) for key in _MODEL_KEYS},
        "split": split,
        "files": {f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
    }


def _unfinished_training(path: Path, out: str) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    found, checkpoint = {"kind": "unfinished training", "out": out}, path / "checkpoint.safetensors"
    if not checkpoint.exists():
        return {**found, "step": 0, "remedy": "nothing is saved yet: run it again"}
    try:
        with safe_open(checkpoint, framework="numpy") as file:
            state = parse_json((file.metadata() or {})["state"])
        progress = {"step": int(state["step"]), "seconds": round(float(state["seconds"]), 3)}
        best = {"best_step": state["best_step"] or None, "validation_map": state["best"]}
        identity = {"run_identity": str(state["identity"])}
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise DataError(
            f"{checkpoint} is damaged ({one_line(error)}): start again with --overwrite"
        ) from None
    return {**found, **progress, **best, **identity, "remedy": "gpq train ... --resume continues it"}


def _unfinished_rows(path: Path, out: str) -> dict[str, Any]:
    kind = next((k for k in ("features", "codes") if (path / f"{k}.raw").exists()), None)
    if kind is None:
        raise DataError(f"{path} is damaged: it has neither features.raw nor codes.raw; delete it")
    rows: Any = 0
    progress, ids = path / "progress.json", path / "ids.raw"
    if progress.exists():
        value = read_json(progress, "the progress of a partial file")
        rows = value.get("rows") if isinstance(value, dict) else None
        if not isinstance(rows, int):
            raise DataError(f"{progress} has no number of rows: it is damaged; delete {path}")
        if (ids.stat().st_size if ids.exists() else 0) < rows * 8:
            raise DataError(f"{path} is damaged: ids.raw is shorter than its {rows:,} rows; delete it")
    remedy = "the same gpq encode command continues it"
    return {"kind": f"unfinished {kind}", "out": out, "rows": rows, "remedy": remedy}


# Files -----------------------------------------------------------------------------------------------------------


def _array(file: IO[bytes], size: int, what: str) -> dict[str, Any]:
    """An array in NumPy's format, by its header; ``size``: bytes available, with the header."""
    shape, fortran, dtype, _ = npy_header(file, what, size)
    return {"shape": list(shape), "dtype": str(dtype), "order": "Fortran" if fortran else "C"}


def _zip(path: Path) -> dict[str, Any]:
    """The arrays of an ``.npz`` file, or an encoder in a PyTorch archive."""
    arrays = {}
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(member.filename.endswith(METADATA_MEMBER) for member in members):
                return _encoder(path)
            if not members or not all(member.filename.endswith(".npy") for member in members):
                raise DataError(
                    f"{path} is a zip archive, but neither .npz nor an encoder of gpq export-encoder"
                )
            verified = verify_archive(archive, path)
            for member in members:
                name = member.filename.removesuffix(".npy")
                with archive.open(member) as file:
                    arrays[name] = _array(file, member.file_size, f"{path} ({name})")
    except ZIP_ERRORS as error:
        raise DataError(
            f"{path} is truncated or damaged ({one_line(error)}): copy or make it again"
        ) from None
    return {"kind": "arrays", "arrays": arrays, "verified": verified}


def _encoder(path: Path) -> dict[str, Any]:
    found = read_encoder_metadata(path)
    M, d = found["codebooks"], found["subdim"]
    side = found.get("image_size")
    shapes = {"vectors": ["batch", M * d], "codes": ["batch", M]}
    return {
        "input_shape": ["batch", *([found["input_width"]] if side is None else [3, side, side])],
        "output_shapes": {name: shapes[name] for name in found["outputs"]},
        "classes": len(found["class_names"]),
        "dtype": "float32",
        **found,
        **_codes((M, found["codewords"], d)),
        "kind": "encoder",
    }


def _hdf5(path: Path) -> dict[str, Any]:
    """Features, codes, or the results of a search."""
    from ..store import describe, read_hdf5_array

    results = {name: read_hdf5_array(path, [name], required=False) for name in ("ids", "scores", "query_ids")}
    arrays = {n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in results.items() if a is not None}
    if len(arrays) == len(results):
        return {"kind": "results", "arrays": arrays}
    found = describe(path)
    kind, names = found.pop("type"), found.pop("classes")
    more = {
        "dtype": "float32" if kind == "features" else "uint8",
        "classes": len(names),
        "class_names": names,
    }
    drop = {"path", "bytes"}
    shape = [found["ntotal"], found.pop("width")]
    return {"kind": kind, "shape": shape, **{k: v for k, v in found.items() if k not in drop}, **more}


def _index(path: Path) -> dict[str, Any]:
    """A Faiss index and its sidecar."""
    from ..faissio.io import load_index, sidecar_path

    held, sidecar = load_index(path)
    header, beside = held.header, sidecar_path(path)
    named = {"layout": header.form, "faiss_class": header.faiss_class, "metric": "inner product"}
    size = {"ntotal": header.n, "shape": [header.n, header.code_size], "dtype": "uint8"}
    row = {"dimension": header.width, **_codes(header.codebooks.shape), "code_size": header.code_size}
    stated: dict[str, Any] = {"model_fingerprint": None, "sha256": None, "versions": {}, "extra": {}}
    stated |= {key: sidecar[key] for key in stated if key in sidecar}
    is_there = {"sidecar": str(beside) if beside.exists() else None, "verified": beside.exists()}
    ids = {"own_ids": held.own_ids is not None, "codebooks_fingerprint": header.fingerprint}
    return {"kind": "index", **named, **size, **row, **ids, **stated, **is_there}


def _json(path: Path) -> dict[str, Any]:
    """A split, a manifest of shards (each verified), or the index that this sidecar belongs to."""
    value = read_json(path, "a split or an index's sidecar")
    if isinstance(value, dict) and value.get("kind") == "shards":
        from ..indexes.manifest import read_manifest, verify_manifest

        manifest = read_manifest(path)
        verify_manifest(manifest)
        keys = ("ntotal", "codebooks_fingerprint", "model_fingerprint")
        shards = [f"{shard.file} ({shard.ntotal:,} items)" for shard in manifest.shards]
        stated = {key: getattr(manifest, key) for key in keys}
        return {"kind": "shards", **stated, "shards": shards, "verified": True}
    if isinstance(value, dict) and {"codebooks_fingerprint", "sha256", "ntotal"} <= set(value):
        index = path.with_name(path.name.removesuffix(".json"))
        if index == path or not index.is_file():
            raise DataError(f"{path} describes an index that is not beside it: copy both files")
        return info(index)
    return {"kind": "split", **_split(path)}


def _split(path: Path) -> dict[str, Any]:
    split = load_split(path)
    named = {"protocol": split.name, "seed": split.seed, "hash": split.hash, "items": split.n}
    roles = {role: len(getattr(split, role)) for role in ("query", "labelled", "unlabelled", "database")}
    return {
        **named,
        **roles,
        "seen_classes": None if split.seen_classes is None else list(split.seen_classes),
    }

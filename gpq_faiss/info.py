"""What a file or folder is: anything that this package writes, a Faiss index, or arrays that it reads.

What a thing is, is read from its content, not from its name. Everything is verified as the stages that use it do;
so ``info`` is also the way to ask whether a file is whole.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from .errors import DataError, MismatchError, UsageError
from .files import read_json

_ENCODER_KIND = "gpq-encoder"
_ENCODER_FORMAT = 1
_ENCODER_MEMBER = "/extra/gpq.json"
_ENCODER_SUFFIXES = {".onnx": "onnx", ".pt2": "torch"}
_HASH_LIMIT = 256 << 20  # larger archives are not read through
_SMALL_JSON = 64 << 20
_MODEL_FILES = {"config.json", "model.safetensors", "metrics.jsonl"}
_UNFINISHED = re.compile(r"^\.(?P<name>.+)\.partial$")
_KNOWN = "a model folder, features.h5, codes.h5, a split, a Faiss index, an exported encoder (.onnx, .pt2), .npy or .npz"


def info(path: str | Path) -> dict[str, Any]:
    """Say what a file or folder is.

    Args:
        path: the file or folder. Where there is none but an unfinished run of that name is, that one is described.

    Returns:
        JSON values. Always there: ``kind``, ``path``, ``bytes`` (on disk, the whole folder's for a folder). By kind:

        ``model``: ``method``, ``backbone``, ``input``, ``codebooks``, ``codewords``, ``subdim``, ``bits``,
        ``parameters``, ``classes`` (their number), ``class_names``, ``multi_label``, ``model_fingerprint``,
        ``codebooks_fingerprint``, ``split``, ``data``, ``training``, ``files``, ``versions``.
        ``unfinished training``: ``step``, ``seconds``, ``best_step``, ``validation_map``, ``out``.
        ``unfinished features`` and ``unfinished codes``: ``rows``, ``out``.
        ``features``, ``codes``: as :func:`gpq_faiss.store.describe`, with ``shape`` and ``dtype``.
        ``index``: ``layout``, ``faiss_class``, ``ntotal``, ``bits``, ``code_size``, fingerprints, ``sidecar``.
        ``split``: ``protocol``, ``seed``, ``hash``, ``items``, and how many of them are in each of its four roles.
        ``encoder``: ``format``, its metadata (:func:`read_encoder_metadata`).
        ``results`` (HDF5 of ``gpq search``), ``array`` (.npy), ``arrays`` (.npz): ``shape`` and ``dtype`` of each.

    Raises:
        DataError: missing, empty, truncated, damaged, or none of these.
        MismatchError: parts that do not belong together (an index and its sidecar, weights and ``config.json``).
        UsageError: an ONNX file, and the package onnx is not there.
    """
    path = Path(path)
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
        if not path.exists():
            partial = path.with_name(f".{path.name}.partial") if path.name else path
            if partial != path and partial.is_dir():
                return _unfinished(partial)
            raise DataError(f"{path} not found: {_KNOWN} can be described")
        if is_folder:
            return _folder(path)
        if not is_file:
            raise DataError(f"{path} is neither a file nor a folder")
        size = path.stat().st_size
        if size == 0:
            raise DataError(f"{path} is empty (0 bytes)")
        with path.open("rb") as file:
            start = file.read(8)
    except (OSError, ValueError) as error:  # a NUL in the name is a ValueError
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    return _describer(path, start)(path)


def _describer(path: Path, start: bytes) -> Callable[[Path], dict[str, Any]]:
    if path.name in _MODEL_FILES and (path.parent / "config.json").is_file():
        return lambda file: _model(file.parent)
    if start == b"\x89HDF\r\n\x1a\n":
        return _hdf5
    if start.startswith(b"\x93NUMPY"):
        return _npy
    if start.startswith(b"PK"):
        return _zip
    if start[:2] in (b"Ix", b"Iw", b"IB", b"IH", b"Il"):
        return _index
    if start.lstrip().startswith(b"{"):
        return _json
    if path.suffix.lower() == ".onnx":
        return _encoder
    return _foreign


def _head(kind: str, path: Path, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "path": str(path), "bytes": _size(path), **more}


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    files = [f for f in path.rglob("*") if f.is_file()] if path.is_dir() else [path]
    return sum(f.stat().st_size for f in files)


def _foreign(path: Path) -> dict[str, Any]:
    hint = _ENCODER_SUFFIXES.get(path.suffix.lower()) or {
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
    raise DataError(f"{path} {what}; {_KNOWN} can be described")


# Folders ---------------------------------------------------------------------------------------------------------


def _folder(path: Path) -> dict[str, Any]:
    if (path / "config.json").exists() or (path / "model.safetensors").exists():
        return _model(path)
    if _UNFINISHED.match(path.resolve().name):
        return _unfinished(path)
    raise DataError(f"{path} is a folder but no model: it has no config.json; {_KNOWN} can be described")


def _model(path: Path) -> dict[str, Any]:
    # Loads the network too: what cannot encode is no model, however well its description reads.
    from .nn.model import load_model

    model = load_model(path)
    description, network = model.description, model.network
    M, K, d = (int(n) for n in model.codebooks.shape)
    spec = getattr(getattr(network, "backbone", None), "spec", None)
    split = _model_split(path, description)
    return _head(
        "model",
        path,
        method=description.get("method"),
        backbone=getattr(spec, "name", None),
        input=description["input"],
        codebooks=M,
        codewords=K,
        subdim=d,
        bits=M * (K.bit_length() - 1),
        parameters=sum(p.numel() for p in network.parameters()),
        dtype=str(next(network.parameters()).dtype).removeprefix("torch."),
        classes=len(model.class_names),
        class_names=list(model.class_names),
        multi_label=bool(description.get("multi_label", False)),
        model_fingerprint=model.fingerprint,
        codebooks_fingerprint=description["codebooks_fingerprint"],
        data=description.get("data"),
        split=split,
        training=description.get("training"),
        files={f.name: f.stat().st_size for f in sorted(path.iterdir()) if f.is_file()},
        format_version=description["format_version"],
        versions=description.get("versions", {}),
    )


def _model_split(path: Path, description: dict[str, Any]) -> dict[str, Any] | None:
    """The split that the model was trained by; None where its file is gone, which nothing but evaluation needs."""
    if not (path / "split.json").is_file():
        return None
    split = _split_summary(path / "split.json")
    stated = (description.get("split") or {}).get("hash")
    if stated is not None and stated != split["hash"]:
        raise MismatchError(
            f"{path / 'split.json'} (hash {split['hash']}) is not the split of this model ({stated}): "
            "copy the whole folder again"
        )
    return split


def _unfinished(path: Path) -> dict[str, Any]:
    match = _UNFINISHED.match(path.resolve().name)
    out = str(path.parent / match["name"]) if match else None
    if (path / "progress.json").exists() or (path / "ids.raw").exists():
        return _unfinished_rows(path, out)
    checkpoint = path / "checkpoint.safetensors"
    if not checkpoint.exists():
        return _head(
            "unfinished training", path, out=out, step=0, remedy="nothing is saved yet: run it again"
        )
    state = _checkpoint(checkpoint)
    return _head(
        "unfinished training",
        path,
        out=out,
        step=int(state["step"]),
        seconds=round(float(state["seconds"]), 3),
        best_step=state["best_step"] or None,
        validation_map=state["best"],
        run_identity=str(state["identity"]),
        remedy="gpq train ... --resume goes on with it",
    )


def _checkpoint(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            state = json.loads((file.metadata() or {})["state"])
        if not isinstance(state, dict) or not {"step", "seconds", "best", "best_step", "identity"} <= set(
            state
        ):
            raise ValueError("no state of a training")
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise DataError(f"{path} is damaged ({_line(error)}): start again with --overwrite") from None
    return state


def _unfinished_rows(path: Path, out: str | None) -> dict[str, Any]:
    kind = next((k for k in ("features", "codes") if (path / f"{k}.raw").exists()), None)
    if kind is None:
        raise DataError(f"{path} is damaged: it has neither features.raw nor codes.raw; delete it")
    rows, progress = 0, path / "progress.json"
    if progress.exists():
        value = read_json(progress, "the progress of a partial file")
        if not isinstance(value, dict) or not isinstance(value.get("rows"), int):
            raise DataError(f"{progress} does not say how many rows are there: it is damaged; delete {path}")
        rows = value["rows"]
        if (path / "ids.raw").stat().st_size < rows * 8 if (path / "ids.raw").exists() else rows > 0:
            raise DataError(f"{path} is damaged: ids.raw is shorter than its {rows:,} rows; delete it")
    return _head(
        f"unfinished {kind}", path, out=out, rows=rows, remedy="the same gpq encode command goes on with it"
    )


# Files of rows and indexes -------------------------------------------------------------------------------------------


def _hdf5(path: Path) -> dict[str, Any]:
    from .store import describe, read_hdf5_array

    results = {name: read_hdf5_array(path, [name], required=False) for name in ("ids", "scores", "query_ids")}
    if all(array is not None for array in results.values()):
        arrays = {
            n: {"shape": list(a.shape), "dtype": str(a.dtype)} for n, a in results.items() if a is not None
        }
        return _head("results", path, arrays=arrays)
    found = describe(path)
    kind, names = str(found.pop("kind", None) or found.pop("type")), list(found.pop("classes"))
    for key in ("type", "path", "bytes"):
        found.pop(key, None)
    return _head(
        kind,
        path,
        shape=[found["ntotal"], found.pop("width")],
        dtype="float32" if kind == "features" else "uint8",
        **found,
        classes=len(names),
        class_names=names,
    )


def _index(path: Path) -> dict[str, Any]:
    from .index.io import load_index, sidecar_path
    from .index.layout import layout_of

    index, sidecar = load_index(path)
    layout = layout_of(index, what=str(path))
    M, K, d = (int(n) for n in layout.codebooks.shape)
    beside = sidecar_path(path)
    return _head(
        "index",
        path,
        layout=layout.kind,
        faiss_class=type(index).__name__,
        metric="inner product",
        ntotal=layout.ntotal,
        shape=[layout.ntotal, layout.code_size],
        dtype="uint8",
        dimension=int(index.d),
        codebooks=M,
        codewords=K,
        subdim=d,
        bits=M * (K.bit_length() - 1),
        code_size=layout.code_size,
        own_ids=layout.mapped,
        model_fingerprint=sidecar["model_fingerprint"],
        codebooks_fingerprint=layout.fingerprint,
        sidecar=str(beside) if beside.exists() else None,
        sha256=sidecar["sha256"],
        created=sidecar["created"],
        versions=sidecar["versions"],
        extra=sidecar.get("extra", {}),
    )


# JSON ------------------------------------------------------------------------------------------------------------------


def _json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _SMALL_JSON:
        return _split(path)
    value = read_json(path, "a split or an index's sidecar")
    if isinstance(value, dict) and {"codebooks_fingerprint", "sha256", "ntotal"} <= set(value):
        index = path.with_name(path.name.removesuffix(".json"))
        if index == path or not index.is_file():
            raise DataError(f"{path} describes an index that is not beside it: copy both files")
        return _index(index)
    return _split(path)


def _split(path: Path) -> dict[str, Any]:
    return _head("split", path, **_split_summary(path))


def _split_summary(path: Path) -> dict[str, Any]:
    from .data.split import load_split

    split = load_split(path)
    return {
        "protocol": split.name,
        "seed": split.seed,
        "hash": split.hash,
        "items": split.n,
        **{role: len(getattr(split, role)) for role in ("query", "labelled", "unlabelled", "database")},
        "seen_classes": None if split.seen_classes is None else list(split.seen_classes),
    }


# Exported encoders -------------------------------------------------------------------------------------------------------


def _encoder(path: Path) -> dict[str, Any]:
    found = read_encoder_metadata(path)
    for key in ("kind", "path", "bytes"):
        found.pop(key, None)
    M, K, d = found["codebooks"], found["codewords"], found["subdim"]
    item = [found["input_width"]] if "input_width" in found else [3, found["image_size"], found["image_size"]]
    outputs = {"vectors": ["batch", M * d], "codes": ["batch", M]}
    return _head(
        "encoder",
        path,
        input_shape=["batch", *item],
        output_shapes={name: outputs[name] for name in found["outputs"]},
        bits=M * (K.bit_length() - 1),
        classes=len(found["class_names"]),
        dtype="float32",
        **found,
    )


def read_encoder_metadata(path: str | Path) -> dict[str, Any]:
    """What a file of :mod:`gpq_faiss.export_encoder` says of itself; nothing in it is run or unpickled.

    Needs no torch: a service can compare ``codebooks_fingerprint`` with that of its index before it answers.

    Returns:
        ``format`` (``onnx`` or ``torch``), ``model_fingerprint``, ``codebooks_fingerprint``, ``input_kind``,
        ``input_width`` or ``image_size``, ``outputs``, ``codebooks`` M, ``codewords`` K, ``subdim`` d, ``class_names``,
        ``multi_label``, ``versions``, ``created``.

    Raises:
        DataError: missing, truncated, damaged, or not made by ``gpq export-encoder``.
        UsageError: an ONNX file, and the package onnx is not there.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not start:
        raise DataError(f"{path} is empty (0 bytes): export the encoder again")
    is_zip = start.startswith(b"PK")
    raw = _torch_metadata(path) if is_zip else _onnx_metadata(path)
    if raw.get("kind") != _ENCODER_KIND:
        raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
    numbers = {"format_version", "input_width", "image_size", "codebooks", "codewords", "subdim"}
    values = {"outputs", "class_names", "multi_label", "versions"}
    try:
        found: dict[str, Any] = {
            key: int(text) if key in numbers else json.loads(text) if key in values else str(text)
            for key, text in raw.items()
        }
        _check_encoder(found)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: its description is damaged ({_line(error)}): export the encoder again"
        ) from None
    if found["format_version"] != _ENCODER_FORMAT:
        raise DataError(
            f"{path} has format {found['format_version']}, this version reads {_ENCODER_FORMAT}: update gpq-faiss"
        )
    return found | {"format": "torch" if is_zip else "onnx"}


def _check_encoder(found: dict[str, Any]) -> None:
    size = "input_width" if found.get("input_kind") == "features" else "image_size"
    needed = {
        "format_version", "model_fingerprint", "codebooks_fingerprint", "input_kind", size, "outputs", "codebooks",
        "codewords", "subdim", "class_names", "versions",
    }  # fmt: skip
    missing = sorted(needed - set(found))
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    if not isinstance(found["class_names"], list) or not isinstance(found["versions"], dict):
        raise ValueError("class names or versions are of the wrong kind")
    if found["outputs"] not in (["vectors"], ["vectors", "codes"]):
        raise ValueError("it names other outputs")
    if min(found[key] for key in (size, "codebooks", "codewords", "subdim")) < 1:
        raise ValueError("a size is below 1")


def _torch_metadata(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(_ENCODER_MEMBER)]
            if len(members) != 1 or members[0].file_size > _SMALL_JSON:
                raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
            _check_archive(archive, path)
            value = json.loads(archive.read(members[0]))
    except (
        zipfile.BadZipFile,
        zlib.error,
        OSError,
        ValueError,
        EOFError,
        NotImplementedError,
        RuntimeError,
    ) as error:
        raise DataError(
            f"{path} is truncated or damaged ({_line(error)}): export the encoder again"
        ) from None
    return value if isinstance(value, dict) else {}


def _onnx_metadata(path: Path) -> dict[str, Any]:
    try:
        import onnx
    except ImportError:
        raise UsageError(
            f"{path}: reading ONNX needs the package onnx: pip install 'gpq-faiss[onnx]'"
        ) from None
    try:
        proto = onnx.load(str(path), load_external_data=False)
        found = {entry.key: entry.value for entry in proto.metadata_props}
        if found.get("kind") == _ENCODER_KIND:
            onnx.checker.check_model(proto)  # protobuf alone takes many a truncated or foreign file
    except Exception as error:  # protobuf's and onnx's errors have no common base
        raise DataError(f"{path} is not an ONNX file, or is damaged ({_line(error)})") from None
    return found


# NumPy ----------------------------------------------------------------------------------------------------------------


def _npy(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        found = _array(file, path.stat().st_size, str(path))
    return _head("array", path, **found)


def _zip(path: Path) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.filename.endswith(_ENCODER_MEMBER) for m in members):
                return _encoder(path)
            if not members or not all(m.filename.endswith(".npy") for m in members):
                raise DataError(
                    f"{path} is a zip archive, but neither .npz nor an encoder of gpq export-encoder"
                )
            _check_archive(archive, path)
            arrays = {}
            for member in members:
                with archive.open(member) as file:
                    name = member.filename.removesuffix(".npy")
                    arrays[name] = _array(file, member.file_size, f"{path} ({name})")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise DataError(f"{path} is truncated or damaged ({_line(error)}): copy or make it again") from None
    return _head("arrays", path, arrays=arrays)


def _check_archive(archive: zipfile.ZipFile, path: Path) -> None:
    """Compare the checksums of a zip archive that is not too large to be read through."""
    if sum(m.file_size for m in archive.infolist()) <= _HASH_LIMIT:
        broken = archive.testzip()
        if broken is not None:
            raise DataError(f"{path} is damaged (in {broken}): copy or make it again")


def _array(file: IO[bytes], size: int, what: str) -> dict[str, Any]:
    """Shape and type of an array in NumPy's format, from its header; ``size`` is what there is, with the header."""
    read = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    try:
        version = np.lib.format.read_magic(file)
        if version not in read:
            raise ValueError(f"format version {version}")
        shape, fortran, dtype = read[version](file)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{what} is not a NumPy array, or is damaged ({_line(error)})") from None
    if dtype.hasobject:
        raise DataError(f"{what} holds Python objects, which are never unpickled: save plain numbers")
    expected = file.tell() + dtype.itemsize * int(np.prod(shape, dtype=object))
    if size != expected:
        raise DataError(
            f"{what} is truncated or damaged: {size:,} bytes where its header asks for {expected:,}"
        )
    return {"shape": [int(n) for n in shape], "dtype": str(dtype), "order": "Fortran" if fortran else "C"}


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:160].rstrip(".: ") if lines else type(error).__name__

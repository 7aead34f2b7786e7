"""Description of exported encoders, without running them."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from ...data.arrays import ZIP_ERRORS
from ...errors import DataError
from ...exported import KIND, open_session, parse_metadata, read_session_metadata
from ...inputs import check_file, parse_json
from .common import ENCODER_MEMBER, SMALL_JSON, check_archive, first_line, head

SUFFIXES = {".onnx": "onnx", ".pt2": "torch"}
"""Of encoder files, and the format that they name."""


def describe_encoder(path: Path) -> dict[str, Any]:
    """An exported encoder, with the shapes of its inputs and outputs."""
    found = read_encoder_metadata(path)
    for key in ("kind", "path", "bytes"):
        found.pop(key, None)
    M, K, d = found["codebooks"], found["codewords"], found["subdim"]
    item = [found["input_width"]] if "input_width" in found else [3, found["image_size"], found["image_size"]]
    outputs = {"vectors": ["batch", M * d], "codes": ["batch", M]}
    return head(
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
    """Metadata of a file of :mod:`gpq_faiss.stages.export_encoder`; nothing in it is run or unpickled.

    Does not need torch: a service can compare ``codebooks_fingerprint`` with that of its index.

    Returns:
        ``format`` (``onnx`` or ``torch``), ``model_fingerprint``, ``codebooks_fingerprint``, ``input_kind``,
        ``input_width`` or ``image_size``, ``outputs``, ``codebooks`` M, ``codewords`` K, ``subdim`` d, ``class_names``,
        ``multi_label``, ``versions``; ``verified``: whether checksums were verified (ONNX has none; archives
        above 256 MiB are not verified).

    Raises:
        DataError: missing, truncated, damaged, or not made by ``gpq export-encoder``.
        UsageError: an ONNX file, but neither onnx nor onnxruntime is installed.
    """
    path = Path(path)
    check_file(path, "an exported encoder")
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not start:
        raise DataError(f"{path} is empty (0 bytes): export the encoder again")
    is_zip = start.startswith(b"PK")
    raw, verified = _torch_metadata(path) if is_zip else (_onnx_metadata(path), False)
    return parse_metadata(raw, path) | {"format": "torch" if is_zip else "onnx", "verified": verified}


def _torch_metadata(path: Path) -> tuple[dict[str, Any], bool]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(ENCODER_MEMBER)]
            if len(members) != 1 or members[0].file_size > SMALL_JSON:
                raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
            verified = check_archive(archive, path)
            value = parse_json(archive.read(members[0]))
    except ZIP_ERRORS as error:
        raise DataError(
            f"{path} is truncated or damaged ({first_line(error)}): export the encoder again"
        ) from None
    return value if isinstance(value, dict) else {}, verified


def _onnx_metadata(path: Path) -> dict[str, Any]:
    try:
        import onnx
    except ImportError:
        return read_session_metadata(open_session(path), path)
    try:
        proto = onnx.load(str(path), load_external_data=False)
        found = {entry.key: entry.value for entry in proto.metadata_props}
        if found.get("kind") == KIND:
            onnx.checker.check_model(proto)  # protobuf accepts many truncated or foreign files
    except Exception as error:  # protobuf's and onnx's errors have no common base
        raise DataError(f"{path} is not an ONNX file, or is damaged ({first_line(error)})") from None
    return found

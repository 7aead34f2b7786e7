"""Encoders of ``gpq export-encoder``: their metadata, and encoding of queries by ONNX, both without torch."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, Json, ValidationError

from .data.base import Dataset, FeatureDataset
from .data.embedder import Embedder
from .errors import DataError, UsageError, one_line
from .inputs import check_file, check_memory, parse_json, reading

METADATA_FILE = "gpq.json"
"""End of the name of the metadata's member in a PyTorch archive."""
_METADATA_LIMIT = 64 << 20  # bytes of that member

_Size = Annotated[int, Field(ge=1, lt=2**31)]


class Metadata(BaseModel):
    """What the file says of itself: all values are text, as in ONNX; lists and dicts as JSON."""

    kind: Literal["gpq-encoder"] = "gpq-encoder"
    format_version: Literal["1"] = "1"
    model_fingerprint: str
    codebooks_fingerprint: str
    input_kind: Literal["features", "images"]
    input_width: Annotated[int, Field(ge=0, lt=2**31)] = 0
    image_size: Annotated[int, Field(ge=0, lt=2**31)] = 0
    codebooks: _Size
    codewords: _Size
    subdim: _Size
    class_names: Json[list[str]]
    versions: Json[dict[str, str]]

    @property
    def input_shape(self) -> list[int]:
        """Of an item."""
        side = self.image_size
        return [self.input_width] if self.input_kind == "features" else [3, side, side]


def read_encoder_metadata(path: str | Path) -> Metadata:
    """Metadata of a file of ``gpq export-encoder``; nothing in it is run or unpickled, and torch is not needed.

    Raises:
        DataError: missing, truncated, damaged, or not made by ``gpq export-encoder``.
        UsageError: an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    with reading(path, "an exported encoder"):
        if not zipfile.is_zipfile(path):
            return _metadata_of(_open_session(path), path)
        with zipfile.ZipFile(path) as archive:
            members = [m for m in archive.infolist() if m.filename.endswith(f"/{METADATA_FILE}")]
            small = len(members) == 1 and members[0].file_size <= _METADATA_LIMIT
            return _parse(parse_json(archive.read(members[0])) if small else {}, path)


def _parse(raw: Any, path: Path) -> Metadata:
    try:
        return Metadata.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = " ".join(f"{'.'.join(map(str, first['loc']))}: {first['msg']}".split())[:160]
        raise DataError(f"{path} was not made by this version of gpq export-encoder ({why})") from None


def _open_session(path: Path) -> Any:
    """An ``onnxruntime.InferenceSession`` of a file, on the CPU."""
    try:
        import onnxruntime
    except ImportError:
        raise UsageError(
            f"{path}: ONNX needs the package onnxruntime: pip install 'gpq-faiss[search]' or 'gpq-faiss[onnx]'"
        ) from None
    check_memory(2 * check_file(path, "an exported encoder"), str(path))
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        # From bytes, so that it cannot refer to other files.
        return onnxruntime.InferenceSession(
            path.read_bytes(), options, providers=["CPUExecutionProvider"], enable_fallback=0
        )
    except Exception as error:  # onnxruntime's errors have no common base
        raise DataError(f"{path} is not an ONNX file, or is damaged ({one_line(error)})") from None


def _metadata_of(session: Any, path: Path) -> Metadata:
    """Metadata of an ONNX file, whose graph must have the input and output that they say."""
    try:
        about = _parse(dict(session.get_modelmeta().custom_metadata_map), path)
        nodes = [*session.get_inputs(), session.get_outputs()[0]]
        found = [(one.name, one.type, one.shape[1:]) for one in nodes]
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not an ONNX file, or is damaged ({one_line(error)})") from None
    vectors = ("vectors", "tensor(float)", [about.codebooks * about.subdim])
    if found != [(about.input_kind, "tensor(float)", about.input_shape), vectors]:
        raise DataError(f"{path}: its graph does not match its metadata: export the encoder again")
    return about


@dataclass(frozen=True)
class OnnxEncoder(Embedder):
    """An exported encoder of queries, run by onnxruntime on the CPU.

    Attributes:
        session: of onnxruntime.
    """

    session: Any

    @classmethod
    def load(cls, path: str | Path, device: str = "cpu") -> OnnxEncoder:
        """Open a file of ``gpq export-encoder``.

        Raises:
            DataError: not such a file, or a damaged one.
            UsageError: a device other than ``cpu`` or ``auto``; or onnxruntime is not installed.
        """
        path = Path(path)
        if device not in ("cpu", "auto"):
            raise UsageError(f"{path} runs on the CPU: leave out --device {device}, or give the model folder")
        session = _open_session(path)
        about = _metadata_of(session, path)
        return cls(
            source=path,
            input_kind=about.input_kind,
            input_width=about.input_width,
            image_size=about.image_size,
            shape=(about.codebooks, about.codewords, about.subdim),
            fingerprint=about.model_fingerprint,
            codebooks_fingerprint=about.codebooks_fingerprint,
            session=session,
        )

    def batch_size(self, dataset: Dataset) -> int:
        """Default number of items per batch."""
        return 1024 if isinstance(dataset, FeatureDataset) else 64

    def _vectors(self, values: NDArray[Any], queries: bool) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        if not queries:
            raise UsageError(
                f"{self.source} makes vectors of queries only (queries=True): items need the model folder"
            )
        x = values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values
        M, _, d = self.shape
        if not len(x):
            return np.empty((0, M * d), np.float32), np.empty(0, np.bool_)
        try:
            vectors = np.ascontiguousarray(self.session.run(["vectors"], {self.input_kind: x})[0], np.float32)
            if vectors.shape != (len(x), M * d):
                raise ValueError(f"vectors {list(vectors.shape)}")
        except Exception as error:  # onnxruntime's errors have no common base
            raise DataError(f"{self.source} does not run ({one_line(error)}): export it again") from None
        # Unit-norm, or nearly zero without direction.
        norms = np.linalg.norm(vectors.reshape(-1, M, d), axis=2)
        return vectors, (np.isfinite(norms) & (norms > 0.5)).all(axis=1)

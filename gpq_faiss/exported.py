"""ONNX encoders of ``gpq export-encoder``: metadata, and encoding of queries without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .data.base import Dataset, FeatureDataset
from .data.embedder import Embedder
from .errors import DataError, UsageError
from .inputs import check_file, check_memory, parse_json

KIND = "gpq-encoder"
"""Value of the metadata key ``kind`` of our files."""
FORMAT_VERSION = 1


def parse_metadata(raw: Mapping[str, str], path: Path) -> dict[str, Any]:
    """Checked metadata of an exported encoder, see :func:`gpq_faiss.stages.info.read_encoder_metadata`.

    Raises:
        DataError: not made by ``gpq export-encoder``, or damaged.
    """
    if raw.get("kind") != KIND:
        raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
    numbers = {"format_version", "input_width", "image_size", "codebooks", "codewords", "subdim"}
    values = {"outputs", "class_names", "multi_label", "versions"}
    try:
        found: dict[str, Any] = {
            key: int(text) if key in numbers else parse_json(text) if key in values else str(text)
            for key, text in raw.items()
        }
        _check(found)
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{path}: its description is damaged ({_line(error)}): export the encoder again"
        ) from None
    if found["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{path} has format {found['format_version']}, this version reads {FORMAT_VERSION}: update gpq-faiss"
        )
    return found


def _check(found: dict[str, Any]) -> None:
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


def open_session(path: Path) -> Any:
    """An ``onnxruntime.InferenceSession`` of a file, on the CPU.

    Raises:
        DataError: missing, or not an ONNX file.
        UsageError: onnxruntime is not installed.
    """
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
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # onnxruntime's errors have no common base
        raise DataError(f"{path} is not an ONNX file, or is damaged ({_line(error)})") from None


def read_session_metadata(session: Any, path: Path) -> dict[str, str]:
    """Metadata of an open file, as text. Raises DataError: damaged."""
    try:
        return dict(session.get_modelmeta().custom_metadata_map)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not an ONNX file, or is damaged ({_line(error)})") from None


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160].rstrip(".: ") or type(error).__name__


@dataclass(frozen=True)
class OnnxEncoder(Embedder):
    """An exported encoder of queries, run by onnxruntime on the CPU.

    Attributes:
        path: the file.
        session: of onnxruntime.
        about: metadata of the file (:func:`gpq_faiss.stages.info.read_encoder_metadata`).
    """

    path: Path
    session: Any
    about: dict[str, Any]

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
        session = open_session(path)
        about = parse_metadata(read_session_metadata(session, path), path)
        size = about["input_width"] if about["input_kind"] == "features" else about["image_size"]
        shape = [size] if about["input_kind"] == "features" else [3, size, size]
        try:
            inputs, outputs = session.get_inputs(), session.get_outputs()
            found = [(one.name, one.type, one.shape[1:]) for one in (*inputs, outputs[0])]
        except UnicodeDecodeError:
            found = []
        wanted = [(about["input_kind"], "tensor(float)", shape)]
        wanted += [("vectors", "tensor(float)", [about["codebooks"] * about["subdim"]])]
        if found != wanted:
            raise DataError(f"{path}: its graph does not match its metadata: export the encoder again")
        return cls(path, session, about)

    @property
    def source(self) -> Path:
        """The file."""
        return self.path

    @property
    def input_kind(self) -> str:
        """``features`` or ``images``."""
        return str(self.about["input_kind"])

    @property
    def input_width(self) -> int:
        """Width of input features (0 for images)."""
        return int(self.about.get("input_width", 0))

    @property
    def image_size(self) -> int:
        """Side of input images in pixels (0 for features)."""
        return int(self.about.get("image_size", 0))

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K and d of the codebooks."""
        return int(self.about["codebooks"]), int(self.about["codewords"]), int(self.about["subdim"])

    @property
    def fingerprint(self) -> str:
        """Hash of weights and codebooks, stored in features, codes and indexes."""
        return str(self.about["model_fingerprint"])

    @property
    def codebooks_fingerprint(self) -> str:
        """Hash of the codebooks; an index must have the same."""
        return str(self.about["codebooks_fingerprint"])

    def batch_size(self, dataset: Dataset) -> int:
        """Default number of items per batch."""
        return 1024 if isinstance(dataset, FeatureDataset) else 64

    def _vectors(self, values: NDArray[Any], queries: bool) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        if not queries:
            raise UsageError(
                f"{self.path} makes vectors of queries only (queries=True): items need the model folder"
            )
        x = values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values
        M, _, d = self.shape
        if not len(x):
            return np.empty((0, M * d), np.float32), np.empty(0, np.bool_)
        try:
            vectors = np.ascontiguousarray(self.session.run(["vectors"], {self.input_kind: x})[0], np.float32)
        except Exception as error:  # onnxruntime's errors have no common base
            raise DataError(f"{self.path} does not run ({_line(error)}): export the encoder again") from None
        if vectors.shape != (len(x), M * d):
            raise DataError(f"{self.path} gives vectors {list(vectors.shape)}: export the encoder again")
        # Unit-norm, or nearly zero without direction.
        norms = np.linalg.norm(vectors.reshape(-1, M, d), axis=2)
        return vectors, (np.isfinite(norms) & (norms > 0.5)).all(axis=1)

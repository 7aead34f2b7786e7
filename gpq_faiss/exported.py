"""Encoders of ``gpq export-encoder``: their metadata, and encoding of queries by ONNX, both without torch."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, Json, ValidationError, model_validator

from .data.arrays import ZIP_ERRORS
from .data.base import Dataset, FeatureDataset
from .data.embedder import Embedder
from .errors import DataError, UsageError, one_line
from .inputs import check_file, check_memory, parse_json

KIND = "gpq-encoder"
"""Value of the metadata key ``kind`` of our files."""
FORMAT_VERSION = 1
METADATA_FILE = "gpq.json"
METADATA_MEMBER = f"/extra/{METADATA_FILE}"
"""End of the name of the metadata's member in a PyTorch archive."""

_METADATA_LIMIT = 64 << 20  # bytes of that member
_CHECKED = 256 << 20  # checksums of larger archives are not verified

_Size = Annotated[int, Field(ge=1, lt=2**31)]


class Metadata(BaseModel):
    """What the file says of itself: all values are text, as in ONNX; lists and dicts as JSON."""

    kind: str
    format_version: int
    model_fingerprint: str
    codebooks_fingerprint: str
    input_kind: Literal["features", "images"]
    input_width: _Size | None = None
    image_size: _Size | None = None
    outputs: Json[list[Literal["vectors", "codes"]]]
    codebooks: _Size
    codewords: _Size
    subdim: _Size
    class_names: Json[list[str]]
    multi_label: Json[bool] | None = None
    versions: Json[dict[str, str]]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.input_width if self.input_kind == "features" else self.image_size) is None:
            raise ValueError(f"the size of {self.input_kind} is missing")
        if self.outputs not in (["vectors"], ["vectors", "codes"]):
            raise ValueError("it names other outputs")
        return self


def read_encoder_metadata(path: str | Path) -> dict[str, Any]:
    """Metadata of a file of ``gpq export-encoder``; nothing in it is run or unpickled.

    Does not need torch: a service can compare ``codebooks_fingerprint`` with that of its index.

    Returns:
        The fields of :class:`Metadata`; ``format`` (``onnx`` or ``torch``); ``verified``: whether checksums were verified (ONNX has
        none; archives above 256 MiB are not verified).

    Raises:
        DataError: missing, truncated, damaged, or not made by ``gpq export-encoder``.
        UsageError: an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    check_file(path, "an exported encoder")
    verified = False
    try:
        with path.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if is_zip:
            with zipfile.ZipFile(path) as archive:
                members = [m for m in archive.infolist() if m.filename.endswith(METADATA_MEMBER)]
                if len(members) != 1 or members[0].file_size > _METADATA_LIMIT:
                    raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
                verified = verify_archive(archive, path)
                raw = parse_json(archive.read(members[0]))
    except ZIP_ERRORS as error:
        raise DataError(
            f"{path} is truncated or damaged ({one_line(error)}): export the encoder again"
        ) from None
    if not is_zip:
        raw = _session_metadata(_open_session(path), path)
    about = _parse(raw if isinstance(raw, dict) else {}, path)
    form = "torch" if is_zip else "onnx"
    return {**about.model_dump(exclude_none=True), "format": form, "verified": verified}


def verify_archive(archive: zipfile.ZipFile, path: Path) -> bool:
    """Verify the checksums of a zip archive; False if it is too large for that. Raises DataError: they differ."""
    if sum(member.file_size for member in archive.infolist()) > _CHECKED:
        return False
    broken = archive.testzip()
    if broken is not None:
        raise DataError(f"{path} is damaged (in {broken}): copy or make it again")
    return True


def _parse(raw: dict[str, Any], path: Path) -> Metadata:
    if raw.get("kind") != KIND:
        raise DataError(f"{path} was not made by gpq export-encoder: it does not name its model")
    try:
        about = Metadata.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        why = " ".join(f"{'.'.join(map(str, first['loc']))} {first['msg']}".split())[:160]
        raise DataError(f"{path}: its description is damaged ({why}): export the encoder again") from None
    if about.format_version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format {about.format_version}, this version reads {FORMAT_VERSION}: update gpq-faiss"
        )
    return about


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
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:  # onnxruntime's errors have no common base
        raise DataError(f"{path} is not an ONNX file, or is damaged ({one_line(error)})") from None


def _session_metadata(session: Any, path: Path) -> dict[str, str]:
    try:
        return dict(session.get_modelmeta().custom_metadata_map)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not an ONNX file, or is damaged ({one_line(error)})") from None


@dataclass(frozen=True)
class OnnxEncoder(Embedder):
    """An exported encoder of queries, run by onnxruntime on the CPU.

    Attributes:
        path: the file.
        session: of onnxruntime.
        about: metadata of the file.
    """

    path: Path
    session: Any
    about: Metadata

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
        found = cls(path, session, _parse(_session_metadata(session, path), path))
        M, _, d = found.shape
        shape = (
            [found.input_width] if found.input_kind == "features" else [3, found.image_size, found.image_size]
        )
        wanted = [(found.input_kind, "tensor(float)", shape), ("vectors", "tensor(float)", [M * d])]
        try:
            nodes = [*session.get_inputs(), session.get_outputs()[0]]
            fits = [(one.name, one.type, one.shape[1:]) for one in nodes] == wanted
        except UnicodeDecodeError:
            fits = False
        if not fits:
            raise DataError(f"{path}: its graph does not match its metadata: export the encoder again")
        return found

    @property
    def source(self) -> Path:
        """The file."""
        return self.path

    @property
    def input_kind(self) -> str:
        """``features`` or ``images``."""
        return self.about.input_kind

    @property
    def input_width(self) -> int:
        """Width of input features (0 for images)."""
        return self.about.input_width or 0

    @property
    def image_size(self) -> int:
        """Side of input images in pixels (0 for features)."""
        return self.about.image_size or 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """M, K and d of the codebooks."""
        return self.about.codebooks, self.about.codewords, self.about.subdim

    @property
    def fingerprint(self) -> str:
        """Hash of weights and codebooks, stored in features, codes and indexes."""
        return self.about.model_fingerprint

    @property
    def codebooks_fingerprint(self) -> str:
        """Hash of the codebooks; an index must have the same."""
        return self.about.codebooks_fingerprint

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
            raise DataError(
                f"{self.path} does not run ({one_line(error)}): export the encoder again"
            ) from None
        if vectors.shape != (len(x), M * d):
            raise DataError(f"{self.path} gives vectors {list(vectors.shape)}: export the encoder again")
        # Unit-norm, or nearly zero without direction.
        norms = np.linalg.norm(vectors.reshape(-1, M, d), axis=2)
        return vectors, (np.isfinite(norms) & (norms > 0.5)).all(axis=1)

"""Reading the description and the codebooks of a model folder, without torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..codes.checks import Codes, Floats, check_codebooks, named_rows
from ..codes.encode import decode, encode
from ..errors import DataError, MismatchError
from ..files import fingerprint, read_json
from ..inputs import reading
from ..store.rows import codebooks_fingerprint

FORMAT_VERSION = 2
"""Format version of model folders."""
_CONFIG_TYPES: dict[str, type] = {
    "format_version": object,
    "method": object,
    "config": dict,
    "input": dict,
    "data": dict,
    "split": dict,
    "class_names": object,
    "run_identity": object,
    "model_fingerprint": str,
    "codebooks_fingerprint": str,
}
"""Keys that ``config.json`` must have, and the types of their values."""
_ITEM_TOLERANCE = 1e-3  # per coordinate; a network's codewords are exact to about 1e-7

_log = logging.getLogger(__name__)


def encode_items(
    vectors: Any, Z: Floats, description: Mapping[str, Any], *, name: str, first_row: int = 0
) -> Codes:
    """Return the codes of item vectors, uint8 [n, code_size].

    Args:
        vectors: float32 [n, M*d].
        Z: codebooks of the model, float32 [M, K, d].
        description: the ``config.json`` of the model.
        name: how errors name the vectors.
        first_row: number of the first row in errors.

    Raises:
        DataError: see :func:`..codes.encode.encode`; or the items of the model consist of
            codewords, and a vector does not: it may be one of a query (rows are named).
    """
    codes = encode(vectors, Z, name=name, first_row=first_row)
    if description.get("items_are_codewords") is True:
        differences = np.abs(vectors - decode(codes, Z)).max(axis=1)
        rows = np.flatnonzero(differences > _ITEM_TOLERANCE)
        if len(rows):
            raise DataError(
                f"{name}: {named_rows(first_row + rows)} cannot be items of this model, whose "
                "items are codewords; are they query vectors? Encode the items with gpq encode"
            )
    return codes


@dataclass(frozen=True)
class ModelHeader:
    """The parts of a model that an index needs, without the weights of the network.

    Attributes:
        codebooks: float32 [M, K, d], unit-norm.
        model_fingerprint: fingerprint of all weights.
        description: contents of ``config.json``.
    """

    folder: Path
    codebooks: Floats
    model_fingerprint: str
    description: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def codebooks_fingerprint(self) -> str:
        """Fingerprint of the codebooks."""
        return codebooks_fingerprint(self.codebooks)

    def query_note(self) -> dict[str, Any]:
        """Return a note for exported files, also logged, if query and item vectors differ."""
        if self.description.get("asymmetric") is not True:
            return {}
        _log.info(
            "%s has different vectors for queries and items: add item vectors (gpq encode, "
            "Encoder.embed) and search with query vectors (Encoder.embed with queries=True, "
            "gpq export-encoder); other programs cannot tell them apart",
            self.folder,
        )
        return {"asymmetric": True}


def read_description(folder: str | Path) -> dict[str, Any]:
    """Return the ``config.json`` of a model folder.

    Raises:
        DataError: it is not a model folder, is damaged, or has another format.
    """
    path = Path(folder) / "config.json"
    if not path.exists():
        raise DataError(
            f"{path.parent.resolve()} is not a model folder, its config.json is not found: "
            "pass the --out of 'gpq train', or, to search, an exported encoder (.onnx)"
        )
    document: dict[str, Any] = read_json(path, "a model's settings (gpq train writes it)")
    if not isinstance(document, dict) or not all(
        key in document and isinstance(document[key], kind) for key, kind in _CONFIG_TYPES.items()
    ):
        raise DataError(f"{path} does not describe a model: it is damaged or foreign")
    if document["format_version"] != FORMAT_VERSION:
        raise DataError(
            f"{path.parent} has model format {document['format_version']}, "
            f"this version reads {FORMAT_VERSION}: train it again, or update gpq-faiss"
        )
    return document


def read_weights(model: ModelHeader) -> bytes:
    """Return the contents of ``model.safetensors``.

    Raises:
        MismatchError: weights and ``config.json`` do not match.
    """
    path = model.folder / "model.safetensors"
    content = path.read_bytes()
    if fingerprint(content) != model.model_fingerprint:
        raise MismatchError(
            f"{path} does not belong to the config.json beside it: copy the whole folder again"
        )
    return content


def read_model(model_dir: str | Path) -> ModelHeader:
    """Read codebooks and fingerprints of a model folder, without torch.

    Raises:
        DataError: a file is missing, damaged or of another format, or the codebooks are invalid.
        MismatchError: codebooks and ``config.json`` do not match.
    """
    from safetensors import safe_open

    folder = Path(model_dir)
    document = read_description(folder)
    path = folder / "model.safetensors"
    content = "the weight file of the model (copy the whole folder)"
    with reading(path, content), safe_open(path, framework="numpy") as tensors:
        codebooks = tensors.get_tensor("codebooks")
    Z = check_codebooks(codebooks, name=f"codebooks of {path}")
    model = ModelHeader(folder, Z, document["model_fingerprint"], document)
    if model.codebooks_fingerprint != document["codebooks_fingerprint"]:
        raise MismatchError(
            f"{path}: its codebooks are not those of config.json: copy the whole model folder again"
        )
    return model

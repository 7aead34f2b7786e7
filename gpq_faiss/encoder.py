"""Encoders turn items or queries into vectors.

They run a model folder, or a file of ``gpq export-encoder``. torch is imported only to load a model
folder; an ONNX file does not need it.
"""

from __future__ import annotations

import functools
import logging
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, Json, NonNegativeInt, PositiveInt

from .codes.checks import check_vectors, named_rows
from .codes.encode import encode as encode_vectors
from .data.base import Dataset, FeatureDataset, Reader
from .data.images import ENCODED, as_array, resize_square, to_pixels
from .errors import DataError, MismatchError, UsageError, needs, optional
from .inputs import reading
from .progress import stage
from .scale import scale_of, scale_warning, typical_scale

if TYPE_CHECKING:
    import torch

    from .methods.model import Model

log = logging.getLogger(__name__)
# A warning that repeats, as of a query that is sent again, is logged once.
_warn_once = functools.lru_cache(256)(log.warning)

Vectors = tuple[NDArray[np.float32], NDArray[np.bool_]]
"""Vectors float32 [n, M·d], and a mask bool [n] of the items that have a code."""


# Items in memory ----------------------------------------------------------------------------------


def to_images(values: Any, size: int) -> NDArray[np.uint8]:
    """Return images uint8 [n, 3, size, size] of paths, encoded bytes, PIL images, arrays or
    tensors: one, a sequence (of any sizes), or a batch.

    Arrays are uint8, or floats from 0 to 1, [H, W, 3], [3, H, W] or [H, W], and batches of these.
    An array [3, H, W] is one image: give batches of grey images as [n, H, W, 1]. For images of 3 by
    3 pixels the last axis is the colour. Other sizes are resized as in training
    (:func:`.images.resize_square`).
    """
    if isinstance(values, ENCODED):
        values = [values]
    elif not isinstance(values, list | tuple):
        values = np.atleast_1d(as_array(values, "images"))
        if values.ndim == 2 or (values.ndim == 3 and 3 in (values.shape[0], values.shape[2])):
            values = values[None]
    pixels = [resize_square(to_pixels(x, f"image {i}"), size) for i, x in enumerate(values)]
    return np.array(pixels, np.uint8).reshape(-1, size, size, 3).transpose(0, 3, 1, 2)


def to_vectors(values: Any, width: int) -> NDArray[np.float32]:
    """Return one or several vectors, in an array, a list or a tensor, as float32 [n, width].

    Raises:
        DataError: they are not numbers, or have another width.
    """
    array = as_array(values, "items to embed")
    return np.require(  # torch warns of arrays that cannot be written
        check_vectors(np.atleast_2d(array), width, name="items to embed", finite=False),
        requirements="W",
    )


# Encoders -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Embedder(ABC):
    """Turns items into vectors float32 [n, M·d].

    Attributes:
        source: file or folder it was loaded from.
        input_kind: ``features`` or ``images``.
        input_width: width of input features (0 for images).
        image_size: side of input images in pixels (0 for features).
        shape: M, K and d of the codebooks.
        fingerprint: hash of weights and codebooks, which files of features and codes record.
        codebooks_fingerprint: hash of the codebooks; an index must have the same.
        scale: typical scale of the training's vectors (:func:`.scale.scale_of`); empty if unknown.
    """

    source: Path
    input_kind: str
    input_width: int
    image_size: int
    shape: tuple[int, int, int]
    fingerprint: str
    codebooks_fingerprint: str
    scale: dict[str, float]

    @property
    def bits(self) -> int:
        """Length of a code in bits."""
        return self.shape[0] * (self.shape[1].bit_length() - 1)

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Default number of items per batch."""

    @abstractmethod
    def _vectors(self, values: NDArray[Any], queries: bool) -> Vectors:
        """Run the network on float32 [n, width] or uint8 [n, 3, size, size]; see :meth:`embed`."""

    def embed(self, values: Any, *, queries: bool = False) -> Vectors:
        """Compute vectors float32 [n, M·d] of items in memory.

        Args:
            values: vectors [n, width] (array, list or tensor), or one or several images in the
                forms of :func:`to_images`. For a data set (``open_data`` opens files) see
                :meth:`embed_rows`.
            queries: compute query vectors instead of item vectors. They differ for models with
                class networks (``recommended``).

        Returns:
            The vectors, and a mask bool [n]: false for items without a code, whose sub-vectors are
                not all finite and non-zero, or which are themselves zero.
        """
        if self.input_kind == "images":
            return self._vectors(to_images(values, self.image_size), queries)
        x = to_vectors(values, self.input_width)
        message = scale_warning(self.scale, scale_of(x), len(x))
        if message is not None:
            _warn_once("%s: %s", self.source, message)
        vectors, valid = self._vectors(x, queries)
        return vectors, valid & x.any(axis=1)

    def check(self, dataset: Dataset) -> None:
        """Check that data fit the model, and warn, once, of vectors at another scale.

        Raises:
            MismatchError: images for vectors or the reverse, or vectors of another width.
        """
        if dataset.kind != self.input_kind:
            raise MismatchError(
                f"{self.source} takes {self.input_kind}, but {dataset.name} holds {dataset.kind}: "
                "give the kind of data that the model was trained on"
            )
        if isinstance(dataset, FeatureDataset) and dataset.matrix.shape[1] != self.input_width:
            raise MismatchError(
                f"{self.source} takes features of width {self.input_width}, but {dataset.name} has "
                f"width {dataset.matrix.shape[1]}: give features from the same extractor"
            )
        if self.scale and isinstance(dataset, FeatureDataset):
            message = scale_warning(self.scale, typical_scale(dataset), len(dataset))
            if message is not None and message not in dataset.notes:
                dataset.notes.append(message)
                log.warning("%s: %s", dataset.name, message)

    def batches(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64],
        *,
        start: int = 0,
        batch_size: int = 0,
        queries: bool = False,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield rows and vectors of the items at ``rows[start:]`` in batches.

        Broken images are left out. ``queries`` is as for :meth:`embed`.
        """
        self.check(dataset)
        size = batch_size or self.batch_size
        side = "queries" if queries else "items"
        batches = [rows[i : i + size] for i in range(start, len(rows), size)]
        with (
            Reader(dataset, self.image_size) as reader,
            stage(f"encoding {side}", len(rows), done=start) as encoding,
        ):
            for batch, (values, ok) in zip(batches, reader.stream(batches), strict=True):
                vectors, valid = self._vectors(values, queries)
                if not valid.all():
                    raise DataError(
                        f"{dataset.name}: the network returns a zero or infinite sub-vector, which "
                        f"has no code, for {named_rows(batch[ok][~valid])}: leave such rows out"
                    )
                yield batch[ok], vectors
                encoding.update(len(batch))

    def embed_rows(
        self, dataset: Dataset, rows: NDArray[np.int64], *, queries: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the concatenated :meth:`batches`: rows int64 [n] and vectors float32 [n, M·d]."""
        readable, vectors = zip(*self.batches(dataset, rows, queries=queries), strict=True)
        return np.concatenate(readable), np.concatenate(vectors)


@dataclass(frozen=True)
class Encoder(Embedder):
    """A model that turns arrays into vectors.

    Attributes:
        model: the loaded model.
        device: its device.
        amp: bf16 autocast of the backbone; a few codes then differ from those of float32.
    """

    model: Model
    device: torch.device
    amp: bool = False

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", *, amp: bool = False) -> Encoder:
        """Load a model folder onto a device.

        Raises:
            DataError, MismatchError: an incomplete or damaged model folder.
            DeviceError: no such device.
            ModuleNotFoundError: torch is not installed.
        """
        import torch

        from .methods.model import load_model
        from .nn.device import resolve_device

        torch_device = resolve_device(device)
        model = load_model(folder, torch_device)
        input_ = model.description["input"]
        if torch_device.type == "cuda" and input_["kind"] == "images":
            model.network.to(memory_format=torch.channels_last)
        M, K, d = model.codebooks.shape
        return cls(
            source=model.folder,
            input_kind=input_["kind"],
            input_width=input_.get("width", 0),
            image_size=input_.get("image_size", 0),
            shape=(M, K, d),
            fingerprint=model.model_fingerprint,
            codebooks_fingerprint=model.codebooks_fingerprint,
            scale=model.description["data"].get("scale", {}),
            model=model,
            device=torch_device,
            amp=amp,
        )

    def _vectors(self, values: NDArray[Any], queries: bool) -> Vectors:
        import torch

        from .nn.device import full_float32, to_input
        from .nn.quantizer import zero_subvectors

        network: Any = self.model.network
        with torch.inference_mode(), full_float32():
            raw = network.raw(to_input(values, self.device), queries=queries, amp=self.amp)
            valid = ~zero_subvectors(raw, network.M).any(dim=1)
            return network.finish(raw).cpu().numpy(), valid.cpu().numpy()

    @property
    def batch_size(self) -> int:
        """Default number of items per batch."""
        from .nn.device import image_batch

        if self.input_kind == "features":
            return max(256, min(4096, (4 << 20) // (4 * self.input_width)))
        return image_batch(1024, self.image_size) if self.device.type == "cuda" else 128

    def code_batches(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64],
        *,
        start: int = 0,
        batch_size: int = 0,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """Yield :meth:`batches` with packed codes uint8 [n, code_size] instead of vectors."""
        for readable, vectors in self.batches(dataset, rows, start=start, batch_size=batch_size):
            yield readable, encode_vectors(vectors, self.model.codebooks)


# Files of gpq export-encoder ----------------------------------------------------------------------

Side = Literal["queries", "items"]
SIDES = {"queries": "query_vectors", "items": "item_vectors"}
"""Side of an exported encoder -> output of its graph."""
METADATA_FILE = "gpq.json"
"""End of the name of the metadata's member in a PyTorch archive."""
_EXPECTED = "an encoder of this version of gpq export-encoder"


class Metadata(BaseModel):
    """Metadata of an exported encoder.

    All values are texts, as in ONNX; lists and dicts are JSON.
    """

    kind: Literal["gpq-encoder"] = "gpq-encoder"
    format_version: Literal["1"] = "1"
    side: Side = "queries"
    model_fingerprint: str
    codebooks_fingerprint: str
    input_kind: Literal["features", "images"]
    input_width: NonNegativeInt = 0
    image_size: NonNegativeInt = 0
    codebooks: PositiveInt
    codewords: PositiveInt
    subdim: PositiveInt
    scale: Json[dict[str, float]] = Field(default_factory=dict)
    class_names: Json[list[str]]
    versions: Json[dict[str, str]]

    @property
    def input_shape(self) -> list[int]:
        """Shape of one item."""
        side = self.image_size
        return [self.input_width] if self.input_kind == "features" else [3, side, side]


def read_encoder_metadata(path: str | Path) -> Metadata:
    """Read the metadata of a file of ``gpq export-encoder``.

    Nothing in the file is run or unpickled, and torch is not needed.

    Raises:
        DataError: missing, truncated, damaged, or not made by ``gpq export-encoder``.
        UsageError: an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    with reading(path, _EXPECTED):
        if not zipfile.is_zipfile(path):
            return Metadata.model_validate(_open_session(path).get_modelmeta().custom_metadata_map)
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(f"/{METADATA_FILE}")]
            return Metadata.model_validate_json(archive.read(names[0] if names else METADATA_FILE))


def _open_session(path: Path) -> Any:
    """Open a file as an ``onnxruntime.InferenceSession`` on the CPU.

    A damaged file raises almost any exception.
    """
    onnxruntime = optional(
        "onnxruntime",
        f"{path}: ONNX needs the package onnxruntime: pip install 'gpq-faiss[search]' or "
        "'gpq-faiss[onnx]'",
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # From bytes, so that it cannot refer to other files.
    return onnxruntime.InferenceSession(
        path.read_bytes(), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )


def graph_input(values: NDArray[Any]) -> NDArray[np.float32]:
    """Return the input of the graph: features unchanged, or images uint8 scaled to [0, 1]."""
    return values.astype(np.float32) / np.float32(255) if values.dtype == np.uint8 else values


@dataclass(frozen=True)
class OnnxEncoder(Embedder):
    """An exported encoder of queries or of items, run by onnxruntime on the CPU.

    Attributes:
        side: ``queries`` or ``items``.
        session: the ``InferenceSession`` of onnxruntime.
    """

    side: Side
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
            raise UsageError(
                f"{path} runs on the CPU: leave out --device {device}, or give the model folder"
            )
        with reading(path, _EXPECTED):
            session = _open_session(path)
            metadata = Metadata.model_validate(session.get_modelmeta().custom_metadata_map)
        return cls(
            source=path,
            input_kind=metadata.input_kind,
            input_width=metadata.input_width,
            image_size=metadata.image_size,
            shape=(metadata.codebooks, metadata.codewords, metadata.subdim),
            fingerprint=metadata.model_fingerprint,
            codebooks_fingerprint=metadata.codebooks_fingerprint,
            scale=metadata.scale,
            side=metadata.side,
            session=session,
        )

    @property
    def batch_size(self) -> int:
        """Default number of items per batch."""
        return 1024 if self.input_kind == "features" else 64

    def _vectors(self, values: NDArray[Any], queries: bool) -> Vectors:
        if queries != (self.side == "queries"):
            raise UsageError(
                f"{self.source} makes vectors of {self.side} only: give the model folder, or the "
                "file of the other side (gpq export-encoder --side)"
            )
        M, _, d = self.shape
        if not len(values):
            return np.empty((0, M * d), np.float32), np.empty(0, np.bool_)
        (vectors,) = self.session.run(None, {self.input_kind: graph_input(values)})
        # Unit-norm, or nearly zero without direction.
        norms = np.linalg.norm(vectors.reshape(len(values), M, d), axis=2)
        return vectors, (np.isfinite(norms) & (norms > 0.5)).all(axis=1)


def open_encoder(
    model: str | Path, device: str = "cpu", *, side: Side = "queries"
) -> Encoder | OnnxEncoder:
    """Open an encoder.

    Args:
        model: a model folder (torch), or an ONNX file of ``gpq export-encoder`` (onnxruntime).
        device: device of the network.
        side: what is to be encoded; a model folder encodes both.

    Raises:
        DataError, MismatchError: neither, or damaged.
        DeviceError: no such device.
        UsageError: a GPU for an ONNX file, or one of the other side; onnxruntime or, for a folder,
            torch is not installed.
    """
    if Path(model).suffix.lower() == ".onnx" and not Path(model).is_dir():
        encoder = OnnxEncoder.load(model, device)
        if encoder.side != side:
            raise UsageError(
                f"{model} makes vectors of {encoder.side}, not of {side}: export the encoder with "
                f"--side {side}"
            )
        return encoder
    try:
        return Encoder.load(model, device)
    except ModuleNotFoundError as error:
        raise UsageError(
            needs(f"the network of {model}", error)
            + ", or give the network in ONNX (gpq export-encoder)"
        ) from None

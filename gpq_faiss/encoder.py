"""Encoders: from items or queries to vectors.

torch is imported only to load a model folder; an ONNX file (:class:`gpq_faiss.exported.OnnxEncoder`) does not need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .codes.encode import encode as encode_vectors
from .data.base import Dataset, FeatureDataset
from .errors import UsageError, needs
from .exported import Embedder, OnnxEncoder, Vectors

if TYPE_CHECKING:
    import torch

    from .methods.model import Model


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

        place = resolve_device(device)
        model = load_model(folder, place)
        if place.type == "cuda" and model.input_kind == "images":
            model.network.to(memory_format=torch.channels_last)
        same = ("input_kind", "input_width", "image_size", "fingerprint")
        about: dict[str, Any] = {name: getattr(model, name) for name in same}
        about |= {"source": model.folder, "shape": model.codebooks.shape}
        codebooks = str(model.description["codebooks_fingerprint"])
        return cls(**about, codebooks_fingerprint=codebooks, model=model, device=place, amp=amp)

    def _vectors(self, values: NDArray[Any], queries: bool) -> Vectors:
        import torch

        from .nn.device import full_float32, to_input
        from .nn.quantizer import zero_subvectors

        network: Any = self.model.network
        with torch.inference_mode(), full_float32():
            raw = network.raw(to_input(values, self.device), queries=queries, amp=self.amp)
            fine = ~zero_subvectors(raw, network.M).any(dim=1)
            return network.finish(raw).cpu().numpy(), fine.cpu().numpy()

    def batch_size(self, dataset: Dataset) -> int:
        """Default number of items per batch."""
        from .nn.device import image_batch

        if isinstance(dataset, FeatureDataset):
            return max(256, min(4096, (4 << 20) // (4 * dataset.width)))
        return image_batch(1024, self.image_size) if self.device.type == "cuda" else 128

    def code_batches(
        self, dataset: Dataset, rows: NDArray[np.int64] | None = None, *, start: int = 0, batch_size: int = 0
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """As :meth:`batches`, with packed codes uint8 [n, code_size] instead of vectors."""
        for positions, vectors in self.batches(dataset, rows, start=start, batch_size=batch_size):
            yield positions, encode_vectors(vectors, self.model.codebooks)


def is_onnx(model: str | Path) -> bool:
    """Whether a path names an ONNX file rather than a model folder."""
    return Path(model).suffix.lower() == ".onnx" and not Path(model).is_dir()


def open_encoder(model: str | Path, device: str = "cpu") -> Encoder | OnnxEncoder:
    """Open an encoder of queries: a model folder (torch), or an ONNX file of ``gpq export-encoder`` (onnxruntime).

    Raises:
        DataError, MismatchError: neither, or damaged.
        DeviceError: no such device.
        UsageError: a GPU for an ONNX file; onnxruntime or, for a folder, torch is not installed.
    """
    if is_onnx(model):
        return OnnxEncoder.load(model, device)
    try:
        return Encoder.load(model, device)
    except ModuleNotFoundError as error:
        remedy = needs(f"the network of {model}", error)
        if remedy is None:
            raise
        raise UsageError(f"{remedy}, or give the network in ONNX (gpq export-encoder)") from None

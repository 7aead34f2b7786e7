"""The network of a model on its own: items or queries in, the vectors that are coded or searched with out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .codes.encode import check_items, items_are_codewords
from .codes.encode import encode as encode_vectors
from .data.base import Dataset, FeatureDataset
from .data.held import to_images, to_vectors
from .data.labels import rows_that
from .data.reader import Reader
from .errors import DataError, MismatchError
from .nn.device import full_float32, image_batch, resolve_device
from .nn.model import Model, load_model
from .nn.quantizer import zero_subvectors
from .progress import Progress, stage


@dataclass(frozen=True)
class Encoder:
    """A model that turns arrays into vectors.

    Attributes:
        model: as loaded.
        device: where it runs.
        amp: bf16 autocast of the backbone; the codes then differ from those of float32 in a few places.
    """

    model: Model
    device: torch.device
    amp: bool = False

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu", *, amp: bool = False) -> Encoder:
        """Load a model folder onto a device.

        Raises:
            DataError, MismatchError: the folder is not a whole model.
            DeviceError: there is no such device.
        """
        torch_device = resolve_device(device)
        model = load_model(folder, torch_device)
        if torch_device.type == "cuda" and model.input_kind == "images":
            model.network.to(memory_format=torch.channels_last)
        return cls(model, torch_device, amp)

    def embed(self, values: Any, *, queries: bool = False) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Vectors float32 [n, M·d] of what a program holds.

        Args:
            values: for a model of features, vectors [n, width] of any numbers (arrays, lists, tensors). For one of images: paths, encoded
                bytes, PIL images, arrays or tensors [H, W, 3] or [3, H, W] of uint8 or of floats from 0 to 1; one, a list, or a batch. They
                are brought to the model's size as in training.
            queries: whether an index is searched with the vectors; without it they are those that are coded. Models with class networks
                (``recommended``) make different ones of them.

        Returns:
            The vectors, and bool [n]: whether each has a direction in every sub-space (if not, it has no code).

        Raises:
            DataError: what is no such item, or cannot be read; names its place.
        """
        vectors, fine = self._on_device(self._input(values), queries)
        return vectors.cpu().numpy(), fine.cpu().numpy()

    def quantize(self, vectors: torch.Tensor) -> NDArray[np.uint8]:
        """Packed codes uint8 [n, code_size] of vectors float32 [n, M·d] of items, on the model's device.

        On a GPU the codewords are found there. They are the same codes, bit for bit
        (:func:`gpq_faiss.gpu.tensors.encode_torch`).

        Raises:
            DataError: a zero sub-vector, which has no direction; vectors of queries, where the model's items are codewords.
        """
        codes = self._quantize(vectors)
        if items_are_codewords(self.model.description):
            check_items(vectors.cpu().numpy(), codes, self.model.codebooks, what="vectors to quantize")
        return codes

    def _quantize(self, vectors: torch.Tensor) -> NDArray[np.uint8]:
        """:meth:`quantize` of the network's own vectors of items: from a GPU only codes travel."""
        if vectors.device.type == "cpu":
            return encode_vectors(vectors.numpy(), self.model.codebooks)
        from .gpu.tensors import encode_torch

        codes: NDArray[np.uint8] = encode_torch(vectors, self.model.codebooks).cpu().numpy()
        return codes

    def _input(self, values: Any) -> NDArray[Any]:
        """``values`` as the network takes them."""
        if self.model.input_kind == "features":
            return to_vectors(values, self.model.input_width)
        return to_images(values, self.model.image_size)

    @torch.inference_mode()
    def _on_device(self, values: NDArray[Any], queries: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """:meth:`embed`, left on the device."""
        x = torch.from_numpy(values)
        if self.device.type == "cuda":
            x = x.pin_memory().to(self.device, non_blocking=True)
        if x.dtype == torch.uint8:
            x = x.to(memory_format=torch.channels_last).float().div_(255)
        network: Any = self.model.network
        with full_float32():
            raw = network.raw(x, queries=queries, amp=self.amp)
        fine = ~zero_subvectors(raw, network.M).any(dim=1)
        return network.finish(raw), fine

    def batch_size(self, dataset: Dataset) -> int:
        """Items per batch, unless told otherwise: enough to fill the device, little enough for memory to stay small."""
        if isinstance(dataset, FeatureDataset):
            return max(256, min(4096, (4 << 20) // (4 * dataset.width)))
        return image_batch(1024, self.model.image_size) if self.device.type == "cuda" else 128

    def check(self, dataset: Dataset) -> None:
        """Refuse data of another kind or width than the model takes.

        Raises:
            MismatchError: naming both.
        """
        model = self.model
        if dataset.kind != model.input_kind:
            raise MismatchError(
                f"{model.folder} takes {model.input_kind}, but {dataset.name} holds {dataset.kind}: "
                "give the kind of data that the model was trained on"
            )
        if isinstance(dataset, FeatureDataset) and dataset.width != model.input_width:
            raise MismatchError(
                f"{model.folder} takes features of width {model.input_width}, but {dataset.name} has width "
                f"{dataset.width}: give features from the same extractor"
            )

    def batches(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64] | None = None,
        *,
        start: int = 0,
        batch_size: int = 0,
        queries: bool = False,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Positions and vectors of the items at ``rows`` (default: all), a batch at a time; broken images are left out.
        ``queries`` as in :meth:`embed`.

        Raises:
            DataError: an item without a direction in some sub-space (rows are named), or too many broken images.
        """
        for positions, vectors in self._batches(dataset, rows, start, batch_size, queries):
            yield positions, vectors.cpu().numpy()

    def code_batches(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64] | None = None,
        *,
        start: int = 0,
        batch_size: int = 0,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.uint8]]]:
        """As :meth:`batches`, packed codes uint8 [n, code_size] in place of vectors (:meth:`quantize`)."""
        for positions, vectors in self._batches(dataset, rows, start, batch_size, False):
            yield positions, self._quantize(vectors)

    def _batches(
        self, dataset: Dataset, rows: NDArray[np.int64] | None, start: int, batch_size: int, queries: bool
    ) -> Iterator[tuple[NDArray[np.int64], torch.Tensor]]:
        self.check(dataset)
        positions = np.arange(len(dataset)) if rows is None else rows
        size = batch_size or self.batch_size(dataset)
        with Reader(dataset, self.model.image_size) as reader:
            parts = [positions[i : i + size] for i in range(start, len(positions), size)]
            for part, (values, ok) in zip(parts, reader.stream(parts), strict=True):
                vectors, there = self._on_device(values, queries)
                fine = there.cpu().numpy()
                if not fine.all():
                    raise DataError(
                        f"{dataset.name}: {rows_that(part[ok][~fine], 'have')} a zero or infinite sub-vector after the "
                        "network, which has no direction and so no code: leave such rows out"
                    )
                yield part[ok], vectors

    def embed_rows(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64],
        *,
        queries: bool = False,
        progress: Progress | None = None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """All of :meth:`batches` together: positions int64 [n] and vectors float32 [n, M·d]."""
        there: list[NDArray[np.int64]] = [np.empty(0, np.int64)]
        parts: list[NDArray[np.float32]] = [
            np.empty((0, self.model.codebooks.shape[0] * self.model.codebooks.shape[2]), np.float32)
        ]
        with stage("encoding queries" if queries else "encoding", len(rows)) as encoding:
            for positions, vectors in self.batches(dataset, rows, queries=queries):
                there.append(positions)
                parts.append(vectors)
                encoding.advance(len(positions))
                if progress is not None:
                    progress(encoding.done, len(rows))
        return np.concatenate(there), np.concatenate(parts)

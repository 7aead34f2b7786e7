"""Interface of methods trained by gradient descent.

The loop (:mod:`gpq_faiss.training.loop`) is the same for all: it draws batches, calls
:meth:`TrainableMethod.losses`, steps the optimizer, and keeps the weights that rank held-out items
best. A method is its network: it provides losses, vectors, and the
:class:`~gpq_faiss.methods.coders.Coder` of its vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import FeatureDataset, Reader
from ..nn.backbones import Backbone
from ..nn.device import full_float32, image_batch, to_input
from ..nn.quantizer import at_least_float32, intra_normalize
from .coders import Coder, ProductCoder


@dataclass(frozen=True)
class TrainingBatch:
    """Items of one step, on the device.

    Attributes:
        x: items, float [B + U, ...]: B labelled ones, then U unlabelled ones (U may be 0).
        y: multi-hot labels of the first B, float [B, C].
        step, steps: index of this step (from 0), and number of steps.
        generator: of this step, on the CPU so that seeds mean the same on every device.
        positions: int64 [B], on the CPU: of the first B among the labelled training items.
        unlabelled_rows: int64 [U], rows of the others in the data set.
    """

    x: Tensor
    y: Tensor
    step: int
    steps: int
    generator: torch.Generator
    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    unlabelled_rows: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


def weighted(parts: dict[str, Tensor], **weights: float) -> dict[str, Tensor]:
    """Return the parts of a loss and their ``total``, in which each has its weight (default: 1)."""
    total = sum((loss * weights.get(name, 1.0) for name, loss in parts.items()), torch.zeros(()))
    return {"total": total, **parts}


def run_network(network: Callable[[Tensor], Tensor], x: Tensor, amp: bool) -> Tensor:
    """Return the output of a network in float32 at least; with ``amp`` it runs in bf16.

    Losses stay outside: their cosines need more than eight bits.
    """
    # An exported graph has no such region.
    with torch.autocast(x.device.type, torch.bfloat16) if amp else nullcontext():
        return at_least_float32(network(x))


class TrainableMethod(nn.Module, ABC):
    """A network, from inputs to vectors float32 [B, D] for :meth:`coder`, with its losses. A step
    is :meth:`before_step`, :meth:`losses`, the optimizer, :meth:`after_step`."""

    backbone: Backbone
    """The network's part from inputs to features, which is the same for all methods."""
    uses_unlabelled: bool = True
    """Whether batches contain unlabelled items; False for supervised methods."""

    @abstractmethod
    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The scalar ``total`` that is minimised, and its parts for the log."""

    @abstractmethod
    def coder(self) -> Coder:
        """Coder of the exported network's vectors, in its current state."""

    def queries(self, x: Tensor) -> Tensor:
        """Vectors of queries, float32 [B, D]."""
        return cast(Tensor, self(x))

    def trunk_features(self, x: Tensor, amp: bool = False) -> Tensor:
        """The features of items before the backbone's head, float32 [B, W]; with ``amp`` the
        backbone runs in bf16."""
        backbone = self.backbone
        return run_network(lambda x: backbone.trunk_features(backbone.input(x)), x, amp)

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """Standardise features, from at most 50,000 training rows: a mean per dimension, and one
        deviation for all, as the last dimensions of a PCA are noise, which one per dimension would
        amplify (GPQ on the CIFAR-10 features: 0.53 instead of 0.57 mAP)."""
        if isinstance(reader.dataset, FeatureDataset):
            values, _ = reader.fetch(rows[:: -(-len(rows) // 50_000)])
            self.backbone.input.fit(torch.from_numpy(values))

    def fit_labels(
        self,
        reader: Reader,
        rows: NDArray[np.int64],
        y: NDArray[np.float32],
        unlabelled: NDArray[np.int64],
    ) -> None:
        """Learn from all labelled training items before the first step, after :meth:`fit_inputs`:
        their rows int64 [n], ascending, and multi-hot labels float32 [n, C]; ``unlabelled``: rows
        of the other training items, int64 [U]."""

    def optimizer(self, config: Config) -> torch.optim.Optimizer:
        """Adam, as in the paper."""
        return torch.optim.Adam(
            [p for p in self.parameters() if p.requires_grad],
            lr=config.training.learning_rate,
            betas=(config.beta1, 0.999),
        )

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Called before step ``step`` of ``steps``; ``sample(n)`` yields blocks of up to n training
        inputs in total."""

    def fit_codebooks(
        self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False
    ) -> None:
        """Compute codewords from the network: before each validation, and after the training with
        ``final``; ``sample`` as in :meth:`before_step`."""

    def after_step(self, step: int, steps: int) -> None:
        """Called after step ``step`` (from 0) of ``steps``."""

    def after_training(self) -> None:
        """Called at the end, when the weights and codebooks are final."""


class CodeMethod(TrainableMethod):
    """Base of the GPQ methods, over any backbone: from images or features to item and query
    vectors, M sub-vectors of unit norm, with the codebooks of the items.

    Attributes:
        asymmetric: whether queries and items have different vectors.
        items_are_codewords: whether item vectors consist of codewords.
    """

    name = "gpq"
    asymmetric = False
    items_are_codewords = False

    def __init__(self, config: Config, backbone: Backbone) -> None:
        super().__init__()
        self.config = config
        self.backbone = backbone
        self.M = config.quantizer.codebooks

    @abstractmethod
    def codebooks(self) -> Tensor:
        """The codewords to export, float [M, K, d], unit-norm."""

    @abstractmethod
    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """Sub-vectors of any length, float32 [B, M·d], of items or queries; with ``amp``, the
        backbone runs in bf16."""

    def finish(self, raw: Tensor) -> Tensor:
        """Sub-vectors of :meth:`raw` made unit-norm, float32 [B, M·d]."""
        return intra_normalize(raw, self.M).flatten(1)

    def queries(self, x: Tensor) -> Tensor:
        return self.finish(self.raw(x, queries=True))

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors to quantise, float32 [B, M·d]."""
        return self.finish(self.raw(x))

    @torch.no_grad()
    def coder(self) -> ProductCoder:
        """Coder of the exported codebooks, inner product."""
        return ProductCoder(self.codebooks().cpu().numpy())


@torch.no_grad()
def embed_rows(
    method: TrainableMethod,
    reader: Reader,
    rows: NDArray[np.int64],
    device: torch.device,
    *,
    queries: bool = False,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Vectors float32 [m, D] of the readable ones of the items ``rows``, int64 [n], and their rows,
    int64 [m]; with ``queries``, as those of queries."""
    method.eval()
    network = method.queries if queries else method
    parts, readable = [], []
    batch = image_batch(1000, reader.image_size)
    for values, ok in reader.stream(rows[i : i + batch] for i in range(0, len(rows), batch)):
        with full_float32():
            parts.append(network(to_input(values, device)).float().cpu().numpy())
        readable.append(ok)
    return np.concatenate(parts), rows[np.concatenate(readable)]

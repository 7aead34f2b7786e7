"""What the training loop needs of a method that learns by gradient.

The loop (:mod:`gpq_faiss.training.loop`) is the same for all: it draws batches, calls :meth:`TrainableMethod.losses`, steps the
optimizer, and keeps the weights that rank the held-out items best. A method is its losses, the network that it exports, and
the :class:`~gpq_faiss.methods.base.Coder` that makes bytes of that network's vectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import TrainingConfig
from ..data.base import FeatureDataset
from ..data.reader import Reader
from ..nn.backbones import Backbone
from ..nn.joint import LABELLED, UNLABELLED, Share
from .base import Coder

_NO_ROWS = np.empty(0, np.int64)


@dataclass(frozen=True)
class TrainingBatch:
    """Items of one step, on the device.

    Attributes:
        x: items, float [B + U, ...]: B labelled ones first, then U unlabelled ones (U may be 0). With ``share``, those of this process
            alone; ``y`` and the rows are of the joint batch all the same.
        y: multi-hot labels of the first B, float [B, C].
        step, steps: number of this step (from 0), and of all.
        generator: source of randomness of this step, on the CPU so that a seed means the same on every device.
        rows: int64 [B], numbers of the labelled items in the data set, for methods that keep something for each of them.
        unlabelled_rows: int64 [U], those of the others.
        share: what of the joint batch of several processes this one has; None: all.
    """

    x: Tensor
    y: Tensor
    step: int
    steps: int
    generator: torch.Generator
    rows: NDArray[np.int64] = field(default_factory=lambda: _NO_ROWS)
    unlabelled_rows: NDArray[np.int64] = field(default_factory=lambda: _NO_ROWS)
    share: Share | None = None

    @property
    def has_unlabelled(self) -> bool:
        """Whether U is above 0, in the joint batch."""
        if self.share is None:
            return len(self.x) > len(self.y)
        return any(unlabelled for _, unlabelled in self.share.counts)

    def joint(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """What ``run`` makes of all items of the joint batch, float [B + U, E], with gradients."""
        return run(self.x) if self.share is None else self.share.joint(run, self.x)

    def joint_apart(self, run: Callable[[Tensor], Tensor]) -> Tensor:
        """As :meth:`joint`, where labelled and unlabelled items, which there must be, are run apart."""
        if self.share is None:
            n = len(self.y)
            return torch.cat([run(self.x[:n]), run(self.x[n:])])
        return torch.cat([self.share.joint(run, self.x, (kind,)) for kind in (LABELLED, UNLABELLED)])


class TrainableMethod(nn.Module, ABC):
    """A network with its losses. A step is :meth:`before_step`, :meth:`losses`, the optimizer, :meth:`after_step`."""

    name: str
    uses_unlabelled: bool = True
    """Whether batches hold unlabelled items; those of supervised methods do not."""
    codes_only: tuple[str, ...] = ()
    """Settings (``section.key``) that only the final :meth:`fit_codebooks` depends on: without held-out items, a training is the same
    whatever they are, and :meth:`adopt` can stand for it."""

    @abstractmethod
    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The scalar ``total`` that is minimised, and its parts for the log."""

    @abstractmethod
    def exported(self) -> nn.Module:
        """The network that encodes: input to the vectors float32 [B, D] that :meth:`coder` takes."""

    @abstractmethod
    def coder(self) -> Coder:
        """What makes codes of the exported network's vectors, as things are now."""

    def extractors(self) -> list[Backbone]:
        """The backbones whose input statistics are to be fitted before the training."""
        return [module for module in self.modules() if isinstance(module, Backbone)]

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """Centre features and divide them by one deviation for all dimensions, of (at most 50,000 of) the training rows.

        One for all, because embeddings often come from a PCA, whose last dimensions are noise: a deviation for each would
        blow it up (measured with GPQ on the CIFAR-10 features: 0.53 instead of 0.57 mAP).
        """
        if isinstance(reader.dataset, FeatureDataset):
            values, _ = reader.fetch(rows[:: -(-len(rows) // 50_000)])
            for backbone in self.extractors():
                backbone.fit_standardisation(torch.from_numpy(values), mode="global")

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Called once before the training, after :meth:`fit_inputs`, with all labelled training items: their rows int64 [n],
        ascending, and multi-hot labels float32 [n, C]. For methods that first work something out from them."""
        del reader, rows, y

    def prepared(self) -> dict[str, Any]:
        """What :meth:`fit_inputs` and :meth:`fit_labels` found, as far as it is no part of the state: tensors, numbers and None."""
        return {}

    def take_prepared(self, found: dict[str, Any]) -> None:
        """Take over what :meth:`prepared` gave in another process."""
        del found

    def adopt(self, other: TrainableMethod) -> None:
        """Take over what ``other`` has learnt, a method of the same settings but for :attr:`codes_only` that is trained already."""
        raise NotImplementedError(type(other).__name__)

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """Adam as the paper has it."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.Adam(parameters, lr=config.learning_rate, betas=(config.beta1, 0.999))

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Called before step ``step`` of ``steps``; ``sample(n)`` gives blocks of up to n training inputs in all."""
        del step, steps, sample

    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Called before :meth:`coder` is, at each validation, and with ``final`` once after the training; ``sample`` as in
        :meth:`before_step`. For methods whose codewords follow from the network as it is."""
        del sample, final

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step ``step`` (from 0)."""
        del step

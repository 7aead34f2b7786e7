"""What the training loop needs of a method that learns by gradient."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import TrainingConfig
from ..data.reader import Reader


@dataclass(frozen=True)
class TrainingBatch:
    """Items of one step, on the device.

    Attributes:
        x: items, float [B + U, ...]: B labelled ones first, then U unlabelled ones (U may be 0).
        y: multi-hot labels of the first B, float [B, C].
        step, steps: number of this step (from 0), and of all.
        generator: source of randomness of this step, on the CPU so that a seed means the same on every device.
    """

    x: Tensor
    y: Tensor
    step: int
    steps: int
    generator: torch.Generator


class TrainableMethod(nn.Module, ABC):
    """A network with its losses. The loop calls :meth:`losses`, steps the optimizer, then :meth:`after_step`."""

    name: str

    @abstractmethod
    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The scalar ``total`` that is minimised, and its parts for the log."""

    @abstractmethod
    def exported(self) -> nn.Module:
        """The network that encodes: input to intra-normalised float32 [B, M·d]."""

    @abstractmethod
    def codebooks(self) -> NDArray[np.float32]:
        """The codebooks to export, float32 [M, K, d], unit-norm."""

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """Take what must be known of the training inputs (their mean and deviation, say) from ``rows``."""
        del reader, rows

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """Adam as the paper has it, with decoupled weight decay where it is not 0."""
        parameters = [p for p in self.parameters() if p.requires_grad]
        betas = (config.beta1, 0.999)
        if config.weight_decay:
            return torch.optim.AdamW(
                parameters, lr=config.learning_rate, betas=betas, weight_decay=config.weight_decay
            )
        return torch.optim.Adam(parameters, lr=config.learning_rate, betas=betas)

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Called before step ``step`` of ``steps``; ``sample(n)`` gives blocks of up to n training inputs in all."""
        del step, steps, sample

    def after_step(self, step: int) -> None:
        """Called after the optimizer's step ``step`` (from 0)."""
        del step

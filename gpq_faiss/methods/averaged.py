"""Common base of the GPQ methods: a network with codewords and a moving average of its weights."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import Config
from ..losses import ExtraLosses
from ..nn.backbones import Backbone
from ..nn.gpq import CodeNetwork
from .coders import ProductCoder
from .trainable import TrainableMethod

Network = TypeVar("Network", bound=CodeNetwork)


class AveragedMethod(TrainableMethod, Generic[Network]):
    """Trains ``network`` and exports the moving average of its weights if ``training.ema`` is not 0.

    Attributes:
        network: the trained network.
        average: its moving average, or None.
        config: configuration of the run.
        extra_losses: losses from plugins.
    """

    name = "gpq"

    def __init__(self, network: Network, config: Config) -> None:
        super().__init__()
        self.network: Network = network
        self.average: Network | None = None
        if config.training.ema:
            self.average = copy.deepcopy(network).requires_grad_(False).eval()
        self.config = config
        self.extra_losses = ExtraLosses(config.loss.extra, config.training.seed)

    def extractors(self) -> list[Backbone]:
        """The backbones of the network and of its average."""
        return [cast(Backbone, net.backbone) for net in (self.network, self.average) if net is not None]

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Update the average, faster at first to forget the random initial weights."""
        if self.average is None:
            return
        weight = 1 - min(self.config.training.ema, (step + 1) / (step + 10))
        for mean, now in zip(
            self.average.state_dict().values(), self.network.state_dict().values(), strict=True
        ):
            if mean.is_floating_point():
                mean.lerp_(now, weight)
            else:
                mean.copy_(now)

    def exported(self) -> Network:
        """The network that encodes: the average if there is one."""
        return self.average if self.average is not None else self.network

    @torch.no_grad()
    def codebooks(self) -> NDArray[np.float32]:
        """Exported codebooks, float32 [M, K, d], unit-norm."""
        return np.ascontiguousarray(self.exported().codebooks().float().cpu().numpy())

    def coder(self) -> ProductCoder:
        """Coder of the exported codebooks, inner product."""
        return ProductCoder(self.codebooks())

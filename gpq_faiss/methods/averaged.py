"""The average of a network's weights over the steps of a training, which is exported in place of the last ones."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def follow(average: nn.Module, network: nn.Module, decay: float, step: int) -> None:
    """Move ``average`` towards ``network`` after step ``step`` (from 0); faster at first, so that it forgets random weights."""
    weight = 1 - min(decay, (step + 1) / (step + 10))
    for mean, now in zip(average.state_dict().values(), network.state_dict().values(), strict=True):
        if mean.is_floating_point():
            mean.lerp_(now, weight)
        else:
            mean.copy_(now)

"""Class networks as the head of a backbone: parallel two-layer perceptrons."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class SubspaceHeads(nn.Module):
    """The class networks: M parallel two-layer perceptrons, from float [B, in_width] to [B, M·d].

    Their errors are less correlated than those of M linear layers. Dropout leaves out the same
    hidden units for all items of a step, so that their products are not computed (Graham,
    Reizenstein and Robinson, "Efficient batchwise dropout training using submatrices", 2015): at
    one half a step takes half the time.

    Args:
        in_width, hidden, d: widths of inputs, hidden layer and outputs of each of the M
            perceptrons.
        dropout: share of the hidden units that are left out in a step of the training.
        noise: standard deviation of Gaussian noise on the inputs in training, independent per
            sub-space.
        generator: draws the initial weights.
    """

    def __init__(
        self,
        in_width: int,
        M: int,
        hidden: int,
        d: int,
        *,
        dropout: float = 0.0,
        noise: float = 0.0,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.noise = noise
        self.into = nn.Parameter(
            torch.randn(M, in_width, hidden, generator=generator) / in_width**0.5
        )
        self.bias = nn.Parameter(torch.zeros(M, 1, hidden))
        self.out = nn.Parameter(torch.randn(M, hidden, d, generator=generator) / hidden**0.5)
        self.active = max(1, round(hidden * (1 - dropout)))

    def forward(self, x: Tensor) -> Tensor:
        """Map trunk features float [B, in_width] to raw sub-vectors [B, M·d]."""
        inputs = x.unsqueeze(0)
        M, W, hidden = self.into.shape
        into, bias, out = (cast(Tensor, p) for p in (self.into, self.bias, self.out))
        if self.training and self.noise:
            inputs = torch.add(
                inputs,
                torch.randn(M, *x.shape, device=x.device, dtype=x.dtype),
                alpha=self.noise,
            )
        if self.training and self.active < hidden:
            units = torch.rand(M, hidden, device=x.device).argsort(dim=1)[:, : self.active]
            into = into.gather(2, units[:, None].expand(-1, W, -1))
            bias = bias.gather(2, units[:, None])
            out = out.gather(1, units[:, :, None].expand(-1, -1, out.shape[2])) * (
                hidden / self.active
            )
        return (
            torch.matmul(torch.matmul(inputs, into).add_(bias).relu_(), out)
            .transpose(0, 1)
            .flatten(1)
        )

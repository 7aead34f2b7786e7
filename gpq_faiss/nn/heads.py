"""One perceptron per sub-space instead of one linear layer. Not in the paper."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .joint import DrawsByRow


class SubspaceHeads(DrawsByRow):
    """M parallel two-layer perceptrons, whose errors are less correlated than those of M linear layers: float [B, in_width] to [B, M·d].

    Args:
        in_width: width of the trunk's features.
        M, hidden, d: sub-spaces, and the hidden units and outputs of each perceptron.
        dropout: share of the hidden units that are zero in training, to the nearest 1/256.
        noise: standard deviation of Gaussian noise on the inputs in training, independent per sub-space.
        generator: for the initial weights.
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
        self.into = nn.Parameter(torch.randn(M, in_width, hidden, generator=generator) / in_width**0.5)
        self.bias = nn.Parameter(torch.zeros(M, 1, hidden))
        self.out = nn.Parameter(torch.randn(M, hidden, d, generator=generator) / hidden**0.5)
        self.kept = max(1, round(256 * (1 - dropout)))

    def forward(self, x: Tensor) -> Tensor:
        """Trunk features float [B, in_width] to raw sub-vectors [B, M·d]."""
        each = x.unsqueeze(0)
        if self.training and self.noise:
            drawn = self.normal(x, [len(self.into), *x.shape], dim=1)
            each = torch.add(each, drawn, alpha=self.noise)
        hidden = torch.matmul(each, self.into).add_(self.bias)
        if self.training and self.kept < 256:
            drawn = self.drawn(lambda size: _random_bytes(size, x.device), list(hidden.shape), dim=1)
            hidden = hidden * (drawn < self.kept).to(hidden.dtype).mul_(256 / self.kept)
        return torch.matmul(hidden.relu_(), self.out).transpose(0, 1).flatten(1)


def _random_bytes(size: list[int], device: torch.device) -> Tensor:
    """Random uint8 of a shape, eight from each random number: the dropout of torch takes a fifth of a step."""
    n = math.prod(size)
    words = torch.empty(-(-n // 8), dtype=torch.int64, device=device).random_(-(2**63), None)
    return words.view(torch.uint8)[:n].view(size)

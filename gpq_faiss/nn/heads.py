"""One perceptron per sub-space instead of one linear layer. Not in the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .joint import DrawsByRow, RowDropout


class SubspaceHeads(DrawsByRow):
    """M parallel two-layer perceptrons, whose errors are less correlated than those of M linear layers: float [B, in_width] to [B, M·d].

    Args:
        in_width: width of the trunk's features.
        M, hidden, d: sub-spaces, and the hidden units and outputs of each perceptron.
        dropout: of the hidden units.
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
        self.dropout = RowDropout(dropout, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Trunk features float [B, in_width] to raw sub-vectors [B, M·d]."""
        each = x.unsqueeze(0)
        if self.training and self.noise:
            each = each + self.noise * self.normal(x, [len(self.into), *x.shape], dim=1)
        hidden = self.dropout(torch.relu(torch.matmul(each, self.into) + self.bias))
        return torch.matmul(hidden, self.out).transpose(0, 1).flatten(1)

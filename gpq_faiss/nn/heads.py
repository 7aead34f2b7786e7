"""A perceptron of its own for every sub-space, in place of the one linear layer. Not in the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .joint import DrawsByRow, RowDropout


class SubspaceHeads(DrawsByRow):
    """M two-layer perceptrons side by side: float [B, in_width] to [B, M·d].

    Sub-vectors that share all but a linear layer err together, and M of them are hardly better than one. Networks of their own err
    independently, so that their mean is right more often.

    Args:
        in_width: width of the trunk's features.
        M: sub-spaces.
        hidden: hidden units of each.
        d: dimensions of a sub-vector.
        dropout: of the hidden units.
        noise: deviation of the Gaussian noise that each sub-space adds to its input in training, drawn for itself.
        generator: source of the first weights.
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
        if min(in_width, M, hidden, d) < 1 or not 0 <= dropout < 1 or noise < 0:
            raise UsageError(
                f"heads of {in_width} inputs, {M} sub-spaces, {hidden} hidden units, {d} outputs, dropout {dropout}, noise {noise}: "
                "sizes start at 1, dropout is in [0, 1), noise is not negative"
            )
        self.noise = noise
        self.into = nn.Parameter(torch.randn(M, in_width, hidden, generator=generator) / in_width**0.5)
        self.bias = nn.Parameter(torch.zeros(M, 1, hidden))
        self.out = nn.Parameter(torch.randn(M, hidden, d, generator=generator) / hidden**0.5)
        self.dropout = RowDropout(dropout, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        """Trunk features float [B, in_width] to raw sub-vectors [B, M·d]."""
        each = x.unsqueeze(0)
        if self.training and self.noise:

            def draw(shape: list[int]) -> Tensor:
                return torch.randn(shape, device=x.device, dtype=x.dtype)

            each = each + self.noise * self.drawn(draw, [len(self.into), *x.shape], dim=1)
        hidden = self.dropout(torch.relu(torch.matmul(each, self.into) + self.bias))
        return torch.matmul(hidden, self.out).transpose(0, 1).flatten(1)

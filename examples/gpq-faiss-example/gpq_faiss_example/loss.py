"""``compactness``: items of a class are drawn to its mean."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional


class Compactness(nn.Module):
    """Mean squared distance of labelled items from the mean of their class, on the unit sphere."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """A scalar.

        Args:
            x: outputs of the network, float [B + U, D]: B labelled items, then U unlabelled ones.
            y: labels of the first B, 0/1 float [B, C].
        """
        x = functional.normalize(x[: len(y)], dim=1)
        share = y / y.sum(dim=0).clamp_min(1)
        means = share.T @ x
        return ((x - y @ means / y.sum(dim=1, keepdim=True).clamp_min(1)) ** 2).sum(dim=1).mean()

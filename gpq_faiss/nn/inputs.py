"""Input normalisation of the backbones; its statistics are buffers, saved with the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import DataError, UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Normalisation(nn.Module):
    """(x - mean) / std for images float [B, 3, S, S] in [0, 1], or for features float [B, W], unchanged until :meth:`fit`.

    Args:
        width: W of features; 0 for images.
        mean, std: of images, per channel; ImageNet's by default.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, width: int, mean: tuple[float, ...] = IMAGENET_MEAN, std: tuple[float, ...] = IMAGENET_STD
    ) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width) if width else torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.ones(width) if width else torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised items, shape as given. Raises UsageError: another shape, or integers."""
        self._check(x)
        return (x - self.mean) / self.std

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Set the mean per dimension and one standard deviation for all, the root of the mean variance, from features float [N, W].

        Raises:
            UsageError: another width.
            DataError: no rows, or not finite.
        """
        self._check(x)
        if not len(x) or not bool(torch.isfinite(x).all()):
            raise DataError("features to standardise by: give at least one row, and no NaN or infinity")
        x = x.double()
        mean = x.mean(0)
        std = (((x - mean) ** 2).sum(0) / len(x)).mean().sqrt().expand_as(mean)
        # A constant dimension becomes 0, not noise amplified by a tiny deviation.
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std <= 1e-7 * mean.abs().clamp_min(1e-30), torch.ones_like(std), std))

    def _check(self, x: Tensor) -> None:
        # Shapes and types only: constants for an exporter.
        wanted = ("B", 3, "S", "S") if self.mean.ndim == 4 else ("B", len(self.mean))
        if x.ndim != len(wanted) or x.shape[1] != wanted[1] or not x.is_floating_point():
            shape = ", ".join(map(str, wanted))
            raise UsageError(f"an input of {x.dtype} {list(x.shape)}: float [{shape}] is needed")

"""Input normalisation of the backbones; its statistics are buffers, saved with the weights."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import DataError, UsageError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageInput(nn.Module):
    """(x - mean) / std for images float [B, 3, S, S] in [0, 1]; the memory format is kept.

    Raises (at the call): UsageError for integer images, another number of channels, or a side below
    ``smallest``.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        smallest: int,
        mean: tuple[float, ...] = IMAGENET_MEAN,
        std: tuple[float, ...] = IMAGENET_STD,
    ) -> None:
        super().__init__()
        self.smallest = smallest
        self.register_buffer("mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, 3, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised images, shape as given."""
        # Shapes and dtypes only: constants for an exporter.
        if x.ndim != 4 or x.shape[1] != 3:
            raise UsageError(f"images of shape {list(x.shape)} given: [B, 3, S, S] is expected")
        if not x.is_floating_point():
            raise UsageError(f"images of {x.dtype} given: float in [0, 1] is expected (divide by 255)")
        if min(x.shape[2], x.shape[3]) < self.smallest:
            raise UsageError(
                f"images of {x.shape[3]}x{x.shape[2]} pixels given: at least {self.smallest} are needed here"
            )
        return (x - self.mean) / self.std


class FeatureInput(nn.Module):
    """(x - mean) / std for features float [B, W]; the identity until :meth:`fit` is called.

    Raises (at the call): UsageError for another width.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("std", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Standardised features, float [B, W]."""
        if x.ndim != 2 or x.shape[1] != self.mean.shape[0]:
            raise UsageError(
                f"features of shape {list(x.shape)} given: [B, {self.mean.shape[0]}] is expected"
            )
        return (x - self.mean) / self.std

    @torch.no_grad()
    def fit(self, x: Tensor) -> None:
        """Set the mean per dimension and one standard deviation for all, the root of the mean variance, from data float [N, W].

        Raises:
            UsageError: another width.
            DataError: no rows, or not finite.
        """
        if x.ndim != 2 or x.shape[1] != self.mean.shape[0]:
            raise UsageError(
                f"features of shape {list(x.shape)} given: [B, {self.mean.shape[0]}] is expected"
            )
        if not len(x):
            raise DataError("no features to standardise by: give at least one row")
        x = x.double()
        mean = x.mean(0)
        variance = (((x - mean) ** 2).sum(0) / len(x)).mean()
        if not bool(torch.isfinite(mean).all() and torch.isfinite(variance)):
            raise DataError("features contain NaN or infinity: leave such rows out")
        std = variance.sqrt().expand_as(mean)
        # A constant dimension becomes 0, not noise amplified by a tiny deviation.
        self.mean.copy_(mean)
        self.std.copy_(torch.where(std <= 1e-7 * mean.abs().clamp_min(1e-30), torch.ones_like(std), std))

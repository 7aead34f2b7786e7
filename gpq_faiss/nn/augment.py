"""Augmentation of image batches on their device.

:func:`random_flip_crop` is that of the authors' recipe; :func:`distort` is for consistency.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def random_flip_crop(
    images: Tensor,
    generator: torch.Generator,
    *,
    flip: bool = True,
    colour: Tensor | None = None,
) -> Tensor:
    """Shift each image at random, and mirror it with probability one half.

    The shift is up to an eighth of the side each way (the authors' 4 pixels at 32).

    Args:
        images: [B, 3, S, S], uint8 or float, before normalisation; the result is in channels-last
            memory format.
        generator: on the CPU, so that it gives the same result on every device.
        flip: False only shifts, with the same draws.
        colour: of the padding, three numbers in the images' range; default: black.
    """
    batch, _, height, width = images.shape
    pad = min(height, width) // 8
    drawn = torch.randint(2 * pad + 1, (2, batch), generator=generator)
    mirrored = (torch.rand(batch, generator=generator) < 0.5) & flip
    device = images.device
    dy, dx, mirrored = (t.to(device, non_blocking=True) for t in (*drawn, mirrored))
    columns = torch.arange(width, device=device).expand(batch, width)
    columns = torch.where(mirrored[:, None], width - 1 - columns, columns) + dx[:, None]
    lines = torch.arange(height, device=device) + dy[:, None]
    image = torch.arange(batch, device=device)[:, None, None]
    fill = torch.zeros(3, device=device) if colour is None else colour
    padded = fill.to(images).view(1, 3, 1, 1).repeat(batch, 1, height + 2 * pad, width + 2 * pad)
    padded[:, :, pad : pad + height, pad : pad + width] = images
    # Advanced indices around the slice put the channels last: [B, H, W, 3].
    return padded[image, :, lines[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale, shear and shift each image at random, change its colours, and hide a square.

    Args:
        images: float [B, 3, S, S] in [0, 1]; so is the result.
        generator: on the CPU, so that it gives the same result on every device.
    """
    batch, _, size, _ = images.shape

    def uniform(limit: float, *shape: int) -> Tensor:
        draws = 2 * torch.rand(batch, *shape, generator=generator) - 1
        return (limit * draws).to(images.device)

    angle, shear, log_scale = uniform(0.5), uniform(0.3), uniform(0.25, 2)
    rows = [angle.cos(), shear - angle.sin(), angle.sin(), angle.cos()]
    linear = torch.stack(rows, dim=1).view(batch, 2, 2) * log_scale.exp().unsqueeze(2)
    affine = torch.cat([linear, uniform(0.25, 2, 1)], dim=2)
    moved = functional.grid_sample(
        images,
        functional.affine_grid(affine, list(images.shape), align_corners=False),
        padding_mode="border",
        align_corners=False,
    )
    grey = moved.mean(dim=1, keepdim=True)
    coloured = grey + (moved - grey) * (1 + uniform(0.8, 1, 1, 1))
    mean = coloured.mean(dim=(1, 2, 3), keepdim=True)
    brightness = uniform(0.2, 1, 1, 1) + uniform(0.08, 3, 1, 1)
    coloured = (coloured - mean) * uniform(0.6, 1, 1, 1).exp() + mean + brightness
    # From the centre of the square in [-1, 1], each way.
    distance = (torch.linspace(-1, 1, size, device=images.device) - uniform(1.0, 2, 1)).abs()
    hidden = (distance < 0.4 + uniform(0.2, 1, 1)).float()
    square = hidden[:, 0, :, None] * hidden[:, 1, None, :]
    return coloured.clamp(0, 1) * (1 - square.unsqueeze(1)) + 0.5 * square.unsqueeze(1)

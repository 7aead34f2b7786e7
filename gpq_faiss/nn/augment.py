"""Augmentation of image batches on their device, as in the authors' recipe.

Images are flipped at random, and cropped after a random shift.
"""

from __future__ import annotations

import torch
from torch import Tensor


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

"""Augmentation of image batches on their device: random flip and shifted crop, as in the authors' recipe.

A batch is augmented by one gather. Random numbers come from an explicit generator; a CPU generator gives the same augmentation on
every device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from .joint import Rows


class FlipCrop(NamedTuple):
    """Augmentation of each image: ``dy``, ``dx`` int64 [B] in 0 .. 2·pad, ``flip`` bool [B]."""

    dy: Tensor
    dx: Tensor
    flip: Tensor


def default_pad(size: int) -> int:
    """Padding in pixels for images of this side: an eighth, the authors' 4 at 32."""
    return size // 8


def draw_flip_crop(batch: int, pad: int, generator: torch.Generator) -> FlipCrop:
    """Draw offsets uniform over 0 .. 2·pad and flips of probability one half, on the generator's device."""
    device = generator.device
    offsets = torch.randint(2 * pad + 1, (2, batch), generator=generator, device=device)
    flip = torch.rand(batch, generator=generator, device=device) < 0.5
    return FlipCrop(offsets[0], offsets[1], flip)


def apply_flip_crop(images: Tensor, draw: FlipCrop, pad: int, colour: Tensor | None = None) -> Tensor:
    """Pad with one colour, crop each image at (dy, dx), then mirror it if ``flip``.

    Args:
        images: [B, 3, H, W], uint8 or float, on any device.
        draw: one entry per image.
        pad: padding on every side in pixels.
        colour: of the padding, three numbers in the images' range; default: black.

    Returns:
        The same shape and dtype, in channels-last memory format.
    """
    batch, _, height, width = images.shape
    device = images.device
    dy, dx, flip = (t.to(device, non_blocking=True) for t in draw)
    columns = torch.arange(width, device=device).expand(batch, width)
    columns = torch.where(flip[:, None], width - 1 - columns, columns) + dx[:, None]
    rows = torch.arange(height, device=device) + dy[:, None]
    image = torch.arange(batch, device=device)[:, None, None]
    padded = F.pad(images, (pad, pad, pad, pad))
    if colour is not None:
        inside = F.pad(torch.ones((height, width), dtype=torch.bool, device=device), (pad, pad, pad, pad))
        padded = torch.where(inside, padded, colour.to(images).view(1, 3, 1, 1))
    # Advanced indices around the slice put the channels last: [B, H, W, 3].
    return padded[image, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def random_flip_crop(
    images: Tensor,
    generator: torch.Generator,
    *,
    pad: int | None = None,
    flip: bool = True,
    colour: Tensor | None = None,
    rows: Rows | None = None,
) -> Tensor:
    """Flip each image with probability one half and shift it by up to ``pad`` pixels each way.

    Args:
        images: [B, 3, S, S], uint8 or float, before normalisation, on any device.
        generator: random generator; a CPU one gives the same result on every device.
        pad: largest shift in pixels; ``None``: :func:`default_pad`.
        flip: False only shifts, with the same draws.
        colour: as for :func:`apply_flip_crop`.
        rows: rows of a joint batch that these images are, to get the same draws as one process.

    Returns:
        The same shape, dtype and device, in channels-last memory format.

    Raises:
        UsageError: not a batch of images, or a negative ``pad``.
    """
    if images.ndim != 4:
        raise UsageError(f"images of shape {list(images.shape)} given: [B, 3, S, S] is expected")
    pad = default_pad(min(images.shape[2:])) if pad is None else pad
    if pad < 0:
        raise UsageError(f"pad is {pad}: it must not be negative")
    draw = draw_flip_crop(len(images) if rows is None else rows.total, pad, generator)
    if rows is not None:
        draw = FlipCrop(*(t[rows.mine] for t in draw))
    draw = draw if flip else draw._replace(flip=torch.zeros_like(draw.flip))
    return apply_flip_crop(images, draw, pad, colour)

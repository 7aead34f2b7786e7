"""The batched flip and crop against a loop over images."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.errors import UsageError
from gpq_faiss.nn.augment import FlipCrop, apply_flip_crop, default_pad, draw_flip_crop, random_flip_crop


def naive(image: Tensor, dy: int, dx: int, flip: bool, pad: int, colour: Tensor | None = None) -> Tensor:
    """One image [3, H, W], pixel by pixel."""
    out = torch.zeros_like(image)
    if colour is not None:
        out += colour.view(3, 1, 1)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            y, x = i + dy - pad, (width - 1 - j if flip else j) + dx - pad
            if 0 <= y < height and 0 <= x < width:
                out[:, i, j] = image[:, y, x]
    return out


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(2, 6), st.integers(2, 6), st.integers(0, 3), st.integers(0, 999))
def test_batch_equals_loop(batch: int, height: int, width: int, pad: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (batch, 3, height, width), generator=generator, dtype=torch.uint8)
    draw = draw_flip_crop(batch, pad, generator)
    for typed in (images, images.float() / 255):
        got = apply_flip_crop(typed, draw, pad)
        assert got.dtype == typed.dtype
        for b in range(batch):
            want = naive(typed[b], int(draw.dy[b]), int(draw.dx[b]), bool(draw.flip[b]), pad)
            assert torch.equal(got[b], want)
    colour = torch.rand(3, generator=generator)
    typed = images.float() / 255
    got = apply_flip_crop(typed, draw, pad, colour.view(1, 3, 1, 1))
    for b in range(batch):
        want = naive(typed[b], int(draw.dy[b]), int(draw.dx[b]), bool(draw.flip[b]), pad, colour)
        assert torch.equal(got[b], want)


def test_draws_are_uniform_and_by_seed() -> None:
    images = torch.rand(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    a, b, c = (random_flip_crop(images, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert a.is_contiguous(memory_format=torch.channels_last)
    draw = draw_flip_crop(9000, 4, torch.Generator().manual_seed(3))
    for offsets in (draw.dy, draw.dx):
        assert torch.bincount(offsets, minlength=9).min() > 850  # 1000 expected each, deviation 30
        assert int(offsets.max()) == 8
    assert 4200 < int(draw.flip.sum()) < 4800
    still = FlipCrop(torch.full((6,), 4), torch.full((6,), 4), torch.zeros(6, dtype=torch.bool))
    assert torch.equal(apply_flip_crop(images, still, 4), images)


def test_padding_follows_the_size() -> None:
    assert [default_pad(s) for s in (8, 32, 64, 224)] == [1, 4, 8, 28]
    ones = torch.ones(200, 3, 32, 32)
    kept = random_flip_crop(ones, torch.Generator().manual_seed(0))[:, 0].sum(dim=(1, 2))
    assert int(kept.min()) == 28 * 28  # shifted by 4 both ways at the most
    assert torch.equal(random_flip_crop(ones, torch.Generator().manual_seed(0), pad=0), ones)
    with pytest.raises(UsageError, match="pad is -1"):
        random_flip_crop(ones, torch.Generator(), pad=-1)
    with pytest.raises(UsageError, match=r"\[3, 32, 32\] given"):
        random_flip_crop(ones[0], torch.Generator())

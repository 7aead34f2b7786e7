"""The batched flip and crop against a loop over images; distorted images."""

import pytest
import torch

from gpq_faiss.nn.augment import distort, random_flip_crop


def naive(image, dy, dx, flip, pad, colour):
    """One image [3, H, W], pixel by pixel."""
    out = torch.zeros_like(image) + colour.to(image.dtype).view(3, 1, 1)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            y, x = i + dy - pad, (width - 1 - j if flip else j) + dx - pad
            if 0 <= y < height and 0 <= x < width:
                out[:, i, j] = image[:, y, x]
    return out


@pytest.mark.parametrize("size", [7, 8, 16])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("typed", [torch.uint8, torch.float32])
def test_batch_equals_loop(size, flip, typed):
    images = torch.randint(
        0, 256, (9, 3, size, size), generator=torch.Generator().manual_seed(size)
    ).to(typed)
    for colour in (None, torch.tensor([3.0, 200.0, 7.0])):
        result = random_flip_crop(
            images, torch.Generator().manual_seed(1), flip=flip, colour=colour
        )
        assert result.dtype == typed
        assert result.is_contiguous(memory_format=torch.channels_last)
        generator = torch.Generator().manual_seed(1)
        pad = size // 8
        dy, dx = torch.randint(2 * pad + 1, (2, 9), generator=generator).tolist()
        mirrored = (torch.rand(9, generator=generator) < 0.5).tolist()
        padding = torch.zeros(3) if colour is None else colour
        for b in range(9):
            expected = naive(images[b], dy[b], dx[b], flip and mirrored[b], pad, padding)
            assert torch.equal(result[b], expected)


def test_distorted_images_are_images_that_differ():
    images = torch.rand(1, 3, 12, 12, generator=torch.Generator().manual_seed(0)).repeat(5, 1, 1, 1)
    result = distort(images, torch.Generator().manual_seed(1))
    assert result.shape == images.shape
    assert 0 <= result.min() < result.max() <= 1
    assert torch.equal(result, distort(images, torch.Generator().manual_seed(1)))
    assert all(not torch.equal(result[i], result[j]) for i in range(5) for j in range(i))

"""Float32 as float32, and batches of images that fit."""

import pytest

from gpq_faiss.nn.device import image_batch


@pytest.mark.parametrize("limit", [1, 128, 1024])
def test_a_batch_of_images_has_bounded_pixels(limit):
    assert image_batch(limit, 32) == image_batch(limit, 64) == limit
    sizes = [image_batch(limit, side) for side in range(1, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(
        n == min(16, limit) or n * side**2 <= limit * 64**2 for side, n in enumerate(sizes, 1)
    )
    assert sizes[-1] >= min(16, limit)

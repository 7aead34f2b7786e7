"""Float32 as float32, and batches of images that fit."""

import pytest

from gpq_faiss.nn.device import image_batch


@pytest.mark.parametrize("most", [1, 128, 1024])
def test_a_batch_of_images_has_bounded_pixels(most):
    assert image_batch(most, 32) == image_batch(most, 64) == most
    sizes = [image_batch(most, side) for side in range(1, 1000)]
    assert sizes == sorted(sizes, reverse=True)
    assert all(n == min(16, most) or n * side**2 <= most * 64**2 for side, n in enumerate(sizes, 1))
    assert sizes[-1] >= min(16, most)

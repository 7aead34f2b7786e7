"""Images and vectors in memory: every form of the same item gives the same array."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gpq_faiss.data.images import decode_image, resize_square, to_images, to_vectors
from gpq_faiss.errors import DataError


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(0, 2**32 - 1))
def test_every_form_of_an_image_is_that_image(
    tmp_path_factory: pytest.TempPathFactory, height: int, width: int, seed: int
) -> None:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    path = tmp_path_factory.mktemp("held") / "x.png"
    Image.fromarray(pixels).save(path)
    expected = resize_square(decode_image(path), 16).transpose(2, 0, 1)[None]
    chw = pixels.transpose(2, 0, 1)
    floats = pixels.astype(np.float64) / 255
    one = [path, str(path), path.read_bytes(), Image.open(path), pixels, torch.from_numpy(pixels)]
    forms = [
        *one,
        [path],
        [Image.open(path)],
        pixels[None],
        [pixels],
        floats,
        floats.astype(np.float32)[None],
    ]
    if width != 3:
        forms += [
            chw,
            chw[None],
            torch.from_numpy(chw.copy()),
            torch.from_numpy(chw / 255)[None].requires_grad_(),
        ]
    for form in forms:
        np.testing.assert_array_equal(to_images(form, 16), expected)


def test_sizes_and_kinds_may_be_mixed(tmp_path: Path) -> None:
    Image.new("L", (9, 7), 90).save(tmp_path / "grey.png")
    mixed = [tmp_path / "grey.png", np.full((5, 6, 3), 90, np.uint8), np.full((4, 4), 90, np.uint8)]
    assert (to_images(mixed, 8) == 90).all()
    assert to_images(mixed, 8).shape == (3, 3, 8, 8)
    assert to_images([], 8).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("nowhere.png", "not found"),
        ([b"no image"], "image 0"),
        (np.zeros((2, 5, 5, 4), np.uint8), "expected"),
        (np.full((5, 5, 3), 200.0), "from 0 to 1"),
        (np.full((5, 5, 3), np.nan), "from 0 to 1"),
        (np.zeros((5, 5, 3), np.int64), "int64"),
        ([np.zeros((5, 5, 3), np.uint8), {"x": 1}], "image 1"),
        (7, "expected"),
    ],
)
def test_what_is_no_image_is_named(bad: object, why: str) -> None:
    with pytest.raises(DataError, match=why):
        to_images(bad, 8)


def test_vectors() -> None:
    x = np.arange(6).reshape(2, 3)
    for form in (x, x.tolist(), torch.from_numpy(x), list(torch.from_numpy(x)), x.astype(np.float16)):
        np.testing.assert_array_equal(to_vectors(form, 3), x.astype(np.float32))
    assert to_vectors(x[0], 3).shape == (1, 3)
    for bad in ("abc", x[:, :2], [[1, 2, 3], [1]], [["a", "b", "c"]]):
        with pytest.raises(DataError, match="items to embed"):
            to_vectors(bad, 3)

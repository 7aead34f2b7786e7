"""Decoding, resizing and batches: every pixel format and form, hostile files, and the same result
with any threads.
"""

import io
import struct
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from gpq_faiss.data.base import Reader, image_files
from gpq_faiss.data.images import decode_image, resize_square
from gpq_faiss.encoder import to_images, to_vectors
from gpq_faiss.errors import DataError


def encoded(image, format_="PNG", **options):
    out = io.BytesIO()
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    image.save(out, format_, **options)
    return out.getvalue()


def random_rgb(height, width, seed=0):
    return np.random.default_rng([seed, height, width]).integers(
        0, 256, (height, width, 3), dtype=np.uint8
    )


def png_of(width, height):
    """A PNG that claims a size and holds hardly any pixels."""
    data = bytearray(encoded(np.zeros((2, 2, 3), np.uint8)))
    data[16:24] = struct.pack(">II", width, height)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    return bytes(data)


# Decoding -----------------------------------------------------------------------------------------

PIXELS, RED = random_rgb(5, 7), Image.new("CMYK", (8, 8), (0, 255, 255, 0))
BITS = np.eye(4, dtype=np.uint8)[..., None].repeat(3, axis=2) * 255
GREY = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
SEEN = np.uint8([[[200, 0, 0, 0], [200, 0, 0, 255]], [[200, 0, 0, 128], [200, 0, 0, 255]]])
HARM = b"Exif\0\0II*\0\xff\xff\xff\xff"
FRAMES = [Image.new("RGB", (8, 8), colour) for colour in ((255, 0, 0), (0, 0, 255))]
# What a viewer does for each EXIF orientation, from the standard: whether row 0 of the file is a
# column, and from where they count.
VIEWS = [(False, 1, 1), (False, 1, -1), (False, -1, -1), (False, -1, 1)]
VIEWS += [(True, y, x) for _, y, x in VIEWS]


def turned(orientation, column, y, x):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(PIXELS, exif=exif), (PIXELS.transpose(1, 0, 2) if column else PIXELS)[::y, ::x]


EXACT = [
    *[(encoded(PIXELS, form), PIXELS) for form in ("PNG", "BMP", "TIFF", "PPM")],
    (encoded(PIXELS, "WEBP", lossless=True), PIXELS),
    *[turned(orientation, *view) for orientation, view in enumerate(VIEWS, 1)],
    (encoded(RED, "TIFF"), np.full((8, 8, 3), [255, 0, 0])),
    (encoded(Image.fromarray(BITS[..., 0]).convert("1")), BITS),
    (
        encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]),
        np.full((8, 8, 3), [255, 0, 0]),
    ),
    # Every 16-bit grey is rounded to 8 bits.
    *[
        (encoded(GREY, f), np.rint(GREY * (255 / 65535))[..., None].repeat(3, 2))
        for f in ("PNG", "PPM")
    ],
]
NEAR = [
    (encoded(RED, "JPEG", quality=100), np.full((8, 8, 3), [255, 0, 0])),
    # Transparency is laid over white.
    (encoded(SEEN), [[[255, 255, 255], [200, 0, 0]], [[227, 127, 127], [200, 0, 0]]]),
    # Damaged EXIF data does not lose the image.
    (encoded(np.full((8, 8, 3), 100, np.uint8), "JPEG", exif=HARM), np.full((8, 8, 3), 100)),
]


@pytest.mark.parametrize(
    ("data", "expected", "tolerance"),
    [*((*x, 0) for x in EXACT), *((*x, 3) for x in NEAR)],
    ids=range(21),
)
def test_images_look_as_in_a_viewer(data, expected, tolerance):
    pixels = decode_image(data, max_pixels=max(np.size(expected) // 3, 1))  # the limit is inclusive
    assert pixels.shape == np.shape(expected)
    assert np.abs(pixels - np.asarray(expected, float)).max() <= tolerance


NO_IMAGES = [
    ("nowhere.png", "not found"),
    ([b"no image"], "image 0"),
    (np.zeros((2, 5, 5, 4), np.uint8), "expected"),
    *[
        (np.full((5, 5, 3), value), "expected uint8, or floats from 0 to 1")
        for value in (200.0, np.nan)
    ],
    ([np.zeros((5, 5, 3), np.uint8), {"x": 1}], "image 1"),
    (7, "expected"),
]
BAD_BYTES = [
    (b"", "not an image"),
    (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
    (encoded(random_rgb(40, 40), "JPEG")[:300], "cannot be decoded"),
    (encoded(random_rgb(40, 40))[:900], "cannot be decoded"),
    (encoded(Image.new("RGB", (1, 9))), "1 x 9 pixels: at least 2 x 2"),
    (encoded(np.ones((4, 4), dtype=np.float32), "TIFF"), "32-bit"),
    (png_of(8192, 8193), "8192 x 8193 pixels: .* at most 67,108,864 are allowed"),
    (png_of(50_000, 50_000), "exceeds limit"),
    (png_of(0xFFFFFFF, 0xFFFFFFF), "exceeds limit"),
    (png_of(1000, 1000), "cannot be decoded"),
]


@pytest.mark.parametrize(
    ("convert", "bad", "message"),
    [
        *[
            (partial(decode_image, name="here.png"), data, f"here.png: .*{message}")
            for data, message in BAD_BYTES
        ],
        (
            partial(decode_image, max_pixels=34),
            encoded(PIXELS),
            "7 x 5 pixels: .* at most 34 are allowed",
        ),
        *[(partial(to_images, size=8), bad, message) for bad, message in NO_IMAGES],
        *[
            (partial(to_vectors, width=8), bad, "items to embed")
            for bad in ("abc", [[1, 2, 3], [1]], [[1, 2, 3]])
        ],
    ],
)
def test_what_is_no_item_is_one_clear_line(convert, bad, message):
    with pytest.raises(DataError, match=message) as caught:
        convert(bad)
    assert str(caught.value).isprintable()


# Resizing, and every form -------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(4, 40), st.integers(4, 40), st.integers(0, 2**32 - 1))
def test_every_form_of_an_image_is_that_image(tmp_path_factory, height, width, seed):
    pixels = random_rgb(height, width, seed)
    path = tmp_path_factory.getbasetemp() / "x.png"
    Image.fromarray(pixels).save(path)
    expected = resize_square(pixels, 16).transpose(2, 0, 1)[None]
    chw, floats = pixels.transpose(2, 0, 1), pixels.astype(np.float64) / 255
    tensor = torch.from_numpy(chw / 255)[None].requires_grad_()
    forms = [path, str(path), path.read_bytes(), Image.open(path), [path], [Image.open(path)]]
    forms += [pixels, pixels[None], [pixels], torch.from_numpy(pixels), floats]
    forms += [floats.astype(np.float32)[None], chw, chw[None], tensor]
    for form in forms:
        np.testing.assert_array_equal(to_images(form, 16), expected)


def test_sizes_and_kinds_may_be_mixed():
    grey = Image.new("L", (9, 7), 90)
    mixed = [grey, np.full((5, 6, 3), 90, np.uint8), np.full((4, 4), 90, np.uint8)]
    mixed += [np.full((1, 5, 6), 90, np.uint8), torch.full((4, 5, 1), 90 / 255)]
    assert to_images(mixed, 8).tolist() == np.full((5, 3, 8, 8), 90).tolist()


# Data sets ----------------------------------------------------------------------------------------


def test_batches_equal_one_by_one(tmp_path):
    broken, names = (3, 17), [f"{i:02d}.png" for i in range(40)]
    for i, name in enumerate(names):
        content = b"broken" if i in broken else encoded(random_rgb(6 + i % 3, 8, i))
        (tmp_path / name).write_bytes(content)
    paths = [str(tmp_path / name) for name in names]
    dataset = image_files("images", paths, names, max_bad=0.5)
    rows = np.random.default_rng(1).permutation(40)
    good = [paths[i] for i in rows if i not in broken]
    expected = [resize_square(decode_image(path), 5).transpose(2, 0, 1) for path in good]
    with Reader(dataset, 5) as reader:
        for _ in range(2):
            read, ok = reader.fetch(rows)
            assert ok.tolist() == [i not in broken for i in rows]
            assert np.array_equal(read, expected)
            assert sorted(dataset.bad) == [3, 17], "an image counts once however often it is read"


@pytest.mark.parametrize(
    "form", [np.asarray, np.ndarray.tolist, torch.from_numpy, list, np.float16]
)
def test_every_form_of_vectors_is_those_vectors(form):
    x = np.arange(6).reshape(2, 3)
    np.testing.assert_array_equal(to_vectors(form(x), 3), x.astype(np.float32))
    np.testing.assert_array_equal(to_vectors(form(x)[0], 3), x[:1])


def test_resizing_smooths():
    board = (np.indices((64, 64, 3))[:2].sum(axis=0) % 2 * 255).astype(np.uint8)
    # Without anti-aliasing a pixel pattern comes out black or white; with it, as its mean.
    assert np.abs(resize_square(board, 8).astype(int) - 127).max() <= 2


def test_images_are_cut_to_their_centre():
    pixels, edge = random_rgb(6, 6), np.zeros((6, 4, 3), np.uint8)
    wide = np.concatenate([edge, pixels, edge], axis=1)
    assert np.array_equal(resize_square(wide, 6), pixels)
    tall, turned_pixels = (x.transpose(1, 0, 2) for x in (wide, pixels))
    assert np.array_equal(resize_square(tall.copy(), 6), turned_pixels)

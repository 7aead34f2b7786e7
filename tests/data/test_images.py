"""Decoding, resizing and batches: every pixel format, hostile files, and the same result with any threads."""

from __future__ import annotations

import io
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from gpq_faiss.data.base import ArrayImages, ImageDataset, images, load_batch
from gpq_faiss.data.images import BrokenImageError, decode_image, resize_square
from gpq_faiss.data.tables import About
from gpq_faiss.errors import DataError


def encoded(image: Image.Image, format_: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, format_, **options)
    return out.getvalue()


def random_rgb(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng([seed, height, width]).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds hardly any pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("format_", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_formats_come_back_exactly(format_: str, tmp_path: Path) -> None:
    pixels = random_rgb(5, 7)
    options = {"lossless": True} if format_ == "WEBP" else {}
    data = encoded(Image.fromarray(pixels), format_, **options)
    assert np.array_equal(decode_image(data), pixels)
    file = tmp_path / "a.bin"
    file.write_bytes(data)
    assert np.array_equal(decode_image(file), pixels)
    assert decode_image(str(file)).dtype == np.uint8


def test_32_bit_pixels_are_refused() -> None:
    with pytest.raises(BrokenImageError, match="32-bit"):
        decode_image(encoded(Image.fromarray(np.ones((4, 4), dtype=np.float32)), "TIFF"))


def test_transparency_is_laid_over_white() -> None:
    pixels = np.zeros((2, 2, 4), dtype=np.uint8)
    pixels[..., 0] = 200
    pixels[0, 0, 3], pixels[0, 1, 3], pixels[1, 0, 3] = 0, 255, 128
    out = decode_image(encoded(Image.fromarray(pixels)))
    assert out[0, 0].tolist() == [255, 255, 255]
    assert out[0, 1].tolist() == [200, 0, 0]
    blend = 255 * (1 - 128 / 255)
    assert np.abs(out[1, 0].astype(float) - [200 * 128 / 255 + blend, blend, blend]).max() <= 1


def test_cmyk_and_one_bit() -> None:
    cmyk = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    red = decode_image(encoded(cmyk, "TIFF"))
    assert red[0, 0].tolist() == [255, 0, 0]
    jpeg = decode_image(encoded(cmyk, "JPEG", quality=100))
    assert np.abs(jpeg[0, 0].astype(int) - [255, 0, 0]).max() <= 3
    bits = Image.fromarray(np.eye(4, dtype=np.uint8) * 255).convert("1")
    assert np.array_equal(decode_image(encoded(bits))[:, :, 0], np.eye(4, dtype=np.uint8) * 255)


# What a viewer does for each EXIF orientation, from the standard: where row 0 and column 0 of the file lie.
_VIEWS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", sorted(_VIEWS))
def test_exif_orientation(orientation: int) -> None:
    pixels = random_rgb(3, 5)
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(
        decode_image(encoded(Image.fromarray(pixels), exif=exif)), _VIEWS[orientation](pixels)
    )


@pytest.mark.parametrize("exif", [b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_damaged_exif_does_not_lose_the_image(exif: bytes) -> None:
    pixels = np.full((8, 8, 3), 100, dtype=np.uint8)
    assert np.array_equal(decode_image(encoded(Image.fromarray(pixels), "JPEG", exif=exif)), pixels)


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(data)[0, 0].tolist() == [255, 0, 0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "not an image"),
        (b"not an image at all", "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image"),
        (encoded(Image.fromarray(random_rgb(40, 40)), "JPEG")[:300], "cannot be decoded"),
        (encoded(Image.fromarray(random_rgb(40, 40)))[:900], "cannot be decoded"),
        (encoded(Image.new("RGB", (1, 1))), "1 x 1 pixels"),
        (encoded(Image.new("RGB", (1, 9))), "1 x 9 pixels"),
        (png_header(8192, 8193), "more than the"),
        (png_header(50_000, 50_000), "exceeds limit"),
        (png_header(0xFFFFFFF, 0xFFFFFFF), "exceeds limit"),
        (png_header(1000, 1000), "cannot be decoded"),
    ],
    ids=["empty", "text", "eps", "jpeg-cut", "png-cut", "1x1", "1x9", "67mp", "bomb", "bomb2", "few-pixels"],
)
def test_bad_bytes_are_one_clear_line(data: bytes, why: str) -> None:
    with pytest.raises(DataError, match=why) as caught:
        decode_image(data, name="here.png")
    message = str(caught.value)
    assert message.startswith("here.png: ")
    assert "\n" not in message


def test_the_pixel_limit_is_inclusive_and_can_be_set() -> None:
    data = encoded(Image.fromarray(random_rgb(10, 10)))
    assert decode_image(data, max_pixels=100).shape == (10, 10, 3)
    with pytest.raises(BrokenImageError, match="10 x 10 pixels are more than the 99 allowed"):
        decode_image(data, max_pixels=99)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=8),
    st.integers(0, 10_000),
)
def test_mutated_files_give_an_image_or_a_data_error(
    format_: str, flips: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(encoded(Image.fromarray(random_rgb(9, 12)), format_))
    for at, value in flips:
        data[at % len(data)] = value
    image, message = None, ""
    try:
        image = decode_image(bytes(data[: len(data) - cut % len(data)]), max_pixels=1 << 20)
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    assert (image is None) == bool(message)
    if image is not None:
        assert image.dtype == np.uint8
        assert image.ndim == 3
        assert image.shape[2] == 3
        assert min(image.shape[:2]) >= 2


def test_resize_square_is_the_centre_and_keeps_what_fits() -> None:
    pixels = random_rgb(6, 6)
    assert resize_square(pixels, 6) is pixels
    wide = np.concatenate([np.zeros((6, 4, 3), np.uint8), pixels, np.zeros((6, 4, 3), np.uint8)], axis=1)
    assert np.array_equal(resize_square(wide, 6), pixels)
    assert np.array_equal(resize_square(wide.transpose(1, 0, 2).copy(), 6), pixels.transpose(1, 0, 2))


def test_resize_square_is_anti_aliased() -> None:
    board = np.zeros((64, 64, 3), dtype=np.uint8)
    board[::2, ::2] = board[1::2, 1::2] = 255
    small = resize_square(board, 8)
    # Without anti-aliasing a pixel pattern comes out black or white; with it, as its mean.
    assert np.abs(small.astype(int) - 127).max() <= 2


def files(tmp_path: Path, n: int = 40, broken: tuple[int, ...] = (), max_bad: float = 0.5) -> ImageDataset:
    paths = []
    for i in range(n):
        path = tmp_path / f"{i:02d}.png"
        path.write_bytes(b"broken" if i in broken else encoded(Image.fromarray(random_rgb(6 + i % 3, 8, i))))
        paths.append(str(path))
    names = [Path(path).name for path in paths]
    return images("here", "image files", names, paths, About(ids=np.arange(n) + 100), max_bad)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_load_batch_equals_one_by_one(tmp_path: Path, threads: int) -> None:
    dataset = files(tmp_path, broken=(3, 17))
    rows = np.random.default_rng(1).permutation(40)
    expected = [
        resize_square(decode_image(dataset.paths[i]), 5).transpose(2, 0, 1) for i in rows if i not in (3, 17)
    ]
    pool = ThreadPoolExecutor(threads) if threads else None
    read, ok = load_batch(dataset, rows, 5, pool)
    assert ok.tolist() == [i not in (3, 17) for i in rows]
    assert np.array_equal(read, np.stack(expected))
    assert read.flags.c_contiguous
    load_batch(dataset, rows, 5, pool)
    assert dataset.bad.count == 2, "an image counts once however often it is read"
    assert dataset.bad.positions == [3, 17]


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    a, b = files(tmp_path / "a", 4), files(tmp_path / "b", 4)
    assert a.fingerprint == b.fingerprint
    (tmp_path / "b" / "01.png").write_bytes(b"other length")
    names = [Path(path).name for path in b.paths]
    assert images("b", "image files", names, b.paths, About(ids=b.ids), 0.5).fingerprint != a.fingerprint
    assert images("a", "image files", names, a.paths, About(ids=a.ids + 1), 0.5).fingerprint != a.fingerprint


def test_array_images_grey_and_rgb() -> None:
    grey = np.random.default_rng(0).integers(0, 256, (6, 4, 4), dtype=np.uint8)
    rgb = np.repeat(grey[..., None], 3, axis=3)
    ids = np.arange(6, dtype=np.int64)
    sets = [ArrayImages(name="g", images=x, ids=ids, fingerprint="") for x in (grey, rgb)]
    rows = np.array([5, 0, 3])
    for dataset in sets:
        assert dataset.native_size == 4
        assert np.array_equal(np.stack(dataset.read(rows)), rgb[rows])
        assert len(dataset.read(slice(1, 3))) == 2
        direct, ok = load_batch(dataset, rows, 4)
        assert ok.all()
        assert np.array_equal(direct, rgb[rows].transpose(0, 3, 1, 2))
        scaled, _ = load_batch(dataset, rows, 7)
        assert np.array_equal(scaled[1], resize_square(rgb[0], 7).transpose(2, 0, 1))
    with pytest.raises(DataError, match="6 images but 5 ids"):
        ArrayImages(name="g", images=grey, ids=ids[:5], fingerprint="")
    with pytest.raises(DataError, match="float64"):
        ArrayImages(name="g", images=grey.astype(np.float64), ids=ids, fingerprint="")


@pytest.mark.parametrize("form", ["PNG", "PPM"])
def test_every_16_bit_grey_is_rounded_to_8_bits(form: str) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    stream = io.BytesIO()
    Image.fromarray(values).save(stream, form)
    expected = np.rint(values * (255 / 65535)).astype(np.uint8)
    np.testing.assert_array_equal(decode_image(stream.getvalue()), np.repeat(expected[:, :, None], 3, axis=2))

"""From images in any form (files, bytes, Pillow's, arrays, tensors) to arrays: safe decoding,
square resizing.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path, PurePath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ..codes import checks
from ..codes.checks import to_numpy
from ..errors import DataError, one_line, shown

IMAGE_SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jfif",
        ".png",
        ".bmp",
        ".gif",
        ".webp",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pnm",
    ]
)
"""File name extensions of images in folders and tables."""

_REASONS: dict[type[Exception], str] = {
    FileNotFoundError: "not found",
    UnidentifiedImageError: "not an image, or of an unknown format",
}
ENCODED = (str, os.PathLike, bytes, bytearray, Image.Image)
"""Types of images that :func:`decode_image` takes."""


def is_image_name(name: str) -> bool:
    """Return whether a name is that of an image file, and not hidden (``._a.jpg`` of macOS)."""
    path = PurePath(name.replace("\\", "/"))
    return not path.name.startswith(".") and path.suffix.lower() in IMAGE_SUFFIXES


def decode_image(
    source: bytes | bytearray | str | os.PathLike[str] | Image.Image,
    *,
    name: str | None = None,
    max_pixels: int = 64 * 1024 * 1024,
) -> NDArray[np.uint8]:
    """Decode an image (encoded bytes, a file, or opened by Pillow) to upright RGB, uint8 [H, W, 3],
    H and W at least 2.

    Grey (8 and 16 bits), palette and CMYK become RGB, transparency white; of animations the first
    frame counts. ``name`` is for errors (default: the path); ``max_pixels`` the maximum H * W,
    checked by the header before decoding.

    Raises:
        DataError: missing, not an image of a known format, truncated, too large (a decompression
            bomb), or with a side of one pixel.
    """
    name = name or (shown(os.fspath(source)) if isinstance(source, str | os.PathLike) else "image")
    try:
        if not isinstance(source, Image.Image):
            # These formats are decoded by Pillow itself: EPS would start Ghostscript, PDF and WMF
            # other external code.
            source = Image.open(
                io.BytesIO(
                    source if isinstance(source, bytes | bytearray) else Path(source).read_bytes()
                ),
                formats=("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM"),
            )
        if min(source.size) < 2 or source.width * source.height > max_pixels:
            raise ValueError(  # one pixel is the placeholder of a failed download
                f"{source.width} x {source.height} pixels: at least 2 x 2 and at most "
                f"{max_pixels:,} are allowed"
            )
        source.load()
        return _to_rgb(source)
    except Exception as error:  # malformed bytes raise nearly all of them
        raise DataError(
            f"{name}: {_REASONS.get(type(error), f'cannot be decoded ({one_line(error)})')}"
        ) from None


def _to_rgb(image: Image.Image) -> NDArray[np.uint8]:
    """Return uint8 [H, W, 3] of a loaded image in any mode, upright by its EXIF data. Raises
    ValueError: 32-bit modes, of unknown range.
    """
    mode, form = image.mode, image.format
    with contextlib.suppress(Exception):  # damaged EXIF data is ignored
        image = ImageOps.exif_transpose(image)
    if mode.startswith("I;16") or (mode == "I" and form in {"PNG", "PPM"}):
        # convert("RGB") would clip 16-bit grey at 255: scale it with rounding.
        grey = (np.clip(np.asarray(image), 0, 65535).astype(np.uint32) + 128) // 257
        return np.stack([grey.astype(np.uint8)] * 3, axis=2)
    if mode in {"I", "F"}:
        raise ValueError("32-bit pixels have no fixed range: convert it to 8 or 16 bits")
    if image.has_transparency_data:
        # On white, as in a browser; dropping alpha would reveal hidden colours.
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return np.array(image.convert("RGB"), dtype=np.uint8)


def resize_square(image: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """Scale the shorter side of an image uint8 [H, W, 3] to ``size`` (bilinear, anti-aliased) and
    crop the centre.

    Resamples only the centre square, so that a 2 x 30,000,000 strip needs no more memory than its
    input.
    """
    return np.asarray(ImageOps.fit(Image.fromarray(image), (size, size), Image.Resampling.BILINEAR))


# Items in memory, for a network -------------------------------------------------------------------


def as_array(value: Any, location: str) -> NDArray[Any]:
    """Convert an array, tensor, or list of them, to an array of numbers. Raises DataError: not
    numbers.
    """
    items = list(map(to_numpy, value)) if isinstance(value, list | tuple) else value
    array = checks.as_array(items, location)
    if array.dtype.kind not in "fiu":
        raise DataError(
            f"{location}: {type(value).__name__} of {array.dtype} is not an array of numbers, nor "
            "an image (those in dicts have the keys image and label)"
        )
    return array


def to_pixels(value: Any, location: str) -> NDArray[np.uint8]:
    """Return one image in any form as uint8 [H, W, 3]. Raises DataError: not an image, or
    one that cannot be decoded.
    """
    if isinstance(value, ENCODED):
        return decode_image(value, name=None if isinstance(value, str | os.PathLike) else location)
    array = np.atleast_3d(as_array(value, location))
    if array.shape[2] not in (1, 3) and array.shape[0] in (1, 3):
        array = np.moveaxis(array, 0, 2)
    is_image = array.shape[2:] in ((1,), (3,)) and min(array.shape[:2]) > 1
    is_unit = array.dtype.kind == "f" and array.size and array.min() >= 0 and array.max() <= 1
    if not is_image or not (is_unit or array.dtype == np.uint8):
        raise DataError(
            f"{location}: {array.dtype} {list(np.shape(value))} up to "
            f"{array.max(initial=0):g}, expected uint8, or floats from 0 to 1 (not normalised), "
            "[H, W], [H, W, C], [C, H, W] with 1 or 3 channels, or a batch of these; vectors are "
            "[N, width]"
        )
    rgb = np.broadcast_to(array, (*array.shape[:2], 3))
    return np.ascontiguousarray(np.round(rgb * 255) if is_unit else rgb, dtype=np.uint8)

"""Convert in-memory images and vectors of any form to arrays for the network."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import DataError
from .arrays import without_gradient
from .images import BrokenImageError, decode_image, pillow_to_rgb, resize_square

_PLACES = "[H, W, 3], [3, H, W], [H, W], or a batch of these"


def to_images(values: Any, size: int) -> NDArray[np.uint8]:
    """Images uint8 [n, 3, size, size] of paths, encoded bytes, PIL images, arrays or tensors, one or several.

    Arrays are uint8, or floats from 0 to 1, [H, W, 3], [3, H, W] or [H, W], and batches of these; for images of
    3 x 3 pixels the last axis is the colour. Other sizes are resized as in training (:func:`.images.resize_square`).

    Args:
        values: one image, or a sequence of images (of any sizes), or a batch.
        size: side in pixels.

    Raises:
        DataError: an invalid or unreadable image; names its index.
    """
    if isinstance(values, np.ndarray) and values.dtype == np.uint8 and values.shape[1:] == (3, size, size):
        return np.require(values, requirements=("C", "W"))  # as torch requires
    planes = [_planes(image, where, size) for where, image in _each(values)]
    return np.stack(planes) if planes else np.empty((0, 3, size, size), np.uint8)


def _is_one(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | bytes | bytearray | Image.Image)


def _each(values: Any) -> Iterator[tuple[str, Any]]:
    if _is_one(values):
        yield "the image", values
        return
    if isinstance(values, list | tuple):
        for i, value in enumerate(values):
            yield f"image {i}", value if _is_one(value) else as_array(value, f"image {i}")
        return
    array = as_array(values, "images")
    if array.ndim == 2 or (array.ndim == 3 and 3 in (array.shape[0], array.shape[2])):
        yield "the image", array
        return
    if array.ndim not in (3, 4):
        raise DataError(f"images: {array.dtype} {list(array.shape)}, expected {_PLACES}")
    for i, image in enumerate(array):
        yield f"image {i}", image


def as_array(value: Any, where: str) -> NDArray[Any]:
    """Convert an array, tensor or list to an array of numbers. Raises DataError: not numbers."""
    try:
        array = np.asarray(without_gradient(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: not an image ({' '.join(str(error).split())[:100]})") from None
    if array.dtype.kind not in "fiu":
        raise DataError(
            f"{where}: {type(value).__name__} is not an image: give a path, a PIL image or an array"
        )
    return array


def _planes(value: Any, where: str, size: int) -> NDArray[np.uint8]:
    """One image as uint8 [3, size, size]."""
    try:
        image = to_pixels(value, where)
    except BrokenImageError as error:
        raise DataError(f"{error}") from None
    return np.ascontiguousarray(resize_square(image, size).transpose(2, 0, 1))


def to_pixels(value: Any, where: str) -> NDArray[np.uint8]:
    """One image in any form as uint8 [H, W, 3].

    Raises:
        DataError: not an image; BrokenImageError: it cannot be decoded.
    """
    if isinstance(value, Image.Image):
        return pillow_to_rgb(value, where)
    if _is_one(value):
        source = io.BytesIO(value).getvalue() if isinstance(value, bytes | bytearray) else os.fspath(value)
        return decode_image(source, name=where if isinstance(source, bytes) else str(source))
    return _pixels(as_array(value, where), where)


def _pixels(array: NDArray[Any], where: str) -> NDArray[np.uint8]:
    """uint8 [H, W, 3]."""
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    elif array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise DataError(f"{where}: {list(array.shape)}, expected {_PLACES}")
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            raise DataError(f"{where}: floats from {low:g} to {high:g}: from 0 to 1 are needed, or uint8")
        array = np.round(array * 255)
    elif array.dtype != np.uint8:
        raise DataError(f"{where}: {array.dtype}: uint8, or floats from 0 to 1, are needed")
    return np.ascontiguousarray(array, dtype=np.uint8)


def to_vectors(values: Any, width: int) -> NDArray[np.float32]:
    """Vectors float32 [n, width] from one or several vectors, an array or a tensor.

    Raises:
        DataError: not numbers, or of another width.
    """
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        values = [without_gradient(v) for v in values]
    else:
        values = without_gradient(values)
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"items to embed: not an array of numbers ({' '.join(str(error).split())[:100]})"
        ) from None
    if array.ndim == 1 and array.shape[0] == width:
        array = array[None]
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != width:
        raise DataError(
            f"items to embed: {array.dtype} {list(array.shape)}, expected numbers [n, {width}], as the model was trained on"
        )
    # As torch requires: contiguous and writable.
    return np.require(array.astype(np.float32, copy=False), requirements=("C", "W"))

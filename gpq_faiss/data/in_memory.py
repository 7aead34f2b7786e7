"""Images and vectors in memory: as arrays for the network, and as data sets (arrays, tensors, map-style data sets of torch)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..progress import stage
from .arrays import without_gradient
from .base import About, Dataset
from .features import FileFeatures, held_features
from .images import (
    ArrayImages,
    BrokenImageError,
    decode_image,
    file_images,
    pillow_to_rgb,
    resize_square,
)
from .labels import Labels, labels_of

_PLACES = "[H, W, 3], [3, H, W], [H, W], or a batch of these"
_SAMPLED = 64
"""Items whose content is hashed for a fingerprint."""


def to_images(values: Any, size: int) -> NDArray[np.uint8]:
    """Images uint8 [n, 3, size, size] of paths, encoded bytes, PIL images, arrays or tensors: one, a sequence (of any sizes), or a batch.

    Arrays are uint8, or floats from 0 to 1, [H, W, 3], [3, H, W] or [H, W], and batches of these; for images of
    3 x 3 pixels the last axis is the colour. Other sizes are resized as in training (:func:`.images.resize_square`).
    """
    if isinstance(values, np.ndarray) and values.dtype == np.uint8 and values.shape[1:] == (3, size, size):
        return np.require(values, requirements=("C", "W"))  # as torch requires
    planes = [resize_square(to_pixels(x, where), size).transpose(2, 0, 1) for where, x in _each(values)]
    return np.stack(planes) if planes else np.empty((0, 3, size, size), np.uint8)


def _is_one(value: Any) -> bool:
    return isinstance(value, str | os.PathLike | bytes | bytearray | Image.Image)


def _each(values: Any) -> Iterator[tuple[str, Any]]:
    if not _is_one(values) and not isinstance(values, list | tuple):
        values = as_array(values, "images")
        if values.ndim not in (2, 3, 4):
            raise DataError(f"images: {values.dtype} {list(values.shape)}, expected {_PLACES}")
        if values.ndim == 2 or (values.ndim == 3 and 3 in (values.shape[0], values.shape[2])):
            yield "the image", values
            return
    for i, value in enumerate([values] if _is_one(values) else values):
        yield "the image" if _is_one(values) else f"image {i}", value


def as_array(value: Any, where: str) -> NDArray[Any]:
    """Convert an array, tensor, or list of them, to an array of numbers. Raises DataError: not numbers."""
    try:
        plain = [without_gradient(v) for v in value] if isinstance(value, list | tuple) else value
        array = np.asarray(without_gradient(plain))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: not an array of numbers ({one_line(error, 100)})") from None
    if array.dtype.kind not in "fiu":
        raise DataError(f"{where}: {type(value).__name__} is not an array of numbers, nor an image")
    return array


def to_pixels(value: Any, where: str) -> NDArray[np.uint8]:
    """One image in any form as uint8 [H, W, 3]. Raises DataError: not an image; BrokenImageError: it cannot be decoded."""
    if isinstance(value, Image.Image):
        return pillow_to_rgb(value, where)
    if isinstance(value, bytes | bytearray):
        return decode_image(bytes(value), name=where)
    if _is_one(value):
        return decode_image(os.fspath(value))
    array = as_array(value, where)
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    elif array.ndim == 3 and array.shape[2] != 3 and array.shape[0] == 3:
        array = array.transpose(1, 2, 0)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise DataError(f"{where}: {list(array.shape)}, expected {_PLACES}")
    if array.dtype.kind == "f" and array.min() >= 0 and array.max() <= 1:
        array = np.round(array * 255)
    elif array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        found = f"{array.dtype} from {low:g} to {high:g}"
        raise DataError(f"{where}: {found}: uint8, or floats from 0 to 1, are needed")
    return np.ascontiguousarray(array, dtype=np.uint8)


def to_vectors(values: Any, width: int) -> NDArray[np.float32]:
    """Vectors float32 [n, width] of one or several vectors, an array or a tensor. Raises DataError: not numbers, or of another width."""
    array = as_array(values, "items to embed")
    if array.ndim == 1 and array.shape[0] == width:
        array = array[None]
    if array.ndim != 2 or array.shape[1] != width:
        found = f"{array.dtype} {list(array.shape)}"
        raise DataError(
            f"items to embed: {found}, expected numbers [n, {width}], as the model was trained on"
        )
    # As torch requires: contiguous and writable.
    return np.require(array.astype(np.float32, copy=False), requirements=("C", "W"))


def open_array(values: Any) -> FileFeatures | ArrayImages:
    """Vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W]. Raises DataError: neither."""
    array = as_array(values, "the array")
    if array.ndim == 2:
        return held_features("array", array, About())
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    return ArrayImages(
        name="array",
        ids=np.arange(len(array), dtype=np.int64),
        fingerprint=fingerprint("array", content, str(array.shape)),
        notes=["no labels"],
        images=np.ascontiguousarray(array),
    )


# Map-style data sets ----------------------------------------------------------------------------------------------------


@dataclass
class _Items:
    """Images of a map-style data set, read by one thread at a time."""

    source: Any
    lock: Any = field(default_factory=threading.Lock)

    def item(self, i: int) -> tuple[Any, Any]:
        """Image and label (or None) of an item. Raises BrokenImageError: the source fails."""
        try:
            with self.lock:
                found = self.source[i]
        except Exception as error:  # any error of the source
            raise BrokenImageError(f"item {i}", one_line(error)) from None
        pair = isinstance(found, tuple | list) and len(found) == 2
        return (found[0], found[1]) if pair else (found, None)

    def __call__(self, i: int) -> NDArray[np.uint8]:
        image = self.item(i)[0]
        try:
            return to_pixels(image, f"item {i}")
        except DataError as error:
            raise BrokenImageError(f"item {i}", getattr(error, "why", str(error))) from None

    def labels(self, n: int) -> Labels | None:
        """Labels by ``targets`` (with class names in ``classes``), else inside the items, which are then all read."""
        targets = getattr(self.source, "targets", None)
        if targets is None:
            targets = []
            with stage("reading labels", n) as reading:
                for i in range(n):
                    try:
                        targets.append(self.item(i)[1])
                    except BrokenImageError:  # counted when it is read as an image
                        targets.append(None)
                    reading.advance()
        if all(target is None for target in targets):
            return None
        plain = [without_gradient(target) for target in targets]
        classes = getattr(self.source, "classes", None)
        if classes is not None:
            return Labels.from_ids(np.asarray(plain), [str(text) for text in classes])
        hot = all(isinstance(target, np.ndarray) and target.ndim == 1 for target in plain)
        return labels_of(np.stack(plain) if hot else plain, n)


def open_items(source: Any, *, with_labels: bool, max_bad: float = 0.01) -> Dataset:
    """A list or a map-style data set of images, in any form that :func:`to_images` takes, or of (image, label).

    Images are read on demand, so the source must return the same image each time.
    """
    name = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")
    n, items = len(source), _Items(source)
    if not n:
        raise DataError(f"{name} has no items")
    labels = items.labels(n) if with_labels else None
    about = About(labels, notes=[] if labels is not None else ["no labels"])
    own = [f"item {i}" for i in range(n)]
    found = file_images(name, "items", own, [0] * n, "", about, own, max_bad, items)
    found.texts = {}
    sampled = np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64))
    images, again = found.read(sampled), found.read(sampled[:1])[0]
    if images[0] is not None and (again is None or not np.array_equal(images[0], again)):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    digests = [
        b"" if x is None else hashlib.sha256(np.ascontiguousarray(x).tobytes()).digest() for x in images
    ]
    found.fingerprint = fingerprint("items", str(n), *digests, "" if labels is None else labels.fingerprint())
    return found

"""Images and vectors in memory: as arrays for the network, and as data sets (arrays, tensors, map-style data sets of torch)."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import check_memory
from ..progress import stage
from .arrays import without_gradient
from .base import About, BadItems, Dataset
from .images import ArrayImages, BrokenImageError, FileImages, decode_image, pillow_to_rgb, resize_square
from .label_files import labels_of
from .labels import Labels
from .vectors import FileFeatures, features_in_memory

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
    """Convert an array, tensor or list to an array of numbers. Raises DataError: not numbers."""
    try:
        array = np.asarray(without_gradient(value))
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(f"{where}: not an image ({' '.join(str(error).split())[:100]})") from None
    if array.dtype.kind not in "fiu":
        what = type(value).__name__
        raise DataError(f"{where}: {what} is not an image: give a path, a PIL image or an array")
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
    if array.dtype.kind == "f":
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):
            raise DataError(f"{where}: floats from {low:g} to {high:g}: from 0 to 1 are needed, or uint8")
        array = np.round(array * 255)
    elif array.dtype != np.uint8:
        raise DataError(f"{where}: {array.dtype}: uint8, or floats from 0 to 1, are needed")
    return np.ascontiguousarray(array, dtype=np.uint8)


def to_vectors(values: Any, width: int) -> NDArray[np.float32]:
    """Vectors float32 [n, width] of one or several vectors, an array or a tensor. Raises DataError: not numbers, or of another width."""
    try:
        if isinstance(values, Sequence) and not isinstance(values, str | bytes):
            values = [without_gradient(v) for v in values]
        array = np.asarray(without_gradient(values))
    except (ValueError, TypeError, OverflowError) as error:
        why = " ".join(str(error).split())[:100]
        raise DataError(f"items to embed: not an array of numbers ({why})") from None
    if array.ndim == 1 and array.shape[0] == width:
        array = array[None]
    if array.dtype.kind not in "fiu" or array.ndim != 2 or array.shape[1] != width:
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
        return features_in_memory("array", array, About())
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        found = f"{array.dtype} {list(array.shape)}"
        raise DataError(
            f"the array is {found}: numbers [N, width], or images uint8 [N, H, W(, 3)], are needed"
        )
    return ArrayImages(
        name="array",
        ids=np.arange(len(array), dtype=np.int64),
        fingerprint=fingerprint("array", content, str(array.shape)),
        notes=["no labels"],
        images=np.ascontiguousarray(array),
    )


def _item(source: Any, i: int) -> tuple[Any, Any]:
    """Value and label (or None) of an item. Raises DataError: another form."""
    found = source[i]
    if isinstance(found, tuple | list) and found:
        return found[0], found[1] if len(found) > 1 else None
    if isinstance(found, dict | tuple | list):
        what = "(image, label), (vector, label), an image or a vector"
        raise DataError(f"item {i} is a {type(found).__name__}: {what} is needed")
    return found, None


def _of_item(source: Any, lock: Any, part: Callable[[tuple[Any, Any], str], Any], i: int) -> Any:
    """A part of an item, read by one thread at a time. Raises BrokenImageError: the source fails, or it is no image."""
    try:
        with lock:
            found = _item(source, i)
        return part(found, f"item {i}")
    except Exception as error:  # any error of the source
        why = " ".join(str(error).split())[:160] or type(error).__name__
        raise BrokenImageError(f"item {i}", why) from None


def open_items(source: Any, *, with_labels: bool, max_bad: float) -> Dataset:
    """A map-style data set: items are (image, label), (vector, label), an image or a vector.

    Labels are its ``targets`` or ``labels`` (with class names in ``classes``), else they are taken from the items, which are all read
    once. Vectors are kept in memory; images are read on demand, so the source must return the same image each time.
    """
    name = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")
    n = len(source)
    if not n:
        raise DataError(f"{name} has no items")
    try:
        first = _item(source, 0)[0]
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{name}: item 0 cannot be read ({' '.join(str(error).split())[:160]})") from None
    labels = _listed_labels(source, n) if with_labels else None
    look = with_labels and labels is None
    if not _is_vector(first):
        return _images(source, name, n, labels, look, max_bad)
    width = len(as_array(first, "item 0"))
    check_memory(4 * n * width, f"{name}: {n:,} vectors", None, "save them as .npy, which is streamed")
    x, targets = np.empty((n, width), np.float32), []
    with stage("reading", n) as reading:
        for i in range(n):
            value, target = _item(source, i)
            row = as_array(value, f"item {i}")
            if row.shape != (width,):
                raise DataError(
                    f"{name}: item {i} is {list(row.shape)}, item 0 [{width}]: one width is needed"
                )
            x[i] = row
            targets.append(target)
            reading.advance()
    return features_in_memory(name, x, About(_given_labels(targets) if look else labels))


def _is_vector(value: Any) -> bool:
    try:
        return as_array(value, "").ndim == 1
    except DataError:
        return False


def _images(source: Any, name: str, n: int, labels: Labels | None, look: bool, max_bad: float) -> FileImages:
    lock = threading.Lock()
    found = FileImages(
        name=name,
        ids=np.arange(n, dtype=np.int64),
        fingerprint="",
        bad=BadItems(n, max_bad),
        paths=[f"item {i}" for i in range(n)],
        fetch=partial(_of_item, source, lock, lambda item, where: to_pixels(item[0], where)),
    )
    images = found.read(np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64)))
    again = found.read(np.array([0]))
    if images[0] is not None and (again[0] is None or not np.array_equal(images[0], again[0])):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    if look:
        targets = []
        with stage("labels", n) as reading:
            for i in range(n):
                try:
                    targets.append(_of_item(source, lock, lambda item, _: item[1], i))
                except BrokenImageError as error:
                    found.bad.add(i, f"item {i}", error.why)
                    targets.append(None)
                reading.advance()
        labels = _given_labels(targets)
    found.labels = labels
    found.notes = [] if labels is not None else ["no labels"]
    digests = [
        b"" if image is None else hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
        for image in images
    ]
    found.fingerprint = fingerprint("items", str(n), *digests, "" if labels is None else labels.fingerprint())
    return found


def _listed_labels(source: Any, n: int) -> Labels | None:
    for name in ("targets", "labels"):
        values = getattr(source, name, None)
        if values is None or not hasattr(values, "__len__") or len(values) != n:
            continue
        names = getattr(source, "classes", None)
        array = np.asarray(without_gradient(values))
        if array.ndim == 1 and array.dtype.kind in "iu" and isinstance(names, list | tuple):
            return Labels.from_ids(array, [str(text) for text in names])
        return labels_of(values, n)
    return None


def _given_labels(targets: list[Any]) -> Labels | None:
    """Labels inside the items: numbers, names, or 0/1 per class."""
    if all(target is None for target in targets):
        return None
    plain = [without_gradient(t) for t in targets]
    shapes = {t.shape if isinstance(t, np.ndarray) else () for t in plain}
    several = len(shapes) == 1 and len(next(iter(shapes))) == 1
    return labels_of(np.stack(plain) if several else plain, len(plain))

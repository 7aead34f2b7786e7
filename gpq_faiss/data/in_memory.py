"""Arrays, tensors, lists and map-style data sets of torch, as data sets."""

from __future__ import annotations

import hashlib
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..progress import stage
from .base import ArrayImages, Dataset, ImageDataset, held_features, images
from .images import BrokenImageError, as_array, to_pixels, without_gradient
from .labels import Labels, labels_of
from .tables import PLAIN, About, Options

_SAMPLED = 64
"""Items whose content is hashed for a fingerprint."""


def open_array(values: Any, o: Options = PLAIN) -> Dataset:
    """Vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W]. Raises DataError: neither."""
    array = as_array(values, "the array")
    if array.ndim == 2:
        return held_features("array", array, About())
    content = _digest(array)
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    mark = fingerprint("array", content, str(array.shape))
    ids = np.arange(len(array), dtype=np.int64)
    images = np.ascontiguousarray(array)
    return ArrayImages(name="array", ids=ids, fingerprint=mark, images=images, notes=["no labels"])


def _digest(array: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def open_items(source: Any, o: Options = PLAIN) -> ImageDataset:
    """A list or a map-style data set of images, in any form that :func:`.images.to_images` takes, or of (image, label).

    Images are read on demand, one thread at a time, so the source must return the same image each time.
    """
    name = type(source).__name__
    if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
        raise UsageError(f"{name} has no access by index: a data set with len() and [i] is needed")
    n, lock = len(source), threading.Lock()
    if not n:
        raise DataError(f"{name} has no items")

    def item(i: int) -> tuple[Any, Any]:
        try:
            with lock:
                found = source[i]
        except Exception as error:  # any error of the source
            raise BrokenImageError(f"item {i}", one_line(error)) from None
        pair = isinstance(found, tuple | list) and len(found) == 2
        return (found[0], found[1]) if pair else (found, None)

    def fetch(i: int) -> NDArray[np.uint8]:
        try:
            return to_pixels(item(i)[0], f"item {i}")
        except DataError as error:
            raise BrokenImageError(f"item {i}", getattr(error, "why", str(error))) from None

    def labels() -> Labels | None:
        """By ``targets`` (with class names in ``classes``), else inside the items, which are then all read."""
        targets = getattr(source, "targets", None)
        if targets is None:
            targets = []
            with stage("reading labels", n) as reading:
                for i in range(n):
                    try:
                        targets.append(item(i)[1])
                    except BrokenImageError:  # counted when it is read as an image
                        targets.append(None)
                    reading.advance()
        if all(target is None for target in targets):
            return None
        plain = [without_gradient(target) for target in targets]
        classes = getattr(source, "classes", None)
        hot = all(isinstance(target, np.ndarray) and target.ndim == 1 for target in plain)
        values = np.asarray(plain) if classes is not None or hot else plain
        return labels_of(values, "labels", n, None if classes is None else [str(text) for text in classes])

    about = About(labels() if o.want_labels else None)
    about.notes = ["no labels"] * (about.labels is None)
    own = [f"item {i}" for i in range(n)]
    found = images(name, "items", own, own, about, o.max_bad, fetch=fetch)
    found.texts = {}
    sampled = np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64))
    pixels, again = found.read(sampled), found.read(sampled[:1])[0]
    if pixels[0] is not None and (again is None or not np.array_equal(pixels[0], again)):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    digests = [b"" if x is None else bytes.fromhex(_digest(x)) for x in pixels]
    found.fingerprint = fingerprint("items", str(n), *digests, about.mark())
    return found

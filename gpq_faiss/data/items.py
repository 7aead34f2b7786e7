"""Data sets from in-memory arrays and map-style torch data sets."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import check_memory
from ..progress import stage
from .arrays import without_gradient
from .base import BadItems, Dataset, ImageDataset
from .embeddings import FileFeatures
from .frames import features_in_memory, labels_of
from .images import ArrayImages, check_max_bad, positions_of
from .in_memory import as_array, to_pixels
from .labels import Labels, Rows

_SAMPLED = 64
"""Items whose content is hashed for a fingerprint."""


def open_array(values: Any) -> FileFeatures | ArrayImages:
    """Vectors, numbers [N, width], or images, uint8 [N, H, W], [N, H, W, 3] or [N, 3, H, W].

    Raises:
        DataError: neither.
    """
    array = as_array(values, "the array")
    content = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
    if array.ndim == 2:
        return features_in_memory("array", array, content)
    if array.ndim == 4 and array.shape[3] != 3 and array.shape[1] == 3:
        array = array.transpose(0, 2, 3, 1)
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or (array.ndim == 4 and array.shape[3] != 3):
        raise DataError(
            f"the array is {array.dtype} {list(array.shape)}: numbers [N, width], or images uint8 [N, H, W(, 3)], are needed"
        )
    return ArrayImages(
        name="array",
        ids=np.arange(len(array), dtype=np.int64),
        fingerprint=fingerprint("array", content, str(array.shape)),
        notes=["no labels"],
        images=np.ascontiguousarray(array),
    )


@dataclass(kw_only=True)
class ItemImages(ImageDataset):
    """Images of a torch data set.

    Attributes:
        source: the data set, read by one thread at a time.
    """

    source: Any = field(repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None if the source failed (counted in :attr:`bad`).

        Raises:
            DataError: too many failures.
        """
        out: list[NDArray[np.uint8] | None] = []
        for i in positions_of(rows, len(self)):
            try:
                with self._lock:
                    value, _ = _item(self.source, i)
                out.append(to_pixels(value, f"item {i}"))
            except Exception as error:  # any error of the source
                self.bad.add(i, f"item {i}", " ".join(str(error).split())[:160] or type(error).__name__)
                out.append(None)
        return out


def _item(source: Any, i: int) -> tuple[Any, Any]:
    """Value and label (or None) of an item. Raises DataError: another form."""
    found = source[i]
    if isinstance(found, tuple | list) and found:
        return found[0], found[1] if len(found) > 1 else None
    if isinstance(found, dict | tuple | list):
        raise DataError(
            f"item {i} is a {type(found).__name__}: (image, label), (vector, label), an image or a vector is needed"
        )
    return found, None


def open_items(source: Any, *, with_labels: bool = True, max_bad: float = 0.01) -> Dataset:
    """A map-style data set: items are (image, label), (vector, label), an image or a vector.

    Labels are its ``targets`` or ``labels`` (with class names in ``classes``), else they are taken from the items, which are all read
    once. Vectors are kept in memory; images are read on demand, so the source must return the same image each time.

    Args:
        with_labels: look for labels.
        max_bad: allowed fraction of unreadable items.

    Raises:
        UsageError: no length or no access by index.
        DataError: items of unknown form, or different items at each read.
    """
    check_max_bad(max_bad)
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
    if not _is_vector(first):
        return _images(source, name, n, labels, with_labels and labels is None, max_bad)
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
    if with_labels and labels is None:
        labels = _given_labels(targets)
    return features_in_memory(name, x, hashlib.sha256(x.tobytes()).hexdigest(), labels=labels)


def _is_vector(value: Any) -> bool:
    try:
        return as_array(value, "").ndim == 1
    except DataError:
        return False


def _images(source: Any, name: str, n: int, labels: Labels | None, look: bool, max_bad: float) -> ItemImages:
    found = ItemImages(
        name=name, ids=np.arange(n, dtype=np.int64), fingerprint="", bad=BadItems(n, max_bad), source=source
    )
    sample = np.unique(np.linspace(0, n - 1, num=min(_SAMPLED, n)).astype(np.int64))
    images = found.read(sample)
    again = found.read(sample[:1])
    if images[0] is not None and (again[0] is None or not np.array_equal(images[0], again[0])):
        raise DataError(f"{name}: item 0 differs at each read: leave out random transforms")
    if look:
        labels = _given_labels(_targets(found))
    sizes = {image.shape[:2] for image in images if image is not None}
    height, width = next(iter(sizes), (0, 1))
    found.native_size = height if len(sizes) == 1 and height == width else None
    found.labels = labels
    found.notes = [] if labels is not None else ["no labels"]
    digests = [
        b"" if image is None else hashlib.sha256(np.ascontiguousarray(image).tobytes()).digest()
        for image in images
    ]
    found.fingerprint = fingerprint("items", str(n), *digests, "" if labels is None else labels.fingerprint())
    return found


def _targets(images: ItemImages) -> list[Any]:
    out = []
    with stage("labels", len(images)) as reading:
        for i in range(len(images)):
            try:
                out.append(_item(images.source, i)[1])
            except Exception as error:
                images.bad.add(i, f"item {i}", " ".join(str(error).split())[:160] or type(error).__name__)
                out.append(None)
            reading.advance()
    return out


def _listed_labels(source: Any, n: int) -> Labels | None:
    for name in ("targets", "labels"):
        values = getattr(source, name, None)
        if values is None or not hasattr(values, "__len__") or len(values) != n:
            continue
        names = getattr(source, "classes", None)
        array = np.asarray(without_gradient(values))
        if (
            array.ndim == 1
            and array.dtype.kind in "iu"
            and isinstance(names, Sequence)
            and not isinstance(names, str)
        ):
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

"""Names, labels, originals and thumbnails of items, from their data set."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..codes.checks import Ids, repeated_id
from ..data.base import Dataset, ImageDataset
from ..data.images import FileImages, resize_square, shown
from ..errors import DataError
from ..indexes.items import IdMap

THUMBNAIL = 192
"""Longer side of thumbnails in pixels."""
_PIXELATED = 64  # up to this side PNG is smaller than JPEG, and exact
_CACHED = 2000  # thumbnails, some 10 KB each


class Catalogue:
    """Items of a data set by id, with the same ids as in the index. Thread-safe.

    Raises:
        DataError: a repeated id in the data.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        repeated = repeated_id(dataset.ids)
        if repeated is not None:
            raise DataError(f"{dataset.name}: id {repeated} occurs more than once: every item needs its own")
        self._order = np.argsort(dataset.ids, kind="stable")
        ids = dataset.ids[self._order]
        plain = not len(ids) or (ids[0] == 0 and ids[-1] == len(ids) - 1)
        self._map = IdMap(len(ids), None if plain else ids)
        self._thumbnails = lru_cache(_CACHED)(self._thumbnail)

    def rows(self, ids: Ids) -> Ids:
        """Row of each id in the data, -1 if missing: int64 [n]."""
        at = self._map.positions_of(ids)
        return np.where(at >= 0, self._order[at], -1)

    def row(self, number: int) -> int | None:
        """Row of an id in the data."""
        row = int(self.rows(np.array([number], np.int64))[0])
        return row if row >= 0 else None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the labels."""
        return () if self.dataset.labels is None else self.dataset.labels.class_names

    @cached_property
    def _root(self) -> str:
        assert isinstance(self.dataset, FileImages)
        return os.path.commonpath([os.path.dirname(path) for path in self.dataset.paths])

    def name(self, row: int) -> str | None:
        """Name of an item; for a file its path relative to the common folder, without local directories."""
        if not isinstance(self.dataset, FileImages):
            return None
        return shown(os.path.relpath(self.dataset.paths[row], self._root))

    def labels(self, row: int) -> list[str]:
        """Names of the labels of an item."""
        labels = self.dataset.labels
        if labels is None:
            return []
        return [labels.class_names[c] for c in np.flatnonzero(labels.dense(np.array([row]), np.uint8)[0])]

    def have_label(self, ids: Ids, names: Sequence[str]) -> NDArray[np.bool_]:
        """bool [n]: whether the item of each id has one of these labels."""
        labels, rows = self.dataset.labels, self.rows(ids)
        one_of = np.zeros(len(self.dataset) + 1, np.bool_)  # the last one for row -1
        for name in names:
            assert labels is not None
            one_of[:-1] |= labels.column(labels.class_names.index(name))
        return one_of[rows]

    def original(self, row: int, image_size: int) -> NDArray[Any] | None:
        """Model input: features float32 [width], or an image uint8 [3, size, size]; None if unreadable."""
        if not isinstance(self.dataset, ImageDataset):
            return np.asarray(self.dataset.read(np.array([row]))[0])
        image = self.dataset.read(np.array([row]))[0]
        return None if image is None else resize_square(image, image_size).transpose(2, 0, 1)

    def thumbnail(self, row: int) -> tuple[bytes, str] | None:
        """A thumbnail and its media type; None if there is no picture."""
        return self._thumbnails(row)

    def _thumbnail(self, row: int) -> tuple[bytes, str] | None:
        if not isinstance(self.dataset, ImageDataset):
            return None
        try:
            image = self.dataset.read(np.array([row]))[0]
        except DataError:  # too many are broken
            return None
        if image is None:
            return None
        picture = Image.fromarray(image)
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        small = max(picture.size) <= _PIXELATED
        written = io.BytesIO()
        picture.save(written, "PNG" if small else "JPEG", quality=85)
        return written.getvalue(), "image/png" if small else "image/jpeg"

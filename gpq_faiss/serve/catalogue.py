"""Names, labels, originals and thumbnails of items, from their data set."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..codes.checks import Ids, repeated_id
from ..data.base import Dataset, ImageDataset
from ..data.images import resize_square
from ..errors import DataError
from ..indexes.filters import Allow, Deny
from .requests import SearchRequest

THUMBNAIL = 192
"""Longer side of thumbnails in pixels."""
_PIXELATED = 64  # up to this side PNG is smaller than JPEG, and exact
_CACHED = 2000  # thumbnails, some 10 KB each
_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: its multiples are spread evenly modulo 2**64


class Catalogue:
    """Items of a data set by id, with the same ids as in the index; without a data set none. Thread-safe.

    Raises:
        DataError: a repeated id in the data.
    """

    def __init__(self, dataset: Dataset | None) -> None:
        self.dataset, self._ids = dataset, np.empty(0, np.int64) if dataset is None else dataset.ids
        self._labels = None if dataset is None else dataset.labels
        self.classes: tuple[str, ...] = () if self._labels is None else self._labels.class_names
        self.counts: list[int] = [] if self._labels is None else self._labels.counts().tolist()
        repeated = repeated_id(self._ids)
        if dataset is not None and repeated is not None:
            raise DataError(f"{dataset.name}: id {repeated} occurs more than once: every item needs its own")
        self.by_turns = self._by_turns()
        self.thumbnail = functools.lru_cache(_CACHED)(self._thumbnail)

    def row(self, number: int) -> int | None:
        """Row of an id in the data."""
        row = -1 if self.dataset is None else int(self.dataset.rows_of(np.array([number], np.int64))[0])
        return row if row >= 0 else None

    def about(self, row: int) -> tuple[str | None, tuple[str, ...]]:
        """Name, if it has one, and labels of an item."""
        names = None if self.dataset is None else self.dataset.texts.get("name")
        labels = () if self._labels is None else self._labels.names_of(row)
        return None if names is None else str(names[row]) or None, labels

    def labelled(self, names: Sequence[str], what: str) -> Ids:
        """Ids of the items with one of these labels, which ``what`` gives. Raises DataError: a label that no item has."""
        mask = np.zeros(len(self._ids), np.bool_)
        for name in names:
            if self._labels is None or name not in self.classes:
                raise DataError(f"{what}: no item has the label {name[:100]!r}")
            mask |= self._labels.column(self.classes.index(name))
        return self._ids[mask]

    def filter(self, asked: SearchRequest) -> Allow | Deny | None:
        """The filter of a request. Raises DataError: a label that no item has."""
        allowed = [] if asked.allow_ids is None else [np.array(asked.allow_ids, np.int64)]
        if asked.allow_labels is not None:
            allowed.append(self.labelled(asked.allow_labels, "labels"))
        denied = np.array(asked.deny_ids or (), np.int64)
        if asked.deny_labels:
            denied = np.union1d(denied, self.labelled(asked.deny_labels, "labels"))
        if allowed:
            return Allow(np.setdiff1d(functools.reduce(np.intersect1d, allowed), denied))
        return Deny(denied) if len(denied) else None

    def _by_turns(self) -> Ids:
        """All ids by turns: an item of each label, a second one of each label, and so on.

        An item of several labels has the turn of its rarest one. Within a label the order depends on the ids alone, so that items that
        come or go do not change it.
        """
        group, turn = np.full((2, len(self._ids)), len(self.classes))  # of unlabelled items
        if self._labels is not None:
            for c in np.argsort(-self._labels.counts(), kind="stable"):
                group[self._labels.column(int(c))] = c
        order, sizes = np.lexsort((self._ids.astype(np.uint64) * _SPREAD, group)), np.bincount(group)
        turn[order] = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self._ids[np.lexsort((group, turn))]

    def original(self, row: int, image_size: int) -> NDArray[Any] | None:
        """Model input: features float32 [width], or an image uint8 [3, size, size]; None if unreadable."""
        assert self.dataset is not None
        item = self.dataset.read(np.array([row]))[0]
        if not isinstance(self.dataset, ImageDataset):
            return np.asarray(item)
        return None if item is None else resize_square(item, image_size).transpose(2, 0, 1)

    def _thumbnail(self, row: int | None) -> tuple[bytes, str] | None:
        """A thumbnail and its media type; None if there is no picture."""
        image = None
        if isinstance(self.dataset, ImageDataset) and row is not None:
            with contextlib.suppress(DataError):  # too many are broken
                image = self.dataset.read(np.array([row]))[0]
        if image is None:
            return None
        picture = Image.fromarray(image)
        picture.thumbnail((THUMBNAIL, THUMBNAIL))
        small = max(picture.size) <= _PIXELATED
        written = io.BytesIO()
        picture.save(written, "PNG" if small else "JPEG", quality=85)
        return written.getvalue(), "image/png" if small else "image/jpeg"

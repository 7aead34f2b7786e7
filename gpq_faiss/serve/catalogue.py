"""Names, labels and pictures of the items of a service.

Names and labels are those of the index and its changes. A picture comes from a data set, by the name of
the item.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..codes.checks import Ids
from ..data.base import Dataset, ImageDataset
from ..errors import DataError
from ..indexes.index import ChangedItems, Index, ItemSource
from .live import LiveIndex

log = logging.getLogger(__name__)

_THUMBNAIL_SIDE = 192  # pixels of the longer side
_PNG_SIDE = 64  # up to this side PNG is smaller than JPEG, and exact
_CACHED_THUMBNAILS = 2000  # some 10 KB each


class LabelTable(NamedTuple):
    """Which items have which labels, in one pair for each label of each item.

    Attributes:
        names: of C labels, in alphabetical order.
        numbers: int64 [n], of the label of each pair.
        ids: int64 [n], of the item of each pair.
    """

    names: list[str]
    numbers: Ids
    ids: Ids

    @property
    def counts(self) -> Ids:
        """Number of items of each label, int64 [C]."""
        return np.bincount(self.numbers, minlength=len(self.names))

    def with_labels(self, names: Sequence[str], field: str) -> Ids:
        """Return the ids of all items with one of these labels.

        Raises:
            DataError: no item has one of the labels; ``field`` is where the request gives it.
        """
        for name in names:
            if name not in self.names:
                raise DataError(f"{field}: no item has the label {name[:100]!r}")
        numbers = [self.names.index(name) for name in names]
        return np.unique(self.ids[np.isin(self.numbers, numbers)])

    def round_robin(self) -> Ids:
        """Return the ids int64 [n] of one item of each label in turn, a second one of each, and so on."""
        order = np.lexsort((self.ids, self.numbers))
        starts = np.cumsum(self.counts) - self.counts
        turns = np.arange(len(order)) - starts[self.numbers[order]]
        return self.ids[order[np.argsort(turns, kind="stable")]]


class Catalogue:
    """Names, labels and pictures of items by id. Thread-safe.

    Args:
        live: the index.
        dataset: pictures of the items, by name; without names, these must be the data that were indexed, and
            pictures are found by id. None: there are no pictures.

    Attributes:
        labels: the :class:`LabelTable` of an index, cached.
        thumbnail: a small picture of a row of the data set, and its media type, or None if it is broken; cached.
    """

    def __init__(self, live: LiveIndex, dataset: Dataset | None = None) -> None:
        self.live, self.dataset = live, dataset
        self.labels = functools.lru_cache(1)(self._labels)
        self.thumbnail = functools.lru_cache(_CACHED_THUMBNAILS)(self._thumbnail)
        names = None if dataset is None else dataset.texts.get("name")
        self._rows = None if names is None else {str(name): row for row, name in enumerate(names)}
        if dataset is not None and names is None:
            source = live.index.items
            if source is None or source.data_fingerprint != dataset.fingerprint:
                log.warning(
                    "%s has no names, and is not the data that were indexed: no pictures",
                    dataset.name,
                )
                self.dataset = None

    def items(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return id, name and labels of each item [n]."""
        source = self.live.index.items
        items = [None] * len(ids) if source is None else source.lookup(np.array(ids, np.int64))
        return [
            {"id": id_, "name": item and item.name, "labels": item and item.labels}
            for id_, item in zip(ids, items, strict=True)
        ]

    def find(self, name: str) -> list[int]:
        """Return the ids of the items with a name, in ascending order."""
        source = self.live.index.items
        return [] if source is None else source.find(name)

    def _labels(self, index: Index) -> LabelTable:
        source = index.items.source if isinstance(index.items, ChangedItems) else index.items
        names, numbers, ids = _labels_in_file(source)
        changes = dict(self.live.changes)
        unchanged = ~np.isin(ids, np.fromiter(changes, np.int64))
        pairs = [(name, id_) for id_, change in changes.items() for name in change.labels or ()]
        ranks = {name: rank for rank, name in enumerate(sorted({*names, *dict(pairs)}))}
        file_ranks = np.array([ranks[name] for name in names], np.int64)[numbers[unchanged]]
        change_ranks = np.array([ranks[name] for name, _ in pairs], np.int64)
        change_ids = np.array([id_ for _, id_ in pairs], np.int64)
        return LabelTable(
            list(ranks), np.append(file_ranks, change_ranks), np.append(ids[unchanged], change_ids)
        )

    # Pictures -----------------------------------------------------------------------------------

    def row(self, id_: int) -> int | None:
        """Return the row of an item in the data set; None if it is not in it."""
        if self._rows is not None:
            return self._rows.get(self.items([id_])[0]["name"])
        if self.dataset is None or id_ in self.live.changes:
            return None
        row = int(self.dataset.rows_of(np.array([id_]))[0])
        return None if row < 0 else row

    def read(self, row: int) -> NDArray[Any] | None:
        """Return an item of the data set: features float32 [width], or an image uint8 [H, W, 3]; None if it is broken."""
        assert self.dataset is not None
        with contextlib.suppress(DataError):  # more images are broken than the data set allows
            item: NDArray[Any] | None = self.dataset.read(np.array([row]))[0]
            return item
        return None

    def _thumbnail(self, row: int) -> tuple[bytes, str] | None:
        image = self.read(row) if isinstance(self.dataset, ImageDataset) else None
        if image is None:
            return None
        picture = Image.fromarray(image)
        picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        format_ = "PNG" if max(picture.size) <= _PNG_SIDE else "JPEG"
        content = io.BytesIO()
        picture.save(content, format_, quality=85)
        return content.getvalue(), f"image/{format_.lower()}"


@functools.lru_cache(1)
def _labels_in_file(items: ItemSource | None) -> tuple[list[str], Ids, Ids]:
    """Return the names of the labels of an index file, and pairs: numbers of labels and ids, int64 [n]."""
    numbers_by_name: dict[str, int] = {}
    parse = functools.cache(
        lambda labels: [
            numbers_by_name.setdefault(name, len(numbers_by_name)) for name in json.loads(labels)
        ]
    )
    rows = () if items is None else items.rows()
    pairs = [
        (number, id_)
        for id_, _, labels, _ in rows
        if labels is not None
        for number in parse(labels)
    ]
    numbers, ids = np.array(pairs, np.int64).reshape(-1, 2).T
    return list(numbers_by_name), numbers, ids

"""Names, labels and pictures of the items of a service.

Names and labels come from the index and its changes. Pictures come from a data set, and are found
by the name of the item.
"""

import functools
import io
import itertools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from PIL import Image

from ..codes.checks import Ids
from ..data.base import Dataset, ImageDataset
from ..errors import DataError
from ..indexes.index import Index
from ..store.items import ChangedItems
from .live import LiveIndex

log = logging.getLogger(__name__)

_THUMBNAIL_SIDE = 192  # pixels of the longer side
_PNG_SIDE = 64  # up to this side PNG is smaller than JPEG, and exact
_NO_ITEMS = ChangedItems(None, {})


class Catalogue:
    """Names, labels and pictures of items by id. Thread-safe.

    Args:
        live: the index.
        dataset: pictures of the items, found by name. A data set without names must be the one that
            was indexed, and its pictures are found by id. None: there are no pictures.

    Attributes:
        thumbnail: a cached function from a row of the data set to a small picture and its media
            type, or None if the picture is broken.
        labels: a cached function from an index to its labels in alphabetical order, and the ids
            int64 [n] of the items of each.
    """

    def __init__(self, live: LiveIndex, dataset: Dataset | None = None) -> None:
        self.live, self.dataset = live, dataset
        self.thumbnail = functools.lru_cache(2000)(self._thumbnail)  # some 10 KB each
        self.labels = functools.lru_cache(1)(self._labels)
        self._rows: dict[str, int] | None = None
        if dataset is None:
            return
        self.dataset = replace(dataset, max_bad=1.0)  # broken pictures are skipped
        names = dataset.texts.get("name")
        if names is not None:
            texts = [str(name) for name in names]
            counts = Counter(texts)
            self._rows = {name: row for row, name in enumerate(texts) if counts[name] == 1}
        if not self.has_pictures:
            log.warning(
                "%s has no names, and is not the data that were indexed: no pictures", dataset.name
            )

    def items(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return id, name and labels of each item [n]."""
        items = (self.live.index.items or _NO_ITEMS).lookup(np.array(ids, np.int64))
        return [
            {"id": id_, "name": item and item.name, "labels": item and item.labels}
            for id_, item in zip(ids, items, strict=True)
        ]

    def find(self, name: str) -> list[int]:
        """Return the ids of the items with a name, in ascending order."""
        return (self.live.index.items or _NO_ITEMS).find(name)

    # Labels -------------------------------------------------------------------------------------

    def _labels(self, index: Index) -> dict[str, Ids]:
        items: Any = index.items.source if isinstance(index.items, ChangedItems) else index.items
        changes = dict(self.live.changes)  # another thread may add changes meanwhile
        changed = np.fromiter(changes, np.int64)
        table: dict[str, list[int]] = defaultdict(list)
        for name, ids in _labels_in_file(items).items():
            table[name] = np.setdiff1d(ids, changed).tolist()
        for id_, change in changes.items():
            for name in change.labels or ():
                table[name].append(id_)
        return {name: np.array(sorted(table[name])) for name in sorted(table) if table[name]}

    def with_labels(self, names: Sequence[str]) -> Ids:
        """Return the ids of all items with at least one of these labels.

        Raises:
            DataError: a label is unknown.
        """
        table = self.labels(self.live.index)
        for name in names:
            if name not in table:
                raise DataError(f"no item has the label {name[:100]!r}")
        return np.unique(np.concatenate([np.empty(0, np.int64), *(table[name] for name in names)]))

    def sample(self, k: int, names: Sequence[str]) -> list[int]:
        """Return the ids of up to ``k`` items, taken from the labels in round robin.

        Args:
            names: the labels to sample; empty: all.

        Raises:
            DataError: a label is unknown.
        """
        self.with_labels(names)
        table = self.labels(self.live.index)
        columns = [table[name][:k].tolist() for name in names or table]
        turns = itertools.chain.from_iterable(itertools.zip_longest(*columns))
        return [id_ for id_ in dict.fromkeys(turns) if id_ is not None][:k]

    # Pictures -----------------------------------------------------------------------------------

    @property
    def has_pictures(self) -> bool:
        """Whether the data set has names, or is the one that was indexed."""
        if self.dataset is None or self._rows is not None:
            return self.dataset is not None
        fingerprint = (self.live.index.items or _NO_ITEMS).data_fingerprint
        return fingerprint == self.dataset.fingerprint and self.live.is_complete

    def row(self, id_: int) -> int | None:
        """Return the row of an item in the data set, or None if the data set lacks it."""
        if self.dataset is None or not self.has_pictures:
            return None
        if self._rows is not None:
            return self._rows.get(self.items([id_])[0]["name"])
        row = -1 if id_ in self.live.changes else int(self.dataset.rows_of(np.array([id_]))[0])
        return None if row < 0 else row

    def _thumbnail(self, row: int) -> tuple[bytes, str] | None:
        images = (
            self.dataset.read(np.array([row])) if isinstance(self.dataset, ImageDataset) else [None]
        )
        if images[0] is None:
            return None
        picture = Image.fromarray(images[0])
        picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        format_ = "PNG" if max(picture.size) <= _PNG_SIDE else "JPEG"
        content = io.BytesIO()
        picture.save(content, format_, quality=85)
        return content.getvalue(), f"image/{format_.lower()}"


@functools.lru_cache(1)
def _labels_in_file(items: Any) -> dict[str, Ids]:
    """Return the labels of the items of an index file, and the ids int64 [n] of each."""
    parse = functools.cache(json.loads)  # many items have the same labels
    table: dict[str, list[int]] = defaultdict(list)
    for id_, _, labels, _ in (items or _NO_ITEMS).rows():
        for name in parse(labels or "[]"):
            table[name].append(id_)
    return {name: np.array(ids, np.int64) for name, ids in table.items()}

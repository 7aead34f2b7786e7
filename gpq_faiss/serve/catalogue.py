"""Names, labels and pictures of the items of a service.

Names and labels come from the index and its changes. Pictures come from a data set, and are found
by the name of the item; items that were added or replaced by a request have none.
"""

import functools
import io
import itertools
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ..codes.checks import Ids
from ..data.base import Dataset
from ..errors import DataError
from ..indexes.index import Index
from ..store.items import CHANGED_DATA, ChangedItems, Item, ItemSource, PictureRows
from . import schemas
from .live import LiveIndex

log = logging.getLogger(__name__)

_THUMBNAIL_SIDE = 192  # pixels of the longer side
_PNG_SIDE = 64  # up to this side PNG is smaller than JPEG, and exact


class Catalogue:
    """Names, labels and pictures of items by id. Thread-safe.

    Args:
        live: the index.
        dataset: pictures of the items, found by name. A data set without names must be the one that
            was indexed, and its pictures are found by id. None: there are no pictures.

    Attributes:
        labels: a cached function from an index to its labels in alphabetical order, and the ids
            int64 [n] of the items of each.
    """

    def __init__(self, live: LiveIndex, dataset: Dataset | None = None) -> None:
        self.live = live
        self.dataset = dataset
        self.labels = functools.lru_cache(1)(self._labels)
        if dataset is None:
            return
        self.dataset = replace(dataset, max_bad=1.0)  # broken pictures are skipped
        self._rows = PictureRows(dataset.ids, dataset.texts)
        if not self.has_pictures:
            log.warning(
                "%s has no files with names, and is not the data that were indexed: no pictures",
                dataset.name,
            )
        elif live.items.data_fingerprint not in ("", dataset.fingerprint):
            log.warning(CHANGED_DATA, dataset.name)

    def items(self, ids: Sequence[int]) -> list[schemas.Item]:
        """Return id, name and labels of each item [n]."""
        items = [(id_, self.live.items.item(id_) or Item({})) for id_ in ids]
        return [schemas.Item(id=id_, name=item.name, labels=item.labels) for id_, item in items]

    # Labels -------------------------------------------------------------------------------------

    def _labels(self, index: Index) -> dict[str, Ids]:
        items = index.items or ItemSource()
        source = items.source if isinstance(items, ChangedItems) else items
        changes = dict(self.live.changes)  # another thread may add changes meanwhile
        changed = np.fromiter(changes, np.int64)
        table: dict[str, list[int]] = defaultdict(list)
        for name, ids in _labels_in_file(source).items():
            table[name] = np.setdiff1d(ids, changed).tolist()
        for id_, change in changes.items():
            for name in change.labels or ():
                table[name].append(id_)
        return {name: np.array(sorted(table[name])) for name in sorted(table) if table[name]}

    def _ids_of(self, names: Sequence[str]) -> list[Ids]:
        """Return the ids int64 [n] of the items with each label; without names: with any label.

        Raises:
            DataError: a label is unknown.
        """
        table = self.labels(self.live.index)  # once, as another thread may change the index
        for name in names:
            if name not in table:
                raise DataError(f"no item has the label {name[:100]!r}")
        return [table[name] for name in names or table]

    def with_labels(self, names: Sequence[str]) -> Ids:
        """Return the ids of all items with at least one of these labels.

        Raises:
            DataError: a label is unknown.
        """
        columns = self._ids_of(names) if names else []
        return np.unique(np.concatenate([np.empty(0, np.int64), *columns]))

    def sample(self, k: int, names: Sequence[str]) -> list[int]:
        """Return the ids of up to ``k`` items, taken from the labels in round robin.

        Args:
            names: the labels to sample; empty: all, and then any other items.

        Raises:
            DataError: a label is unknown.
        """
        rounds = itertools.zip_longest(*(ids[:k].tolist() for ids in self._ids_of(names)))
        labelled = itertools.chain.from_iterable(rounds)
        # Of 2 k items, at least k are not among those before them.
        items = (id_ for _, ids in self.live.index.blocks(k) for id_ in ids.tolist())
        listed = itertools.chain(labelled, itertools.islice(items, 0 if names else 2 * k))
        return [id_ for id_ in dict.fromkeys(listed) if id_ is not None][:k]

    # Pictures -----------------------------------------------------------------------------------

    @property
    def has_pictures(self) -> bool:
        """Whether the data set has files with names, or is the one that was indexed."""
        return self.dataset is not None and (
            self._rows.are_files
            or (
                self.live.is_complete
                and self.live.items.data_fingerprint == self.dataset.fingerprint
            )
        )

    def original(self, id_: int) -> NDArray[Any] | None:
        """Return the image uint8 [H, W, 3] or the features float32 [width] of an item.

        None if the data set lacks it, it is broken, or a request has added or replaced the item.
        """
        if self.dataset is None or not self.has_pictures or id_ in self.live.changes:
            return None
        row = self._rows.find(id_, self.live.items.item(id_) or Item({}))
        return None if row < 0 else self.dataset.read(np.array([row]))[0]

    def thumbnail(self, id_: int) -> tuple[bytes, str] | None:
        """Return a small picture of an item and its media type; None if there is none."""
        original = self.original(id_)
        if original is None or original.ndim != 3:
            return None
        picture = Image.fromarray(original)
        picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        format_ = "PNG" if max(picture.size) <= _PNG_SIDE else "JPEG"
        content = io.BytesIO()
        picture.save(content, format_, quality=85)
        return content.getvalue(), f"image/{format_.lower()}"


@functools.lru_cache(1)
def _labels_in_file(source: ItemSource) -> dict[str, Ids]:
    """Return the labels of the items of an index file, and the ids int64 [n] of each."""
    parse = functools.cache(json.loads)  # many items have the same labels
    table: dict[str, list[int]] = defaultdict(list)
    for id_, _, labels, _ in source.rows():
        for name in parse(labels or "[]"):
            table[name].append(id_)
    return {name: np.array(ids, np.int64) for name, ids in table.items()}

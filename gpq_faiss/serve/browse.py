"""Items to begin with, before any query: a few of every label."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Ids
from ..data.labels import Labels
from ..indexes.items import IdMap
from .catalogue import Catalogue

_SPREAD = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio: its multiples are spread evenly modulo 2**64


class Beginning:
    """The items of the data in an index file, in an order that begins with every label.

    The order is by turns: an item of each label, a second one of each label, and so on. Within a label it depends on the ids alone, so that
    items that come or go do not change it.

    Args:
        catalogue: the data.
        filed: ids of the index file; None: all items of the data.

    Attributes:
        counts: items of each label, int64 [C].
    """

    def __init__(self, catalogue: Catalogue, filed: IdMap | None) -> None:
        self._catalogue, labels, ids = catalogue, catalogue.dataset.labels, catalogue.dataset.ids
        rows = np.arange(len(ids)) if filed is None else np.flatnonzero(filed.positions_of(ids) >= 0)
        rows = rows[np.argsort(ids[rows].astype(np.uint64) * _SPREAD, kind="stable")]
        self._rows = rows if labels is None else rows[_by_turns(labels.take(rows))]
        self.counts = self._count(rows)

    def ids(self, labels: Sequence[str] = ()) -> Ids:
        """int64 [n]: ids of all items, or of those with one of these labels."""
        ids = self._catalogue.dataset.ids[self._rows]
        return ids[self._catalogue.have_label(ids, labels)] if labels else ids

    def counts_of(self, ids: Ids) -> NDArray[np.int64]:
        """Items of each label among these ids, int64 [C]."""
        rows = self._catalogue.rows(ids)
        return self._count(rows[rows >= 0])

    def _count(self, rows: Ids) -> NDArray[np.int64]:
        labels = self._catalogue.dataset.labels
        return np.zeros(0, np.int64) if labels is None else labels.take(rows).counts()


def _by_turns(labels: Labels) -> Ids:
    """int64 [n]: an order of the items whose first C, or fewer, have every label that is there."""
    C, counts = labels.n_classes, labels.counts()
    group = np.full(len(labels), C)  # of unlabelled items
    if labels.multi_label:
        for c in np.argsort(-counts, kind="stable"):
            group[labels.column(int(c))] = c  # the rarest label of an item decides
    else:
        group = np.where(labels.has(), labels.class_ids(), C)
    by_group = np.argsort(group, kind="stable")
    sizes = np.bincount(group, minlength=C + 1)
    turn = np.empty(len(group), np.int64)
    turn[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    order = np.lexsort((group, turn))
    # A label whose items all have a rarer one has no turn of its own.
    first = [int(labels.column(int(c)).argmax()) for c in np.flatnonzero((counts > 0) & (sizes[:C] == 0))]
    return np.concatenate([np.unique(first).astype(np.int64), order[~np.isin(order, first)]])

"""Filters of search results: lists of ids and predicates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.checks import Ids, as_array
from ..data.arrays import whole_numbers
from ..errors import DataError, UsageError
from .items import IdMap

Predicate = Callable[[Ids], NDArray[np.bool_]]
"""Function from ids int64 [n], ascending, to bool [n]: whether each may be returned."""


def id_list(ids: ArrayLike | set[int] | frozenset[int] | range, what: str) -> Ids:
    """Ids as int64 [n]. Raises DataError: not a list of integers."""
    array = as_array(list(ids) if isinstance(ids, set | frozenset | range) else ids, what)
    return whole_numbers(array, what) if array.size else np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Allow:
    """Filter: only these ids. Unknown ids are ignored.

    Examples:
        >>> import gpq_faiss as gpq
        >>> Z = np.eye(16, dtype=np.float32)[None]
        >>> index = gpq.MemoryIndex.build(np.array([[0], [1], [2]], np.uint8), Z, ids=[10, 20, 30])
        >>> index.search(np.arange(16.0)[None], 1, where=gpq.Allow([10, 20]))[1].tolist()
        [[20]]
        >>> index.search(np.arange(16.0)[None], 2, where=gpq.Deny([30]))[1].tolist()
        [[20, 10]]
    """

    ids: ArrayLike | set[int] | frozenset[int] | range

    def mask(self, items: IdMap) -> NDArray[np.bool_]:
        """bool [n] over the items. Raises DataError: not a list of ids."""
        at = items.positions_of(id_list(self.ids, "allowed ids"))
        mask = np.zeros(len(items), np.bool_)
        mask[at[at >= 0]] = True
        return mask


@dataclass(frozen=True, eq=False)
class Deny:
    """Filter: all but these ids. Unknown ids are ignored."""

    ids: ArrayLike | set[int] | frozenset[int] | range

    def mask(self, items: IdMap) -> NDArray[np.bool_]:
        """bool [n] over the items. Raises DataError: not a list of ids."""
        return ~Allow(id_list(self.ids, "denied ids")).mask(items)


Filter = (
    Allow | Deny | Predicate | NDArray[Any] | list[int] | tuple[int, ...] | set[int] | frozenset[int] | range
)
"""Argument ``where``: one of these classes, a predicate, or an array, list, tuple, set or range of allowed ids (as :class:`Allow`)."""


def mask_of(where: Filter, items: IdMap) -> NDArray[np.bool_]:
    """bool [n]: the items that pass ``where``.

    Raises:
        UsageError: not a filter.
        DataError: a wrong type of array, or a predicate that does not return bool [n].
    """
    if isinstance(where, Allow | Deny):
        return where.mask(items)
    if isinstance(where, np.ndarray | list | tuple | set | frozenset | range):
        return Allow(where).mask(items)
    if not callable(where):
        raise UsageError(f"where = {type(where).__name__}: give ids, Allow, Deny or a function of ids")
    mask = np.asarray(where(items.ids.copy()))
    if mask.shape != (len(items),) or mask.dtype != np.bool_:
        raise DataError(
            f"the filter function returned {mask.dtype} {mask.shape}, expected bool ({len(items)},)"
        )
    return mask

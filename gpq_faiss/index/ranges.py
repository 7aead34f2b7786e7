"""What range searches share: the checks, and results that come in parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..codes.keys import read_keys
from ..errors import DataError, UsageError
from .proof import ProvenSearch

Part = tuple[NDArray[np.intp], ProvenSearch, Callable[[Ids], Ids]]
"""Queries that a part of the items is searched for, that search, and what makes ids of its positions."""


_MOST = float(np.finfo(np.float32).max)


def check_least(least: float) -> float:
    """The least score as a float that float32 can hold: beyond its range every score, or none, is above it.

    Raises:
        UsageError: no number, or NaN, which no score reaches or misses.
    """
    if isinstance(least, bool) or not isinstance(least, int | float | np.integer | np.floating):
        raise UsageError(f"a range search needs a number as the least score, not {least!r}")
    if np.isnan(least):
        raise UsageError("a range search needs a number as the least score, not NaN")
    least = float(least)
    return least if abs(least) <= _MOST else math.copysign(math.inf, least)


def too_many(least: float, limit: int) -> DataError:
    """The error of a range that holds more than ``limit`` results."""
    return DataError(
        f"a range search from {least:g} has more than {limit:,} results: raise the least score or the limit"
    )


def collect(parts: Iterable[Part], xq: Floats, least: float, limit: int) -> tuple[Ids, Floats, Ids]:
    """All items of all parts that score at least ``least``.

    Args:
        xq: checked queries, float32 [Q, M*d].

    Returns:
        As Faiss: lims int64 [Q + 1], D float32, I int64; the results of query i are at lims[i]:lims[i + 1], best first,
        equal scores by ascending id.

    Raises:
        DataError: more than ``limit`` results.
    """
    none = np.empty(0, np.int64)
    owner, D, found = [none], [np.empty(0, np.float32)], [none]
    total = 0
    for rows, search, ids_at in parts:
        for q, keys in zip(rows.tolist(), search.range_keys(xq[rows], least, limit - total), strict=True):
            scores, at = read_keys(keys)
            total += len(at)
            if total > limit:
                raise too_many(least, limit)
            owner.append(np.full(len(at), q, np.int64))
            D.append(scores)
            found.append(ids_at(at))
    queries, scores, ids = np.concatenate(owner), np.concatenate(D), np.concatenate(found)
    order = np.lexsort((ids, -scores, queries))
    lims = np.zeros(len(xq) + 1, np.int64)
    np.cumsum(np.bincount(queries, minlength=len(xq)), out=lims[1:])
    return lims, scores[order], ids[order]

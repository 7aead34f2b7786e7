"""Common parts of range searches: checks, and merging of partial results."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..codes.keys import read_keys
from ..errors import DataError, UsageError
from .proof import ProvenSearch

LIMIT = 10_000_000
"""Default limit of results of a range search, at about 50 bytes each: too low a score is an error before half a gigabyte."""
_MOST = float(np.finfo(np.float32).max)


class Part(NamedTuple):
    """Some of the items, searched for some of the queries.

    Attributes:
        rows: int64 [q], rows of the queries.
        search: search of the items, or of their distinct codes.
        ids_at: row numbers -> ids.
    """

    rows: NDArray[np.intp]
    search: ProvenSearch
    ids_at: Callable[[Ids], Ids]


def check_min_score(min_score: float) -> float:
    """The minimum score, clipped to the range of float32.

    Raises:
        UsageError: not a number, or NaN.
    """
    if isinstance(min_score, bool) or not isinstance(min_score, int | float | np.integer | np.floating):
        raise UsageError(f"a range search needs a number as the minimum score, not {min_score!r}")
    if np.isnan(min_score):
        raise UsageError("a range search needs a number as the minimum score, not NaN")
    value = float(min_score)
    return value if abs(value) <= _MOST else math.copysign(math.inf, value)


def too_many(min_score: float, limit: int) -> DataError:
    """The error for more than ``limit`` results."""
    return DataError(
        f"a range search from {min_score:g} has more than {limit:,} results: raise the minimum score or the limit"
    )


def collect(parts: Iterable[Part], xq: Floats, min_score: float, limit: int) -> tuple[Ids, Floats, Ids]:
    """All items of all parts with at least ``min_score``.

    Args:
        xq: checked queries, float32 [Q, M*d].

    Returns:
        As in Faiss: lims int64 [Q + 1], D float32, I int64; results of query i are at lims[i]:lims[i + 1], best first, ties in
        ascending order of id.

    Raises:
        DataError: more than ``limit`` results.
    """
    none = np.empty(0, np.int64)
    owners: list[int] = []
    D, found = [np.empty(0, np.float32)], [none]
    total = 0
    for rows, search, ids_at in parts:
        all_keys = search.range_keys(xq[rows], min_score, limit - total)
        for q, keys in zip(rows.tolist(), all_keys, strict=True):
            scores, at = read_keys(keys)
            n = len(at)
            total += n
            if total > limit:
                raise too_many(min_score, limit)
            if not n:
                continue
            owners.append(q)
            D.append(scores)
            found.append(ids_at(at))
    counts = [len(ids) for ids in found[1:]]
    scores, ids = np.concatenate(D), np.concatenate(found)
    if any(b <= a for a, b in itertools.pairwise(owners)):  # queries with results from several parts
        order = np.lexsort((ids, -scores, np.repeat(owners, counts)))
        scores, ids = scores[order], ids[order]
    lims = np.zeros(len(xq) + 1, np.int64)
    np.add.at(lims, np.array(owners, np.int64) + 1, counts)
    return np.cumsum(lims), scores, ids

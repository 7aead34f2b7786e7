"""Common parts of range searches: checks, and joining the results of queries."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..codes.checks import Floats, Ids
from ..errors import DataError, UsageError

LIMIT = 10_000_000
"""Default limit of results of a range search, at about 50 bytes each: too low a score is an error before half a gigabyte."""
_MOST = float(np.finfo(np.float32).max)


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


def check_limit(limit: int) -> None:
    """Raises UsageError: not a whole number, or negative."""
    if isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 0:
        raise UsageError(f"limit {limit!r} of a range search: it must be a whole number, at least 0")


def too_many(min_score: float, limit: int) -> DataError:
    """The error for more than ``limit`` results."""
    return DataError(
        f"a range search from {min_score:g} has more than {limit:,} results: raise the minimum score or the limit"
    )


def joined(results: Iterable[tuple[Floats, Ids]], min_score: float, limit: int) -> tuple[Ids, Floats, Ids]:
    """The results of all queries, scores and ids of each, as Faiss returns them: lims int64 [Q + 1], D float32, I int64.

    Raises:
        DataError: more than ``limit``.
    """
    D, found, counts = [np.empty(0, np.float32)], [np.empty(0, np.int64)], [0]
    for scores, ids in results:
        D.append(scores)
        found.append(ids)
        counts.append(len(ids))
        if sum(counts) > limit:
            raise too_many(min_score, limit)
    return np.cumsum(counts, dtype=np.int64), np.concatenate(D), np.concatenate(found)

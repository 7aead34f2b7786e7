"""Distinct codes with the items of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Codes, Ids

GROUP_SHARE = 0.8
"""Maximum share of distinct codes for which searching them is faster. Measured (``benchmarks/search.py``)."""


def worth_grouping(n: int, distinct: int) -> bool:
    """The rule of ``auto``: whether searching ``distinct`` codes is faster than searching ``n`` items."""
    return distinct <= GROUP_SHARE * n


@dataclass(frozen=True)
class Groups:
    """Distinct codes in the order of their first items, and the items of each.

    In this order, ties between groups go to the smallest ids, so the k best groups contain the k best items, ties ordered by id.

    Attributes:
        codes: uint8 [U, code_size].
        starts: int64 [U + 1]; ``members[starts[u]:starts[u + 1]]`` are the items of code u.
        members: row numbers of items, ascending in each group; int32 if they fit.
    """

    codes: Codes
    starts: Ids
    members: NDArray[Any]

    @classmethod
    def of(cls, codes: Codes) -> Groups:
        """Group the rows of uint8 [n, code_size]: stable sorts of 16 bits at a time, which are radix sorts."""
        n, size = codes.shape
        index = np.int32 if n < 1 << 31 else np.int64
        order: NDArray[Any] = np.arange(n, dtype=index)
        words = [np.ascontiguousarray(codes[:, c : c + 2]) for c in range(0, size, 2)]
        columns = [w.view("<u2")[:, 0] if w.shape[1] == 2 else w[:, 0] for w in words]
        for column in columns:
            order = order[np.argsort(column[order], kind="stable")]
        new = np.zeros(n, np.bool_)
        new[:1] = True
        for column in columns:
            ordered = column[order]
            new[1:] |= ordered[1:] != ordered[:-1]
        starts = np.append(np.flatnonzero(new), n)
        sizes = np.diff(starts)
        by_first = np.argsort(order[starts[:-1]], kind="stable")
        sizes = sizes[by_first]
        out = np.zeros(len(sizes) + 1, np.int64)
        np.cumsum(sizes, out=out[1:])
        # moves every group's run to its new offset
        shift = np.repeat(starts[:-1][by_first] - out[:-1], sizes)
        members = order[np.arange(n) + shift]
        return cls(np.ascontiguousarray(codes[members[out[:-1]]]), out, members)

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def sizes(self) -> Ids:
        """Items of each group, int64 [U]."""
        return np.diff(self.starts)

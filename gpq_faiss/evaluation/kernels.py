"""The loop over a sorted ranking, compiled by Numba."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiled import compiled
from .ties import Ints

_ENTRY = np.int64((1 << 32) - 1)


@compiled
def tie_groups(
    keys: NDArray[Any], hits: Ints, sizes: Ints, by_item: bool, ordered: bool, out: Ints, start: int
) -> Any:
    """Write the tie groups with relevant items of one ranking.

    Args:
        keys: sorted; with ``by_item`` int32 [N], score << 1 | relevance of each item, else int64 [U], score << 32 | entry.
        hits, sizes: int64 [U], relevant items and items of each entry.
        ordered: equal scores are in the order of the entries, so each is a group of its own.
        out: int64 [4, G], filled from column ``start``: items before each group, items in it, relevant items before it and in it.

    Returns:
        The column after the last group.
    """
    before, hits_before, size, found = 0, 0, 0, 0
    last = keys[0] >> 1 if by_item else keys[0] >> 32
    for key in keys:
        score = key >> 1 if by_item else key >> 32
        if score != last or ordered:
            if found > 0:
                out[0, start], out[1, start], out[2, start], out[3, start] = before, size, hits_before, found
                start += 1
            before, hits_before, size, found, last = before + size, hits_before + found, 0, 0, score
        if by_item:
            size += 1
            found += key & 1
        else:
            size += sizes[key & _ENTRY]
            found += hits[key & _ENTRY]
    if found > 0:
        out[0, start], out[1, start], out[2, start], out[3, start] = before, size, hits_before, found
        start += 1
    return start

"""Codes and ids in ascending order of id, so that row numbers order ties."""

from __future__ import annotations

import numpy as np

from ..codes.checks import Codes, Ids


class IdMap:
    """Ascending ids of ``n`` items.

    Attributes:
        n: items.
        own: int64 [n] ascending, or None if ids are row numbers.
    """

    def __init__(self, n: int, own: Ids | None) -> None:
        self.n, self.own = n, own

    def __len__(self) -> int:
        return self.n

    @property
    def ids(self) -> Ids:
        """int64 [n], ascending."""
        return np.arange(self.n, dtype=np.int64) if self.own is None else self.own

    def ids_at(self, positions: Ids) -> Ids:
        """Ids of row numbers; -1 stays -1."""
        if self.own is None:
            return positions
        found = self.own[positions]
        found[positions < 0] = -1
        return found

    def positions_of(self, ids: Ids) -> Ids:
        """Row number of each id, -1 if missing."""
        if self.own is None:
            return np.where((ids >= 0) & (ids < self.n), ids, -1)
        at = np.searchsorted(self.own, ids)
        inside = at < self.n
        there = np.zeros(len(ids), np.bool_)
        there[inside] = self.own[at[inside]] == ids[inside]
        return np.where(there, at, -1)


class Items(IdMap):
    """Checked codes in ascending order of id.

    Attributes:
        codes: uint8 [n, code_size].
    """

    def __init__(self, codes: Codes, own: Ids | None) -> None:
        super().__init__(len(codes), own)
        self.codes = codes

    @classmethod
    def ordered(cls, codes: Codes, ids: Ids | None) -> Items:
        """From checked arrays in any order; no id occurs twice."""
        if ids is None or not len(ids):
            return cls(codes, None)
        if not (ids[1:] > ids[:-1]).all():
            order = np.argsort(ids, kind="stable")
            ids, codes = ids[order], codes[order]
        counting = ids[0] == 0 and ids[-1] == len(ids) - 1
        return cls(codes, None if counting else ids)

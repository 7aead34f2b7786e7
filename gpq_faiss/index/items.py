"""Codes and ids in ascending order of id, so that positions order ties; and distinct codes with their items."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..data.id_files import as_int64
from ..errors import DataError
from .checks import Codes, Floats, Ids, as_array, check_codes
from .keys import Keys, best_keys, read_keys, sort_keys
from .layout import repeated_id

GROUP_SHARE = 0.8
"""Share of distinct codes up to which they are searched faster than the items. Measured (``benchmarks/search.py``)."""
_EXPAND = 4 << 20  # items expanded at once


def check_ids(ids: ArrayLike, n: int, *, what: str = "ids") -> Ids:
    """``ids`` as int64 [n], each its own; any value but -1, which marks a missing result.

    Raises:
        DataError: not whole numbers, another length, outside 64 bits, -1, or repeated.
    """
    array = as_array(ids, what)
    if array.dtype.kind not in "iu" or array.shape != (n,):
        raise DataError(f"{what}: {array.dtype} {array.shape}, expected {n:,} whole numbers, one an item")
    array = as_int64(array, what)
    if n and bool((array == -1).any()):
        raise DataError(f"{what}: -1 marks a missing result and cannot be an item's id: choose another")
    repeated = repeated_id(array)
    if repeated is not None:
        raise DataError(f"{what}: id {repeated} occurs more than once: every item needs its own")
    return array


class Numbering:
    """Items by ids that ascend with their positions.

    Attributes:
        own: int64 [n] ascending, or None where an id is a position.
    """

    own: Ids | None

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def ids(self) -> Ids:
        """int64 [n], ascending."""
        return np.arange(len(self), dtype=np.int64) if self.own is None else self.own

    def ids_at(self, positions: Ids) -> Ids:
        """Ids of positions; -1 stays -1."""
        if self.own is None:
            return positions
        found = self.own[positions]
        found[positions < 0] = -1
        return found

    def positions_of(self, ids: Ids) -> Ids:
        """Position of each id, -1 where there is none such."""
        if self.own is None:
            return np.where((ids >= 0) & (ids < len(self)), ids, -1)
        at = np.searchsorted(self.own, ids)
        inside = at < len(self)
        there = np.zeros(len(ids), np.bool_)
        there[inside] = self.own[at[inside]] == ids[inside]
        return np.where(there, at, -1)


@dataclass(frozen=True)
class Names(Numbering):
    """The ids of ``n`` items whose codes are elsewhere."""

    n: int
    own: Ids | None

    def __len__(self) -> int:
        return self.n


@dataclass(frozen=True)
class Items(Numbering):
    """Checked codes in ascending order of id.

    Attributes:
        codes: uint8 [n, code_size].
        own: int64 [n] ascending, or None where an id is a position.
    """

    codes: Codes
    own: Ids | None

    @classmethod
    def make(cls, codes: ArrayLike, ids: ArrayLike | None, M: int, K: int) -> Items:
        """Check, and sort by id.

        Raises:
            DataError: see :func:`.checks.check_codes`, :func:`check_ids`.
        """
        packed = check_codes(codes, M, K)
        return cls.ordered(packed, None if ids is None else check_ids(ids, len(packed)))

    @classmethod
    def ordered(cls, codes: Codes, ids: Ids | None) -> Items:
        """Of checked arrays in any order."""
        if ids is None or not len(ids):
            return cls(codes, None)
        each = bool((ids[1:] > ids[:-1]).all())
        if not each:
            order = np.argsort(ids, kind="stable")
            ids, codes = ids[order], codes[order]
            # Files that are searched in place are not looked through for ids that repeat.
            each = bool((ids[1:] > ids[:-1]).all())
        if each and ids[0] == 0 and ids[-1] == len(ids) - 1:
            return cls(codes, None)
        return cls(codes, ids)

    def apart_from(self, codes: ArrayLike, ids: ArrayLike | None) -> Items:
        """The same in memory of its own, where it shares that of these arrays."""

        def apart(own: NDArray[Any], given: Any) -> NDArray[Any]:
            return own.copy() if isinstance(given, np.ndarray) and np.may_share_memory(own, given) else own

        return Items(apart(self.codes, codes), None if self.own is None else apart(self.own, ids))

    def __len__(self) -> int:
        return len(self.codes)

    def keep(self, mask: NDArray[np.bool_]) -> Items:
        """The items where ``mask`` is set, with the ids that they have here."""
        return Items.ordered(self.codes[mask], self.ids[mask])

    def join(self, other: Items, *, what: str) -> Items:
        """Both together.

        Raises:
            DataError: they share an id.
        """
        ids = np.concatenate([self.ids, other.ids])
        repeated = repeated_id(ids)
        if repeated is not None:
            raise DataError(f"{what}: id {repeated} is there already: remove it first, or give another")
        return Items.ordered(np.concatenate([self.codes, other.codes]), ids)


def worth_grouping(n: int, distinct: int) -> bool:
    """The rule of ``auto``: ``distinct`` codes of ``n`` items are searched faster than the items."""
    return distinct <= GROUP_SHARE * n


@dataclass(frozen=True)
class Groups:
    """The distinct codes of some items, in the order of their first items, and the items of each.

    That order is what makes a search over codes enough: of groups with equal scores those with the smallest ids come
    first, so the k best groups hold the k best items, ties ordered by id.

    Attributes:
        codes: uint8 [U, code_size].
        starts: int64 [U + 1]; ``members[starts[u]:starts[u + 1]]`` are the items of code u.
        members: positions of items, ascending in each group; int32 where they fit.
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
        # every group's run moves to its new place
        shift = np.repeat(starts[:-1][by_first] - out[:-1], sizes)
        members = order[np.arange(n) + shift]
        return cls(np.ascontiguousarray(codes[members[out[:-1]]]), out, members)

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def sizes(self) -> Ids:
        """Items of each group, int64 [U]."""
        return np.diff(self.starts)

    def expand(self, keys: Keys, k: int) -> tuple[Floats, Ids]:
        """The ``k`` best items of the best groups.

        Args:
            keys: [Q, g] of groups, best first, empty ones last; they hold at least k items in every row.

        Returns:
            Scores float32 [Q, k] and positions int64 [Q, k], equal scores by position.
        """
        Q = len(keys)
        D, positions = np.empty((Q, k), np.float32), np.empty((Q, k), np.int64)
        step = max(1, _EXPAND // max(1, k))
        for start in range(0, Q, step):
            self._expand(
                keys[start : start + step], k, D[start : start + step], positions[start : start + step]
            )
        return D, positions

    def expand_one(self, scores: Floats, groups: Ids, k: int) -> tuple[Floats, Ids]:
        """:meth:`expand` of one query: scores [g], best first, and groups [g] to scores [k] and positions [k]."""
        starts = self.starts.take(groups)
        sizes = np.minimum(self.sizes.take(groups), k)
        last = 0 if sizes[0] >= k else int(sizes.cumsum().searchsorted(k))  # the group of the k-th item
        reached = scores[: last + 2].tolist()
        if len(set(reached)) < len(reached):
            # items of groups that tie are ordered among each other
            D, positions = self.expand(sort_keys(scores, groups)[None], k)
            return D[0], positions[0]
        parts = [
            self.members[start : start + size]
            for start, size in zip(starts[: last + 1].tolist(), sizes[: last + 1].tolist(), strict=True)
        ]
        return scores[: last + 1].repeat(sizes[: last + 1])[:k], np.concatenate(parts, dtype=np.int64)[:k]

    def expand_some(self, keys: Keys, k: int) -> tuple[Floats, Ids]:
        """:meth:`expand` where rows may hold fewer than ``k`` items, as lists of an IVF do: the rest is -inf and -1."""
        at = read_keys(keys)[1]
        have = np.where(at >= 0, self.sizes[at], 0).sum(axis=1)
        if bool((have >= k).all()):
            return self.expand(keys, k)
        D = np.full((len(keys), k), -np.inf, np.float32)
        positions = np.full((len(keys), k), -1, np.int64)
        full = np.flatnonzero(have >= k)
        D[full], positions[full] = self.expand(keys[full], k)
        for q in np.flatnonzero((have < k) & (have > 0)).tolist():
            n = int(have[q])
            row, found = self.expand(keys[q : q + 1], n)
            D[q, :n], positions[q, :n] = row[0], found[0]
        return D, positions

    def _expand(self, keys: Keys, k: int, D: Floats, positions: Ids) -> None:
        scores, groups = read_keys(keys)
        sizes = np.where(groups >= 0, self.sizes[groups], 0)
        ends = np.cumsum(sizes, axis=1)
        # The group in which the k-th item falls, and all that tie with it, since smaller ids may be in those.
        cut = (ends < k).sum(axis=1)
        rows = np.arange(len(keys))
        tied = scores == scores[rows, cut][:, None]
        simple = ~(tied.sum(axis=1) > 1) & ~((scores[:, 1:] == scores[:, :-1]) & (ends[:, :-1] < k)).any(
            axis=1
        )
        plain = np.flatnonzero(simple)
        if len(plain):
            taken = np.minimum(sizes[plain], np.maximum(0, k - (ends[plain] - sizes[plain])))
            row, at = np.nonzero(taken)
            lengths = taken[row, at]
            begin = self.starts[groups[plain[row], at]]
            shift = np.repeat(begin - (np.cumsum(lengths) - lengths), lengths)
            positions[plain] = self.members[np.arange(int(lengths.sum())) + shift].reshape(-1, k)
            D[plain] = np.repeat(scores[plain[row], at], lengths).reshape(-1, k)
        for q in np.flatnonzero(~simple):
            among = np.flatnonzero((np.arange(keys.shape[1]) <= cut[q]) | tied[q])
            parts = [
                self.members[s : s + min(z, k)]
                for s, z in zip(self.starts[groups[q, among]], sizes[q, among], strict=True)
            ]
            item_scores = np.repeat(scores[q, among], [len(part) for part in parts])
            D[q], positions[q] = read_keys(
                best_keys(sort_keys(item_scores, np.concatenate(parts).astype(np.int64)), k)
            )

"""Distinct codes with the items of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .checks import Codes, Floats, Ids
from .keys import Keys, best_keys, read_keys, sort_keys

GROUP_SHARE = 0.8
"""Maximum share of distinct codes for which searching them is faster. Measured (``benchmarks/search.py``)."""
_EXPAND = 4 << 20  # items expanded per block


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

    def expand(self, keys: Keys, k: int) -> tuple[Floats, Ids]:
        """The ``k`` best items of the best groups.

        Args:
            keys: [Q, g] of groups, best first, empty ones last, with at least k items per row.

        Returns:
            Scores float32 [Q, k] and row numbers int64 [Q, k], ties by row number.
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
        """:meth:`expand` for rows with possibly fewer than ``k`` items (IVF lists), padded with -inf and -1."""
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
        # The group with the k-th item, and all tied groups, which may contain smaller ids.
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

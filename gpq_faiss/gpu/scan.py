"""Exact search by torch on one device: any k, full rankings, ranges, in bounded memory.

Packed codes are on the device. Blocks of codes are scored against blocks of queries by look-ups in byte-fused tables; codes above the
current k-th score are merged into the best. Scores, order and ties are those of the exact kinds of :mod:`..indexes.memory` (see
:mod:`.tensors`), so results do not depend on device, blocks or batch. With a filter, only passing codes are scored.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..codes.checks import Floats, check_codebooks
from ..codes.groups import Groups
from ..errors import DataError, UsageError
from ..indexes.ranges import too_many
from .memory import MEMORY, check_memory
from .tensors import (
    EMPTY_KEY,
    MAX_ROWS,
    best_of,
    columns_of,
    fused_tables,
    is_paired,
    keys_of,
    score_columns,
    score_places,
    score_tables_torch,
    split_keys,
    tensor_of,
)

_CELL = 80  # bytes per score, for key, selection and sort
_WIDE = 1 << 18  # codes per block that keep a GPU busy
_ROWS = 1024  # maximum queries per block
_CELLS = 1 << 30  # maximum scores per block: torch's nonzero supports fewer than 2^31
_MASKED = 64  # bytes per passing item while a filter is applied
_DENSE = 4  # blocks with more than 1 in this many passing are scored in full


class Scan:
    """Codes on a device and exact search over all of them; results are keys with row numbers.

    Args:
        codes: packed, uint8 [n, code_size]; an array, or a tensor on ``device`` (not copied).
        Z: codebooks float32 [M, K, d].
        device: from :func:`.tensors.device_of`.
        memory: bytes of working memory, without codes and results.

    Raises:
        DataError, UsageError: invalid codes or codebooks, no codes, more than 2^32 - 1, or ``memory`` below 1.
    """

    def __init__(self, codes: Any, Z: ArrayLike, device: torch.device, memory: int = MEMORY) -> None:
        self.codebooks: Floats = check_codebooks(Z)
        self.M, self.K, self.d = (int(n) for n in self.codebooks.shape)
        check_memory(memory)
        packed = (codes if isinstance(codes, Tensor) else tensor_of(codes)).to(device)
        if not 1 <= len(packed) <= MAX_ROWS:
            raise DataError(f"{len(packed):,} codes: an index has 1 to {MAX_ROWS:,}; use several for more")
        self.device = device
        self.memory = memory
        self.paired = is_paired(self.M, self.K)
        self.columns = columns_of(packed, self.M, self.K)
        self.Z = tensor_of(self.codebooks).to(device)
        self.mask: Tensor | None = None

    def __len__(self) -> int:
        return int(self.columns.shape[1])

    def tables(self, queries: Tensor) -> Tensor:
        """Look-up tables float32 [q, T, entries] of checked queries [q, M*d]."""
        return fused_tables(score_tables_torch(queries, self.Z))

    def block_rows(self, k: int) -> int:
        """Queries per block within the memory.

        Raises:
            UsageError: the memory is too small to sort ``k`` results of one query.
        """
        n = len(self)
        least = _CELL * (k + min(n, max(1, k // 16)))
        if least > self.memory:
            raise UsageError(
                f"k = {k:,} needs {least:,} bytes of working memory, {self.memory:,} are allowed: raise memory"
            )
        wanted = _CELL * (k + min(n, max(_WIDE, k)))
        return max(1, min(_ROWS, self.memory // wanted))

    def _block_codes(self, rows: int, k: int) -> int:
        return max(1, min(len(self), min(self.memory // _CELL, _CELLS) // rows - k))

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """The best ``k`` codes: int64 keys [Q, min(k, n)], descending, padded with empty keys; queries are checked."""
        k = min(k, len(self))
        out = torch.full((len(queries), k), EMPTY_KEY, dtype=torch.int64, device=self.device)
        rows = self.block_rows(k)
        for start in range(0, len(queries), rows):
            part = queries[start : start + rows]
            best = self._best(self.tables(part), k)
            out[start : start + rows, : best.shape[1]] = best
        return out

    def restricted(self, mask: Tensor) -> Scan:
        """A scan of only the codes where ``mask``, bool [n] on the device, is set; row numbers are kept."""
        part = copy.copy(self)
        part.mask = mask
        return part

    def taken(self, rows: Tensor) -> Scan:
        """A scan of the codes at ``rows`` int64 [r], in that order."""
        part = copy.copy(self)
        part.columns = self.columns.index_select(1, rows)
        return part

    def _blocks(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield columns uint8 [T, c] and row numbers int64 [c], ascending, of at most ``step`` codes."""
        n, mask = len(self), self.mask
        if mask is None:
            for start in range(0, n, step):
                stop = min(n, start + step)
                yield self.columns[:, start:stop], torch.arange(start, stop, device=self.device)
            return
        # in wide strides, as a selective filter would otherwise leave tiny blocks
        wide = min(_CELLS, max(step, self.memory // _MASKED))
        for start in range(0, n, wide):
            places = mask[start : start + wide].nonzero()[:, 0] + start
            for first in range(0, len(places), step):
                own = places[first : first + step]
                yield self.columns.index_select(1, own), own

    def _best(self, tables: Tensor, k: int) -> Tensor:
        step = self._block_codes(len(tables), k)
        best = torch.empty((len(tables), 0), dtype=torch.int64, device=self.device)
        for columns, positions in self._blocks(step):
            scores = score_columns(tables, columns, paired=self.paired)
            if best.shape[1] < k:
                keys = keys_of(scores, positions[None])
                best = best_of(torch.cat([best, keys], dim=1) if best.shape[1] else keys, k)
            else:
                best = self._merged(best, scores, positions)
        return best

    def _merged(self, best: Tensor, scores: Tensor, positions: Tensor) -> Tensor:
        """Merge a block of later rows into ``best`` (descending); ties go to earlier rows."""
        k = best.shape[1]
        least = split_keys(best[:, -1:])[0]
        over = scores > least
        counts = over.sum(dim=1)
        most = int(counts.max())
        if most == 0:
            return best
        if most > scores.shape[1] // _DENSE:
            return best_of(torch.cat([best, keys_of(scores, positions[None])], dim=1), k)
        row, column = over.nonzero(as_tuple=True)
        place = torch.arange(len(row), device=self.device) - (counts.cumsum(0) - counts)[row]
        more = torch.full((len(best), most), EMPTY_KEY, dtype=torch.int64, device=self.device)
        more[row, place] = keys_of(scores[row, column], positions[column])
        return best_of(torch.cat([best, more], dim=1), k)

    def exact_scores(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Scores float32 [q, c] of codes at ``positions`` int64 [q, c]."""
        return score_places(tables, self.columns, positions, paired=self.paired)

    def range_keys(self, queries: Tensor, min_score: float, limit: int) -> tuple[Tensor, Tensor]:
        """All codes with at least ``min_score``, unordered: query rows int64 [r] and keys int64 [r].

        Raises:
            DataError: more than ``limit`` results.
        """
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        rows, keys = [none], [none]
        found = 0
        size = max(1, min(_ROWS, self.memory // (_CELL * min(len(self), _WIDE))))
        for first in range(0, len(queries), size):
            tables = self.tables(queries[first : first + size])
            step = self._block_codes(len(tables), 0)
            for columns, positions in self._blocks(step):
                scores = score_columns(tables, columns, paired=self.paired)
                row, column = (scores >= min_score).nonzero(as_tuple=True)
                found += len(row)
                if found > limit:
                    raise too_many(min_score, limit)
                rows.append(row + first)
                keys.append(keys_of(scores[row, column], positions[column]))
        return torch.cat(rows), torch.cat(keys)


class DeviceGroups:
    """Items of distinct codes on a device: expands keys of groups to keys of items (:class:`..codes.groups.Groups`)."""

    def __init__(self, groups: Groups, device: torch.device, memory: int = MEMORY) -> None:
        self.device = device
        self.memory = memory
        self.starts = torch.from_numpy(groups.starts).to(device)
        self.sizes = self.starts[1:] - self.starts[:-1]
        self.members = torch.from_numpy(groups.members).to(device)

    def __len__(self) -> int:
        return len(self.sizes)

    def restricted(self, mask: Tensor) -> tuple[Tensor, DeviceGroups]:
        """Groups of the items that pass a filter, in the order of their first passing item, as ties require.

        Args:
            mask: bool [items] on the device.

        Returns:
            Their original numbers, int64 [r], and the groups.
        """
        kept = torch.empty(len(self.members), dtype=torch.bool, device=self.device)
        step = max(1, self.memory // _MASKED)
        for start in range(0, len(kept), step):
            kept[start : start + step] = mask[self.members[start : start + step].long()]
        before = torch.zeros(len(kept) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(kept, 0, out=before[1:])
        sizes = before[self.starts[1:]] - before[self.starts[:-1]]
        members = self.members[kept]
        groups = sizes.nonzero()[:, 0]
        groups = groups[members[before[self.starts[groups]]].argsort()]
        sizes = sizes[groups]
        part = object.__new__(DeviceGroups)
        part.device, part.memory, part.sizes = self.device, self.memory, sizes
        part.starts = torch.zeros(len(groups) + 1, dtype=torch.int64, device=self.device)
        torch.cumsum(sizes, 0, out=part.starts[1:])
        # moves every group's run to its new offset
        shift = (before[self.starts[groups]] - part.starts[:-1]).repeat_interleave(sizes)
        part.members = members[torch.arange(len(members), device=self.device) + shift]
        return groups, part

    def expand_all(self, rows: Tensor, keys: Tensor, min_score: float, limit: int) -> tuple[Tensor, Tensor]:
        """All items of the groups ``keys`` int64 [r] of query ``rows`` int64 [r], unordered.

        Raises:
            DataError: more than ``limit`` results; the message names ``min_score``.
        """
        scores, groups = split_keys(keys)
        sizes = self.sizes[groups]
        if int(sizes.sum()) > limit:
            raise too_many(min_score, limit)
        return self._items(rows, scores, groups, sizes)

    def _items(self, rows: Tensor, scores: Tensor, groups: Tensor, take: Tensor) -> tuple[Tensor, Tensor]:
        """The first ``take`` [r] items of each group, as rows and keys."""
        before = take.cumsum(0) - take
        rows = rows.repeat_interleave(take)
        shift = (self.starts[groups] - before).repeat_interleave(take)
        items = self.members[torch.arange(len(rows), device=self.device) + shift].long()
        return rows, keys_of(scores.repeat_interleave(take), items)

    def expand(self, keys: Tensor, k: int) -> Tensor:
        """The ``k`` best items, int64 keys [Q, k], of the best groups, keys [Q, g] descending; padded with empty
        keys. With min(k, all) groups per row these are the k best of all items."""
        scores, groups = split_keys(keys)
        there = groups >= 0
        sizes = torch.where(there, self.sizes[groups.clamp_min(0)], 0)
        ends = sizes.cumsum(dim=1)
        # The group with the k-th item, and all tied groups, which may contain smaller ids.
        cut = (ends < k).sum(dim=1, keepdim=True).clamp_max(keys.shape[1] - 1)
        wanted = there & (scores >= scores.gather(1, cut))
        take = torch.where(wanted, sizes.clamp_max(k), 0)
        out = torch.full((len(keys), k), EMPTY_KEY, dtype=torch.int64, device=self.device)
        lengths = take.sum(dim=1).tolist()
        start = 0
        while start < len(keys):
            stop, widest = start + 1, max(1, lengths[start])
            while stop < len(keys):
                wider = max(widest, lengths[stop])
                if wider * (stop + 1 - start) * _CELL > self.memory:
                    break
                widest, stop = wider, stop + 1
            self._fill(out[start:stop], scores[start:stop], groups[start:stop], take[start:stop], widest)
            start = stop
        return out

    def _fill(self, out: Tensor, scores: Tensor, groups: Tensor, take: Tensor, width: int) -> None:
        row, at = take.nonzero(as_tuple=True)
        if not len(row):
            return
        rows, items = self._items(row, scores[row, at], groups[row, at], take[row, at])
        counts = take.sum(dim=1)
        place = torch.arange(len(rows), device=self.device) - (counts.cumsum(0) - counts)[rows]
        padded = torch.full((len(take), width), EMPTY_KEY, dtype=torch.int64, device=self.device)
        padded[rows, place] = items
        best = best_of(padded, out.shape[1])
        out[:, : best.shape[1]] = best

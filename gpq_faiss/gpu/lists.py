"""Exact search by torch on one device: the codes in lists by their first codewords, for any k, ranges and filters.

A list's bound is its score with the largest entry of every other codebook. It is added in the order of the scores, and rounding keeps
order, so no item of the list exceeds it. The lists of the best bounds are scored first; those whose bound is below the k-th score are
never read. Scores, order and ties are those of :mod:`..indexes.memory` (see :mod:`.tensors`), for any device, block and batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..codes.checks import check_codebooks
from ..errors import DataError, UsageError
from ..indexes.ranges import too_many
from .tensors import (
    EMPTY_KEY,
    MAX_ROWS,
    columns_of,
    fused_tables,
    is_paired,
    keys_of,
    score_columns,
    score_places,
    score_tables_torch,
    split_keys,
    tensor_of,
    unpack_column,
)

MEMORY = 1 << 30
"""Default bytes of working memory of a search."""
_CELL = 80  # bytes per scored item and per result: places, score, key, sort
_LIST = 64  # bytes per list and query: bound, sort, pairs
_ROWS = 1024  # maximum queries per block
_LIST_ITEMS = 64  # average length below which there are no more lists
_MOST_LISTS = 1 << 16
_FIRST = 1024  # items per query that are scored first
_GROWTH = 4
_SPARSE = 3  # lists are worth it if at most one in so many items is left


class DeviceLists:
    """Codes on a device, and exact search; results are keys with row numbers.

    Args:
        codes: packed, uint8 [n, code_size]; an array, or a tensor on ``device``.
        Z: codebooks float32 [M, K, d].
        device: from :func:`.tensors.device_of`.
        memory: bytes of working memory, without codes and results.
        first: row number of the first code.

    Raises:
        DataError, UsageError: invalid codebooks, no codes, more than 2^32 - 1, or ``memory`` below 1.
    """

    def __init__(
        self, codes: Any, Z: ArrayLike, device: torch.device, memory: int = MEMORY, first: int = 0
    ) -> None:
        books = check_codebooks(Z)
        M, K, _ = books.shape
        self.memory = check_bytes(memory)
        packed = (codes if isinstance(codes, Tensor) else tensor_of(codes)).to(device)
        n = len(packed)
        if not 1 <= n <= MAX_ROWS:
            raise DataError(f"{n:,} codes: an index has 1 to {MAX_ROWS:,}; use several for more")
        self.device = device
        self.paired = is_paired(M, K)
        self.Z = tensor_of(books).to(device)
        self.prefix = 0
        while self.prefix < M and K ** (self.prefix + 1) <= min(_MOST_LISTS, n // _LIST_ITEMS):
            self.prefix += 1
        number = torch.zeros(n, dtype=torch.int32, device=device)
        for m in range(self.prefix):
            number = number * K + unpack_column(packed, m, K)
        order = number.argsort(stable=True)
        self.sizes = torch.unique_consecutive(number[order], return_counts=True)[1]
        self.starts = self.sizes.cumsum(0) - self.sizes
        self.columns = columns_of(packed, M, K).index_select(1, order)
        self.heads = self.columns[:, self.starts]
        self.members = (order + first).to(torch.int32 if first + n <= 1 << 31 else torch.int64)

    def __len__(self) -> int:
        return len(self.members)

    def restricted(self, mask: Tensor) -> DeviceLists:
        """Only the items whose row number is set in ``mask``, bool on the device."""
        kept = mask[self.members.long()]
        before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        sizes = before[self.starts + self.sizes] - before[self.starts]
        part = copy.copy(self)
        part.sizes, part.heads = sizes[sizes > 0], self.heads[:, sizes > 0]
        part.starts = part.sizes.cumsum(0) - part.sizes
        part.columns, part.members = self.columns[:, kept], self.members[kept]
        return part

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """The best ``k`` items: int64 keys [Q, min(k, n)], descending; queries are checked.

        Raises:
            UsageError: the memory is too small to sort ``k`` results of one query.
        """
        k = min(k, len(self))
        out = torch.empty((len(queries), k), dtype=torch.int64, device=self.device)
        for rows, tables, bounds, step in self._blocks(queries, k) if k else ():
            out[rows] = self._best(tables, bounds, k, step)
        return out

    def range_keys(self, queries: Tensor, min_score: float, limit: int) -> tuple[Tensor, Tensor]:
        """All items with at least ``min_score``, unordered: query rows int64 [r] and keys int64 [r].

        Raises:
            DataError: more than ``limit`` results.
        """
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        found, results = 0, [(none, none)]
        for block, tables, bounds, step in self._blocks(queries, 0) if len(self) else ():
            for rows, scores, places in self._items(tables, bounds >= min_score, step):
                over = scores >= min_score
                found += int(over.sum())
                if found > limit:
                    raise too_many(min_score, limit)
                results.append((rows[over] + block.start, self._keys(scores[over], places[over])))
        return torch.cat([rows for rows, _ in results]), torch.cat([keys for _, keys in results])

    def _blocks(self, queries: Tensor, k: int) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
        """Yield rows, look-up tables, bounds float32 [q, lists], and the items to score at a time within the memory."""
        each = _LIST * len(self.sizes) + _CELL * k
        least = each + _CELL * max(1, k // 16)
        if least > self.memory:
            raise UsageError(
                f"k = {k:,} needs {least:,} bytes of working memory, {self.memory:,} are allowed: raise memory"
            )
        step = max(1, min(_ROWS, self.memory // (2 * each)))
        for start in range(0, len(queries), step):
            block = slice(start, min(len(queries), start + step))
            tables = score_tables_torch(queries[block], self.Z)
            highest = tables.clone()
            highest[:, self.prefix :] = tables[:, self.prefix :].amax(dim=2, keepdim=True)
            bounds = score_columns(fused_tables(highest), self.heads, paired=self.paired)
            yield block, fused_tables(tables), bounds, (self.memory - len(tables) * each) // _CELL

    def _best(self, tables: Tensor, bounds: Tensor, k: int, step: int) -> Tensor:
        """The best ``k`` keys of a block: lists in waves of falling bounds, until no other can hold one of them."""
        best = torch.full((len(tables), k), EMPTY_KEY, dtype=torch.int64, device=self.device)
        wanted = max(k, _FIRST)
        if wanted * _SPARSE > len(self):
            return self._whole(tables, best, best[:, -1], step)
        ranked, order = bounds.sort(dim=1, descending=True)
        held = self.sizes[order].cumsum(dim=1)
        left = torch.ones_like(bounds, dtype=torch.bool)
        while wanted < len(self) * _GROWTH and bool(left.any()):
            last = (held < wanted).sum(dim=1, keepdim=True).clamp_max(held.shape[1] - 1)
            wave = left & (bounds >= ranked.gather(1, last))
            for rows, scores, places in self._items(tables, wave, step):
                best = merged(best, rows, self._keys(scores, places))
            left &= ~wave & (
                bounds >= split_keys(best[:, -1:])[0]
            )  # equal scores may have smaller row numbers
            if wanted <= max(k, _FIRST) and int((left * self.sizes).sum()) * _SPARSE > len(left) * len(self):
                return self._whole(tables, torch.full_like(best, EMPTY_KEY), best[:, -1], step)
            wanted *= _GROWTH
        return best

    def _whole(self, tables: Tensor, best: Tensor, least: Tensor, step: int) -> Tensor:
        """As :meth:`_best` by scores of all items, where lists would spare little; no result is below the keys ``least``."""
        width = max(1, step // len(tables))
        for start in range(0, len(self), width):
            scores = score_columns(tables, self.columns[:, start : start + width], paired=self.paired)
            lowest = split_keys(torch.maximum(least, best[:, -1]))[0]
            rows, places = (scores >= lowest[:, None]).nonzero(as_tuple=True)
            best = merged(best, rows, self._keys(scores[rows, places], places + start))
        return best

    def _items(self, tables: Tensor, wave: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield query rows, scores and places of the items in the lists ``wave``, bool [q, lists], ``step`` at a time."""
        row, number = wave.nonzero(as_tuple=True)
        ends = self.sizes[number].cumsum(0)
        shift = self.starts[number] - ends + self.sizes[number]
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, step):
            items = torch.arange(start, min(total, start + step), device=self.device)
            pair = torch.searchsorted(ends, items, right=True)
            rows, places = row[pair], items + shift[pair]
            yield rows, score_places(tables, rows, self.columns[:, places], paired=self.paired), places

    def _keys(self, scores: Tensor, places: Tensor) -> Tensor:
        return keys_of(scores, self.members[places].long())


def check_bytes(memory: int) -> int:
    """Raises UsageError: below one byte."""
    if memory < 1:
        raise UsageError(f"memory of {memory} bytes: it must be at least 1")
    return memory


def merged(best: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The best keys int64 [q, k], descending, with further ``keys`` of query ``rows``."""
    q, k = best.shape
    better = keys > best[rows, -1]
    if not bool(better.any()):
        return best
    rows = torch.cat([torch.arange(q, device=best.device).repeat_interleave(k), rows[better]])
    keys = torch.cat([best.reshape(-1), keys[better]])
    rows, keys = by_row(rows, keys)
    counts = torch.bincount(rows, minlength=q)
    rank = torch.arange(len(rows), device=best.device) - (counts.cumsum(0) - counts)[rows]
    return keys[rank < k].reshape(q, k)


def by_row(rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of queries in ascending order of row, then descending."""
    order = keys.argsort(descending=True)
    order = order[rows[order].argsort(stable=True)]
    return rows[order], keys[order]

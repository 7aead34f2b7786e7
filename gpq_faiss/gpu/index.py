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

from ..errors import DataError, UsageError
from ..indexes.base import LIMIT, check_arguments, check_min_score, too_many
from ..indexes.codeword_lists import columns_of
from ..indexes.filters import Filter, mask_of
from ..indexes.memory import MemoryIndex
from ..indexes.opening import open_in_memory
from ..nn.device import resolve_device
from .tensors import (
    EMPTY_KEY,
    MAX_ROWS,
    fused_tables,
    keys_of,
    score_columns,
    score_places,
    score_tables_torch,
    split_keys,
    tensor_of,
    vectors_on,
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


def to_gpu(source: Any, device: str | int = 0, *, memory: int = MEMORY) -> DeviceIndex:
    """Copy an index to a GPU for exact search by torch, for any K and code length; results are bit-equal to the CPU's.

    Args:
        source: a Faiss index in any form of :mod:`..faissio.storage`, or an :class:`..indexes.memory.MemoryIndex`.
        device: number of the GPU, or its name (``cuda:0``); ``cpu`` runs the same algorithm on the CPU.
        memory: bytes that a search may use on the device in addition to codes, ids and results.

    Raises:
        DeviceError: no such GPU (there is no silent fall-back).
        DataError: the index is empty or invalid.
        UsageError: an option out of range.
    """
    place = resolve_device(f"cuda:{device}" if isinstance(device, int) else device)
    index = source if isinstance(source, MemoryIndex) else open_in_memory(source)
    return DeviceIndex(index, place, memory)


class DeviceIndex:
    """A snapshot of an index on a device, created by :func:`to_gpu`. Search is thread-safe.

    Raises:
        DataError, UsageError: more than 2^32 - 1 items, or ``memory`` below 1.
    """

    def __init__(self, index: MemoryIndex, device: torch.device, memory: int = MEMORY) -> None:
        Z = self.codebooks = index.codebooks
        M, K, _ = Z.shape
        n = self.ntotal = index.ntotal
        self.width, self.fingerprint, self.device = index.width, index.fingerprint, device
        if memory < 1:
            raise UsageError(f"memory of {memory} bytes: it must be at least 1")
        if n > MAX_ROWS:  # row numbers share a key with the score
            raise DataError(
                f"{n:,} codes: an index on a device has at most {MAX_ROWS:,}; use several for more"
            )
        self.memory = memory
        self._source = index.describe()
        self._names = index.items
        self._ids = None if self._names.own is None else tensor_of(self._names.own).to(device)
        # The lists
        self._paired = K <= 16
        self._Z = tensor_of(Z).to(device)
        columns = tensor_of(columns_of(index.codes, M, K)).to(device).t()
        self._prefix = 0
        while self._prefix < M and K ** (self._prefix + 1) <= min(_MOST_LISTS, n // _LIST_ITEMS):
            self._prefix += 1
        number = torch.zeros(n, dtype=torch.int32, device=device)
        for m in range(self._prefix):
            word = columns[m // 2] >> 4 * (m % 2) & 15 if self._paired else columns[m]
            number = number * K + word
        order = number.argsort(stable=True)
        self._sizes = torch.unique_consecutive(number[order], return_counts=True)[1]
        self._starts = self._sizes.cumsum(0) - self._sizes
        self._columns = columns.index_select(1, order)
        self._heads = self._columns[:, self._starts]
        self._members = order.to(torch.int32 if n <= 1 << 31 else torch.int64)

    def describe(self) -> str:
        return f"{self._source}, on {self.device}"

    def close(self) -> None:
        """No-op: the device's memory is freed with the object."""

    def search(
        self,
        xq: ArrayLike | Tensor,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
    ) -> tuple[Any, Any]:
        """The ``k`` best items of every query, as :meth:`..indexes.memory.MemoryIndex.search`, for any k.

        Args:
            xq: [Q, M*d]. For a tensor on :attr:`device`, results are tensors there, without host copies.
            nprobe: must be None: the search is exact.
            threads: ignored.
            where: evaluated on the host.

        Raises:
            UsageError, DataError: see there; also ``k`` too large for the working memory, or a tensor on another device.
        """
        check_arguments(k, self.ntotal, threads=threads)
        if nprobe is not None:
            raise UsageError("nprobe limits a search on the CPU; on a device it is exact: leave it out")
        queries = vectors_on(xq, self.width, self.device)
        held = self._passing(where)
        on = self.device if isinstance(xq, Tensor) else torch.device("cpu")
        D = torch.full((len(queries), k), -torch.inf, dtype=torch.float32, device=on)
        found = torch.full((len(queries), k), -1, dtype=torch.int64, device=on)
        there = min(k, len(held._members))
        for rows, tables, bounds, step in held._blocks(queries, there) if there else ():
            D[rows, :there], found[rows, :there] = self._read(held._best(tables, bounds, there, step))
        return (D, found) if isinstance(xq, Tensor) else (D.numpy(), found.numpy())

    def range_search(
        self,
        xq: ArrayLike | Tensor,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """All items with at least ``min_score``, as :meth:`..indexes.memory.MemoryIndex.range_search`; tensors for a tensor."""
        min_score = check_min_score(min_score)
        check_arguments(None, self.ntotal, limit=limit, threads=threads)
        queries = vectors_on(xq, self.width, self.device)
        held = self._passing(where)
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        total, results = 0, [(none, none)]
        for block, tables, bounds, step in held._blocks(queries, 0) if len(held._members) else ():
            for owners, scores, places in held._items(tables, bounds >= min_score, step):
                over = scores >= min_score
                total += int(over.sum())
                if total > limit:
                    raise too_many(min_score, limit)
                results.append((owners[over] + block.start, held._keys(scores[over], places[over])))
        rows, keys = by_row(
            torch.cat([rows for rows, _ in results]), torch.cat([keys for _, keys in results])
        )
        lims = torch.zeros(len(queries) + 1, dtype=torch.int64, device=self.device)
        lims[1:] = torch.bincount(rows, minlength=len(queries)).cumsum(0)
        D, found = self._read(keys)
        if isinstance(xq, Tensor):
            return lims, D, found
        return lims.cpu().numpy(), D.cpu().numpy(), found.cpu().numpy()

    def _passing(self, where: Filter | None) -> DeviceIndex:
        """Only the items that pass."""
        if where is None:
            return self
        mask = torch.from_numpy(mask_of(where, self._names)).to(self.device)
        kept = mask[self._members.long()]
        before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
        sizes = before[self._starts + self._sizes] - before[self._starts]
        part = copy.copy(self)
        part._sizes, part._heads = sizes[sizes > 0], self._heads[:, sizes > 0]
        part._starts = part._sizes.cumsum(0) - part._sizes
        part._columns, part._members = self._columns[:, kept], self._members[kept]
        return part

    def _blocks(self, queries: Tensor, k: int) -> Iterator[tuple[slice, Tensor, Tensor, int]]:
        """Yield rows, look-up tables, bounds float32 [q, lists], and the items to score at a time within the memory."""
        each = _LIST * len(self._sizes) + _CELL * k
        least = each + _CELL * max(1, k // 16)
        if least > self.memory:
            raise UsageError(
                f"k = {k:,} needs {least:,} bytes of working memory, {self.memory:,} are allowed: raise memory"
            )
        step = max(1, min(_ROWS, self.memory // (2 * each)))
        for start in range(0, len(queries), step):
            block = slice(start, min(len(queries), start + step))
            tables = score_tables_torch(queries[block], self._Z)
            highest = tables.clone()
            highest[:, self._prefix :] = tables[:, self._prefix :].amax(dim=2, keepdim=True)
            bounds = score_columns(fused_tables(highest), self._heads, paired=self._paired)
            yield block, fused_tables(tables), bounds, (self.memory - len(tables) * each) // _CELL

    def _best(self, tables: Tensor, bounds: Tensor, k: int, step: int) -> Tensor:
        """The best ``k`` keys of a block: lists in waves of falling bounds, until no other can hold one of them."""
        best = torch.full((len(tables), k), EMPTY_KEY, dtype=torch.int64, device=self.device)
        wanted = max(k, _FIRST)
        if wanted * _SPARSE > len(self._members):
            return self._whole(tables, best, best[:, -1], step)
        ranked, order = bounds.sort(dim=1, descending=True)
        held = self._sizes[order].cumsum(dim=1)
        left = torch.ones_like(bounds, dtype=torch.bool)
        while wanted < len(self._members) * _GROWTH and bool(left.any()):
            last = (held < wanted).sum(dim=1, keepdim=True).clamp_max(held.shape[1] - 1)
            wave = left & (bounds >= ranked.gather(1, last))
            for rows, scores, places in self._items(tables, wave, step):
                best = merged(best, rows, self._keys(scores, places))
            left &= ~wave & (
                bounds >= split_keys(best[:, -1:])[0]
            )  # equal scores may have smaller row numbers
            if wanted <= max(k, _FIRST) and int((left * self._sizes).sum()) * _SPARSE > len(left) * len(
                self._members
            ):
                return self._whole(tables, torch.full_like(best, EMPTY_KEY), best[:, -1], step)
            wanted *= _GROWTH
        return best

    def _whole(self, tables: Tensor, best: Tensor, least: Tensor, step: int) -> Tensor:
        """As :meth:`_best` by scores of all items, where lists would spare little; no result is below the keys ``least``."""
        width = max(1, step // len(tables))
        for start in range(0, len(self._members), width):
            scores = score_columns(tables, self._columns[:, start : start + width], paired=self._paired)
            lowest = split_keys(torch.maximum(least, best[:, -1]))[0]
            rows, places = (scores >= lowest[:, None]).nonzero(as_tuple=True)
            best = merged(best, rows, self._keys(scores[rows, places], places + start))
        return best

    def _items(self, tables: Tensor, wave: Tensor, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield query rows, scores and places of the items in the lists ``wave``, bool [q, lists], ``step`` at a time."""
        row, number = wave.nonzero(as_tuple=True)
        ends = self._sizes[number].cumsum(0)
        shift = self._starts[number] - ends + self._sizes[number]
        total = int(ends[-1]) if len(ends) else 0
        for start in range(0, total, step):
            items = torch.arange(start, min(total, start + step), device=self.device)
            pair = torch.searchsorted(ends, items, right=True)
            rows, places = row[pair], items + shift[pair]
            yield rows, score_places(tables, rows, self._columns[:, places], paired=self._paired), places

    def _keys(self, scores: Tensor, places: Tensor) -> Tensor:
        return keys_of(scores, self._members[places].long())

    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores, positions = split_keys(keys)
        if self._ids is None:
            return scores, positions
        return scores, torch.where(positions >= 0, self._ids[positions.clamp_min(0)], -1)


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

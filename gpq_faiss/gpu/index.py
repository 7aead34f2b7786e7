"""Exact search on a GPU, for any k, ranges and filters.

The codes are a tree of lists by their first codewords: a list of many items is divided by the next
column of their codes. The bound of a list is its score with the largest entry of every other
codebook. A block of threads searches for one query (:mod:`.kernel`): it visits the best lists
first, and none that cannot hold a result. If more results are wanted than a block can keep, all
items above the score that the best of a sample reach are results; a guess that proves too high is
lowered. Scores, order and ties are those of :mod:`..indexes.index`, bit for bit, for any block and
batch. On the device ``cpu`` that index itself searches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..codes.checks import named_rows
from ..errors import DataError, UsageError
from ..files import Closing
from ..indexes.index import (
    RANGE_LIMIT,
    IdList,
    Index,
    check_filter,
    check_min_score,
    check_search,
    too_many,
)
from ..indexes.lists import columns_of
from ..indexes.opening import open_index
from ..nn.device import resolve_device
from . import kernel
from .tensors import MAX_ROWS, split_keys, tensor_of, threshold_of, vectors_on

MEMORY = 1 << 30
"""Default bytes of working memory of a search."""
_RESULT = 80  # bytes of working memory per result: key, sort, score, id
_BLOCK = 1 << 16  # maximum number of queries at a time
_DIVIDED = 8192  # lists of more items than this are divided
_GRID = 1024  # number of blocks that fill a GPU; fewer queries have several blocks each
_PARTS = 64  # maximum number of blocks for a query
_SAMPLE = 1 << 16  # number of items whose scores give a threshold for more than kernel.MOST results


def to_gpu(source: Any, device: str | int = 0, *, memory: int = MEMORY) -> DeviceIndex:
    """Copy an index to a GPU for exact search, for any K and code length.

    Results are bit-equal to those of the CPU.

    Args:
        source: an :class:`..indexes.index.Index`, or whatever :func:`..indexes.opening.open_index`
            opens.
        device: number of the GPU, or its name (``cuda:0``); ``cpu`` searches on the CPU by the same
            calls.
        memory: bytes that a search may use on the device in addition to codes, ids and results. A
            filter needs more: a copy of the items that pass, and about 10 bytes for each item.

    Raises:
        DeviceError: there is no such GPU (the CPU does not take its place silently).
        DataError: the index is empty or invalid, or has more than 2^31 - 1 items.
        UsageError: the device has no such name, or the metric is L2.
    """
    torch_device = resolve_device(f"cuda:{device}" if isinstance(device, int) else device)
    index = source if isinstance(source, Index) else open_index(source)
    return DeviceIndex(index, torch_device, memory)


class DeviceIndex(Closing):
    """A snapshot of an index on a device, created by :func:`to_gpu`.

    Search is thread-safe. The memory is freed with the object.

    Raises:
        DataError: there are no items, or more than 2^31 - 1.
        UsageError: the metric of the index is L2.
    """

    def __init__(self, index: Index, device: torch.device, memory: int = MEMORY) -> None:
        Z = self.codebooks = index.codebooks
        n = self.ntotal = index.ntotal
        self.width = index.d
        self.device = device
        if index.metric_type != faiss.METRIC_INNER_PRODUCT:
            raise UsageError(
                "an index of the metric L2 is searched on the CPU: leave out the device"
            )
        if not 0 < n <= MAX_ROWS:
            raise DataError(f"{n:,} codes: an index on a device has 1 to {MAX_ROWS:,}")
        self.memory = memory
        self._host = None if _is_gpu(device) else index
        if self._host is None:
            codes, self._item_ids = index.items_by_id()
            self._ids = None
            if int(self._item_ids[0]) != 0 or int(self._item_ids[-1]) != n - 1:  # not row numbers
                self._ids = tensor_of(self._item_ids).to(device)
            self._Z = tensor_of(Z).to(device)
            M, K, _ = Z.shape
            columns = tensor_of(columns_of(codes, M, K)).to(device).t()
            order = _order(columns[: kernel.LEVELS])
            self._arrange(columns.index_select(1, order), order.int())

    def _arrange(self, columns: Tensor, members: Tensor) -> None:
        """Divide the items with these row numbers into lists of lists.

        Args:
            columns: columns of their codes, uint8 [T, n], sorted by the first ones.
            members: row numbers, int32 [n], ascending where these columns are equal.
        """
        n = len(members)
        # Rows of a multiple of four bytes: the kernel reads four at once.
        self._columns, self._members = torch.nn.functional.pad(columns, (0, -n % 4))[:, :n], members
        begins = torch.arange(min(n, 1), device=self.device)  # of the lists to divide
        ends = begins + n
        # For each level, its lists: first sub-list or item, number of these, last codeword, and
        # whether the list holds sub-lists.
        nodes: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        total = 0
        for column in columns[: kernel.LEVELS]:
            if nodes and not len(begins):
                break
            new = torch.zeros(n + 1, dtype=torch.int8, device=self.device)
            new.index_add_(0, begins, torch.ones_like(begins, dtype=torch.int8))
            new.index_add_(0, ends, -torch.ones_like(begins, dtype=torch.int8))
            new = new.cumsum(0, dtype=torch.int8)[:n]  # 1 in the lists to divide
            new[1:] *= column[1:] != column[:-1]
            new[begins] = 1
            parts = new.nonzero()[:, 0]
            stops = ends[torch.searchsorted(begins, parts, right=True) - 1]
            stops[:-1] = torch.minimum(stops[:-1], parts[1:])
            if nodes:
                starts, sizes, _, inner = nodes[-1]
                first, last = torch.searchsorted(parts, begins), torch.searchsorted(parts, ends)
                starts[inner], sizes[inner] = total + first, last - first
            total += len(parts)
            deepest = len(nodes) + 1 == min(len(columns), kernel.LEVELS)
            inner = (stops - parts > _DIVIDED) & (not deepest)
            nodes.append((parts, stops - parts, column[parts], inner))
            begins, ends = parts[inner], stops[inner]
        self._roots = len(nodes[0][0])
        self._lists = tuple(torch.cat(level_tensors) for level_tensors in zip(*nodes, strict=True))

    def search(
        self,
        xq: ArrayLike | Tensor,
        k: int,
        *,
        allow: IdList | None = None,
        deny: IdList | None = None,
        threads: int | None = None,
    ) -> tuple[Any, Any]:
        """Find the k best items of every query, for any k.

        Results are those of :meth:`..indexes.index.Index.search`.

        Args:
            xq: [Q, M*d]. For a tensor on :attr:`device`, results are tensors there, without host
                copies.
            allow, deny: lists of ids, which the host looks up.
            threads: ignored on a GPU.

        Raises:
            UsageError, DataError: those of that method; also if ``k`` is too large for the working
                memory, or a tensor is on another device.
        """
        check_search(k, self.ntotal, threads)
        queries = vectors_on(xq, self.width, self.device)
        if k * _RESULT > self.memory:
            raise UsageError(
                f"k = {k:,} needs {k * _RESULT:,} bytes of working memory, "
                f"{self.memory:,} are allowed: raise memory"
            )
        if self._host is not None:
            host_results = self._host.search(
                queries.numpy(), k, allow=allow, deny=deny, threads=threads
            )
            D, ids = (tensor_of(array) for array in host_results)
        else:
            passing = self._passing(allow, deny)
            count = min(k, len(passing._members))
            blocks = self._blocks(len(queries), 2 * k)
            results = [self._read(passing._best(queries, block, count)) for block in blocks]
            D, ids = (
                tensors[0] if len(tensors) == 1 else torch.cat(tensors)
                for tensors in zip(*results, strict=True)
            )
        padding = 0, k - D.shape[1]
        if padding[1]:
            D = torch.nn.functional.pad(D, padding, value=-torch.inf)
            ids = torch.nn.functional.pad(ids, padding, value=-1)
        return _like(xq, D), _like(xq, ids)

    def range_search(
        self,
        xq: ArrayLike | Tensor,
        min_score: float,
        *,
        allow: IdList | None = None,
        deny: IdList | None = None,
        limit: int = RANGE_LIMIT,
    ) -> tuple[Any, Any, Any]:
        """Find all items with at least ``min_score``.

        Results are those of :meth:`..indexes.index.Index.range_search`; for a tensor of queries,
        they are tensors.
        """
        min_score = check_min_score(min_score, limit)
        queries = vectors_on(xq, self.width, self.device)
        if self._host is not None:
            host_results = self._host.range_search(
                queries.numpy(), min_score, allow=allow, deny=deny, limit=limit
            )
            lims, D, ids = (_like(xq, tensor_of(array)) for array in host_results)
            return lims, D, ids
        passing = self._passing(allow, deny)
        thresholds = torch.full((len(queries),), threshold_of(min_score), device=self.device)
        lims = torch.zeros(len(queries) + 1, dtype=torch.int64, device=self.device)
        results: list[Tensor] = []
        for block in self._blocks(len(queries), 1):
            block_lims, keys = passing._beyond(
                queries, block, thresholds[block], limit - sum(len(keys) for keys in results)
            )
            if keys is None:
                raise too_many(min_score, limit)
            lims[block.start + 1 : block.stop + 1] = block_lims[1:] + lims[block.start]
            results.append(keys)
        D, ids = self._read(torch.cat(results))
        return _like(xq, lims), _like(xq, D), _like(xq, ids)

    def _passing(self, allow: IdList | None, deny: IdList | None) -> DeviceIndex:
        """Return an index of the items that pass the filter."""
        listed = check_filter(allow, deny)
        if listed is None:
            return self
        is_listed = np.isin(self._item_ids, listed)
        mask = tensor_of(is_listed if deny is None else ~is_listed).to(self.device)
        return self._subset(mask[self._members].nonzero()[:, 0])

    def _subset(self, positions: Tensor) -> DeviceIndex:
        """Return an index of the items at these positions, int64, ascending."""
        subset = copy.copy(self)
        subset._arrange(self._columns[:, positions], self._members[positions])
        return subset

    def _blocks(self, queries: int, k: int) -> Iterator[slice]:
        """Yield slices of queries whose ``k`` results each fit into the memory."""
        bytes_per_query = _RESULT * k + 4 * kernel.scratch_of(*self.codebooks.shape[:2])
        step = max(1, min(_BLOCK, self.memory // bytes_per_query))
        for start in range(0, queries, step):
            yield slice(start, min(queries, start + step))

    def _best(self, queries: Tensor, block: slice, k: int) -> Tensor:
        """Return the ``k`` best keys of each query of a block, int64 [q, k], best first."""
        q, n = block.stop - block.start, len(self._members)
        if 0 < k <= kernel.MOST:
            return self._launch(queries, block, k)
        self._launch(queries, block, 1)  # raises the error of queries that are not finite
        if not k:
            return torch.empty((q, 0), dtype=torch.int64, device=self.device)
        best = torch.empty((q, k), dtype=torch.int64, device=self.device)
        # About 600 of the k best are in the sample, so `rank` is at most 701, below kernel.MOST.
        step = -(-n // min(_SAMPLE, 600 * n // k))
        sample = self._subset(torch.arange(0, n, step, device=self.device))
        share = k * len(sample._members) / n  # of the k best, in the sample
        rank = math.ceil(share + 4 * math.sqrt(share) + 3)
        remaining = torch.arange(q, device=self.device)
        while len(remaining):
            remaining_queries = queries[block][remaining]
            all_rows = slice(0, len(remaining))
            thresholds = torch.full_like(remaining, torch.iinfo(torch.int64).min)
            if rank <= len(sample._members):
                thresholds = sample._best(remaining_queries, all_rows, rank)[:, -1] - 1
            counts = self._launch(remaining_queries, all_rows, 0, thresholds).sum(dim=1)
            enough = counts >= k
            # Beyond the last rank of the sample, all items are above the threshold.
            assert rank <= len(sample._members) or bool(enough.all())
            # Fetch the results of as many queries as fit into the memory together, at least one.
            together = (counts.cumsum(0) - counts) // max(1, self.memory // _RESULT)
            start = 0
            for size in torch.unique_consecutive(together, return_counts=True)[1].tolist():
                run = slice(start, start + size)
                lims, keys = self._beyond(remaining_queries, run, thresholds[run])
                assert keys is not None
                first = lims[:-1][enough[run], None]
                best[remaining[run][enough[run]]] = keys[
                    first + torch.arange(k, device=self.device)
                ]
                start += size
            remaining, rank = remaining[~enough], 4 * rank
        return best

    def _beyond(
        self, queries: Tensor, block: slice, thresholds: Tensor, limit: int | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return all keys of a block of queries that exceed the threshold of their query.

        Returns:
            The positions at which the keys of each query begin, int64 [q + 1]; and the keys, in
                descending order within a query, or None if they are more than ``limit``.
        """
        counts = self._launch(queries, block, 0, thresholds)
        ends = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
        lims = ends[:: counts.shape[1]]
        total = int(ends[-1])
        if limit is not None and total > limit:
            return lims, None
        keys = torch.empty(total, dtype=torch.int64, device=self.device)
        if total:
            self._launch(queries, block, 0, thresholds, ends, keys)
        keys, order = keys.sort(descending=True)
        rows = torch.repeat_interleave(lims.diff(), output_size=total)[order]
        return lims, keys[rows.argsort(stable=True)]

    def _launch(
        self,
        queries: Tensor,
        block: slice,
        k: int,
        thresholds: Tensor | None = None,
        ends: Tensor | None = None,
        keys: Tensor | None = None,
    ) -> Tensor:
        """Run the kernel for a block of queries.

        Returns:
            The best k <= :data:`.kernel.MOST` keys, int64 [q, k]. Without k, the numbers of keys
                above the thresholds, int64 [q, parts]; or, if ``keys`` is given, such keys are
                written there up to ``ends``, one query and part after the other.

        Raises:
            DataError: NaN, infinity, or a score that would overflow; rows are named.
        """
        q = block.stop - block.start
        M, K, d = self.codebooks.shape
        scratch = kernel.scratch_of(M, K)
        parts = max(1, min(_PARTS, _GRID // q, self.memory // (q * (8 * (k or 1) + 4 * scratch))))
        null = torch.empty(0, dtype=torch.int64, device=self.device)  # a null pointer
        if ends is None:
            ends = null
        if keys is None:
            keys = null
        output = torch.empty((q, parts, k or 1), dtype=torch.int64, device=self.device)
        out = (output, null) if k else (keys, output)
        if thresholds is None:
            thresholds = torch.full((q,), torch.iinfo(torch.int64).min, device=self.device)
        overflows = torch.empty((q, parts), dtype=torch.int32, device=self.device)
        tables = torch.empty(q * parts * scratch, dtype=torch.float32, device=self.device)
        codes = self._columns, float(self._columns.stride(0)), self._members
        lists = *self._lists, self._roots, parts
        # A new thread has the GPU's context only after its first operation there: compile here.
        run = kernel.compiled(M, K, d, self.device)
        run(
            q * parts,
            [queries[block], self._Z, *codes, tables, *lists, k, thresholds, ends, *out, overflows],
        )
        if bool(overflows.any()):
            bad = overflows[:, 0].nonzero()[:, 0]
            finite = bool(queries[block][bad].isfinite().all())
            fault = "values too large for float32 scores" if finite else "NaN or infinity"
            raise DataError(f"queries: {fault} in {named_rows((bad + block.start).cpu().numpy())}")
        if not k:
            return output[:, :, 0]
        return output[:, 0] if parts == 1 else output.reshape(q, parts * k).topk(k).values

    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores and the ids of keys."""
        scores, positions = split_keys(keys)
        return scores, positions if self._ids is None else self._ids[positions]


def _is_gpu(device: torch.device) -> bool:
    """Return whether the kernel searches; on the CPU the index itself does."""
    return device.type != "cpu"


def _like(xq: Any, result: Tensor) -> Any:
    """Return a tensor if the queries ``xq`` are one, else an array."""
    return result if isinstance(xq, Tensor) else result.cpu().numpy()


def _order(columns: Tensor) -> Tensor:
    """Return the stable order of codes, uint8 [T, n], by their columns: int64 [n]."""
    order = torch.arange(columns.shape[1], device=columns.device)
    for stop in range(len(columns), 0, -4):
        numbers = torch.zeros(len(order), dtype=torch.int32, device=columns.device)
        for column in columns[max(0, stop - 4) : stop]:
            numbers = numbers * 256 + column  # overflows alike for equal codewords
        order = order[numbers[order].argsort(stable=True)]
    return order

"""IVF lists on a device: only the lists nearest to a query are probed; within these the result is exact.

A query probes the ``nprobe`` nearest non-empty lists, and further ones if these have fewer than k items (that pass the filter). Torch
selects the lists; Faiss, if available, shortlists from them, and torch re-scores as in :mod:`.index`: exact scores, ties by row number.

Queries and centroids are rounded to integers small enough that float64 represents their inner products exactly. So the order of the
lists is the same on every device and in every batch; ties go to the first list.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..codes.checks import Floats
from ..indexes.probing import whole_centroids
from .calls import faiss_within
from .memory import MAX_K, MEMORY, FaissBudget
from .proof import SPARE, decide
from .scan import Scan
from .tensors import EMPTY_KEY, best_of, keys_of

_CELL = 160  # bytes per scanned code: row number, score, key, and their sort
_ORDER = 96  # bytes per list and query for sorting lists
_ROWS = 1024
_WIDE = 1 << 16  # codes per query that keep a GPU busy


class DeviceLists:
    """Assignment of codes to lists.

    Args:
        list_of: int32 [n], the list of each code.
        centroids: float32 [lists, M*d].
        nprobe: lists to probe per query.
        memory: bytes of working memory.

    Attributes:
        sizes: int64 [lists], codes here.
        total: int64 [lists], codes on all devices, so that all probe the same lists (:func:`agree`).
    """

    def __init__(
        self,
        list_of: NDArray[np.int32],
        centroids: Floats,
        nprobe: int,
        device: torch.device,
        memory: int = MEMORY,
    ) -> None:
        sizes = np.bincount(list_of, minlength=len(centroids)).astype(np.int64)
        self.memory = memory
        self.wanted = nprobe
        self.members = torch.from_numpy(np.argsort(list_of, kind="stable")).to(device)
        points, self.scale = whole_centroids(centroids)
        self.points = torch.from_numpy(points).to(device)
        self._count(torch.from_numpy(sizes).to(device))

    def _count(self, sizes: Tensor) -> None:
        self.sizes = sizes
        self.starts = sizes.cumsum(0) - sizes
        self.set_total(sizes)

    def set_total(self, total: Tensor) -> None:
        """Set the number of codes per list over all devices, ``total`` int64 [lists]."""
        self.total = total
        self.held = total.nonzero()[:, 0]

    def nprobe(self, asked: int | None = None) -> int:
        """Lists to probe per query (default: from construction), without empty lists."""
        return min(self.wanted if asked is None else asked, len(self.held))

    def restricted(self, mask: Tensor) -> DeviceLists:
        """The lists restricted to codes where ``mask``, bool [n] on the device, is set."""
        kept = mask[self.members]
        before = torch.zeros(len(kept) + 1, dtype=torch.int64, device=mask.device)
        torch.cumsum(kept, 0, out=before[1:])
        part = object.__new__(DeviceLists)
        part.memory, part.wanted, part.points, part.scale = self.memory, self.wanted, self.points, self.scale
        part.members = self.members[kept]
        part._count(before[self.starts + self.sizes] - before[self.starts])
        return part

    def rows(self) -> int:
        """Queries per block for sorting lists within the memory; at least one."""
        return max(1, min(_ROWS, self.memory // (_ORDER * max(1, len(self.held)))))

    def nearest(self, queries: Tensor, k: int, nprobe: int | None = None) -> tuple[Tensor, Tensor]:
        """The lists to probe per query: int64 [q, p], nearest first, and int64 [q], how many of them.

        Args:
            queries: float32 [q, M*d] on the device, at most :meth:`rows`. k: number of results.
            nprobe: lists (default: from construction).
        """
        wide = queries.double()
        largest = wide.abs().amax(dim=1, keepdim=True)
        whole = (wide / torch.where(largest > 0, largest, 1.0) * self.scale).round()
        scores = whole @ self.points[self.held].T
        order = scores.sort(dim=1, descending=True, stable=True).indices
        until = (self.total[self.held][order].cumsum(dim=1) < k).sum(dim=1) + 1
        count = until.clamp_min(self.nprobe(nprobe)).clamp_max(len(self.held))
        return self.held[order[:, : int(count.max())]], count

    def search_keys(self, scan: Scan, tables: Tensor, lists: Tensor, count: Tensor, k: int) -> Tensor:
        """The best ``k`` codes in the lists from :meth:`nearest`: int64 keys [q, k], descending."""
        there = torch.arange(lists.shape[1], device=lists.device) < count[:, None]
        lengths = torch.where(there, self.sizes[lists], 0)
        ends = lengths.cumsum(dim=1)
        shift = self.starts[lists] - (ends - lengths)
        most = int(ends[:, -1].max())
        rows = max(1, self.memory // (_CELL * (k + min(_WIDE, most))))
        out = torch.full((len(lists), k), EMPTY_KEY, dtype=torch.int64, device=lists.device)
        for start in range(0, len(lists), rows):
            part = slice(start, start + rows)
            out[part] = self._best(scan, tables[part], ends[part], shift[part], out[part])
        return out

    def _best(self, scan: Scan, tables: Tensor, ends: Tensor, shift: Tensor, best: Tensor) -> Tensor:
        """Merge into ``best`` int64 [q, k] the codes of lists; ``ends`` are cumulative list sizes."""
        (q, k), p = best.shape, ends.shape[1]
        total = ends[:, -1:].contiguous()
        most = int(total.max())
        step = max(1, self.memory // (_CELL * q) - k)
        for first in range(0, most, step):
            at = torch.arange(first, min(most, first + step), device=ends.device).repeat(q, 1)
            fine = at < total
            slot = torch.searchsorted(ends, at, right=True).clamp_max(p - 1)
            positions = self.members[torch.where(fine, at + shift.gather(1, slot), 0)]
            keys = keys_of(scan.exact_scores(tables, positions), positions)
            best = best_of(torch.cat([best, torch.where(fine, keys, EMPTY_KEY)], dim=1), k)
        return best


class Lists:
    """Searches the lists nearest to a query exactly.

    Args:
        scan: the codes.
        lists: their assignment to lists.
        index: the same as a Faiss IVF index on the same device, with row numbers as ids; None: torch alone.
        budget: of Faiss' working memory.

    Attributes:
        tried, proven: shortlisted queries, and those with proven results.
    """

    def __init__(
        self,
        scan: Scan,
        lists: DeviceLists,
        index: Any = None,
        budget: FaissBudget | None = None,
    ) -> None:
        self.scan = scan
        self.lists = lists
        self.index = index
        self.budget = budget
        self.tried = 0
        self.proven = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.lists.members)

    def restricted(self, mask: Tensor) -> Lists:
        """The searcher restricted to codes where ``mask``, bool [n] on the device, is set."""
        return Lists(self.scan.restricted(mask), self.lists.restricted(mask))

    def search_keys(self, queries: Tensor, k: int, nprobe: int | None = None) -> Tensor:
        """int64 keys [q, min(k, codes)], descending; padded with empty keys."""
        n = min(k, len(self))
        self.scan.block_rows(n)  # raises if k results exceed the memory
        rows = self.lists.rows()
        parts = []
        for start in range(0, len(queries), rows):
            block = queries[start : start + rows]
            lists, count = self.lists.nearest(block, k, nprobe)
            if int(count.min()) == len(self.lists.held):  # all of them
                parts.append(self.scan.search_keys(block, n))
            else:
                parts.append(self._search(block, lists, count, n, self.lists.nprobe(nprobe)))
        return torch.cat(parts)

    def _search(self, queries: Tensor, lists: Tensor, count: Tensor, k: int, nprobe: int) -> Tensor:
        tables = self.scan.tables(queries)
        best = torch.full((len(queries), k), EMPTY_KEY, dtype=torch.int64, device=queries.device)
        open_ = torch.ones(len(queries), dtype=torch.bool, device=queries.device)
        wanted = k + max(SPARE, k // 4)
        if self.index is not None and nprobe == int(self.index.nprobe) and wanted <= MAX_K:
            some = (count == nprobe).nonzero()[:, 0]  # Faiss probes the same number of lists for every query
            if len(some):
                own = lists[some, :nprobe].contiguous()
                with self._lock:
                    found = faiss_within(self.index, queries[some], wanted, self.budget, own)
                held = self.lists.sizes[own].sum(dim=1)
                best[some], proven = decide(self.scan, queries[some], tables[some], found, k, held)
                self.tried += len(some)
                self.proven += int(proven.sum())
                open_[some] = ~proven
        rest = open_.nonzero()[:, 0]
        if len(rest):
            best[rest] = self.lists.search_keys(self.scan, tables[rest], lists[rest], count[rest], k)
        return best


def agree(parts: list[Any], *, shard: bool) -> None:
    """Make the parts on several devices probe the same lists.

    Args:
        parts: :class:`Lists`, one per device.
        shard: whether each has a part of the items, rather than all.
    """
    if not shard or not parts:
        return
    total = torch.stack([part.lists.sizes.cpu() for part in parts]).sum(dim=0)
    for part in parts:
        part.lists.set_total(total.to(part.lists.sizes.device))

"""An index on one or several devices: Faiss shortlists on the GPU, torch re-scores exactly; arrays or tensors out.

Faiss' GPU kernels are fast, but their rounding depends on the order of additions, and they keep any of the items tied at rank k. So they
only shortlist: candidates are re-scored in a fixed order, and if that does not prove the top k, torch scores all codes for that query.
Results are therefore bit-equal to those of :mod:`..indexes.memory`.

Filters bypass Faiss, whose GPU kernels silently ignore selectors (except cuVS, which is not used here). If enough of the shortlist
passes, that is the result; else torch scores the passing codes on the same device.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ..codes.checks import Floats, Ids
from ..errors import DataError, UsageError
from ..indexes.filters import Filter, FilterCache, mask_of, over_fetch
from ..indexes.items import IdMap
from ..indexes.ranges import LIMIT, check_min_score, too_many
from ..indexes.threads import check_k, check_threads
from ..store import codebooks_fingerprint
from .calls import faiss_within
from .memory import MAX_K, MEMORY, FaissBudget, Mode
from .proof import SPARE, decide
from .scan import DeviceGroups, Scan
from .tensors import EMPTY_KEY, MAX_ROWS, best_of, keys_of, split_keys, vectors_on

_BLOCK = 1024  # queries per block
_RESULT = 64  # bytes per result for merging parts and looking up ids
_TRIED = 256  # queries after which shortlisting may be disabled


class Shortlisted:
    """Faiss shortlists from all codes; :class:`.scan.Scan` searches queries whose result exact scores do not prove.

    Args:
        scan: the codes.
        index: the same codes as a Faiss index on the same device; ids are row numbers.
        budget: of Faiss' working memory.

    Attributes:
        tried, proven: shortlisted queries, and those with proven results.
    """

    def __init__(self, scan: Scan, index: Any, budget: FaissBudget | None = None) -> None:
        self.scan = scan
        self.index = index
        self.budget = budget
        self.tried = 0
        self.proven = 0
        self._lock = threading.Lock()  # Faiss' GPU resources serve one search at a time

    def __len__(self) -> int:
        return len(self.scan)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        n = len(self)
        k = min(k, n)
        wanted = min(n, MAX_K, k + max(SPARE, k // 4))
        seldom = self.tried >= _TRIED and 2 * self.proven < self.tried
        if k > MAX_K or (k == wanted and k < n) or seldom:
            return self.scan.search_keys(queries, k)
        with self._lock:
            found = faiss_within(self.index, queries, wanted, self.budget)
        held = torch.full((len(queries),), n, dtype=torch.int64, device=queries.device)
        best, proven = decide(self.scan, queries, self.scan.tables(queries), found, k, held)
        self.tried += len(queries)
        open_ = (~proven).nonzero()[:, 0]
        self.proven += len(queries) - len(open_)
        if len(open_):
            best[open_] = self.scan.search_keys(queries[open_], k)
        return best


class Raw:
    """Faiss alone: its own scores, any of the items tied at rank k, at most 2,048 results.

    No second copy of the codes.
    """

    def __init__(self, index: Any, budget: FaissBudget | None = None) -> None:
        self.index = index
        self.budget = budget
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        k = min(k, len(self))
        if k > MAX_K:
            raise UsageError(f"k = {k}: Faiss returns at most {MAX_K} on a GPU; search='exact' has no limit")
        with self._lock:
            scores, found = faiss_within(self.index, queries, k, self.budget)
        return best_of(torch.where(found >= 0, keys_of(scores, found), EMPTY_KEY), k)


class Filtered:
    """The passing codes: shortlisted among all codes if most pass, else scanned.

    Args:
        inner: searcher of all codes.
        scan: the passing codes.
        allowed: their number.
    """

    def __init__(self, inner: Shortlisted, scan: Scan, allowed: int) -> None:
        self.inner, self.scan, self.allowed = inner, scan, allowed

    def __len__(self) -> int:
        return self.allowed

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        n = len(self.scan)
        k = min(k, self.allowed)
        more = over_fetch(k, n, self.allowed)
        if more is None or more + max(SPARE, more // 4) > min(n, MAX_K):
            return self.scan.search_keys(queries, k)
        found = self.inner.search_keys(queries, more)
        assert self.scan.mask is not None
        passed = self.scan.mask[split_keys(found)[1]]
        count = passed.cumsum(dim=1)
        enough = count[:, -1] >= k
        out = torch.empty((len(queries), k), dtype=torch.int64, device=queries.device)
        out[enough] = found[passed & (count <= k) & enough[:, None]].reshape(-1, k)
        open_ = (~enough).nonzero()[:, 0]
        if len(open_):
            out[open_] = self.scan.search_keys(queries[open_], k)
        return out


Searcher = Scan | Shortlisted | Raw | Filtered
"""Searches the codes of one device; keys contain row numbers there."""


@dataclass(frozen=True)
class Part:
    """The part of an index on one device.

    Attributes:
        device: the device.
        searcher: of items, or of distinct codes if there are ``groups``.
        items: number of items.
        first: row of its first item in the whole index (0 for a replica).
        groups: the items of each distinct code.
        resources: Faiss objects to keep alive.
    """

    device: torch.device
    searcher: Searcher
    items: int
    first: int = 0
    groups: DeviceGroups | None = None
    resources: Any = None

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """int64 keys [q, min(k, items)] with row numbers in the whole index."""
        keys = self.searcher.search_keys(queries, k)
        if self.groups is not None:
            keys = self.groups.expand(keys, min(k, self.items))
        # keys contain 2^32 - 1 minus the row number
        return torch.where(keys == EMPTY_KEY, keys, keys - self.first) if self.first else keys

    def range_keys(self, queries: Tensor, min_score: float, limit: int) -> tuple[Tensor, Tensor]:
        """Query rows and keys of all items with at least ``min_score``."""
        rows, keys = self.scan("a range search").range_keys(queries, min_score, limit)
        if self.groups is not None:
            rows, keys = self.groups.expand_all(rows, keys, min_score, limit)
        return rows, keys - self.first

    def restricted(self, mask: NDArray[np.bool_]) -> Part:
        """Only the items where ``mask``, bool [items], is set; row numbers are kept."""
        scan = self.scan("a filter")
        allowed = int(mask.sum())
        there = torch.from_numpy(np.array(mask)).to(self.device)  # a copy, as it may belong to the caller
        if self.groups is None:
            held, passing = self.searcher, scan.restricted(there)
            searcher = Filtered(held, passing, allowed) if isinstance(held, Shortlisted) else passing
            return replace(self, searcher=searcher, items=allowed)
        rows, groups = self.groups.restricted(there)
        return replace(self, searcher=scan.taken(rows), items=allowed, groups=groups)

    def scan(self, what: str) -> Scan:
        """The scan of all codes, for operations (``what``) that need exact scores. Raises UsageError: Faiss alone."""
        scan = self.searcher if isinstance(self.searcher, Scan) else getattr(self.searcher, "scan", None)
        if scan is None:
            raise UsageError(f"{what} needs exact scores: create the index with search='exact'")
        assert isinstance(scan, Scan)
        return scan


class DeviceIndex:
    """An index on one or several devices, created by :func:`.placing.to_gpu` and :func:`.placing.to_torch`.

    Search is thread-safe. The index is a snapshot: later changes of its source have no effect.

    Attributes:
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        device: device of query tensors and results (the first, if several).
        parts: the part on each device.
        mode: ``shard`` (each device has a part of the items) or ``replica`` (each has all, and a part of the queries).

    Raises:
        DataError: more than 2^32 - 1 items.
    """

    def __init__(
        self,
        parts: list[Part],
        codebooks: Floats,
        ids: Ids | None,
        mode: Mode = "shard",
        memory: int = MEMORY,
        *,
        source: str = "",
    ) -> None:
        self.parts = parts
        self.codebooks = codebooks
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.width = int(codebooks.shape[0] * codebooks.shape[2])
        self._source = source
        self.memory = memory
        self.mode: Mode = mode
        self.device = parts[0].device
        self.ntotal = sum(part.items for part in parts) if mode == "shard" else parts[0].items
        if self.ntotal > MAX_ROWS:  # row numbers share a key with the score
            raise DataError(
                f"{self.ntotal:,} items: at most {MAX_ROWS:,} over all devices: use several indexes"
            )
        # A copy, as the ids may belong to the caller; also on the host, for filters.
        own = None if ids is None else np.array(ids, np.int64)
        self._names = IdMap(self.ntotal, own)
        self._ids = None if own is None else torch.from_numpy(own).to(self.device)
        self._filtered: FilterCache[list[Part]] = FilterCache()

    @property
    def faiss_indexes(self) -> list[Any]:
        """The Faiss index of each device, with row numbers as ids; empty for torch alone."""
        found = (getattr(part.searcher, "index", None) for part in self.parts)
        return [index for index in found if index is not None]

    def stats(self) -> dict[str, int]:
        """Number of queries shortlisted by Faiss (``tried``), and of those with proven results (``proven``)."""
        parts = [p.searcher for p in self.parts if isinstance(p.searcher, Shortlisted)]
        return {"tried": sum(p.tried for p in parts), "proven": sum(p.proven for p in parts)}

    def describe(self) -> str:
        """One-line description of the search."""
        places = ", ".join(str(part.device) for part in self.parts)
        return f"{self._source or f'{self.ntotal:,} items'}, on {places}"

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
        """The ``k`` best items of every query, for any k.

        Scores are those of :func:`..codes.scores.score_codes`, ties are in ascending order of id (with ``search="approximate"``:
        Faiss' own). For k above 2,048 torch is used alone.

        Args:
            xq: [Q, M*d]. For an array, results are arrays. For a tensor on :attr:`device`, results are tensors there, without host
                copies.
            k: 1..ntotal.
            nprobe: must be None: the search is exact.
            threads: ignored.
            where: search only items that pass this filter, as in :meth:`..indexes.memory.MemoryIndex.search`. It is evaluated on the
                host and cached, and takes a byte per item on the device (temporarily about 30 with distinct codes or lists).

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k]; padded with -inf and -1 if fewer items pass (with ``search="approximate"`` also
            if the probed lists have fewer).

        Raises:
            UsageError: ``k`` or ``nprobe`` out of range, or too large for the working memory; a tensor on another device; ``where`` is not
                a filter, or is given with ``search="approximate"``.
            DataError: queries empty, of another width, NaN or infinite; an invalid filter.
        """
        k = check_k(k, self.ntotal)
        check_threads(threads)
        if nprobe is not None:
            raise UsageError("nprobe limits a search on the CPU; on a device it is exact: leave it out")
        queries = vectors_on(xq, self.width, self.device)
        parts = self._parts(where)
        n = min(k, self._items(parts))
        if isinstance(xq, Tensor):
            D = torch.full((len(queries), k), -torch.inf, dtype=torch.float32, device=self.device)
            found = torch.full((len(queries), k), -1, dtype=torch.int64, device=self.device)
            for rows, scores, ids in self._blocks(parts, queries, n):
                D[rows, :n], found[rows, :n] = scores, ids
            return D, found
        scores_out = np.full((len(queries), k), -np.inf, np.float32)
        ids_out = np.full((len(queries), k), -1, np.int64)
        for rows, scores, ids in self._blocks(parts, queries, n):
            scores_out[rows, :n], ids_out[rows, :n] = scores.cpu().numpy(), ids.cpu().numpy()
        return scores_out, ids_out

    def range_search(
        self,
        xq: ArrayLike | Tensor,
        min_score: float,
        *,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
    ) -> tuple[Any, Any, Any]:
        """All items with an exact score of at least ``min_score``.

        Args:
            threads: ignored.
            where: as :meth:`search`.

        Returns:
            As :meth:`..indexes.memory.MemoryIndex.range_search`: lims int64 [Q + 1], D float32, I int64; tensors for a tensor.

        Raises:
            UsageError: ``min_score`` is NaN; ``search="approximate"``; a tensor on another device;
                ``where`` is not a filter.
            DataError: invalid queries or filter; more than ``limit`` results.
        """
        min_score = check_min_score(min_score)
        check_threads(threads)
        queries = vectors_on(xq, self.width, self.device)

        def run(part: Part, block: Tensor) -> tuple[Tensor, Tensor]:
            return part.range_keys(block, min_score, limit)

        parts = self._parts(where)
        parts = [part for part in (parts if self.mode == "shard" else parts[:1]) if part.items]
        found = self._on_all(run, parts, [queries] * len(parts))
        none = torch.empty(0, dtype=torch.int64, device=self.device)
        rows, keys = (torch.cat([none, *(f[i].to(self.device) for f in found)]) for i in (0, 1))
        if len(keys) > limit:
            raise too_many(min_score, limit)
        order = keys.argsort(descending=True)
        order = order[rows[order].argsort(stable=True)]
        lims = torch.zeros(len(queries) + 1, dtype=torch.int64, device=self.device)
        lims[1:] = torch.bincount(rows, minlength=len(queries)).cumsum(0)
        scores, ids = self._read(keys[order])
        if isinstance(xq, Tensor):
            return lims, scores, ids
        return lims.cpu().numpy(), scores.cpu().numpy(), ids.cpu().numpy()

    def _parts(self, where: Filter | None) -> list[Part]:
        """The parts to search; those of the last filter are cached."""
        if where is None:
            return self.parts
        for part in self.parts:
            part.scan("a filter")
        mask = mask_of(where, self._names)

        def make() -> list[Part]:
            return [part.restricted(mask[part.first : part.first + part.items]) for part in self.parts]

        return self._filtered.get(mask, make)

    def _items(self, parts: list[Part]) -> int:
        return sum(part.items for part in parts) if self.mode == "shard" else parts[0].items

    def _blocks(self, parts: list[Part], queries: Tensor, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield rows, scores and ids in blocks of queries; smaller blocks for large k limit memory."""
        if k == 0:
            return
        step = _BLOCK * (len(self.parts) if self.mode == "replica" else 1)
        step = max(1, min(step, self.memory // (_RESULT * k)))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            scores, ids = self._read(self._search_keys(parts, block, k))
            yield slice(start, start + len(block)), scores, ids

    def _search_keys(self, parts: list[Part], queries: Tensor, k: int) -> Tensor:
        if len(parts) == 1:
            return parts[0].search_keys(queries, k)

        def run(part: Part, block: Tensor) -> Tensor:
            return part.search_keys(block, k)

        if self.mode == "shard":
            parts = [part for part in parts if part.items]
            found = self._on_all(run, parts, [queries] * len(parts))
            return best_of(torch.cat([keys.to(self.device) for keys in found], dim=1), k)
        blocks = [block for block in queries.tensor_split(len(parts)) if len(block)]
        found = self._on_all(run, parts[: len(blocks)], blocks)  # a replica without queries stays idle
        return torch.cat([keys.to(self.device) for keys in found])

    def _on_all(
        self, run: Callable[[Part, Tensor], Any], parts: list[Part], blocks: list[Tensor]
    ) -> list[Any]:
        """``run`` each part with its block in parallel, one thread per device."""
        if not parts:
            return []
        # Threads start on the default stream; use the caller's, so that freed memory is not reused while the other reads it.
        streams = [
            torch.cuda.current_stream(part.device) if part.device.type == "cuda" else None for part in parts
        ]
        if self.device.type == "cuda":  # from which other devices copy the queries
            torch.cuda.current_stream(self.device).synchronize()

        def one(part: Part, block: Tensor, stream: torch.cuda.Stream | None) -> Any:
            if stream is None:
                return run(part, block)
            with torch.cuda.stream(stream):
                result = run(part, block.to(part.device))
                stream.synchronize()
            return result

        with ThreadPoolExecutor(len(blocks)) as pool:
            return list(pool.map(one, parts, blocks, streams))

    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores, positions = split_keys(keys)
        if self._ids is None:
            return scores, positions
        return scores, torch.where(positions >= 0, self._ids[positions.clamp_min(0)], -1)

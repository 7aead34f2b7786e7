"""One index over one or several devices: Faiss nominates on the GPU, torch decides there, arrays or tensors come out.

Faiss' GPU kernels scan fast, but their floats depend on the order in which they add, and of items tied at the k-th
place they keep any. So, as on the CPU (:mod:`.proof`), they only nominate: the nominated are scored again in the fixed
order, and where that does not prove the top k, torch scores all codes of that query. Answers are therefore those of the
exact kinds of :mod:`.engine`, to the bit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import faiss
import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..errors import DataError, UsageError
from .checks import Ids
from .gpu import MEMORY, Mode
from .gpu_arrays import EMPTY_KEY, best_of, keys_of, split_keys, vectors_on
from .gpu_torch import DeviceGroups, Scan
from .search import check_k

MAX_K = 2048
"""The most results, and lists looked at, of Faiss' GPU kernels."""
_BLOCK = 1024  # queries at once
_RESULT = 64  # bytes a result needs while parts are merged and ids looked up
_SPARE = 32  # nominated beyond k, at least
_TRIED = 256  # queries after which nominating may be given up
_UNIT = 2.0**-23  # twice the relative error of one float32 operation
_TINY = 2.0**-126
_EXPONENT = 0x7F80_0000  # of float32


class Searcher(Protocol):
    """What searches the codes of one device; keys are of positions there."""

    def __len__(self) -> int: ...

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """int64 keys [q, k], descending, of checked queries on the device."""
        ...


def faiss_search(index: Any, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search a Faiss index with a tensor, float32 [q, D]: results lie on the same device; nothing passes the host.

    What ``faiss.contrib.torch_utils`` does, without importing it: that replaces methods of all Faiss classes in the
    process, after which ``search(..., params=...)`` with arrays fails. On a GPU the work is queued on torch's current
    stream.

    Args:
        index: on the GPU of ``queries``, or on the CPU for queries there.
    """
    width = int(index.d)
    # A power of two changes no bit but the exponent, and keeps tiny queries from underflow where centroids are tiny.
    scale = queries.abs().amax(dim=1, keepdim=True).view(torch.int32).bitwise_and(_EXPONENT)
    factor = scale.view(torch.float32).clamp_min(_TINY)
    queries = queries / factor
    if queries.shape[1] < width:  # codes are padded, so queries are
        queries = torch.nn.functional.pad(queries, (0, width - queries.shape[1]))
    queries = queries.contiguous()
    D = torch.empty((len(queries), k), dtype=torch.float32, device=queries.device)
    found = torch.empty((len(queries), k), dtype=torch.int64, device=queries.device)

    def run() -> None:
        index.search_c(
            len(queries),
            faiss.cast_integer_to_float_ptr(queries.data_ptr()),
            k,
            faiss.cast_integer_to_float_ptr(D.data_ptr()),
            faiss.cast_integer_to_idx_t_ptr(found.data_ptr()),
        )

    if queries.device.type != "cuda":
        run()
        return D * factor, found
    with torch.cuda.device(queries.device):
        resources: Any = index.getResources()
        device = int(index.getDevice())
        before = resources.getDefaultStream(device)
        stream = torch.cuda.current_stream().cuda_stream
        resources.setDefaultStream(device, faiss.cast_integer_to_cudastream_t(stream))  # type: ignore[attr-defined]
        try:
            run()
        finally:
            resources.setDefaultStream(device, before)
    return D * factor, found


class Nominated:
    """Faiss nominates from all codes, exact scores prove, :class:`.gpu_torch.Scan` settles the rest.

    Args:
        scan: the codes.
        index: the same codes as a Faiss index on the same device; its ids are positions.

    Attributes:
        tried, proven: queries nominated for, and those whose answer that proved.
    """

    def __init__(self, scan: Scan, index: Any) -> None:
        self.scan = scan
        self.index = index
        self.tried = 0
        self.proven = 0
        self._lock = threading.Lock()  # Faiss' GPU resources serve one search at a time

    def __len__(self) -> int:
        return len(self.scan)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        n = len(self)
        wanted = min(n, MAX_K, k + max(_SPARE, k // 4))
        seldom = self.tried >= _TRIED and 2 * self.proven < self.tried
        if k > MAX_K or (k == wanted and k < n) or seldom:
            return self.scan.search_keys(queries, k)
        with self._lock:
            approximate, found = faiss_search(self.index, queries, wanted)
        exact = self.scan.exact_scores(self.scan.tables(queries), found.clamp_min(0))
        there = found >= 0
        best = best_of(torch.where(there, keys_of(exact, found), EMPTY_KEY), k)
        slack = self._rounding(queries)
        # What is promised of Faiss is seen to where it can be: scores that lie further off prove nothing.
        proven = there.all(dim=1) & ((approximate - exact).abs() <= slack[:, None]).all(dim=1)
        if wanted < n:
            proven &= split_keys(best[:, -1])[0] > approximate.amin(dim=1) + slack
        self.tried += len(queries)
        open_ = (~proven).nonzero()[:, 0]
        self.proven += len(queries) - len(open_)
        if len(open_):
            best[open_] = self.scan.search_keys(queries[open_], k)
        return best

    def _rounding(self, queries: Tensor) -> Tensor:
        """How far two float32 evaluations of a score can lie apart, float32 [q] (:func:`.proof.rounding_bound`)."""
        M, d = self.scan.M, self.scan.d
        norms = torch.linalg.vector_norm(queries.double().reshape(-1, M, d), dim=2).sum(dim=1)
        bound = 1.01 * (2 * d + M + 2) * (_UNIT * norms + 2 * M * d * _TINY)
        # rounded upwards
        slack: Tensor = (bound * (1 + _UNIT)).float()
        return slack


class Lists:
    """The lists nearest to a query, candidates scored again; more than 2,040 results come from all lists, exactly.

    Args:
        scan: the codes.
        index: the same as Faiss' IVF index on the same device; its ids are positions.
    """

    def __init__(self, scan: Scan, index: Any) -> None:
        self.scan = scan
        self.index = index
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.scan)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        wanted = min(len(self), k + 8)
        if wanted > MAX_K:
            return self.scan.search_keys(queries, k)
        with self._lock:
            _, found = faiss_search(self.index, queries, wanted)
        exact = self.scan.exact_scores(self.scan.tables(queries), found.clamp_min(0))
        return best_of(torch.where(found >= 0, keys_of(exact, found), EMPTY_KEY), k)


class Raw:
    """Faiss alone: its own scores, any of the items tied at the k-th place, at most 2,048 results.

    It holds no second copy of the codes.
    """

    def __init__(self, index: Any) -> None:
        self.index = index
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        if k > MAX_K:
            raise UsageError(f"k = {k}: Faiss gives at most {MAX_K} on a GPU; leave out via='faiss' for more")
        with self._lock:
            scores, found = faiss_search(self.index, queries, k)
        return best_of(torch.where(found >= 0, keys_of(scores, found), EMPTY_KEY), k)


@dataclass(frozen=True)
class Part:
    """What one device holds.

    Attributes:
        device: where.
        searcher: of items, or of distinct codes where there are ``groups``.
        items: how many.
        first: position of its first item among all (0 for a replica).
        groups: the items of each distinct code.
        resources: what Faiss needs to be kept alive.
    """

    device: torch.device
    searcher: Searcher
    items: int
    first: int = 0
    groups: DeviceGroups | None = None
    resources: Any = None

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """int64 keys [q, min(k, items)] of positions among all."""
        k = min(k, self.items)
        keys = self.searcher.search_keys(queries, min(k, len(self.searcher)))
        if self.groups is not None:
            keys = self.groups.expand(keys, k)
        # a position stands in a key as its difference from 2^32 - 1
        return torch.where(keys == EMPTY_KEY, keys, keys - self.first) if self.first else keys

    def range_keys(self, queries: Tensor, least: float, limit: int) -> tuple[Tensor, Tensor]:
        """Rows and keys of all items that score at least ``least``."""
        scan = self.searcher if isinstance(self.searcher, Scan) else getattr(self.searcher, "scan", None)
        if scan is None:
            raise UsageError("a range search needs exact scores: leave out via='faiss'")
        rows, keys = scan.range_keys(queries, least, limit)
        if self.groups is not None:
            rows, keys = self.groups.expand_all(rows, keys)
        return rows, keys - self.first


class DeviceIndex:
    """An index on one or several devices. Made by :func:`.gpu.to_gpu` and :func:`.gpu.to_torch`.

    Searching is safe from several threads at once. It is a snapshot: what happens to its source later is not seen.

    Attributes:
        ntotal: items.
        width: D of the queries.
        device: where tensors must be and results are (the first, if several).
        parts: what each device holds.
        mode: ``shard`` (each device has a part of the items) or ``replica`` (each has all, and a part of the queries).
    """

    def __init__(
        self, parts: list[Part], width: int, ids: Ids | None, mode: Mode = "shard", memory: int = MEMORY
    ) -> None:
        self.parts = parts
        self.width = width
        self.memory = memory
        self.mode: Mode = mode
        self.device = parts[0].device
        self.ntotal = sum(part.items for part in parts) if mode == "shard" else parts[0].items
        self._ids = None if ids is None else torch.from_numpy(np.array(ids, np.int64)).to(self.device)

    @property
    def faiss_indexes(self) -> list[Any]:
        """The Faiss index of each device; their ids are positions there. Empty where torch works alone."""
        found = (getattr(part.searcher, "index", None) for part in self.parts)
        return [index for index in found if index is not None]

    def stats(self) -> dict[str, int]:
        """Queries nominated for by Faiss (``tried``), and those of them that needed no more (``proven``)."""
        parts = [p.searcher for p in self.parts if isinstance(p.searcher, Nominated)]
        return {"tried": sum(p.tried for p in parts), "proven": sum(p.proven for p in parts)}

    def search(self, xq: ArrayLike | Tensor, k: int) -> tuple[Any, Any]:
        """The ``k`` best items of every query; any k, up to a whole ranking.

        Scores are those of :func:`.codebooks.score_codes`, equal scores come by ascending id (with ``via="faiss"``:
        Faiss' own). More than 2,048 results come from torch alone. Of an index with lists, only the nearest lists are
        looked at; with more than 2,040 results all are.

        Args:
            xq: [Q, M*d]. An array: results are arrays. A tensor on :attr:`device`: results are tensors there, and
                nothing passes through the host.
            k: 1..ntotal.

        Returns:
            D float32 [Q, k], larger first; I int64 [Q, k]; -inf and -1 where the lists looked at hold fewer.

        Raises:
            UsageError: ``k`` out of range, or more than the working memory sorts; a tensor on another device.
            DataError: queries empty, of another width, NaN or infinite.
        """
        k = check_k(k, self.ntotal)
        queries = vectors_on(xq, self.width, self.device)
        if isinstance(xq, Tensor):
            D = torch.empty((len(queries), k), dtype=torch.float32, device=self.device)
            found = torch.empty((len(queries), k), dtype=torch.int64, device=self.device)
            for rows, scores, ids in self._blocks(queries, k):
                D[rows], found[rows] = scores, ids
            return D, found
        scores_out = np.empty((len(queries), k), np.float32)
        ids_out = np.empty((len(queries), k), np.int64)
        for rows, scores, ids in self._blocks(queries, k):
            scores_out[rows], ids_out[rows] = scores.cpu().numpy(), ids.cpu().numpy()
        return scores_out, ids_out

    def range_search(
        self, xq: ArrayLike | Tensor, least: float, *, limit: int = 100_000_000
    ) -> tuple[Any, Any, Any]:
        """All items that score at least ``least``, by exact scores, of all lists.

        Returns:
            As :meth:`.engine.Engine.range_search`: lims int64 [Q + 1], D float32, I int64; tensors for a tensor.

        Raises:
            UsageError: ``least`` is NaN; ``via="faiss"``; a tensor on another device.
            DataError: unfit queries; more than ``limit`` results.
        """
        if np.isnan(least):
            raise UsageError("a range search needs a number as the least score, not NaN")
        queries = vectors_on(xq, self.width, self.device)

        def run(part: Part, block: Tensor) -> tuple[Tensor, Tensor]:
            return part.range_keys(block, least, limit)

        parts = self.parts if self.mode == "shard" else self.parts[:1]
        found = self._on_all(run, [queries] * len(parts))
        rows, keys = (torch.cat([f[i].to(self.device) for f in found]) for i in (0, 1))
        if len(keys) > limit:
            raise DataError(
                f"a range search from {least:g} has more than {limit:,} results: raise the least score or the limit"
            )
        order = keys.argsort(descending=True)
        order = order[rows[order].argsort(stable=True)]
        lims = torch.zeros(len(queries) + 1, dtype=torch.int64, device=self.device)
        lims[1:] = torch.bincount(rows, minlength=len(queries)).cumsum(0)
        scores, ids = self._read(keys[order])
        if isinstance(xq, Tensor):
            return lims, scores, ids
        return lims.cpu().numpy(), scores.cpu().numpy(), ids.cpu().numpy()

    def _blocks(self, queries: Tensor, k: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, scores and ids of some queries at a time: few where k is large, so that results do not pile up."""
        step = _BLOCK * (len(self.parts) if self.mode == "replica" else 1)
        step = max(1, min(step, self.memory // (_RESULT * k)))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            scores, ids = self._read(self._search_keys(block, k))
            yield slice(start, start + len(block)), scores, ids

    def _search_keys(self, queries: Tensor, k: int) -> Tensor:
        if len(self.parts) == 1:
            return self.parts[0].search_keys(queries, k)

        def run(part: Part, block: Tensor) -> Tensor:
            return part.search_keys(block, k)

        if self.mode == "shard":
            found = self._on_all(run, [queries] * len(self.parts))
            return best_of(torch.cat([keys.to(self.device) for keys in found], dim=1), k)
        blocks = [block for block in queries.tensor_split(len(self.parts)) if len(block)]
        found = self._on_all(run, blocks)
        return torch.cat([keys.to(self.device) for keys in found])

    def _on_all(self, run: Callable[[Part, Tensor], Any], blocks: list[Tensor]) -> list[Any]:
        """``run`` each part with its block, all at once, a thread a device."""
        if self.device.type == "cuda":  # threads have streams of their own
            torch.cuda.current_stream(self.device).synchronize()

        def one(part: Part, block: Tensor) -> Any:
            if part.device.type != "cuda":
                return run(part, block)
            with torch.cuda.device(part.device):
                result = run(part, block.to(part.device))
                torch.cuda.current_stream().synchronize()
            return result

        with ThreadPoolExecutor(len(blocks)) as pool:
            return list(pool.map(one, self.parts, blocks))  # a replica without queries stays idle

    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores, positions = split_keys(keys)
        if self._ids is None:
            return scores, positions
        return scores, torch.where(positions >= 0, self._ids[positions.clamp_min(0)], -1)

"""An index on one or several devices: a snapshot of the items, arrays or tensors out."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from ..codes.checks import Codes, Floats, Ids
from ..errors import DataError, UsageError
from ..indexes.filters import Filter, mask_of
from ..indexes.items import IdMap
from ..indexes.memory import MemoryIndex
from ..indexes.opening import of_faiss
from ..indexes.ranges import LIMIT, check_limit, check_min_score, too_many
from ..indexes.threads import check_k, check_threads
from ..store import codebooks_fingerprint
from .faiss_form import FaissLists, check_gpu
from .lists import MEMORY, DeviceLists, by_row
from .tensors import MAX_ROWS, device_of, split_keys, vectors_on

_RESULT = 64  # bytes per result for merging parts and looking up ids
_BLOCK = 1024  # queries per block and device

Mode = Literal["shard", "replica"]
Part = DeviceLists | FaissLists
"""The items of one device; keys contain row numbers in the whole index."""


def to_gpu(
    source: Any,
    *,
    device: int = 0,
    devices: Sequence[int] | None = None,
    mode: Mode = "shard",
    search: Literal["exact", "approximate"] = "exact",
    memory: int = MEMORY,
) -> DeviceIndex:
    """Copy an index to one or several GPUs.

    Args:
        source: a Faiss index in any form of :mod:`..faissio.storage`, or an :class:`..indexes.memory.MemoryIndex`. Codes of any
            packing are searched *exactly*, also FastScan's.
        device: number of the GPU.
        devices: several GPUs; with ``mode`` ``shard`` each gets a part of the items, with ``replica`` all items and a part of the
            queries.
        search: ``exact``: by torch, as :func:`to_torch`; results are bit-equal to the CPU. ``approximate``: by Faiss' ``GpuIndexIVFPQ``
            with zero centroids and byte-fused codebooks, with its own scores and order of ties, k up to 2,048, without filters and
            ranges.
        memory: bytes that a search may use on a device in addition to codes, ids and results; Faiss uses as much as one query needs.

    Raises:
        DeviceError: no such GPU, or Faiss left an index on the CPU (there is no silent fall-back).
        DataError: the index is empty or invalid.
        UsageError: an option out of range; ``approximate`` for codes that Faiss does not support on a GPU.
    """
    if search not in ("exact", "approximate"):
        raise UsageError(f"search {search!r}: choose exact or approximate")
    numbers = [device] if devices is None else list(devices)
    if not numbers or len(set(numbers)) != len(numbers):
        raise UsageError(f"devices {numbers}: name at least one GPU, each once")
    for number in numbers if search == "approximate" else ():
        check_gpu(number)
    kind = DeviceLists if search == "exact" else FaissLists
    return spread(source, [device_of(int(number)) for number in numbers], mode, memory, kind)


def to_torch(
    source: Any,
    *,
    device: str | int | Sequence[str | int],
    mode: Mode = "shard",
    memory: int = MEMORY,
) -> DeviceIndex:
    """Copy an index to one or several devices for exact search by torch, for any K and code length.

    Args:
        device: ``cuda:0``, or ``cpu`` to run the GPU algorithm on the CPU.
        source, mode, memory: as :func:`to_gpu`.

    Raises:
        DeviceError, DataError, UsageError: see :func:`to_gpu`.
    """
    places = [device_of(one) for one in ([device] if isinstance(device, str | int) else device)]
    return spread(source, places, mode, memory, DeviceLists)


def spread(
    source: Any,
    places: Sequence[torch.device],
    mode: Mode,
    memory: int,
    place: Callable[[Codes, Floats, torch.device, int, int], Part],
) -> DeviceIndex:
    """The items of ``source`` on devices; ``place`` puts codes, of row numbers from its last argument on, on one of them."""
    if mode not in ("shard", "replica"):
        raise UsageError(f"mode {mode!r}: choose shard or replica")
    description = source.describe() if isinstance(source, MemoryIndex) else ""
    index = source if isinstance(source, MemoryIndex) else of_faiss(source, what="the index")
    codes, Z = index.codes, index.codebooks
    ids: Ids | None = index.ids
    n = len(codes)
    if n > MAX_ROWS:  # row numbers share a key with the score
        raise DataError(f"{n:,} items: at most {MAX_ROWS:,} over all devices: use several indexes")
    if mode == "shard" and len(places) > n:
        raise UsageError(f"{n} items cannot be split over {len(places)} devices: use fewer, or replicas")
    parts = []
    for number, at in enumerate(places):
        first, stop = 0, n
        if mode == "shard":
            first, stop = number * n // len(places), (number + 1) * n // len(places)
        parts.append(place(codes[first:stop], Z, at, memory, first))
    if ids is not None and ids[0] == 0 and ids[-1] == n - 1:
        ids = None  # they are row numbers
    return DeviceIndex(parts, Z, n, ids, mode, memory, source=description)


class DeviceIndex:
    """An index on one or several devices, created by :func:`to_gpu` and :func:`to_torch`.

    Search is thread-safe. The index is a snapshot: later changes of its source have no effect.

    Attributes:
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        device: device of query tensors and results (the first, if several).
        parts: the items on each device.
        mode: ``shard`` (each device has a part of the items) or ``replica`` (each has all, and a part of the queries).
    """

    def __init__(
        self,
        parts: Sequence[Part],
        codebooks: Floats,
        ntotal: int,
        ids: Ids | None = None,
        mode: Mode = "shard",
        memory: int = MEMORY,
        *,
        source: str = "",
    ) -> None:
        self.parts = list(parts)
        self.codebooks = codebooks
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.width = int(codebooks.shape[0] * codebooks.shape[2])
        self._source = source
        self.memory = memory
        self.mode: Mode = mode
        self.device = parts[0].device
        self.ntotal = ntotal
        # A copy, as the ids may belong to the caller; also on the host, for filters.
        own = None if ids is None else np.array(ids, np.int64)
        self._names = IdMap(self.ntotal, own)
        self._ids = None if own is None else torch.from_numpy(own).to(self.device)
        self._filtered: tuple[bytes, list[DeviceLists]] = b"", []
        self._lock = threading.Lock()

    @property
    def faiss_indexes(self) -> list[Any]:
        """The Faiss index of each device, with row numbers as ids; empty for exact search."""
        return [part.index for part in self.parts if isinstance(part, FaissLists)]

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
        Faiss' own).

        Args:
            xq: [Q, M*d]. For an array, results are arrays. For a tensor on :attr:`device`, results are tensors there, without host
                copies.
            k: 1..ntotal.
            nprobe: must be None: the search is exact.
            threads: ignored.
            where: search only items that pass this filter, as in :meth:`..indexes.memory.MemoryIndex.search`. It is evaluated on the
                host; the passing codes are copied on the device and kept for the next search with the same filter.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k]; padded with -inf and -1 if fewer items pass.

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
        parts = self.parts if where is None else self._exact("a filter", where)
        on = self.device if isinstance(xq, Tensor) else torch.device("cpu")
        D = torch.full((len(queries), k), -torch.inf, dtype=torch.float32, device=on)
        found = torch.full((len(queries), k), -1, dtype=torch.int64, device=on)
        for rows, keys in self._blocks(parts, queries, k):
            there = keys.shape[1]
            D[rows, :there], found[rows, :there] = self._read(keys)
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
        check_limit(limit)
        check_threads(threads)
        queries = vectors_on(xq, self.width, self.device)
        parts = self._exact("a range search", where)[: None if self.mode == "shard" else 1]
        pairs = self._on_all(
            lambda part, block: part.range_keys(block, min_score, limit), parts, [queries] * len(parts)
        )
        rows, keys = (torch.cat([pair[i].to(self.device) for pair in pairs]) for i in (0, 1))
        if len(keys) > limit:
            raise too_many(min_score, limit)
        rows, keys = by_row(rows, keys)
        lims = torch.zeros(len(queries) + 1, dtype=torch.int64, device=self.device)
        lims[1:] = torch.bincount(rows, minlength=len(queries)).cumsum(0)
        D, found = self._read(keys)
        if isinstance(xq, Tensor):
            return lims, D, found
        return lims.cpu().numpy(), D.cpu().numpy(), found.cpu().numpy()

    def _exact(self, what: str, where: Filter | None) -> list[DeviceLists]:
        """The parts to search, of the items that pass; those of the last filter are kept. Raises UsageError: Faiss' own search."""
        parts = [part for part in self.parts if isinstance(part, DeviceLists)]
        if not parts:
            raise UsageError(f"{what} needs exact scores: create the index with search='exact'")
        if where is None:
            return parts
        bits = np.packbits(mask_of(where, self._names))
        with self._lock:
            if self._filtered[0] != bits.tobytes():
                self._filtered = b"", []  # free its memory before allocating more
                mask = torch.from_numpy(np.unpackbits(bits, count=self.ntotal).view(np.bool_))
                self._filtered = bits.tobytes(), [part.restricted(mask.to(part.device)) for part in parts]
            return self._filtered[1]

    def _blocks(self, parts: Sequence[Part], queries: Tensor, k: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield rows and keys int64 [q, k or fewer] of blocks of queries; smaller blocks for large k limit memory."""
        split = self.mode == "replica"
        step = max(1, min(_BLOCK * (len(parts) if split else 1), self.memory // (_RESULT * k)))
        for start in range(0, len(queries), step):
            block = queries[start : start + step]
            blocks = [*block.tensor_split(len(parts))] if split else [block] * len(parts)
            found = self._on_all(lambda part, own: part.search_keys(own, k), parts, blocks)
            keys = torch.cat([one.to(self.device) for one in found], dim=0 if split else 1)
            if len(parts) > 1 and not split:
                keys = keys.sort(dim=1, descending=True).values[:, :k]
            yield slice(start, start + len(block)), keys

    def _on_all(
        self, run: Callable[[Any, Tensor], Any], parts: Sequence[Part], blocks: Sequence[Tensor]
    ) -> list[Any]:
        """``run`` each part with its block in parallel, one thread per device."""
        if len(parts) == 1:
            return [run(parts[0], blocks[0])]
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

        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(one, parts, blocks, streams))

    def _read(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores, positions = split_keys(keys)
        if self._ids is None:
            return scores, positions
        return scores, torch.where(positions >= 0, self._ids[positions.clamp_min(0)], -1)

"""Copy indexes to devices: through Faiss if possible, else by torch alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

from ..codes.checks import Codes, Floats, Ids
from ..codes.groups import Groups, worth_grouping
from ..errors import DataError, UsageError
from ..faissio.layout import layout_of
from ..indexes.memory import MemoryIndex
from .forms import (
    check_gpu,
    check_mode,
    clone_to_gpu,
    scan_bytes,
    unfit_for_faiss,
    zero_lists,
)
from .index import DeviceIndex, Part, Raw, Searcher, Shortlisted
from .memory import MEMORY, FaissBudget, Mode, check_memory
from .scan import DeviceGroups, Scan
from .tensors import device_of


def to_gpu(
    source: Any,
    *,
    device: int = 0,
    devices: Sequence[int] | None = None,
    mode: Mode = "shard",
    search: Literal["exact", "approximate"] = "exact",
    lists: int | None = None,
    group: bool | None = None,
    memory: int = MEMORY,
) -> DeviceIndex:
    """Copy an index to one or several GPUs, where Faiss shortlists and torch re-scores. (:func:`to_torch`: torch alone.)

    Args:
        source: a Faiss index in any form of :mod:`..faissio.storage`, or an :class:`..indexes.memory.MemoryIndex`. Codes of any
            packing are converted to the flat GPU form and searched *exactly*, also FastScan's. If equal codes are grouped, distinct
            codes are searched and expanded on the GPU.
        device: number of the GPU.
        devices: several GPUs; with ``mode`` ``shard`` each gets a part of the items, with ``replica`` all items and a part of the
            queries.
        search: ``exact``: bit-equal to the CPU. torch alone searches for k above 2,048, if Faiss does not support the codes, or needs
            more than ``memory`` for a query (:func:`scan_bytes`: about 8 bytes per item). ``approximate``: Faiss alone, with its own
            scores and order of ties, k up to 2,048, without filters and ranges, without a second copy of the codes, with as much
            memory as one query needs.
        lists: lists of the flat form (default: by the number of items).
        group: search distinct codes (default: as the source index does; a Faiss index does not).
        memory: bytes that Faiss and torch may each use on a device in a search, in addition to codes, ids and results.
            Batches are split to fit (:mod:`.memory`).

    Raises:
        DeviceError: no such GPU, or Faiss left an index on the CPU (there is no silent fall-back).
        DataError: the index is empty or invalid.
        UsageError: an option out of range; ``approximate`` for codes that Faiss does not support on a GPU.
    """
    check_mode(mode)
    if search not in ("exact", "approximate"):
        raise UsageError(f"search {search!r}: choose exact or approximate")
    numbers = [device] if devices is None else list(devices)
    if not numbers or len(set(numbers)) != len(numbers):
        raise UsageError(f"devices {numbers}: name at least one GPU, each once")
    for number in numbers:
        check_gpu(number)
    return spread(
        Source.of(source, group),
        [device_of(int(number)) for number in numbers],
        mode,
        lists,
        memory,
        lambda ivf, at: clone_to_gpu(ivf, int(at.index), memory, positions=True),
        approximate=search == "approximate",
    )


def to_torch(
    source: Any,
    *,
    device: str | int | Sequence[str | int],
    mode: Mode = "shard",
    group: bool | None = None,
    memory: int = MEMORY,
) -> DeviceIndex:
    """Copy an index to one or several devices for exact search by torch alone, for any K and code length.

    Args:
        device: ``cuda:0``, or ``cpu`` to run the GPU algorithm on the CPU.
        source, mode, group, memory: as :func:`to_gpu`.

    Raises:
        DeviceError, DataError, UsageError: see :func:`to_gpu`.
    """
    check_mode(mode)
    places = [device_of(one) for one in ([device] if isinstance(device, str | int) else device)]
    return spread(Source.of(source, group), places, mode, None, memory, None)


class Source:
    """Content for devices: codes in ascending order of id, and search options."""

    def __init__(
        self, codes: Codes, ids: Ids | None, Z: Floats, *, group: bool = False, groups: Groups | None = None
    ) -> None:
        self.codes, self.ids, self.Z, self.group = codes, ids, Z, group
        self._groups = groups
        self.description = ""

    @classmethod
    def of(cls, source: Any, group: bool | None) -> Source:
        if isinstance(source, MemoryIndex):
            groups = None if group is False else Groups.of(source.codes)
            if group is None and groups is not None and not worth_grouping(len(source.codes), len(groups)):
                groups = None
            held = cls(source.codes, source.ids, source.codebooks, group=groups is not None, groups=groups)
            held.description = source.describe()
            return held
        layout = layout_of(source, deep=True)
        if layout.ntotal == 0:
            raise DataError("the index is empty: add codes first (gpq index)")
        codes, ids = layout.ordered()
        # copies, so that the index can be freed
        own = None if ids is None else ids.copy()
        return cls(codes.copy(), own, layout.codebooks, group=bool(group))

    def part(self, rows: slice) -> Source:
        """Part of the items, with the same options."""
        if rows == slice(0, len(self.codes)):
            return self
        ids = None if self.ids is None else self.ids[rows]
        return Source(self.codes[rows], ids, self.Z, group=self.group)

    def groups(self) -> Groups:
        """Distinct codes and their items, computed once."""
        if self._groups is None:
            self._groups = Groups.of(self.codes)
        return self._groups

    def own_ids(self) -> Ids | None:
        """The ids; None if they are row numbers."""
        ids = self.ids
        if ids is None or (ids[0] == 0 and ids[-1] == len(ids) - 1):
            return None
        return ids


def spread(
    source: Source,
    places: list[torch.device],
    mode: Mode,
    lists: int | None,
    memory: int,
    clone: Callable[[Any, Any], tuple[Any, Any]] | None,
    *,
    approximate: bool = False,
) -> DeviceIndex:
    """Parts on devices; ``clone`` copies a Faiss index to a device; None: torch alone."""
    check_memory(memory)
    reason = None if clone is None else unfit_for_faiss(source.Z)
    if reason is not None and approximate:
        raise UsageError(f"{reason}; use torch alone (to_torch), or the CPU")
    clone = clone if reason is None else None
    n = len(source.codes)
    if mode == "shard" and len(places) > n:
        raise UsageError(f"{n} items cannot be split over {len(places)} devices: use fewer, or replicas")
    bounds = [i * n // len(places) for i in range(len(places) + 1)]
    parts = []
    for i, place in enumerate(places):
        rows = slice(bounds[i], bounds[i + 1]) if mode == "shard" else slice(0, n)
        parts.append(
            _part(source.part(rows), rows.start, place, lists, memory, clone, approximate=approximate)
        )
    return DeviceIndex(
        parts,
        source.Z,
        source.own_ids(),
        mode,
        memory,
        source=source.description,
    )


def _part(
    source: Source,
    first: int,
    place: torch.device,
    lists: int | None,
    memory: int,
    clone: Callable[[Any, Any], tuple[Any, Any]] | None,
    *,
    approximate: bool,
) -> Part:
    codes, groups = source.codes, None
    if source.group:
        grouped = source.groups()
        codes, groups = grouped.codes, DeviceGroups(grouped, place, memory)
    scan = None if approximate else Scan(codes, source.Z, place, memory)
    index, budget, resources = None, None, None
    fits = approximate or scan_bytes(len(codes), codes.shape[1], lists) <= memory
    if clone is not None and fits:
        form = zero_lists(codes, source.Z, lists=lists)
        budget = FaissBudget.of(form, memory)
        index, resources = clone(form, place)
    searcher: Searcher
    if scan is None:
        searcher = Raw(index, budget)
    elif index is None:
        searcher = scan
    else:
        searcher = Shortlisted(scan, index, budget)
    return Part(place, searcher, len(source.codes), first, groups, resources)

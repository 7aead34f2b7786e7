"""Indexes onto devices: through Faiss where it has a way, and by torch where it has none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.groups import Groups
from ..errors import DataError, UsageError
from ..faissio.layout import layout_of
from ..indexes.memory import MemoryIndex
from .forms import (
    MAX_LISTS,
    check_gpu,
    check_mode,
    clone_to_gpu,
    real_lists,
    scan_bytes,
    unfit_for_faiss,
    zero_lists,
)
from .index import DeviceIndex, Part, Raw, Searcher, Shortlisted
from .lists import DeviceLists, Lists
from .memory import MAX_K, MEMORY, FaissBudget, Mode, Via, check_memory
from .scan import DeviceGroups, Scan
from .tensors import device_of


def to_gpu(
    source: Any,
    *,
    device: int = 0,
    devices: Sequence[int] | None = None,
    mode: Mode = "shard",
    via: Via = "auto",
    lists: int | None = None,
    group: bool | None = None,
    memory: int = MEMORY,
) -> DeviceIndex:
    """Put an index onto one GPU, or several.

    Args:
        source: a Faiss index in any form of :mod:`..faissio.forms`, or an :class:`..index.memory.MemoryIndex`. Flat, fused, FastScan and
            every exact kind become the flat GPU form; ``fastscan`` is searched *exactly*, since a GPU has no use for
            its rounded tables. ``grouped`` engines search distinct codes and expand them there. ``ivf`` keeps its
            centroids, lists and ``nprobe``.
        device: number of the GPU.
        devices: several; ``mode`` then says whether each gets a part of the items (``shard``) or all of them and a part
            of the queries (``replica``).
        via: ``auto``: Faiss shortlists, torch decides, exact to the bit; k above 2,048 goes to torch alone, and so does
            everything where Faiss cannot take the codes or lists (at most 2,048 looked at), or needs more than ``memory``
            for a query (:func:`scan_bytes`: some 8 bytes an item). ``torch``: torch alone. ``faiss``: Faiss alone, with
            its own scores, lists and choice among ties, k up to 2,048, no filters and ranges, no second copy of the codes
            on the GPU, and as much memory as one query needs.
        lists: of the flat form (default: by the number of items).
        group: search distinct codes (default: as the engine does, or has gone over to; a Faiss index does not).
        memory: bytes that Faiss and torch may each use on a device while searching, beyond codes, ids, centroids and
            results. Faiss gets as many queries at once as fit (:mod:`.memory`).

    Raises:
        DeviceError: a GPU is not there, or Faiss left an index on the CPU (never a silent run there).
        DataError: the index is empty or not sound.
        UsageError: an option out of range; ``via="faiss"`` for codes or lists that Faiss cannot take on a GPU.
    """
    check_mode(mode)
    if via not in ("auto", "faiss", "torch"):
        raise UsageError(f"via {via!r}: choose auto, faiss or torch")
    numbers = [device] if devices is None else list(devices)
    if not numbers or len(set(numbers)) != len(numbers):
        raise UsageError(f"devices {numbers}: name one GPU or more, each once")
    for number in numbers:
        check_gpu(number)

    places = [device_of(int(number)) for number in numbers]
    held = Source.of(source, group)
    reason = unfit_for_faiss(held.Z)
    if via == "faiss" and reason is not None:
        raise UsageError(f"{reason}; use via='torch', or the CPU")
    via = "torch" if reason is not None else via
    return spread(
        held,
        places,
        mode,
        via,
        lists,
        memory,
        lambda ivf, at: clone_to_gpu(ivf, int(at.index), memory, positions=True),
    )


def to_torch(
    source: Any, *, device: str | int, group: bool | None = None, memory: int = MEMORY
) -> DeviceIndex:
    """Put an index onto a device for torch alone: exact, of any K and code length. The device is named by the caller:
    ``cuda:0``, or ``cpu`` to see the same mathematics without a GPU.

    Raises:
        DeviceError, DataError, UsageError: see :func:`to_gpu`.
    """

    place = device_of(device)
    return spread(Source.of(source, group), [place], "shard", "torch", None, memory, None)


def of_codes(codes: Any, Z: Floats, *, device: str | int, memory: int = MEMORY) -> DeviceIndex:
    """Packed codes, an array or a tensor that is on ``device`` already, for torch alone; an item's id is its position.

    Args:
        codes: uint8 [n, code_size]. Z: float32 [M, K, d].

    Raises:
        DeviceError: no such GPU.
        DataError, UsageError: unfit codes or codebooks; a tensor on another device.
    """

    scan = Scan(codes, Z, device_of(device), memory)
    return DeviceIndex([Part(scan.device, scan, len(scan))], scan.codebooks, None, "shard", memory)


class Source:
    """What goes to devices: codes in ascending order of id, and how they are to be searched."""

    def __init__(
        self, codes: Codes, ids: Ids | None, Z: Floats, *, group: bool = False, groups: Groups | None = None
    ) -> None:
        self.codes, self.ids, self.Z, self.group = codes, ids, Z, group
        self._groups = groups
        self.list_of: NDArray[np.int32] | None = None
        self.centroids: Floats | None = None
        self.nprobe = 0
        self.kind, self.description = "exact", ""

    @classmethod
    def of(cls, source: Any, group: bool | None) -> Source:
        if isinstance(source, MemoryIndex):
            if source.lists:
                held = cls.of(source.to_faiss(), group)
            else:
                groups = source.groups  # also those of an exact index that has gone over to them
                chosen = groups is not None if group is None else group
                held = cls(
                    source.codes,
                    source.ids,
                    source.codebooks,
                    group=chosen,
                    groups=groups if chosen else None,
                )
            held.kind, held.description = source.kind, source.describe()
            return held
        layout = layout_of(source, deep=True)
        if layout.ntotal == 0:
            raise DataError("the index is empty: add codes first (gpq index)")
        codes, ids, list_of = layout.ordered()
        # copies, so that the index may go
        own = None if ids is None else ids.copy()
        held = cls(codes.copy(), own, layout.codebooks, group=bool(group) and list_of is None)
        if list_of is not None:
            held.list_of, held.centroids = list_of, layout.centroids
            held.nprobe, held.kind = int(layout.flat.nprobe), "ivf"
        return held

    def part(self, rows: slice) -> Source:
        """Some of the items, searched alike."""
        if rows == slice(0, len(self.codes)):
            return self
        ids = None if self.ids is None else self.ids[rows]
        part = Source(self.codes[rows], ids, self.Z, group=self.group)
        part.list_of = None if self.list_of is None else self.list_of[rows]
        part.centroids, part.nprobe = self.centroids, self.nprobe
        return part

    def groups(self) -> Groups:
        """Distinct codes and their items, found once."""
        if self._groups is None:
            self._groups = Groups.of(self.codes)
        return self._groups

    def own_ids(self) -> Ids | None:
        """The ids, or None where an id is a position."""
        ids = self.ids
        if ids is None or (ids[0] == 0 and ids[-1] == len(ids) - 1):
            return None
        return ids


def spread(
    source: Source,
    places: list[Any],
    mode: Mode,
    via: Via,
    lists: int | None,
    memory: int,
    clone: Callable[[Any, Any], tuple[Any, Any]] | None,
) -> DeviceIndex:
    """Parts on devices; ``clone`` puts a form of this file onto one (not needed for torch alone)."""

    check_memory(memory)
    n = len(source.codes)
    if mode == "shard" and len(places) > n:
        raise UsageError(f"{n} items cannot be spread over {len(places)} devices: use fewer, or replicas")
    bounds = [i * n // len(places) for i in range(len(places) + 1)]
    parts = []
    for i, place in enumerate(places):
        rows = slice(bounds[i], bounds[i + 1]) if mode == "shard" else slice(0, n)
        parts.append(_part(source.part(rows), rows.start, place, via, lists, memory, clone))
    return DeviceIndex(
        parts,
        source.Z,
        source.own_ids(),
        mode,
        memory,
        kind=source.kind,
        source=source.description,
    )


def _part(
    source: Source,
    first: int,
    place: Any,
    via: Via,
    lists: int | None,
    memory: int,
    clone: Callable[[Any, Any], tuple[Any, Any]] | None,
) -> Part:

    codes, groups = source.codes, None
    if source.group:
        grouped = source.groups()
        codes, groups = grouped.codes, DeviceGroups(grouped, place, memory)
    scan = None if via == "faiss" else Scan(codes, source.Z, place, memory)
    table = None
    if scan is not None and source.list_of is not None and source.centroids is not None:
        table = DeviceLists(source.list_of, source.centroids, source.nprobe, place, memory)
    index, budget, resources = None, None, None
    form = None if clone is None else _faiss_form(source, codes, via, lists, memory, table)
    if form is not None and clone is not None:
        budget = FaissBudget.of(form, memory)
        index, resources = clone(form, place)
    searcher: Searcher
    if scan is None:
        searcher = Raw(index, budget)
    elif table is not None:
        searcher = Lists(scan, table, index, budget)
    else:
        searcher = scan if index is None else Shortlisted(scan, index, budget)
    return Part(place, searcher, len(source.codes), first, groups, resources)


def _faiss_form(
    source: Source, codes: Codes, via: Via, lists: int | None, memory: int, table: DeviceLists | None
) -> Any:
    """The index that Faiss takes onto a device; None where torch works alone."""
    if via == "torch":
        return None
    if source.list_of is None or source.centroids is None:
        # torch keeps to the memory, whatever the number of codes
        too_large = via == "auto" and scan_bytes(len(codes), codes.shape[1], lists) > memory
        return None if too_large else zero_lists(codes, source.Z, lists=lists)
    if table is None:
        return real_lists(codes, source.Z, source.list_of, source.centroids, source.nprobe)
    if source.nprobe > MAX_LISTS:
        return None
    form = real_lists(codes, source.Z, source.list_of, source.centroids, source.nprobe)
    fits = FaissBudget.of(form, memory).needed(min(MAX_K, len(codes))) <= memory
    return form if fits else None

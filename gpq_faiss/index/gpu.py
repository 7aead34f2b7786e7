"""Indexes on GPUs: through Faiss' GPU IVFPQ, and by torch where Faiss has no way.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` refuses an IndexPQ, or with several GPUs leaves it on the CPU
without a word. The equivalent is an IVFPQ whose coarse centroids are all zero, so that its residuals are the vectors
themselves. Its codes must be 8-bit (the byte-fused codebooks read the same bytes) and of certain lengths (padded with
codebooks of zero vectors). One list is scanned by one block of threads, so the items go round-robin into several lists
with the same zero centroid, all of them probed: the same result with more parallelism.

Lists of a real IVF meet a second gap: Faiss' GPU code takes by_residual = True only. Centroids scaled by 2^-40 give the
same (a power of two changes no order of lists, and such a residual lies below the rounding of any score).

Nothing here imports torch before an index goes to a device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, DeviceError, UsageError
from .checks import Codes, Floats, Ids
from .codebooks import fuse
from .engine import Engine
from .gpu_memory import MAX_K, FaissBudget, check_memory
from .items import Groups
from .ivf import empty_ivfpq, fill_list, rows_of_lists
from .layout import layout_of

if TYPE_CHECKING:
    from .gpu_lists import DeviceLists
    from .gpu_search import DeviceIndex, Part

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes a code that Faiss' GPU kernels take with float32 tables (48 KiB of shared memory)."""
MAX_LISTS = 2048
LISTS = 256
CENTROID_SCALE = 2.0**-40
"""Factor of real centroids: their part in a score is then below 1e-12 of the query's norm."""
MEMORY = 1 << 30
"""Bytes of scores and keys that a search holds at once, unless told otherwise."""
Via = Literal["auto", "faiss", "torch"]
Mode = Literal["shard", "replica"]
_LIST_ROWS = 1024  # a shorter list is not worth a block of threads


# Forms that a GPU takes ----------------------------------------------------------------------------------------------


def ivf_form(index: Any, *, lists: int | None = None) -> Any:
    """A flat index as an ``IndexIVFPQ`` on the CPU that gives the same scores and that a GPU can take.

    Args:
        index: ``IndexPQ`` with 4-bit, byte-fused or 8-bit codes, or FastScan, with or without an id map.
        lists: lists to spread the items over (default: by their number, up to 256).

    Returns:
        ``IndexIVFPQ``, inner product, 8-bit, residual to zero centroids, ``nprobe`` = all lists, holding the same ids.
        Its width is ``d`` of the padded codebooks; pad queries with zeros (:func:`.codebooks.pad_vectors`).

    Raises:
        DataError: the index is empty or not sound.
        UsageError: K is neither 16 nor 256, or the code is longer than 48 bytes; ``lists`` out of range.
    """
    layout = layout_of(index)
    if layout.ntotal == 0:
        raise DataError("the index is empty: add codes first (gpq index)")
    return zero_lists(layout.codes(), layout.codebooks, layout.ids(), lists=lists)


def unfit_for_faiss(Z: Floats) -> str | None:
    """Why Faiss' GPU code cannot take codes of these codebooks; None where it can."""
    M, K, _ = Z.shape
    if K not in (16, 256):
        return f"{K} codewords a codebook: Faiss on a GPU takes 16 (two share a byte) or 256"
    size = (M + 1) // 2 if K == 16 else M
    if size > CODE_SIZES[-1]:
        return f"codes of {size} bytes: Faiss on a GPU takes at most {CODE_SIZES[-1]}"
    return None


def zero_lists(codes: Codes, Z: Floats, ids: Ids | None = None, *, lists: int | None = None) -> Any:
    """The flat form of checked codes uint8 [n, code_size]; see :func:`ivf_form`. Without ``ids``: positions."""
    n = len(codes)
    lists = _lists_for(n, lists)
    D = int(Z.shape[0] * Z.shape[2])
    ivf, size = _empty_lists(np.zeros((lists, D), np.float32), Z)
    for number in range(lists):
        own = np.arange(number, n, lists, dtype=np.int64) if ids is None else ids[number::lists]
        _fill_list(ivf, number, codes[number::lists], own, size)
    ivf.ntotal = n
    ivf.nprobe = lists
    return ivf


def _lists_for(n: int, lists: int | None) -> int:
    if lists is None:
        lists = max(1, min(LISTS, n // _LIST_ROWS))
    if not 1 <= lists <= MAX_LISTS:
        raise UsageError(f"{lists} lists: from 1 to {MAX_LISTS}")
    return lists


def scan_bytes(n: int, size: int, lists: int | None = None) -> int:
    """What Faiss' GPU code takes at least to search :func:`zero_lists` of ``n`` codes of ``size`` bytes.

    It holds the score of every code, and tables for every list, twice for its two streams, of one query at a time if it
    must; where its temporary memory is smaller, it allocates more (``getIVFPQPerQueryTempMemory`` in its sources).
    """
    lists = _lists_for(n, lists)
    padded = next((s for s in CODE_SIZES if s >= size), size)
    return 2 * lists * (4 * -(-n // lists) + 4 * 256 * padded + 8)


def real_lists(codes: Codes, Z: Floats, list_of: NDArray[np.int32], centroids: Floats, nprobe: int) -> Any:
    """Codes in the lists of an IVF without residuals, in the form that a GPU takes; ids are positions.

    Args:
        codes: uint8 [n, code_size], checked. Z: float32 [M, K, d].
        list_of: int32 [n], the list of each code.
        centroids: float32 [lists, M*d]; held times :data:`CENTROID_SCALE`, see the head of this file.
        nprobe: lists looked at.

    Raises:
        UsageError: as :func:`ivf_form`; ``nprobe`` not in 1..2,048.
    """
    if not 1 <= nprobe <= MAX_LISTS:
        raise UsageError(f"nprobe = {nprobe}: a GPU looks at 1 to {MAX_LISTS} lists; use the CPU for more")
    ivf, size = _empty_lists(centroids * np.float32(CENTROID_SCALE), Z)
    for number, rows in rows_of_lists(list_of, len(centroids)):
        _fill_list(ivf, number, codes[rows], rows, size)
    ivf.ntotal = len(codes)
    ivf.nprobe = min(nprobe, len(centroids))
    return ivf


def _empty_lists(centroids: Floats, Z: Floats) -> tuple[Any, int]:
    """An ``IndexIVFPQ`` around ``centroids`` [lists, M*d], and the bytes of a code before padding."""
    reason = unfit_for_faiss(Z)
    if reason is not None:
        raise UsageError(f"{reason}; use via='torch', or the CPU")
    fused = fuse(Z) if Z.shape[1] == 16 else Z
    size, _, width = (int(n) for n in fused.shape)
    padded = next(s for s in CODE_SIZES if s >= size)
    books = np.zeros((padded, 256, width), np.float32)
    books[:size] = fused
    return empty_ivfpq(centroids, books, by_residual=True), size


def _fill_list(ivf: Any, number: int, codes: Codes, ids: Ids, size: int) -> None:
    padded = np.zeros((len(codes), int(ivf.code_size)), np.uint8)
    padded[:, :size] = codes
    fill_list(ivf, number, padded, ids)


# Onto devices --------------------------------------------------------------------------------------------------------


def check_gpu(device: int) -> None:
    """Make sure that Faiss can use GPU ``device``.

    Raises:
        DeviceError: this Faiss has no GPU code, or this machine no such GPU.
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise DeviceError(
            "a GPU was asked for, but this Faiss has none built in: install faiss-gpu, or use the CPU"
        )
    count = int(faiss.get_num_gpus())
    if not 0 <= device < count:
        have = f"only {count}" if count else "none"
        raise DeviceError(
            f"GPU {device} was asked for, but this machine has {have}: choose another, or use the CPU"
        )


def clone_to_gpu(ivf: Any, device: int, memory: int = MEMORY, *, positions: bool = False) -> tuple[Any, Any]:
    """A form of this file onto a GPU: the ``GpuIndexIVFPQ``, and the resources that must outlive it.

    Args:
        memory: bytes that Faiss may use for searching. It sets them aside, 1.5 GiB at most, and allocates what it lacks;
            where one query lacks some, less is set aside, so that both together stay within ``memory`` if they can.
        positions: ids are positions, and take 4 bytes each on the GPU where they fit.

    Raises:
        DeviceError: there is no such GPU, Faiss cannot use it (memory), or it left the index elsewhere.
    """
    check_gpu(device)
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(FaissBudget.of(ivf, memory).temporary(min(MAX_K, int(ivf.ntotal))))
    resources.setPinnedMemory(0)  # for copies from the host, of which there are none
    config = faiss.GpuIndexIVFPQConfig()
    config.device = device
    short = positions and int(ivf.ntotal) < 1 << 31
    config.indicesOptions = faiss.INDICES_32_BIT if short else faiss.INDICES_64_BIT  # type: ignore[attr-defined]  # stub lacks them
    config.useFloat16LookupTables = False
    config.usePrecomputedTables = False
    config.use_cuvs = False
    # Tables by matrix products. The kernel for them (``pqCodeDistances`` of 1.15) works on eight queries one after the other and,
    # for inner products, takes the next into shared memory while some of its threads may still read the last.
    config.useMMCodeDistance = True
    try:
        index: Any = faiss.GpuIndexIVFPQ(resources, ivf, config)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[-1]
        raise DeviceError(f"Faiss cannot put the index onto GPU {device}: {line}") from None
    check_on_gpu(index, device)
    index.nprobe = ivf.nprobe
    return index, resources


def check_on_gpu(index: Any, device: int) -> None:
    """Make sure that ``index`` lies on GPU ``device``: Faiss may leave one on the CPU without a word.

    Raises:
        DeviceError: it lies on the CPU or on another GPU.
    """
    if not isinstance(index, faiss.GpuIndex):
        raise DeviceError(
            f"Faiss left the index on the CPU instead of GPU {device}: search it there, or report this"
        )
    if int(index.getDevice()) != device:
        raise DeviceError(
            f"Faiss put the index onto GPU {index.getDevice()} instead of {device}: report this"
        )


def combined(indexes: Sequence[Any], mode: Mode) -> Any:
    """The parts of several devices as one plain Faiss index, for pipelines that want one: ``IndexShards`` or
    ``IndexReplicas``, each part searched in a thread. The parts must outlive it; queries are padded to its ``d``.

    Args:
        indexes: :attr:`.gpu_search.DeviceIndex.faiss_indexes`; ids are positions, of shards one after the other.

    Raises:
        UsageError: no parts, or an unknown mode.
    """
    if not indexes:
        raise UsageError("no Faiss indexes: torch works alone here (via='torch')")
    check_mode(mode)
    if mode == "shard":
        shards: Any = faiss.IndexShards(int(indexes[0].d), True, True)  # type: ignore[call-arg]  # stub lacks the last
        for index in indexes:
            shards.add_shard(index)
        return shards
    replicas: Any = faiss.IndexReplicas(int(indexes[0].d), True)
    for index in indexes:
        replicas.addIndex(index)
    return replicas


def check_mode(mode: str) -> None:
    """Raises UsageError: not ``shard`` or ``replica``."""
    if mode not in ("shard", "replica"):
        raise UsageError(f"mode {mode!r}: choose shard or replica")


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
        source: a Faiss index in any form of :mod:`.forms`, or an :class:`.engine.Engine`. Flat, fused, FastScan and
            every exact kind become the flat GPU form; ``fastscan`` is searched *exactly*, since a GPU has no use for
            its rounded tables. ``grouped`` engines search distinct codes and expand them there. ``ivf`` keeps its
            centroids, lists and ``nprobe``.
        device: number of the GPU.
        devices: several; ``mode`` then says whether each gets a part of the items (``shard``) or all of them and a part
            of the queries (``replica``).
        via: ``auto``: Faiss nominates, torch decides, exact to the bit; k above 2,048 goes to torch alone, and so does
            everything where Faiss cannot take the codes or lists (at most 2,048 looked at), or needs more than ``memory``
            for a query (:func:`scan_bytes`: some 8 bytes an item). ``torch``: torch alone. ``faiss``: Faiss alone, with
            its own scores, lists and choice among ties, k up to 2,048, no filters and ranges, no second copy of the codes
            on the GPU, and as much memory as one query needs.
        lists: of the flat form (default: by the number of items).
        group: search distinct codes (default: as the engine does, or has gone over to; a Faiss index does not).
        memory: bytes that Faiss and torch may each use on a device while searching, beyond codes, ids, centroids and
            results. Faiss gets as many queries at once as fit (:mod:`.gpu_memory`).

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
    from .gpu_arrays import device_of

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
    from .gpu_arrays import device_of

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
    from .gpu_arrays import device_of
    from .gpu_search import DeviceIndex, Part
    from .gpu_torch import Scan

    scan = Scan(codes, Z, device_of(device), memory)
    return DeviceIndex([Part(scan.device, scan, len(scan))], scan.M * scan.d, None, "shard", memory)


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

    @classmethod
    def of(cls, source: Any, group: bool | None) -> Source:
        if isinstance(source, Engine):
            if source.kind != "ivf":
                groups = source.groups  # also those of an exact engine that has gone over to them
                chosen = groups is not None if group is None else group
                return cls(
                    source.codes,
                    source.ids,
                    source.codebooks,
                    group=chosen,
                    groups=groups if chosen else None,
                )
            source = source.to_faiss()
        layout = layout_of(source, deep=True)
        if layout.ntotal == 0:
            raise DataError("the index is empty: add codes first (gpq index)")
        codes, ids, list_of = layout.ordered()
        # copies, so that the index may go
        own = None if ids is None else ids.copy()
        held = cls(codes.copy(), own, layout.codebooks, group=bool(group) and list_of is None)
        if list_of is not None:
            held.list_of, held.centroids = list_of, layout.centroids
            held.nprobe = int(layout.flat.nprobe)
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
    from .gpu_search import DeviceIndex

    check_memory(memory)
    n = len(source.codes)
    if mode == "shard" and len(places) > n:
        raise UsageError(f"{n} items cannot be spread over {len(places)} devices: use fewer, or replicas")
    bounds = [i * n // len(places) for i in range(len(places) + 1)]
    parts = []
    for i, place in enumerate(places):
        rows = slice(bounds[i], bounds[i + 1]) if mode == "shard" else slice(0, n)
        parts.append(_part(source.part(rows), rows.start, place, via, lists, memory, clone))
    M, _, d = source.Z.shape
    return DeviceIndex(parts, int(M * d), source.own_ids(), mode, memory)


def _part(
    source: Source,
    first: int,
    place: Any,
    via: Via,
    lists: int | None,
    memory: int,
    clone: Callable[[Any, Any], tuple[Any, Any]] | None,
) -> Part:
    from .gpu_lists import DeviceLists, Lists
    from .gpu_search import Nominated, Part, Raw, Searcher
    from .gpu_torch import DeviceGroups, Scan

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
        searcher = scan if index is None else Nominated(scan, index, budget)
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


__all__ = [
    "CENTROID_SCALE",
    "CODE_SIZES",
    "check_gpu",
    "check_on_gpu",
    "clone_to_gpu",
    "combined",
    "ivf_form",
    "of_codes",
    "real_lists",
    "scan_bytes",
    "to_gpu",
    "to_torch",
    "zero_lists",
]

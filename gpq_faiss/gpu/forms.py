"""Indexes on GPUs: through Faiss' GPU IVFPQ, and by torch where Faiss has none.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` refuses an IndexPQ, or with several GPUs leaves it on the CPU
silently. The equivalent is an IVFPQ whose coarse centroids are all zero, so that its residuals are the vectors
themselves. Its codes must be 8-bit (the byte-fused codebooks read the same bytes) and of certain lengths (padded with
codebooks of zero vectors). One list is scanned by one block of threads, so the items go round-robin into several lists
with the same zero centroid, all of them probed: the same result with more parallelism.

Lists of a real IVF meet a second gap: Faiss' GPU code takes by_residual = True only. Centroids scaled by 2^-40 give the
same (a power of two changes no order of lists, and such a residual lies below the rounding of any score).

Nothing here imports torch before an index goes to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse
from ..errors import DataError, DeviceError, UsageError
from ..faissio.layout import layout_of
from ..faissio.storage import empty_ivfpq, fill_list, rows_of_lists
from .memory import MAX_K, MEMORY, FaissBudget, Mode

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes per code that Faiss' GPU kernels take with float32 tables (48 KiB of shared memory)."""
MAX_LISTS = 2048
LISTS = 256
CENTROID_SCALE = 2.0**-40
"""Factor of real centroids: their part in a score is then below 1e-12 of the query's norm."""
_LIST_ROWS = 1024  # a shorter list is not worth a block of threads


# Forms that a GPU takes ----------------------------------------------------------------------------------------------


def ivf_form(index: Any, *, lists: int | None = None) -> Any:
    """A flat index as an ``IndexIVFPQ`` on the CPU that gives the same scores and that a GPU can take.

    Args:
        index: ``IndexPQ`` with 4-bit, byte-fused or 8-bit codes, or FastScan, with or without an id map.
        lists: lists to spread the items over (default: by their number, up to 256).

    Returns:
        ``IndexIVFPQ``, inner product, 8-bit, residual to zero centroids, ``nprobe`` = all lists, holding the same ids.
        Its width is ``d`` of the padded codebooks; pad queries with zeros (:func:`..codes.codebooks.pad_vectors`).

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
        return f"{K} codewords per codebook: Faiss on a GPU takes 16 (two share a byte) or 256"
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
        nprobe: lists probed.

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
        raise UsageError(f"{reason}; use torch alone (to_torch), or the CPU")
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
            "a GPU was requested, but this Faiss has none built in: install faiss-gpu, or use the CPU"
        )
    count = int(faiss.get_num_gpus())
    if not 0 <= device < count:
        have = f"only {count}" if count else "none"
        raise DeviceError(
            f"GPU {device} was requested, but this machine has {have}: choose another, or use the CPU"
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
    """Make sure that ``index`` lies on GPU ``device``: Faiss may leave one on the CPU silently.

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
        indexes: :attr:`.index.DeviceIndex.faiss_indexes`; ids are positions, of shards one after the other.

    Raises:
        UsageError: no parts, or an unknown mode.
    """
    if not indexes:
        raise UsageError("no Faiss indexes: torch works alone here")
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

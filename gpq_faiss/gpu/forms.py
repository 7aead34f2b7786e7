"""Index forms for GPUs: Faiss' GPU IVFPQ.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` rejects an IndexPQ, or with several GPUs silently leaves it on the CPU. The
equivalent is an IVFPQ with zero coarse centroids, so that residuals are the vectors themselves. Its codes must be 8-bit (byte-fused
codebooks read the same bytes) and of certain lengths (padded with zero codebooks). One thread block scans one list, so items are
distributed round-robin over several lists with zero centroids, all of them probed: the same result with more parallelism.

torch is imported only when an index is copied to a device.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse
from ..errors import DeviceError, UsageError
from .memory import MAX_K, MEMORY, FaissBudget

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes per code supported by Faiss' GPU kernels with float32 tables (48 KiB of shared memory)."""
MAX_LISTS = 2048
LISTS = 256
_LIST_ROWS = 1024  # minimum length of a list per thread block


# Forms for GPUs ----------------------------------------------------------------------------------------------


def unfit_for_faiss(Z: Floats) -> str | None:
    """Why Faiss' GPU code does not support these codebooks; None if it does."""
    M, K, _ = Z.shape
    if K not in (16, 256):
        return f"{K} codewords per codebook: Faiss on a GPU supports 16 (two share a byte) or 256"
    size = (M + 1) // 2 if K == 16 else M
    if size > CODE_SIZES[-1]:
        return f"codes of {size} bytes: Faiss on a GPU supports at most {CODE_SIZES[-1]}"
    return None


def zero_lists(codes: Codes, Z: Floats, *, lists: int | None = None) -> Any:
    """Checked codes uint8 [n, code_size] as an ``IndexIVFPQ`` on the CPU with the same scores, which can be copied to a GPU.

    Args:
        lists: number of lists, all probed (default: by the number of items, up to 256).

    Returns:
        Inner product, 8-bit codes, residual to zero centroids; ids are row numbers. Its width is ``d`` of the padded
        codebooks; zero-pad queries (:func:`..codes.codebooks.pad_vectors`).

    Raises:
        UsageError: K is neither 16 nor 256, or the code is longer than 48 bytes; ``lists`` out of range.
    """
    n = len(codes)
    lists = _lists_for(n, lists)
    ivf, size = _empty_lists(lists, Z)
    for number in range(lists):
        _fill_list(ivf, number, codes[number::lists], np.arange(number, n, lists), size)
    ivf.ntotal = n
    ivf.nprobe = lists
    return ivf


def _lists_for(n: int, lists: int | None) -> int:
    if lists is None:
        lists = max(1, min(LISTS, n // _LIST_ROWS))
    if not 1 <= lists <= MAX_LISTS:
        raise UsageError(f"{lists} lists: it must be 1 to {MAX_LISTS}")
    return lists


def scan_bytes(n: int, size: int, lists: int | None = None) -> int:
    """Minimum bytes that Faiss' GPU code needs to search :func:`zero_lists` of ``n`` codes of ``size`` bytes.

    It stores scores of all codes and tables of all lists, twice for its two streams, for at least one query; if its temporary memory
    is smaller, it allocates more (``getIVFPQPerQueryTempMemory`` in its sources).
    """
    lists = _lists_for(n, lists)
    padded = next((s for s in CODE_SIZES if s >= size), size)
    return 2 * lists * (4 * -(-n // lists) + 4 * 256 * padded + 8)


def _empty_lists(lists: int, Z: Floats) -> tuple[Any, int]:
    """An empty, trained ``IndexIVFPQ`` with zero centroids, and the bytes of a code before padding."""
    reason = unfit_for_faiss(Z)
    if reason is not None:
        raise UsageError(f"{reason}; use torch alone (to_torch), or the CPU")
    fused = fuse(Z) if Z.shape[1] == 16 else Z
    size, _, width = (int(n) for n in fused.shape)
    padded = next(s for s in CODE_SIZES if s >= size)
    books = np.zeros((padded, 256, width), np.float32)
    books[:size] = fused
    D = padded * width
    quantizer: Any = faiss.IndexFlatIP(D)
    quantizer.add(np.zeros((lists, D), np.float32))
    ivf: Any = faiss.IndexIVFPQ(quantizer, D, lists, padded, 8, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()
    ivf.own_fields = True
    ivf.by_residual = True
    faiss.copy_array_to_vector(books.ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    return ivf, size


def _fill_list(ivf: Any, number: int, codes: Codes, ids: Ids, size: int) -> None:
    padded = np.zeros((len(codes), int(ivf.code_size)), np.uint8)
    padded[:, :size] = codes
    own = np.ascontiguousarray(ids, dtype=np.int64)  # named, as pointers do not keep arrays alive
    if len(codes):
        ivf.invlists.add_entries(number, len(codes), faiss.swig_ptr(own), faiss.swig_ptr(padded))


# Onto devices --------------------------------------------------------------------------------------------------------


def check_gpu(device: int) -> None:
    """Check that Faiss can use GPU ``device``.

    Raises:
        DeviceError: Faiss without GPU support, or no such GPU.
    """
    if not hasattr(faiss, "StandardGpuResources"):
        raise DeviceError(
            "a GPU was requested, but this Faiss has no GPU support: install faiss-gpu, or use the CPU"
        )
    count = int(faiss.get_num_gpus())
    if not 0 <= device < count:
        have = f"only {count}" if count else "none"
        raise DeviceError(
            f"GPU {device} was requested, but this machine has {have}: choose another, or use the CPU"
        )


def clone_to_gpu(ivf: Any, device: int, memory: int = MEMORY, *, positions: bool = False) -> tuple[Any, Any]:
    """Copy a form of this module to a GPU: the ``GpuIndexIVFPQ``, and the resources that must outlive it.

    Args:
        memory: bytes that Faiss may use for searching. It reserves at most 1.5 GiB and allocates more if needed; if one query needs
            more, less is reserved, so that the total stays within ``memory`` if possible.
        positions: ids are row numbers, with 4 bytes each on the GPU if they fit.

    Raises:
        DeviceError: no such GPU, too little memory, or Faiss left the index elsewhere.
    """
    check_gpu(device)
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(FaissBudget.of(ivf, memory).temporary(min(MAX_K, int(ivf.ntotal))))
    resources.setPinnedMemory(0)  # for copies from the host: not needed
    config = faiss.GpuIndexIVFPQConfig()
    config.device = device
    short = positions and int(ivf.ntotal) < 1 << 31
    config.indicesOptions = faiss.INDICES_32_BIT if short else faiss.INDICES_64_BIT  # type: ignore[attr-defined]  # stub lacks them
    config.useFloat16LookupTables = False
    config.usePrecomputedTables = False
    config.use_cuvs = False
    # Tables by matrix products: the alternative kernel (``pqCodeDistances`` of 1.15) has a race for inner products: it loads the next
    # query into shared memory while threads may still read the last.
    config.useMMCodeDistance = True
    try:
        index: Any = faiss.GpuIndexIVFPQ(resources, ivf, config)
    except RuntimeError as error:
        line = str(error).strip().splitlines()[-1]
        raise DeviceError(f"Faiss cannot copy the index to GPU {device}: {line}") from None
    check_on_gpu(index, device)
    index.nprobe = ivf.nprobe
    return index, resources


def check_on_gpu(index: Any, device: int) -> None:
    """Check that ``index`` is on GPU ``device``: Faiss may silently leave it on the CPU.

    Raises:
        DeviceError: it is on the CPU or on another GPU.
    """
    if not isinstance(index, faiss.GpuIndex):
        raise DeviceError(
            f"Faiss left the index on the CPU instead of GPU {device}: search it there, or report this"
        )
    if int(index.getDevice()) != device:
        raise DeviceError(f"Faiss put the index on GPU {index.getDevice()} instead of {device}: report this")


def check_mode(mode: str) -> None:
    """Raises UsageError: not ``shard`` or ``replica``."""
    if mode not in ("shard", "replica"):
        raise UsageError(f"mode {mode!r}: choose shard or replica")

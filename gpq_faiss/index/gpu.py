"""The flat index on a GPU, through Faiss' GPU IVFPQ.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` refuses an IndexPQ, or with several GPUs leaves it on the CPU
without a word. The equivalent is an IVFPQ whose coarse centroids are all zero, so that its residuals are the vectors
themselves. Its codes must be 8-bit (the byte-fused codebooks read the same bytes) and of certain lengths (padded with
codebooks of zero vectors). One list is scanned by one block of threads, so the items go round-robin into several lists
with the same zero centroid, all of them probed: the same result with more parallelism.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, DeviceError, UsageError
from .checks import Floats, Ids, check_vectors
from .codebooks import fuse, pad_vectors
from .layout import layout_of
from .search import check_k

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes a code that Faiss' GPU kernels take with float32 tables (48 KiB of shared memory)."""
MAX_K = 2048
LISTS = 256
_LIST_ROWS = 1024  # a shorter list is not worth a block of threads


def ivf_form(index: Any, *, lists: int | None = None) -> Any:
    """A flat index as an ``IndexIVFPQ`` on the CPU that gives the same scores and that a GPU can take.

    Args:
        index: ``IndexPQ`` with 4-bit, byte-fused or 8-bit codes, with or without an id map.
        lists: lists to spread the items over (default: by their number, up to 256).

    Returns:
        ``IndexIVFPQ``, inner product, 8-bit, residual to zero centroids, ``nprobe`` = all lists, holding the same ids.
        Its width is ``d`` of the padded codebooks; pad queries with zeros (:func:`.codebooks.pad_vectors`).

    Raises:
        DataError: the index is empty or not sound.
        UsageError: K is neither 16 nor 256, or the code is longer than 48 bytes.
    """
    layout = layout_of(index)
    if layout.ntotal == 0:
        raise DataError("the index is empty: add codes first (gpq index)")
    K = layout.codebooks.shape[1]
    if K not in (16, 256):
        raise UsageError(f"{K} codewords a codebook: a GPU takes 16 (two share a byte) or 256; use the CPU")
    fused = fuse(layout.codebooks) if K == 16 else layout.codebooks
    bytes_, _, width = fused.shape
    padded = next((size for size in CODE_SIZES if size >= bytes_), None)
    if padded is None:
        raise UsageError(f"codes of {bytes_} bytes: a GPU takes at most {CODE_SIZES[-1]}; use the CPU")
    n = layout.ntotal
    if lists is None:
        lists = max(1, min(LISTS, n // _LIST_ROWS))
    if not 1 <= lists <= MAX_K:
        raise UsageError(f"{lists} lists: from 1 to {MAX_K}")
    centroids = np.zeros((padded, 256, width), np.float32)
    centroids[:bytes_] = fused
    D = padded * width
    quantizer: Any = faiss.IndexFlatIP(D)
    quantizer.add(np.zeros((lists, D), np.float32))
    ivf: Any = faiss.IndexIVFPQ(quantizer, D, lists, padded, 8, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()
    ivf.own_fields = True
    ivf.by_residual = True
    faiss.copy_array_to_vector(centroids.ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    ivf.nprobe = lists
    codes, ids = layout.codes(), layout.ids()
    for number in range(lists):
        rows = np.zeros((len(range(number, n, lists)), padded), np.uint8)
        rows[:, :bytes_] = codes[number::lists]
        own_ids = np.ascontiguousarray(
            ids[number::lists]
        )  # a name of its own: the pointer keeps nothing alive
        ivf.invlists.add_entries(number, len(rows), faiss.swig_ptr(own_ids), faiss.swig_ptr(rows))
    ivf.ntotal = n
    return ivf


class GpuFlat:
    """A flat index on one GPU. Made by :func:`to_gpu`.

    Attributes:
        ntotal: items.
        width: D of the queries.
        device: number of the GPU.
        index: the ``GpuIndexIVFPQ``.
    """

    def __init__(self, ivf: Any, width: int, device: int) -> None:
        self._resources = faiss.StandardGpuResources()
        options = faiss.GpuClonerOptions()
        options.indicesOptions = faiss.INDICES_64_BIT  # type: ignore[attr-defined]  # stub lacks it
        options.useFloat16 = False
        options.usePrecomputed = False
        options.use_cuvs = False
        self.index: Any = faiss.index_cpu_to_gpu(self._resources, device, ivf, options)
        if not isinstance(self.index, faiss.GpuIndex):
            raise DeviceError(
                f"Faiss left the index on the CPU instead of GPU {device}: search it there, or report this"
            )
        self.index.nprobe = ivf.nprobe  # type: ignore[attr-defined]  # stub lacks it
        self.ntotal = int(ivf.ntotal)
        self.width = width
        self.device = device

    def search(self, xq: ArrayLike, k: int) -> tuple[Floats, Ids]:
        """The ``k`` best items (at most 2,048) of queries [Q, M*d]: D float32 [Q, k], I int64 [Q, k].

        Scores equal the CPU's up to float32 rounding; equal scores are ordered by id among those returned, but which
        of several items tied at the k-th place are returned is the GPU's choice.

        Raises:
            UsageError: ``k`` out of range.
            DataError: queries empty, of another width, NaN or infinite.
        """
        k = check_k(k, self.ntotal)
        if k > MAX_K:
            raise UsageError(f"k = {k}: a GPU gives at most {MAX_K}; search the CPU index for more")
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        D, ids = self.index.search(pad_vectors(queries, self.index.d), k)
        order = np.lexsort((ids, -D), axis=1)
        return np.take_along_axis(D, order, axis=1), np.take_along_axis(ids, order, axis=1)


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


def to_gpu(index: Any, *, device: int = 0, lists: int | None = None) -> GpuFlat:
    """Put a flat index onto a GPU.

    Raises:
        DeviceError: there is no such GPU (never a silent run on the CPU).
        DataError, UsageError: see :func:`ivf_form`.
    """
    check_gpu(device)
    layout = layout_of(index)
    M, _, d = layout.codebooks.shape
    return GpuFlat(ivf_form(index, lists=lists), M * d, device)

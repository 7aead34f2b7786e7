"""Faiss' own search on a GPU: the codes as an IVFPQ with zero centroids.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` rejects an IndexPQ, or with several GPUs
silently leaves it on the CPU. The equivalent is an IVFPQ with zero coarse centroids, so that
residuals are the vectors themselves. Its codes must be 8-bit (byte-fused codebooks read the same
bytes) and of certain lengths (padded with zero codebooks). One thread block scans one list, so
items are distributed round-robin over several lists with zero centroids, all of them probed: the
same result with more parallelism.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np

from ..codes.checks import Codes, Floats, Ids
from ..codes.codebooks import fuse
from ..errors import DeviceError, UsageError
from ..indexes.index import Index
from ..indexes.opening import open_index

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes per code supported by Faiss' GPU kernels with float32 tables (48 KiB of shared memory)."""
LISTS = 256
"""Maximum number of lists."""
_LIST_ROWS = 1024  # minimum average length of a list, if there are several


def zero_lists(codes: Codes, Z: Floats, ids: Ids) -> Any:
    """Return codes as an ``IndexIVFPQ`` on the CPU with the same scores, ready to copy to a GPU.

    Its width is that of the padded codebooks: zero-pad queries
    (:func:`..codes.codebooks.pad_vectors`).

    Args:
        codes: checked codes, uint8 [n, code_size].
        Z: codebooks, float32 [M, K, d].
        ids: int64 [n].

    Raises:
        UsageError: K is neither 16 nor 256, or the code is longer than 48 bytes.
    """
    n, K = len(codes), Z.shape[1]
    if K not in (16, 256):
        raise UsageError(
            f"{K} codewords per codebook: Faiss on a GPU supports 16 (two share a byte) "
            "or 256; use to_gpu, or the CPU"
        )
    fused = fuse(Z) if K == 16 else Z
    size, _, width = (int(length) for length in fused.shape)
    if size > CODE_SIZES[-1]:
        raise UsageError(
            f"codes of {size} bytes: Faiss on a GPU supports at most {CODE_SIZES[-1]}; use "
            "to_gpu, or the CPU"
        )
    lists = max(1, min(LISTS, n // _LIST_ROWS))
    padded = min(supported for supported in CODE_SIZES if supported >= size)
    books = np.zeros((padded, 256, width), np.float32)
    books[:size] = fused
    ivf: Any = faiss.index_factory(
        padded * width, f"IVF{lists},PQ{padded}x8", faiss.METRIC_INNER_PRODUCT
    )
    ivf.quantizer.add(np.zeros((lists, padded * width), np.float32))
    faiss.copy_array_to_vector(books.ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    # Faiss expects the number of its list before each code, in one byte, or none if there is one.
    prefix = ivf.coarse_code_size()
    entries = np.zeros((n, prefix + padded), np.uint8)
    entries[:, :prefix] = (np.arange(n) % lists)[:, None]
    entries[:, prefix : prefix + size] = codes
    ivf.add_sa_codes(entries, ids)
    ivf.nprobe = lists
    return ivf


def to_faiss_gpu(source: Any, device: int = 0) -> Any:
    """Copy an index to a GPU as Faiss' ``GpuIndexIVFPQ``, with its ids.

    The source is as for :func:`.index.to_gpu`. Scores are those of Faiss, which returns any of the
    items tied at rank k, and k is at most 2,048. See :func:`zero_lists` for the width.

    Raises:
        DeviceError: no such GPU, or too little memory (there is no silent fall-back).
        DataError: the index is empty or invalid.
        UsageError: the metric is L2, or see :func:`zero_lists`.
    """
    count = int(faiss.get_num_gpus()) if hasattr(faiss, "StandardGpuResources") else 0
    if not 0 <= device < count:
        raise DeviceError(
            f"GPU {device} was requested, but Faiss sees {count} (faiss-gpu is needed): use the CPU"
        )
    index = source if isinstance(source, Index) else open_index(source)
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise UsageError("an index of the metric L2 is searched on the CPU: use open_index")
    codes, ids = index.items_by_id()
    ivf = zero_lists(codes, index.codebooks, ids)
    resources = faiss.StandardGpuResources()
    config: Any = faiss.GpuIndexIVFPQConfig()
    config.device = device
    config.indicesOptions = faiss.INDICES_64_BIT  # type: ignore[attr-defined]  # stub lacks it
    config.useFloat16LookupTables = False
    config.usePrecomputedTables = False
    config.use_cuvs = False
    # Compute look-up tables by matrix products. The other kernel (``pqCodeDistances`` of 1.15) has
    # a race for inner products: it loads the next query into shared memory while threads may still
    # read the last one.
    config.useMMCodeDistance = True
    try:
        gpu_index: Any = faiss.GpuIndexIVFPQ(resources, ivf, config)  # keeps the resources alive
    except RuntimeError as error:
        # The last line of Faiss' message says why; those before it name files and conditions.
        reason = (str(error).strip().splitlines() or ["no reason given"])[-1]
        raise DeviceError(f"Faiss cannot copy the index to GPU {device}: {reason}") from None
    gpu_index.nprobe = ivf.nprobe
    return gpu_index

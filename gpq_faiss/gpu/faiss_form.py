"""Faiss' own search on a GPU: the codes as an IVFPQ with zero centroids.

Faiss has no flat PQ on the GPU: ``index_cpu_to_gpu`` rejects an IndexPQ, or with several GPUs silently leaves it on the CPU. The
equivalent is an IVFPQ with zero coarse centroids, so that residuals are the vectors themselves. Its codes must be 8-bit (byte-fused
codebooks read the same bytes) and of certain lengths (padded with zero codebooks). One thread block scans one list, so items are
distributed round-robin over several lists with zero centroids, all of them probed: the same result with more parallelism.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
import torch
from torch import Tensor

from ..codes.checks import Codes, Floats
from ..codes.codebooks import fuse
from ..errors import DeviceError, UsageError
from .lists import MEMORY, check_bytes
from .tensors import EMPTY_KEY, keys_of

CODE_SIZES = (1, 2, 3, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Bytes per code supported by Faiss' GPU kernels with float32 tables (48 KiB of shared memory)."""
MAX_K = 2048
"""Maximum results, and probed lists, of Faiss' GPU kernels."""
LISTS = 256
PIECE = 3 << 29
"""Maximum bytes that Faiss reserves as temporary memory, whatever is set."""
_LIST_ROWS = 1024  # minimum length of a list per thread block
_CHUNKS = 8  # parts of a query's lists, with k results selected from each
_FIXED = 2 * 16_384 + 32 * 256  # scratch of prefix sums; allocations are rounded up to 256 bytes
_TINY = 2.0**-126
_EXPONENT = 0x7F80_0000  # of float32


def zero_lists(codes: Codes, Z: Floats, *, lists: int | None = None, first: int = 0) -> Any:
    """Checked codes uint8 [n, code_size] as an ``IndexIVFPQ`` on the CPU with the same scores, which can be copied to a GPU.

    Args:
        lists: number of lists, all probed (default: by the number of items, up to 256).
        first: id of the first code; the others follow.

    Returns:
        Inner product, 8-bit codes, residual to zero centroids. Its width is ``d`` of the padded codebooks; zero-pad queries
        (:func:`..codes.codebooks.pad_vectors`).

    Raises:
        UsageError: K is neither 16 nor 256, or the code is longer than 48 bytes; ``lists`` out of range.
    """
    n, K = len(codes), Z.shape[1]
    if K not in (16, 256):
        raise UsageError(
            f"{K} codewords per codebook: Faiss on a GPU supports 16 (two share a byte) or 256; use search='exact', or the CPU"
        )
    fused = fuse(Z) if K == 16 else Z
    size, _, width = (int(n) for n in fused.shape)
    if size > CODE_SIZES[-1]:
        raise UsageError(
            f"codes of {size} bytes: Faiss on a GPU supports at most {CODE_SIZES[-1]}; use search='exact', or the CPU"
        )
    if lists is None:
        lists = max(1, min(LISTS, n // _LIST_ROWS))
    if not 1 <= lists <= MAX_K:
        raise UsageError(f"{lists} lists: it must be 1 to {MAX_K}")
    padded = next(s for s in CODE_SIZES if s >= size)
    books = np.zeros((padded, 256, width), np.float32)
    books[:size] = fused
    quantizer: Any = faiss.IndexFlatIP(padded * width)
    quantizer.add(np.zeros((lists, padded * width), np.float32))
    ivf: Any = faiss.IndexIVFPQ(quantizer, padded * width, lists, padded, 8, faiss.METRIC_INNER_PRODUCT)
    quantizer.this.disown()
    ivf.own_fields = True
    ivf.by_residual = True
    faiss.copy_array_to_vector(books.ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    for number in range(lists):
        part = codes[number::lists]
        own, ids = np.zeros((len(part), padded), np.uint8), np.arange(first + number, first + n, lists)
        own[:, :size] = part
        if len(part):
            ivf.invlists.add_entries(number, len(part), faiss.swig_ptr(ids), faiss.swig_ptr(own))
    ivf.ntotal = n
    ivf.nprobe = lists
    return ivf


@dataclass(frozen=True)
class FaissBudget:
    """Working memory of Faiss' GPU search of :func:`zero_lists`.

    According to the sources of Faiss 1.15 (``gpu/impl/IVFUtils.cu``, ``PQScanMultiPassNoPrecomputed-inl.cuh``, ``IVFPQ.cu``,
    ``PQCodeDistances-inl.cuh``): a search stores scores of all codes of the lists and tables for every list, twice for its two streams,
    and the products that the tables are made of. It reserves one block of memory and allocates more if that is too small; if the block
    has room for fewer than eight queries of a larger batch, it allocates up to 512 MiB instead. So batches are split into calls that
    fit, and the block is smaller if a single query needs more. Codes, ids, codebooks and results are not part of the budget.

    Attributes:
        memory: bytes allowed.
        lists: of the index.
        longest: length of the longest list, assumed for all.
        size: bytes of a code, padded for Faiss.
        width: dimensions of a query, padded for Faiss.
    """

    memory: int
    lists: int
    longest: int
    size: int
    width: int

    @classmethod
    def of(cls, ivf: Any, memory: int) -> FaissBudget:
        """Budget of an ``IndexIVFPQ`` that will be copied from the CPU to a GPU."""
        longest = max(int(ivf.invlists.list_size(number)) for number in range(ivf.nlist))
        return cls(memory, int(ivf.nlist), longest, int(ivf.code_size), int(ivf.d))

    def scan_bytes(self, k: int) -> int:
        """Faiss' estimate of the bytes per query for scanning lists: offsets, scores, tables, selected results."""
        per_list = 8 + 4 * self.longest + 4 * 256 * self.size
        return 2 * (8 + self.lists * per_list + 12 * min(self.lists, _CHUNKS) * k)

    def needed(self, k: int, queries: int = 1) -> int:
        """Maximum bytes of a call with ``k`` results per query: also selected lists, and products for tables."""
        others = self.lists * (12 + 4 * (self.width + 256 * self.size))
        return _FIXED + queries * (self.scan_bytes(k) + others)

    def rows(self, k: int) -> int:
        """Queries per call within the memory; at least 1."""
        return max(1, (min(self.memory, PIECE) - _FIXED) // (self.needed(k) - _FIXED))

    def temporary(self, k: int) -> int:
        """Bytes that Faiss should reserve, so that with the additional needs of one query the memory is not exceeded."""
        piece, least = min(self.memory, PIECE), self.needed(k)
        return min(piece, self.memory - least) if piece < least <= self.memory else piece


class FaissLists:
    """Codes on a device in Faiss' form: its own scores, any of the items tied at rank k, at most 2,048 results.

    Args:
        codes, Z, lists, first: as :func:`zero_lists`.
        device: a GPU; the CPU keeps the form as it is.
        memory: bytes of working memory (:class:`FaissBudget`); more if one query needs more.

    Attributes:
        index: the Faiss index; ids are row numbers.
    """

    def __init__(
        self,
        codes: Codes,
        Z: Floats,
        device: torch.device,
        memory: int = MEMORY,
        first: int = 0,
        *,
        lists: int | None = None,
    ) -> None:
        check_bytes(memory)
        form = zero_lists(codes, Z, lists=lists, first=first)
        self.device = device
        self.budget = FaissBudget.of(form, memory)
        self._lock = threading.Lock()  # Faiss' GPU resources serve one search at a time
        self.index: Any = form
        if device.type != "cpu":
            self.index, self._resources = clone_to_gpu(form, int(device.index), self.budget)

    def __len__(self) -> int:
        return int(self.index.ntotal)

    def search_keys(self, queries: Tensor, k: int) -> Tensor:
        """As :meth:`.lists.DeviceLists.search_keys`. Raises UsageError: more than 2,048 results."""
        k = min(k, len(self))
        if k > MAX_K:
            raise UsageError(f"k = {k}: Faiss returns at most {MAX_K} on a GPU; search='exact' has no limit")
        keys = []
        with self._lock:
            rows = self.budget.rows(k)
            for start in range(0, len(queries), rows):
                scores, found = faiss_search(self.index, queries[start : start + rows], k)
                keys.append(torch.where(found >= 0, keys_of(scores, found), EMPTY_KEY))
        return torch.cat(keys).sort(dim=1, descending=True).values


def faiss_search(index: Any, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Search a Faiss index with a tensor, float32 [q, D]: results are on the same device, without host copies.

    Like ``faiss.contrib.torch_utils``, which is not imported as it replaces methods of all Faiss classes in the process, after which
    ``search(..., params=...)`` with arrays fails. On a GPU the work is queued on torch's current stream.

    Args:
        index: on the GPU of ``queries``, or on the CPU for queries there.

    Raises:
        DeviceError: Faiss failed on the GPU, usually out of memory.
    """
    # Scaling by a power of two is exact, and avoids underflow of tiny queries with tiny centroids.
    scale = queries.abs().amax(dim=1, keepdim=True).view(torch.int32).bitwise_and(_EXPONENT)
    factor = scale.view(torch.float32).clamp_min(_TINY)
    queries = torch.nn.functional.pad(queries / factor, (0, int(index.d) - queries.shape[1])).contiguous()
    D = torch.empty((len(queries), k), dtype=torch.float32, device=queries.device)
    found = torch.empty((len(queries), k), dtype=torch.int64, device=queries.device)
    arguments = (
        len(queries),
        faiss.cast_integer_to_float_ptr(queries.data_ptr()),
        k,
        faiss.cast_integer_to_float_ptr(D.data_ptr()),
        faiss.cast_integer_to_idx_t_ptr(found.data_ptr()),
    )
    if queries.device.type != "cuda":
        index.search_c(*arguments)
        return D * factor, found
    with torch.cuda.device(queries.device):
        resources: Any = index.getResources()
        device = int(index.getDevice())
        before = resources.getDefaultStream(device)
        stream = torch.cuda.current_stream().cuda_stream
        resources.setDefaultStream(device, faiss.cast_integer_to_cudastream_t(stream))  # type: ignore[attr-defined]
        try:
            index.search_c(*arguments)
        except RuntimeError as error:
            raise DeviceError(f"Faiss failed on GPU {device}: {_last_line(error)}") from None
        finally:
            resources.setDefaultStream(device, before)
    return D * factor, found


def _last_line(error: RuntimeError) -> str:
    """The message of a Faiss error, without files, lines and conditions."""
    return (str(error).strip().splitlines() or ["no reason given"])[-1]


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


def clone_to_gpu(ivf: Any, device: int, budget: FaissBudget) -> tuple[Any, Any]:
    """Copy :func:`zero_lists` to a GPU: the ``GpuIndexIVFPQ``, and the resources that must outlive it.

    Raises:
        DeviceError: no such GPU, too little memory, or Faiss left the index elsewhere.
    """
    check_gpu(device)
    resources = faiss.StandardGpuResources()
    resources.setTempMemory(budget.temporary(min(MAX_K, int(ivf.ntotal))))
    resources.setPinnedMemory(0)  # for copies from the host: not needed
    config: Any = faiss.GpuIndexIVFPQConfig()
    config.device = device
    config.indicesOptions = faiss.INDICES_64_BIT  # type: ignore[attr-defined]  # stub lacks it
    config.useFloat16LookupTables = False
    config.usePrecomputedTables = False
    config.use_cuvs = False
    # Tables by matrix products: the alternative kernel (``pqCodeDistances`` of 1.15) has a race for inner products: it loads the next
    # query into shared memory while threads may still read the last.
    config.useMMCodeDistance = True
    try:
        index: Any = faiss.GpuIndexIVFPQ(resources, ivf, config)
    except RuntimeError as error:
        raise DeviceError(f"Faiss cannot copy the index to GPU {device}: {_last_line(error)}") from None
    if not isinstance(index, faiss.GpuIndex):
        raise DeviceError(
            f"Faiss left the index on the CPU instead of GPU {device}: search it there, or report this"
        )
    if int(index.getDevice()) != device:
        raise DeviceError(f"Faiss put the index on GPU {index.getDevice()} instead of {device}: report this")
    index.nprobe = ivf.nprobe  # type: ignore[attr-defined]
    return index, resources

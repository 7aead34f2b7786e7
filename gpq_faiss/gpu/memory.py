"""Model of Faiss' GPU memory in list search, to keep its calls within a budget.

According to the sources of Faiss 1.15 (``gpu/impl/IVFUtils.cu``, ``PQScanMultiPassNoPrecomputed-inl.cuh``, ``IVFPQ.cu``,
``PQCodeDistances-inl.cuh``, ``Distance.cu``): a search first selects lists, storing scores of all centroids, then scans
them, storing scores of all their codes and tables for every list. Both buffers are doubled, for two streams. Tables are computed by
matrix products, which need additional memory; precomputed tables are not used here. Codes, ids, codebooks, centroids and results are
not part of the budget.

Two behaviours would exceed it. Faiss reserves one block of temporary memory, and allocates more if that is too small. And if the block
has room for fewer than eight queries of a larger batch, Faiss allocates up to 512 MiB instead. So batches are split into calls that
fit, and the block is smaller if a single query needs more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError

MAX_K = 2048
"""Maximum results, and probed lists, of Faiss' GPU kernels."""
PIECE = 3 << 29
"""Maximum bytes that Faiss reserves as temporary memory, whatever is set."""
_CHUNKS = 8  # parts of a query's lists, with k results selected from each
_COLUMNS = 1 << 16  # minimum centroids scored in one call
_FIXED = 2 * 16_384 + 32 * 256  # scratch of prefix sums; allocations are rounded up to 256 bytes


def check_memory(memory: int) -> int:
    """Raises UsageError: below one byte."""
    if memory < 1:
        raise UsageError(f"memory of {memory} bytes: it must be at least 1")
    return memory


@dataclass(frozen=True)
class FaissBudget:
    """Working memory of Faiss' GPU search of an ``IndexIVFPQ``, 8-bit codes, float32 tables.

    Attributes:
        memory: bytes allowed.
        lists: of the index.
        nprobe: lists probed per query.
        longest: length of the longest list, assumed for all.
        size: bytes of a code, padded for Faiss.
        width: dimensions of a query, padded for Faiss.
    """

    memory: int
    lists: int
    nprobe: int
    longest: int
    size: int
    width: int

    @classmethod
    def of(cls, ivf: Any, memory: int) -> FaissBudget:
        """Budget of an ``IndexIVFPQ`` that will be copied from the CPU to a GPU."""
        lists = int(ivf.nlist)
        longest = max(int(ivf.invlists.list_size(number)) for number in range(lists))
        return cls(memory, lists, min(int(ivf.nprobe), lists), longest, int(ivf.code_size), int(ivf.d))

    def scan_bytes(self, k: int) -> int:
        """Faiss' estimate of the bytes per query for scanning lists: offsets, scores, tables, selected results."""
        offsets = 8 * (self.nprobe + 1)
        scores = 4 * self.nprobe * self.longest
        tables = 4 * 256 * self.size * self.nprobe
        selected = 12 * min(self.nprobe, _CHUNKS) * k
        return 2 * (offsets + scores + tables + selected)

    def needed(self, k: int, queries: int = 1) -> int:
        """Maximum bytes of a call with ``k`` results per query."""
        return _FIXED + queries * (self._kept() + max(self.scan_bytes(k) + self._products(), self._coarse()))

    def rows(self, k: int) -> int:
        """Queries per call within the memory; at least 1."""
        free = min(self.memory, PIECE) - _FIXED
        scan, kept, products = self.scan_bytes(k), self._kept(), self._products()
        rows = free // (scan + kept + products)
        return max(1, min(rows, free // (kept + self._coarse())))

    def temporary(self, k: int) -> int:
        """Bytes that Faiss should reserve, so that with the additional needs of one query the memory is not exceeded."""
        piece, least = min(self.memory, PIECE), self.needed(k)
        return min(piece, self.memory - least) if piece < least <= self.memory else piece

    def _kept(self) -> int:
        """Bytes of a query's selected lists (scores and numbers), which are kept to the end."""
        return 12 * self.nprobe

    def _coarse(self) -> int:
        """Bytes while the lists of a query are selected."""
        pieces = -(-self.lists // _COLUMNS)
        return 4 + 8 * self.lists + 24 * self.nprobe * pieces

    def _products(self) -> int:
        """Bytes for tables by matrix products (:func:`.forms.clone_to_gpu`), which Faiss' estimate omits."""
        return 4 * self.nprobe * (self.width + 256 * self.size)


MEMORY = 1 << 30
"""Default bytes of scores and keys of a search."""
Mode = Literal["shard", "replica"]

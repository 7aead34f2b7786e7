"""What Faiss takes of a GPU's memory while it searches lists, and how its calls are kept within a budget.

As read in the sources of Faiss 1.15 (``gpu/impl/IVFUtils.cu``, ``PQScanMultiPassNoPrecomputed-inl.cuh``, ``IVFPQ.cu``,
``PQCodeDistances-inl.cuh``, ``Distance.cu``): a search first finds the lists, with the scores of all centroids, then scans them, with
the scores of all their codes and tables for every list. Both hold their things twice, for two streams. Tables are made by matrix
products, which are held beside them; precomputed ones are not used here. Codes, ids, codebooks and centroids are there all the
time and are not part of the budget, nor are results.

Two things would break it. Faiss' temporary memory is one piece set aside, and what does not fit is allocated beside it.
And where that piece holds fewer than eight queries of a larger batch, Faiss leaves it and takes up to 512 MiB. So
batches are cut into calls that fit, and the piece is made smaller where a query needs more than it can hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ..errors import UsageError

MAX_K = 2048
"""The most results, and lists probed, of Faiss' GPU kernels."""
PIECE = 3 << 29
"""The most that Faiss sets aside as temporary memory, in bytes; it takes no more, whatever is set."""
_CHUNKS = 8  # parts of the lists of a query, from each of which k are selected
_COLUMNS = 1 << 16  # centroids that are scored in one piece, at least
_FIXED = 2 * 16_384 + 32 * 256  # scratch of prefix sums; each allocation is rounded up to 256 bytes


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
        nprobe: lists that a query probes.
        longest: codes of the longest list; every list looked at is taken to be as long.
        size: bytes of a code, padded to what Faiss takes.
        width: dimensions of a query, padded likewise.
    """

    memory: int
    lists: int
    nprobe: int
    longest: int
    size: int
    width: int

    @classmethod
    def of(cls, ivf: Any, memory: int) -> FaissBudget:
        """Of an ``IndexIVFPQ`` on the CPU that is to go to a GPU."""
        lists = int(ivf.nlist)
        longest = max(int(ivf.invlists.list_size(number)) for number in range(lists))
        return cls(memory, lists, min(int(ivf.nprobe), lists), longest, int(ivf.code_size), int(ivf.d))

    def scan_bytes(self, k: int) -> int:
        """What Faiss reckons a query to need while its lists are scanned: offsets, scores, tables, selected results."""
        offsets = 8 * (self.nprobe + 1)
        scores = 4 * self.nprobe * self.longest
        tables = 4 * 256 * self.size * self.nprobe
        selected = 12 * min(self.nprobe, _CHUNKS) * k
        return 2 * (offsets + scores + tables + selected)

    def needed(self, k: int, queries: int = 1) -> int:
        """Bytes that a call takes at most for ``k`` results of each query, all queries at once."""
        return _FIXED + queries * (self._kept() + max(self.scan_bytes(k) + self._products(), self._coarse()))

    def check(self, k: int) -> None:
        """Raises UsageError: the memory does not hold one query with ``k`` results."""
        least = self.needed(k)
        if least > self.memory:
            raise UsageError(
                f"{self.nprobe:,} of {self.lists:,} lists, with up to {self.longest:,} codes each, need {least:,} bytes "
                f"of Faiss' working memory, {self.memory:,} are allowed: raise memory, lower nprobe, or look at all "
                "codes by torch alone (to_torch)"
            )

    def rows(self, k: int) -> int:
        """Queries a call, so that it stays within the memory where one query does; at least 1."""
        free = min(self.memory, PIECE) - _FIXED
        scan, kept, products = self.scan_bytes(k), self._kept(), self._products()
        rows = free // (scan + kept + products)
        return max(1, min(rows, free // (kept + self._coarse())))

    def temporary(self, k: int) -> int:
        """Bytes that Faiss is to set aside: with what one query needs beside them they stay within the memory."""
        piece, least = min(self.memory, PIECE), self.needed(k)
        return min(piece, self.memory - least) if piece < least <= self.memory else piece

    def _kept(self) -> int:
        """The lists found for a query, which stay until the end: scores and numbers."""
        return 12 * self.nprobe

    def _coarse(self) -> int:
        """While the lists of a query are sought."""
        pieces = -(-self.lists // _COLUMNS)
        return 4 + 8 * self.lists + 24 * self.nprobe * pieces

    def _products(self) -> int:
        """For tables by matrix products (:func:`.forms.clone_to_gpu`), which Faiss leaves out of its reckoning."""
        return 4 * self.nprobe * (self.width + 256 * self.size)


MEMORY = 1 << 30
"""Bytes of scores and keys that a search holds at once, by default."""
Mode = Literal["shard", "replica"]

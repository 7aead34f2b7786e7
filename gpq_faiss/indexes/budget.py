"""Memory budget of searches in place: queries and rows per block."""

from __future__ import annotations

from ..errors import UsageError
from ..faissio.header import Header

LEAST_ROWS = 4096
MOST_ROWS = 1 << 21  # a block that is read again for every batch, and one that is kept (measured)
KEPT_ROWS = 1 << 23
_VISIT_BYTES = 64
"""Bytes per list and query for sorting lists."""


class Budget:
    """Block sizes within a memory budget.

    Args:
        memory: bytes.
        header: of the file.
        rows: maximum codes per block (default: as many as fit, up to the fastest size).
    """

    def __init__(self, memory: int, header: Header, rows: int | None = None) -> None:
        self.memory = memory
        self._header, self._rows = header, rows
        self.M, self.K, _ = (int(n) for n in header.codebooks.shape)
        self.lists = 0 if header.centroids is None else len(header.sizes)

    def queries(self, block: int, threads: int, k: int) -> int:
        """Queries per block, at most ``block``, within half of the budget."""
        return max(1, min(block, self.memory // (2 * self.query_bytes(threads, k))))

    def query_bytes(self, threads: int, k: int) -> int:
        """Bytes per query: tables and results."""
        return k * 12 * (4 + 2 * threads) + self.M * self.K * 72

    def rows_for(self, row_bytes: int, threads: int, queries: int, k: int) -> int:
        """Rows of ``row_bytes`` per thread, in addition to the queries.

        Raises:
            UsageError: the budget is too small for the results.
        """
        rows = (self.memory - queries * self.query_bytes(threads, k)) // (threads * row_bytes)
        if rows < LEAST_ROWS:
            raise UsageError(
                f"a memory budget of {self.memory:,} bytes is too small for {queries:,} queries with k = {k:,}: raise "
                "it, or search fewer at a time"
            )
        return int(min(rows, MOST_ROWS))

    def block_rows(self, threads: int, queries: int, k: int) -> int:
        """Rows per block and thread. Raises as :meth:`rows_for`."""
        size = self._header.code_size
        if self.lists:
            return self._capped(self.rows_for(size * 6 + 40, threads, queries, k))
        mapped = self._header.id_starts is not None
        row = size * 5 + 40 if mapped else size * (3 if self._header.packing == "fastscan" else 4)
        rows = self.rows_for(row, threads, queries, k)
        return self._capped(max(LEAST_ROWS, min(rows, -(-self._header.n // threads))))

    def resident(self, threads: int, queries: int, k: int) -> bool:
        """Whether all packed codes fit in the budget, besides a block per thread, so that they can be cached.

        Only for files without ids, which would have to be cached as well.
        """
        if self._header.id_starts is not None or self.K != 16:
            return False
        size = self._header.code_size
        needed = int(self._header.n * size * 1.05) + threads * self.kept_rows(threads) * size * 3
        return self.memory - needed > queries * self.query_bytes(threads, k)

    def kept_rows(self, threads: int) -> int:
        """Rows per cached block."""
        return self._capped(max(LEAST_ROWS, min(KEPT_ROWS, -(-self._header.n // threads))))

    def _capped(self, rows: int) -> int:
        return rows if self._rows is None else min(rows, self._rows)

    def fewer(self, block: int, nprobe: int) -> int:
        """Queries per block whose list numbers take at most an eighth of the budget."""
        return max(1, min(block, self.memory // (8 * _VISIT_BYTES * nprobe))) if self.lists else block

"""Searching an index that stays on disk: codes are read in blocks through a memory map, each searched exactly.

Opening reads the header alone. A search holds a block of codes a thread, packs it for FastScan (or takes float tables
where a batch is too small to pay for that), and merges the best of all blocks: equal to a search in memory to the bit.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import ArrayLike

from ..errors import DataError, MismatchError, UsageError
from ..store import codebooks_fingerprint
from .checks import Floats, Ids, check_codes, check_vectors
from .filters import Filter, mask_of
from .io import read_sidecar, sidecar_path
from .items import Items
from .proof import ProvenSearch, read_keys
from .rowfile import read_frame
from .search import check_block, check_k, omp_threads
from .shards import parse_bytes

MEMORY = "1GB"
_LEAST_ROWS = 4096
_FAST_BATCH = 4  # queries from which packing a block for FastScan pays


class DiskEngine:
    """An index file searched in place. Made by :func:`open_disk`; the file must stay as it is.

    Attributes:
        path: the file.
        ntotal: items.
        width: D of the queries.
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, where the sidecar names it.
        memory: budget in bytes.
    """

    kind = "disk"

    def __init__(self, path: Path, memory: int) -> None:
        self._file = read_frame(path)
        stated = read_sidecar(path)
        self.path = path
        self.memory = memory
        self.ntotal = self._file.n
        self.codebooks = self._file.codebooks
        self.M, self.K, self.d = (int(n) for n in self.codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(self.codebooks)
        self.model_fingerprint: str | None = None
        if stated is not None:
            self.model_fingerprint = stated["model_fingerprint"]
            same = stated["ntotal"] == self.ntotal and stated["codebooks_fingerprint"] == self.fingerprint
            if not same or stated["bytes"] != path.stat().st_size:
                raise MismatchError(
                    f"{path} is not the file that {sidecar_path(path).name} describes: it is damaged or was changed; "
                    "build it again, or delete the .json if the change was meant"
                )
        if self.ntotal == 0:
            raise DataError(f"{path} is empty: add codes first (gpq index)")

    def block_rows(self, threads: int, queries: int, k: int) -> int:
        """Rows a block: what one row takes in memory, in each thread, beside what the queries take.

        Raises:
            UsageError: the budget does not even hold the results.
        """
        tables = queries * self.M * self.K * 8 * 8
        held = queries * k * 12 * (4 + 2 * threads) + tables
        row = self._file.code_size * 5 + 40
        rows = (self.memory - held) // (threads * row)
        if rows < _LEAST_ROWS:
            raise UsageError(
                f"a memory budget of {self.memory:,} bytes is too small for {queries:,} queries with k = {k:,}: raise "
                "it, or search fewer at a time"
            )
        return int(min(rows, 1 << 24))

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        where: Filter | None = None,
        threads: int | None = None,
        block: int = 1024,
    ) -> tuple[Floats, Ids]:
        """As :meth:`.engine.Engine.search`; the file is read once for every ``block`` queries.

        Raises:
            UsageError, DataError: see there; codes in the file that no model has; a budget that is too small.
        """
        k = check_k(k, self.ntotal)
        check_block(block)
        if threads is not None and threads < 1:
            raise UsageError(f"{threads} threads: it must be at least 1")
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        workers = min(threads or int(faiss.omp_get_max_threads()), os.cpu_count() or 1)
        D = np.full((len(queries), k), -np.inf, np.float32)
        found = np.full((len(queries), k), -1, np.int64)
        for start in range(0, len(queries), block):
            part = slice(start, start + block)
            D[part], found[part] = self._search(queries[part], k, where, workers)
        return D, found

    def _search(self, xq: Floats, k: int, where: Filter | None, workers: int) -> tuple[Floats, Ids]:
        rows = self.block_rows(workers, len(xq), k)
        rows = max(_LEAST_ROWS, min(rows, -(-self.ntotal // workers)))
        stages = ("fastscan", "fused") if len(xq) >= _FAST_BATCH else ("fused",)

        def one(start: int) -> tuple[Floats, Ids]:
            faiss.omp_set_num_threads(1)  # of this thread alone
            items = self.items(start, min(self.ntotal, start + rows))
            if where is not None:
                items = items.keep(mask_of(where, items))
            n = min(k, len(items))
            if not n:
                return np.empty((len(xq), 0), np.float32), np.empty((len(xq), 0), np.int64)
            search = ProvenSearch(items.codes, self.codebooks, stages)
            step = search.block_rows(n)
            parts = [read_keys(search.search_keys(xq[s : s + step], n)) for s in range(0, len(xq), step)]
            return np.concatenate([p[0] for p in parts]), items.ids_at(np.concatenate([p[1] for p in parts]))

        D = np.empty((len(xq), 0), np.float32)
        found = np.empty((len(xq), 0), np.int64)
        starts = range(0, self.ntotal, rows)
        with ThreadPoolExecutor(workers) as pool:
            for first in range(0, len(starts), workers):  # no more results wait than there are threads
                for scores, ids in pool.map(one, starts[first : first + workers]):
                    D, found = np.concatenate([D, scores], axis=1), np.concatenate([found, ids], axis=1)
                    order = np.lexsort((found, -D), axis=1)[:, :k]
                    D, found = np.take_along_axis(D, order, axis=1), np.take_along_axis(found, order, axis=1)
        missing = k - D.shape[1]
        if missing:
            D = np.pad(D, ((0, 0), (0, missing)), constant_values=-np.inf)
            found = np.pad(found, ((0, 0), (0, missing)), constant_values=-1)
        return D, found

    def range_search(
        self,
        xq: ArrayLike,
        least: float,
        *,
        where: Filter | None = None,
        limit: int = 10_000_000,
        threads: int | None = None,
    ) -> tuple[Ids, Floats, Ids]:
        """As :meth:`.engine.Engine.range_search`; the results are held in memory, beside the budget.

        Raises:
            UsageError, DataError: see there.
        """
        if np.isnan(least):
            raise UsageError("a range search needs a number as the least score, not NaN")
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        rows = self.block_rows(1, len(queries), 1)
        D: list[list[Floats]] = [[] for _ in queries]
        found: list[list[Ids]] = [[] for _ in queries]
        total = 0
        with omp_threads(threads):
            for start in range(0, self.ntotal, rows):
                items = self.items(start, min(self.ntotal, start + rows))
                if where is not None:
                    items = items.keep(mask_of(where, items))
                if not len(items):
                    continue
                search = ProvenSearch(items.codes, self.codebooks)
                for q in range(len(queries)):
                    scores, at = read_keys(search.range_keys(queries[q : q + 1], least)[0])
                    total += len(at)
                    if total > limit:
                        raise DataError(
                            f"a range search from {least:g} has more than {limit:,} results: raise the least score or "
                            "the limit"
                        )
                    D[q].append(scores)
                    found[q].append(items.ids_at(at))
        lims = np.zeros(len(queries) + 1, np.int64)
        lims[1:] = np.cumsum([sum(map(len, part)) for part in found])
        all_scores = np.concatenate([np.empty(0, np.float32), *(part for row in D for part in row)])
        ids = np.concatenate([np.empty(0, np.int64), *(part for row in found for part in row)])
        order = np.lexsort((ids, -all_scores, np.repeat(np.arange(len(queries)), np.diff(lims))))
        return lims, all_scores[order], ids[order]

    def items(self, start: int, stop: int) -> Items:
        """Rows ``start:stop`` of the file, checked and in the order of their ids.

        Raises:
            DataError: bits set that no code of this model has.
        """
        codes = check_codes(self._file.codes(self.path, start, stop), self.M, self.K, what=str(self.path))
        ids = self._file.ids(self.path, start, stop)
        if len(ids) > 1 and not bool((ids[1:] > ids[:-1]).all()):
            order = np.argsort(ids, kind="stable")
            codes, ids = codes[order], ids[order]
        return Items(codes, ids)


def open_disk(path: str | Path, memory: Any = MEMORY) -> DiskEngine:
    """Open an index file (flat, fused or fastscan form, with or without an id map) without reading its rows.

    Its SHA-256 is not compared, which would read all of it; sizes and fingerprints are.

    Args:
        memory: for the arrays of a search: bytes, or ``"2GB"``.

    Raises:
        DataError: missing, damaged, empty, or of a form with lists.
        MismatchError: its sidecar is of another file.
        UsageError: an unreadable budget.
    """
    return DiskEngine(Path(path), parse_bytes(memory))

"""Search of codes in memory by row number: exact, or only in the lists nearest to a query."""

from __future__ import annotations

import dataclasses
import threading
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.keys import read_keys
from .codeword_lists import CodewordLists
from .ivf import IvfSearch
from .lists import IvfSettings, assign
from .plan import Plan
from .ranges import too_many
from .threads import in_parallel, omp_threads


class Engine:
    """Searches codes; ties are ordered by row number. Thread-safe.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d], checked.
        plan: search options.
        ivf: for lists: their settings (default: k-means), and the list of each code, if known.

    Attributes:
        plan: as given.
        ivf: with centroids; None without lists.
        list_of: int32 [n]; None without lists.
        probed: the search by nearest lists; None without.

    Raises:
        UsageError, DataError: ``ivf`` does not fit (:meth:`.lists.IvfSettings.trained`).
    """

    def __init__(self, codes: Codes, Z: Floats, plan: Plan, ivf: IvfSettings | None = None) -> None:
        self.codes, self.Z, self.plan = codes, Z, plan
        self._lock = threading.Lock()
        self.ivf: IvfSettings | None = None
        self.list_of: NDArray[np.int32] | None = None
        self.probed: IvfSearch | None = None
        if plan.search == "ivf":
            self.ivf = dataclasses.replace((ivf or IvfSettings()).trained(codes, Z), list_of=None)
            assert self.ivf.centroids is not None
            known = None if ivf is None else ivf.list_of
            fits = known is not None and len(known) == len(codes)
            self.list_of = known if fits else assign(codes, Z, self.ivf.centroids)
            assert self.list_of is not None
            self.probed = IvfSearch(codes, Z, self.ivf, self.list_of, plan.packing)

    @property
    def exact(self) -> CodewordLists:
        """The exact search, made on first use."""
        with self._lock:
            return self._made

    @cached_property
    def _made(self) -> CodewordLists:
        return CodewordLists(self.codes, self.Z)

    @property
    def lists(self) -> int:
        """Number of lists to probe from; 0 if there are none."""
        return 0 if self.probed is None else len(self.probed.probing.sizes)

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists to probe."""
        assert self.probed is not None
        assert self.ivf is not None
        self.probed.nprobe = nprobe
        self.ivf = dataclasses.replace(self.ivf, nprobe=nprobe)

    def search(
        self,
        queries: Floats,
        k: int,
        nprobe: int,
        threads: int | None,
        block: int,
        mask: NDArray[np.bool_] | None = None,
    ) -> tuple[Floats, Ids]:
        """Scores float32 [Q, k] and positions int64 [Q, k] of checked queries; padded with -inf and -1.

        Args:
            mask: bool [n], rows that may be returned; without lists to probe.
        """
        searcher = self.probed
        if searcher is None:
            return self.exact.search(queries, k, mask=mask, threads=threads)
        D = np.empty((len(queries), k), np.float32)
        positions = np.empty((len(queries), k), np.int64)

        def run(part: slice) -> None:
            D[part], positions[part] = read_keys(searcher.search_keys(queries[part], k, k, nprobe))

        in_parallel(run, len(queries), max(1, min(block, searcher.block_rows(k))), threads)
        return D, positions

    def range_search(
        self,
        queries: Floats,
        min_score: float,
        limit: int,
        threads: int | None,
        mask: NDArray[np.bool_] | None,
    ) -> tuple[Ids, Floats, Ids]:
        """All rows with at least ``min_score``: lims int64 [Q + 1], scores float32 and positions int64, best first.

        Raises:
            DataError: more than ``limit`` results.
        """
        found: list[tuple[Floats, Ids]] = []
        left = limit
        with omp_threads(threads):
            for query in queries:
                found.append(self.exact.range_search(query, min_score, left, mask=mask))
                left -= len(found[-1][1])
                if left < 0:
                    raise too_many(min_score, limit)
        lims = np.cumsum([0, *(len(rows) for _, rows in found)], dtype=np.int64)
        return (
            lims,
            np.concatenate([np.empty(0, np.float32), *(s for s, _ in found)]),
            np.concatenate([np.empty(0, np.int64), *(r for _, r in found)]),
        )

"""Search of codes in memory by row number: shortlist and proof, or lists, over all or distinct codes."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, Ids
from ..codes.groups import Groups, worth_grouping
from ..codes.keys import read_keys
from .ivf import IvfSearch
from .lists import IvfSettings, assign
from .plan import Plan
from .proof import ProvenSearch
from .threads import check_threads, in_parallel

TIED = 32
"""Queries with all codes scored after which equal codes are grouped: that takes as long as 32 (48 bits) to 79 (24 bits) of them."""
_RETRIED = 8  # retried queries that take as long as one

Searcher = ProvenSearch | IvfSearch


class Engine:
    """Searches codes; ties are ordered by row number. Thread-safe.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d], checked.
        plan: search options.
        ivf: for lists: their settings (default: k-means), and the list of each code, if known.
        may_group: switch to distinct codes if ties cost more than grouping.

    Attributes:
        plan: as given, with ``group`` decided.
        ivf: with centroids; None without lists.
        list_of: int32 [n]; None without lists.
        may_group: whether it may still switch to distinct codes.

    Raises:
        UsageError, DataError: ``ivf`` does not fit (:meth:`.lists.IvfSettings.trained`).
    """

    def __init__(
        self,
        codes: Codes,
        Z: Floats,
        plan: Plan,
        ivf: IvfSettings | None = None,
        *,
        may_group: bool = True,
    ) -> None:
        self.codes, self.Z = codes, Z
        groups: Groups | None = None if plan.group is False else Groups.of(codes)
        if plan.group is None and groups is not None:
            may_group = worth_grouping(len(codes), len(groups))
            plan, groups = dataclasses.replace(plan, group=may_group), groups if may_group else None
        self.plan = plan
        self.may_group = may_group and plan.kind in ("exact", "grouped", "ivf")
        self._lock = threading.Lock()
        self.ivf: IvfSettings | None = None
        self.list_of: NDArray[np.int32] | None = None
        if plan.search == "ivf":
            self.ivf = dataclasses.replace((ivf or IvfSettings()).trained(codes, Z), list_of=None)
            known = None if ivf is None else ivf.list_of
            self.list_of = known if known is not None and len(known) == len(codes) else self._assigned(groups)
        # one object, so that other threads see both or neither
        self._held = self._searching(groups)

    def _assigned(self, groups: Groups | None) -> NDArray[np.int32]:
        """The list of each code, int32 [n]."""
        assert self.ivf is not None
        assert self.ivf.centroids is not None
        if groups is None:
            return assign(self.codes, self.Z, self.ivf.centroids)
        found = np.empty(len(self.codes), np.int32)  # equal codes are in one list
        found[groups.members] = np.repeat(assign(groups.codes, self.Z, self.ivf.centroids), groups.sizes)
        return found

    def _searching(self, groups: Groups | None) -> tuple[Searcher, Groups | None]:
        """Searcher of all codes, or of these groups if they can be searched."""
        codes = self.codes if groups is None else groups.codes
        if self.ivf is None:
            # FastScan falls back to float tables
            finer = self.plan.search == "exact" and self.plan.packing == "fastscan"
            return ProvenSearch(
                codes, self.Z, (self.plan.packing, "bytes") if finer else (self.plan.packing,)
            ), groups
        list_of, sizes = self.list_of, None
        assert list_of is not None
        if groups is not None:
            of_group, sizes = list_of[groups.members[groups.starts[:-1]]], groups.sizes
            if not np.array_equal(list_of[groups.members], np.repeat(of_group, sizes)):
                return self._searching(None)  # other programs may put equal codes into several lists
            list_of = of_group
        return IvfSearch(codes, self.Z, self.ivf, list_of, self.plan.packing, sizes), groups

    @property
    def searcher(self) -> Searcher:
        """Searcher of the codes, or of the distinct ones."""
        return self._held[0]

    @property
    def groups(self) -> Groups | None:
        """The distinct codes and their rows, if these are searched."""
        return self._held[1]

    @property
    def lists(self) -> int:
        """Number of lists; 0 if there are none."""
        searcher = self.searcher
        return len(searcher.probing.sizes) if isinstance(searcher, IvfSearch) else 0

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists to probe."""
        searcher = self.searcher
        assert isinstance(searcher, IvfSearch)
        assert self.ivf is not None
        searcher.nprobe = nprobe
        self.ivf = dataclasses.replace(self.ivf, nprobe=nprobe)

    def stats(self) -> dict[str, Any]:
        """Counts of :class:`.proof.ProvenSearch`, and the share of shortlisted queries that were proven at first try."""
        s = self.searcher
        if not isinstance(s, ProvenSearch):
            return {}
        tried = s.queries - s.exhaustive
        counts = {name: getattr(s, name) for name in ProvenSearch.COUNTS}
        return {**counts, "proven_first": 1 - s.retried / tried if tried else None}

    def search(
        self, queries: Floats, k: int, nprobe: int, threads: int | None, block: int
    ) -> tuple[Floats, Ids]:
        """Scores float32 [Q, k] and positions int64 [Q, k] of checked queries; padded with -inf and -1."""
        if len(queries) == 1 and (one := self._search_one(queries[0], k, threads)) is not None:
            return one
        searcher, groups = self._held
        inner = min(k, len(groups)) if groups is not None else k
        proven = searcher if isinstance(searcher, ProvenSearch) else None
        raw = proven is not None and self.plan.search == "approximate" and proven.packings[0] == "fastscan"
        D = np.empty((len(queries), k), np.float32)
        positions = np.empty((len(queries), k), np.int64)

        def run(part: slice) -> None:
            if isinstance(searcher, IvfSearch):
                keys = searcher.search_keys(queries[part], inner, k, nprobe)
            else:
                keys = (searcher.raw_keys if raw else searcher.search_keys)(queries[part], inner)
            if groups is None:
                D[part], positions[part] = read_keys(keys)
            else:
                D[part], positions[part] = groups.expand_some(keys, k)

        searcher.prepare(inner)
        step = max(1, min(block, searcher.block_rows(inner)))
        in_parallel(run, len(queries), step, threads)
        if groups is None:
            self._regroup(searcher)
        return D, positions

    def _search_one(self, query: Floats, k: int, threads: int | None) -> tuple[Floats, Ids] | None:
        """:meth:`search` of one query [M*d], by a faster path if possible."""
        searcher, groups = self._held
        if not isinstance(searcher, ProvenSearch) or self.plan.search == "approximate":
            return None
        check_threads(threads)  # one query is searched in the calling thread
        found = searcher.search_one(query, k if groups is None else min(k, len(groups)))
        if found is None:
            return None
        D, positions = found if groups is None else groups.expand_one(*found, k)
        return D[None], positions[None]

    def exact(self) -> tuple[ProvenSearch, Groups | None]:
        """Exact searcher of all codes, or their groups, for ranges."""
        searcher, groups = self._held
        if isinstance(searcher, ProvenSearch):
            return searcher, groups
        return ProvenSearch(self.codes, self.Z), None

    def _regroup(self, searcher: Searcher) -> None:
        """Switch to distinct codes once ties have cost as much as grouping; results are unchanged."""
        n = len(self.codes)
        if isinstance(searcher, IvfSearch):
            due = searcher.scored >= TIED * n
        else:
            due = searcher.brute_forced + searcher.retried // _RETRIED >= TIED
        # (another thread may be doing the same)
        if not (due and self.may_group and self._lock.acquire(blocking=False)):
            return
        try:
            if self._held[0] is searcher:
                groups = Groups.of(self.codes)
                self.may_group = worth_grouping(n, len(groups))
                if self.may_group:
                    over, held = self._searching(groups)
                    self.may_group = held is not None
                    if isinstance(over, ProvenSearch) and isinstance(searcher, ProvenSearch):
                        over.count_on(searcher)
                    self._held = over, held
        except MemoryError:
            self.may_group = False  # the search works without
        finally:
            self._lock.release()

"""One interface over every kind of index (:mod:`.kinds`): build, search, filter, change, save, load.

Exact kinds give the same answer to the bit: scores of :func:`..codes.scores.score_codes`, ties ordered by id, whatever the
batch and the number of threads.
"""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.bits import check_codes
from ..codes.checks import (
    MAX_CODEBOOKS,
    Floats,
    Ids,
    check_codebooks,
    check_count,
    check_recall,
    check_vectors,
)
from ..codes.groups import Groups, worth_grouping
from ..codes.keys import read_keys
from ..errors import DataError, MismatchError, UsageError
from ..faissio.forms import Form, faiss_form
from ..faissio.io import check_index_output, save_index, stored_points
from ..store import codebooks_fingerprint
from .filters import Filter, FilterCache, id_list, mask_of, over_fetch
from .items import Items
from .ivf import IvfSearch
from .kinds import STAGES, Kind, check_kind
from .lists import IvfSettings, assign
from .proof import ProvenSearch
from .ranges import Part, check_min_score, collect
from .threads import BLOCK, check_block, check_k, check_threads, in_parallel, omp_threads
from .tune import OperatingPoint, operating_points, stand_in_queries

TIED = 32
"""Queries of ``exact`` with all codes scored after which it groups: grouping takes as long as 32 (48 bits) to 79 (24 bits) of them."""
_RETRIED = 8  # retried queries that take as long as one
_SAMPLE = 256  # stand-ins for queries


class MemoryIndex:
    """Codes, their ids and what searches them. Made by :meth:`build` and :func:`.opening.open_in_memory`.

    Searching is safe from several threads at once; changing (:meth:`add`, :meth:`remove`, :meth:`merge`) is not.

    Attributes:
        kind: one of :data:`.kinds.KINDS`, ``auto`` already decided.
        group: whether distinct codes are stored once (``grouped`` is ``exact`` with this).
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, where it is known.
        width: D of the queries.
        ivf: lists and probes of the kind ``ivf``, else None.
    """

    def __init__(
        self,
        items: Items,
        codebooks: Floats,
        kind: Kind,
        *,
        group: bool = False,
        ivf: IvfSettings | None = None,
        model_fingerprint: str | None = None,
    ) -> None:
        """For :meth:`build`: the arguments are believed."""
        self.codebooks = codebooks
        self.M, self.K, self.d = (int(n) for n in codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = model_fingerprint
        self._items = items
        self._lock = threading.Lock()
        groups: Groups | None = None
        repeats = True
        if kind == "auto":
            groups = Groups.of(items.codes)
            group = repeats = worth_grouping(len(items), len(groups))
            kind = "grouped" if group else "exact"
        self.kind: Kind = kind
        self.group = group or kind == "grouped"
        self.ivf = ivf
        known = None if ivf is None else ivf.list_of
        self._list_of = None if known is None or len(known) != len(items) else known
        self._filtered: FilterCache[MemoryIndex] = FilterCache()
        self._items_only = False
        self._prepare(groups if self.group else None)
        self._may_repeat = repeats

    @classmethod
    def build(
        cls,
        codes: ArrayLike,
        codebooks: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        kind: Kind = "auto",
        group: bool = False,
        ivf: IvfSettings | None = None,
        model_fingerprint: str | None = None,
    ) -> MemoryIndex:
        """From packed codes uint8 [n, code_size] and codebooks float32 [M, K, d]; nothing of the caller's is kept.

        Args:
            ids: int64 [n], any but -1, each its own (default: positions).
            kind: see :data:`.kinds.KINDS`.
            group: store each distinct code once, whatever the kind.
            ivf: for ``ivf``: how to make the lists (default: k-means).

        Raises:
            UsageError: over 256 codebooks; an unknown kind; ``fused``, ``fastscan`` or ``ivf`` of codebooks that have not 16 codewords.
            DataError: codes, codebooks or ids unfit, or no codes at all.
        """
        Z = check_codebooks(codebooks).copy()  # whoever goes on with their own arrays changes nothing here
        if len(Z) > MAX_CODEBOOKS:
            raise UsageError(f"{len(Z)} codebooks: at most {MAX_CODEBOOKS}")
        check_kind(kind, int(Z.shape[1]))
        items = Items.make(codes, ids, int(Z.shape[0]), int(Z.shape[1])).apart_from(codes, ids)
        if not len(items):
            raise DataError("no codes: an engine needs at least one item")
        return cls(items, Z, kind, group=group, ivf=ivf, model_fingerprint=model_fingerprint)

    # What it holds ---------------------------------------------------------------------------------------------------

    @property
    def ntotal(self) -> int:
        """Items."""
        return len(self._items)

    @property
    def ids(self) -> Ids:
        """int64 [ntotal], ascending."""
        return self._items.ids

    @property
    def codes(self) -> NDArray[np.uint8]:
        """uint8 [ntotal, code_size] in the order of :attr:`ids`, to be left as they are."""
        return self._items.codes

    @property
    def distinct(self) -> int | None:
        """Distinct codes, where they are grouped."""
        return None if self._held[1] is None else len(self._held[1])

    @property
    def groups(self) -> Groups | None:
        """Distinct codes and the positions of their items, where they are grouped; to be left as they are."""
        return self._held[1]

    @property
    def searcher(self) -> ProvenSearch | IvfSearch:
        """What searches the items, or their distinct codes."""
        return self._held[0]

    def lists_of(self, ids: Ids) -> NDArray[np.int32]:
        """The list of each item of an engine of kind ``ivf``, int32 of the same shape."""
        assert self._list_of is not None
        return self._list_of[self._items.positions_of(ids.reshape(-1))].reshape(ids.shape)

    def describe(self) -> str:
        """How it searches, for people."""
        distinct = "" if self.distinct is None else f"{self.distinct:,} distinct codes of "
        return f"{self.kind}, {distinct}{self.ntotal:,} items"

    def close(self) -> None:
        """Nothing: it holds no file. (What is over a file does.)"""

    def stats(self) -> dict[str, Any]:
        """What happened so far: ``queries``, ``exhaustive`` (all codes scored at once, being few), ``retried`` (first
        candidates did not prove the top k), ``rescored`` (handed on to float tables), ``brute_forced``, and
        ``proven_first``, the share of the shortlisted queries that needed no widening (None where there was none)."""
        s = self.searcher
        if not isinstance(s, ProvenSearch):
            return {}
        tried = s.queries - s.exhaustive
        counts = {name: getattr(s, name) for name in ProvenSearch.COUNTS}
        return {**counts, "proven_first": 1 - s.retried / tried if tried else None}

    # Searching -------------------------------------------------------------------------------------------------------

    def search(
        self,
        xq: ArrayLike,
        k: int,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        threads: int | None = None,
        block: int = BLOCK,
    ) -> tuple[Floats, Ids]:
        """The ``k`` best items of every query, batches of any size at bounded memory.

        Args:
            xq: [Q, M*d]; a positive factor on a query changes no order.
            k: 1..ntotal.
            nprobe: for lists: how many a query looks at (default: :attr:`nprobe`), and more where these hold fewer than ``k``.
            where: only items that pass this filter; a place without an item gets score -inf and id -1.
            threads: for this call (default: as many as Faiss uses).
            block: queries at a time, at most.

        Returns:
            D float32 [Q, k], larger first; I int64 [Q, k], equal scores by ascending id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads``, ``block`` or ``where`` out of range.
            DataError: queries empty, of another width, NaN or infinite; a filter of the wrong form.
        """
        k = check_k(k, self.ntotal)
        nprobe = self.check_nprobe(nprobe)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        if where is None:
            D, positions = self._search(queries, k, nprobe, threads, block)
            return D, self._items.ids_at(positions)
        mask = mask_of(where, self._items)
        allowed = int(mask.sum())
        D = np.full((len(queries), k), -np.inf, np.float32)
        found = np.full((len(queries), k), -1, np.int64)
        wanted = min(k, allowed)
        if not wanted:
            return D, found
        open_ = np.arange(len(queries))
        more = over_fetch(k, self.ntotal, allowed)
        if more is not None and more <= self.ntotal // 2 and not self.lists:
            scores, positions = self._search(queries, more, nprobe, threads, block)
            passed = mask[positions]
            enough = passed.sum(axis=1) >= k
            keep = passed & (np.cumsum(passed, axis=1) <= k) & enough[:, None]
            D[enough] = scores[keep].reshape(-1, k)
            found[enough] = self._items.ids_at(positions[keep]).reshape(-1, k)
            open_ = open_[~enough]
        if len(open_):
            part = self._restricted(mask)
            scores, positions = part._search(queries[open_], wanted, nprobe, threads, block)
            D[open_, :wanted], found[open_, :wanted] = scores, part._items.ids_at(positions)
        return D, found

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = 100_000_000,
        threads: int | None = None,
        block: int = 64,
    ) -> tuple[Ids, Floats, Ids]:
        """All items that score at least ``min_score``, by exact scores whatever the kind.

        Args:
            nprobe: None: a range is sought in all lists. (An index over a file can do with fewer.)

        Returns:
            As Faiss: lims int64 [Q + 1], D float32, I int64; the results of query i are at lims[i]:lims[i + 1], best
            first, equal scores by ascending id.

        Raises:
            UsageError: ``min_score`` is NaN, or ``nprobe``, ``threads``, ``block``, ``where`` out of range.
            DataError: unfit queries or filter; more than ``limit`` results.
        """
        min_score = check_min_score(min_score)
        check_block(block)
        if nprobe is not None and self.check_nprobe(nprobe) < self.lists:
            raise UsageError(
                f"nprobe {nprobe}: in memory a range is sought in all {self.lists} lists: leave it out"
            )
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        part = self
        if where is not None:
            mask = mask_of(where, self._items)
            if not mask.any():
                return np.zeros(len(queries) + 1, np.int64), np.empty(0, np.float32), np.empty(0, np.int64)
            part = self._restricted(mask)
        searcher, groups = part._exact()
        rows = np.arange(len(queries))
        with omp_threads(threads):
            parts = (
                Part(rows[start : start + block], searcher, part._items.ids_at, groups)
                for start in range(0, len(queries), block)
            )
            return collect(parts, queries, min_score, limit)

    def _exact(self) -> tuple[ProvenSearch, Groups | None]:
        searcher, groups = self._held
        if isinstance(searcher, ProvenSearch):
            return searcher, groups
        return ProvenSearch(self._items.codes, self.codebooks), None

    def _search(
        self, queries: Floats, k: int, nprobe: int, threads: int | None, block: int
    ) -> tuple[Floats, Ids]:
        """Scores and positions of checked queries; -inf and -1 where ``ivf`` found too few."""
        if len(queries) == 1 and (one := self._search_one(queries[0], k, threads)) is not None:
            return one
        searcher, groups = self._held
        inner = min(k, len(groups)) if groups is not None else k
        proven = searcher if isinstance(searcher, ProvenSearch) else None
        raw = proven is not None and self.kind == "fastscan" and "fastscan" in proven.stages
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

        if raw and inner >= (1 << 31):
            raise UsageError("FastScan takes fewer than 2^31 results: search with kind 'fused'")
        searcher.prepare(inner)
        step = max(1, min(block, searcher.block_rows(inner)))
        in_parallel(run, len(queries), step, threads)
        if groups is None and self.kind in ("exact", "ivf"):
            self._regroup(searcher)
        return D, positions

    def _search_one(self, query: Floats, k: int, threads: int | None) -> tuple[Floats, Ids] | None:
        """:meth:`_search` of one query [M*d], where there is a shorter way."""
        searcher, groups = self._held
        if not isinstance(searcher, ProvenSearch) or self.kind == "fastscan":
            return None
        check_threads(threads)  # one query is searched in this thread, whatever their number
        found = searcher.search_one(query, k if groups is None else min(k, len(groups)))
        if found is None:
            return None
        D, positions = found if groups is None else groups.expand_one(*found, k)
        return D[None], positions[None]

    def _prepare(self, groups: Groups | None = None) -> None:
        """(Re)build what depends on the items; ``groups`` of them, where they are known."""
        self._filtered.clear()
        self._may_repeat = not self._items_only
        codes = self._items.codes
        if self.group and groups is None:
            groups = Groups.of(codes)
        if self.kind == "ivf":
            ivf = (self.ivf or IvfSettings()).trained(codes, self.codebooks)
            assert ivf.centroids is not None
            self.ivf = dataclasses.replace(ivf, list_of=None)  # those of these very items are not for others
            if self._list_of is None:
                if groups is None:
                    self._list_of = assign(codes, self.codebooks, ivf.centroids)
                else:  # equal codes go to one list
                    self._list_of = np.empty(len(codes), np.int32)
                    of_group = assign(groups.codes, self.codebooks, ivf.centroids)
                    self._list_of[groups.members] = np.repeat(of_group, groups.sizes)
        # in one piece, so that a search in another thread never has one without the other
        self._held: tuple[ProvenSearch | IvfSearch, Groups | None] = self._searching(groups)

    def _searching(self, groups: Groups | None) -> tuple[ProvenSearch | IvfSearch, Groups | None]:
        """What searches the items, or these groups of them; without the groups where they cannot be searched."""
        codes = self._items.codes if groups is None else groups.codes
        if self.kind != "ivf":
            return ProvenSearch(codes, self.codebooks, STAGES[self.kind]), groups
        assert self.ivf is not None
        list_of = self._list_of
        assert list_of is not None
        if groups is not None:
            of_group = list_of[groups.members[groups.starts[:-1]]]
            if not np.array_equal(list_of[groups.members], np.repeat(of_group, groups.sizes)):
                return self._searching(None)  # equal codes in several lists, as other programs may put them
            list_of = of_group
        ivf = dataclasses.replace(self.ivf, list_of=list_of)
        return IvfSearch(codes, self.codebooks, ivf, None if groups is None else groups.sizes), groups

    def keep_items(self) -> None:
        """Never go over to distinct codes unasked, which take memory of their own; nor do engines that are made from it."""
        self._items_only, self._may_repeat = True, False
        self._filtered.clear()

    def _regroup(self, searcher: ProvenSearch | IvfSearch) -> None:
        """Go over to distinct codes where ties have cost as much as that does; the answers stay the same."""
        if isinstance(searcher, IvfSearch):
            due = searcher.scored >= TIED * self.ntotal
        else:
            due = searcher.brute_forced + searcher.retried // _RETRIED >= TIED
        # (another search may be at it, or at a filter)
        if not (due and self._may_repeat and self._lock.acquire(blocking=False)):
            return
        try:
            if self._held[0] is searcher:
                groups = Groups.of(self._items.codes)
                self._may_repeat = worth_grouping(self.ntotal, len(groups))
                if self._may_repeat:
                    over, held = self._searching(groups)
                    self._may_repeat = held is not None
                    if isinstance(over, ProvenSearch) and isinstance(searcher, ProvenSearch):
                        over.count_on(searcher)
                    self._held = over, held
        except MemoryError:
            self._may_repeat = False  # the answers are there without
        finally:
            self._lock.release()

    def _restricted(self, mask: NDArray[np.bool_]) -> MemoryIndex:
        """An index of the allowed items."""

        def make() -> MemoryIndex:
            kind: Kind = "exact" if self.kind == "grouped" else self.kind
            ivf = self.ivf
            if ivf is not None and self._list_of is not None:
                ivf = dataclasses.replace(ivf, list_of=self._list_of[mask])
            part = MemoryIndex(self._items.keep(mask), self.codebooks, kind, group=self.group, ivf=ivf)
            part._may_repeat = self._may_repeat
            return part

        return self._filtered.get(mask, make)

    # Lists -----------------------------------------------------------------------------------------------------------

    @property
    def lists(self) -> int:
        """How many lists; 0 where there are none."""
        return len(self.searcher.probing.sizes) if isinstance(self.searcher, IvfSearch) else 0

    @property
    def nprobe(self) -> int:
        """Lists that a query looks at unless :meth:`search` is told otherwise; 0 where there are none."""
        return self.searcher.nprobe if isinstance(self.searcher, IvfSearch) else 0

    @property
    def points(self) -> tuple[OperatingPoint, ...]:
        """Operating points of the last :meth:`tune`, or of the file."""
        return () if self.ivf is None else self.ivf.points

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1, or there are no lists."""
        if nprobe is None:
            return self.nprobe
        if not self.lists:
            raise UsageError(f"an index of kind {self.kind!r} has no lists: nprobe belongs to kind 'ivf'")
        return min(check_count(nprobe, "nprobe"), self.lists)

    def set_nprobe(self, nprobe: int) -> None:
        """Lists that each query looks at from now on, at most all. Raises as :meth:`check_nprobe`."""
        nprobe = self.check_nprobe(nprobe)
        assert self.ivf is not None
        assert isinstance(self.searcher, IvfSearch)
        self.searcher.nprobe = nprobe
        self.ivf = dataclasses.replace(self.ivf, nprobe=nprobe)

    def sample_queries(self, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
        """Queries where there are none (:func:`.tune.stand_in_queries`): float32 [min(n, ntotal), M*d]."""
        codes = self.codes
        return stand_in_queries(
            self.ntotal, lambda rows: codes[rows], self.codebooks, n, noise=noise, seed=seed
        )

    def tune(
        self, recall: float, *, k: int = 10, queries: ArrayLike | None = None, threads: int | None = 1
    ) -> list[OperatingPoint]:
        """Set the least nprobe that reaches a recall, and say what others give (:func:`.tune.operating_points`).

        Args:
            recall: mean share of the exact top ``k``, ties ordered by id, above 0 and at most 1.
            queries: [Q, M*d] like those to come (default: :meth:`sample_queries`).

        Returns:
            Operating points, by ascending nprobe. The chosen one is the first whose recall suffices.

        Raises:
            UsageError: no lists, or ``recall`` or ``k`` out of range.
            DataError: unfit queries.
        """
        search = self.searcher
        if not isinstance(search, IvfSearch) or self.ivf is None:
            raise UsageError(
                f"an index of kind {self.kind!r} has no nprobe to tune: build it with kind 'ivf'"
            )
        check_recall(recall)
        k = check_k(k, self.ntotal)
        xq = (
            self.sample_queries()
            if queries is None
            else check_vectors(queries, self.width, what="queries to tune by", allow_empty=False)
        )

        def run(nprobe: int) -> Ids:
            return self.search(xq, k, nprobe=nprobe, threads=threads)[1]

        found = self.lists_of(run(self.lists))
        chosen, points = operating_points(search.probing, xq, k, found, recall, run)
        self.set_nprobe(chosen)
        self.ivf = dataclasses.replace(self.ivf, points=tuple(points))
        return points

    # Changing --------------------------------------------------------------------------------------------------------

    def add(self, codes: ArrayLike, ids: ArrayLike | None = None) -> None:
        """Append items (default ids: from the largest on, and none below 0).

        Raises:
            DataError: unfit codes or ids, or an id that is there already; nothing has changed then.
        """
        codes = check_codes(codes, self.M, self.K)
        n = len(codes)
        if ids is None:
            first = max(0, int(self._items.ids[-1]) + 1)
            if first + n > 1 << 63:
                raise DataError("there is no larger id left: give the ids of the items to add")
            ids = np.arange(first, first + n, dtype=np.int64)
        more = Items.make(codes, ids, self.M, self.K)
        self._replace(self._items.join(more, what="items to add"))

    def remove(self, ids: ArrayLike, *, missing: Literal["error", "ignore"] = "error") -> int:
        """Remove items; returns how many.

        Raises:
            DataError: not a list of ids, an id that no item has (unless ignored), or no item would be left; nothing has
                changed then.
        """
        wanted = np.unique(id_list(ids, "ids to remove"))
        at = self._items.positions_of(wanted)
        if missing == "error" and bool((at < 0).any()):
            raise DataError(f"id {int(wanted[at < 0][0])} is not in the index: nothing was removed")
        at = at[at >= 0]
        if len(at) == self.ntotal:
            raise DataError("this would remove every item: an engine needs at least one")
        if len(at):
            mask = np.ones(self.ntotal, np.bool_)
            mask[at] = False
            self._replace(self._items.keep(mask))
        return len(at)

    def merge(self, *others: MemoryIndex) -> None:
        """Take in the items of other engines (shards), which stay as they are.

        Raises:
            MismatchError: another model's codebooks.
            DataError: an id that occurs in two; nothing has changed then.
        """
        items = self._items
        for number, other in enumerate(others, 1):
            if not isinstance(other, MemoryIndex):
                raise UsageError(
                    f"shard {number} is a {type(other).__name__}: engines in memory are merged, and files by gpq index A B"
                )
            if other.fingerprint != self.fingerprint:
                raise MismatchError(
                    f"shard {number} has codebooks {other.fingerprint}, not {self.fingerprint}: encode it with this model"
                )
            items = items.join(other._items, what=f"shard {number}")
        self._replace(items)

    def _replace(self, items: Items) -> None:
        self._items = items
        self._list_of = None
        self._prepare()

    # Kinds and files -------------------------------------------------------------------------------------------------

    def to(self, kind: Kind, *, group: bool = False, ivf: IvfSettings | None = None) -> MemoryIndex:
        """The same items searched in another way; nothing is encoded again, and the codes are shared.

        Raises:
            UsageError: see :meth:`build`.
        """
        check_kind(kind, self.K)
        chosen = ivf or self.ivf
        same = chosen is not None and self.ivf is not None and chosen.centroids is self.ivf.centroids
        if chosen is not None and same and chosen.list_of is None:
            chosen = dataclasses.replace(chosen, list_of=self._list_of)
        made = MemoryIndex(
            self._items,
            self.codebooks,
            kind,
            group=group,
            ivf=chosen,
            model_fingerprint=self.model_fingerprint,
        )
        if self._items_only:
            made.keep_items()
        return made

    def form(self) -> Form:
        """The Faiss form that a file of this kind has."""
        if self.kind == "ivf":
            assert self.ivf is not None
            return "ivf-fused" if self.ivf.form == "fused" and self.M > 1 else "ivf-fastscan"
        if self.kind == "fused" and self.M > 1:
            return "fused"
        return "fastscan" if self.kind == "fastscan" else "flat"

    def to_faiss(self, form: Form | None = None) -> Any:
        """A plain Faiss index of the same items, in the order of their ids.

        Raises:
            UsageError: a form that these codebooks do not have.
        """
        form = form or self.form()
        codes, own, Z = self.codes, self._items.own, self.codebooks
        if not form.startswith("ivf"):
            return faiss_form(form, codes, own, Z)
        ivf = (self.ivf or IvfSettings()).trained(codes, Z)
        assert ivf.centroids is not None
        list_of = assign(codes, Z, ivf.centroids) if self._list_of is None else self._list_of
        return faiss_form(form, codes, own, Z, centroids=ivf.centroids, list_of=list_of, nprobe=ivf.nprobe)

    def save(self, path: str | Path, form: Form | None = None, *, overwrite: bool = False) -> Path:
        """Write a plain Faiss index (:meth:`to_faiss`) and its sidecar, which keeps the kind.

        Raises:
            OutputExistsError: one of the files exists and ``overwrite`` is false.
            DataError: the disk refuses.
            UsageError: see :meth:`to_faiss`.
        """
        path = check_index_output(path, overwrite=overwrite)
        extra: dict[str, Any] = {"engine": self.kind, "group": self.group}
        if self.ivf is not None and self.ivf.points:
            extra["operating_points"] = stored_points(self.ivf.points)
        return save_index(
            self.to_faiss(form), path, model_fingerprint=self.model_fingerprint, overwrite=True, extra=extra
        )

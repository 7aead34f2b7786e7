"""An index in memory: built, searched, filtered, changed, written to a file.

Exact plans (:mod:`.plan`) give bit-equal results for any batch and number of threads: scores of
:func:`..codes.scores.score_codes`, ties ordered by id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..codes.bits import check_codes
from ..codes.checks import (
    MAX_CODEBOOKS,
    Codes,
    Floats,
    Ids,
    check_codebooks,
    check_recall,
    check_vectors,
)
from ..errors import DataError, MismatchError, UsageError
from ..faissio.io import Beside, check_index_output, save_index, stored_points
from ..faissio.storage import Storage, ivf_index, row_index
from ..store import codebooks_fingerprint
from .codeword_lists import CodewordLists
from .engine import Engine
from .filters import Filter, FilterCache, id_list, mask_of
from .items import Items
from .lists import IvfSettings, assign
from .plan import Plan
from .ranges import LIMIT, check_min_score
from .threads import BLOCK, check_block, check_k, check_nprobe
from .tune import OperatingPoint, operating_points, sample_queries_of

_SAMPLE = 256  # sample queries


class MemoryIndex:
    """An index in memory, created by :meth:`build` and :func:`.opening.open_in_memory`.

    Searching is thread-safe; modification (:meth:`add`, :meth:`remove`, :meth:`merge`) is not.

    Attributes:
        codebooks: float32 [M, K, d].
        fingerprint: of the codebooks.
        model_fingerprint: of the model, if known.
        width: D of the queries.
    """

    def __init__(
        self,
        items: Items,
        codebooks: Floats,
        plan: Plan,
        *,
        ivf: IvfSettings | None = None,
        model_fingerprint: str | None = None,
    ) -> None:
        """Use :meth:`build` instead; arguments are not checked here."""
        self.codebooks = codebooks
        self.M, self.K, self.d = (int(n) for n in codebooks.shape)
        self.width = self.M * self.d
        self.fingerprint = codebooks_fingerprint(codebooks)
        self.model_fingerprint = model_fingerprint
        self._filtered: FilterCache[tuple[Items, Engine]] = FilterCache()
        self._items = items
        self._engine = Engine(items.codes, codebooks, plan, ivf)

    @classmethod
    def build(
        cls,
        codes: ArrayLike,
        codebooks: ArrayLike,
        ids: ArrayLike | None = None,
        *,
        kind: str | Plan = "auto",
        ivf: IvfSettings | None = None,
        model_fingerprint: str | None = None,
    ) -> MemoryIndex:
        """Build an index from packed codes uint8 [n, code_size] and codebooks float32 [M, K, d]. Arrays are copied.

        Args:
            ids: int64 [n], unique, not -1 (default: row numbers).
            kind: search kind: a name in :data:`.plan.KINDS`, or a plan.
            ivf: for ``ivf``: settings of the lists (default: k-means).

        Raises:
            UsageError: more than 256 codebooks; an unknown kind; ``fused``, ``fastscan`` or ``ivf`` with codebooks of other than 16
                codewords.
            DataError: invalid codes, codebooks or ids, or no codes.

        Examples:
            >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)  # 2 codebooks of 16 codewords in 16 dimensions
            >>> index = MemoryIndex.build(np.array([[0x00], [0x21], [0x21]], np.uint8), Z, ids=[7, 8, 9])
            >>> scores, ids = index.search(np.arange(32.0)[None], 3)  # ties in ascending order of id
            >>> scores.tolist(), ids.tolist()
            ([[19.0, 19.0, 16.0]], [[8, 9, 7]])
        """
        Z = check_codebooks(codebooks).copy()  # a copy, so that the caller may modify the array
        if len(Z) > MAX_CODEBOOKS:
            raise UsageError(f"{len(Z)} codebooks: at most {MAX_CODEBOOKS}")
        plan = Plan.of(kind)
        plan.check(int(Z.shape[1]))
        items = Items.make(codes, ids, int(Z.shape[0]), int(Z.shape[1])).apart_from(codes, ids)
        if not len(items):
            raise DataError("no codes: an index needs at least one item")
        return cls(items, Z, plan, ivf=ivf, model_fingerprint=model_fingerprint)

    # What it holds ---------------------------------------------------------------------------------------------------

    @property
    def ntotal(self) -> int:
        """Number of items."""
        return len(self._items)

    @property
    def plan(self) -> Plan:
        """Search options."""
        return self._engine.plan

    @property
    def kind(self) -> str:
        """The plan's name."""
        return self.plan.kind

    @property
    def ids(self) -> Ids:
        """int64 [ntotal], ascending."""
        return self._items.ids

    @property
    def id_range(self) -> tuple[int, int]:
        """The smallest and the largest id."""
        first, last = self._items.ids_at(np.array([0, self.ntotal - 1])).tolist()
        return first, last

    @property
    def codes(self) -> Codes:
        """uint8 [ntotal, code_size] in the order of :attr:`ids`; do not modify."""
        return self._items.codes

    def code_of(self, item: int) -> Codes | None:
        """The code of an item, uint8 [code_size]; None if there is no such id."""
        at = int(self._items.positions_of(np.array([item], np.int64))[0])
        return None if at < 0 else self.codes[at]

    @property
    def exact(self) -> CodewordLists:
        """The exact search, made on first use."""
        return self._engine.exact

    @property
    def ivf(self) -> IvfSettings | None:
        """Lists and probes of a search by lists, else None."""
        return self._engine.ivf

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{self.kind}, {self.ntotal:,} items"

    def close(self) -> None:
        """No-op: there is no open file."""

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
        """The ``k`` best items of every query, in bounded memory.

        Args:
            xq: [Q, M*d]; positive factors do not change the order.
            k: 1..ntotal.
            nprobe: lists to probe (default: :attr:`nprobe`), and more if these have fewer than ``k`` items.
            where: search only items that pass this filter; missing results have score -inf and id -1.
            threads: for this call (default: Faiss' setting).
            block: maximum queries per block.

        Returns:
            D float32 [Q, k], descending; I int64 [Q, k], ties in ascending order of id.

        Raises:
            UsageError: ``k``, ``nprobe``, ``threads``, ``block`` or ``where`` out of range.
            DataError: queries empty, of another width, NaN or infinite; an invalid filter.
        """
        k = check_k(k, self.ntotal)
        nprobe = self.check_nprobe(nprobe)
        check_block(block)
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        if where is None:
            D, positions = self._engine.search(queries, k, nprobe, threads, block)
            return D, self._items.ids_at(positions)
        mask = mask_of(where, self._items)
        wanted = min(k, int(mask.sum()))
        D = np.full((len(queries), k), -np.inf, np.float32)
        found = np.full((len(queries), k), -1, np.int64)
        if wanted and self.lists:
            items, engine = self._restricted(mask)
            scores, positions = engine.search(queries, wanted, nprobe, threads, block)
            D[:, :wanted], found[:, :wanted] = scores, items.ids_at(positions)
        elif wanted:
            scores, positions = self._engine.search(queries, wanted, nprobe, threads, block, mask)
            D[:, :wanted], found[:, :wanted] = scores, self._items.ids_at(positions)
        return D, found

    def range_search(
        self,
        xq: ArrayLike,
        min_score: float,
        *,
        nprobe: int | None = None,
        where: Filter | None = None,
        limit: int = LIMIT,
        threads: int | None = None,
        block: int = 64,
    ) -> tuple[Ids, Floats, Ids]:
        """All items with an exact score of at least ``min_score``.

        Args:
            nprobe: must be None: all lists are searched. (An index over a file supports fewer.)

        Returns:
            As in Faiss: lims int64 [Q + 1], D float32, I int64; results of query i are at lims[i]:lims[i + 1], best first, ties in
            ascending order of id.

        Raises:
            UsageError: ``min_score`` is NaN, or ``nprobe``, ``threads``, ``block``, ``where`` out of range.
            DataError: invalid queries or filter; more than ``limit`` results.
        """
        min_score = check_min_score(min_score)
        check_block(block)
        if nprobe is not None and self.check_nprobe(nprobe) < self.lists:
            raise UsageError(
                f"nprobe {nprobe}: a range search in memory visits all {self.lists} lists: leave it out"
            )
        queries = check_vectors(xq, self.width, what="queries", allow_empty=False)
        mask = None if where is None else mask_of(where, self._items)
        lims, scores, positions = self._engine.range_search(queries, min_score, limit, threads, mask)
        return lims, scores, self._items.ids_at(positions)

    def _restricted(self, mask: NDArray[np.bool_]) -> tuple[Items, Engine]:
        """The passing items, and their searcher."""

        def make() -> tuple[Items, Engine]:
            whole, ivf = self._engine, self.ivf
            if ivf is not None and whole.list_of is not None:
                ivf = dataclasses.replace(ivf, list_of=whole.list_of[mask])
            items = self._items.keep(mask)
            return items, Engine(items.codes, self.codebooks, self.plan, ivf)

        return self._filtered.get(mask, make)

    # Lists -----------------------------------------------------------------------------------------------------------

    @property
    def lists(self) -> int:
        """Number of lists; 0 if there are none."""
        return self._engine.lists

    @property
    def nprobe(self) -> int:
        """Default number of lists to probe; 0 if there are none."""
        return 0 if self.ivf is None else self.ivf.nprobe

    @property
    def points(self) -> tuple[OperatingPoint, ...]:
        """Operating points of the last :meth:`tune`, or of the file."""
        return () if self.ivf is None else self.ivf.points

    def check_nprobe(self, nprobe: int | None) -> int:
        """``nprobe`` or the default, at most all lists. Raises UsageError: below 1, or there are no lists."""
        return check_nprobe(nprobe, self.nprobe, self.lists, f"an index of kind {self.kind!r}")

    def set_nprobe(self, nprobe: int) -> None:
        """Set the number of lists to probe, at most all. Raises as :meth:`check_nprobe`."""
        self._engine.set_nprobe(self.check_nprobe(nprobe))

    def sample_queries(self, n: int = _SAMPLE, *, noise: float = 0.5, seed: int = 0) -> Floats:
        """Sample queries, in place of real ones (:func:`.tune.sample_queries_of`): float32 [min(n, ntotal), M*d]."""
        codes = self.codes
        return sample_queries_of(
            self.ntotal, lambda rows: codes[rows], self.codebooks, n, noise=noise, seed=seed
        )

    def tune(
        self, recall: float, *, k: int = 10, queries: ArrayLike | None = None, threads: int | None = 1
    ) -> list[OperatingPoint]:
        """Set the smallest nprobe that reaches a recall, and report all operating points (:func:`.tune.operating_points`).

        Args:
            recall: mean share of the exact top ``k``, ties ordered by id, above 0 and at most 1.
            queries: [Q, M*d], representative ones (default: :meth:`sample_queries`).

        Returns:
            Operating points by ascending nprobe. The first with sufficient recall is chosen.

        Raises:
            UsageError: no lists, or ``recall`` or ``k`` out of range.
            DataError: invalid queries.
        """
        search = self._engine.probed
        if search is None or self.ivf is None:
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

        list_of = self._engine.list_of
        assert list_of is not None
        exact = run(self.lists)
        found = list_of[self._items.positions_of(exact.reshape(-1))].reshape(exact.shape)
        chosen, points = operating_points(search.probing, xq, k, found, recall, run)
        self.set_nprobe(chosen)
        assert self._engine.ivf is not None
        self._engine.ivf = dataclasses.replace(self._engine.ivf, points=tuple(points))
        return points

    # Changing --------------------------------------------------------------------------------------------------------

    def add(self, codes: ArrayLike, ids: ArrayLike | None = None) -> None:
        """Append items (default ids: consecutive after the largest, at least 0).

        Raises:
            DataError: invalid codes or ids, or an id in use; the index is then unchanged.
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
        """Remove items; returns their number.

        Raises:
            DataError: not a list of ids, an unknown id (unless ignored), or no item left; the index is then unchanged.
        """
        wanted = np.unique(id_list(ids, "ids to remove"))
        at = self._items.positions_of(wanted)
        if missing == "error" and bool((at < 0).any()):
            raise DataError(f"id {int(wanted[at < 0][0])} is not in the index: nothing was removed")
        at = at[at >= 0]
        if len(at) == self.ntotal:
            raise DataError("this would remove every item: an index needs at least one")
        if len(at):
            mask = np.ones(self.ntotal, np.bool_)
            mask[at] = False
            self._replace(self._items.keep(mask))
        return len(at)

    def merge(self, *others: MemoryIndex) -> None:
        """Add the items of other indexes in memory, which are not modified.

        Raises:
            MismatchError: other codebooks.
            DataError: a repeated id; the index is then unchanged.
        """
        items = self._items
        for number, other in enumerate(others, 1):
            if not isinstance(other, MemoryIndex):
                raise UsageError(
                    f"shard {number} is a {type(other).__name__}: only indexes in memory can be merged; merge files by gpq index A B"
                )
            if other.fingerprint != self.fingerprint:
                raise MismatchError(
                    f"shard {number} has codebooks {other.fingerprint}, not {self.fingerprint}: encode it with this model"
                )
            items = items.join(other._items, what=f"shard {number}")
        self._replace(items)

    def _replace(self, items: Items) -> None:
        engine = Engine(items.codes, self.codebooks, self.plan, self.ivf)
        self._items, self._engine = items, engine
        self._filtered.clear()

    # Plans and files -------------------------------------------------------------------------------------------------

    def to(self, kind: str | Plan, *, ivf: IvfSettings | None = None) -> MemoryIndex:
        """The same items with another search kind; codes are shared.

        Raises:
            UsageError: see :meth:`build`.
        """
        plan = Plan.of(kind)
        if kind == "ivf" and self.lists:  # requested by name: keep the lists' packing
            plan = dataclasses.replace(plan, packing=self.plan.packing)
        plan.check(self.K)
        chosen = ivf or self.ivf
        same = chosen is not None and self.ivf is not None and chosen.centroids is self.ivf.centroids
        if chosen is not None and same and chosen.list_of is None:
            chosen = dataclasses.replace(chosen, list_of=self._engine.list_of)
        return MemoryIndex(
            self._items,
            self.codebooks,
            plan,
            ivf=chosen,
            model_fingerprint=self.model_fingerprint,
        )

    def to_faiss(self, storage: Storage | None = None) -> Any:
        """A plain Faiss index of the same items, in the order of their ids.

        Args:
            storage: storage form of its codes (default: by the plan).

        Raises:
            UsageError: not possible with these codebooks.
        """
        storage = storage or self.plan.storage(self.M)
        storage.check(self.K, self.M)
        codes, own, Z = self.codes, self._items.own, self.codebooks
        if not storage.lists:
            return row_index(codes, own, Z, storage.packing)
        ivf = (self.ivf or IvfSettings()).trained(codes, Z)
        assert ivf.centroids is not None
        list_of = self._engine.list_of
        if list_of is None:
            list_of = assign(codes, Z, ivf.centroids)
        return ivf_index(codes, own, Z, ivf.centroids, storage.packing, list_of, nprobe=ivf.nprobe)

    def save(
        self,
        path: str | Path,
        storage: Storage | None = None,
        *,
        overwrite: bool = False,
        extra: Mapping[str, Any] | None = None,
        beside: Beside | None = None,
    ) -> Path:
        """Write a plain Faiss index (:meth:`to_faiss`), its sidecar with the plan and ``extra``, and the files ``beside`` it.

        Raises:
            OutputExistsError: a file exists and ``overwrite`` is false.
            DataError: writing fails.
            UsageError: see :meth:`to_faiss`.
        """
        path = check_index_output(path, overwrite=overwrite)
        extra = {"engine": self.kind, **(extra or {})}
        if self.ivf is not None and self.ivf.points:
            extra["operating_points"] = stored_points(self.ivf.points)
        return save_index(
            self.to_faiss(storage),
            path,
            model_fingerprint=self.model_fingerprint,
            overwrite=True,
            extra=extra,
            beside=beside,
        )

"""Inverted lists: only the lists whose centroids are nearest to a query are scanned (:mod:`.probing`).

Items go to lists without residuals, so GPQ's codebooks stay valid under any coarse quantiser: k-means over the vectors
that the codes stand for, or vectors of one's own such as the model's class prototypes. Faiss nominates from the lists, by
FastScan (4-bit) or byte-fused tables; the nominated are scored again, and where that does not prove the top k, all items
of these lists are scored, as in :mod:`.proof`. So the answer is exact within the lists, ties ordered by id. What is
approximate is which lists are looked at; with all of them it equals the exact search.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .checks import Codes, Floats, Ids, check_count, check_vectors
from .codebooks import decode, fuse, lookup_tables, pad_vectors, score_prepared, score_tables
from .items import Groups
from .keys import EMPTY_KEY, Keys, best_keys, read_keys, sort_keys
from .probing import Probing, unit_centroids
from .proof import score_all
from .scanners import quantisation_bound, rounding_bound

TRAIN_ROWS = 256
"""Rows a list that k-means looks at."""
_ASSIGN = 65_536
_ROUNDS = 10
_WIDER = 4  # times as many candidates where the first do not prove the answer
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class IvfSettings:
    """How the lists are made and searched.

    Attributes:
        lists: how many, at most (default: about the square root of the codes): k-means makes no more than there are
            distinct codes in its sample, and leaves out empty ones. Ignored where ``centroids`` are given.
        centroids: float32 [lists, M*d], of any length (only their direction counts); None: k-means.
        form: ``fastscan`` (4-bit) or ``fused`` (byte-fused 8-bit).
        nprobe: lists that a query looks at, at least (:mod:`.probing`).
        seed: of k-means.
        points: operating points found by tuning (:func:`.tune.tune_nprobe`), for the record.
        list_of: int32, the list of each code, where it is known; used for just those codes.
        assignment: for builds in a stream (:mod:`.coarse`): ``nearest``, ``tables``, or None: by their cost.
    """

    lists: int | None = None
    centroids: Floats | None = None
    form: Literal["fastscan", "fused"] = "fastscan"
    nprobe: int = 8
    seed: int = 0
    points: tuple[dict[str, float], ...] = ()
    list_of: NDArray[np.int32] | None = None
    assignment: Literal["nearest", "tables"] | None = None

    def check(self) -> None:
        """Raises UsageError: ``form``, ``lists``, ``nprobe`` or ``seed`` out of range."""
        if self.form not in ("fastscan", "fused"):
            raise UsageError(f"IVF form {self.form!r}: choose fastscan or fused")
        check_count(self.nprobe, "nprobe")
        if self.lists is not None:
            check_count(self.lists, "lists")
        if (
            isinstance(self.seed, bool)
            or not isinstance(self.seed, int)
            or not 0 <= self.seed < (1 << 31) - 1
        ):
            raise UsageError(f"seed {self.seed!r}: a whole number from 0 to 2^31 - 2 is needed")

    def trained(self, codes: Codes, Z: Floats) -> IvfSettings:
        """With centroids: the given ones made unit-norm, or those of spherical k-means over decoded codes.

        Raises:
            UsageError: ``lists``, ``nprobe`` or ``form`` out of range.
            DataError: centroids of another width, not finite, or zero.
        """
        D = int(Z.shape[0] * Z.shape[2])
        self.check()
        if self.centroids is not None:
            given = check_vectors(self.centroids, D, what="IVF centroids", allow_empty=False)
            centroids = unit_centroids(given)
        else:
            n = len(codes)
            lists = self.lists if self.lists is not None else max(1, int(n**0.5))
            if not 1 <= lists <= n:
                raise UsageError(f"{lists} lists: from 1 to the {n:,} codes")
            rng = np.random.default_rng([self.seed, 0])
            rows = np.sort(rng.choice(n, min(n, lists * TRAIN_ROWS), replace=False))
            centroids = train_centroids(codes[rows], Z, lists, self.seed)
            if self.lists is not None:
                tell_fewer(lists, len(centroids))
        lists = len(centroids)
        return dataclasses.replace(self, lists=lists, centroids=centroids, nprobe=min(self.nprobe, lists))


def tell_fewer(asked: int, made: int) -> None:
    """Log that there are fewer lists than were asked for, if so."""
    if made < asked:
        _log.warning("%d of the %d lists asked for: the codes are not different enough for more", made, asked)


def train_centroids(sample: Codes, Z: Floats, lists: int, seed: int) -> Floats:
    """Centroids of at most so many lists, each of which holds a code of the sample: float32 [lists, M*d], unit-norm."""
    groups = Groups.of(sample)
    return spherical_kmeans(decode(groups.codes, Z), groups.sizes, lists, seed)[0]


def spherical_kmeans(x: Floats, weights: NDArray[Any], k: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Centroids of weighted points, at most ``k`` and no more than points, none without a point.

    Args:
        x: float32 [n, w]. weights: [n], above 0.

    Returns:
        Unit-norm centroids float32 [at most k, w], and the one of each point, of the largest inner product, int64 [n].
    """
    if len(x) <= k:
        centroids = x
    else:
        # min_points: Faiss warns on stdout below its own taste
        kmeans = faiss.Kmeans(
            x.shape[1],
            k,
            niter=_ROUNDS,
            spherical=True,
            seed=seed + 1,
            min_points_per_centroid=1,
            max_points_per_centroid=1 << 30,
        )
        kmeans.train(np.ascontiguousarray(x), weights=np.ascontiguousarray(weights, np.float32))
        centroids = np.asarray(kmeans.centroids, np.float32)
    directed = centroids.any(axis=1)  # not those of points that cancel each other
    if not directed.any():  # any direction is as good
        directed, centroids = np.ones(1, np.bool_), np.eye(1, x.shape[1], dtype=np.float32)
    centroids = unit_centroids(centroids[directed])
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(centroids)
    used, of_point = np.unique(index.search(np.ascontiguousarray(x), 1)[1][:, 0], return_inverse=True)
    return np.ascontiguousarray(centroids[used]), of_point.reshape(-1)


def assign(codes: Codes, Z: Floats, centroids: Floats) -> NDArray[np.int32]:
    """List of each code, int32 [n]: the centroid of the largest inner product with the vector it stands for."""
    quantizer = faiss.IndexFlatIP(centroids.shape[1])
    quantizer.add(centroids)
    out = np.empty(len(codes), np.int32)
    for start in range(0, len(codes), _ASSIGN):
        out[start : start + _ASSIGN] = quantizer.search(decode(codes[start : start + _ASSIGN], Z), 1)[1][:, 0]
    return out


def empty_ivfpq(centroids: Floats, books: Floats, *, by_residual: bool) -> Any:
    """An ``IndexIVFPQ`` by inner product around these centroids, trained, without items.

    Args:
        centroids: float32 [lists, at most M*d]; padded with zeros.
        books: float32 [M, K, d].
    """
    M, K, d = (int(n) for n in books.shape)
    quantizer: Any = faiss.IndexFlatIP(M * d)
    quantizer.add(np.ascontiguousarray(pad_vectors(centroids, M * d)))
    ivf: Any = faiss.IndexIVFPQ(
        quantizer, M * d, len(centroids), M, K.bit_length() - 1, faiss.METRIC_INNER_PRODUCT
    )
    quantizer.this.disown()
    ivf.own_fields = True
    ivf.by_residual = by_residual
    faiss.copy_array_to_vector(np.ascontiguousarray(books).ravel(), ivf.pq.centroids)
    ivf.is_trained = True
    return ivf


def rows_of_lists(list_of: NDArray[np.int32], lists: int) -> Iterator[tuple[int, Ids]]:
    """Each list with the rows, ascending, that are in it; ``list_of`` int32 [n]."""
    order = np.argsort(list_of, kind="stable")
    bounds = np.searchsorted(list_of[order], np.arange(lists + 1))
    for number in range(lists):
        yield number, order[bounds[number] : bounds[number + 1]]


def fill_list(ivf: Any, number: int, codes: Codes, ids: Ids) -> None:
    """Append codes uint8 [n, code_size] with ids [n] to a list (``ntotal`` stays as it is)."""
    if not len(codes):
        return
    own = np.ascontiguousarray(ids, dtype=np.int64)  # names of their own: a pointer keeps nothing alive
    rows = np.ascontiguousarray(codes)
    ivf.invlists.add_entries(number, len(rows), faiss.swig_ptr(own), faiss.swig_ptr(rows))


def ivf_index(
    codes: Codes,
    ids: NDArray[np.int64] | None,
    Z: Floats,
    centroids: Floats,
    form: str,
    list_of: NDArray[np.int32],
) -> Any:
    """The Faiss index of these lists: ``IndexIVFPQFastScan`` (4-bit) or ``IndexIVFPQ`` (byte-fused), no residuals."""
    M = int(Z.shape[0])
    fused = form == "fused" and M > 1
    books = fuse(Z) if fused else Z
    ivf = empty_ivfpq(centroids, books, by_residual=False)
    for number, rows in rows_of_lists(list_of, len(centroids)):
        fill_list(ivf, number, codes[rows], rows if ids is None else ids[rows])
    ivf.ntotal = len(codes)
    if fused or form == "fused":
        return ivf
    fast = faiss.IndexIVFPQFastScan(ivf)
    # the quantizer passes to the copy, which outlives the original
    fast.quantizer = ivf.quantizer
    ivf.own_fields = False
    fast.own_fields = True
    return fast


class IvfSearch:
    """Searches lists whose entries are positions. The counterpart of :class:`.proof.ProvenSearch`.

    Args:
        codes: uint8 [n, code_size], checked.
        Z: codebooks, float32 [M, K, d].
        settings: trained, with the list of each code.
        items: int64 [n], items of each code (default: one).

    Attributes:
        probing: the order of the lists.
        nprobe: lists that a query looks at, at least.
        queries: searched so far.
        widened: of these, whose first candidates did not prove the top k.
        scored_in_full: of these, with all codes of their lists scored; ``scored``: codes that were so.

    Raises:
        DataError: ``settings.list_of`` names a list that there is not.
        UsageError: 2^32 codes or more, of which a key cannot hold the position.
    """

    def __init__(self, codes: Codes, Z: Floats, settings: IvfSettings, items: Ids | None = None) -> None:
        assert settings.centroids is not None
        assert settings.list_of is not None
        if len(codes) >= 1 << 32:
            raise UsageError(f"{len(codes):,} codes are too many for lists in memory: search them from disk")
        self.codes = codes
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.fast = settings.form == "fastscan"
        self.nprobe = settings.nprobe
        lists, known = len(settings.centroids), settings.list_of
        if len(known) and not 0 <= known.min() <= known.max() < lists:
            raise DataError(
                f"list_of names lists {known.min()} to {known.max()}: there are {lists}, counted from 0"
            )
        self.index = ivf_index(codes, None, Z, settings.centroids, settings.form, known)
        self._sizes = np.bincount(known, minlength=lists)
        held = self._sizes if items is None else np.bincount(known, items, lists).astype(np.int64)
        self.probing = Probing(settings.centroids, held)
        # codes in the order of their lists
        self._rows = np.argsort(known, kind="stable").astype(np.uint32)
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.queries = self.widened = self.scored_in_full = self.scored = 0

    def prepare(self, k: int) -> None:
        """Nothing: the lists are there."""

    def block_rows(self, k: int) -> int:
        """Queries at a time for bounded memory."""
        held = (2 * k + 64) * (int(self.codes.shape[1]) * 17 + 32) + self.M * self.K * 80
        held += 24 * min(len(self._sizes), max(k, self.nprobe))  # k lists hold k items
        return max(1, (64 << 20) // held)

    def search_keys(self, xq: Floats, k: int, items: int | None = None) -> Keys:
        """Keys [Q, k] of the best in the lists that each query looks at; empty keys where these hold fewer codes.

        Args:
            xq: checked queries, float32 [Q, M*d].
            items: that the lists are to hold together, where they can (default: ``k``).
        """
        lists = self.probing.lists(xq, self.nprobe, k if items is None else items)
        total = np.where(lists >= 0, self._sizes[lists], 0).sum(axis=1)
        tables = score_tables(xq, self.Z)
        prepared, slack = lookup_tables(tables), self.slack(xq, tables)
        out = np.full((len(xq), k), EMPTY_KEY, np.int64)
        open_ = np.arange(len(xq))
        self.queries += len(xq)
        wanted = min(len(self.codes), k + max(32, k // 2) if self.fast else k + max(8, k // 8))
        for attempt in range(2):
            # Of so few codes in the lists scoring all is as cheap.
            open_ = open_ if attempt == 0 else open_[total[open_] > 4 * wanted]
            step = max(1, (64 << 20) // (wanted * (int(self.codes.shape[1]) * 17 + 32)))
            proven = np.zeros(len(xq), np.bool_)
            tied = np.zeros(len(xq), np.bool_)
            for start in range(0, len(open_), step):
                rows = open_[start : start + step]
                approximate, found = self.nominate(xq[rows], wanted, lists[rows])
                there = found >= 0
                at = np.maximum(found, 0)
                exact = score_prepared(prepared[rows], self.codes[at], self.M, self.K)
                best = best_keys(np.where(there, sort_keys(exact, at), EMPTY_KEY), k)
                out[rows] = best
                kth = read_keys(best[:, -1])[0]
                # What Faiss left out scores at most its last score plus the slack; a tie with the k-th might come first.
                enough = there[:, -1] & (approximate[:, -1] + slack[rows] < kth)
                proven[rows] = enough | (there.sum(axis=1) == total[rows])
                tied[rows] = (there & (exact >= kth[:, None])).all(axis=1)
            if attempt == 0:
                self.widened += len(open_) - int(proven.sum())
                left = np.flatnonzero(~proven)
            else:
                left = left[~proven[left]]
            open_ = left[~tied[left]]
            wanted *= _WIDER
        for q in left.tolist():
            self._score_all(prepared[q : q + 1], lists[q], k, out[q])
        self.scored_in_full += len(left)
        return out

    def slack(self, xq: Floats, tables: Floats | None = None) -> Floats:
        """float32 [Q]: no score of an item exceeds what :meth:`nominate` gives of it by more."""
        rounding = rounding_bound(xq, self.M, self.d)
        if not self.fast:
            return rounding
        return quantisation_bound(score_tables(xq, self.Z) if tables is None else tables) + 2 * rounding

    def nominate(self, xq: Floats, k: int, lists: Ids) -> tuple[Floats, Ids]:
        """Faiss' own ``k`` best of the lists of each query [Q, P] (-1: none): scores and positions [Q, k], -1 where none."""
        padded = np.ascontiguousarray(pad_vectors(xq, self.index.d))
        lists = np.ascontiguousarray(lists)
        nearness = np.zeros(lists.shape, np.float32)
        D, found = np.empty((len(xq), k), np.float32), np.empty((len(xq), k), np.int64)
        params = faiss.SearchParametersIVF(nprobe=lists.shape[1])  # type: ignore[call-arg]  # stub lacks it
        # The method of Python takes the number of lists from the index, which other threads share.
        self.index.search_preassigned_c(
            len(xq),
            faiss.swig_ptr(padded),
            k,
            faiss.swig_ptr(lists),
            faiss.swig_ptr(nearness),
            faiss.swig_ptr(D),
            faiss.swig_ptr(found),
            False,
            params,
        )
        return D, found

    def _score_all(self, prepared: Floats, lists: Ids, k: int, out: Keys) -> None:
        """Fill the keys [k] of one query by the scores of all codes in its lists."""
        lists = lists[lists >= 0]
        n = int(self._sizes[lists].sum())
        self.scored += n
        out[:] = EMPTY_KEY
        if n == len(self.codes):
            best = score_all(prepared, self.codes, self.M, self.K, k)[0]
        else:
            parts = [self._rows[self._starts[i] : self._starts[i] + self._sizes[i]] for i in lists.tolist()]
            rows = np.sort(np.concatenate(parts)).astype(np.int64)
            scores, at = read_keys(score_all(prepared, self.codes[rows], self.M, self.K, min(k, n))[0])
            best = sort_keys(scores, rows[at])
        out[: len(best)] = best

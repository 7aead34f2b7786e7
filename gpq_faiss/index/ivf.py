"""Inverted lists: only the lists whose centroids are nearest to a query are scanned.

Items go to lists without residuals, so GPQ's codebooks stay valid under any coarse quantiser: k-means over the vectors
that the codes stand for, or vectors of one's own such as the model's class prototypes. Candidates come from FastScan
(4-bit) or byte-fused tables and are scored again by float tables, so scores are exact; what is approximate is which
lists were looked at, and with FastScan whether an item among a list's best was nominated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from .checks import Codes, Floats, Ids, check_count, check_vectors
from .codebooks import decode, fuse, lookup_tables, pad_vectors, score_prepared, score_tables
from .keys import EMPTY_KEY, Keys, best_keys, sort_keys

_TRAIN_ROWS = 256  # rows a list that k-means looks at
_ASSIGN = 65_536


@dataclass(frozen=True, eq=False)
class IvfSettings:
    """How the lists are made and searched.

    Attributes:
        lists: how many (default: about the square root of the codes); ignored where ``centroids`` are given.
        centroids: float32 [lists, M*d], of any length (only their direction counts); None: k-means.
        form: ``fastscan`` (4-bit) or ``fused`` (byte-fused 8-bit).
        nprobe: lists looked at a query.
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
            centroids = check_vectors(self.centroids, D, what="IVF centroids", allow_empty=False)
        else:
            n = len(codes)
            lists = self.lists if self.lists is not None else max(1, int(n**0.5))
            if not 1 <= lists <= n:
                raise UsageError(f"{lists} lists: from 1 to the {n:,} codes")
            rng = np.random.default_rng([self.seed, 0])
            rows = np.sort(rng.choice(n, min(n, lists * _TRAIN_ROWS), replace=False))
            sample = decode(codes[rows], Z)
            # min_points: Faiss warns on stdout below its own taste
            kmeans = faiss.Kmeans(
                D, lists, niter=10, spherical=True, seed=self.seed + 1, min_points_per_centroid=1
            )
            kmeans.train(sample)
            centroids = np.asarray(kmeans.centroids, np.float32)
            # Of vectors that cancel each other: any direction is as good.
            lost = ~centroids.any(axis=1)
            centroids[lost] = rng.standard_normal((int(lost.sum()), D))
        norms = np.linalg.norm(centroids.astype(np.float64), axis=1, keepdims=True)
        if not (norms > 0).all():
            raise DataError(
                f"IVF centroid {int(np.argmin(norms))} is zero: it has no direction, leave it out"
            )
        unit = np.ascontiguousarray(centroids / norms, dtype=np.float32)
        return dataclasses.replace(self, lists=len(unit), centroids=unit, nprobe=min(self.nprobe, len(unit)))


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
        Z: codebooks, float32 [M, 16, d].
        settings: trained.

    Raises:
        DataError: ``settings.list_of`` names a list that there is not.
    """

    def __init__(self, codes: Codes, Z: Floats, settings: IvfSettings) -> None:
        assert settings.centroids is not None
        self.codes = codes
        self.Z = Z
        self.M, self.K, self.d = (int(n) for n in Z.shape)
        self.settings = settings
        self.nprobe = settings.nprobe
        known = settings.list_of
        if known is not None and len(known) and not 0 <= known.min() <= known.max() < len(settings.centroids):
            raise DataError(
                f"list_of names lists {known.min()} to {known.max()}: there are {len(settings.centroids)}, counted from 0"
            )
        self.list_of = (
            known if known is not None and len(known) == len(codes) else assign(codes, Z, settings.centroids)
        )
        self.index = ivf_index(codes, None, Z, settings.centroids, settings.form, self.list_of)

    def prepare(self, k: int) -> None:
        """Nothing: the lists are there."""

    def block_rows(self, k: int) -> int:
        """Queries at a time for bounded memory."""
        held = (2 * k + 64) * (int(self.codes.shape[1]) * 17 + 32) + self.M * self.K * 80
        return max(1, (64 << 20) // held)

    def search_keys(self, xq: Floats, k: int) -> Keys:
        """Keys [Q, k] of the best of the nearest lists, exact scores; empty keys where these hold fewer than k."""
        n = len(self.codes)
        wanted = min(n, 2 * k + 32 if self.settings.form == "fastscan" else k + 8)
        params = faiss.SearchParametersIVF(nprobe=self.nprobe)  # type: ignore[call-arg]  # stub lacks it
        _, found = self.index.search(pad_vectors(xq, self.index.d), wanted, params=params)
        prepared = lookup_tables(score_tables(xq, self.Z))
        exact = score_prepared(prepared, self.codes[np.maximum(found, 0)], self.M, self.K)
        keys = np.where(found >= 0, sort_keys(exact, np.maximum(found, 0)), EMPTY_KEY)
        return best_keys(keys, k)

    def nearest_lists(self, xq: Floats) -> NDArray[np.int64]:
        """All lists in the order in which each query visits them, int64 [Q, lists]."""
        lists = int(self.index.nlist)
        order: NDArray[np.int64] = self.index.quantizer.search(pad_vectors(xq, self.index.d), lists)[1]
        return order

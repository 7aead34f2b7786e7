"""Construction of inverted lists: settings, spherical k-means, and assignment of codes."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Codes, Floats, check_count, check_vectors
from ..codes.encode import decode
from ..codes.groups import Groups
from ..errors import UsageError
from .probing import unit_centroids

TRAIN_ROWS = 256
"""Rows per list that k-means samples."""
_ASSIGN = 65_536
_ROUNDS = 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class IvfSettings:
    """Settings of inverted lists.

    Attributes:
        lists: maximum number of lists (default: about the square root of the number of codes). k-means makes at most one per
            distinct code of its sample and drops empty ones. Ignored if ``centroids`` are given.
        centroids: float32 [lists, M*d], of any norm; None: k-means.
        nprobe: minimum number of lists to probe (:mod:`.probing`).
        seed: of k-means.
        points: operating points from tuning (:meth:`.memory.MemoryIndex.tune`), for information.
        list_of: int32, the list of each code, if known.
        assignment: for streaming builds (:mod:`..build.coarse`): ``nearest``, ``tables``, or None: by cost.
    """

    lists: int | None = None
    centroids: Floats | None = None
    nprobe: int = 8
    seed: int = 0
    points: tuple[dict[str, float], ...] = ()
    list_of: NDArray[np.int32] | None = None
    assignment: Literal["nearest", "tables"] | None = None

    def check(self) -> None:
        """Raises UsageError: ``lists``, ``nprobe`` or ``seed`` out of range."""
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
        """Settings with unit-norm centroids: the given ones normalised, or from spherical k-means over decoded codes.

        Raises:
            UsageError: ``lists`` or ``nprobe`` out of range.
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
                raise UsageError(f"{lists} lists: it must be 1 to the {n:,} codes")
            rng = np.random.default_rng([self.seed, 0])
            rows = np.sort(rng.choice(n, min(n, lists * TRAIN_ROWS), replace=False))
            centroids = train_centroids(codes[rows], Z, lists, self.seed)
            if self.lists is not None:
                warn_fewer(lists, len(centroids))
        lists = len(centroids)
        return dataclasses.replace(self, lists=lists, centroids=centroids, nprobe=min(self.nprobe, lists))


def warn_fewer(asked: int, made: int) -> None:
    """Log that there are fewer lists than were requested, if so."""
    if made < asked:
        _log.warning("%d of the %d requested lists: the codes are not different enough for more", made, asked)


def train_centroids(sample: Codes, Z: Floats, lists: int, seed: int) -> Floats:
    """Centroids of at most this many lists, none empty on the sample: float32 [lists, M*d], unit-norm."""
    groups = Groups.of(sample)
    return spherical_kmeans(decode(groups.codes, Z), groups.sizes, lists, seed)[0]


def spherical_kmeans(x: Floats, weights: NDArray[Any], k: int, seed: int) -> tuple[Floats, NDArray[np.int64]]:
    """Spherical k-means of weighted points: at most ``k`` centroids, none without a point.

    Args:
        x: float32 [n, w]. weights: [n], above 0.

    Returns:
        Unit-norm centroids float32 [at most k, w], and the centroid of each point by inner product, int64 [n].
    """
    if len(x) <= k:
        centroids = x
    else:
        # min_points: suppresses Faiss' warning on stdout
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
    directed = centroids.any(axis=1)  # not of points that cancel out
    if not directed.any():  # any direction will do
        directed, centroids = np.ones(1, np.bool_), np.eye(1, x.shape[1], dtype=np.float32)
    centroids = unit_centroids(centroids[directed])
    index = faiss.IndexFlatIP(x.shape[1])
    index.add(centroids)
    used, of_point = np.unique(index.search(np.ascontiguousarray(x), 1)[1][:, 0], return_inverse=True)
    return np.ascontiguousarray(centroids[used]), of_point.reshape(-1)


def assign(codes: Codes, Z: Floats, centroids: Floats) -> NDArray[np.int32]:
    """List of each code, int32 [n]: the centroid with the largest inner product with the decoded vector."""
    quantizer = faiss.IndexFlatIP(centroids.shape[1])
    quantizer.add(centroids)
    out = np.empty(len(codes), np.int32)
    for start in range(0, len(codes), _ASSIGN):
        out[start : start + _ASSIGN] = quantizer.search(decode(codes[start : start + _ASSIGN], Z), 1)[1][:, 0]
    return out

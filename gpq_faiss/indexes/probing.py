"""Choice of the lists to probe, the same in memory and in a file, for any batch.

A query probes the ``nprobe`` nearest lists by centroid that have items (that pass the filter). If these have fewer than ``k`` items,
further lists are probed until they have ``k``. Within these lists results are exact, ties ordered by id.

Only the direction of centroids matters. Queries and centroids are rounded to integers small enough that float64 represents their inner
products exactly. So the order of lists depends neither on the batch nor on the kernel; ties go to the lower number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..errors import DataError

SCORES = 1 << 18  # inner products per block
_UNIT = 1e-6  # tolerance of the norm of a normalised float32 vector
_EXACT = 52  # bits of integers exact in float64, less one


def unit_centroids(centroids: Floats) -> Floats:
    """Centroids float32 [lists, D] normalised; unit-norm ones are unchanged, bit for bit.

    Raises:
        DataError: a centroid of zeros, or one that is not finite.
    """
    norms = np.linalg.norm(centroids.astype(np.float64), axis=1, keepdims=True)
    if not np.isfinite(norms).all():
        raise DataError(
            f"IVF centroid {int(np.argmin(np.isfinite(norms)))} is not finite: the index is damaged; build it again"
        )
    if not (norms > 0).all():
        raise DataError(f"IVF centroid {int(np.argmin(norms))} is zero: it has no direction, leave it out")
    return np.ascontiguousarray(centroids / np.where(np.abs(norms - 1) > _UNIT, norms, 1), np.float32)


def whole_centroids(centroids: Floats) -> tuple[NDArray[np.float64], float]:
    """Unit centroids as integers, float64 [lists, D], and the scale factor.

    Raises:
        DataError: a centroid of zeros.
    """
    # A sum of D products of two numbers of this many bits is below 2^52.
    scale = 2.0 ** ((_EXACT - (int(centroids.shape[1]) - 1).bit_length()) // 2)
    return np.rint(unit_centroids(centroids).astype(np.float64) * scale), scale


class Probing:
    """The order in which queries probe lists.

    Args:
        centroids: float32 [lists, D]; only their direction counts.
        sizes: int64 [lists], items of each list.

    Attributes:
        sizes: as given.
        filled: int64, the non-empty lists, ascending.

    Raises:
        DataError: a centroid of zeros.
    """

    def __init__(self, centroids: Floats, sizes: Ids) -> None:
        self.sizes = sizes
        self.filled: Ids = np.flatnonzero(sizes)
        points, self._scale = whole_centroids(centroids[self.filled])
        self._points = np.ascontiguousarray(points.T)

    def nearest(self, xq: Floats, n: int) -> Ids:
        """The ``n`` nearest non-empty lists, nearest first: int64 [Q, min(n, non-empty lists)].

        Args:
            xq: float32 [Q, D], finite.
        """
        filled = len(self.filled)
        n = min(n, filled)
        out = np.empty((len(xq), n), np.int64)
        step = max(1, SCORES // filled)
        for start in range(0, len(xq), step):
            part = xq[start : start + step].astype(np.float64)
            largest = np.abs(part).max(axis=1, keepdims=True)
            part /= np.where(largest > 0, largest, 1)
            part *= self._scale
            scores = np.rint(part, out=part) @ self._points
            out[start : start + step] = self.filled[_largest(scores, n)]
        return out

    def lists(self, xq: Floats, nprobe: int, k: int, count: Callable[[Ids], Ids] | None = None) -> Ids:
        """Lists to probe per query, nearest first: int64 [Q, maximum], padded with -1.

        Args:
            xq: float32 [Q, D], finite.
            nprobe: minimum number of lists, if there are enough non-empty ones.
            k: minimum number of items in these lists, if there are enough.
            count: list numbers -> number of passing items (default: all).
        """
        open_ = np.arange(len(xq))
        looked, width = nprobe, 1
        found: list[tuple[NDArray[np.intp], Ids, NDArray[np.bool_]]] = []
        while len(open_):
            near = self.nearest(xq[open_], looked)
            held = self.sizes[near] if count is None else count(near)
            useful = held > 0
            enough = (useful.cumsum(axis=1) >= nprobe) & (held.cumsum(axis=1) >= k)
            last = near.shape[1] == len(self.filled)
            done = enough[:, -1] | last
            # up to the list that makes it enough
            useful[:, 1:] &= ~enough[:, :-1]
            width = max(width, int(useful[done].sum(axis=1).max(initial=0)))
            found.append((open_[done], near[done], useful[done]))
            open_ = open_[~done]
            looked *= 2
        out = np.full((len(xq), width), -1, np.int64)
        for rows, near, useful in found:
            row, column = np.nonzero(useful)
            out[rows[row], (useful.cumsum(axis=1) - 1)[row, column]] = near[row, column]
        return out


def _largest(scores: NDArray[np.float64], n: int) -> NDArray[np.intp]:
    """Columns of the ``n`` largest values per row, descending, ties by column: [rows, n]."""
    if 4 * n >= scores.shape[1]:
        return np.argsort(-scores, axis=1, kind="stable")[:, :n]
    last = np.partition(scores, -n, axis=1)[:, -n, None]
    among = scores >= last
    for row in np.flatnonzero(among.sum(axis=1) > n):
        tied = np.flatnonzero(scores[row] == last[row])
        among[row, tied[n - int((scores[row] > last[row]).sum()) :]] = False
    columns = np.nonzero(among)[1].reshape(len(scores), n)
    order = np.argsort(-np.take_along_axis(scores, columns, axis=1), axis=1, kind="stable")
    return np.take_along_axis(columns, order, axis=1)

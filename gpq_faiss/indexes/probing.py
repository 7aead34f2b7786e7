"""Which lists a query probes: the same ones in memory and in a file, whatever the batch.

A query probes the ``nprobe`` lists whose centroids are nearest, of those that hold an item (and one that the filter
lets through, where there is a filter). Where these hold fewer than ``k`` items, it goes on to the next lists until they
hold ``k``, or until there are no more. Within these lists the answer is exact, ties ordered by id.

Centroids count by their direction. Query and centroid are rounded to whole numbers, small enough that float64 holds
their inner product exactly. So the order of the lists depends neither on the batch nor on the kernel that adds, and of
lists that are equally near the one with the lower number comes first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids
from ..errors import DataError

SCORES = 1 << 18  # inner products at a time
_UNIT = 1e-6  # how far from 1 the norm of a float32 vector may lie that was divided by its norm
_EXACT = 52  # bits of a whole number that float64 holds exactly, one to spare


def unit_centroids(centroids: Floats) -> Floats:
    """Centroids float32 [lists, D] of unit norm; those that are so already stay as they are, bit for bit.

    Raises:
        DataError: a centroid of zeros.
    """
    norms = np.linalg.norm(centroids.astype(np.float64), axis=1, keepdims=True)
    if not (norms > 0).all():
        raise DataError(f"IVF centroid {int(np.argmin(norms))} is zero: it has no direction, leave it out")
    return np.ascontiguousarray(centroids / np.where(np.abs(norms - 1) > _UNIT, norms, 1), np.float32)


def whole_centroids(centroids: Floats) -> tuple[NDArray[np.float64], float]:
    """Unit centroids as whole numbers, float64 [lists, D], and the factor that made these of them.

    Raises:
        DataError: a centroid of zeros.
    """
    # A sum of D products of two numbers of this many bits stays below 2^52.
    scale = 2.0 ** ((_EXACT - (int(centroids.shape[1]) - 1).bit_length()) // 2)
    return np.rint(unit_centroids(centroids).astype(np.float64) * scale), scale


class Probing:
    """The order in which queries probe lists.

    Args:
        centroids: float32 [lists, D]; only their direction counts.
        sizes: int64 [lists], items of each list.

    Attributes:
        sizes: as given.
        filled: int64, the lists that hold an item, ascending.

    Raises:
        DataError: a centroid of zeros.
    """

    def __init__(self, centroids: Floats, sizes: Ids) -> None:
        self.sizes = sizes
        self.filled: Ids = np.flatnonzero(sizes)
        points, self._scale = whole_centroids(centroids[self.filled])
        self._points = np.ascontiguousarray(points.T)

    def nearest(self, xq: Floats, n: int) -> Ids:
        """The ``n`` nearest lists that hold an item, nearest first: int64 [Q, min(n, such lists)].

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
        """The lists that each query probes, nearest first: int64 [Q, most of them], -1 after the last.

        Args:
            xq: float32 [Q, D], finite.
            nprobe: lists, at least, where there are so many that hold an item.
            k: items that the lists are to hold together, where all lists hold so many.
            count: numbers of lists to how many of their items may be found (default: all).
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
            # lists before the one with which there are enough, and that one
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
    """Columns of the ``n`` largest of each row, largest first, of equal ones the first: [rows, n]."""
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

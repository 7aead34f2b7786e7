"""Assignment of items to lists by their codes (:class:`Nearest`, :class:`Tables`), and its training.

``nearest``: the list centroid with the largest inner product with the decoded vector: lists x width operations per item. ``tables``: a few
table look-ups per item for any number of lists, for billions of items: two bytes of a code (four codewords) select one of 64 clusters;
the clusters of all parts determine a cell, and a table maps cells to lists. Cells are assigned to lists by k-means over the mean vectors
of their items in a sample, so that a list's centroid is the direction of its items, as with ``nearest``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import unpack_codes
from ..codes.checks import Codes, Floats
from ..codes.codebooks import fuse, pad_vectors
from ..errors import UsageError
from ..indexes.lists import TRAIN_ROWS, IvfSettings, assign, spherical_kmeans, train_centroids, warn_fewer

Assignment = Literal["nearest", "tables"]
TABLES_FROM = 2e10
"""Items x lists above which ``tables`` is the default (minutes of ``nearest`` on a core)."""
_PARTS = 3
_MOST = 16_384  # lists, by default
_CLUSTERS = 64


class Nearest:
    """The nearest centroid.

    Args:
        centroids: float32 [lists, M*d], unit-norm.
        Z: codebooks, float32 [M, 16, d].
    """

    description = "nearest centroid"

    def __init__(self, centroids: Floats, Z: Floats) -> None:
        self.centroids = centroids
        self._Z = Z

    def assign(self, codes: Codes) -> NDArray[np.int32]:
        """List of each code, int32 [n]."""
        return assign(codes, self._Z, self.centroids)

    def rows(self, memory: int) -> int:
        """Codes per block within this many bytes."""
        return max(256, memory // (int(self.centroids.shape[1]) * 8))


class Tables:
    """Lists of cells, assigned by tables.

    Args:
        sample: uint8 [s, code_size], representative codes.
        Z: codebooks, float32 [M, 16, d].
        lists: maximum number of lists; fewer if the sample has fewer cells.
        seed: of k-means.
    """

    description = "tables"

    def __init__(self, sample: Codes, Z: Floats, lists: int, seed: int = 0) -> None:
        books = fuse(Z) if len(Z) > 1 else Z  # [bytes, 256, width], or one codebook alone
        self._parts: list[tuple[int, int, NDArray[np.uint8]]] = []
        centres: list[Floats] = []
        for first in range(0, min(len(books), 2 * _PARTS), 2):
            last = min(first + 2, len(books))
            book = _joint(books[first:last])
            used, counts = np.unique(_column(sample, first, last), return_counts=True)
            found, _ = spherical_kmeans(book[used], counts, min(_CLUSTERS, len(used)), seed)
            table = np.empty(len(book), np.uint8)
            for start in range(0, len(book), 1 << 14):
                table[start : start + (1 << 14)] = (book[start : start + (1 << 14)] @ found.T).argmax(axis=1)
            self._parts.append((first, last, table))
            centres.append(found)
        cells = int(np.prod([len(c) for c in centres]))
        self._sizes = [len(c) for c in centres]
        width = Z.shape[0] * Z.shape[2]
        cell = self._cells(sample)
        used, place, counts = np.unique(cell, return_inverse=True, return_counts=True)
        M, K, d = Z.shape
        indices = unpack_codes(sample, M, K)
        means = np.empty((len(used), M, d), np.float32)
        for m in range(M):  # codeword counts per cell give the mean of its vectors
            often = np.bincount(place * K + indices[:, m], minlength=len(used) * K).reshape(-1, K)
            means[:, m] = often / counts[:, None] @ Z[m]
        self.centroids, list_of = spherical_kmeans(
            means.reshape(-1, width), counts, min(lists, len(used)), seed
        )
        table_of = np.empty(cells, np.int32)
        # Cells missing in the sample are assigned by the centres of their parts.
        quantizer = faiss.IndexFlatIP(width)
        quantizer.add(self.centroids)
        for start in range(0, cells, 1 << 15):
            places = np.unravel_index(np.arange(start, min(cells, start + (1 << 15))), self._sizes)
            x = np.concatenate([c[p] for c, p in zip(centres, places, strict=True)], axis=1)
            x = pad_vectors(np.ascontiguousarray(x[:, :width]), width)
            table_of[start : start + len(x)] = quantizer.search(x, 1)[1][:, 0]
        table_of[used] = list_of
        self._list_of = table_of

    def _cells(self, codes: Codes) -> NDArray[np.int32]:
        cell = np.zeros(len(codes), np.int32)
        for (first, last, table), size in zip(self._parts, self._sizes, strict=True):
            cell *= size
            cell += table[_column(codes, first, last)]
        return cell

    def assign(self, codes: Codes) -> NDArray[np.int32]:
        out = np.empty(len(codes), np.int32)
        for start in range(0, len(codes), 1 << 20):
            out[start : start + (1 << 20)] = self._list_of[self._cells(codes[start : start + (1 << 20)])]
        return out

    def rows(self, memory: int) -> int:
        return 1 << 20


def _column(codes: Codes, first: int, last: int) -> NDArray[Any]:
    """One or two bytes of each code as a number."""
    if last - first == 1:
        return codes[:, first]
    return codes[:, first].astype(np.uint16) | (codes[:, last - 1].astype(np.uint16) << np.uint16(8))


def _joint(books: Floats) -> Floats:
    """Vectors of all values of one byte [256, w] or two [65536, 2w]."""
    if len(books) == 1:
        return np.ascontiguousarray(books[0])
    every = np.arange(65536)
    return np.concatenate([books[0][every & 255], books[1][every >> 8]], axis=1)


Coarse = Nearest | Tables


def choose(settings: IvfSettings, n: int) -> tuple[int, Assignment]:
    """Number of lists, and assignment of ``n`` items.

    Raises:
        UsageError: more lists than items, or an unknown assignment.
    """
    if settings.centroids is not None:
        if settings.assignment == "tables":
            raise UsageError("--assign tables trains its own centroids: give either tables or centroids")
        return len(settings.centroids), "nearest"
    lists = settings.lists if settings.lists is not None else min(_MOST, max(1, int(n**0.5)))
    if not 1 <= lists <= n:
        raise UsageError(f"{lists} lists: from 1 to the {n:,} codes")
    if settings.assignment not in (None, "nearest", "tables"):
        raise UsageError(f"assignment {settings.assignment!r}: choose nearest or tables")
    return lists, settings.assignment or ("tables" if float(n) * lists > TABLES_FROM else "nearest")


def train(ivf: IvfSettings, rows: int, sample: Callable[[int], Codes], Z: Floats, memory: int) -> Coarse:
    """The lists for ``rows`` items, trained within a memory budget.

    Args:
        sample: number of items -> codes of random items, uint8 [n, code_size].
        Z: codebooks, float32 [M, 16, d].

    Raises:
        UsageError: see :func:`choose`.
        DataError: invalid centroids.
    """
    lists, assignment = choose(ivf, rows)
    if ivf.centroids is not None:
        trained = ivf.trained(sample(1), Z)
        assert trained.centroids is not None
        return Nearest(trained.centroids, Z)
    most = max(lists, memory // (int(Z.shape[0] * Z.shape[2]) * 16))
    codes = sample(min(rows, lists * TRAIN_ROWS, most))
    coarse: Coarse = (
        Tables(codes, Z, lists, ivf.seed)
        if assignment == "tables"
        else Nearest(train_centroids(codes, Z, lists, ivf.seed), Z)
    )
    if ivf.lists is not None:
        warn_fewer(lists, len(coarse.centroids))
    return coarse

"""Merging of partial results."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import Floats, Ids

_TINY = np.finfo(np.float32).tiny

Rows = slice | NDArray[np.int64]
"""Some of the queries of a batch."""


class Best:
    """Best results of some queries so far. Thread-safe.

    Attributes:
        D: float32 [Q, k], descending; padded with -inf.
        found: int64 [Q, k], ties in ascending order of id; padded with -1.
        list_of: int32 [Q, k], list of each result.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.D = np.full((queries, k), -np.inf, np.float32)
        self.found = np.full((queries, k), -1, np.int64)
        self.list_of = np.zeros((queries, k), np.int32)
        self._lock = threading.Lock()

    def floor(self, rows: Rows, *, ties: bool) -> Floats:
        """Score that a new result must exceed, float32; with ``ties`` an equal score with a smaller id suffices."""
        with self._lock:
            kth: Floats = self.D[rows, -1]
        if not ties:
            return kth
        # not the smallest subnormal, which may be flushed to 0
        return np.where(kth == 0, -_TINY, np.nextafter(kth, np.float32(-np.inf)))

    def take(self, rows: Rows, scores: Floats, ids: Ids, number: int) -> None:
        """Merge results [n, any] of the queries ``rows`` from a list; missing ones are -inf and -1."""
        with self._lock:
            k = self.D.shape[1]
            own = np.arange(len(self.D))[rows]
            enters = scores >= self.D[own, -1:]
            new = enters.any(axis=1)
            if not new.any():  # the usual case
                return
            few = int(enters.sum(axis=1).max())
            own, scores, ids = own[new], scores[new, :few], ids[new, :few]
            D = np.concatenate([self.D[own], scores], axis=1)
            found = np.concatenate([self.found[own], ids], axis=1)
            order = np.lexsort((found, -D), axis=1)[:, :k]
            self.D[own] = np.take_along_axis(D, order, axis=1)
            self.found[own] = np.take_along_axis(found, order, axis=1)
            numbers = np.concatenate([self.list_of[own], np.full(scores.shape, number, np.int32)], axis=1)
            self.list_of[own] = np.take_along_axis(numbers, order, axis=1)

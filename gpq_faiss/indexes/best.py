"""Merging of partial results."""

from __future__ import annotations

import threading

import numpy as np

from ..codes.checks import Floats, Ids


class Best:
    """Best results of some queries so far. Thread-safe.

    Attributes:
        D: float32 [Q, k], descending; padded with -inf.
        found: int64 [Q, k], ties in ascending order of id; padded with -1.
    """

    def __init__(self, queries: int, k: int) -> None:
        self.D = np.full((queries, k), -np.inf, np.float32)
        self.found = np.full((queries, k), -1, np.int64)
        self._lock = threading.Lock()

    def take(self, rows: slice, scores: Floats, ids: Ids) -> None:
        """Merge results [n, any] of the queries ``rows``; missing ones are -inf and -1."""
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

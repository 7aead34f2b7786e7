"""``lsh``: signs of random projections (Charikar, STOC 2002)."""

from __future__ import annotations

import numpy as np

from gpq_faiss.data.labels import Labels
from gpq_faiss.methods.coders import BinaryMethod, Floats
from gpq_faiss.methods.registry import MethodEntry

LSH_ENTRY = MethodEntry(
    summary="locality-sensitive hashing: signs of random projections",
    citation="Charikar, STOC 2002",
    learns="unsupervised",
    code="binary",
    module="gpq_faiss_example.method",
    attribute="LSH",
)


class LSH(BinaryMethod):
    """A bit is the side of a random plane through the mean that a vector lies on."""

    name = "lsh"

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        del labels
        self.mean = x.mean(axis=0)
        self.planes = (
            np.random.default_rng(self.seed)
            .standard_normal((x.shape[1], self.bits))
            .astype(np.float32)
        )

    def _project(self, x: Floats) -> Floats:
        return (x - self.mean) @ self.planes

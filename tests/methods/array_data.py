"""Vectors around three centres, for the tests of methods that learn from a matrix of them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpq_faiss.data.labels import Labels
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.registry import make_method
from gpq_faiss.methods.uncompressed import Classifier

WIDTH, CLASSES = 20, 3


def clusters(n: int, seed: int) -> tuple[NDArray[np.float32], Labels]:
    """Vectors with correlated noise, and their classes."""
    centres = np.random.default_rng(99).standard_normal((CLASSES, WIDTH)) * 1.5
    mix = np.random.default_rng(98).standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, CLASSES, n)
    x = centres[ids] + rng.standard_normal((n, WIDTH)) @ mix
    return x.astype(np.float32), Labels.from_ids(ids, "abc")


X, Y = clusters(900, 0)
XB, YB = clusters(300, 1)
XQ, YQ = clusters(15, 2)


def quick(name: str, bits: int, seed: int = 0, steps: int = 40) -> Coder:
    """The method, with few steps where it trains a network."""
    method = make_method(name, bits, seed)
    if isinstance(method, Classifier):
        method.steps, method.batch, method.hidden = steps, 64, 64
    return method

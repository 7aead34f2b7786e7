"""Indexes on devices for tests: the same code on the CPU (asked for by name) and, marked ``gpu``, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import settings

from gpq_faiss.codes.bits import pack_codes

HAS_GPU = torch.cuda.is_available() and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=ON_GPU)])
NO_GPU = pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
FEW = settings(max_examples=25, deadline=None)

Made = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Codes, codebooks, ids in no order, queries."""


def books(rng: np.random.Generator, M: int, K: int = 16, d: int = 12) -> np.ndarray:
    Z = rng.normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def items(
    seed: int, M: int, K: int = 16, n: int = 1500, distinct: int | None = None, queries: int = 20
) -> Made:
    """Few distinct codes where asked, as training gives them."""
    rng = np.random.default_rng([seed, M, K, n])
    Z = books(rng, M, K)
    codes = pack_codes(rng.integers(0, K, (distinct or n, M)), K)
    if distinct:
        codes = codes[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]
    ids = rng.permutation(2**40 + np.arange(n) * 7)
    return codes, Z, ids, rng.normal(size=(queries, M * 12)).astype(np.float32)


def same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))

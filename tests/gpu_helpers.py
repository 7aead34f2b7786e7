"""Indexes on devices for tests: the same code on the CPU (asked for by name) and, marked ``gpu``, on a GPU."""

from __future__ import annotations

import functools
from typing import Any, Literal

import faiss
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.gpu.faiss_form import FaissLists
from gpq_faiss.gpu.index import DeviceIndex, Mode, spread
from gpq_faiss.gpu.lists import DeviceLists
from gpq_faiss.gpu.tensors import device_of

HAS_GPU = torch.cuda.is_available() and hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda:0", marks=ON_GPU)]
on_devices = pytest.mark.parametrize("device", DEVICES)
NO_GPU = pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
FEW = settings(max_examples=25, deadline=None)
MEMORY = 1 << 22


def books(rng: np.random.Generator, M: int, K: int = 16, d: int = 12) -> np.ndarray:
    Z = rng.normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def items(
    seed: int, M: int, K: int = 16, n: int = 1500, distinct: int | None = None, queries: int = 20
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Codes, codebooks, ids in no order, queries; few distinct codes where asked, as training gives them."""
    rng = np.random.default_rng([seed, M, K, n])
    Z = books(rng, M, K)
    codes = pack_codes(rng.integers(0, K, (distinct or n, M)), K)
    if distinct:
        codes = codes[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]
    ids = rng.permutation(2**40 + np.arange(n) * 7)
    return codes, Z, ids, rng.normal(size=(queries, M * 12)).astype(np.float32)


def put(
    source: Any,
    device: str,
    *,
    parts: int = 1,
    mode: Mode = "shard",
    via: Literal["torch", "faiss"] = "torch",
    memory: int = MEMORY,
    lists: int | None = None,
) -> DeviceIndex:
    """As ``to_torch``, or ``to_gpu`` with an approximate search, but on any device, and several parts on one."""
    place = DeviceLists if via == "torch" else functools.partial(FaissLists, lists=lists)
    return spread(source, [device_of(device)] * parts, mode, memory, place)


def same(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


databases = st.builds(
    items,
    seed=st.integers(0, 99),
    M=st.sampled_from([1, 3, 6, 8, 12]),
    n=st.integers(3, 1200),
    distinct=st.sampled_from([None, 1, 40]),
    queries=st.just(7),
)
"""What :func:`items` gives, of any size."""

forms = st.fixed_dictionaries(
    {
        "parts": st.integers(1, 3),
        "mode": st.sampled_from(["shard", "replica"]),
        "memory": st.sampled_from([1 << 18, 1 << 20, 1 << 26]),
    }
)
"""What :func:`put` may be told."""

"""Indexes on devices for tests: the same code on the CPU (asked for by name) and, marked ``gpu``, on a GPU."""

from __future__ import annotations

from typing import Any, Literal

import faiss
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.gpu.forms import clone_to_gpu
from gpq_faiss.gpu.index import DeviceIndex
from gpq_faiss.gpu.placing import Source, spread
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
    mode: str = "shard",
    via: Literal["auto", "faiss", "torch"] = "auto",
    group: bool | None = None,
    memory: int = MEMORY,
    lists: int | None = None,
) -> DeviceIndex:
    """As ``to_gpu`` (``auto``; ``faiss``: approximate) and ``to_torch``, but on any device, and several parts on one; on the CPU,
    Faiss' part stays as it is."""
    place = device_of(device)

    def clone(form: Any, at: Any) -> tuple[Any, Any]:
        return (form, None) if at.type == "cpu" else clone_to_gpu(form, at.index)

    return spread(
        Source.of(source, group),
        [place] * parts,
        mode,
        lists,
        memory,
        None if via == "torch" else clone,
        approximate=via == "faiss",
    )


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
        "via": st.sampled_from(["auto", "torch"]),
        "group": st.booleans(),
        "memory": st.sampled_from([1 << 18, 1 << 20, 1 << 26]),
    }
)
"""What :func:`put` may be told."""

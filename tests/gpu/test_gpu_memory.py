"""Faiss' working memory on a GPU: what is reckoned, refused and kept to, without a GPU."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
import torch
from gpu_helpers import books, items, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.gpu import calls
from gpq_faiss.gpu import memory as gpu_memory
from gpq_faiss.gpu.forms import clone_to_gpu, zero_lists
from gpq_faiss.gpu.memory import MAX_K, PIECE, FaissBudget
from gpq_faiss.gpu.placing import to_torch
from gpq_faiss.indexes.memory import MemoryIndex

budgets = st.builds(
    FaissBudget,
    memory=st.integers(1 << 16, 1 << 34),
    lists=st.integers(1, 200_000),
    nprobe=st.integers(1, 2048),
    longest=st.integers(0, 1 << 24),
    size=st.sampled_from([1, 2, 3, 4, 8, 12, 24, 48]),
    width=st.just(0),
)


def with_dims(budget: FaissBudget, dims: int) -> FaissBudget:
    """The same with sub-vectors of ``dims``; of 7 Faiss makes tables by matrix products."""
    return FaissBudget(
        budget.memory,
        budget.lists,
        min(budget.nprobe, budget.lists),
        budget.longest,
        budget.size,
        budget.size * dims,
    )


def test_the_needs_of_an_index_are_seen_in_it() -> None:
    rng = np.random.default_rng(0)
    Z, codes = books(rng, 9), rng.integers(0, 256, (1000, 5)).astype(np.uint8)
    codes[:, -1] &= 15
    flat = FaissBudget.of(zero_lists(codes, Z, lists=7), 1 << 20)
    assert flat == FaissBudget(1 << 20, lists=7, nprobe=7, longest=143, size=8, width=8 * 24)


def test_what_a_query_needs_is_the_sum_of_what_faiss_allocates() -> None:
    budget = FaissBudget(1 << 30, lists=1000, nprobe=16, longest=5000, size=8, width=8 * 24)
    # two streams: ends of lists, scores, float tables of 256, and k of each of 8 chunks with 64-bit places
    scan = 2 * (17 * 8 + 16 * 5000 * 4 + 16 * 8 * 256 * 4 + 8 * 100 * (4 + 8))
    assert budget.scan_bytes(100) == scan
    kept = 16 * (4 + 8)
    # the query once for every list, and its products with all codewords
    products = 16 * 4 * (8 * 24 + 8 * 256)
    fixed = budget.needed(100) - scan - kept - products
    assert 2 * 16384 <= fixed < 50_000
    assert budget.needed(100, 9) - budget.needed(100, 8) == scan + kept + products
    # where centroids are many and lists short, seeking the lists needs more than scanning them
    many = FaissBudget(1 << 30, lists=50_000, nprobe=1, longest=10, size=1, width=24)
    assert many.needed(1, 2) - many.needed(1, 1) == 12 + 4 + 24 + 2 * 4 * 50_000


def together(queries: int, available: int, each: int) -> int:
    """How many queries Faiss takes at once (``getIVFQueryTileSize``)."""
    within = min(max(0, available) // each, queries, 65_536)
    if within < queries and within < 8:
        return max(1, min((512 << 20) // each, queries))
    return within


def taken(budget: FaissBudget, k: int, queries: int) -> int:
    """Bytes that a call takes by Faiss' own rule, with what is set aside (all of it counts, and what does not fit)."""
    piece = budget.temporary(k)
    fixed = budget.needed(k, 0)
    kept = 12 * budget.nprobe * queries
    seek = kept + min(queries, 512) * (4 + 8 * budget.lists + 24 * budget.nprobe)
    at_once = together(queries, piece - fixed - kept, budget.scan_bytes(k))
    products = 4 * budget.nprobe * (budget.width + 256 * budget.size)
    scan = fixed + kept + at_once * (budget.scan_bytes(k) + products)
    most = max(seek, scan)
    return piece if most <= piece else piece + most


@given(
    budget=budgets,
    dims=st.sampled_from([24, 7]),
    k=st.integers(1, MAX_K),
    batch=st.integers(1, 4000),
)
def test_calls_stay_within_the_memory_where_one_query_does(
    budget: FaissBudget, dims: int, k: int, batch: int
) -> None:
    budget = with_dims(budget, dims)
    least = budget.needed(k)
    if least > budget.memory:
        assert budget.rows(k) == 1
        return
    rows = budget.rows(k)
    assert rows >= 1
    assert taken(budget, k, min(batch, rows)) <= budget.memory
    assert taken(budget, k, rows) <= budget.memory


def test_batches_are_large_where_the_memory_allows_it() -> None:
    budget = FaissBudget(1 << 30, lists=1024, nprobe=16, longest=2000, size=3, width=72)
    assert budget.rows(100) > 1024
    # Faiss would leave a piece that holds five and take 512 MiB
    few = FaissBudget(5 * budget.needed(100), 1024, 16, 2000, 3, 72)
    assert together(1024, few.memory, few.scan_bytes(100)) * few.scan_bytes(100) > 10 * few.memory
    assert few.rows(100) == 5


def test_what_is_set_aside_leaves_room_for_what_does_not_fit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, _, _ = items(0, 6, n=5000)
    form = zero_lists(codes, Z, lists=4)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    given: list[int] = []
    monkeypatch.setattr(
        faiss,
        "StandardGpuResources",
        type(
            "R", (), {"setTempMemory": lambda _, size: given.append(size), "setPinnedMemory": lambda *_: None}
        ),
    )

    def full(*_: object) -> None:
        raise RuntimeError("no card")

    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", full)
    least = FaissBudget.of(form, 1).needed(MAX_K)
    monkeypatch.setattr(gpu_memory, "PIECE", least - 1)
    for memory in (least - 1, least, least + 1000, 3 * least):
        with pytest.raises(DeviceError, match="no card"):
            clone_to_gpu(form, 0, memory)
    assert given == [least - 1, 0, 1000, least - 1]
    assert PIECE == 3 << 29


def some_items(n: int = 4000) -> tuple[MemoryIndex, np.ndarray]:
    codes, Z, ids, xq = items(6, 6, n=n, queries=40)
    return MemoryIndex.build(codes, Z, ids), xq


def needs_of(index: Any) -> FaissBudget:
    budget = index.parts[0].searcher.budget
    assert isinstance(budget, FaissBudget)
    return budget


@pytest.mark.parametrize("via", ["auto", "faiss"])
def test_faiss_gets_as_many_queries_at_once_as_fit(via: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, xq = some_items()
    asked: list[tuple[int, int]] = []
    search = calls.faiss_search

    def watched(index: Any, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((len(queries), k))
        return search(index, queries, k)

    monkeypatch.setattr(calls, "faiss_search", watched)
    whole = put(engine, "cpu", via=via, memory=1 << 28).search(xq, 20)
    assert [n for n, _ in asked] == [40]
    asked.clear()
    memory = needs_of(put(engine, "cpu", via=via)).needed(MAX_K)
    index = put(engine, "cpu", via=via, memory=memory)
    assert same(index.search(xq, 20), whole)
    assert sum(n for n, _ in asked) == 40
    assert len(asked) > 1
    budget = needs_of(index)
    assert max(n for n, _ in asked) == budget.rows(asked[0][1])
    assert all(budget.needed(k, n) <= memory for n, k in asked)


@pytest.mark.parametrize("via", ["auto", "faiss", "torch"])
def test_no_memory_at_all_is_refused(via: str) -> None:
    codes, Z, _, _ = items(1, 6, n=100)
    source = MemoryIndex.build(codes, Z)
    for memory in (0, -5):
        with pytest.raises(UsageError, match=f"memory of {memory} bytes: it must be at least 1"):
            put(source, "cpu", via=via, memory=memory)
    with pytest.raises(UsageError, match="at least 1"):
        to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=0)

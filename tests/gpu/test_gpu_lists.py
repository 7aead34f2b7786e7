"""Lists on devices: exact within the probed lists, which are the nearest that hold items, and more until k are held."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from gpu_helpers import FEW, HAS_GPU, items, on_devices, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.scores import score_codes
from gpq_faiss.faissio.storage import ivf_index
from gpq_faiss.gpu import calls
from gpq_faiss.gpu.placing import to_gpu, to_torch
from gpq_faiss.indexes.filters import Allow
from gpq_faiss.indexes.lists import IvfSettings
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.plan import Plan


def within(
    database: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    list_of: np.ndarray,
    centroids: np.ndarray,
    nprobe: int,
    k: int,
    allowed: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The k best allowed items in the lists of each query, one query at a time, by a full sort; ties by id."""
    codes, Z, ids, xq = database
    allowed = np.ones(len(ids), bool) if allowed is None else allowed
    scores = score_codes(xq, codes, Z)
    D = np.full((len(xq), k), -np.inf, np.float32)
    found = np.full((len(xq), k), -1, np.int64)
    sizes = np.bincount(list_of[allowed], minlength=len(centroids))
    wanted = min(k, int(allowed.sum()))
    for q, query in enumerate(xq.astype(np.float64)):
        nearest = [int(n) for n in np.argsort(-(centroids.astype(np.float64) @ query)) if sizes[n]]
        count = nprobe
        while count < len(nearest) and sizes[nearest[:count]].sum() < wanted:
            count += 1
        rows = np.flatnonzero(allowed & np.isin(list_of, nearest[:count]))
        best = rows[np.lexsort((ids[rows], -scores[q, rows]))][:k]
        D[q, : len(best)], found[q, : len(best)] = scores[q, best], ids[best]
    return D, found


def listed(
    database: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray], lists: int, used: int, nprobe: int
) -> tuple[Any, np.ndarray, np.ndarray]:
    """A Faiss index with random lists, of which ``used`` hold items; the list of each item, and the centroids."""
    codes, Z, ids, _ = database
    rng = np.random.default_rng([lists, used])
    centroids = rng.normal(size=(lists, Z.shape[0] * Z.shape[2])).astype(np.float32)
    centroids /= np.linalg.norm(centroids, axis=1, keepdims=True)
    list_of = rng.permutation(lists)[:used][rng.integers(0, used, len(codes))].astype(np.int32)
    index = ivf_index(codes, ids, Z, centroids, "bytes", list_of)
    index.nprobe = nprobe
    return index, list_of, centroids


@on_devices
@FEW
@given(
    seed=st.integers(0, 99),
    M=st.sampled_from([2, 3, 6]),
    n=st.integers(5, 600),
    distinct=st.sampled_from([None, 3, 40]),
    lists=st.integers(1, 40),
    used=st.integers(1, 40),
    nprobe=st.integers(1, 45),
    share=st.floats(0, 1),
    passing=st.sampled_from([None, 0.0, 0.05, 0.9]),
    via=st.sampled_from(["auto", "torch"]),
    parts=st.integers(1, 3),
    mode=st.sampled_from(["shard", "replica"]),
    memory=st.sampled_from([1 << 18, 1 << 20, 1 << 26]),
)
def test_exact_within_the_lists_that_hold_items(
    device: str,
    seed: int,
    M: int,
    n: int,
    distinct: int | None,
    lists: int,
    used: int,
    nprobe: int,
    share: float,
    passing: float | None,
    via: str,
    parts: int,
    mode: str,
    memory: int,
) -> None:
    database = items(seed, M, n=n, distinct=distinct, queries=7)
    index, list_of, centroids = listed(database, lists, min(used, lists), nprobe)
    held = put(index, device, parts=parts, mode=mode, via=via, memory=memory)
    k = max(1, int(share * n))
    allowed = None if passing is None else np.random.default_rng(seed).random(n) < passing
    where = None if allowed is None else Allow(database[2][allowed])
    expected = within(database, list_of, centroids, nprobe, k, allowed)
    assert same(held.search(database[3], k, where=where), expected)
    scaled = database[3] * np.float32(2.0**-100)  # lists are found, however short the query
    assert np.array_equal(held.search(scaled, k, where=where)[1], expected[1])


@on_devices
def test_lists_keep_their_centroids_and_probes(device: str) -> None:
    codes, Z, ids, xq = items(6, 6, n=4000, queries=40)
    flat = MemoryIndex.build(codes, Z, ids, kind="exact")
    engine = MemoryIndex.build(codes, Z, ids, kind=Plan("ivf", "bytes"), ivf=IvfSettings(lists=30, nprobe=4))
    for parts, mode in ((1, "shard"), (2, "shard"), (2, "replica")):
        index = put(engine, device, parts=parts, mode=mode)
        assert [i.nprobe for i in index.faiss_indexes] == [4] * parts
        for scale in (1.0, 1e-33, 1e28):  # lists are found although their centroids are scaled down
            scaled = (xq * scale).astype(np.float32)
            assert same(index.search(scaled, 20), engine.search(scaled, 20))
        assert index.stats() == {
            "tried": 120 * (parts if mode == "shard" else 1),
            "proven": index.stats()["proven"],
        }
        assert index.stats()["proven"] > 60
    assert same(put(engine, device, via="torch").search(xq, 20), engine.search(xq, 20))
    # FastScan shortlists by rounded tables; its lists are the same
    assert engine.ivf is not None
    fast = engine.to(Plan("ivf", "fastscan"))
    assert same(put(fast, device).search(xq, 20), engine.search(xq, 20))
    # all lists: the exact answer, also beyond what Faiss gives
    everything = engine.to("ivf", ivf=dataclasses.replace(engine.ivf, nprobe=30))
    for k in (1, 500, 2040, 2041, 4000):
        assert same(put(everything, device).search(xq, k), flat.search(xq, k))
    # more than the lists hold: more lists
    D, found = put(engine, device).search(xq, 1500)
    assert (found >= 0).all()
    assert np.isfinite(D).all()
    # every item that scores enough, wherever it lies, as the engine has it
    for where in (None, Allow(ids[::3])):
        assert same(
            put(engine, device).range_search(xq, 2.0, where=where), engine.range_search(xq, 2.0, where=where)
        )


@on_devices
def test_a_handful_of_codes_in_many_lists_is_found(device: str) -> None:
    """More lists than distinct codes: most are empty, and those nearest to a query need not hold anything."""
    database = items(9, 6, n=1000, distinct=1, queries=20)
    index, _, _ = listed(database, 31, 1, 8)
    D, found = put(index, device).search(database[3], 10)
    assert np.array_equal(found, np.tile(np.sort(database[2])[:10], (20, 1)))
    assert np.isfinite(D).all()


@pytest.mark.parametrize("lie", ["best left out", "scores off", "nothing found"])
def test_shortlists_from_lists_that_lie_are_not_believed(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = items(13, 6, n=3000)
    index, list_of, centroids = listed(database, 12, 12, 3)
    held = put(index, "cpu")
    honest = calls.faiss_search

    def lying(
        faiss_index: Any, queries: torch.Tensor, k: int, lists: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert lists is not None
        D, found = honest(faiss_index, queries, k, lists)
        if lie == "best left out":
            return D[:, [-1] * k], found[:, [-1] * k]
        if lie == "scores off":
            return D + 1, found
        return D, torch.full_like(found, -1)

    monkeypatch.setattr(calls, "faiss_search", lying)
    assert same(held.search(database[3], 20), within(database, list_of, centroids, 3, 20))
    assert held.stats() == {"tried": 20, "proven": 0}


def test_more_lists_than_faiss_looks_at_are_left_to_torch() -> None:
    database = items(14, 3, n=2500, queries=5)
    index, list_of, centroids = listed(database, 2200, 2200, 2100)
    held = put(index, "cpu", memory=1 << 26)
    assert held.faiss_indexes == []
    assert same(held.search(database[3], 10), within(database, list_of, centroids, 2100, 10))


def test_on_the_cpu_by_name() -> None:
    database = items(15, 6, n=900)
    index, list_of, centroids = listed(database, 20, 15, 4)
    expected = within(database, list_of, centroids, 4, 30)
    assert same(to_torch(index, device="cpu").search(database[3], 30), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("via", ["auto", "torch"])
@pytest.mark.parametrize("k", [10, 500, 3000])
def test_lists_by_the_front_door_of_a_gpu(via: str, k: int) -> None:
    database = items(16, 6, n=30_000, queries=300)
    index, list_of, centroids = listed(database, 200, 180, 8)
    held = to_gpu(index) if via == "auto" else to_torch(index, device="cuda:0")
    assert bool(held.faiss_indexes) == (via == "auto")
    assert same(held.search(database[3], k), within(database, list_of, centroids, 8, k))

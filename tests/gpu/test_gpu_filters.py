"""Filters on devices: the answers of a brute-force ranking and of the CPU's engines, ties in the order of ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gpu_helpers import FEW, HAS_GPU, databases, forms, items, on_devices, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.gpu import index as device_index
from gpq_faiss.gpu.placing import to_gpu, to_torch
from gpq_faiss.indexes.filters import Allow, Bitmap, Deny
from gpq_faiss.indexes.memory import MemoryIndex


def ranking(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, allowed: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The k best allowed items by a full sort, equal scores by id; -inf and -1 beyond them."""
    scores = score_codes(xq, codes[allowed], Z)
    own = ids[allowed]
    n = min(k, len(own))
    order = np.lexsort((np.broadcast_to(own, scores.shape), -scores), axis=1)[:, :n]
    D = np.full((len(xq), k), -np.inf, np.float32)
    found = np.full((len(xq), k), -1, np.int64)
    D[:, :n], found[:, :n] = np.take_along_axis(scores, order, axis=1), own[order]
    return D, found


def within(
    xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, allowed: np.ndarray, least: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All allowed items that score at least ``least``, cut from the full ranking."""
    D, found = ranking(xq, codes, Z, ids, allowed, max(1, int(allowed.sum())))
    there = least <= D
    lims = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
    return lims, D[there], found[there]


@on_devices
@FEW
@given(
    database=databases,
    form=forms,
    share=st.floats(0, 1),
    passing=st.sampled_from([0.0, 0.01, 0.3, 0.6, 0.95, 1.0]),
    clustered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_way_gives_the_ranking_of_what_passes(
    device: str,
    database: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    form: dict[str, Any],
    share: float,
    passing: float,
    clustered: bool,
    seed: int,
) -> None:
    codes, Z, ids, xq = database
    n = len(ids)
    index = put(MemoryIndex.build(codes, Z, ids), device, **form)
    k = max(1, int(share * n))
    # clustered: some shards may hold nothing that passes
    draws = np.argsort(np.argsort(ids)) / n if clustered else np.random.default_rng(seed).random(n)
    allowed = draws < passing
    where = Allow(ids[allowed])
    expected = ranking(xq, codes, Z, ids, allowed, k)
    assert same(index.search(xq, k, where=where), expected)
    assert same(index.search(xq, k, where=where), expected)  # what was kept of the first search
    whole = index.search(xq, k)
    assert same(whole, ranking(xq, codes, Z, ids, np.ones(n, bool), k))
    least = float(np.median(whole[0]))
    assert same(index.range_search(xq, least, where=where), within(xq, codes, Z, ids, allowed, least))


def bits_of(ids: np.ndarray, size: int) -> np.ndarray:
    bits = np.zeros(size, np.bool_)
    bits[ids] = True
    return bits


@on_devices
@pytest.mark.parametrize("group", [False, True])
def test_every_form_of_a_filter_as_on_the_cpu(device: str, group: bool) -> None:
    codes, Z, _, xq = items(1, 6, n=1000, distinct=80)
    ids = np.random.default_rng(0).permutation(3000)[:1000]
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, device, parts=2, group=group)
    some = ids[::3]
    ways: list[tuple[Any, Callable[[np.ndarray], np.ndarray]]] = [
        (Allow(some), lambda i: np.isin(i, some)),
        (Allow([*some.tolist(), -5, 10**15]), lambda i: np.isin(i, some)),  # ids of nobody are ignored
        (Deny(some), lambda i: ~np.isin(i, some)),
        (Bitmap(bits_of(some, 1500 * 2)), lambda i: np.isin(i, some)),
        (
            Bitmap(np.packbits(bits_of(some[some < 800], 800), bitorder="little")),
            lambda i: np.isin(i, some) & (i < 800),
        ),
        (lambda i: i % 7 == 2, lambda i: i % 7 == 2),
        (lambda i: (i[::-1] % 7 == 2)[::-1], lambda i: i % 7 == 2),
        (some, lambda i: np.isin(i, some)),
        (some.tolist(), lambda i: np.isin(i, some)),
        (Allow([]), lambda i: np.zeros(len(i), bool)),
        (Deny([]), lambda i: np.ones(len(i), bool)),
    ]
    for where, passes in ways:
        expected = ranking(xq, codes, Z, ids, passes(ids), 40)
        assert same(index.search(xq, 40, where=where), expected)
        assert same(engine.search(xq, 40, where=where), expected)
        assert same(index.range_search(xq, 1.5, where=where), engine.range_search(xq, 1.5, where=where))


@on_devices
def test_positions_serve_as_ids_and_tensors_stay_where_they_are(device: str) -> None:
    codes, Z, _, xq = items(2, 5, distinct=300)
    index = to_torch(MemoryIndex.build(codes, Z), device=device)
    allowed = np.arange(1500) % 5 != 0
    expected = ranking(xq, codes, Z, np.arange(1500), allowed, 1300)
    queries = torch.from_numpy(xq).to(device)
    D, found = index.search(queries, 1300, where=Deny(np.arange(0, 1500, 5)))
    assert D.device == found.device == index.device
    assert same((D.cpu().numpy(), found.cpu().numpy()), expected)
    assert (expected[1] == -1).any()
    lims, D, found = index.range_search(queries, 1.0, where=Allow([]))
    assert lims.tolist() == [0] * 21
    assert len(D) == len(found) == 0


def test_shortlists_serve_where_most_items_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Faiss shortlisted of all is enough then; torch scores everything only for queries where it is not."""
    codes, Z, ids, xq = items(3, 6, n=3000, queries=30)
    index = put(MemoryIndex.build(codes, Z, ids), "cpu", via="auto")
    scored: list[int] = []
    whole = device_index.Scan.search_keys

    def watched(self: Any, queries: torch.Tensor, k: int) -> torch.Tensor:
        scored.append(len(queries))
        return whole(self, queries, k)

    monkeypatch.setattr(device_index.Scan, "search_keys", watched)
    few = ids[::50]
    allowed = ~np.isin(ids, few)
    assert same(index.search(xq, 50, where=Deny(few)), ranking(xq, codes, Z, ids, allowed, 50))
    assert index.stats()["tried"] == 30
    assert sum(scored) < 30
    # denying the very best of one query leaves too few of its shortlists
    best = index.search(xq[:1], 60)[1][0]
    tried, scored[:] = index.stats()["tried"], []
    assert same(index.search(xq, 50, where=Deny(best)), ranking(xq, codes, Z, ids, ~np.isin(ids, best), 50))
    assert index.stats()["tried"] == tried + 30
    assert 1 <= sum(scored) < 30
    # and where few pass, nothing is shortlisted
    tried = index.stats()["tried"]
    assert same(index.search(xq, 50, where=Allow(few)), ranking(xq, codes, Z, ids, ~allowed, 50))
    assert index.stats()["tried"] == tried


def test_what_passes_is_settled_once_for_searches_with_one_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = items(4, 6, n=500, distinct=50)
    index = put(MemoryIndex.build(codes, Z, ids), "cpu", group=True, parts=2)
    made: list[int] = []
    restricted = device_index.Part.restricted

    def watched(self: Any, mask: np.ndarray) -> Any:
        made.append(int(mask.sum()))
        return restricted(self, mask)

    monkeypatch.setattr(device_index.Part, "restricted", watched)
    seen = set(ids[:100].tolist())
    first = index.search(xq, 9, where=list(seen))
    assert same(first, index.search(xq, 9, where=Allow(ids[:100])))
    assert sum(made) == 100
    assert len(made) == 2
    # a predicate whose answer has changed is believed
    asked = lambda i: np.isin(i, list(seen))  # noqa: E731
    seen -= set(first[1][0].tolist())
    again = index.search(xq, 9, where=asked)
    assert not np.isin(again[1], first[1][0]).any()
    assert sum(made) == 100 + len(seen)


@on_devices
def test_ids_are_kept_where_filters_look(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are copied once, and neither their owner nor a filter function can change them."""
    codes, Z, _, xq = items(9, 6, n=600)
    ids = np.arange(600, dtype=np.int64) * 3
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, device, parts=2)
    looked: list[Any] = []
    mask_of = device_index.mask_of

    def watched(where: Any, names: Any) -> np.ndarray:
        looked.append(names.own)
        return mask_of(where, names)

    monkeypatch.setattr(device_index, "mask_of", watched)
    own = ids.copy()
    expected = ranking(xq, codes, Z, own, own % 2 == 0, 30)
    ids[:] = 7  # the caller's array

    def even(i: np.ndarray) -> np.ndarray:
        passes = i % 2 == 0
        i[:] = 0
        return passes

    for where in (Allow(own[::2]), even, even):
        assert same(index.search(xq, 30, where=where), expected)
    assert looked[0] is looked[1] is looked[2]


@on_devices
def test_filters_follow_a_source_that_changes(device: str) -> None:
    """What is on a device is a snapshot; what is put there after a change has the ids of then."""
    codes, Z, ids, xq = items(10, 6, n=600)
    engine = MemoryIndex.build(codes[:300], Z, ids[:300])
    before = put(engine, device)
    where = Deny(ids[::4])
    first = before.search(xq, 20, where=where)
    changes: list[Callable[[], Any]] = [
        lambda: engine.add(codes[300:400], ids[300:400]),
        lambda: engine.remove(ids[1:300:2]),
        lambda: engine.merge(MemoryIndex.build(codes[400:], Z, ids[400:])),
    ]
    for change in changes:
        change()
        now = put(engine, device)
        for filter_ in (where, Allow(ids[200:500]), lambda i: i % 5 != 0):
            assert same(now.search(xq, 20, where=filter_), engine.search(xq, 20, where=filter_))
        assert same(before.search(xq, 20, where=where), first)


def test_memory_bounds_the_blocks_of_a_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    from gpq_faiss.gpu import scan

    codes, Z, _, xq = items(6, 6, n=5000, queries=50)
    index = to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=1 << 17)
    seen: list[tuple[int, int]] = []
    score = scan.score_columns

    def watched(tables: torch.Tensor, columns: torch.Tensor, *, paired: bool) -> torch.Tensor:
        seen.append((len(tables), columns.shape[1]))
        return score(tables, columns, paired=paired)

    monkeypatch.setattr(scan, "score_columns", watched)
    allowed = np.random.default_rng(0).random(5000) < 0.4
    index.search(xq, 20, where=lambda _: allowed)
    assert sum(rows * columns for rows, columns in seen) == 50 * int(allowed.sum())  # and no other is scored
    assert max(rows * (columns + 20) for rows, columns in seen) * 80 <= 1 << 17


def test_what_is_no_filter_is_refused() -> None:
    codes, Z, ids, xq = items(7, 6, n=300)
    index = to_torch(MemoryIndex.build(codes, Z, ids), device="cpu")
    for search in (
        lambda where: index.search(xq, 5, where=where),
        lambda where: index.range_search(xq, 5, where=where),
    ):
        with pytest.raises(UsageError, match="where = str"):
            search("ids")
        with pytest.raises(DataError, match="expected a list of ids"):
            search(Allow(np.ones((2, 2), np.int64)))
        with pytest.raises(DataError, match=r"expected bool \(300,\)"):
            search(lambda i: i[:5] > 0)
    alone = put(MemoryIndex.build(codes, Z, ids), "cpu", via="faiss")
    with pytest.raises(UsageError, match="a filter needs exact scores: create the index with"):
        alone.search(xq, 5, where=Allow(ids))


@pytest.mark.parametrize("limit", [10, 100])
def test_a_range_of_many_items_a_code_is_refused_before_it_is_expanded(limit: int) -> None:
    codes, Z, ids, xq = items(8, 6, n=2000, distinct=3)
    index = put(MemoryIndex.build(codes, Z, ids), "cpu", group=True)
    with pytest.raises(DataError, match=f"more than {limit} results"):
        index.range_search(xq, -100.0, limit=limit)


# Only on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("M", [3, 6, 8, 12])
@pytest.mark.parametrize("via", ["auto", "torch"])
def test_filters_by_the_front_door_equal_the_cpu(M: int, via: str) -> None:
    codes, Z, ids, xq = items(20, M, n=50_000, distinct=20_000)
    for group in (False, True):
        engine = MemoryIndex.build(codes, Z, ids)
        index = (
            to_gpu(engine, group=group) if via == "auto" else to_torch(engine, device="cuda:0", group=group)
        )
        for where in (Deny(ids[::100]), Allow(ids[::100]), lambda i: i % 3 == 0):
            for k in (10, 1000, 5000):
                assert same(index.search(xq, k, where=where), engine.search(xq, k, where=where))
            assert same(index.range_search(xq, 2.0, where=where), engine.range_search(xq, 2.0, where=where))


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="no second GPU")
@pytest.mark.parametrize("mode", ["shard", "replica"])
def test_filters_on_two_gpus(mode: str) -> None:
    codes, Z, ids, xq = items(21, 6, n=20_000)
    engine = MemoryIndex.build(codes, Z, ids)
    index = to_gpu(engine, devices=[0, 1], mode=mode)
    low = np.sort(ids)[:5000]  # all on the first, as a shard
    for where in (Allow(low), Deny(low)):
        assert same(index.search(xq, 100, where=where), engine.search(xq, 100, where=where))

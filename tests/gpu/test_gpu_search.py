"""Search on devices: the answers of a brute-force ranking and of the CPU's index, whatever parts, memory, filter and k.

The same code runs on the CPU (asked for by name) and, marked ``gpu``, on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from gpu_helpers import FEW, HAS_GPU, NO_GPU, ON_GPU, books, databases, forms, items, on_devices, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.scores import score_codes, score_tables
from gpq_faiss.errors import DataError, DeviceError, UsageError
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.gpu import index as device_index
from gpq_faiss.gpu import lists
from gpq_faiss.gpu.index import to_gpu, to_torch
from gpq_faiss.gpu.ranking import rank_on_device
from gpq_faiss.gpu.tensors import device_of
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex

Made = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def ranking(made: Made, allowed: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best allowed items by a full sort, equal scores by id; -inf and -1 beyond them."""
    codes, Z, ids, xq = made
    scores = score_codes(xq, codes[allowed], Z)
    own = ids[allowed]
    n = min(k, len(own))
    order = np.lexsort((np.broadcast_to(own, scores.shape), -scores), axis=1)[:, :n]
    D = np.full((len(xq), k), -np.inf, np.float32)
    found = np.full((len(xq), k), -1, np.int64)
    D[:, :n], found[:, :n] = np.take_along_axis(scores, order, axis=1), own[order]
    return D, found


def within(made: Made, allowed: np.ndarray, least: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All allowed items that score at least ``least``, cut from the full ranking."""
    D, found = ranking(made, allowed, max(1, int(allowed.sum())))
    there = least <= D
    lims = np.concatenate([[0], np.cumsum(there.sum(axis=1))]).astype(np.int64)
    return lims, D[there], found[there]


# Answers -------------------------------------------------------------------------------------------------------------


@on_devices
@FEW
@given(
    made=databases,
    form=forms,
    share=st.floats(0, 1),
    passing=st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]),
    clustered=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_way_gives_the_ranking_of_what_passes(
    device: str,
    made: Made,
    form: dict[str, Any],
    share: float,
    passing: float,
    clustered: bool,
    seed: int,
) -> None:
    codes, Z, ids, xq = made
    n = len(ids)
    index = put(MemoryIndex.build(codes, Z, ids), device, **form)
    assert index.ntotal == n
    k = max(1, int(share * n))
    # clustered: some shards may hold nothing that passes
    draws = np.argsort(np.argsort(ids)) / n if clustered else np.random.default_rng(seed).random(n)
    allowed = draws < passing
    where = Allow(ids[allowed])
    for _ in range(2):  # the second time with what was kept of the first
        assert same(index.search(xq, k, where=where), ranking(made, allowed, k))
    whole = index.search(xq, k)
    assert same(whole, ranking(made, np.ones(n, bool), k))
    least = float(np.median(whole[0]))
    assert same(index.range_search(xq, least, where=where), within(made, allowed, least))
    assert same(index.range_search(xq, least), within(made, np.ones(n, bool), least))


@on_devices
@pytest.mark.parametrize(
    ("M", "K", "n", "distinct"),
    [
        (4, 4, 9000, None),
        (5, 8, 9000, None),
        (3, 32, 1500, None),
        (2, 64, 9000, 50),
        (3, 256, 1500, None),
        (50, 256, 1500, None),
        (3, 16, 20_000, None),
        (12, 16, 20_000, 3000),
    ],
)
def test_codebooks_of_any_size_with_lists_of_several(
    device: str, M: int, K: int, n: int, distinct: int | None
) -> None:
    codes, Z, ids, xq = made = items(1, M, K, n, distinct, queries=5)
    index = to_torch(MemoryIndex.build(codes, Z, ids), device=device)
    for k in (1, 50, 1500):
        assert same(index.search(xq, k), ranking(made, np.ones(n, bool), k))
    assert same(index.range_search(xq, 1.0), within(made, np.ones(n, bool), 1.0))


def test_lists_that_cannot_hold_a_result_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = made = items(2, 6, n=20_000, queries=6)
    xq[:, 24:] *= np.float32(0.1)  # the first codebooks decide, as those of a trained model
    index = put(MemoryIndex.build(codes, Z, ids), "cpu", memory=1 << 26)
    read: list[int] = []
    found = lists.DeviceLists._items

    def watched(*args: Any) -> Any:
        for part in found(*args):
            read.append(len(part[0]))
            yield part

    monkeypatch.setattr(lists.DeviceLists, "_items", watched)
    assert same(index.search(xq, 10), ranking(made, np.ones(20_000, bool), 10))
    assert sum(read) < 6 * 20_000 / 5
    read.clear()
    least = float(index.search(xq, 10)[0][:, -1].max())
    read.clear()
    assert same(index.range_search(xq, least), within(made, np.ones(20_000, bool), least))
    assert sum(read) < 6 * 20_000 / 5


@on_devices
def test_tensors_in_tensors_out(device: str) -> None:
    codes, Z, ids, xq = items(3, 8, distinct=200)
    engine = MemoryIndex.build(codes, Z, ids)
    queries = torch.from_numpy(xq).to(device)
    for index in (put(engine, device), put(engine, device, parts=2), put(engine, device, via="faiss")):
        D, found = index.search(queries, 30)
        assert D.device == found.device == index.device
        assert (D.dtype, found.dtype) == (torch.float32, torch.int64)
        assert same((D.cpu().numpy(), found.cpu().numpy()), index.search(xq, 30))
    exact = put(engine, device)
    whole = torch.cat([queries, queries], dim=1)[:, : xq.shape[1]]  # not contiguous
    assert torch.equal(exact.search(whole.double(), 9)[1], exact.search(queries, 9)[1])
    xq.setflags(write=False)
    assert same(exact.search(xq, 30), engine.search(xq, 30))
    lims, _, at = exact.range_search(queries, 1.0)
    assert same((lims.cpu().numpy(), at.cpu().numpy()), engine.range_search(xq, 1.0)[::2])
    bare = to_torch(MemoryIndex.build(codes, Z), device=device)  # row numbers serve as ids
    allowed = np.arange(1500) % 5 != 0
    expected = ranking((codes, Z, np.arange(1500), xq), allowed, 1300)
    D, found = bare.search(queries, 1300, where=Deny(np.arange(0, 1500, 5)))
    assert same((D.cpu().numpy(), found.cpu().numpy()), expected)
    assert (expected[1] == -1).any()
    lims, D, found = bare.range_search(queries, 1.0, where=Allow([]))
    assert lims.tolist() == [0] * 21
    assert len(D) == len(found) == 0


@on_devices
def test_every_form_of_index(device: str) -> None:
    codes, Z, ids, xq = items(7, 6, distinct=150)
    exact = MemoryIndex.build(codes, Z, ids)
    for form in FORMS:
        assert same(put(exact.to_faiss(form), device).search(xq, 25), exact.search(xq, 25))
    bare = inject(Z)
    bare.add_sa_codes(codes)
    assert same(put(bare, device).search(xq, 9), MemoryIndex.build(codes, Z).search(xq, 9))


def test_blocks_do_not_matter_when_later_codes_are_better() -> None:
    """Ascending scores make every later block replace the best; descending ones never do."""
    Z = books(np.random.default_rng(0), 1, 256)
    query = np.ones((1, 12), np.float32)
    order = np.argsort(score_tables(query, Z)[0, 0], kind="stable").astype(np.uint8)
    for codes in (np.repeat(order, 40)[:, None], np.repeat(order[::-1], 40)[:, None]):
        engine = MemoryIndex.build(codes, Z)
        index = to_torch(engine, device="cpu", memory=80 * 1500)
        for k in (1, 60, 700):
            assert same(index.search(query, k), engine.search(query, k))


@pytest.mark.parametrize("memory", [1 << 17, 1 << 20, 1 << 23])
@pytest.mark.parametrize("k", [1, 100, 1500])
def test_memory_bounds_the_blocks(memory: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = items(14, 6, n=5000, queries=60)
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, "cpu", memory=memory)
    seen: list[tuple[int, int]] = []
    joined = lists.merged

    def watched(best: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        seen.append((len(best), len(keys)))
        return joined(best, rows, keys)

    monkeypatch.setattr(lists, "merged", watched)
    allowed = np.random.default_rng(0).random(5000) < 0.4
    for where in (None, Allow(ids[allowed])):
        seen.clear()
        assert same(index.search(xq, k, where=where), engine.search(xq, k, where=where))
        assert all((rows * k + read) * lists._CELL <= memory for rows, read in seen)
        if memory == 1 << 23:
            assert max(rows for rows, _ in seen) > 1  # and what is allowed is used


# Filters -------------------------------------------------------------------------------------------------------------


@on_devices
def test_every_form_of_a_filter_as_on_the_cpu(device: str) -> None:
    codes, Z, _, xq = items(1, 6, n=1000, distinct=80)
    ids = np.random.default_rng(0).permutation(3000)[:1000]
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, device, parts=2)
    some = ids[::3]
    ways: list[tuple[Any, Callable[[np.ndarray], np.ndarray]]] = [
        (Allow([*some.tolist(), -5, 10**15]), lambda i: np.isin(i, some)),  # ids of nobody are ignored
        (Deny(some), lambda i: ~np.isin(i, some)),
        (lambda i: (i[::-1] % 7 == 2)[::-1], lambda i: i % 7 == 2),
        (some, lambda i: np.isin(i, some)),
        (some.tolist(), lambda i: np.isin(i, some)),
        (Deny([]), lambda i: np.ones(len(i), bool)),
    ]
    for where, passes in ways:
        expected = ranking((codes, Z, ids, xq), passes(ids), 40)
        assert same(index.search(xq, 40, where=where), expected)
        assert same(engine.search(xq, 40, where=where), expected)
        assert same(index.range_search(xq, 1.5, where=where), engine.range_search(xq, 1.5, where=where))


def test_what_passes_is_settled_once_for_searches_with_one_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = items(4, 6, n=500, distinct=50)
    index = put(MemoryIndex.build(codes, Z, ids), "cpu", parts=2)
    made: list[int] = []
    restricted = lists.DeviceLists.restricted

    def watched(self: Any, mask: torch.Tensor) -> Any:
        part = restricted(self, mask)
        made.append(len(part))
        return part

    monkeypatch.setattr(lists.DeviceLists, "restricted", watched)
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
def test_an_index_on_a_device_is_a_snapshot(device: str) -> None:
    """Neither the owner of the ids, nor a filter function, nor a change of the source can alter it."""
    codes, Z, _, xq = items(10, 6, n=600)
    ids = np.arange(600, dtype=np.int64) * 3
    own = ids.copy()
    engine = MemoryIndex.build(codes[:300], Z, ids[:300])
    before = put(engine, device, parts=2)
    expected = ranking((codes[:300], Z, own[:300], xq), own[:300] % 2 == 0, 30)
    ids[:] = 7  # the caller's array

    def even(i: np.ndarray) -> np.ndarray:
        passes = i % 2 == 0
        i[:] = 0
        return passes

    changes: list[Callable[[], Any]] = [
        lambda: engine.add(codes[300:400], own[300:400]),
        lambda: engine.remove(own[1:300:2]),
        lambda: engine.merge(MemoryIndex.build(codes[400:], Z, own[400:])),
    ]
    for change in changes:
        for where in (Allow(own[::2]), even, even):
            assert same(before.search(xq, 30, where=where), expected)
        change()
        now = put(engine, device)
        for filter_ in (Deny(own[::4]), lambda i: i % 5 != 0):
            assert same(now.search(xq, 20, where=filter_), engine.search(xq, 20, where=filter_))


# What is refused -----------------------------------------------------------------------------------------------------


def test_unfit_queries_and_arguments_are_one_line_errors() -> None:
    codes, Z, ids, xq = items(11, 6, n=300)
    index = to_torch(MemoryIndex.build(codes, Z, ids), device="cpu", memory=1 << 20)
    for k in (0, -1, 301, True, 2.0):
        with pytest.raises(UsageError, match="k = "):
            index.search(xq, k)
    nan = xq.copy()
    nan[3, 1] = np.nan
    huge = xq / np.abs(xq).max() * np.float32(3e38)
    for as_given in (np.asarray, torch.from_numpy):
        for x, match in (
            (xq[:0], "empty"),
            (xq[:, 1:], "71 dimensions, expected 72"),
            (xq[0], r"two dimensions \[n, 72\]"),
            (nan, "NaN or infinity in row 3"),
            (huge, "too large for float32 scores in rows? "),
            (xq.astype(np.complex64), "dtype"),
        ):
            with pytest.raises(DataError, match=match):
                index.search(as_given(x), 5)
    with pytest.raises(UsageError, match="queries are on meta, the index on cpu"):
        index.search(torch.empty((2, 72), device="meta"), 5)
    with pytest.raises(DataError, match="more than 50 results"):
        index.range_search(xq, -100.0, limit=50)
    with pytest.raises(DataError, match="more than 500 results"):
        put(MemoryIndex.build(codes, Z), "cpu", parts=2).range_search(xq[:2], -100.0, limit=500)
    with pytest.raises(UsageError, match="NaN"):
        index.range_search(xq, float("nan"))
    for search in (index.search, index.range_search):
        with pytest.raises(UsageError, match="where = str"):
            search(xq, 5, where="ids")
        with pytest.raises(DataError, match="expected a list of ids"):
            search(xq, 5, where=Allow(np.ones((2, 2), np.int64)))
        with pytest.raises(DataError, match=r"expected bool \(300,\)"):
            search(xq, 5, where=lambda i: i[:5] > 0)
    with pytest.raises(UsageError, match="raise memory"):
        to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=1000).search(xq, 200)
    for via in ("torch", "faiss"):
        with pytest.raises(UsageError, match="memory of -5 bytes: it must be at least 1"):
            put(MemoryIndex.build(codes, Z), "cpu", via=via, memory=-5)


def test_unfit_sources_and_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="empty"):
        to_torch(inject(books(np.random.default_rng(0), 3)), device="cpu")
    with pytest.raises(DataError, match="not the product-quantised codes"):
        to_torch(faiss.IndexFlatIP(12), device="cpu")
    codes, Z, _, _ = items(12, 3, n=2)
    source = MemoryIndex.build(codes, Z)
    with pytest.raises(UsageError, match="2 items cannot be split over 3 devices"):
        put(source, "cpu", parts=3)
    monkeypatch.setattr(device_index, "MAX_ROWS", 1)  # what a key can tell apart
    with pytest.raises(DataError, match="2 items: at most 1 over all devices"):
        put(source, "cpu")
    with pytest.raises(UsageError, match="choose shard or replica"):
        to_torch(source, device="cpu", mode="both")
    with pytest.raises(UsageError, match="choose exact or approximate"):
        to_gpu(source, search="ivf")
    for devices in ([], [0, 0]):
        with pytest.raises(UsageError, match="name at least one GPU, each once"):
            to_gpu(source, devices=devices)
    for device in ("gpu", "mps", "cuda:x"):
        with pytest.raises(UsageError, match="use cpu, cuda, cuda:N"):
            device_of(device)


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "cuda:7", 7])
def test_a_missing_gpu_is_an_error(device: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, _, xq = items(13, 3, n=20)
    source = MemoryIndex.build(codes, Z)
    calls: list[Callable[[], Any]] = [
        lambda: to_torch(source, device=device),
        lambda: rank_on_device(score_tables(xq, Z), codes, xq > 0, codes > 0, device=device),
    ]
    if isinstance(device, int):
        calls.append(lambda: to_gpu(source, device=device))
        calls.append(lambda: to_gpu(source, devices=[device, 1], mode="replica"))
        with pytest.raises(DeviceError, match=f"GPU {device} was requested, but this machine has none"):
            to_gpu(source, device=device, search="approximate")
    for call in calls:
        with pytest.raises(DeviceError, match="torch sees no GPU here"):
            call()
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(DeviceError, match="install faiss-gpu"):
        to_gpu(source, search="approximate")


# Only on a GPU -------------------------------------------------------------------------------------------------------

only_on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=ON_GPU)])
two_gpus = pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="no second GPU")


@only_on_gpu
@pytest.mark.parametrize("M", [3, 6, 8, 12])
def test_a_gpu_by_its_front_door(device: str, M: int) -> None:
    codes, Z, ids, xq = items(20, M, n=50_000, distinct=20_000)
    engine = MemoryIndex.build(codes, Z, ids)
    index = to_gpu(engine)
    assert index.device == torch.device(device)
    for where in (None, Deny(ids[::100]), Allow(ids[::100]), lambda i: i % 3 == 0):
        for k in (10, 1000, 5000):
            assert same(index.search(xq, k, where=where), engine.search(xq, k, where=where))
        assert same(index.range_search(xq, 2.0, where=where), engine.range_search(xq, 2.0, where=where))


@only_on_gpu
@pytest.mark.parametrize("k", [10, 5000, 1_000_000])
def test_memory_is_kept_on_a_gpu(device: str, k: int) -> None:
    codes, Z, _, xq = items(22, 6, n=1_000_000, queries=256)
    index = to_torch(MemoryIndex.build(codes, Z), device=device, memory=1 << 28)
    queries = torch.from_numpy(xq).cuda()[: 256 if k < 1_000_000 else 2]
    index.search(queries[:1], 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    D, found = index.search(queries, k)
    # twice: keys become scores and ids while the next are sought
    assert torch.cuda.max_memory_allocated() - before <= 2 * (1 << 28) + D.nbytes + found.nbytes


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("mode", ["shard", "replica"])
def test_two_gpus(mode: Any) -> None:
    codes, Z, ids, xq = items(21, 6, n=20_000)
    engine = MemoryIndex.build(codes, Z, ids)
    index = to_gpu(engine, devices=[0, 1], mode=mode)
    assert [part.device.index for part in index.parts] == [0, 1]
    low = np.sort(ids)[:5000]  # all on the first, as a shard
    for where in (None, Allow(low), Deny(low)):
        for k in (10, 5000, 20_000):
            assert same(index.search(xq, k, where=where), engine.search(xq, k, where=where))
    there = torch.from_numpy(xq).cuda(0)
    assert same(tuple(t.cpu().numpy() for t in index.search(there, 10)), engine.search(xq, 10))
    faiss_alone = to_gpu(engine, devices=[0, 1], mode=mode, search="approximate")
    assert [i.getDevice() for i in faiss_alone.faiss_indexes] == [0, 1]

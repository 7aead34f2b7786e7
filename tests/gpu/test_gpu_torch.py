"""Search on devices: the same code on the CPU (asked for by name) and, marked ``gpu``, on a GPU."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
import torch
from gpu_helpers import FEW, HAS_GPU, NO_GPU, books, databases, forms, items, on_devices, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.scores import score_codes, score_tables
from gpq_faiss.errors import DataError, DeviceError, UsageError
from gpq_faiss.faissio.storage import FORMS
from gpq_faiss.gpu import calls, scan
from gpq_faiss.gpu.forms import scan_bytes
from gpq_faiss.gpu.index import DeviceIndex, Part
from gpq_faiss.gpu.placing import to_gpu, to_torch
from gpq_faiss.gpu.ranking import rank_on_device
from gpq_faiss.gpu.tensors import device_of
from gpq_faiss.indexes.memory import MemoryIndex

# Search --------------------------------------------------------------------------------------------------------------


@on_devices
@FEW
@given(database=databases, form=forms, share=st.floats(0, 1))
def test_any_way_gives_the_answer_of_the_exact_engine(
    device: str,
    database: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray],
    form: dict[str, Any],
    share: float,
) -> None:
    codes, Z, ids, xq = database
    n = len(ids)
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, device, **form)
    assert index.ntotal == n
    k = max(1, int(share * n))
    assert same(index.search(xq, k), engine.search(xq, k))


@on_devices
@pytest.mark.parametrize(("M", "K"), [(4, 4), (5, 8), (3, 32), (2, 64), (3, 256), (50, 256)])
def test_other_codebook_sizes(device: str, M: int, K: int) -> None:
    codes, Z, ids, xq = items(1, M, K)
    engine = MemoryIndex.build(codes, Z, ids)
    for k in (1, 50, 1500):
        assert same(to_torch(engine, device=device).search(xq, k), engine.search(xq, k))


@on_devices
def test_more_than_faiss_gives_and_whole_rankings(device: str) -> None:
    codes, Z, ids, xq = items(2, 6, n=6000, distinct=3000, queries=5)
    engine = MemoryIndex.build(codes, Z, ids)
    for group in (False, True):
        index = put(engine, device, group=group, lists=3)
        for k in (100, 2048, 2049, 5000, 6000):
            D, found = index.search(xq, k)
            assert same((D, found), engine.search(xq, k))
        scores = score_codes(xq, codes, Z)
        assert (np.sort(found, axis=1) == np.sort(ids)).all()
        assert np.array_equal(D, -np.sort(-scores, axis=1))


@on_devices
def test_tensors_in_tensors_out(device: str) -> None:
    codes, Z, ids, xq = items(3, 8, distinct=200)
    engine = MemoryIndex.build(codes, Z, ids)
    for index in (put(engine, device), put(engine, device, parts=2), put(engine, device, via="faiss")):
        queries = torch.from_numpy(xq).to(device)
        D, found = index.search(queries, 30)
        assert D.device == found.device == index.device
        assert (D.dtype, found.dtype) == (torch.float32, torch.int64)
        assert same((D.cpu().numpy(), found.cpu().numpy()), index.search(xq, 30))
    whole = torch.from_numpy(np.concatenate([xq, xq], axis=1)).to(device)[:, : xq.shape[1]]  # not contiguous
    assert torch.equal(put(engine, device).search(whole.double(), 9)[1], found[:, :9]) or group_ties(D)
    xq.setflags(write=False)
    assert same(index.search(xq, 30), (D.cpu().numpy(), found.cpu().numpy()))
    lims, _, at = put(engine, device).range_search(queries, 1.0)
    assert same((lims.cpu().numpy(), at.cpu().numpy()), engine.range_search(xq, 1.0)[::2])


def group_ties(D: torch.Tensor) -> bool:
    """Whether a place is tied, so that Faiss alone may answer otherwise."""
    return bool((D[:, 1:] == D[:, :-1]).any())


@on_devices
def test_faiss_alone_is_right_up_to_rounding_and_ties(device: str) -> None:
    codes, Z, ids, xq = items(4, 5, n=3000)
    engine = MemoryIndex.build(codes, Z, ids)
    scores = dict(zip(ids.tolist(), score_codes(xq, codes, Z).T, strict=True))
    for parts, mode in ((1, "shard"), (2, "shard"), (2, "replica")):
        index = put(engine, device, via="faiss", parts=parts, mode=mode, lists=4)
        D, found = index.search(xq, 64)
        assert np.abs(D - engine.search(xq, 64)[0]).max() < 1e-4
        own = np.array([[scores[i][q] for i in row] for q, row in enumerate(found.tolist())])
        assert np.abs(own - D).max() < 1e-4
        assert len(index.faiss_indexes) == parts
        if len(index.parts[0].searcher) > 2048:
            with pytest.raises(UsageError, match="at most 2048"):
                index.search(xq, 2049)
        with pytest.raises(UsageError, match="exact scores"):
            index.range_search(xq, 0.0)


@on_devices
@pytest.mark.parametrize("distinct", [None, 60])
def test_range_search(device: str, distinct: int | None) -> None:
    codes, Z, ids, xq = items(5, 6, distinct=distinct)
    engine = MemoryIndex.build(codes, Z, ids)
    for options in ({}, {"group": True}, {"parts": 3}, {"parts": 2, "mode": "replica"}):
        index = put(engine, device, **options)
        for least in (-100.0, 0.0, 2.5, 100.0):
            assert same(index.range_search(xq, least), engine.range_search(xq, least))
        with pytest.raises(DataError, match="more than 50 results"):
            index.range_search(xq, -100.0, limit=50)
        with pytest.raises(UsageError, match="NaN"):
            index.range_search(xq, float("nan"))


@on_devices
def test_every_form_of_index(device: str) -> None:
    codes, Z, ids, xq = items(7, 6, distinct=150)
    exact = MemoryIndex.build(codes, Z, ids)
    expected = exact.search(xq, 25)
    for form in FORMS:
        assert same(put(exact.to_faiss(form), device).search(xq, 25), expected)
    grouped = put(exact, device, group=True)
    assert len(grouped.parts[0].searcher) == len(np.unique(codes, axis=0))
    bare = inject(Z)
    bare.add_sa_codes(codes)
    assert same(put(bare, device, via="torch").search(xq, 9), MemoryIndex.build(codes, Z).search(xq, 9))


def test_more_items_than_a_key_can_tell_apart_are_refused() -> None:
    codes, Z, _, _ = items(17, 6, n=10)
    scan = to_torch(MemoryIndex.build(codes, Z), device="cpu").parts[0].searcher
    half = 1 << 31
    parts = [Part(torch.device("cpu"), scan, half, first) for first in (0, half)]
    with pytest.raises(DataError, match=r"4,294,967,296 items: at most 4,294,967,295"):
        DeviceIndex(parts, Z, None)
    assert DeviceIndex(parts, Z, None, "replica").ntotal == half


@pytest.mark.parametrize("lie", ["best left out", "scores off", "nothing found"])
def test_shortlists_that_lie_are_not_believed(lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = items(9, 6)
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, "cpu")
    honest = calls.faiss_search

    def lying(
        faiss_index: Any, queries: torch.Tensor, k: int, lists: None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if lie == "best left out":  # as a kernel does whose rounding is far off: consistent, but lower
            D, found = honest(faiss_index, queries, k + 1)
            D = D[:, 1:] - 0.01
            return D.contiguous(), found[:, 1:].contiguous()
        D, found = honest(faiss_index, queries, k)
        return (D * 1.01, found) if lie == "scores off" else (D, torch.full_like(found, -1))

    monkeypatch.setattr(calls, "faiss_search", lying)
    assert same(index.search(xq, 10), engine.search(xq, 10))
    assert index.stats() == {"tried": 20, "proven": 0}


def test_shortlisting_is_given_up_where_it_seldom_proves() -> None:
    codes, Z, ids, xq = items(10, 3, n=3000, distinct=30, queries=300)
    engine = MemoryIndex.build(codes, Z, ids)
    index = put(engine, "cpu", memory=1 << 26, group=False)
    for _ in range(3):
        assert same(index.search(xq, 100), engine.search(xq, 100))
    assert index.stats()["tried"] == 300  # one batch, no more
    grouped = put(engine, "cpu", group=True)
    assert same(grouped.search(xq, 100), engine.search(xq, 100))
    assert grouped.stats()["proven"] == 300


def test_faiss_is_left_out_where_its_scan_does_not_fit_the_memory() -> None:
    codes, Z, ids, xq = items(15, 6, n=6000)
    engine = MemoryIndex.build(codes, Z, ids)
    needed = scan_bytes(6000, 3)
    for memory, shortlists in ((needed, True), (needed - 1, False)):
        index = put(engine, "cpu", memory=memory)
        assert len(index.faiss_indexes) == shortlists
        assert same(index.search(xq, 20), engine.search(xq, 20))
    assert len(put(engine, "cpu", memory=needed - 1, via="faiss").faiss_indexes) == 1  # as requested


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
    codes, Z, _, xq = items(14, 6, n=5000, queries=300)
    index = to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=memory)
    seen: list[tuple[int, int]] = []
    score = scan.score_columns

    def watched(tables: torch.Tensor, columns: torch.Tensor, *, paired: bool) -> torch.Tensor:
        seen.append((len(tables), columns.shape[1]))
        return score(tables, columns, paired=paired)

    monkeypatch.setattr(scan, "score_columns", watched)
    index.search(xq, k)
    assert sum(rows * columns for rows, columns in seen) == 300 * 5000
    assert max(rows * (columns + k) for rows, columns in seen) * 80 <= memory
    if memory == 1 << 23:
        assert max(rows for rows, _ in seen) > 1  # and what is allowed is used
    if memory == 1 << 17:
        assert max(columns for _, columns in seen) < 5000


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
    with pytest.raises(UsageError, match="raise memory"):
        to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=1000).search(xq, 200)
    with pytest.raises(UsageError, match="at least 1"):
        to_torch(MemoryIndex.build(codes, Z), device="cpu", memory=0)


def test_unfit_sources_are_refused() -> None:
    with pytest.raises(DataError, match="empty"):
        to_torch(inject(books(np.random.default_rng(0), 3)), device="cpu")
    with pytest.raises(DataError, match="not the product-quantised codes"):
        to_torch(faiss.IndexFlatIP(12), device="cpu")
    codes, Z, _, _ = items(12, 3, n=2)
    with pytest.raises(UsageError, match="2 items cannot be split over 3 devices"):
        put(MemoryIndex.build(codes, Z), "cpu", parts=3)
    codes, Z, _, _ = items(12, 3, 32)
    with pytest.raises(UsageError, match=r"supports 16 .* or 256; use torch alone"):
        put(MemoryIndex.build(codes, Z), "cpu", via="faiss")
    assert put(MemoryIndex.build(codes, Z), "cpu").faiss_indexes == []


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "cuda:7", 7])
def test_a_missing_gpu_is_an_error_for_torch_as_well(device: str | int) -> None:
    codes, Z, _, xq = items(13, 3, n=20)
    with pytest.raises(DeviceError, match="torch sees none here"):
        to_torch(MemoryIndex.build(codes, Z), device=device)
    with pytest.raises(DeviceError, match="torch sees none here"):
        rank_on_device(score_tables(xq, Z), codes, xq > 0, codes > 0, device=device)


@pytest.mark.parametrize("device", ["gpu", "mps", "cuda:x"])
def test_a_device_by_another_name_is_an_error(device: str) -> None:
    with pytest.raises(UsageError, match="use cuda:N, or cpu"):
        device_of(device)


# Only on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
def test_a_gpu_by_its_front_door() -> None:
    codes, Z, ids, xq = items(20, 6, n=50_000, distinct=20_000)
    engine = MemoryIndex.build(codes, Z, ids)
    expected = engine.search(xq, 100)
    for index in (to_gpu(engine), to_torch(engine, device="cuda:0")):
        assert index.device.type == "cuda"
        assert all(isinstance(i, faiss.GpuIndex) for i in index.faiss_indexes)
        assert same(index.search(xq, 100), expected)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # Faiss works on torch's stream, so no wait is needed between the two
        D, found = to_gpu(engine).search(torch.from_numpy(xq).cuda() * 1.0, 100)
        D = D + 0
    stream.synchronize()
    assert same((D.cpu().numpy(), found.cpu().numpy()), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("k", [10, 5000, 1_000_000])
def test_memory_is_kept_on_a_gpu(k: int) -> None:
    codes, Z, _, xq = items(22, 6, n=1_000_000, queries=256)
    index = to_torch(MemoryIndex.build(codes, Z), device="cuda:0", memory=1 << 28)
    queries = torch.from_numpy(xq).cuda()[: 256 if k < 1_000_000 else 2]
    index.search(queries[:1], 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    D, found = index.search(queries, k)
    results = D.nbytes + found.nbytes
    # twice: keys become scores and ids while the next are sought
    assert torch.cuda.max_memory_allocated() - before <= 2 * (1 << 28) + results


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU or torch.cuda.device_count() < 2, reason="no second GPU")
@pytest.mark.parametrize("mode", ["shard", "replica"])
@pytest.mark.parametrize("via", ["auto", "torch"])
def test_two_gpus(mode: str, via: str) -> None:
    codes, Z, ids, xq = items(21, 6, n=20_000)
    engine = MemoryIndex.build(codes, Z, ids)
    devices = [0, 1]
    index = (
        to_gpu(engine, devices=devices, mode=mode)
        if via == "auto"
        else to_torch(engine, device=devices, mode=mode)
    )
    assert [part.device.index for part in index.parts] == [0, 1]
    assert [i.getDevice() for i in index.faiss_indexes] == ([0, 1] if via == "auto" else [])
    for k in (10, 5000, 20_000):
        assert same(index.search(xq, k), engine.search(xq, k))
    there = torch.from_numpy(xq).cuda(0)
    assert same(tuple(t.cpu().numpy() for t in index.search(there, 10)), engine.search(xq, 10))

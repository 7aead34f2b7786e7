"""Faiss' form for GPUs: its scores and working memory without a GPU, and the search on one; and the benchmark from end to end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from gpu_helpers import NO_GPU, ON_GPU, books, items, on_devices, put, same
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.gpu import faiss_form
from gpq_faiss.gpu.faiss_form import CODE_SIZES, MAX_K, PIECE, FaissBudget, clone_to_gpu, zero_lists
from gpq_faiss.gpu.index import to_gpu
from gpq_faiss.indexes.filters import Allow
from gpq_faiss.indexes.memory import MemoryIndex

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu as benchmark
from common import run_main


@pytest.mark.parametrize("lists", [1, 7, None])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 16), (5, 16), (6, 16), (8, 16), (12, 16), (5, 256)])
def test_the_form_for_gpus_scores_like_the_tables(M: int, K: int, lists: int | None) -> None:
    codes, Z, _, xq = items(0, M, K, n=2000)
    ivf = zero_lists(codes, Z, lists=lists, first=5)
    assert ivf.code_size in CODE_SIZES
    assert (ivf.pq.nbits, ivf.ntotal) == (8, 2000)
    D, found = ivf.search(pad_vectors(xq, ivf.d), 2000)
    assert (np.sort(found, axis=1) == 5 + np.arange(2000)).all()
    assert np.abs(np.take_along_axis(score_codes(xq, codes, Z), found - 5, axis=1) - D).max() < 1e-5


def test_lists_grow_with_the_items_and_are_even() -> None:
    codes, Z, _, _ = items(0, 3, n=5000)
    ivf = zero_lists(codes, Z)
    sizes = [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 1


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
        assert same(index.search(xq * np.float32(2e-38), 9)[1:], index.search(xq, 9)[1:])  # no underflow
    index = put(engine, device, via="faiss")
    with pytest.raises(UsageError, match="at most 2048"):
        index.search(xq, 2049)
    with pytest.raises(UsageError, match="a range search needs exact scores: create the index with"):
        index.range_search(xq, 0.0)
    with pytest.raises(UsageError, match="a filter needs exact scores"):
        index.search(xq, 5, where=Allow(ids))


def test_what_a_gpu_cannot_take_is_refused() -> None:
    for M, K, lists, message in (
        (3, 32, None, r"a GPU supports 16 .* or 256; use search='exact'"),
        (49, 256, None, "at most 48"),
        (3, 16, 0, "lists"),
    ):
        codes, Z, _, _ = items(0, M, K, n=10)
        with pytest.raises(UsageError, match=message):
            zero_lists(codes, Z, lists=lists)


class Resources:
    """Stands in for Faiss' GPU resources, and notes what is set aside."""

    given: list[int] = []  # noqa: RUF012

    def setTempMemory(self, size: int) -> None:
        self.given.append(size)

    def setPinnedMemory(self, size: int) -> None:
        assert size == 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two GPUs that take no index: the bytes that Faiss is told to set aside."""

    def full(_resources: object, _index: object, config: faiss.GpuIndexIVFPQConfig) -> None:
        halves = config.flatConfig.useFloat16, config.useFloat16LookupTables
        assert not any((*halves, config.usePrecomputedTables, config.use_cuvs))
        assert config.useMMCodeDistance
        raise RuntimeError("Error in alloc: long story\nout of memory on the card")

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "StandardGpuResources", Resources)
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", full)
    monkeypatch.setattr(Resources, "given", [])
    return Resources.given


def test_an_index_left_on_the_cpu_is_an_error(card: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As Faiss does with several GPUs and an index that it cannot place."""
    codes, Z, _, _ = items(0, 3)
    form = zero_lists(codes, Z)
    with pytest.raises(DeviceError, match=r"cannot copy the index to GPU 1: out of memory on the card$"):
        clone_to_gpu(form, 1, FaissBudget.of(form, 12345))
    assert card == [12345]
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", lambda _resources, index, _config: index)
    with pytest.raises(DeviceError, match="left the index on the CPU instead of GPU 1"):
        clone_to_gpu(form, 1, FaissBudget.of(form, 12345))


# Working memory ------------------------------------------------------------------------------------------------------

budgets = st.builds(
    lambda memory, lists, longest, size, dims: FaissBudget(memory, lists, longest, size, size * dims),
    memory=st.integers(1 << 16, 1 << 34),
    lists=st.integers(1, 2048),
    longest=st.integers(0, 1 << 24),
    size=st.sampled_from([1, 2, 3, 4, 8, 12, 24, 48]),
    dims=st.sampled_from([7, 24]),
)


def test_what_a_query_needs_is_the_sum_of_what_faiss_allocates() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (1000, 5)).astype(np.uint8)
    codes[:, -1] &= 15
    budget = FaissBudget.of(zero_lists(codes, books(rng, 9), lists=16), 1 << 30)
    assert budget == FaissBudget(1 << 30, lists=16, longest=63, size=8, width=8 * 24)
    # two streams: ends of lists, scores, float tables of 256, and k of each of 8 chunks with 64-bit places
    scan = 2 * (17 * 8 + 16 * 63 * 4 + 16 * 8 * 256 * 4 + 8 * 100 * (4 + 8))
    assert budget.scan_bytes(100) == scan
    kept = 16 * (4 + 8)
    # the query once for every list, and its products with all codewords
    products = 16 * 4 * (8 * 24 + 8 * 256)
    assert budget.needed(100, 9) - budget.needed(100, 8) == scan + kept + products
    assert 2 * 16384 <= budget.needed(100) - scan - kept - products < 50_000


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
    kept = 12 * budget.lists * queries
    seek = kept + min(queries, 512) * (4 + 32 * budget.lists)
    at_once = together(queries, piece - fixed - kept, budget.scan_bytes(k))
    products = 4 * budget.lists * (budget.width + 256 * budget.size)
    most = max(seek, fixed + kept + at_once * (budget.scan_bytes(k) + products))
    return piece if most <= piece else piece + most


@given(budget=budgets, k=st.integers(1, MAX_K), batch=st.integers(1, 4000))
def test_calls_stay_within_the_memory_where_one_query_does(budget: FaissBudget, k: int, batch: int) -> None:
    rows = budget.rows(k)
    if budget.needed(k) > budget.memory:
        assert rows == 1
        return
    assert taken(budget, k, min(batch, rows)) <= budget.memory
    assert taken(budget, k, rows) <= budget.memory


def test_what_is_set_aside_leaves_room_for_what_does_not_fit_it(
    card: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes, Z, _, _ = items(0, 6, n=5000)
    form = zero_lists(codes, Z, lists=4)
    least = FaissBudget.of(form, 1).needed(MAX_K)
    monkeypatch.setattr(faiss_form, "PIECE", least - 1)
    for memory in (least - 1, least, least + 1000, 3 * least):
        with pytest.raises(DeviceError, match="out of memory"):
            clone_to_gpu(form, 0, FaissBudget.of(form, memory))
    assert card == [least - 1, 0, 1000, least - 1]
    assert PIECE == 3 << 29


def test_faiss_gets_as_many_queries_at_once_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    codes, Z, ids, xq = items(6, 6, n=4000, queries=40)
    engine = MemoryIndex.build(codes, Z, ids)
    asked: list[int] = []
    search = faiss_form.faiss_search

    def watched(index: Any, queries: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(len(queries))
        return search(index, queries, k)

    monkeypatch.setattr(faiss_form, "faiss_search", watched)
    whole = put(engine, "cpu", via="faiss", memory=1 << 28).search(xq, 20)
    assert asked == [40]
    asked.clear()
    budget = FaissBudget.of(zero_lists(codes, Z), 0)
    memory = 5 * budget.needed(20)
    assert same(put(engine, "cpu", via="faiss", memory=memory).search(xq, 20), whole)
    assert sum(asked) == 40
    assert len(asked) > 1
    assert budget.needed(20, max(asked)) <= memory < budget.needed(20, max(asked) + 1)


# On a GPU, and the benchmark -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=ON_GPU)])
@pytest.mark.parametrize("M", [3, 6, 8, 12])
@pytest.mark.parametrize("lists", [1, 16, None])
def test_every_query_of_a_large_batch_is_scored_by_its_own_tables(
    device: str, M: int, lists: int | None
) -> None:
    """A query whose tables were mixed with the next one's would miss results; now and then is enough."""
    codes, Z, _, xq = items(0, M, n=20_000, queries=1024)
    source = MemoryIndex.build(codes, Z)
    raw = put(source, device, via="faiss", lists=lists) if lists else to_gpu(source, search="approximate")
    assert raw.device == torch.device(device)
    assert all(isinstance(i, faiss.GpuIndex) for i in raw.faiss_indexes)
    scores = score_codes(xq, codes, Z)
    expected = -np.sort(-scores, axis=1)
    for k in (1, 100, 100, 100, 100, 2048):
        D, found = raw.search(xq, k)
        assert np.abs(D - expected[:, :k]).max() < 1e-4
        assert np.abs(np.take_along_axis(scores, found, axis=1) - D).max() < 1e-4
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # Faiss works on torch's stream, so no wait is needed between the two
        there = raw.search(torch.from_numpy(xq).cuda() * 1.0, 100)[0] + 0
    stream.synchronize()
    assert np.abs(there.cpu().numpy() - expected[:, :100]).max() < 1e-4


@NO_GPU
def test_the_benchmark_runs_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rehearsed at a small size; and without a GPU it says so in one line."""
    out = tmp_path / "gpu.json"

    def run(*options: str) -> tuple[int, str]:
        small = "--items 3000 --bits 12 --batches 1,3 --copy-bytes 1000 --limit 0.01 --encode-rows 500"
        small += " --rank-items 300 --rank-queries 5 --check-items 2500"
        monkeypatch.setattr(sys, "argv", ["gpu.py", *small.split(), "--out", str(out), *options])
        try:
            run_main(benchmark.main)
        except SystemExit as end:
            return int(end.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    code, stderr = run()
    assert code == 1
    assert stderr.count("\n") == 1
    assert stderr.startswith("error: device 'cuda:0' was requested, but torch sees no GPU")
    assert not out.exists()
    code, stderr = run("--device", "cpu", "--within", "0")
    assert code == 0, stderr
    assert stderr.startswith("left for another run: parity 12, encoding 12, ranking 12, search 12/3000")
    assert not out.exists()
    code, stderr = run("--device", "cpu")
    assert code == 0, stderr
    result = json.loads(out.read_text())
    assert result["rehearsal"] is True
    assert "these figures mean nothing" in out.with_suffix(".md").read_text()
    cells = result["search"]["12/3000"]["cells"]
    assert [(c["engine"], c["batch"]) for c in cells] == [
        (engine, batch) for batch in (1, 3) for engine in ("exact", "faiss")
    ]
    assert result["parity"]["12"]["exact"] == "equal to the bit"

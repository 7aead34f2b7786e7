"""Search on a device equals brute force and the index on the CPU; then Faiss' form for GPUs.

The same code runs on the CPU (asked for by name) and, marked ``gpu``, on a GPU.
"""

import faiss
import numpy as np
import pytest
import torch
from gpu_helpers import KERNEL, NO_GPU, ON_GPU, items, on_devices, placed
from hypothesis import given
from hypothesis import strategies as st
from index_factory import books, padded_best, same, score_codes
from index_factory import within as brute_range

from gpq_faiss import Index
from gpq_faiss.codes.codebooks import inject, pad_vectors
from gpq_faiss.codes.scores import score_tables
from gpq_faiss.errors import DataError, DeviceError, UsageError
from gpq_faiss.gpu import index as device_index
from gpq_faiss.gpu.faiss_form import CODE_SIZES, to_faiss_gpu, zero_lists
from gpq_faiss.gpu.index import DeviceIndex, to_gpu
from gpq_faiss.gpu.kernel import source_of


@pytest.fixture
def target(device):
    """The device to ask for."""
    with placed(device) as target:
        yield target


def ranking(data, mask, k):
    """The k best items of a mask by a full sort."""
    codes, Z, ids, xq = data
    return padded_best(xq, codes[mask], Z, k, ids[mask])


def within(data, mask, min_score):
    """All items of a mask with at least a score, by a full sort."""
    codes, Z, ids, xq = data
    return brute_range(xq, codes[mask], Z, min_score, ids[mask])


@on_devices
@given(
    seed=st.integers(0, 99),
    shape=st.sampled_from([*((M, 16) for M in (1, 3, 6, 12)), (4, 4), (3, 32), (50, 256)]),
    n=st.integers(3, 1200) | st.sampled_from([2000, 3000, 5000, 20_000]),
    distinct=st.sampled_from([None, 1, 40, 3000]),
    memory=st.sampled_from([1 << 20, 1 << 26]),
    share=st.floats(0, 1),
    passing=st.sampled_from([0.0, 0.01, 0.3, 0.95, 1.0]),
)
def test_any_way_gives_the_ranking_of_what_passes(
    device, seed, shape, n, distinct, memory, share, passing
):
    codes, Z, ids, xq = data = items(seed, *shape, n=n, distinct=distinct, queries=7)
    with placed(device) as target:
        index = to_gpu(Index.build(codes, Z, ids), target, memory=memory)
        assert index.ntotal == n
        k = max(1, int(share * min(n, 1500)))
        allowed = np.random.default_rng(seed).random(n) < passing
        assert same(index.search(xq, k, allow=ids[allowed]), ranking(data, allowed, k))
        results = index.search(xq, k)
        assert same(results, ranking(data, np.ones(n, bool), k))
        least = float(np.median(results[0]))
        assert same(index.range_search(xq, least, allow=ids[allowed]), within(data, allowed, least))
        assert same(index.range_search(xq, least), within(data, np.ones(n, bool), least))


@pytest.mark.parametrize("device", [KERNEL, pytest.param("cuda:0", marks=ON_GPU)])
def test_lists_that_cannot_hold_a_result_are_not_read(target, monkeypatch):
    """Codes of lists whose bound is below all scores of the best list are overwritten by the best
    codes.
    """
    codes, Z, ids, xq = data = items(2, 6, n=20_000, queries=1)
    xq[:, 24:] *= np.float32(0.1)  # the first codebooks decide, as those of a trained model
    tables = score_tables(xq, Z)[0]
    heads = score_codes(xq[:, :24], codes[:, :1], Z[:2])[0]
    spread = tables[2:].max(axis=1).sum() - tables[2:].min(axis=1).sum()
    far = heads + 0.01 < heads.max() - spread
    assert far.mean() > 0.8
    monkeypatch.setattr(device_index, "_PARTS", 1)  # each part reads its own best list
    index = to_gpu(Index.build(codes, Z, ids), target)
    words = tables.argmax(axis=1).astype(np.uint8)
    best = torch.from_numpy(words[0::2] | words[1::2] << 4).to(index.device)
    rows = np.argsort(ids)[index._members.cpu().numpy()]
    index._columns[:, torch.from_numpy(far[rows]).to(index.device)] = best[:, None]
    results = index.search(xq, 10)
    assert same(results, ranking(data, np.ones(20_000, bool), 10))
    least = float(results[0][0, -1])
    assert same(index.range_search(xq, least), within(data, np.ones(20_000, bool), least))
    index._lists[0][:] = 0  # all read the first items, which are not the best
    assert not same(index.search(xq, 10), results)


@pytest.mark.skipif(torch.version.cuda is None, reason="torch without CUDA")
@pytest.mark.parametrize(("M", "K", "d"), [(12, 16, 18), (50, 256, 12)])
def test_torch_compiles_the_kernel(M, K, d):
    """Without a GPU, for one; within 48 KiB of shared memory."""
    nvrtc = pytest.importorskip("torch.cuda._utils")._nvrtc_compile
    source = source_of(M, K, d)
    assert b"search" in nvrtc(source, "search", "90")[0]
    with pytest.raises(RuntimeError, match="undefined"):
        nvrtc(source.replace("sort(best", "sorted(best"), "search", "90")


@on_devices
def test_tensors_in_tensors_out(target):
    codes, Z, ids, xq = items(3, 6, distinct=200)
    index = Index.build(codes, Z, ids)
    exact, queries = to_gpu(index.to_faiss("fused"), target), torch.from_numpy(xq).to(target)
    D, result_ids = exact.search(queries, 30)
    assert D.device == result_ids.device == exact.device
    assert same((D.cpu().numpy(), result_ids.cpu().numpy()), index.search(xq, 30))
    strided = torch.cat([queries, queries], dim=1)[:, : xq.shape[1]]  # not contiguous
    assert torch.equal(exact.search(strided.double(), 9)[1], exact.search(queries, 9)[1])
    xq.setflags(write=False)
    assert same(exact.search(xq, 30), index.search(xq, 30))
    bare = to_gpu(Index.build(codes, Z), target)  # row numbers serve as ids
    allowed, denied = np.arange(1500) % 5 != 0, np.arange(0, 1500, 5)
    data = codes, Z, np.arange(1500), xq
    expected = ranking(data, allowed, 1300)
    results = [tensor.cpu().numpy() for tensor in bare.search(queries, 1300, deny=denied)]
    assert same(results, expected)
    assert (expected[1] == -1).any()
    for options, mask in (({"deny": denied}, allowed), ({"allow": []}, allowed & False)):
        results = [tensor.cpu().numpy() for tensor in bare.range_search(queries, 1.0, **options)]
        assert same(results, within(data, mask, 1.0))


@pytest.mark.parametrize(("memory", "k"), [(1 << 17, 1), (1 << 18, 1500), (1 << 20, 100)])
@pytest.mark.parametrize("device", [KERNEL])
def test_memory_bounds_the_blocks(target, memory, k, monkeypatch):
    codes, Z, ids, xq = items(14, 6, n=3000, queries=100)
    source = Index.build(codes, Z, ids)
    block_sizes = []
    real = DeviceIndex._best

    def watched(self, queries, block, k):
        if len(queries) == 100:  # not the sample's
            block_sizes.append(block.stop - block.start)
        return real(self, queries, block, k)

    monkeypatch.setattr(DeviceIndex, "_best", watched)
    allowed = np.random.default_rng(0).random(3000) < 0.4
    index = to_gpu(source, target, memory=memory)
    for allow in (None, ids[allowed]):
        block_sizes.clear()
        assert same(index.search(xq, k, allow=allow), source.search(xq, k, allow=allow))
        assert sum(block_sizes) == 100
        assert max(block_sizes) == min(100, max(1, memory // (2 * k * device_index._RESULT)))


@on_devices
def test_changes_are_on_the_device_too(target):
    codes, Z, ids, xq = items(10, 6, n=300)
    index = Index.build(codes[:200], Z, ids[:200]).merge(Index.build(codes[200:], Z, ids[200:]))
    index = index.remove_ids(ids[::3])
    assert same(to_gpu(index, target).search(xq, 50), index.search(xq, 50))


@on_devices
def test_unfit_queries_arguments_and_sources_are_one_line_errors(target, monkeypatch):
    codes, Z, ids, xq = items(11, 6, n=300)
    source = Index.build(codes, Z, ids)
    index, small = (to_gpu(source, target, memory=memory) for memory in (1 << 20, 1000))
    nan = xq.copy()
    nan[3, 1] = np.nan
    huge = xq / np.abs(xq).max() * np.float32(3e38)
    calls = [
        (DataError, match, lambda x=x, convert=convert: index.search(convert(x), 5))
        for convert in (np.asarray, lambda x: torch.from_numpy(x).to(index.device))
        for x, match in (
            (xq[:0], "empty|at least one row"),
            (xq[:, 1:], "71"),
            (xq[0], r"\[n, 72\]"),
            (nan, "NaN.* in row 3"),
            (huge, "too large for float32 scores in rows? "),
            (xq.astype(np.complex64), "complex64"),
        )
    ]
    calls += [
        *((UsageError, "k = ", lambda k=k: index.search(xq, k)) for k in (0, 301, True, 2.0)),
        (
            UsageError,
            "queries are on meta",
            lambda: index.search(torch.empty((2, 72), device="meta"), 5),
        ),
        (UsageError, "exclude each other", lambda: index.search(xq, 5, allow=[1], deny=[2])),
        (UsageError, "raise memory", lambda: small.search(xq, 200)),
        (DataError, "more than 50 results", lambda: index.range_search(xq, -100.0, limit=50)),
        (UsageError, "not nan", lambda: index.range_search(xq, float("nan"))),
        (DataError, "no codes", lambda: to_gpu(inject(Z), "cpu")),
        (
            DataError,
            "not codes of a product quantiser",
            lambda: to_gpu(faiss.IndexFlatIP(12), "cpu"),
        ),
        *(
            (UsageError, "use cpu, cuda, cuda:N", lambda device=device: to_gpu(source, device))
            for device in ("gpu", "mps", "cuda:x")
        ),
    ]
    for error, match, call in calls:
        with pytest.raises(error, match=match):
            call()
    monkeypatch.setattr(device_index, "MAX_ROWS", 1)  # what a key can tell apart
    with pytest.raises(DataError, match="300 codes: an index on a device has 1 to 1"):
        to_gpu(source, "cpu")


@NO_GPU
@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, "cuda:7", 7])
def test_a_missing_gpu_is_an_error(device):
    with pytest.raises(DeviceError, match="torch sees no GPU here"):
        to_gpu(Index.build(*items(13, 3, n=20)[:2]), device)


@pytest.mark.parametrize("M", [pytest.param(M, marks=ON_GPU) for M in (3, 6, 8, 12)])
def test_a_gpu_by_its_front_door(M):
    codes, Z, ids, xq = items(20, M, n=50_000, distinct=20_000)
    source = Index.build(codes, Z, ids)
    index = to_gpu(source)
    assert index.device == torch.device("cuda:0")
    for options in ({}, {"deny": ids[::100]}, {"allow": ids[::100]}, {"allow": ids[::3]}):
        for k in (10, 1000, 5000):
            assert same(index.search(xq, k, **options), source.search(xq, k, **options))
        expected = source.range_search(xq, 2.0, **options)
        assert same(index.range_search(xq, 2.0, **options), expected)


@pytest.mark.parametrize("k", [pytest.param(k, marks=ON_GPU) for k in (10, 5000, 1_000_000)])
def test_memory_is_kept_on_a_gpu(k):
    codes, Z, _, xq = items(22, 6, n=1_000_000, queries=256)
    index = to_gpu(Index.build(codes, Z), memory=1 << 28)
    queries = torch.from_numpy(xq).cuda()[: 256 if k < 1_000_000 else 2]
    index.search(queries[:1], 1)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    D, result_ids = index.search(queries, k)
    assert (
        torch.cuda.max_memory_allocated() - before <= 2 * (1 << 28) + D.nbytes + result_ids.nbytes
    )


def test_l2_is_refused_on_a_device():
    index = Index.build(items(0, 3)[0], books(3), metric_type=faiss.METRIC_L2)
    with pytest.raises(UsageError, match="of the metric L2 is searched on the CPU"):
        to_gpu(index, "cpu")


# Faiss' form for GPUs -----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [500, 5000])
@pytest.mark.parametrize(
    ("M", "K"), [(1, 16), (3, 16), (5, 16), (6, 16), (8, 16), (12, 16), (5, 256)]
)
def test_the_form_for_gpus_scores_like_the_tables(M, K, n):
    codes, Z, ids, xq = items(0, M, K, n=n)
    ivf = zero_lists(codes, Z, ids)
    assert ivf.code_size in CODE_SIZES
    assert (ivf.pq.nbits, ivf.ntotal) == (8, n)
    sizes = [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    assert len(sizes) == max(1, n // 1024)
    assert max(sizes) - min(sizes) <= 1
    D, result_ids = ivf.search(pad_vectors(xq, ivf.d), n)
    assert (np.sort(result_ids, axis=1) == np.sort(ids)).all()
    rows = np.argsort(ids)[np.searchsorted(np.sort(ids), result_ids)]
    assert np.abs(np.take_along_axis(score_codes(xq, codes, Z), rows, axis=1) - D).max() < 1e-5


def test_what_a_gpu_cannot_take_is_refused():
    for M, K, message in (
        (3, 32, r"a GPU supports 16 .* or 256; use to_gpu"),
        (49, 256, "at most 48"),
    ):
        codes, Z, ids, _ = items(0, M, K, n=10)
        with pytest.raises(UsageError, match=message):
            zero_lists(codes, Z, ids)


def test_faiss_on_a_missing_or_full_gpu_is_an_error(monkeypatch):
    source = Index.build(*items(0, 3)[:2])

    def full(_resources, _index, config):
        halves = config.flatConfig.useFloat16, config.useFloat16LookupTables
        assert not any((*halves, config.usePrecomputedTables, config.use_cuvs))
        assert config.useMMCodeDistance
        raise RuntimeError("Error in alloc: long story\nout of memory on the card")

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "StandardGpuResources", object)
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", full)
    with pytest.raises(
        DeviceError, match=r"cannot copy the index to GPU 1: out of memory on the card$"
    ):
        to_faiss_gpu(source, 1)
    with pytest.raises(DeviceError, match="GPU 2 was requested, but Faiss sees 2"):
        to_faiss_gpu(source, 2)
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with pytest.raises(DeviceError, match="Faiss sees 0"):
        to_faiss_gpu(source)


@pytest.mark.parametrize("M", [pytest.param(M, marks=ON_GPU) for M in (3, 6, 8, 12)])
def test_queries_of_large_batches_are_scored_by_their_own_tables(M):
    """A query whose tables were mixed with the next one's would miss results; now and then is
    enough.
    """
    codes, Z, _, xq = items(0, M, n=20_000, queries=1024)
    index = to_faiss_gpu(Index.build(codes, Z))
    scores = score_codes(xq, codes, Z)
    expected = -np.sort(-scores, axis=1)
    for k in (1, 100, 100, 100, 100, 2048):
        D, result_ids = index.search(pad_vectors(xq, index.d), k)
        assert np.abs(D - expected[:, :k]).max() < 1e-4
        assert np.abs(np.take_along_axis(scores, result_ids, axis=1) - D).max() < 1e-4

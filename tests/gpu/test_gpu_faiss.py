"""Faiss' form for GPUs: its scores without a GPU, and the search on one; and the benchmark from end to end."""

import json
import sys

import faiss
import gpu as benchmark
import numpy as np
import pytest
from common import run_main
from gpu_helpers import NO_GPU, ON_GPU, items

from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DeviceError, UsageError
from gpq_faiss.gpu.faiss_form import CODE_SIZES, to_faiss_gpu, zero_lists
from gpq_faiss.indexes.memory import MemoryIndex


@pytest.mark.parametrize("n", [500, 5000])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 16), (5, 16), (6, 16), (8, 16), (12, 16), (5, 256)])
def test_the_form_for_gpus_scores_like_the_tables(M, K, n):
    codes, Z, ids, xq = items(0, M, K, n=n)
    ivf = zero_lists(codes, Z, ids)
    assert ivf.code_size in CODE_SIZES
    assert (ivf.pq.nbits, ivf.ntotal) == (8, n)
    sizes = [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    assert len(sizes) == max(1, n // 1024)
    assert max(sizes) - min(sizes) <= 1
    D, found = ivf.search(pad_vectors(xq, ivf.d), n)
    assert (np.sort(found, axis=1) == np.sort(ids)).all()
    rows = np.argsort(ids)[np.searchsorted(np.sort(ids), found)]
    assert np.abs(np.take_along_axis(score_codes(xq, codes, Z), rows, axis=1) - D).max() < 1e-5


def test_what_a_gpu_cannot_take_is_refused():
    for M, K, message in ((3, 32, r"a GPU supports 16 .* or 256; use to_gpu"), (49, 256, "at most 48")):
        codes, Z, ids, _ = items(0, M, K, n=10)
        with pytest.raises(UsageError, match=message):
            zero_lists(codes, Z, ids)


def test_an_index_left_on_the_cpu_is_an_error(monkeypatch):
    """As Faiss does with several GPUs and an index that it cannot place."""
    source = MemoryIndex.build(*items(0, 3)[:2])

    def full(_resources, _index, config):
        halves = config.flatConfig.useFloat16, config.useFloat16LookupTables
        assert not any((*halves, config.usePrecomputedTables, config.use_cuvs))
        assert config.useMMCodeDistance
        raise RuntimeError("Error in alloc: long story\nout of memory on the card")

    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    monkeypatch.setattr(faiss, "StandardGpuResources", object)
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", full)
    with pytest.raises(DeviceError, match=r"cannot copy the index to GPU 1: out of memory on the card$"):
        to_faiss_gpu(source, 1)
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", lambda _resources, index, _config: index)
    with pytest.raises(DeviceError, match="left the index elsewhere instead of GPU 1"):
        to_faiss_gpu(source, 1)
    with pytest.raises(DeviceError, match="GPU 2 was requested, but Faiss sees 2"):
        to_faiss_gpu(source, 2)
    monkeypatch.delattr(faiss, "StandardGpuResources")
    with pytest.raises(DeviceError, match="Faiss sees 0"):
        to_faiss_gpu(source)


@pytest.mark.parametrize("M", [pytest.param(M, marks=ON_GPU) for M in (3, 6, 8, 12)])
def test_every_query_of_a_large_batch_is_scored_by_its_own_tables(M):
    """A query whose tables were mixed with the next one's would miss results; now and then is enough."""
    codes, Z, _, xq = items(0, M, n=20_000, queries=1024)
    index = to_faiss_gpu(MemoryIndex.build(codes, Z))
    scores = score_codes(xq, codes, Z)
    expected = -np.sort(-scores, axis=1)
    for k in (1, 100, 100, 100, 100, 2048):
        D, found = index.search(pad_vectors(xq, index.d), k)
        assert np.abs(D - expected[:, :k]).max() < 1e-4
        assert np.abs(np.take_along_axis(scores, found, axis=1) - D).max() < 1e-4


@NO_GPU
def test_the_benchmark_runs_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Rehearsed at a small size; and without a GPU it says so in one line."""
    out = tmp_path / "gpu.json"
    monkeypatch.setattr(benchmark, "PARITY_QUERIES", 64)

    def run(*options):
        small = "--items 1500 --bits 12 --batches 1,3 --copy-bytes 1000 --limit 0.01 --check-items 300"
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
    code, stderr = run("--device", "cpu")
    assert code == 0, stderr
    result = json.loads(out.read_text())
    assert result["rehearsal"] is True
    assert "these figures mean nothing" in out.with_suffix(".md").read_text()
    cells = result["search"]["12/1500"]["cells"]
    assert [(c["search"], c["batch"]) for c in cells] == [
        (search, batch) for batch in (1, 3) for search in ("exact", "faiss")
    ]
    assert result["parity"]["12"]["exact"] == "equal to the bit"

"""The GPU form of the flat index: its equality on the CPU everywhere, and on a GPU where there is one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject, pad_vectors
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, DeviceError, UsageError
from gpq_faiss.gpu.forms import (
    CODE_SIZES,
    check_on_gpu,
    clone_to_gpu,
    scan_bytes,
    zero_lists,
)
from gpq_faiss.gpu.placing import to_gpu
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import gpu as benchmark
from common import run_main

HAS_GPU = hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


def make(
    M: int, K: int = 16, n: int = 2000, seed: int = 0
) -> tuple[object, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, M, K])
    Z = rng.normal(size=(M, K, 12))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    codes = pack_codes(rng.integers(0, K, (n, M)), K)
    index = faiss.IndexIDMap2(inject(Z))
    index.add_sa_codes(codes, np.arange(n) * 3 + 2**40)
    return index, Z, codes, rng.normal(size=(9, M * 12)).astype(np.float32)


@pytest.mark.parametrize("lists", [1, 7, None])
@pytest.mark.parametrize(("M", "K"), [(1, 16), (3, 16), (5, 16), (6, 16), (8, 16), (12, 16), (5, 256)])
def test_the_form_for_gpus_scores_like_the_tables(M: int, K: int, lists: int | None) -> None:
    _, Z, codes, xq = make(M, K)
    ivf = zero_lists(codes, Z, lists=lists)
    assert ivf.code_size in CODE_SIZES
    assert ivf.pq.nbits == 8
    assert ivf.ntotal == 2000
    D, found = ivf.search(pad_vectors(xq, ivf.d), 2000)
    scores = score_codes(xq, codes, Z)
    assert (np.sort(found, axis=1) == np.arange(2000)).all()
    assert np.abs(np.take_along_axis(scores, found, axis=1) - D).max() < 1e-5


def test_lists_grow_with_the_items_and_are_even() -> None:
    _, Z, codes, _ = make(3, n=5000)
    ivf = zero_lists(codes, Z)
    sizes = [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 1


def test_an_index_left_on_the_cpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Faiss does with several GPUs and an index that it cannot place."""
    _, Z, codes, _ = make(3)
    form = zero_lists(codes, Z)
    with pytest.raises(DeviceError, match="left the index on the CPU instead of GPU 1"):
        check_on_gpu(form, 1)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 2)
    given: list[int] = []

    class Resources:
        def setTempMemory(self, size: int) -> None:
            given.append(size)

        def setPinnedMemory(self, size: int) -> None:
            assert size == 0

    monkeypatch.setattr(faiss, "StandardGpuResources", Resources)
    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", lambda _resources, index, _config: index)
    with pytest.raises(DeviceError, match="left the index on the CPU instead of GPU 1"):
        clone_to_gpu(form, 1, 12345)
    assert given == [12345]

    def full(*_: object) -> None:
        raise RuntimeError("Error in alloc: long story\nout of memory on the card")

    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", full)
    with pytest.raises(DeviceError, match=r"cannot copy the index to GPU 1: out of memory on the card$"):
        clone_to_gpu(form, 1)


def test_ids_that_are_positions_take_four_bytes_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _, Z, codes, _ = make(3)
    form = zero_lists(codes, Z)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
    monkeypatch.setattr(
        faiss,
        "StandardGpuResources",
        type("R", (), {"setTempMemory": lambda *_: None, "setPinnedMemory": lambda *_: None}),
    )
    asked: list[int] = []

    def noted(_resources: object, _index: object, config: faiss.GpuIndexIVFPQConfig) -> None:
        assert config.device == 0
        asked.append(config.indicesOptions)
        assert not config.flatConfig.useFloat16
        assert not config.useFloat16LookupTables
        assert not config.usePrecomputedTables
        assert not config.use_cuvs
        assert config.useMMCodeDistance
        raise RuntimeError("no card")

    monkeypatch.setattr(faiss, "GpuIndexIVFPQ", noted)
    for positions, ntotal in ((False, 2000), (True, 2000), (True, 1 << 31)):
        form.ntotal = ntotal
        with pytest.raises(DeviceError, match="no card"):
            clone_to_gpu(form, 0, positions=positions)
    assert asked == [faiss.INDICES_64_BIT, faiss.INDICES_32_BIT, faiss.INDICES_64_BIT]


def test_what_a_scan_takes_on_the_gpu_grows_with_the_items() -> None:
    """Scores of all items and tables of all lists, for each of two streams."""
    assert scan_bytes(1000, 3) == 2 * (4 * 1000 + 1024 * 3 + 8)
    assert scan_bytes(1000, 5, lists=10) == 2 * 10 * (4 * 100 + 1024 * 8 + 8)  # padded to 8 bytes
    assert 8e9 < scan_bytes(10**9, 6) < 8.1e9
    with pytest.raises(UsageError, match="lists"):
        scan_bytes(1000, 3, lists=0)


def test_options_out_of_range_are_refused() -> None:
    index = make(3)[0]
    with pytest.raises(UsageError, match="choose shard or replica"):
        to_gpu(index, mode="both")
    with pytest.raises(UsageError, match="choose exact or approximate"):
        to_gpu(index, search="ivf")
    for devices in ([], [0, 0]):
        with pytest.raises(UsageError, match="name at least one GPU, each once"):
            to_gpu(index, devices=devices)


def test_what_a_gpu_cannot_take_is_refused() -> None:
    for M, K, lists, message in (
        (3, 32, None, r"a GPU supports 16 .* or 256"),
        (49, 256, None, "at most 48"),
        (3, 16, 0, "lists"),
    ):
        _, Z, codes, _ = make(M, K, n=10)
        with pytest.raises(UsageError, match=message):
            zero_lists(codes, Z, lists=lists)


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error() -> None:
    index, Z, codes, _ = make(3)
    for source in (index, MemoryIndex.build(codes, Z)):
        for kind in ("exact", "approximate"):
            with pytest.raises(DeviceError, match="has none"):
                to_gpu(source, search=kind)
    with pytest.raises(DeviceError, match="GPU 1 was requested, but this machine has none"):
        to_gpu(index, devices=[1, 0], mode="replica")


def test_a_faiss_without_gpu_code_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(DeviceError, match="install faiss-gpu"):
        to_gpu(make(3)[0])


@pytest.mark.parametrize("device", [-1, 99])
def test_a_gpu_number_out_of_range_is_an_error(device: int) -> None:
    with pytest.raises(DeviceError, match=f"GPU {device}"):
        to_gpu(make(3)[0], device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("M", [3, 6, 8, 12])
@pytest.mark.parametrize("lists", [1, 16, None])
def test_gpu_equals_cpu(M: int, lists: int | None) -> None:
    index, Z, codes, xq = make(M, n=20_000)
    gpu = to_gpu(index, lists=lists)
    raw = to_gpu(index, lists=lists, search="approximate")
    scores = score_codes(xq, codes, Z)
    for k in (1, 100, 2048, 5000):
        expected_D, expected = open_in_memory(index, "exact").search(xq, k)
        D, found = gpu.search(xq, k)
        assert np.array_equal(D, expected_D)
        assert np.array_equal(found, expected)
        if k > 2048:
            continue
        D, found = raw.search(xq, k)
        assert np.abs(D - expected_D).max() < 1e-4
        assert np.abs(np.take_along_axis(scores, (found - 2**40) // 3, axis=1) - D).max() < 1e-4
        assert all(len(set(row)) == k for row in found.tolist())
    with pytest.raises(DataError, match="dimensions"):
        gpu.search(xq[:, 1:], 1)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="no GPU")
@pytest.mark.parametrize("M", [3, 12])
@pytest.mark.parametrize("lists", [1, 16])
def test_every_query_of_a_large_batch_is_scored_by_its_own_tables(M: int, lists: int) -> None:
    """A query whose tables were mixed with the next one's would miss results that no proof can know of; now and then is enough."""
    index, Z, codes, _ = make(M, n=20_000)
    xq = np.random.default_rng([M, lists]).normal(size=(1024, Z.shape[0] * Z.shape[2])).astype(np.float32)
    expected = -np.sort(-score_codes(xq, codes, Z), axis=1)[:, :100]
    raw = to_gpu(index, lists=lists, search="approximate")
    for _ in range(20):
        assert np.abs(raw.search(xq, 100)[0] - expected).max() < 1e-4


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
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
    assert stderr.startswith("error: GPU 0 was requested")
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
        (engine, batch) for batch in (1, 3) for engine in ("torch", "faiss", "exact")
    ]
    assert result["parity"]["12"]["exact_and_torch"] == "equal to the bit"

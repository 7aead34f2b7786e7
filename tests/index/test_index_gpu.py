"""The GPU form of the flat index: its equality on the CPU everywhere, and on a GPU where there is one."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from gpq_faiss.errors import DataError, DeviceError, UsageError
from gpq_faiss.index.codebooks import inject, inject_fused, pack_codes, pad_vectors, score_codes
from gpq_faiss.index.gpu import CODE_SIZES, ivf_form, to_gpu
from gpq_faiss.index.search import search_index

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
def test_the_ivf_form_scores_like_the_tables(M: int, K: int, lists: int | None) -> None:
    index, Z, codes, xq = make(M, K)
    ivf = ivf_form(index, lists=lists)
    assert ivf.code_size in CODE_SIZES
    assert ivf.pq.nbits == 8
    assert ivf.ntotal == 2000
    D, found = ivf.search(pad_vectors(xq, ivf.d), 2000)
    scores = score_codes(xq, codes, Z)
    assert (np.sort(found, axis=1) == np.arange(2000) * 3 + 2**40).all()
    assert np.abs(np.take_along_axis(scores, (found - 2**40) // 3, axis=1) - D).max() < 1e-5


def test_lists_grow_with_the_items_and_are_even() -> None:
    ivf = ivf_form(make(3, n=5000)[0])
    sizes = [ivf.invlists.list_size(number) for number in range(ivf.nlist)]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 1


def test_a_fused_index_has_the_same_form() -> None:
    index, Z, codes, xq = make(5)
    fused = faiss.IndexIDMap2(inject_fused(Z))
    fused.add_sa_codes(codes, np.arange(2000) * 3 + 2**40)
    one, two = ivf_form(index, lists=2), ivf_form(fused, lists=2)
    assert np.array_equal(
        one.search(pad_vectors(xq, one.d), 50)[1], two.search(pad_vectors(xq, two.d), 50)[1]
    )


def test_what_a_gpu_cannot_take_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a GPU takes 16 .* or 256"):
        ivf_form(make(3, 32)[0])
    with pytest.raises(UsageError, match="at most 48"):
        ivf_form(make(49, 256, n=10)[0])
    with pytest.raises(UsageError, match="lists"):
        ivf_form(make(3)[0], lists=0)
    with pytest.raises(DataError, match="empty"):
        ivf_form(make(3, n=0)[0])


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
def test_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(DeviceError, match="has none"):
        to_gpu(make(3)[0])


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
    for k in (1, 100, 2048):
        D, found = gpu.search(xq, k)
        expected_D, _ = search_index(index, xq, k)
        assert np.abs(D - expected_D).max() < 1e-4
        scores = score_codes(xq, codes, Z)
        assert np.abs(np.take_along_axis(scores, (found - 2**40) // 3, axis=1) - D).max() < 1e-4
        assert all(len(set(row)) == k for row in found.tolist())
    with pytest.raises(UsageError, match="at most 2048"):
        gpu.search(xq, 2049)
    with pytest.raises(DataError, match="dimensions"):
        gpu.search(xq[:, 1:], 1)

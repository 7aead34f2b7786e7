"""The engines that benchmarks/compare.py compares: what they return is what it takes them to return."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch

from gpq_faiss.codes.encode import encode
from gpq_faiss.codes.scores import score_codes

ROOT = Path(__file__).parent.parent
N, Q, WIDTH, K = 700, 6, 32, 20


@pytest.fixture(scope="module")
def engines() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("engines")


@pytest.fixture(scope="module")
def compare(engines: Any) -> Any:
    return importlib.import_module("compare")


def unit(n: int, seed: int) -> np.ndarray:
    x = np.random.default_rng([seed, n]).standard_normal((n, WIDTH))
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


X, XQ = unit(N, 0), unit(Q, 1)
EXACT = XQ @ X.T
Z = np.random.default_rng(2).standard_normal((4, 16, 8)).astype(np.float32)
Z /= np.linalg.norm(Z, axis=2, keepdims=True)


def intra(x: np.ndarray) -> np.ndarray:
    """A network of no weights: sub-vectors of unit norm."""
    parts = x.reshape(len(x), 4, 8)
    return (parts / np.linalg.norm(parts, axis=2, keepdims=True)).reshape(len(x), WIDTH)


def tools(engines: Any, family: str) -> list[Any]:
    if family == "faiss":
        return [engines.flat_floats("g", "flat", WIDTH), *engines.faiss_opq("g", X, 16)]
    if family == "gpq":
        return list(engines.gpq_engines("g", Z, intra))
    pytest.importorskip(family, reason=f"{family} is not installed: pip install {family}")
    if family == "scann":
        return list(engines.scann_trees("g", X, 16))
    if family == "usearch":
        return list(engines.usearch_graphs("g", WIDTH))
    if family == "nanopq":
        return [engines.gpq_in_nanopq("g", Z, 16, intra)]
    return [engines.lancedb_lists("g", "lists", 16)]


@pytest.mark.parametrize("family", ["faiss", "gpq", "nanopq", "lancedb", "usearch", "scann"])
def test_all_find_much_of_what_is_near_and_one_query_is_as_many(
    engines: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LISTS", 8)
    for number, tool in enumerate(tools(engines, family)):
        filled = tool.fill(X, engines.empty_folder(tmp_path / str(number)))
        assert filled.bytes >= N * tool.code_bytes
        best = 0.0
        for search in filled.searches.values():
            ids = search(XQ, K)
            assert ids.shape == (Q, K)
            assert ids.dtype == np.int64
            for row in ids:
                held = row[row >= 0]
                assert len(set(held.tolist())) == len(held)
                assert (np.sort(row < 0) == (row < 0)).all()  # places without an item are last
                assert held.max(initial=0) < N
            near = np.take_along_axis(EXACT, np.maximum(ids, 0), axis=1)[ids >= 0]
            best = max(best, float(near.mean()))
            again = np.concatenate([search(XQ[i : i + 1], K) for i in range(Q)])
            assert (np.sort(again) == np.sort(ids)).mean() > 0.9  # ties may go either way
        # Chance would be about 0; the exact neighbours average what stands on the right.
        assert best > 0.5 * np.sort(EXACT, axis=1)[:, -K:].mean(), tool.name


def test_gpq_is_brute_force(engines: Any, tmp_path: Path) -> None:
    exact = score_codes(intra(XQ), encode(intra(X), Z), Z)
    tool = next(iter(engines.gpq_engines("g", Z, intra)))
    ids = tool.fill(X, engines.empty_folder(tmp_path / "e")).searches[""](XQ, K)
    order = np.argsort(-exact, axis=1, kind="stable")[:, :K]
    np.testing.assert_array_equal(ids, order)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are kept on a core on Linux only")
def test_one_core_is_left_again(engines: Any) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    cores, threads = os.sched_getaffinity(0), faiss.omp_get_max_threads()
    with engines.one_core():
        assert len(os.sched_getaffinity(0)) == 1
        assert faiss.omp_get_max_threads() == torch.get_num_threads() == 1
    assert os.sched_getaffinity(0) == cores
    assert faiss.omp_get_max_threads() == threads
    assert torch.get_num_threads() == 2
    torch.set_num_threads(before)


def test_quality_is_that_of_a_plain_loop(compare: Any) -> None:
    rng = np.random.default_rng(3)
    item_class, query_class = rng.integers(0, 3, 40), rng.integers(0, 4, 9)  # class 3 has no item
    ids = np.stack([rng.permutation(40)[:30] for _ in range(9)])
    ids[4, 20:] = -1
    found = compare.quality(ids, item_class, query_class)
    sums, among, right = [], [], []
    for row, c in zip(ids, query_class, strict=True):
        hits, total = 0, 0.0
        for rank, i in enumerate(row, 1):
            if i >= 0 and item_class[i] == c:
                hits += 1
                total += hits / rank
        sums.append(total / max(1, min(compare.CUTS[0], int((item_class == c).sum()))))
        among.append(total / max(1, hits))
        right.append(hits / len(row))
    assert found[f"map_{compare.CUTS[0]}"] == pytest.approx(np.mean(sums))
    assert found[f"map_{compare.CUTS[0]}_among_found"] == pytest.approx(np.mean(among))
    assert found["precision"] == pytest.approx(np.mean(right))
    assert found["returned"] == pytest.approx(1 - 10 / 270)

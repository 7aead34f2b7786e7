"""Search against brute force over the table sums, ties ordered by id."""

from __future__ import annotations

import itertools

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject, inject_fused
from gpq_faiss.codes.keys import best_keys, read_keys, sort_keys
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.indexes.scanners import rounding_bound
from gpq_faiss.indexes.threads import omp_threads

N = 9000  # so many that not all are scored at once (indexes.proof.FULL)


def codebooks(rng: np.random.Generator, M: int, K: int, d: int = 12) -> np.ndarray:
    Z = rng.normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def filled(Z: np.ndarray, codes: np.ndarray, ids: np.ndarray | None = None) -> object:
    if ids is None:
        index = inject(Z)
        index.add_sa_codes(codes)
        return index
    index = faiss.IndexIDMap2(inject(Z))
    index.add_sa_codes(codes, ids)
    return index


def search_index(index: object, xq: np.ndarray, k: object, kind: str = "exact", **options: int):
    return open_in_memory(index, kind).search(xq, k, **options)


def brute_force(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, k: int):
    scores = score_codes(xq, codes, Z)
    order = np.stack([np.lexsort((ids, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), ids[order]


@pytest.mark.parametrize("K", [4, 16, 32, 256])
@pytest.mark.parametrize("M", [1, 3, 5, 6, 8, 12])
def test_search_is_brute_force(M: int, K: int) -> None:
    rng = np.random.default_rng([M, K])
    Z = codebooks(rng, M, K)
    n = N
    codes = pack_codes(rng.integers(0, K, (n, M)), K)
    ids = rng.permutation(10**12 + np.arange(n) * 7)
    xq = rng.normal(size=(12, M * 12)).astype(np.float32)
    kinds = ("exact", "fused") if K == 16 else ("exact",)
    for k, kind in itertools.product((1, 10, 200, 2000, n), kinds):
        D, found = search_index(filled(Z, codes, ids), xq, k, kind)
        expected_D, expected_I = brute_force(xq, codes, Z, ids, k)
        assert D.dtype == np.float32
        assert found.dtype == np.int64
        assert np.array_equal(found, expected_I)
        assert np.array_equal(D, expected_D)


@pytest.mark.parametrize("mapped", [False, True])
def test_ties_are_ordered_by_id_even_across_the_cut(mapped: bool) -> None:
    """Few distinct codes, so that the k-th place falls inside a tie; the items sit in descending order of id."""
    rng = np.random.default_rng(8)
    Z = codebooks(rng, 6, 16)
    few = pack_codes(rng.integers(0, 16, (5, 6)), 16)
    codes = few[rng.integers(0, 5, N)]
    ids = np.arange(N)[::-1] * 3 - 500 if mapped else np.arange(N)
    xq = rng.normal(size=(6, 72)).astype(np.float32)
    searcher = open_in_memory(filled(Z, codes, np.ascontiguousarray(ids) if mapped else None), "fused")
    for k in (1, 7, 100):
        D, found = searcher.search(xq, k)
        expected_D, expected_I = brute_force(xq, codes, Z, ids, k)
        assert np.array_equal(found, expected_I)
        assert np.array_equal(D, expected_D)


@pytest.mark.parametrize("scale", [0.0, 1e-42, 1e-20, 1e18])
def test_adversarial_scores_stay_exact(scale: float) -> None:
    """Codewords that differ in the last bit, equal codewords, and queries of extreme length."""
    rng = np.random.default_rng(2)
    Z = codebooks(rng, 8, 16)
    Z[:, 8:] = Z[:, :8]
    Z[:, 12:] = np.nextafter(Z[:, :4], np.float32(2))
    codes = pack_codes(rng.integers(0, 16, (N, 8)), 16)
    xq = (rng.normal(size=(8, 96)) * scale).astype(np.float32)
    D, found = search_index(filled(Z, codes), xq, 20)
    expected_D, expected_I = brute_force(xq, codes, Z, np.arange(N), 20)
    assert np.array_equal(found, expected_I)
    assert np.array_equal(D, expected_D)


def test_the_rounding_bound_holds_and_is_not_idle() -> None:
    rng = np.random.default_rng(4)
    for M, K in ((12, 16), (3, 16), (4, 256)):
        Z = codebooks(rng, M, K)
        codes = pack_codes(rng.integers(0, K, (3000, M)), K)
        xq = (rng.normal(size=(20, M * 12)) * np.logspace(-8, 8, 20)[:, None]).astype(np.float32)
        index = filled(Z, codes)
        D, found = index.search(xq, 3000)
        exact = np.take_along_axis(score_codes(xq, codes, Z), found, axis=1)
        gap = np.abs(exact - D).max(axis=1)
        bound = rounding_bound(xq, M, 12)
        assert (gap <= bound).all()
        assert (gap > bound / 1000).any()


def test_the_answer_depends_on_neither_batch_nor_threads_nor_form() -> None:
    rng = np.random.default_rng(6)
    Z = codebooks(rng, 12, 16)
    codes = pack_codes(rng.integers(0, 16, (N, 12)), 16)
    xq = rng.normal(size=(30, 144)).astype(np.float32)
    D, found = search_index(filled(Z, codes), xq, 15)
    fused = inject_fused(Z)
    fused.add_sa_codes(codes)
    before = faiss.omp_get_max_threads()
    for other in (
        search_index(filled(Z, codes), xq, 15, threads=2, block=4),
        search_index(filled(Z, codes), xq.astype(np.float64), 15, block=1),
        search_index(fused, xq, 15),
        tuple(
            np.concatenate(part) for part in zip(*(search_index(fused, q[None], 15) for q in xq), strict=True)
        ),
    ):
        assert np.array_equal(other[0], D)
        assert np.array_equal(other[1], found)
    assert faiss.omp_get_max_threads() == before


def test_a_search_is_a_snapshot() -> None:
    rng = np.random.default_rng(7)
    Z = codebooks(rng, 3, 16)
    codes = pack_codes(rng.integers(0, 16, (300, 3)), 16)
    index = filled(Z, codes, np.arange(300))
    xq = rng.normal(size=(3, 36)).astype(np.float32)
    searcher = open_in_memory(index, "fused")
    before = searcher.search(xq, 300)
    index.reset()
    del index
    after = searcher.search(xq, 300)
    assert np.array_equal(before[0], after[0])
    assert np.array_equal(before[1], after[1])


def test_keys_against_a_sort() -> None:
    rng = np.random.default_rng(9)
    for _ in range(200):
        n = int(rng.integers(1, 30))
        scores = rng.choice(
            np.array([-np.inf, -1e30, -1.5, -1e-44, -0.0, 0.0, 1e-44, 2.5, 3e38], np.float32), n
        )
        positions = rng.permutation(2**32 - 1 - np.arange(n))
        k = int(rng.integers(1, n + 1))
        order = sorted(range(n), key=lambda i: (-scores[i], positions[i]))[:k]
        D, found = read_keys(best_keys(sort_keys(scores, positions), k))
        assert found.tolist() == positions[order].tolist()
        assert D.tolist() == scores[order].tolist()


@pytest.fixture
def small() -> object:
    rng = np.random.default_rng(1)
    Z = codebooks(rng, 3, 16)
    return filled(Z, pack_codes(rng.integers(0, 16, (20, 3)), 16))


@pytest.mark.parametrize("k", [0, -1, 21, 2.0, True])
def test_k_out_of_range_is_refused(small: object, k: object) -> None:
    with pytest.raises(UsageError, match="k = "):
        search_index(small, np.ones((1, 36), np.float32), k)


def test_an_empty_index_is_refused() -> None:
    with pytest.raises(DataError, match="empty: add codes"):
        search_index(inject(codebooks(np.random.default_rng(0), 3, 16)), np.ones((1, 36), np.float32), 1)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (np.ones((0, 36), np.float32), "empty"),
        (np.ones((2, 35), np.float32), "35 dimensions, expected 36"),
        (np.ones(36, np.float32), "two dimensions"),
        (np.full((1, 36), np.nan, np.float32), "NaN or infinity in row 0"),
        (np.full((1, 36), 1e39), "NaN or infinity"),
        (np.ones((1, 36), bool), "expected numbers"),
        (np.full((1, 36), "a"), "expected numbers"),
    ],
)
def test_queries_that_cannot_be_searched_are_refused(
    small: object, queries: np.ndarray, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        search_index(small, queries, 1)


def test_threads_and_block_below_one_are_refused(small: object) -> None:
    with pytest.raises(UsageError, match="threads"):
        search_index(small, np.ones((1, 36), np.float32), 1, threads=0)
    with pytest.raises(UsageError, match="block"):
        search_index(small, np.ones((1, 36), np.float32), 1, block=0)
    before = faiss.omp_get_max_threads()
    with pytest.raises(ZeroDivisionError), omp_threads(1):
        raise ZeroDivisionError
    assert faiss.omp_get_max_threads() == before


def test_other_indexes_are_refused() -> None:
    flat = faiss.IndexFlatIP(36)
    flat.add(np.ones((3, 36), np.float32))
    l2 = faiss.IndexPQ(36, 3, 4)
    l2.is_trained = True
    for index, message in ((flat, "IndexFlat"), (l2, "metric"), (faiss.IndexPQ(36, 3, 4, 0), "not trained")):
        with pytest.raises(DataError, match=message):
            search_index(index, np.ones((1, 36), np.float32), 1)

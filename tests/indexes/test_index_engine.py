"""Search in memory against brute force over the table sums, ties ordered by id."""

from __future__ import annotations

import faiss
import numpy as np
import pytest

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.indexes.codeword_lists import CodewordLists
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory

N = 9000  # so many that not all are scored at once (codeword_lists.SMALL)


def codebooks(rng: np.random.Generator, M: int, K: int = 16, d: int = 12) -> np.ndarray:
    Z = rng.normal(size=(M, K, d))
    return (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)


def brute_force(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, k: int):
    scores = score_codes(xq, codes, Z)
    order = np.stack([np.lexsort((ids, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), ids[order]


def repetitive(rng: np.random.Generator, M: int, n: int, distinct: int, K: int = 16) -> np.ndarray:
    """Codes as training gives them: some very frequent, many rare."""
    few = pack_codes(rng.integers(0, K, (distinct, M)), K)
    return few[np.minimum((rng.pareto(1, n) * 3).astype(int), distinct - 1)]


@pytest.mark.parametrize("M", [1, 3, 6, 12])
def test_search_is_brute_force(M: int) -> None:
    rng = np.random.default_rng([M, 1])
    Z = codebooks(rng, M)
    n = N
    for codes in (pack_codes(rng.integers(0, 16, (n, M)), 16), repetitive(rng, M, n, 60)):
        ids = rng.permutation(10**12 + np.arange(n) * 7)
        engine = MemoryIndex.build(codes, Z, ids)
        xq = rng.normal(size=(20, M * 12)).astype(np.float32)
        for k in (1, 30, 700, n):
            D, found = engine.search(xq, k)
            expected_D, expected_I = brute_force(xq, codes, Z, ids, k)
            assert D.dtype == np.float32
            assert found.dtype == np.int64
            assert np.array_equal(found, expected_I)
            assert np.array_equal(D, expected_D)


@pytest.mark.parametrize("K", [4, 32, 256])
def test_other_codebook_sizes_are_searched_exactly(K: int) -> None:
    rng = np.random.default_rng(K)
    Z = codebooks(rng, 5, K)
    codes = repetitive(rng, 5, N, 400, K)
    xq = rng.normal(size=(6, 60)).astype(np.float32)
    expected = brute_force(xq, codes, Z, np.arange(N), 40)
    D, found = MemoryIndex.build(codes, Z).search(xq, 40)
    assert np.array_equal(found, expected[1])
    assert np.array_equal(D, expected[0])
    for form in ("fused", "fastscan", "ivf"):
        with pytest.raises(UsageError, match="needs 16 codewords"):
            MemoryIndex.build(codes, Z).to_faiss(form)


@pytest.mark.parametrize("case", ["equal tables", "one wide table", "near ties", "zero", "huge", "tiny"])
def test_adversarial_tables_stay_exact(case: str) -> None:
    """FastScan's steps are as coarse as its widest table: there it sees nothing of the others."""
    rng = np.random.default_rng(2)
    Z = codebooks(rng, 8)
    xq = rng.normal(size=(8, 96)).astype(np.float32)
    if case == "equal tables":
        Z[:] = Z[0]
        xq = np.tile(xq[:, :12], 8)
    elif case == "one wide table":
        xq[:, :12] *= 1e4
    elif case == "near ties":
        Z[:, 8:] = Z[:, :8]
        Z[:, 12:] = np.nextafter(Z[:, :4], np.float32(2))
    else:
        xq *= {"zero": 0.0, "huge": 1e18, "tiny": 1e-42}[case]
    codes = pack_codes(rng.integers(0, 16, (N, 8)), 16)
    expected = brute_force(xq, codes, Z, np.arange(N), 20)
    D, found = MemoryIndex.build(codes, Z).search(xq, 20)
    assert np.array_equal(found, expected[1])
    assert np.array_equal(D, expected[0])


def test_the_answer_depends_on_neither_batch_nor_threads() -> None:
    rng = np.random.default_rng(8)
    Z = codebooks(rng, 8)
    codes = repetitive(rng, 8, N, 3000)
    xq = rng.normal(size=(70, 96)).astype(np.float32)
    engine = MemoryIndex.build(codes, Z)
    D, found = engine.search(xq, 15, threads=1)
    before = faiss.omp_get_max_threads()
    for other in (
        engine.search(xq, 15, threads=2),
        engine.search(xq.astype(np.float64), 15),
        tuple(np.concatenate(p) for p in zip(*(engine.search(q[None], 15) for q in xq), strict=True)),
    ):
        assert np.array_equal(other[0], D)
        assert np.array_equal(other[1], found)
    assert faiss.omp_get_max_threads() == before


def filters(ids: np.ndarray, rng: np.random.Generator):
    some = rng.choice(ids, 300, replace=False)
    few = rng.choice(ids, 5, replace=False)
    yield Allow(np.append(some, 10**15)), np.isin(ids, some)
    yield some, np.isin(ids, some)
    yield few.tolist(), np.isin(ids, few)
    yield Deny(few), ~np.isin(ids, few)
    yield Deny([]), np.ones(len(ids), bool)
    yield Allow([]), np.zeros(len(ids), bool)
    yield (lambda i: i % 3 == 0), ids % 3 == 0


def test_filters_are_brute_force_over_what_they_allow() -> None:
    rng = np.random.default_rng(9)
    Z = codebooks(rng, 6)
    n, k = 12_000, 12
    codes = repetitive(rng, 6, n, 900)
    xq = rng.normal(size=(5, 72)).astype(np.float32)
    for ids in (np.arange(n), rng.permutation(5 + 3 * np.arange(n))):
        engine = MemoryIndex.build(codes, Z, ids)
        for where, mask in filters(ids, rng):
            D, found = engine.search(xq, k, where=where)
            m = min(k, int(mask.sum()))
            if m:
                expected = brute_force(xq, codes[mask], Z, ids[mask], m)
                assert np.array_equal(found[:, :m], expected[1])
                assert np.array_equal(D[:, :m], expected[0])
            assert (found[:, m:] == -1).all()
            assert np.isneginf(D[:, m:]).all()


def test_filters_that_are_none_are_refused() -> None:
    engine = MemoryIndex.build(np.zeros((3, 3), np.uint8), codebooks(np.random.default_rng(0), 6))
    xq = np.ones((1, 72), np.float32)
    for where, error, message in (
        ("abc", UsageError, "where = str"),
        (Allow([0.5]), DataError, "allowed ids"),
        (Deny(np.zeros((2, 2), int)), DataError, "denied ids"),
        (lambda ids: ids, DataError, "filter function"),
        (lambda ids: np.ones(2, bool), DataError, "filter function"),
    ):
        with pytest.raises(error, match=message):
            engine.search(xq, 1, where=where)


def test_range_search_is_brute_force() -> None:
    rng = np.random.default_rng(11)
    Z = codebooks(rng, 6)
    n = 9000
    codes = repetitive(rng, 6, n, 5000)
    ids = rng.permutation(np.arange(n) * 2)
    xq = rng.normal(size=(6, 72)).astype(np.float32)
    truth = score_codes(xq, codes, Z)
    engine = MemoryIndex.build(codes, Z, ids)
    for least in (
        float(np.quantile(truth, 0.9995)),
        float(np.quantile(truth, 0.9)),
        1e9,
        float(truth.max()),
        -np.inf,
    ):
        for where, mask in (
            (None, np.ones(n, bool)),
            (lambda i: i % 4 == 0, ids % 4 == 0),
            ([], np.zeros(n, bool)),
        ):
            lims, D, found = engine.range_search(xq, least, where=where)
            assert lims.dtype == found.dtype == np.int64
            for q in range(6):
                hit = np.flatnonzero((truth[q] >= np.float32(least)) & mask)
                hit = hit[np.lexsort((ids[hit], -truth[q][hit]))]
                assert found[lims[q] : lims[q + 1]].tolist() == ids[hit].tolist()
                assert np.array_equal(D[lims[q] : lims[q + 1]], truth[q][hit])
    with pytest.raises(DataError, match="more than 10 results"):
        engine.range_search(xq, -1e9, limit=10)
    with pytest.raises(UsageError, match="NaN"):
        engine.range_search(xq, float("nan"))


def test_adding_removing_and_merging_equal_building_anew() -> None:
    rng = np.random.default_rng(12)
    Z = codebooks(rng, 6)
    codes = repetitive(rng, 6, 3000, 1500)
    ids = rng.permutation(np.arange(3000) * 5 - 4000)
    ids[ids == -1] = 20001
    xq = rng.normal(size=(5, 72)).astype(np.float32)

    def make(part: slice) -> MemoryIndex:
        return MemoryIndex.build(codes[part], Z, ids[part])

    engine = make(slice(0, 1000))
    engine.search(xq, 5)
    engine.add(codes[1000:1500], ids[1000:1500])
    engine.merge(make(slice(1500, 2000)), make(slice(2000, 3000)))
    assert engine.ntotal == 3000
    gone = rng.choice(ids, 700, replace=False)
    assert engine.remove(gone) == 700
    kept = ~np.isin(ids, gone)
    D, found = engine.search(xq, 50)
    expected = brute_force(xq, codes[kept], Z, ids[kept], 50)
    assert np.array_equal(found, expected[1])
    assert np.array_equal(D, expected[0])
    assert engine.remove(gone, missing="ignore") == 0
    with pytest.raises(DataError, match="is not in the index"):
        engine.remove(gone)
    with pytest.raises(DataError, match="is already in use"):
        engine.add(codes[:1], [int(ids[kept][0])])
    with pytest.raises(DataError, match="is already in use"):
        engine.merge(engine)
    with pytest.raises(DataError, match="every item"):
        engine.remove(engine.ids)
    assert engine.ntotal == 2300
    largest = int(engine.ids[-1])
    engine.add(codes[:2])
    assert engine.ids[-2:].tolist() == [largest + 1, largest + 2]
    foreign = MemoryIndex.build(codes, codebooks(rng, 6))
    with pytest.raises(MismatchError, match="shard 1 has codebooks"):
        engine.merge(foreign)


def test_extreme_ids_are_kept() -> None:
    Z = codebooks(np.random.default_rng(0), 3)
    codes = np.array([[1, 2], [3, 4], [5, 6]], np.uint8)
    ids = np.array([2**63 - 1, -(2**63), 0])
    engine = MemoryIndex.build(codes, Z, ids)
    assert sorted(engine.search(np.ones((1, 36), np.float32), 3)[1][0]) == sorted(ids.tolist())
    with pytest.raises(DataError, match="no larger id"):
        engine.add(codes[:1])
    for wrong, message in (
        ([1, 1, 2], "id 1 occurs more than once"),
        ([1, 2], "expected 3"),
        ([-1, 2, 3], "-1 marks"),
        ([0.5, 2, 3], "whole numbers"),
        (np.array([2**63, 1, 2], np.uint64), "64 bits"),
    ):
        with pytest.raises(DataError, match=message):
            MemoryIndex.build(codes, Z, wrong)


def test_what_cannot_be_searched_is_refused() -> None:
    rng = np.random.default_rng(1)
    Z = codebooks(rng, 3)
    codes = pack_codes(rng.integers(0, 16, (20, 3)), 16)
    engine = MemoryIndex.build(codes, Z)
    ones = np.ones((1, 36), np.float32)
    for k in (0, -1, 21, 2.0, True):
        with pytest.raises(UsageError, match="k = "):
            engine.search(ones, k)
    for queries, message in (
        (ones[:0], "empty"),
        (ones[:, 1:], "35 dimensions, expected 36"),
        (ones * np.nan, "NaN"),
        (ones[0], "two dimensions"),
    ):
        with pytest.raises(DataError, match=message):
            engine.search(queries, 1)
    with pytest.raises(UsageError, match="threads"):
        engine.search(ones, 1, threads=0)
    with pytest.raises(UsageError, match="choose from"):
        engine.to_faiss("best")
    with pytest.raises(DataError, match="no codes"):
        MemoryIndex.build(codes[:0], Z)
    with pytest.raises(DataError, match="beyond the last codebook"):
        MemoryIndex.build(codes | 0xF0, Z)
    with pytest.raises(DataError, match="norm"):
        MemoryIndex.build(codes, Z * 2)
    with pytest.raises(DataError, match="IxFI"):
        open_in_memory(faiss.IndexFlatIP(3))


def test_too_many_codes_for_memory_are_refused() -> None:
    huge = np.broadcast_to(np.zeros((1, 2), np.uint8), (1 << 32, 2))
    with pytest.raises(UsageError, match="too many for one search in memory"):
        CodewordLists(huge, codebooks(np.random.default_rng(0), 3))

"""One query by itself is answered by a shorter way: to the bit as in a batch, and as brute force."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.groups import Groups
from gpq_faiss.codes.keys import best_keys, sort_keys
from gpq_faiss.codes.scores import score_codes, score_tables
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.indexes.filters import Allow, Deny
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.proof import ProvenSearch
from gpq_faiss.indexes.scanners import FastScan, loose_bound, rounding_bound

KINDS = ["exact", "grouped", "auto"]
CASES = ["plain", "equal tables", "one wide table", "near ties", "zeros", "zero", "huge", "tiny"]


def make(rng: np.random.Generator, M: int, d: int, n: int, distinct: int, case: str, queries: int = 1):
    """Codebooks, codes and queries."""
    Z = rng.normal(size=(M, 16, d))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    xq = rng.normal(size=(queries, M * d)).astype(np.float32)
    if case == "equal tables":
        Z[:] = Z[0]
        xq = np.ascontiguousarray(np.tile(xq[:, :d], M))
    elif case == "one wide table":
        xq[:, :d] *= 1e4
    elif case == "near ties":
        Z[:, 8:] = Z[:, :8]
        Z[:, 12:] = np.nextafter(Z[:, :4], np.float32(2))
    elif case == "zeros":
        xq[:, ::2] = -0.0
    else:
        xq *= {"plain": 1, "zero": 0.0, "huge": 1e18, "tiny": 1e-42}[case]
    few = pack_codes(rng.integers(0, 16, (distinct, M)), 16)
    return Z, few[rng.integers(0, distinct, n)], xq


def brute_force(xq: np.ndarray, codes: np.ndarray, Z: np.ndarray, ids: np.ndarray, k: int):
    scores = score_codes(xq, codes, Z)
    order = np.stack([np.lexsort((ids, -row)) for row in scores])[:, :k]
    return np.take_along_axis(scores, order, axis=1), ids[order]


def same(found, expected) -> bool:
    """To the bit: 0 is not -0."""
    return all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(found, expected, strict=True)
    )


@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 5, 8, 12, 33]),
    d=st.sampled_from([1, 2, 4, 12, 20]),
    n=st.sampled_from([1, 2, 40, 300, 3000, 30_000]),
    distinct=st.sampled_from([1, 30, 1000, 100_000]),
    case=st.sampled_from(CASES),
    kind=st.sampled_from(KINDS),
    share=st.floats(0, 1),
)
@example(seed=0, M=12, d=12, n=30_000, distinct=100_000, case="plain", kind="exact", share=0.0)
@example(seed=0, M=3, d=12, n=30_000, distinct=4096, case="near ties", kind="grouped", share=0.0)
def test_one_query_is_brute_force(
    seed: int, M: int, d: int, n: int, distinct: int, case: str, kind: str, share: float
) -> None:
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, d, n, distinct, case)
    ids = rng.permutation(10**12 + np.arange(n) * 7)
    k = min(n, max(1, int(n ** (share * 1.01))))
    engine = MemoryIndex.build(codes, Z, ids, kind=kind)
    expected = brute_force(xq, codes, Z, ids, k)
    assert same(engine.search(xq, k), expected)
    assert same(engine.search(xq, k, threads=1), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("M", [3, 6, 12])
def test_one_query_is_its_row_of_a_batch(kind: str, M: int) -> None:
    rng = np.random.default_rng([M, 3])
    Z, codes, xq = make(rng, M, 12, 20_000, 9000, "plain", 40)
    engine = MemoryIndex.build(codes, Z, rng.permutation(20_000), kind=kind)
    for k in (1, 10, 100):
        batch = engine.search(xq, k)
        # several times, since the number of candidates is learnt
        for _ in range(3):
            rows = [engine.search(q[None], k) for q in xq]
            assert same([np.concatenate(part) for part in zip(*rows, strict=True)], batch)


@pytest.mark.parametrize(("M", "n"), [(12, 20_000), (12, 3000), (3, 20_000), (1, 50), (12, 5)])
def test_ordinary_queries_take_the_short_way(M: int, n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng([M, n])
    Z, codes, xq = make(rng, M, 12, n, 10**6, "plain", 30)
    engine = MemoryIndex.build(codes, Z)
    expected = engine.search(xq, 4)

    def refuse(*_: object) -> None:
        raise AssertionError("the way of a batch")

    monkeypatch.setattr(ProvenSearch, "search_keys", refuse)
    rows = [engine.search(q[None], 4) for q in xq]
    assert same([np.concatenate(part) for part in zip(*rows, strict=True)], expected)
    assert engine.stats()["queries"] == 60


def test_one_query_that_cannot_be_proven_gets_the_answer_of_a_batch() -> None:
    rng = np.random.default_rng(4)
    Z, codes, xq = make(rng, 12, 12, 30_000, 3, "plain", 5)
    engine = MemoryIndex.build(codes, Z, kind="exact")
    for q in xq:
        assert same(engine.search(q[None], 10), brute_force(q[None], codes, Z, np.arange(30_000), 10))
    assert engine.stats()["brute_forced"] == 5


def test_zeros_of_one_query_have_no_sign() -> None:
    rng = np.random.default_rng(10)
    Z = make(rng, 2, 2, 1, 1, "plain")[0]
    Z[:, :, 0] = -np.abs(Z[:, :, 0])
    Z[:, 3] = (-0.0, -1)
    codes = pack_codes(rng.integers(0, 16, (1000, 2)), 16)
    xq = np.array([[1, 0, 1, 0]], np.float32)
    best = np.flatnonzero(codes[:, 0] == 0x33)[:1]
    found = MemoryIndex.build(codes, Z, kind="exact").search(xq, 1)
    assert same(found, (np.zeros((1, 1), np.float32), best[None]))


def test_items_of_the_very_least_score_are_found() -> None:
    """FastScan gives none of these."""
    rng = np.random.default_rng(11)
    Z, _, xq = make(rng, 12, 12, 1, 1, "plain")
    worst = pack_codes(score_tables(xq, Z)[0].argmin(axis=1)[None], 16)
    codes = np.repeat(worst, 20_000, axis=0)
    engine = MemoryIndex.build(codes, Z, kind="exact")
    assert same(engine.search(xq, 10), brute_force(xq, codes, Z, np.arange(20_000), 10))


def test_queries_one_by_one_learn_how_many_candidates_to_begin_with() -> None:
    rng = np.random.default_rng(5)
    Z, codes, xq = make(rng, 12, 12, 30_000, 10**6, "plain", 100)
    xq[:, 12:] *= 0.03  # a table wide enough that the others are coarse in its steps
    engine = MemoryIndex.build(codes, Z, kind="exact")
    first = [engine.search(q[None], 10) for q in xq]
    widened = engine.stats()["retried"]
    assert widened > 20
    again = [engine.search(q[None], 10) for q in xq]
    assert engine.stats()["retried"] - widened < widened / 3
    assert all(same(a, b) for a, b in zip(first, again, strict=True))


def test_filters_and_changes_reach_one_query_too() -> None:
    rng = np.random.default_rng(6)
    n, k = 20_000, 10
    for M, distinct in ((12, 10**6), (3, 4096)):
        Z, codes, xq = make(rng, M, 12, n, distinct, "plain")
        ids = np.sort(rng.choice(10 * n, n, replace=False))
        for kind in KINDS:
            engine = MemoryIndex.build(codes, Z, ids, kind=kind)
            engine.search(xq, k)
            for allowed in (n // 2, 300, 4):
                some = rng.choice(n, allowed, replace=False)
                mask = np.zeros(n, bool)
                mask[some] = True
                for where, keep in ((Allow(ids[some]), mask), (Deny(ids[some]), ~mask)):
                    D, found = engine.search(xq, k, where=where)
                    m = min(k, int(keep.sum()))
                    assert same((D[:, :m], found[:, :m]), brute_force(xq, codes[keep], Z, ids[keep], m))
                    assert (found[:, m:] == -1).all()
            best = engine.search(xq, k)[1][0]
            engine.remove(best[:5])
            keep = ~np.isin(ids, best[:5])
            assert same(engine.search(xq, k), brute_force(xq, codes[keep], Z, ids[keep], k))
            engine.add(codes[~keep], ids[~keep])
            assert same(engine.search(xq, k), brute_force(xq, codes, Z, ids, k))


@pytest.mark.filterwarnings("error")
def test_one_query_is_refused_as_a_batch_is() -> None:
    rng = np.random.default_rng(7)
    Z, codes, xq = make(rng, 12, 12, 20_000, 10**6, "plain")
    engine = MemoryIndex.build(codes, Z)
    engine.search(xq, 10)
    for value, message in (
        (np.nan, "NaN or infinity in row 0"),
        (np.inf, "NaN"),
        (3e38, "too large for float32"),
    ):
        bad = xq.copy()
        bad[0, 3:] = value
        with pytest.raises(DataError, match=message):
            engine.search(bad, 10)
    with pytest.raises(DataError, match="143 dimensions"):
        engine.search(xq[:, :-1], 10)
    for k, threads in ((0, 1), (20_001, 1), (10, 0)):
        with pytest.raises(UsageError):
            engine.search(xq, k, threads=threads)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scale", [1e-40, 1e-20, 1e15, 1e18, 1e19])
def test_queries_of_any_size_are_searched_without_a_warning(scale: float) -> None:
    rng = np.random.default_rng(8)
    Z, codes, xq = make(rng, 12, 12, 20_000, 10**6, "plain")
    xq *= np.float32(scale)
    expected = brute_force(xq, codes, Z, np.arange(20_000), 10)
    assert same(MemoryIndex.build(codes, Z).search(xq, 10), expected)


def test_several_threads_search_one_query_each() -> None:
    rng = np.random.default_rng(9)
    for M in (3, 12):
        Z, codes, xq = make(rng, M, 12, 20_000, 10**6, "plain", 60)
        expected = MemoryIndex.build(codes, Z).search(xq, 10)
        engine = MemoryIndex.build(codes, Z)
        with ThreadPoolExecutor(4) as pool:
            rows = list(pool.map(lambda q, engine=engine: engine.search(q[None], 10), xq))
        assert same([np.concatenate(part) for part in zip(*rows, strict=True)], expected)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    M=st.sampled_from([1, 2, 3, 12, 70]),
    d=st.sampled_from([1, 4, 12, 24]),
    case=st.sampled_from(["plain", "equal tables", "one wide table", "near ties", "zeros"]),
    scale=st.sampled_from([1e-12, 1e-6, 1.0, 1e6, 1e13]),
)
def test_the_loose_bound_is_never_below_the_bound(seed: int, M: int, d: int, case: str, scale: float) -> None:
    rng = np.random.default_rng(seed)
    Z, codes, xq = make(rng, M, d, 400, 10**6, case)
    xq *= np.float32(scale)
    squares = float(np.square(xq, dtype=np.float64).sum())
    assume(squares > 1e-30)  # no others are searched by themselves
    tables = score_tables(xq, Z)
    scan = FastScan(codes, Z)
    loose = loose_bound(tables[0], squares, d)
    tight = float(scan.slack(xq, tables)[0])
    assert tight <= loose
    D, found = scan.candidates(xq, 400)
    there = found[0] >= 0
    above = score_codes(xq, codes, Z)[0, found[0, there]] - D[0, there].astype(np.float64)
    assert above.max(initial=-np.inf) <= loose
    half_steps = M / 2 * float((tables.max(2) - tables.min(2)).max()) / 255
    assert loose < 1.02 * half_steps + 20 * M * float(rounding_bound(xq, M, d)[0])


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_groups_of_one_query_are_expanded_as_those_of_many(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=12))
    n = sum(sizes)
    # any division of the positions into groups, numbered by their first members as Groups.of does
    owner = np.array(data.draw(st.permutations(np.repeat(np.arange(len(sizes)), sizes).tolist())))
    codes = owner[:, None].astype(np.uint8)
    groups = Groups.of(codes)
    values = data.draw(
        st.lists(st.sampled_from([0.5, 0.25, 1.0, -3.0]), min_size=len(groups), max_size=len(groups))
    )
    k = data.draw(st.integers(1, n))
    scores = np.array(values, np.float32)
    keys = best_keys(sort_keys(scores, np.arange(len(groups))), min(k, len(groups)))
    at = 0xFFFF_FFFF - (keys & 0xFFFF_FFFF)
    D, positions = groups.expand_one(scores[at], at, k)
    each = np.empty(n, np.float32)
    for g in range(len(groups)):
        each[groups.members[groups.starts[g] : groups.starts[g + 1]]] = scores[g]
    order = np.lexsort((np.arange(n), -each))[:k]
    assert same((D, positions), (each[order], order))

"""Likeness against an oracle that goes through every order of ties, and neighbours against exact fractions."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation.likeness import Neighbours, likeness, nearest, spaced_queries
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.methods.registry import make_method

SETTINGS = settings(max_examples=60, deadline=None)


def orders(scores: np.ndarray) -> list[list[int]]:
    """Every order of the items that is one of descending scores."""
    items = range(len(scores))
    return [
        list(order)
        for order in itertools.permutations(items)
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]


def expected_share(scores: np.ndarray, wanted: list[int], k: int) -> float:
    shares = [len(set(order[:k]) & set(wanted)) / len(wanted) for order in orders(scores)]
    return float(np.mean(shares))


def cosine_order(query: np.ndarray, items: np.ndarray) -> list[int]:
    """Positions by cosine in exact fractions (its square, with its sign), equal ones by position."""

    def key(i: int) -> tuple[Fraction, int]:
        dot, square = int(query @ items[i]), int(items[i] @ items[i])
        return (Fraction(0) if square == 0 else -Fraction(dot * abs(dot), square)), i

    return sorted(range(len(items)), key=key)


@SETTINGS
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]), st.booleans())
def test_neighbours_are_those_of_exact_arithmetic_whatever_the_blocks(seed: int, n: int, multi: bool) -> None:
    r = np.random.default_rng(seed)
    xq, xb = r.integers(-2, 3, (4, 3)), r.integers(-2, 3, (int(r.integers(1, 14)), 3))
    xq[~xq.any(axis=1)] = 1
    yq, yb = (r.random((len(x), 10 if multi else 3)) < 0.25 for x in (xq, xb))
    queries = np.array([1, 4, 6, 9])
    found = None
    for size in (1, 3, len(xb)):
        blocks = [xb[i : i + size].astype(np.float32) for i in range(0, len(xb), size)]
        other = nearest(queries, xq.astype(np.float32), blocks, yq, yb, n)
        if found is not None:
            np.testing.assert_array_equal(other.overall, found.overall)
            np.testing.assert_array_equal(other.within, found.within)
        found = other
    assert found is not None
    for i, query in enumerate(xq):
        order = cosine_order(query, xb)
        same = [j for j in order if (yq[i] & yb[j]).any()]
        for wanted, row in ((order, found.overall[i]), (same, found.within[i])):
            assert row.tolist() == (wanted + [-1] * n)[:n]
        assert np.flatnonzero(found.meets[i][found.set_of]).tolist() == sorted(same)


def small(
    seed: int, n: int, neighbours: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Neighbours]:
    """Codes with many ties, tables of all queries, and the neighbours of some of them."""
    r = np.random.default_rng(seed)
    codes = r.integers(0, 3, (n, 2)).astype(np.uint8)
    tables = r.integers(-1, 2, (5, 2, 3)).astype(np.float32)
    yq, yb = r.integers(-1, 2, 5), r.integers(-1, 2, n)
    xq, xb = r.standard_normal((5, 4)).astype(np.float32), r.standard_normal((n, 4)).astype(np.float32)
    queries = np.array([0, 2, 3])
    return codes, tables, yq, yb, nearest(queries, xq[queries], [xb], yq[queries], yb, neighbours)


@SETTINGS
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.booleans())
def test_shares_are_the_mean_over_every_order_of_ties(
    seed: int, n: int, neighbours: int, k: int, function: bool
) -> None:
    codes, tables, yq, yb, near = small(seed, n, neighbours)
    scores = sum(tables[:, m, codes[:, m]] for m in range(2))

    def score(q: np.ndarray, distinct: np.ndarray) -> np.ndarray:
        return np.asarray(sum(tables[q][:, m, distinct[:, m]] for m in range(2)))

    found = likeness(score if function else tables, codes, near, n_queries=5, k=k, memory=1)
    shares, within = [], []
    for i, q in enumerate(near.queries):
        shares.append(expected_share(scores[q], [j for j in near.overall[i] if j >= 0], k))
        same = np.flatnonzero((yb == yq[q]) & (yb >= 0))
        if len(same):
            wanted = [int(np.flatnonzero(same == j)[0]) for j in near.within[i] if j >= 0]
            within.append(expected_share(scores[q][same], wanted, k))
    assert found.nn10_at_100 == pytest.approx(np.mean(shares), abs=1e-12)
    if within:
        assert found.within_class == pytest.approx(np.mean(within), abs=1e-12)
    else:
        assert found.within_class is None
    assert found.queries == 3
    assert f"@{k}:" in found.definition


@SETTINGS
@given(st.integers(0, 2**32), st.integers(1, 60))
def test_distinct_items_are_those_of_a_stable_sort_by_id(seed: int, n: int) -> None:
    codes, tables, _, _, near = small(seed, n, 3)
    ids = np.random.default_rng(seed).permutation(n) * 7
    scores = sum(tables[:, m, codes[:, m]] for m in range(2))
    tops = [np.lexsort((ids, -scores[q]))[:10] for q in near.queries]
    assert likeness(tables, codes, near, n_queries=5, ids=ids).distinct_in_tops == len(
        set(np.concatenate(tops))
    )


def test_blocks_of_queries_do_not_matter() -> None:
    codes, tables, _, _, near = small(3, 200, 10)
    assert likeness(tables, codes, near, n_queries=5, memory=1) == likeness(tables, codes, near, n_queries=5)


def clustered(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Queries and a database in five classes of 200 items."""
    r = np.random.default_rng(seed)
    centres = 3 * r.standard_normal((5, 16))
    yq, yb = np.arange(40) % 5, np.arange(1000) % 5
    xq, xb = (centres[y] + r.standard_normal((len(y), 16)) for y in (yq, yb))
    return xq.astype(np.float32), xb.astype(np.float32), yq, yb


def test_floats_keep_all_likeness_and_a_class_code_none_though_its_map_is_perfect() -> None:
    xq, xb, yq, yb = clustered(0)
    near = nearest(np.arange(40), xq, [xb[:300], xb[300:]], yq, yb)
    exact = make_method("float", 32).fit(xb)
    found = likeness(
        lambda q, distinct: exact.score(xq[q], distinct), exact.encode(xb), near, n_queries=40, k=10
    )
    assert found.nn10_at_100 == found.within_class == 1
    assert found.distinct_in_tops > 200
    # The code is the class: a perfect ranking by label, that gives every query of a class the same results.
    tables = (yq[:, None, None] == np.arange(5)).astype(np.float32)
    codes = yb[:, None].astype(np.uint8)
    assert rank_codes(tables, codes, yq, yb).map == pytest.approx(1)
    told = likeness(tables, codes, near, n_queries=40)
    assert told.within_class == pytest.approx(0.5), "100 of 200 items in random order"
    assert told.nn10_at_100 <= 0.5
    assert told.distinct_in_tops == 50


def test_queries_are_evenly_spaced_and_at_most_so_many() -> None:
    assert spaced_queries(7).tolist() == list(range(7))
    rows = spaced_queries(1001)
    assert len(rows) == 400
    assert (rows[0], rows[-1]) == (0, 1000)
    assert set(np.diff(rows)) <= {2, 3}


def test_what_does_not_belong_together_is_refused() -> None:
    x, y = np.ones((3, 2), np.float32), np.zeros(3, int)
    for blocks in ([x[:2]], [x, x], []):
        with pytest.raises(DataError, match="3 labels"):
            nearest(np.arange(3), x, blocks, y, y)
    with pytest.raises(DataError, match="rows of 2 numbers"):
        nearest(np.arange(3), x, [np.ones((3, 4), np.float32)], y, y)
    with pytest.raises(DataError, match="one row"):
        nearest(np.arange(2), x, [x], y, y)
    with pytest.raises(UsageError, match="at least 1"):
        nearest(np.arange(3), x, [x], y, y, 0)
    near = nearest(np.arange(3), x, [x], y, y)
    tables = np.ones((3, 1, 2), np.float32)
    with pytest.raises(DataError, match="uint8"):
        likeness(tables, np.zeros((4, 1), np.uint8), near, n_queries=3)
    with pytest.raises(UsageError, match="must be at least 1"):
        likeness(tables, np.zeros((3, 1), np.uint8), near, n_queries=3, k=0)

"""Likeness against an oracle that goes through every order of ties, and neighbours against exact fractions."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.errors import DataError
from gpq_faiss.evaluation.likeness import likeness, nearest, spaced_queries
from gpq_faiss.evaluation.ranking import rank_codes
from gpq_faiss.methods.registry import make_method


def expected_share(scores, wanted, k):
    """Mean over every order of the items that is one of descending scores."""
    shares = [
        len(set(order[:k]) & set(wanted)) / len(wanted)
        for order in itertools.permutations(range(len(scores)))
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order))
    ]
    return float(np.mean(shares))


def cosine_order(query, items):
    """Positions by cosine in exact fractions (its square, with its sign), equal ones by position."""

    def key(i):
        dot, square = int(query @ items[i]), int(items[i] @ items[i])
        return (Fraction(0) if square == 0 else -Fraction(dot * abs(dot), square)), i

    return sorted(range(len(items)), key=key)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5]))
def test_neighbours_are_those_of_exact_arithmetic_whatever_the_blocks(seed, n):
    r = np.random.default_rng(seed)
    xq, xb = r.integers(-2, 3, (4, 3)), r.integers(-2, 3, (int(r.integers(1, 14)), 3))
    xq[~xq.any(axis=1)] = 1
    for size in (1, 3, len(xb)):
        blocks = [xb[i : i + size].astype(np.float32) for i in range(0, len(xb), size)]
        found = nearest(xq.astype(np.float32), blocks, n)
        assert found.tolist() == [(cosine_order(query, xb) + [-1] * n)[:n] for query in xq]


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_shares_are_the_mean_over_every_order_of_ties(seed, n, neighbours, k, function):
    r = np.random.default_rng(seed)
    codes = r.integers(0, 3, (n, 2)).astype(np.uint8)
    tables = r.integers(-1, 2, (5, 2, 3)).astype(np.float32)
    xq, xb = r.standard_normal((5, 4)).astype(np.float32), r.standard_normal((n, 4)).astype(np.float32)
    near = nearest(xq, [xb], neighbours)

    def score(q, distinct):
        return np.asarray(sum(tables[q][:, m, distinct[:, m]] for m in range(2)))

    scores = score(np.arange(5), codes)
    found = likeness(score if function else tables, codes, near, n_queries=5, k=k, memory=1)
    shares = [expected_share(scores[q], [j for j in near[q].tolist() if j >= 0], k) for q in range(5)]
    assert found.nn10_at_100 == pytest.approx(np.mean(shares), abs=1e-12)
    assert found.queries == 5
    assert f"@{k}:" in found.definition
    assert found == likeness(tables, codes, near, n_queries=5, k=k)


def test_floats_keep_all_likeness_and_a_class_code_none_of_evenly_spaced_queries():
    r = np.random.default_rng(0)
    centres = 3 * r.standard_normal((5, 16))
    yq, yb = np.arange(40) % 5, np.arange(1000) % 5
    xq, xb = ((centres[y] + r.standard_normal((len(y), 16))).astype(np.float32) for y in (yq, yb))
    near = nearest(xq, [xb[:300], xb[300:]])
    exact = make_method("float", 32).fit(xb)
    codes = exact.encode(xb)
    assert likeness(lambda q, c: exact.score(xq[q], c), codes, near, n_queries=40, k=10).nn10_at_100 == 1
    # The code is the class: a perfect ranking by label, that gives every query of a class the same results.
    tables = (yq[:, None, None] == np.arange(5)).astype(np.float32)
    codes = yb[:, None].astype(np.uint8)
    assert rank_codes(tables, codes, yq, yb).map == pytest.approx(1)
    assert likeness(tables, codes, near, n_queries=40).nn10_at_100 <= 0.5
    with pytest.raises(DataError, match="do not fit"):
        likeness(tables, codes[:5], near, n_queries=40)
    assert spaced_queries(7).tolist() == list(range(7))
    rows = spaced_queries(1001)
    assert len(rows) == 400
    assert (rows[0], rows[-1]) == (0, 1000)
    assert set(np.diff(rows)) <= {2, 3}

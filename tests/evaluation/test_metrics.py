"""Measures against hand-worked cases, all orders of the ties, scikit-learn, and their own other forms."""

import doctest
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.evaluation import metrics
from gpq_faiss.evaluation.metrics import (
    average_precision,
    average_precision_grouped,
    pr_curve,
    precision_at_k,
    recall_at_k,
)
from gpq_faiss.evaluation.ties import harmonic_numbers

SETTINGS = settings(max_examples=60, deadline=None)
items = st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=6)
CUTS = [
    (None, "relevant"),
    (1, "relevant"),
    (3, "relevant"),
    (3, "min(k, relevant)"),
    (2, "relevant-in-top-k"),
    (4, "relevant-in-top-k"),
    (9, "relevant-in-top-k"),
]


def orders(scores):
    """Every ranking that the scores allow, each as often as the others."""
    for order in itertools.permutations(range(len(scores))):
        if all(scores[a] >= scores[b] for a, b in itertools.pairwise(order)):
            yield list(order)


def plain_ap(relevant, k=None, denominator="relevant"):
    """The definition, in exact fractions, for one order."""
    k = len(relevant) if k is None else k
    top = relevant[:k]
    total = sum((Fraction(sum(top[: i + 1]), i + 1) for i, hit in enumerate(top) if hit), Fraction(0))
    below = {
        "relevant": sum(relevant),
        "relevant-in-top-k": sum(top),
        "min(k, relevant)": min(k, sum(relevant)),
    }
    return total / below[denominator] if below[denominator] else Fraction(0)


def test_the_docstring_example_is_true():
    assert doctest.testmod(metrics).failed == 0
    assert doctest.testmod(metrics).attempted > 0


def test_hand_worked_without_ties():
    # ranks of the relevant: 1, 3, 4 -> (1/1 + 2/3 + 3/4) / 3
    ap = average_precision([5.0, 4.0, 3.0, 2.0, 1.0], [True, False, True, True, False])
    assert ap.values == pytest.approx([(1 + 2 / 3 + 3 / 4) / 3], rel=1e-14)
    assert ap.convention == (
        "mAP, full ranking, divided by all relevant items, expected value over random order within ties"
    )


def test_hand_worked_tie():
    scores, relevant = [2.0, 1.0, 1.0, 1.0], [False, True, True, False]
    assert average_precision(scores, relevant, ties="best").mean == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision(scores, relevant, ties="worst").mean == pytest.approx((1 / 3 + 2 / 4) / 2)
    # the non-relevant item of the tie stands third, second or fourth with probability 1/3 each
    middle = ((1 / 2 + 2 / 4) / 2 + (1 / 3 + 2 / 4) / 2 + (1 / 2 + 2 / 3) / 2) / 3
    assert average_precision(scores, relevant).mean == pytest.approx(middle)
    assert average_precision(scores, relevant, ties="id").mean == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert average_precision(scores, relevant, ties="id", ids=[0, 9, 8, 7]).mean == pytest.approx(
        (1 / 3 + 2 / 4) / 2
    )


def test_a_ranking_that_is_one_tie_of_everything():
    n, r = 50, 7
    relevant = np.arange(n) < r
    expected = sum((1 + (i - 1) * (r - 1) / (n - 1)) / i for i in range(1, n + 1)) / n
    assert average_precision(np.zeros(n), relevant).mean == pytest.approx(expected, rel=1e-13)


@SETTINGS
@given(items)
def test_expected_value_is_the_mean_over_all_orders(pairs):
    scores, relevant = [float(s) for s, _ in pairs], [r for _, r in pairs]
    rankings = [[relevant[i] for i in order] for order in orders(scores)]
    for k, denominator in CUTS:
        all_of_them = [plain_ap(ranking, k, denominator) for ranking in rankings]
        mean = float(sum(all_of_them) / len(all_of_them))
        got = average_precision(scores, relevant, k=k, denominator=denominator).values[0]
        assert got == pytest.approx(mean, abs=1e-12), (k, denominator)
        if denominator != "relevant-in-top-k":
            best = average_precision(scores, relevant, k=k, denominator=denominator, ties="best").values[0]
            worst = average_precision(scores, relevant, k=k, denominator=denominator, ties="worst").values[0]
            assert best == pytest.approx(float(max(all_of_them)), abs=1e-12)
            assert worst == pytest.approx(float(min(all_of_them)), abs=1e-12)
    for k in range(1, len(pairs) + 3):
        found = [sum(ranking[:k]) for ranking in rankings]
        total = max(1, sum(relevant))
        for ties, value in (("expected", np.mean(found)), ("best", max(found)), ("worst", min(found))):
            assert precision_at_k(scores, relevant, [k], ties=ties).values[0, 0] == pytest.approx(value / k)
            assert recall_at_k(scores, relevant, [k], ties=ties).values[0, 0] == pytest.approx(value / total)


@SETTINGS
@given(items)
def test_curves_follow_from_the_expected_counts_over_all_orders(pairs):
    scores, relevant = [float(s) for s, _ in pairs], [r for _, r in pairs]
    n, total = len(pairs), max(1, sum(relevant))
    rankings = [[relevant[i] for i in order] for order in orders(scores)]
    found = np.array([np.mean([sum(ranking[:k]) for ranking in rankings]) for k in range(1, n + 1)])
    precision, recall = found / np.arange(1, n + 1), found / total
    every = pr_curve(scores, relevant, levels=None)
    assert every.precision[0] == pytest.approx(precision)
    assert every.recall[0] == pytest.approx(recall)
    levels = np.array([0.0, 0.1, 0.25, 1 / 3, 0.5, 0.75, 1.0])
    wanted = [max((precision[recall >= level - 1e-9]), default=0.0) for level in levels]
    if not any(relevant):
        wanted = [0.0] * len(levels)
    assert pr_curve(scores, relevant, levels=levels).precision[0] == pytest.approx(wanted)


@SETTINGS
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 8))
def test_grouped_equals_ungrouped(seed, n, u):
    r = np.random.default_rng(seed)
    code_of = r.integers(0, u, n)
    code_scores = r.integers(-2, 3, (3, u)).astype(np.float32)  # different codes tie too
    relevant = r.random((3, n)) < 0.4
    counts = np.bincount(code_of, minlength=u)
    hits = np.stack([np.bincount(code_of[row], minlength=u) for row in relevant])
    for k, denominator in CUTS:
        for ties in ("expected", "best", "worst"):
            one = average_precision(
                code_scores[:, code_of], relevant, ties=ties, k=k, denominator=denominator
            )
            two = average_precision_grouped(
                code_scores, counts, hits, ties=ties, k=k, denominator=denominator
            )
            assert two.values == pytest.approx(one.values, abs=1e-12)
            assert two.convention == one.convention


def test_equals_scikit_learn_where_nothing_ties():
    r = np.random.default_rng(0)
    scores = r.permutation(4000).reshape(4, 1000).astype(np.float64)
    relevant = r.random((4, 1000)) < 0.1
    wanted = [average_precision_score(y, s) for y, s in zip(relevant, scores, strict=True)]
    for ties in ("expected", "id", "best", "worst"):
        assert average_precision(scores, relevant, ties=ties).values == pytest.approx(wanted, rel=1e-12)


@SETTINGS
@given(st.integers(0, 2**32))
def test_best_expected_worst_are_in_that_order(seed):
    r = np.random.default_rng(seed)
    scores, relevant = r.integers(0, 5, (2, 60)), r.random((2, 60)) < 0.3
    best, expected, worst, by_id = (
        average_precision(scores, relevant, ties=t).values for t in ("best", "expected", "worst", "id")
    )
    assert (best >= expected - 1e-12).all()
    assert (expected >= worst - 1e-12).all()
    assert ((best >= by_id - 1e-12) & (by_id >= worst - 1e-12)).all()


def test_a_query_without_relevant_items_counts_zero_and_is_reported():
    ap = average_precision([[1.0, 2.0], [1.0, 2.0]], [[True, True], [False, False]])
    assert ap.values.tolist() == [1.0, 0.0]
    assert ap.without_relevant == 1
    assert ap.mean == 0.5
    assert recall_at_k([1.0, 2.0], [False, False], [1]).values.tolist() == [[0.0]]


def test_long_rankings_keep_their_precision():
    # 200,000 items in ties of 4 with one relevant each, summed the slow way
    n, size = 200_000, 4
    scores = -(np.arange(n) // size).astype(np.float64)
    relevant = np.arange(n) % size == 0
    b = np.arange(n // size)
    wanted = math.fsum(
        math.fsum((b + 1) / (b * size + i)) / size for i in range(1, size + 1)
    ) / (n // size)  # fmt: skip
    assert average_precision(scores, relevant).mean == pytest.approx(wanted, rel=1e-12)


def test_harmonic_numbers_across_their_blocks():
    h = harmonic_numbers((1 << 20) + 5)
    assert h[:4].tolist() == [0, 1, 1.5, pytest.approx(11 / 6)]
    n = len(h) - 1
    assert h[n] == pytest.approx(math.log(n) + np.euler_gamma + 1 / (2 * n) - 1 / (12 * n * n), rel=4e-16)
    assert np.allclose(np.diff(h), 1 / np.arange(1, n + 1), rtol=0, atol=4e-15)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: average_precision([1.0], [True], ties="random"), UsageError),
        (lambda: average_precision([1.0], [True], denominator="min(k, relevant)"), UsageError),
        (lambda: average_precision([1.0], [True], k=3, denominator="all"), UsageError),
        (lambda: average_precision([1.0], [True], k=0), UsageError),
        (lambda: precision_at_k([1.0], [True], [0]), UsageError),
        (lambda: pr_curve([1.0], [True], levels=[0.5, 0.1]), UsageError),
        (lambda: average_precision_grouped([1.0], [1], [1], ties="id"), UsageError),
        (lambda: average_precision([1.0, 2.0], [True]), DataError),
        (lambda: average_precision([math.nan], [True]), DataError),
        (lambda: average_precision([1.0], [2]), DataError),
        (lambda: average_precision([1.0, 2.0], [True, True], ties="id", ids=[3, 3]), DataError),
        (lambda: average_precision_grouped([1.0], [1], [2]), DataError),
    ],
)
def test_bad_arguments_are_one_clear_line(call, error):
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value)

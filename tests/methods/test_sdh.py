"""Supervised discrete hashing: every step of its turns is the minimum it should be."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from array_methods import QUERIES, assert_bits_rank_as_score, digits, digits_map
from numpy.typing import NDArray

from gpq_faiss.data.labels import Labels
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.sdh import SDH, discrete_codes, ridge_regression, squared_distances

Doubles = NDArray[np.float64]


def clusters(n: int, seed: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    centres = np.random.default_rng(99).standard_normal((4, 12))
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, n)
    return (centres[ids] + 0.7 * rng.standard_normal((n, 12))).astype(np.float32), ids


X, IDS = clusters(300, 0)
XB, IDS_B = clusters(120, 1)


def b_objective(B: Doubles, W: Doubles, Q: Doubles) -> float:
    """What the B-step minimises: ||B W||² - 2 Tr(Bᵀ Q), by loops."""
    total = 0.0
    for i in range(len(B)):
        for c in range(W.shape[1]):
            total += sum(B[i, j] * W[j, c] for j in range(B.shape[1])) ** 2
        total -= 2 * sum(B[i, j] * Q[i, j] for j in range(B.shape[1]))
    return total


def test_no_single_bit_can_be_bettered_after_the_descent() -> None:
    rng = np.random.default_rng(0)
    W, Q = rng.standard_normal((6, 4)), rng.standard_normal((8, 6)) * 3
    start = np.where(rng.random((8, 6)) < 0.5, -1.0, 1.0)
    B = discrete_codes(start, W, Q, sweeps=50)
    assert set(np.unique(B)) == {-1.0, 1.0}
    best = b_objective(B, W, Q)
    assert best < b_objective(start, W, Q)
    for i, j in itertools.product(range(8), range(6)):
        other = B.copy()
        other[i, j] *= -1
        assert b_objective(other, W, Q) >= best - 1e-9
    # A single sweep is the paper's update, bit by bit: z = sgn(q - B' W' w).
    one = start.copy()
    for j in range(6):
        rest = [m for m in range(6) if m != j]
        one[:, j] = np.sign(Q[:, j] - one[:, rest] @ W[rest] @ W[j])
    np.testing.assert_array_equal(discrete_codes(start, W, Q, sweeps=1), one)


def test_a_bit_without_any_pull_stays() -> None:
    B = np.array([[1.0, -1.0], [-1.0, 1.0]])
    np.testing.assert_array_equal(discrete_codes(B, np.zeros((2, 3)), np.zeros((2, 2))), B)


def test_the_classifier_is_the_minimum_of_its_ridge_regression() -> None:
    rng = np.random.default_rng(1)
    B, y = np.sign(rng.standard_normal((40, 5))), rng.random((40, 3))

    def value(W: Doubles) -> float:
        return float(((y - B @ W) ** 2).sum() + 2.5 * (W**2).sum())

    W = ridge_regression(B, y, 2.5)
    for _ in range(20):
        assert value(W + 1e-3 * rng.standard_normal(W.shape)) > value(W)


def test_distances_are_distances() -> None:
    expected = [[float(((a.astype(float) - b.astype(float)) ** 2).sum()) for b in XB[:7]] for a in X[:9]]
    np.testing.assert_allclose(squared_distances(X[:9], XB[:7]), expected, rtol=1e-9)
    assert squared_distances(X, X).min() >= 0


def test_turns_lower_the_objective_and_codes_are_the_hash_functions() -> None:
    method = SDH(8, anchors=50, iterations=6, nu=1e-2).fit(X, Labels.from_ids(IDS))
    assert len(method.objectives) == 6
    assert method.objectives[-1] < 0.9 * method.objectives[0]
    # Of the turns after the first, each step is a minimum over what it changes, up to the ridge on P.
    assert (np.diff(method.objectives[1:]) <= 1e-3 * method.objectives[1]).all()
    unit = XB / np.linalg.norm(XB, axis=1, keepdims=True)
    values = method.project(XB)
    for i, bit in itertools.product(range(5), range(8)):
        kernels = np.exp(-((unit[i].astype(float) - method._anchors) ** 2).sum(axis=1) / method._sigma)
        assert values[i, bit] == pytest.approx((kernels - method._mean) @ method._P[:, bit], abs=1e-4)


def test_reads_labelled_rows_alone() -> None:
    labels = Labels.from_ids(IDS)
    seen = np.arange(0, 300, 2)
    part = SDH(8, anchors=40).fit(X, labels.masked(seen))
    other = X.copy()
    other[1::2] = 0
    same = SDH(8, anchors=40).fit(other, labels.masked(seen))
    np.testing.assert_array_equal(part.encode(XB), same.encode(XB))
    for nothing in (None, labels.masked(seen[:0])):
        with pytest.raises(DataError, match="no item has one"):
            SDH(8).fit(X, nothing)


def test_the_index_ranks_as_the_score_and_codes_repeat() -> None:
    labels = Labels.from_ids(IDS)
    method = SDH(12, anchors=60).fit(X, labels)
    assert_bits_rank_as_score(method, X[:9], XB)
    again = SDH(12, anchors=60).fit(X, labels)
    np.testing.assert_array_equal(method.encode(XB), again.encode(XB))
    assert (SDH(12, anchors=60, seed=3).fit(X, labels).encode(XB) != method.encode(XB)).any()


def test_several_labels_an_item() -> None:
    both = np.zeros((300, 5), bool)
    both[np.arange(300), IDS] = True
    both[IDS >= 2, 4] = True  # classes 2 and 3 have a label in common
    method = SDH(16, anchors=100).fit(X, Labels.from_multihot(both))
    codes = np.unpackbits(method.encode(XB), axis=1, bitorder="little").astype(int)
    centre = np.stack([codes[c == IDS_B].mean(axis=0) for c in range(4)])
    distance = np.abs(centre[:, None] - centre).sum(axis=2)
    assert distance[2, 3] < min(
        distance[0, 2], distance[0, 3], distance[1, 2], distance[1, 3], distance[0, 1]
    )


def test_works_on_digits() -> None:
    x, y = digits()
    seen = slice(QUERIES, 700)
    assert digits_map(SDH(16, anchors=300).fit(x[seen], y.take(seen))) > 0.8
    shuffled = y.take(np.random.default_rng(1).permutation(np.arange(QUERIES, 700)))
    assert digits_map(SDH(16, anchors=300).fit(x[seen], shuffled)) < 0.5


@pytest.mark.parametrize(
    "bad", [{"anchors": 0}, {"width": 0}, {"nu": 0}, {"lambda_": 0}, {"ridge": -1}, {"iterations": 0}]
)
def test_refuses_what_cannot_be(bad: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        SDH(8, **bad)  # type: ignore[arg-type]

"""The noise that labels call for, and how often they say a model will be right: against leaving out one item after the other, and in
the trainings that use it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import RidgeCV

from gpq_faiss.config import Config, merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import least_error, leave_one_out
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.nn.heads import SubspaceHeads

GRID = 2.0 ** (np.arange(33) / 4 - 5)


def predicted_by_others(x: np.ndarray, y: np.ndarray, sigma: float) -> np.ndarray:
    """Every item predicted by a ridge regression of the others, with one centre for all, item by item."""
    X, Y = x - x.mean(axis=0), y - y.mean(axis=0)
    n, w = X.shape
    # The intercept as a column of its own that is not shrunk.
    A = np.concatenate([X, np.ones((n, 1))], axis=1)
    penalty = n * sigma**2 * np.diag([1.0] * w + [0.0])
    found = []
    for i in range(n):
        rest = np.arange(n) != i
        B = np.linalg.solve(A[rest].T @ A[rest] + penalty, A[rest].T @ Y[rest])
        found.append(A[i] @ B + y.mean(axis=0))
    return np.array(found)


def left_out_error(x: np.ndarray, y: np.ndarray, sigma: float) -> float:
    return float(((predicted_by_others(x, y, sigma) - y) ** 2).sum())


def least_error_noise(x: np.ndarray, y: np.ndarray) -> float:
    return least_error(x, y)[0]


@given(seed=st.integers(0, 1000), n=st.integers(4, 12), width=st.integers(1, 15), spread=st.floats(0.1, 3))
@settings(max_examples=40, deadline=None)
def test_no_other_noise_errs_less_on_items_left_out(seed: int, n: int, width: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, width)).astype(np.float32)
    y = np.eye(3, dtype=np.float32)[rng.integers(0, 3, n)] + spread * x[:, :1].astype(np.float32)
    found, predicted = least_error(x, y)
    assert np.isclose(GRID, found).any()
    expected = predicted_by_others(x.astype(float), y.astype(float), found)
    np.testing.assert_allclose(predicted, expected, atol=1e-5 * (1 + np.abs(expected).max()))
    errors = [left_out_error(x.astype(float), y.astype(float), sigma) for sigma in GRID]
    assert left_out_error(x.astype(float), y.astype(float), found) <= min(errors) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize(("n", "width"), [(30, 8), (20, 40), (300, 16)])
def test_errors_are_those_of_ridge_cv(n: int, width: int) -> None:
    rng = np.random.default_rng(n)
    y = np.eye(3, dtype=np.float32)[np.arange(n) % 3]
    x = (y @ rng.normal(size=(3, width)) + 2 * rng.normal(size=(n, width))).astype(np.float32)
    found, predicted = least_error(x, y)
    ridge = RidgeCV(alphas=n * GRID**2, store_cv_results=True).fit(x.astype(float), y)
    assert ridge.alpha_ == pytest.approx(n * found**2)
    squared = ridge.cv_results_[:, :, np.flatnonzero(np.isclose(GRID, found))[0]]
    np.testing.assert_allclose((y - predicted) ** 2, squared, atol=1e-9)


def test_fewer_labels_and_fainter_ones_call_for_more_noise() -> None:
    rng = np.random.default_rng(0)
    w = rng.normal(size=(20, 3))
    x = rng.normal(size=(2000, 20)).astype(np.float32)
    y = (x @ w + 3 * rng.normal(size=(2000, 3))).astype(np.float32)
    few, many = least_error_noise(x[:30], y[:30]), least_error_noise(x, y)
    assert few > many
    assert least_error_noise(x[:100], rng.normal(size=(100, 3)).astype(np.float32)) > least_error_noise(
        x[:100], y[:100]
    )
    # Rows that repeat, constant columns, and one row alone leave it finite.
    with np.errstate(all="raise"):
        assert 0 < least_error_noise(np.ones((1, 4), np.float32), np.eye(1, dtype=np.float32)) <= 8
    assert 0 < least_error_noise(np.ones((5, 4), np.float32), np.eye(5, dtype=np.float32)) <= 8


def test_an_item_of_several_labels_is_a_share_right() -> None:
    """Two far groups, of which one has two labels each: either of them is half of the truth."""
    x = np.repeat([[-1.0], [1.0]], 10, axis=0).astype(np.float32)
    y = np.repeat([[1, 0, 0], [0, 1, 1]], 10, axis=0).astype(np.float32)
    assert leave_one_out(x, y).accuracy == pytest.approx(0.75)
    # Labels that say nothing of the items are missed as often as not.
    rng = np.random.default_rng(0)
    guessed = leave_one_out(
        rng.normal(size=(2000, 5)).astype(np.float32), np.eye(4, dtype=np.float32)[rng.integers(0, 4, 2000)]
    )
    assert guessed.accuracy == pytest.approx(0.25, abs=0.05)


def prepared(folder: Path, config: Config, n: int) -> PosteriorCodes:
    rng = np.random.default_rng(1)
    y = rng.integers(0, 3, 400)
    x = np.eye(3, 8)[y] * 2 + rng.normal(size=(400, 8))
    np.save(folder / "x.npy", (7 * x).astype(np.float32))
    np.save(folder / "y.npy", y)
    data = open_data(f"features:{folder / 'x.npy'}", labels=str(folder / "y.npy"))
    method = build_gpq(config, data, 0, 3)
    assert isinstance(method, PosteriorCodes)
    with Reader(data, 0) as reader:
        method.fit_inputs(reader, np.arange(400))
        method.fit_labels(reader, np.arange(n), data.require_labels().dense(np.arange(n)))
    return method


def test_a_committee_takes_the_noise_that_its_labels_call_for(tmp_path: Path) -> None:
    base = merge(
        preset("recommended"),
        {"quantizer": {"codebooks": 2}, "posterior": {"committee_hidden": 4, "committee": 2}},
    )
    noise = {}
    for n in (12, 400):
        made = prepared(tmp_path, base, n)
        head = made.network.backbone.head
        assert isinstance(head, SubspaceHeads)
        noise[n] = head.noise
        x, y = np.load(tmp_path / "x.npy")[:n], np.eye(3, dtype=np.float32)[np.load(tmp_path / "y.npy")[:n]]
        whole = np.load(tmp_path / "x.npy")
        scaled = (x - whole.mean(axis=0)) / np.sqrt(whole.var(axis=0).mean())
        assert head.noise == pytest.approx(1.5 * least_error_noise(scaled.astype(np.float32), y))
        predicted = predicted_by_others(scaled.astype(float), y.astype(float), head.noise / 1.5)
        assert made.accuracy == pytest.approx((predicted.argmax(1) == y.argmax(1)).mean())
    assert noise[12] > noise[400]


def test_the_noise_stays_as_set_where_it_is_not_to_be_adapted(tmp_path: Path) -> None:
    base = merge(
        preset("recommended"),
        {"quantizer": {"codebooks": 2}, "posterior": {"committee_hidden": 4, "committee": 2}},
    )
    fixed = dataclasses.replace(base, network=dataclasses.replace(base.network, noise=0.5))
    behind_a_layer = dataclasses.replace(base, network=dataclasses.replace(base.network, hidden=(16,)))
    for config in (fixed, behind_a_layer):
        head = prepared(tmp_path, config, 12).network.backbone.head
        assert isinstance(head, SubspaceHeads)
        assert head.noise == 0.5

"""The noise that labels call for, and how often they say a model will be right: against scikit-learn, and in trainings."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sklearn.linear_model import RidgeCV

from gpq_faiss.config import Config, merge, preset
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.leave_one_out import least_error, leave_one_out
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.nn.heads import SubspaceHeads

GRID = 2.0 ** (np.arange(33) / 4 - 5)


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


def test_few_rows_and_constant_columns_leave_the_noise_finite() -> None:
    for n in (1, 5):
        with np.errstate(all="raise"):
            noise, _ = least_error(np.ones((n, 4), np.float32), np.eye(n, dtype=np.float32))
        assert 0 < noise <= 8


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


def test_class_networks_take_the_noise_that_their_labels_call_for_unless_it_is_set(tmp_path: Path) -> None:
    base = merge(
        preset("recommended"),
        {"quantizer": {"codebooks": 2}, "posterior": {"networks": 2}, "network": {"hidden": [4]}},
    )

    def noise_of(made: PosteriorCodes) -> float:
        head = made.network.backbone.head
        assert isinstance(head, SubspaceHeads)
        return head.noise

    noise = {}
    for n in (12, 400):
        made = prepared(tmp_path, base, n)
        noise[n] = noise_of(made)
        whole, y = np.load(tmp_path / "x.npy"), np.eye(3, dtype=np.float32)[np.load(tmp_path / "y.npy")[:n]]
        scaled = (whole[:n] - whole.mean(axis=0)) / np.sqrt(whole.var(axis=0).mean())
        expected, predicted = least_error(scaled.astype(np.float32), y)
        assert noise[n] == pytest.approx(1.5 * expected)
        assert made.accuracy == pytest.approx((predicted.argmax(1) == y.argmax(1)).mean())
    assert noise[12] > noise[400]
    for changes in ({"noise": 0.5}, {"hidden": [16, 4]}):  # behind a layer it is not the input's
        assert noise_of(prepared(tmp_path, merge(base, {"network": changes}), 12)) == 0.5

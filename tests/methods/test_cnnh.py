"""CNNH: the coordinate descent of its first stage against the whole matrix, and a network that learns its codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from deep_training import features, fitted, logged, quality, quick_config
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.config import Config
from gpq_faiss.data.base import Dataset
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.cnnh import CNNH, Similarities, descend, factorise
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.model import input_description


def some_labels(n: int, classes: int, several: bool, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if not several:
        return np.eye(classes, dtype=np.float32)[rng.integers(0, classes, n)]
    y = (rng.random((n, classes)) < 0.3).astype(np.float32)
    y[~y.any(axis=1), 0] = 1
    return y


def whole(y: np.ndarray) -> np.ndarray:
    """S, entry by entry."""
    return np.array([[1.0 if (a * b).any() else -1.0 for b in y] for a in y])


@given(
    n=st.integers(1, 15),
    classes=st.integers(1, 4),
    several=st.booleans(),
    q=st.integers(1, 6),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_the_objective_and_the_product_are_those_of_the_matrix(
    n: int, classes: int, several: bool, q: int, seed: int
) -> None:
    y = some_labels(n, classes, several, seed)
    H = np.random.default_rng(seed).uniform(-1, 1, (n, q))
    similar, S = Similarities(y), whole(y)
    np.testing.assert_allclose(similar.times(H)[similar.group], S @ H, atol=1e-9)
    assert similar.objective(H) == pytest.approx(((S - H @ H.T / q) ** 2).sum() / n**2, abs=1e-9)


def slow_descent(y: np.ndarray, H: np.ndarray, sweeps: int, rng: np.random.Generator) -> None:
    """The paper's descent with the n x n matrix L worked out anew for each entry; derivatives by automatic differentiation."""
    S = torch.from_numpy(whole(y))
    n, q = H.shape
    for _ in range(sweeps):
        for j in rng.permutation(q):
            for i in rng.permutation(n):

                def objective(value: torch.Tensor, i: int = i, j: int = j) -> torch.Tensor:
                    moved = torch.from_numpy(H).clone()
                    moved[i, j] = value
                    return (moved @ moved.T - q * S).square().sum()

                at = torch.tensor(H[i, j], requires_grad=True)
                (slope,) = torch.autograd.grad(objective(at), at, create_graph=True)
                (curve,) = torch.autograd.grad(slope, at)
                if curve > 0:
                    H[i, j] = np.clip(H[i, j] - slope.item() / curve.item(), -1, 1)
                elif slope != 0:
                    H[i, j] = -np.sign(slope.item())


@pytest.mark.parametrize("several", [False, True])
def test_the_descent_takes_newtons_step_at_every_entry(several: bool) -> None:
    y = some_labels(9, 3, several, 4)
    start = np.random.default_rng(1).uniform(-1, 1, (9, 4))
    fast, slow = start.copy(), start.copy()
    descend(Similarities(y), fast, 2, np.random.default_rng(7))
    slow_descent(y, slow, 2, np.random.default_rng(7))
    np.testing.assert_allclose(fast, slow, atol=1e-8)


@pytest.mark.parametrize("several", [False, True])
def test_sweeps_lower_the_objective(several: bool) -> None:
    y = some_labels(150, 4, several, 0)
    similar = Similarities(y)
    H = np.random.default_rng(0).uniform(-1, 1, (150, 8))
    before = similar.objective(H)
    after = descend(similar, H, 4, np.random.default_rng(0))
    assert after[0] < 0.9 * before
    assert (np.diff(after) <= 1e-9).all()
    assert np.abs(H).max() <= 1


def test_the_codes_are_one_a_class_and_far_apart() -> None:
    y = some_labels(200, 6, False, 1)
    codes = factorise(y, 12)
    assert codes.dtype == np.int8
    assert set(np.unique(codes)) == {-1, 1}
    group = y.argmax(axis=1)
    of_class = np.stack([codes[group == c][0] for c in range(6)])
    np.testing.assert_array_equal(codes, of_class[group])
    inner = of_class.astype(int) @ of_class.T
    # No code of six ±1 rows can have a smaller mean inner product than this.
    mean = (inner.sum() - 6 * 12) / 30
    assert mean == pytest.approx(-12 / 5, abs=0.5)
    np.testing.assert_array_equal(codes, factorise(y, 12))
    assert (codes != factorise(y, 12, seed=1)).any()


INPUT = {"kind": "features", "width": 10}
NO_READER: Any = None
"""The labels alone are looked at."""


@pytest.mark.parametrize("plus", [False, True])
def test_the_loss_by_hand(plus: bool) -> None:
    method = CNNH(quick_config(bits=12), dict(INPUT), 3, plus=plus).eval()
    rows = np.array([2, 3, 7, 11, 30, 31])
    y = some_labels(6, 3, True, 3)
    method.fit_labels(NO_READER, rows, y)
    codes = factorise(y, 12).astype(float)
    take = [4, 0, 3]
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(0))  # two more than labels: unlabelled
    batch = TrainingBatch(x, torch.from_numpy(y[take]), 0, 1, torch.Generator(), rows[take])
    parts = method.losses(batch, amp=False)
    out = method.network.backbone(x).detach().double().numpy()[:3]
    assert out.shape == (3, 15 if plus else 12)
    regression = np.mean([(np.tanh(out[i, j]) - codes[take[i], j]) ** 2 for i in range(3) for j in range(12)])
    expected = regression
    if plus:
        lost = 0.0
        for i in range(3):
            logits, wanted = out[i, 12:], y[take[i]]
            log_p = logits - np.log(np.exp(logits).sum())
            lost -= sum(w / wanted.sum() * v for w, v in zip(wanted, log_p, strict=True))
        assert parts["regression"].item() == pytest.approx(regression, rel=1e-5)
        assert parts["classes"].item() == pytest.approx(lost / 3, rel=1e-5)
        expected += lost / 3
    assert parts["total"].item() == pytest.approx(expected, rel=1e-5)
    assert method.exported()(x).shape == (5, 12)


def test_refuses_items_without_a_code() -> None:
    method = CNNH(quick_config(bits=12), dict(INPUT), 3)
    batch = TrainingBatch(torch.zeros(1, 10), torch.eye(3)[:1], 0, 1, torch.Generator(), np.array([4]))
    with pytest.raises(DataError, match="fit_labels"):
        method.losses(batch, amp=False)
    method.fit_labels(NO_READER, np.array([1, 2, 9]), np.eye(3, dtype=np.float32))
    with pytest.raises(DataError, match="fit_labels"):
        method.losses(batch, amp=False)
    with pytest.raises(UsageError, match="sweeps"):
        CNNH(quick_config(bits=12), dict(INPUT), 3, sweeps=0)


def test_classes_beside_the_codes_learn_too(tmp_path: Path) -> None:
    """CNNH+, which has the labels as further outputs."""

    def plus(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> CNNH:
        return CNNH(config, input_description(dataset, image_size), n_classes, plus=True)

    config = quick_config(steps=120)
    run = fitted(plus, features(), config, tmp_path)
    assert logged(run, "classes")[-1] < 0.5 * logged(run, "classes")[0]
    assert logged(run, "regression")[-1] < 0.5 * logged(run, "regression")[0]
    assert quality(run.method, features()) > quality(plus(config, features(), 8, 10), features()) + 0.25

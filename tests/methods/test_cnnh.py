"""CNNH: the coordinate descent of its first stage against the whole matrix, and a network that learns its codes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from deep_training import features, first_batch, made

from gpq_faiss.errors import DataError
from gpq_faiss.methods.cnnh import Similarities, descend, factorise


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


def objective(y: np.ndarray, H: np.ndarray) -> float:
    return float(np.square(whole(y) - H @ H.T / H.shape[1]).mean())


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
    H = np.random.default_rng(0).uniform(-1, 1, (150, 8))
    values = [objective(y, H)]
    for _ in range(4):
        descend(Similarities(y), H, 1, np.random.default_rng(0))
        values.append(objective(y, H))
    assert values[1] < 0.9 * values[0]
    assert (np.diff(values) <= 1e-9).all()
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


NO_READER: Any = None
"""The labels alone are looked at."""


def test_the_loss_by_hand_and_items_without_a_code() -> None:
    method = made("cnnh", features(), bits=12).eval()
    batch = first_batch(features(), 3, 2)
    with pytest.raises(DataError, match="fit_labels"):
        method.losses(batch, amp=False)
    rows = np.concatenate([batch.rows, [10**6]])
    y = some_labels(4, 3, True, 3)
    method.fit_labels(NO_READER, rows, y)
    codes = factorise(y, 12).astype(float)
    out = method.exported()(batch.x).detach().double().numpy()
    assert out.shape == (5, 12)
    expected = np.mean([(np.tanh(out[i, j]) - codes[i, j]) ** 2 for i in range(3) for j in range(12)])
    assert method.losses(batch, amp=False)["total"].item() == pytest.approx(expected, rel=1e-5)
    method.fit_labels(NO_READER, rows + 1, y)
    with pytest.raises(DataError, match="fit_labels"):
        method.losses(batch, amp=False)

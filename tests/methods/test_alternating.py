"""DQN and DTQ, which alternate between network and codebooks, CNNH, which has codes first, and the codes of SUBIC."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from deep_training import (
    features,
    first_batch,
    made,
    split_of,
    trained,
    vectors,
)
from test_deep_losses import parts_of

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.methods.additive import reconstruct
from gpq_faiss.methods.baseline import triplet_margin
from gpq_faiss.methods.cnnh import descend, factorise
from gpq_faiss.methods.dqn import DQN, fit_product_codebooks
from gpq_faiss.methods.dtq import DTQ, group_hard_triplets


def error_of(x: np.ndarray, C: np.ndarray) -> float:
    parts = x.reshape(len(x), len(C), -1)
    return float(np.square(parts[:, :, None] - C).sum(axis=3).min(axis=2).sum(axis=1).mean())


def test_dqn_counts_the_distance_to_the_nearest_codewords_once_they_are_fitted() -> None:
    method, batch = made("dqn", features()).eval(), first_batch(features(), 20, 3)
    assert parts_of(method, batch)["quantisation"] == 0
    method.fitted.fill_(True)
    parts = parts_of(method, batch)
    z = method.network(batch.x[:20]).detach().numpy()
    assert parts["quantisation"] == pytest.approx(error_of(z, method.codewords.numpy()) / 48, rel=1e-5)
    assert parts["total"] == pytest.approx(parts["cosine"] + method.weight * parts["quantisation"], rel=1e-6)


def test_codebooks_go_on_from_where_they_are_and_never_get_worse() -> None:
    x = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
    first = fit_product_codebooks(x, 3, 16, seed=1)
    assert first.shape == (3, 16, 4)
    assert error_of(x, first) < 0.75 * error_of(x, x[:16].reshape(16, 3, 4).transpose(1, 0, 2))
    again = fit_product_codebooks(x, 3, 16, start=first)
    assert error_of(x, again) <= error_of(x, first) + 1e-5
    assert np.abs(again - first).max() < 0.5, "a fit from the start would have numbered the codewords anew"
    np.testing.assert_array_equal(first, fit_product_codebooks(x, 3, 16, seed=1))
    with pytest.raises(DataError, match="label at least 16"):
        fit_product_codebooks(x[:15], 3, 16)


def test_codewords_are_the_means_of_their_items_after_training() -> None:
    method = trained("dqn").method
    assert isinstance(method, DQN)
    # The invariant of the alternation: every codeword in use is the mean of the items nearest to it.
    assert bool(method.seen.all())
    assert method.rows.tolist() == split_of(features()).labelled.tolist()
    x, C = method.kept.numpy().reshape(200, 4, 12), method.codewords.numpy()
    nearest = np.square(x[:, :, None] - C).sum(axis=3).argmin(axis=2)
    for m, k in itertools.product(range(4), range(16)):
        if (nearest[:, m] == k).sum() > 1:
            np.testing.assert_allclose(C[m, k], x[nearest[:, m] == k, m].mean(axis=0), atol=0.02)


def test_codes_and_codebooks_of_dtq_belong_together_after_training() -> None:
    method: Any = trained("dtq").method
    assert isinstance(method, DTQ)
    # By turns: the codes kept are those of the codebooks kept, and the loss counts the distance to their sums.
    assert bool(method.seen.all())
    kept, codewords = method.kept.numpy(), method.codewords.numpy()
    error = np.square(kept - reconstruct(method.codes.numpy(), codewords)).sum(axis=1).mean()
    assert error < 0.5 * kept.var(axis=0).sum()
    again = made("dtq", features()).eval()
    again.fit_labels(None, split_of(features()).labelled, None)
    again.load_state_dict(method.state_dict())
    batch = first_batch(features(), 20, 0)
    parts = parts_of(again, batch)
    z = again.network(batch.x[:20]).detach().numpy()
    own = reconstruct(again.codes[again.positions(batch)].numpy(), codewords)
    assert parts["quantisation"] == pytest.approx(np.square(z - own).sum(axis=1).mean(), rel=1e-4)
    assert parts["total"] == pytest.approx(parts["triplet"] + again.weight * parts["quantisation"], rel=1e-5)
    # On one fixed set of triplets: the selection always looks for those that still cost something.
    rows = split_of(features()).labelled[:60]
    y = torch.from_numpy(features().require_labels().dense(rows))
    before, after = (
        torch.from_numpy(vectors(one, features(), rows)) for one in (made("dtq", features()), method)
    )
    a, p, n = group_hard_triplets(before, y, method.margin, torch.Generator().manual_seed(0))
    losses = [float(triplet_margin(z[a] - z[p], z[a] - z[n], method.margin)) for z in (before, after)]
    assert losses[1] < 0.3 * losses[0]


# CNNH -----------------------------------------------------------------------------------------------------------------


def some_labels(n: int, classes: int, several: bool, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if not several:
        return np.eye(classes, dtype=np.float32)[rng.integers(0, classes, n)]
    y = (rng.random((n, classes)) < 0.3).astype(np.float32)
    y[~y.any(axis=1), 0] = 1
    return y


def slow_descent(y: np.ndarray, H: np.ndarray, sweeps: int, rng: np.random.Generator) -> None:
    """The paper's descent with the n x n matrix L worked out anew for each entry; derivatives by automatic differentiation."""
    S = torch.from_numpy(np.where(y @ y.T > 0, 1.0, -1.0))
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
def test_the_descent_takes_newtons_step_at_every_entry_and_lowers_the_objective(several: bool) -> None:
    y = some_labels(9, 3, several, 4)
    fast = np.random.default_rng(1).uniform(-1, 1, (9, 4))
    slow = fast.copy()
    descend(y, fast, 2, np.random.default_rng(7))
    slow_descent(y, slow, 2, np.random.default_rng(7))
    np.testing.assert_allclose(fast, slow, atol=1e-8)
    y, H = some_labels(150, 4, several, 0), np.random.default_rng(0).uniform(-1, 1, (150, 8))
    values = []
    for _ in range(5):
        values.append(float(np.square(np.where(y @ y.T > 0, 1, -1) - H @ H.T / 8).mean()))
        descend(y, H, 1, np.random.default_rng(0))
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
    assert (inner.sum() - 6 * 12) / 30 == pytest.approx(-12 / 5, abs=0.5)
    np.testing.assert_array_equal(codes, factorise(y, 12))
    assert (codes != factorise(y, 12, seed=1)).any()


def test_the_loss_of_cnnh_is_the_error_of_the_codes() -> None:
    method, batch = made("cnnh", features(), bits=12).eval(), first_batch(features(), 3, 2)
    rows, y = np.concatenate([batch.rows, [10**6]]), some_labels(4, 3, True, 3)
    method.fit_labels(None, rows, y)
    codes = factorise(y, 12).astype(float)
    out = method.exported()(batch.x).detach().double().numpy()
    assert out.shape == (5, 12)
    assert parts_of(method, batch)["total"] == pytest.approx(
        np.square(np.tanh(out[:3]) - codes[:3]).mean(), rel=1e-5
    )


# SUBIC ----------------------------------------------------------------------------------------------------------------


def test_a_code_is_the_largest_activation_of_each_block() -> None:
    run = trained("subic")
    z = vectors(run.method, features(), split_of(features()).database[:50]).reshape(50, 4, 16)
    np.testing.assert_allclose(z.sum(axis=2), 1, atol=1e-5)
    coder = run.method.coder()
    codes = coder.encode(z.reshape(50, -1))
    chosen = unpack_codes(codes, 4, 16)
    np.testing.assert_array_equal(chosen, z.argmax(axis=2))
    naive = [[sum(z[q, m, chosen[i, m]] for m in range(4)) for i in range(50)] for q in range(3)]
    np.testing.assert_allclose(coder.score(z[:3].reshape(3, -1), codes), naive, rtol=1e-5)

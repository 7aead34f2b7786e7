"""PQN: its loss and its layer against naive loops, codewords that learn with the network, codes, index, seeds."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from deep_training import features, first_batch, labels_of, made, split_of, trained, vectors

from gpq_faiss.methods.pqn import PQN, AsymmetricTripletLoss, soft_quantise


@pytest.mark.parametrize("group", [100, 4])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_the_loss_is_that_of_a_loop_over_triplets(group: int, scale: float) -> None:
    rng = np.random.default_rng(0)
    y = labels_of([0, 1, 0, -1, 2, 1, 0, 2], 3)
    y[4, 0] = 1  # two labels
    x, q = rng.standard_normal((2, 8, 5))
    shared = (y @ y.T > 0).numpy()
    terms = []
    for a, p, n in itertools.product(range(8), repeat=3):
        together = a // group == p // group == n // group
        if a != p and shared[a, p] and not shared[a, n] and y[a].any() and y[n].any() and together:
            terms.append(1 / (1 + math.exp(scale * (x[a] @ q[p] - x[a] @ q[n]))))
    assert terms
    loss = AsymmetricTripletLoss(group, scale)(torch.from_numpy(x), torch.from_numpy(q), y)
    assert float(loss) == pytest.approx(np.mean(terms), rel=1e-12)


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 1, 2], [-1, -1]])
def test_a_batch_without_triplets_costs_nothing(ids: list[int]) -> None:
    x = torch.randn(len(ids), 4, requires_grad=True)
    loss = AsymmetricTripletLoss()(x, x, labels_of(ids, 3))
    loss.backward()  # type: ignore[no-untyped-call]
    assert float(loss.detach()) == 0
    assert not bool(x.grad.any())  # type: ignore[union-attr]


def test_the_layer_is_a_softmax_over_codewords_and_hard_in_the_limit() -> None:
    rng = np.random.default_rng(1)
    x, Z = rng.standard_normal((3, 2, 4)), rng.standard_normal((2, 5, 4))
    x /= np.linalg.norm(x, axis=2, keepdims=True)
    Z /= np.linalg.norm(Z, axis=2, keepdims=True)
    soft = soft_quantise(torch.from_numpy(x), torch.from_numpy(Z), 5.0).numpy()
    hard = soft_quantise(torch.from_numpy(x), torch.from_numpy(Z), 1e4).numpy()
    for b, m in itertools.product(range(3), range(2)):
        weight = np.array([math.exp(5 * x[b, m] @ Z[m, k]) for k in range(5)])
        np.testing.assert_allclose(soft[b, m], (weight / weight.sum()) @ Z[m], rtol=1e-9)
        np.testing.assert_allclose(hard[b, m], Z[m, (Z[m] @ x[b, m]).argmax()], atol=1e-9)


def test_codewords_learn_through_the_loss() -> None:
    """Without any k-means: the gradient reaches codewords and network alike."""
    method = made("pqn", features())
    method.losses(first_batch(features(), 30, 0), amp=False)["total"].backward()  # type: ignore[no-untyped-call]
    assert bool(method.codewords.raw.grad.any(dim=2).all())  # type: ignore[union-attr]
    assert all(p.grad is not None for p in method.parameters())


def test_vectors_and_codewords_have_unit_norm_after_training() -> None:
    run = trained("pqn")
    z = vectors(run.method, features(), split_of(features()).query[:9]).reshape(9, 4, 12)
    np.testing.assert_allclose(np.linalg.norm(z, axis=2), 1, atol=1e-5)
    assert isinstance(run.method, PQN)
    np.testing.assert_allclose(np.linalg.norm(run.method.codebooks(), axis=2), 1, atol=1e-5)

"""DQN: its losses against naive loops, k-means by turns, the asymmetric distance, and that it learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from deep_training import (
    features,
    first_batch,
    fitted,
    labels_of,
    made,
    quick_config,
    split_of,
    trained,
    vectors,
)

from gpq_faiss.errors import DataError
from gpq_faiss.methods.dqn import DQN, PairwiseCosineLoss, fit_product_codebooks


def test_the_pairwise_loss_is_that_of_a_loop() -> None:
    z = np.random.default_rng(0).standard_normal((7, 5))
    y = labels_of([0, 1, 0, -1, 2, 1, 0], 3)
    y[4, 0] = 1  # two labels
    terms = []
    for i, j in itertools.product(range(7), repeat=2):
        if y[i].any() and y[j].any():
            cosine = z[i] @ z[j] / np.linalg.norm(z[i]) / np.linalg.norm(z[j])
            terms.append(((1 if (y[i] * y[j]).any() else -1) - cosine) ** 2)
    assert float(PairwiseCosineLoss()(torch.from_numpy(z), y)) == pytest.approx(np.mean(terms), rel=1e-12)
    assert float(PairwiseCosineLoss()(torch.from_numpy(z[:2]), torch.zeros(2, 3))) == 0


def test_the_quantisation_loss_is_that_of_a_loop() -> None:
    method = made("dqn", features()).eval()
    batch = first_batch(features(), 20, 3)
    assert float(method.losses(batch, amp=False)["quantisation"].detach()) == 0, "nothing is fitted yet"
    method.fitted.fill_(True)
    parts = {k: v.detach() for k, v in method.losses(batch, amp=False).items()}
    z = method.network(batch.x[:20]).detach().numpy().reshape(20, 4, 12).astype(float)
    C = method.codewords.numpy()
    naive = np.mean([sum(min(((z[i, m] - c) ** 2).sum() for c in C[m]) for m in range(4)) for i in range(20)])
    assert float(parts["quantisation"]) == pytest.approx(naive / 48, rel=1e-5)
    assert float(parts["total"]) == pytest.approx(
        float(parts["cosine"]) + method.weight * float(parts["quantisation"]), rel=1e-6
    )


def error_of(x: np.ndarray, C: np.ndarray) -> float:
    parts = x.reshape(len(x), len(C), -1)
    return float(np.square(parts[:, :, None] - C).sum(axis=3).min(axis=2).sum(axis=1).mean())


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
    x, C = method.vectors.numpy().reshape(200, 4, 12), method.codewords.numpy()
    nearest = np.square(x[:, :, None] - C).sum(axis=3).argmin(axis=2)
    for m, k in itertools.product(range(4), range(16)):
        if (nearest[:, m] == k).sum() > 1:
            np.testing.assert_allclose(C[m, k], x[nearest[:, m] == k, m].mean(axis=0), atol=0.02)


def test_weight_brings_vectors_near_to_their_codewords(tmp_path: Path) -> None:
    def relative_error(weight: float) -> float:
        class Weighted(DQN):
            pass

        Weighted.weight = weight
        run = fitted(Weighted, features(), quick_config(steps=120), tmp_path / str(weight))
        z = vectors(run.method, features(), split_of(features()).database)
        return error_of(z, run.method.codewords.numpy()) / float(z.var(axis=0).sum())  # type: ignore[operator,union-attr]

    assert relative_error(3.0) < 0.93 * relative_error(0.0)

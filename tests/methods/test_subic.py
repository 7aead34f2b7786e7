"""SUBIC: its terms against plain loops, one-hot codes, what the entropies do, and that it learns."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from deep_training import features, first_batch, fitted, made, quick_config, split_of, trained, vectors

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import UsageError
from gpq_faiss.methods.subic import SUBIC, block_log_softmax, entropies


def bits_of(p: np.ndarray) -> float:
    return -sum(float(v) * math.log2(v) for v in p if v > 0)


def test_the_entropies_are_those_of_a_loop() -> None:
    raw = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 3 * 4)) * 3)
    log_z = block_log_softmax(raw, 3)
    z = np.exp(raw.numpy().reshape(5, 3, 4))
    z /= z.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(log_z.exp().numpy(), z, rtol=1e-12)
    mean, batch = entropies(log_z)
    assert float(mean) == pytest.approx(np.mean([sum(bits_of(z[i, m]) for m in range(3)) for i in range(5)]))
    assert float(batch) == pytest.approx(sum(bits_of(z[:, m].mean(axis=0)) for m in range(3)))


def test_the_entropies_at_their_ends() -> None:
    sure = torch.eye(4).repeat(3, 1)[:, None].clamp_min(1e-20).log()
    assert [float(v) for v in entropies(sure)] == pytest.approx([0, 2], abs=1e-5)
    unsure = torch.full((6, 1, 4), 0.25).log()
    assert [float(v) for v in entropies(unsure)] == pytest.approx([2, 2])
    collapsed = torch.eye(4)[[1, 1, 1]][:, None].clamp_min(1e-20).log()
    assert [float(v) for v in entropies(collapsed)] == pytest.approx([0, 0], abs=1e-5)


def test_the_total_is_the_sum_of_its_terms() -> None:
    method = made("subic", features())
    method.gamma, method.mu = 0.3, 0.7
    method.eval()
    batch = first_batch(features(), 20, 5)
    parts = {k: float(v.detach()) for k, v in method.losses(batch, amp=False).items()}
    assert parts["total"] == pytest.approx(
        parts["classification"] + 0.3 * parts["mean_entropy"] - 0.7 * parts["batch_entropy"], rel=1e-5
    )
    z = method.network(batch.x[:20])
    log_p = method.classifier(z).log_softmax(dim=1)
    naive = -sum(float(log_p[i, batch.y[i].argmax()].detach()) for i in range(20)) / 20 / math.log(10)
    assert parts["classification"] == pytest.approx(naive, rel=1e-5)


def test_a_code_is_the_largest_activation_of_each_block() -> None:
    run = trained("subic")
    split = split_of(features())
    z = vectors(run.method, features(), split.database[:50]).reshape(50, 4, 16)
    np.testing.assert_allclose(z.sum(axis=2), 1, atol=1e-5)
    coder = run.method.coder()
    codes = coder.encode(z.reshape(50, -1))
    chosen = unpack_codes(codes, 4, 16)
    np.testing.assert_array_equal(chosen, z.argmax(axis=2))
    scores = coder.score(z[:3].reshape(3, -1), codes)
    naive = [[sum(z[q, m, chosen[i, m]] for m in range(4)) for i in range(50)] for q in range(3)]
    np.testing.assert_allclose(scores, naive, rtol=1e-5)


def test_the_entropies_make_blocks_sure_and_their_codes_spread(tmp_path: Path) -> None:
    def with_weights(gamma: float, mu: float) -> tuple[float, float]:
        class Weighted(SUBIC):
            pass

        Weighted.gamma, Weighted.mu = gamma, mu
        folder = tmp_path / f"{gamma}-{mu}"
        run = fitted(Weighted, features(), quick_config(steps=120), folder)
        z = vectors(run.method, features(), split_of(features()).database).reshape(-1, 4, 16)
        mean, batch = entropies(torch.from_numpy(z).clamp_min(1e-12).log())
        return float(mean), float(batch)

    neither, sure, spread, both = (with_weights(*w) for w in ((0, 0), (1, 0), (0, 1), (1, 1)))
    assert sure[0] < 0.5 * neither[0]
    assert sure[1] < 0.7 * neither[1], "alone, the mean entropy lets the codes collapse"
    assert spread[1] > 1.2 * neither[1]
    assert both[0] < 0.6 * spread[0]
    assert both[1] > 0.9 * spread[1]


def test_one_class_is_refused() -> None:
    with pytest.raises(UsageError, match="at least 2"):
        SUBIC(quick_config(), features(), 8, 1)

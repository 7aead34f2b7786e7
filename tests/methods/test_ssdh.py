"""SSDH: its terms against plain loops, its graph, and that it learns."""

from __future__ import annotations

import math

import pytest
import torch
from deep_training import digits, first_batch, made
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.methods.ssdh import (
    batch_graph,
    contrast,
    same_class,
    squared_distances,
    triplet_ranking,
)


def naive_triplets(h: Tensor, y: Tensor, margin: float) -> float:
    losses = []
    rows = [i for i in range(len(y)) if y[i].any()]
    for a in rows:
        for p in rows:
            for n in rows:
                alike, unlike = bool((y[a] * y[p]).any()), not bool((y[a] * y[n]).any())
                if a != p and alike and unlike:
                    d_p, d_n = (float(((h[a] - h[j]) ** 2).sum()) for j in (p, n))
                    losses.append(max(0.0, margin + d_p - d_n))
    return sum(losses) / len(losses) if losses else 0.0


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    classes=st.integers(1, 4),
    margin=st.sampled_from([0.0, 0.3, 1.0, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_ranking_term_is_the_mean_over_all_triplets(n: int, classes: int, margin: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    h = torch.rand(n, 3, generator=generator, dtype=torch.float64)
    y = (torch.rand(n, classes, generator=generator) < 0.4).double()  # multi-label, and rows without labels
    loss = triplet_ranking(squared_distances(h, h), y, margin)
    assert float(loss) == pytest.approx(naive_triplets(h, y, margin), abs=1e-10)


def test_ranking_term_has_the_gradient_of_the_loop() -> None:
    generator = torch.Generator().manual_seed(1)
    h = torch.rand(8, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    y = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 1, 2, 2, 0, 1]]
    triplet_ranking(squared_distances(h, h), y, 0.7).backward()
    assert h.grad is not None
    numeric, eps = torch.zeros_like(h), 1e-6
    for i in range(8):
        for j in range(4):
            for sign in (1, -1):
                moved = h.detach().clone()
                moved[i, j] += sign * eps
                numeric[i, j] += sign * naive_triplets(moved, y, 0.7) / (2 * eps)
    torch.testing.assert_close(h.grad, numeric, rtol=1e-6, atol=1e-8)


def test_contrast_against_a_loop() -> None:
    generator = torch.Generator().manual_seed(2)
    d = torch.rand(6, 6, generator=generator, dtype=torch.float64) * 4
    near, far = (torch.rand(6, 6, generator=generator) < p for p in (0.3, 0.5))
    pull = [float(d[i, j]) for i in range(6) for j in range(6) if near[i, j]]
    push = [
        max(0.0, 1.5 - math.sqrt(float(d[i, j]) + 1e-6)) ** 2 for i in range(6) for j in range(6) if far[i, j]
    ]
    expected = (sum(pull) / len(pull) + sum(push) / len(push)) / 2
    assert float(contrast(d, near, far, 1.5)) == pytest.approx(expected, abs=1e-12)
    nobody = torch.zeros(6, 6, dtype=torch.bool)
    assert float(contrast(d, nobody, nobody, 1.5)) == 0


def test_equal_codes_have_a_finite_gradient() -> None:
    h = torch.full((4, 3), 0.5, requires_grad=True)
    everyone = ~torch.eye(4, dtype=torch.bool)
    contrast(squared_distances(h, h), everyone, everyone, 2.0).backward()
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(3, 30), near=st.floats(0.01, 0.6), far=st.floats(0.01, 0.4), seed=st.integers(0, 10**6))
def test_graph_of_a_mini_batch(n: int, near: float, far: float, seed: int) -> None:
    features = torch.randn(n, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    neighbours, distant = batch_graph(features, near, far)
    n_near = max(1, min(round(near * n), (n - 1) // 2))
    n_far = max(1, min(round(far * n), n - 1 - n_near))
    for i in range(n):
        order = sorted(
            (j for j in range(n) if j != i), key=lambda j: float((features[i] - features[j]).norm())
        )
        assert set(neighbours[i].nonzero()[:, 0].tolist()) == set(order[:n_near])
        assert set(distant[i].nonzero()[:, 0].tolist()) == set(order[-n_far:])


def test_graph_is_made_of_the_present_deep_features() -> None:
    # The invariant of the method: after the network has changed, so have the neighbours.
    method, batch = made("ssdh", digits()).eval(), first_batch(digits(), 20, 20)

    def graph() -> Tensor:
        deep = method.extractor.trunk_features(method.extractor.input(batch.x))
        return batch_graph(deep, method.near, method.far)[0]

    before, term = graph(), float(method.losses(batch, amp=False)["embedding"].detach())
    with torch.no_grad():
        layer = next(m for m in method.extractor.modules() if isinstance(m, torch.nn.Linear))
        layer.weight.copy_(torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(3)))
    assert (graph() != before).any()
    assert float(method.losses(batch, amp=False)["embedding"].detach()) != term


def test_losses_are_the_terms_on_the_right_rows() -> None:
    method, batch = made("ssdh", digits()).eval(), first_batch(digits(), 12, 9)
    losses = {k: float(v.detach()) for k, v in method.losses(batch, amp=False).items()}
    with torch.no_grad():
        h = method.exported()(batch.x).sigmoid()
        deep = method.extractor.trunk_features(method.extractor.input(batch.x))
        logits = method.classifier(deep)
    d = squared_distances(h, h)
    assert losses["rank"] == pytest.approx(naive_triplets(h[:12], batch.y, method.margin_rank) / 2, rel=1e-4)
    classes = torch.cat([batch.y.argmax(1), logits[12:].argmax(1)])
    near, far = (torch.zeros(21, 21, dtype=torch.bool) for _ in range(2))
    for i in range(12, 21):
        for j in range(21):
            near[i, j] = bool(classes[i] == classes[j]) and i != j
            far[i, j] = bool(classes[i] != classes[j])
    assert losses["pseudo"] == pytest.approx(float(contrast(d, near, far, method.margin_pair)), rel=1e-4)
    total = losses["rank"] + losses["classification"]
    total += method.weight * (losses["embedding"] + losses["pseudo"])
    assert losses["total"] == pytest.approx(total, rel=1e-5)


def test_pseudo_label_is_the_most_probable_class() -> None:
    y = torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    logits = torch.tensor([[0.0, 0, 2], [5, 0, 0], [0, 0, 1]])
    same = same_class(y, logits)
    assert same.tolist() == [
        [True, False, True, False, True],
        [True, False, False, True, False],
        [True, False, True, False, True],
    ]

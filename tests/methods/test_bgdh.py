"""BGDH: its graph and walks, and that graph, features and codes are learnt together."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from deep_training import digits, features, first_batch, made, parts_of, quick_config
from torch import Tensor

from gpq_faiss.errors import DataError
from gpq_faiss.methods.bgdh import BipartiteGraph, context_loss, pairwise_likelihood


@pytest.fixture(scope="module")
def graph() -> BipartiteGraph:
    """Two far groups of items."""
    graph = BipartiteGraph(8, 3, 2)
    graph.fit(groups(0), seed=0)
    return graph


def groups(seed: int, n: int = 60) -> Tensor:
    x = torch.randn(2 * n, 3, generator=torch.Generator().manual_seed(seed))
    x[n:] += 40
    return x


def test_items_are_joined_to_their_nearest_anchors(graph: BipartiteGraph) -> None:
    x = groups(1, 10)
    near, weight = graph.joined(x)
    for i, item in enumerate(x):
        d = [float(((item - a) ** 2).sum()) for a in graph.anchors]
        nearest = sorted(range(8), key=d.__getitem__)[:2]
        kernel = [math.exp(-(d[a] - d[nearest[0]]) / float(graph.bandwidth)) for a in nearest]
        assert near[i].tolist() == nearest
        np.testing.assert_allclose(weight[i].numpy(), np.array(kernel) / sum(kernel), atol=1e-3)


def test_walks_have_the_probabilities_of_the_graph(graph: BipartiteGraph) -> None:
    sample = groups(0)
    Z = np.zeros((len(sample), 8))
    near, weight = graph.joined(sample)
    np.put_along_axis(Z, near.numpy(), weight.numpy(), axis=1)
    # Steps sum over the items on the way: by the probability of each item, from an anchor.
    np.testing.assert_allclose(graph.steps.numpy(), (Z / Z.sum(0)).T @ Z, atol=1e-5)
    item = groups(1, 1)[:1]
    walks = graph.walk(item.expand(20_000, -1), 2, torch.Generator().manual_seed(0))
    near, weight = graph.joined(item)
    first = torch.zeros(8).scatter_(0, near[0], weight[0])
    expected = (first + first @ graph.steps) / 2  # one visit or two, equally often
    found = torch.bincount(walks, minlength=8) / 20_000
    torch.testing.assert_close(found, expected, atol=0.015, rtol=0)


def test_few_items_make_few_anchors() -> None:
    graph = BipartiteGraph(50, 3, 2)
    sample = groups(0, 3)
    graph.fit(sample, seed=0)
    assert int(graph.used) == 6
    assert (graph.walk(sample, 4, torch.Generator().manual_seed(0)) < 6).all()
    assert torch.isfinite(graph.steps).all()
    with pytest.raises(DataError, match="too few"):
        graph.fit(sample[:1], seed=0)


def test_graph_waits_for_the_network_on_images_and_not_on_features() -> None:
    for data, when in ((digits(), 3), (features(), 0)):
        method, batch = made("bgdh", data), first_batch(data, 20, 20)
        there = []
        for step in range(5):
            method.before_step(step, 9, lambda n, batch=batch: iter([batch.x]))  # type: ignore[misc]
            there.append("graph" in method.losses(batch, amp=False))
        assert there == [step >= when for step in range(5)]


def test_the_graph_stays_while_the_network_learns_and_a_training_resumes() -> None:
    method, batch = made("bgdh", digits()), first_batch(digits(), 20, 20)
    method.before_step(3, 9, lambda n: iter([batch.x]))
    before = method.seen(batch.x).clone()
    resumed = made("bgdh", digits())
    resumed.load_state_dict(method.state_dict())
    resumed.before_step(4, 9, lambda n: pytest.fail("the graph is there"))
    assert parts_of(method.eval(), batch) == parts_of(resumed.eval(), batch)
    optimizer = method.optimizer(quick_config().training)
    method.train()
    method.losses(batch, amp=False)["total"].backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    torch.testing.assert_close(method.seen(batch.x), before, rtol=0, atol=0)


def test_losses_are_the_terms_on_the_right_rows() -> None:
    data = features()
    method, batch = made("bgdh", data).eval(), first_batch(data, 12, 9)
    method.before_step(0, 9, lambda n: iter([batch.x]))
    losses = parts_of(method, batch)
    with torch.no_grad():
        u = method.exported()(batch.x)
        e = method.network.backbone(batch.x)
        generator = torch.Generator().manual_seed(0)
        right = method.graph.walk(method.network.backbone.input(batch.x), method.longest, generator)
        wrong = torch.randint(int(method.graph.used), (21, method.wrong), generator=generator)
    assert losses["pairs"] == pytest.approx(float(pairwise_likelihood(u[:12], batch.y)), rel=1e-5)
    signs = np.where(u[:12].numpy() > 0, 1, -1)
    assert losses["quantisation"] == pytest.approx(float(((u[:12].numpy() - signs) ** 2).mean()), rel=1e-5)
    graph = context_loss(e, method.contexts.detach(), right, wrong)
    assert losses["graph"] == pytest.approx(float(graph), rel=1e-5)
    total = losses["pairs"] + method.quantisation * losses["quantisation"] + method.weight * losses["graph"]
    assert losses["total"] == pytest.approx(total, rel=1e-5)

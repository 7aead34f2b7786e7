"""The trained baselines: their losses against plain loops, each the weighted sum of its terms on
the right rows, and what they keep."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from deep_training import (
    digits,
    features,
    first_batch,
    made,
    parts_of,
)
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import DataError
from gpq_faiss.faissio.kmeans import fit_codebooks
from gpq_faiss.methods import ninh, pqn, ssgah
from gpq_faiss.methods.baseline import squared_distances, triplet_margin, triplet_ranking
from gpq_faiss.methods.bgdh import BipartiteGraph, pairwise_likelihood
from gpq_faiss.methods.cnnh import descend, factorise
from gpq_faiss.methods.dqn import pairwise_cosine
from gpq_faiss.methods.dtq import group_hard_triplets
from gpq_faiss.nn.quantizer import unit


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=drawn(seed), dtype=torch.float64)


def some_labels(n, classes, seed):
    """One label a row, or several."""
    y = (torch.rand(n, classes, generator=drawn(seed)) < 0.4).double()
    y[torch.arange(n), torch.randint(classes, (n,), generator=drawn(seed))] = 1
    return y


def alike(y, i, j):
    return bool((y[i] * y[j]).any())


def triplets_of(y):
    """Anchors, positives and negatives."""
    for a, p, n in itertools.product(range(len(y)), repeat=3):
        if a != p and alike(y, a, p) and not alike(y, a, n):
            yield a, p, n


def mean(values):
    return sum(values) / len(values) if values else 0.0


def apart(x, i, j):
    return float((x[i] - x[j]).square().sum())


def hinges(h, y, margin):
    return mean([max(0.0, margin + apart(h, a, p) - apart(h, a, n)) for a, p, n in triplets_of(y)])


@given(
    n=st.integers(1, 9),
    classes=st.integers(1, 4),
    margin=st.sampled_from([0.0, 0.3, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_losses_over_triplets_and_pairs(n, classes, margin, seed):
    h, q, y = normal(n, 3, seed=seed), normal(n, 3, seed=seed + 1), some_labels(n, classes, seed)
    result = float(triplet_ranking(squared_distances(h, h), y, margin))
    assert result == pytest.approx(hinges(h, y, margin), abs=1e-9)
    logistic = [1 / (1 + math.exp(3 * float(h[a] @ (q[p] - q[n])))) for a, p, n in triplets_of(y)]
    result = float(pqn.asymmetric_triplets(h, q, y, scale=3.0))
    assert result == pytest.approx(mean(logistic), abs=1e-9)
    a, p, n_ = ssgah.draw_triplets(y, drawn(seed))  # one for each anchor that has any
    assert set(zip(a.tolist(), p.tolist(), n_.tolist(), strict=True)) <= set(triplets_of(y))
    assert a.tolist() == sorted({anchor for anchor, _, _ in triplets_of(y)})
    identical = {pair: alike(y, *pair) for pair in itertools.product(range(n), repeat=2)}
    theta, kinds = h @ h.T / 2, {True: [], False: []}
    for (i, j), equal in identical.items():
        if i != j:
            kinds[equal].append(math.log1p(math.exp(-theta[i, j] if equal else theta[i, j])))
    assert float(pairwise_likelihood(h, y)) == pytest.approx(
        sum(map(mean, kinds.values())) / 2, abs=1e-9
    )
    cosine = torch.cosine_similarity(h[:, None], h, dim=2)
    squares = [float((2 * equal - 1) - cosine[pair]) ** 2 for pair, equal in identical.items()]
    assert float(pairwise_cosine(h, y)) == pytest.approx(mean(squares), abs=1e-9)


@pytest.mark.parametrize("margin", [0.0, 4.0])
def test_every_pair_takes_one_negative_that_violates_the_margin(margin):
    z, y = normal(10, 4), torch.eye(3)[[0, 1, 0, 1, 2, 1, 0, 2, 1, 0]]
    y[4, 0] = 1  # two labels
    candidates, result = defaultdict(set), defaultdict(set)
    for a, p, n in triplets_of(y):
        if apart(z, a, p) - apart(z, a, n) + margin > 0:
            candidates[a, p].add(n)
    generator = drawn()
    for _ in range(60):
        triplets = group_hard_triplets(z, y, margin, generator)
        rows = list(zip(*(t.tolist() for t in triplets), strict=True))
        assert len(rows) == len({row[:2] for row in rows}) == len(candidates)
        for a, p, n in rows:
            result[a, p].add(n)
    assert result == candidates, "each of them at random"
    expected = mean([max(0.0, margin + apart(z, a, p) - apart(z, a, n)) for a, p, n in rows])
    a, p, n = triplets
    assert float(triplet_margin(z[a] - z[p], z[a] - z[n], margin)) == pytest.approx(
        expected, rel=1e-12
    )


# Losses of a batch

# The weight of each part of a loss in the total, and its value; None: not worked out here.


def error_of(x, C):
    parts = x.reshape(len(x), len(C), -1)
    return float(np.square(parts[:, :, None] - C).sum(axis=3).min(axis=2).sum(axis=1).mean())


def pqn_terms(method, batch):
    """Quantised softly: the mean of codewords by a softmax of cosines. The loss reaches codewords
    and network alike."""
    with torch.enable_grad():
        method.losses(batch, amp=False)["total"].backward()
    assert bool(method.codewords.grad.any(dim=2).all())
    assert all(p.grad is not None for p in method.parameters())
    x, Z = method(batch.x[:12]).reshape(12, 4, -1), unit(method.codewords)
    q = torch.stack(
        [torch.stack([(10 * Z[m] @ i[m]).softmax(0) @ Z[m] for m in range(4)]) for i in x]
    )
    return {"total": (1, pqn.asymmetric_triplets(x.flatten(1), q.flatten(1), batch.y))}


def subic_terms(method, batch):
    method.gamma, method.mu = 0.3, 0.7
    z = method(batch.x[:12])
    chosen = unpack_codes(method.coder().encode(z.numpy()), 4, 16)
    np.testing.assert_array_equal(chosen, z.reshape(12, 4, 16).argmax(dim=2))
    naive = -(method.classifier(z).log_softmax(dim=1) * batch.y).sum() / 12 / math.log(10)

    def entropy(z):
        """Of four blocks, as a share of what they can have."""
        return -sum(v * math.log2(v) for v in z.tolist()) / 16

    entropies = mean([entropy(i) for i in z]), entropy(z.mean(0))
    return {
        "classification": (1, naive),
        "mean_entropy": (0.3, entropies[0]),
        "batch_entropy": (-0.7, entropies[1]),
    }


def ninh_terms(method, batch):
    method.weight.mul_(30)
    shifted = method(batch.x)
    values = ninh.piecewise_threshold(shifted + 0.5, 0.4)
    assert ((values == 0) | (values == 1)).any()
    bits = np.unpackbits(method.coder().encode(shifted.numpy()), axis=1, bitorder="little")
    np.testing.assert_array_equal(bits, values > 0.5)
    return {"total": (1, hinges(values[:12], batch.y, method.margin))}


def dqn_terms(method, batch):
    method.fit_labels(None, np.arange(12), None, None)
    assert parts_of(method, batch)["quantisation"] == 0  # until they are fitted
    method.fitted.fill_(True)
    error = error_of(method(batch.x[:12]).numpy(), method.codewords.numpy()) / 48
    return {"cosine": (1, None), "quantisation": (method.weight, error)}


def cnnh_terms(method, batch):
    y = sets_of_labels(13, 3, True, 3)
    method.fit_labels(None, np.arange(13), y, None)
    out = method(batch.x[:12]).double().tanh().numpy()
    return {"total": (1, np.square(out - factorise(y, 16)[:12]).mean())}


@pytest.mark.parametrize(
    ("name", "data", "step", "terms"),
    [
        ("pqn", features, 0, pqn_terms),
        ("subic", features, 0, subic_terms),
        ("ninh", features, 0, ninh_terms),
        ("dqn", features, 0, dqn_terms),
        ("cnnh", features, 0, cnnh_terms),
    ],
)
def test_losses_are_their_terms_on_the_right_rows(name, data, step, terms):
    method, batch = made(name, data()).eval(), first_batch(data(), 12, 9, step)
    with torch.no_grad():
        expected = terms(method, batch)
    result = parts_of(method, batch)
    for piece, (_, value) in expected.items():
        assert value is None or result[piece] == pytest.approx(float(value), rel=1e-4), piece
    total = sum(weight * result[piece] for piece, (weight, _) in expected.items())
    assert result["total"] == pytest.approx(total, rel=1e-5)


def test_codebooks_continue_from_a_start_and_never_get_worse():
    x = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
    first = fit_codebooks(x, 3, 16, seed=1)
    assert first.shape == (3, 16, 4)
    assert error_of(x, first) < 0.75 * error_of(x, x[:16].reshape(16, 3, 4).transpose(1, 0, 2))
    again = fit_codebooks(x, 3, 16, start=first, seed=0)
    assert error_of(x, again) <= error_of(x, first) + 1e-5
    assert np.abs(again - first).max() < 0.5, (
        "a fit from the start would have numbered the codewords anew"
    )
    np.testing.assert_array_equal(first, fit_codebooks(x, 3, 16, seed=1))
    with pytest.raises(DataError, match="at least 16"):
        fit_codebooks(x[:15], 3, 16, seed=0)


# CNNH


def sets_of_labels(n, classes, several, seed):
    rng = np.random.default_rng(seed)
    if not several:
        return np.eye(classes, dtype=np.float32)[rng.integers(0, classes, n)]
    y = (rng.random((n, classes)) < 0.3).astype(np.float32)
    y[~y.any(axis=1), 0] = 1
    return y


def slow_descent(y, H, sweeps, rng):
    """The paper's descent, in place, with the n x n matrix worked out anew for each entry;
    derivatives by automatic differentiation."""
    S, H = torch.from_numpy(np.where(y @ y.T > 0, 1.0, -1.0)), torch.from_numpy(H)
    n, q = H.shape
    for _ in range(sweeps):
        for j, i in ((j, i) for j in rng.permutation(q) for i in rng.permutation(n)):
            positions, moved = H[i, j].clone().requires_grad_(), H.clone()
            moved[i, j] = positions
            (slope,) = torch.autograd.grad(
                (moved @ moved.T - q * S).square().sum(), positions, create_graph=True
            )
            (curve,) = torch.autograd.grad(slope, positions)
            if curve > 0:
                H[i, j] = (H[i, j] - slope.detach() / curve).clip(-1, 1)
            elif slope != 0:
                H[i, j] = -slope.detach().sign()


@pytest.mark.parametrize("several", [False, True])
def test_the_descent_takes_newton_steps_and_lowers_the_objective(several):
    y = sets_of_labels(9, 3, several, 4)
    fast = np.random.default_rng(1).uniform(-1, 1, (9, 4))
    slow = fast.copy()
    descend(y, fast, 2, np.random.default_rng(7))
    slow_descent(y, slow, 2, np.random.default_rng(7))
    np.testing.assert_allclose(fast, slow, atol=1e-8)
    y, H = sets_of_labels(150, 4, several, 0), np.random.default_rng(0).uniform(-1, 1, (150, 8))
    values = []
    for _ in range(5):
        values.append(float(np.square(np.where(y @ y.T > 0, 1, -1) - H @ H.T / 8).mean()))
        descend(y, H, 1, np.random.default_rng(0))
    assert values[1] < 0.9 * values[0]
    assert (np.diff(values) <= 1e-9).all()
    assert np.abs(H).max() <= 1


# BGDH


def groups(seed, n=60):
    """Two far groups of items."""
    return torch.randn(2 * n, 3, generator=drawn(seed)) + 40 * (torch.arange(2 * n) >= n)[:, None]


def test_walks_from_near_anchors_have_the_probabilities_of_the_graph():
    graph, sample, x = BipartiteGraph(8, 3, 2), groups(0), groups(1, 10)
    graph.fit(sample, seed=0)
    near, weight = graph.nearest_anchors(x)
    d, order = (x[:, None] - graph.anchors).square().sum(dim=2).sort(dim=1)
    assert torch.equal(near, order[:, :2])
    kernel = (-(d[:, :2] - d[:, :1]) / graph.bandwidth).exp()
    torch.testing.assert_close(weight, kernel / kernel.sum(dim=1, keepdim=True), atol=1e-3, rtol=0)
    # Steps sum over the items on the way: by the probability of each item, from an anchor.
    Z = np.zeros((len(sample), 8))
    np.put_along_axis(Z, *(t.numpy() for t in graph.nearest_anchors(sample)), axis=1)
    np.testing.assert_allclose(graph.transitions.numpy(), (Z / Z.sum(0)).T @ Z, atol=1e-5)
    walks = graph.walk(x[:1].expand(20_000, -1), drawn())
    first = torch.zeros(8).scatter_(0, near[0], weight[0])
    expected = (first + first @ graph.transitions) / 2  # one visit or two, equally often
    result = torch.bincount(walks, minlength=8) / 20_000
    torch.testing.assert_close(result, expected, atol=0.015, rtol=0)


# SSGAH


def gradients(module):
    return [
        p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in module.parameters()
    ]


@pytest.mark.parametrize("data", [digits, features])
def test_every_network_gets_the_gradient_of_its_own_objective_alone(data):
    """The invariant: one backward through the sum is three separate ones."""
    method, batch = made("ssgah", data()).eval(), first_batch(data(), 12, 9, 9)
    networks = method.backbone, method.generator, method.discriminator

    def after(*terms):
        """The gradients of the networks after a backward through the weighted sum of the terms."""
        batch.generator.manual_seed(0)
        method.zero_grad(set_to_none=True)
        parts = method.losses(batch, amp=False)
        weights = {"synthetic": method.synthetic, "adversary": -method.adversary}
        sum(weights.get(t, 1.0) * parts[t] for t in terms).backward()
        return [gradients(net) for net in networks]

    together = after("total")
    assert all(any(g.abs().sum() > 0 for g in grads) for grads in together)
    section = ("rank", "synthetic"), ("generator", "adversary"), ("discriminator",)
    for positions, terms in enumerate(section):
        for second, result in enumerate(after(*terms)):
            for g, expected in zip(result, together[second], strict=True):
                target = expected if second == positions else torch.zeros_like(g)
                torch.testing.assert_close(g, target, rtol=1e-4, atol=1e-6)

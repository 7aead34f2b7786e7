"""The trained baselines: their losses against plain loops, each the weighted sum of its terms on
the right rows, and what they keep."""

import itertools
import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from array_data import reconstruct
from deep_training import (
    digits,
    features,
    first_batch,
    made,
    parts_of,
    quick_config,
    split_of,
    trained,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods import ninh, pqn, ssgah, subic
from gpq_faiss.methods.baseline import squared_distances, triplet_margin, triplet_ranking
from gpq_faiss.methods.bgdh import BipartiteGraph, pairwise_likelihood
from gpq_faiss.methods.cnnh import descend, factorise
from gpq_faiss.methods.dqn import pairwise_cosine
from gpq_faiss.methods.dtq import group_hard_triplets
from gpq_faiss.methods.kmeans import fit_codebooks
from gpq_faiss.methods.ssdh import batch_graph, contrast


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(shape, generator=drawn(seed), dtype=torch.float64)


def some_labels(n, classes, seed):
    """Several labels a row, and rows without any."""
    return (torch.rand(n, classes, generator=drawn(seed)) < 0.4).double()


def labels_of(ids, classes):
    """One label a row; -1 is an unlabelled row."""
    return torch.cat([torch.eye(classes), torch.zeros(1, classes)])[ids]


def alike(y, i, j):
    return bool((y[i] * y[j]).any())


def triplets_of(y, group=100):
    """Anchors, positives and negatives in one group of rows."""
    labelled = [i for i in range(len(y)) if y[i].any()]
    for a, p, n in itertools.product(labelled, repeat=3):
        if (
            a != p
            and alike(y, a, p)
            and not alike(y, a, n)
            and a // group == p // group == n // group
        ):
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
    for group in (4, 100) if n in (1, 2, 3, 4, 8) else (100,):  # several groups are of equal size
        logistic = [
            1 / (1 + math.exp(3 * float(h[a] @ (q[p] - q[n])))) for a, p, n in triplets_of(y, group)
        ]
        result = float(pqn.asymmetric_triplets(h, q, y, group=group, scale=3.0))
        assert result == pytest.approx(mean(logistic), abs=1e-9)
    a, p, n_ = ssgah.draw_triplets(y, drawn(seed))  # one for each anchor that has any
    assert set(zip(a.tolist(), p.tolist(), n_.tolist(), strict=True)) <= set(triplets_of(y))
    assert a.tolist() == sorted({anchor for anchor, _, _ in triplets_of(y)})
    pairs = [(i, j) for i, j in itertools.product(range(n), repeat=2) if y[i].any() and y[j].any()]
    identical = {pair: alike(y, *pair) for pair in pairs}
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


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 1, 2], [-1, -1]])
def test_a_batch_without_triplets_costs_nothing(ids):
    x, y = torch.randn(1, 4).repeat(len(ids), 1).requires_grad_(), labels_of(ids, 3)  # equal rows
    nobody = torch.zeros(len(ids), len(ids), dtype=torch.bool)
    a, p, n = group_hard_triplets(x, y, 5.0, torch.Generator())
    assert all(len(t) == 0 for t in (a, p, n, *ssgah.draw_triplets(y, drawn())))
    for loss in (
        pqn.asymmetric_triplets(x, x, y),
        triplet_ranking(squared_distances(x, x), y, 1.0),
        triplet_margin(x[a] - x[p], x[a] - x[n], 5.0),
        contrast(squared_distances(x, x), nobody, nobody, 5.0),
    ):
        loss.backward()
        assert float(loss.detach()) == 0
        assert not x.grad.any()


@pytest.mark.parametrize(("group", "margin"), [(100, 0.0), (5, 0.0), (100, 4.0)])
def test_every_pair_takes_one_negative_that_violates_the_margin(group, margin):
    z, y = normal(10, 4), labels_of([0, 1, 0, -1, 2, 1, 0, 2, 1, 0], 3)
    y[4, 0] = 1  # two labels
    candidates, result = defaultdict(set), defaultdict(set)
    for a, p, n in triplets_of(y, group):
        if apart(z, a, p) - apart(z, a, n) + margin > 0:
            candidates[a, p].add(n)
    generator = drawn()
    for _ in range(60):
        triplets = group_hard_triplets(z, y, margin, generator, group)
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


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(3, 30),
    near=st.floats(0.01, 0.6),
    far=st.floats(0.01, 0.4),
    seed=st.integers(0, 10**6),
)
def test_graph_of_a_mini_batch(n, near, far, seed):
    x = normal(n, 4, seed=seed)
    neighbours, distant = batch_graph(x, near, far)
    n_near = max(1, min(round(near * n), (n - 1) // 2))
    n_far = max(1, min(round(far * n), n - 1 - n_near))
    for i in range(n):
        order = sorted((j for j in range(n) if j != i), key=lambda j: apart(x, i, j))
        assert set(neighbours[i].nonzero()[:, 0].tolist()) == set(order[:n_near])
        assert set(distant[i].nonzero()[:, 0].tolist()) == set(order[-n_far:])


def test_a_bit_of_ninh_is_a_function_of_its_slice_and_thresholds_are_piece_wise():
    s = torch.tensor([0.0, 0.29, 0.31, 0.5, 0.69, 0.71, 1.0], requires_grad=True)
    out = ninh.piecewise_threshold(s, 0.2)
    assert out.tolist() == pytest.approx([0, 0, 0.31, 0.5, 0.69, 1, 1])
    out.sum().backward()
    assert s.grad.tolist() == [0, 0, 1, 1, 1, 0, 0]
    method = made("ninh", features(), 4)
    x = torch.randn(6, 4 * ninh.SLICE, generator=drawn(1))
    for bit in range(4):
        section = slice(ninh.SLICE * bit, ninh.SLICE * (bit + 1))
        expected = torch.sigmoid(x[:, section].relu() @ method.weight[bit])
        torch.testing.assert_close(method.encoded(x)[:, bit], expected)


# Losses of a batch

# The weight of each part of a loss in the total, and its value; None: not worked out here.


def error_of(x, C):
    parts = x.reshape(len(x), len(C), -1)
    return float(np.square(parts[:, :, None] - C).sum(axis=3).min(axis=2).sum(axis=1).mean())


def apart_or_near(d, near, far, margin):
    pull, push = ([math.sqrt(v) for v in d[kind].tolist()] for kind in (near, far))
    return (mean([v**2 for v in pull]) + mean([max(0, margin - v) ** 2 for v in push])) / 2


def ssdh_terms(method, batch):
    h = method(batch.x).sigmoid()
    deep = method.extractor.trunk_features(method.extractor.input(batch.x))
    batch.y[2, 7] = 1  # two labels
    d, graph = squared_distances(h, h), batch_graph(deep, method.near, method.far)
    method.margin_pair = float(d.sqrt().median())
    y = torch.cat([batch.y, torch.eye(10)[method.classifier(deep)[12:].argmax(1)]])
    identical = torch.tensor([[alike(y, i, j) for j in range(21)] for i in range(12, 21)])
    themselves = torch.eye(21, dtype=torch.bool)[12:]
    return {
        "rank": (1, hinges(h[:12], batch.y, method.margin_rank) / 2),
        "classification": (1, None),
        "embedding": (method.weight, apart_or_near(d, *graph, method.margin_pair)),
        "pseudo": (
            method.weight,
            apart_or_near(d[12:], identical & ~themselves, ~identical, method.margin_pair),
        ),
    }


def pqn_terms(method, batch):
    """Quantised softly: the mean of codewords by a softmax of cosines. The loss reaches codewords
    and network alike."""
    with torch.enable_grad():
        method.losses(batch, amp=False)["total"].backward()
    assert bool(method.codewords.raw.grad.any(dim=2).all())
    assert all(p.grad is not None for p in method.parameters())
    x, Z = method(batch.x[:12]).reshape(12, 4, -1), method.codewords()
    q = torch.stack(
        [torch.stack([(10 * Z[m] @ i[m]).softmax(0) @ Z[m] for m in range(4)]) for i in x]
    )
    return {"total": (1, pqn.asymmetric_triplets(x.flatten(1), q.flatten(1), batch.y))}


def subic_terms(method, batch):
    method.gamma, method.mu = 0.3, 0.7
    z = method(batch.x[:12])
    chosen = unpack_codes(method.coder().encode(z.numpy()), 4, 16)
    np.testing.assert_array_equal(chosen, z.reshape(12, 4, 16).argmax(dim=2))
    log_p = method.classifier(z).log_softmax(dim=1)
    naive = -(log_p * batch.y).sum() / 12 / math.log(10)

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
    assert parts_of(method, batch)["quantisation"] == 0  # until they are fitted
    method.fitted.fill_(True)
    error = error_of(method(batch.x[:12]).numpy(), method.codewords.numpy()) / 48
    return {"cosine": (1, None), "quantisation": (method.weight, error)}


def dtq_terms(method, batch):
    """After a training; by turns: the codes kept are those of the codebooks kept, and the loss
    counts the distance to their sums."""
    with torch.enable_grad():
        state = trained("dtq").method.state_dict()
    assert bool(state["seen"].all())
    retained, codewords = state["kept"].numpy(), state["codewords"].numpy()
    error = np.square(retained - reconstruct(state["codes"].numpy(), codewords)).sum(axis=1).mean()
    assert error < 0.5 * retained.var(axis=0).sum()
    method.fit_labels(None, split_of(features()).labelled, None, None)
    method.load_state_dict(state)
    section = reconstruct(method.codes[method.positions(batch)].numpy(), codewords)
    error = np.square(method(batch.x[:12]).numpy() - section).sum(axis=1).mean()
    return {"triplet": (1, None), "quantisation": (method.weight, error)}


def cnnh_terms(method, batch):
    rows, y = np.concatenate([batch.rows, [10**6]]), sets_of_labels(13, 3, True, 3)
    method.fit_labels(None, rows, y, None)
    out = method(batch.x[:12]).double().tanh().numpy()
    return {"total": (1, np.square(out - factorise(y, 16)[:12]).mean())}


def bgdh_terms(method, batch):
    method.before_step(0, 9, lambda n: iter([batch.x]))
    u, e, generator = method(batch.x), method.extractor(batch.x), drawn()
    right = method.graph.walk(method.extractor.input(batch.x), method.longest, generator)
    wrong = torch.randint(int(method.graph.used), (21, method.wrong), generator=generator)
    chosen, signs = method.contexts[torch.cat([right[:, None], wrong], dim=1)], [1] + 5 * [-1]
    graph = [
        math.log1p(math.exp(-sign * w @ e[i]))
        for i in range(21)
        for w, sign in zip(chosen[i], signs, strict=True)
    ]
    return {
        "pairs": (1, pairwise_likelihood(u[:12], batch.y)),
        "quantisation": (method.quantisation, (u[:12] - u[:12].sign()).square().mean()),
        "graph": (method.weight, mean(graph)),
    }


def ssgah_terms(method, batch):
    method.blur, generator, s = 0.0, drawn(), method.smooth
    v = method.extractor.input(batch.x)
    pair = method.generator(v, torch.randn(21, method.noise, generator=generator))
    h, hp, hn = (method.extractor(t, True).sigmoid() for t in (v, *pair))
    a, p, n = ssgah.draw_triplets(batch.y, generator)
    triples = (v, *pair), (v[a], v[n], v[p]), (v[a], v[p], v[n])
    fake, swapped, real = (method.discriminator(*t).sigmoid() for t in triples)
    says = -(s * real.log() + (1 - s) * (1 - real).log()).mean()
    says = says - (1 - fake).log().mean() / 2 - (1 - swapped).log().mean() / 2
    hinge = triplet_margin(h - hp, h - hn, method.margin)
    trust = {0: 0.0, 2: 0.0, 5: 0.5, 9: 1.0}[batch.step]  # once the generator has learnt
    return {
        "rank": (1, triplet_ranking(squared_distances(h[:12], h[:12]), batch.y, method.margin)),
        "synthetic": (trust * method.synthetic, hinge),
        "adversary": (-method.adversary, hinge),
        "discriminator": (1, says),
        "generator": (1, -fake.log().mean()),
    }


@pytest.mark.parametrize(
    ("name", "data", "step", "terms"),
    [
        ("ssdh", digits, 0, ssdh_terms),
        ("pqn", features, 0, pqn_terms),
        ("subic", features, 0, subic_terms),
        ("ninh", features, 0, ninh_terms),
        ("dqn", features, 0, dqn_terms),
        ("dtq", features, 0, dtq_terms),
        ("cnnh", features, 0, cnnh_terms),
        ("bgdh", features, 0, bgdh_terms),
        ("ssgah", features, 9, ssgah_terms),
        *(("ssgah", digits, step, ssgah_terms) for step in (0, 2, 5, 9)),
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


def test_margin_and_number_of_classes_that_suit_a_method():
    assert [made("ninh", features(), bits=bits).margin for bits in (12, 48)] == [1, 4]
    with pytest.raises(UsageError, match="at least 2"):
        subic.SUBIC(quick_config(), features(), 8, 1)


def test_codebooks_go_on_from_where_they_are_and_never_get_worse():
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


def test_codewords_are_the_means_of_their_items_after_training():
    method = trained("dqn").method
    # The invariant of the alternation: every codeword in use is the mean of the items nearest to
    # it.
    assert method.seen.all()
    assert method.rows.tolist() == split_of(features()).labelled.tolist()
    x, C = method.kept.numpy().reshape(200, 4, 12), method.codewords.numpy()
    nearest = np.square(x[:, :, None] - C).sum(axis=3).argmin(axis=2)
    for m, k in itertools.product(range(4), range(16)):
        if (nearest[:, m] == k).sum() > 1:
            np.testing.assert_allclose(C[m, k], x[nearest[:, m] == k, m].mean(axis=0), atol=0.02)


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
def test_the_descent_takes_newtons_step_at_every_entry_and_lowers_the_objective(several):
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


def test_the_codes_are_one_a_class_and_far_apart():
    y = sets_of_labels(200, 6, False, 1)
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


# BGDH


def groups(seed, n=60):
    """Two far groups of items."""
    return torch.randn(2 * n, 3, generator=drawn(seed)) + 40 * (torch.arange(2 * n) >= n)[:, None]


def test_items_are_joined_to_near_anchors_and_walks_have_the_probabilities_of_the_graph():
    graph, sample, x = BipartiteGraph(8, 3, 2), groups(0), groups(1, 10)
    graph.fit(sample, seed=0)
    near, weight = graph.joined(x)
    d, order = (x[:, None] - graph.anchors).square().sum(dim=2).sort(dim=1)
    assert torch.equal(near, order[:, :2])
    kernel = (-(d[:, :2] - d[:, :1]) / graph.bandwidth).exp()
    torch.testing.assert_close(weight, kernel / kernel.sum(dim=1, keepdim=True), atol=1e-3, rtol=0)
    # Steps sum over the items on the way: by the probability of each item, from an anchor.
    Z = np.zeros((len(sample), 8))
    np.put_along_axis(Z, *(t.numpy() for t in graph.joined(sample)), axis=1)
    np.testing.assert_allclose(graph.steps.numpy(), (Z / Z.sum(0)).T @ Z, atol=1e-5)
    walks = graph.walk(x[:1].expand(20_000, -1), 2, drawn())
    first = torch.zeros(8).scatter_(0, near[0], weight[0])
    expected = (first + first @ graph.steps) / 2  # one visit or two, equally often
    result = torch.bincount(walks, minlength=8) / 20_000
    torch.testing.assert_close(result, expected, atol=0.015, rtol=0)


def test_few_items_make_few_anchors():
    graph = BipartiteGraph(50, 3, 2)
    sample = groups(0, 3)
    graph.fit(sample, seed=0)
    assert int(graph.used) == 6
    assert (graph.walk(sample, 4, drawn()) < 6).all()
    assert torch.isfinite(graph.steps).all()
    with pytest.raises(DataError, match="too few"):
        graph.fit(sample[:1], seed=0)


def test_graph_waits_for_the_network_on_images_and_not_on_features():
    for data, when in ((digits(), 3), (features(), 0)):
        method, batch = made("bgdh", data), first_batch(data, 20, 20)
        readable = []
        for step in range(5):
            method.before_step(step, 9, lambda n, batch=batch: iter([batch.x]))
            readable.append("graph" in method.losses(batch, amp=False))
        assert readable == [step >= when for step in range(5)]


def test_the_graph_stays_while_the_network_learns_and_a_training_resumes():
    method, batch = made("bgdh", digits()), first_batch(digits(), 20, 20)
    method.before_step(3, 9, lambda n: iter([batch.x]))
    before = method.seen(batch.x).clone()
    resumed = made("bgdh", digits())
    resumed.load_state_dict(method.state_dict())
    resumed.before_step(4, 9, lambda n: pytest.fail("the graph is there"))
    assert parts_of(method.eval(), batch) == parts_of(resumed.eval(), batch)
    optimizer = method.optimizer(quick_config())
    method.train()
    method.losses(batch, amp=False)["total"].backward()
    optimizer.step()
    torch.testing.assert_close(method.seen(batch.x), before, rtol=0, atol=0)


# SSGAH


def gradients(module):
    return [
        p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in module.parameters()
    ]


@pytest.mark.parametrize("data", [digits, features])
def test_every_network_gets_the_gradient_of_its_own_objective_alone(data):
    """The invariant: one backward through the sum is three separate ones."""
    method, batch = made("ssgah", data()).eval(), first_batch(data(), 12, 9, 9)
    networks = method.extractor, method.generator, method.discriminator

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


def test_synthetic_items_stay_out_of_running_statistics():
    method, batch = made("ssgah", digits()).train(), first_batch(digits(), 12, 9)
    norm = nn.BatchNorm1d(64)
    method.extractor.layers.insert(1, norm)
    layer = method.extractor.layers[0]
    real = layer(method.extractor.input(batch.x).flatten(1)).mean(dim=0)
    method.losses(batch, amp=False)
    torch.testing.assert_close(norm.running_mean, 0.1 * real)


def test_image_networks_take_any_size():
    for size in (4, 7, 33):
        x, z = torch.randn(2, 3, size, size), torch.randn(2, 5)
        similar, dissimilar = ssgah.Generator(0, 5, 16)(x, z)
        assert similar.shape == dissimilar.shape == x.shape
        assert ssgah.Discriminator(0, 16)(x, similar, dissimilar).shape == (2,)

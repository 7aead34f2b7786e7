"""The losses of the trained baselines against plain loops, and that each is the weighted sum of its terms on the right rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from deep_training import (
    digits,
    features,
    first_batch,
    made,
    parts_of,
    quick_config,
    split_of,
    trained,
    vectors,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.baseline import squared_distances, triplet_margin, triplet_ranking
from gpq_faiss.methods.bgdh import context_loss, pairwise_likelihood
from gpq_faiss.methods.cnnh import descend, factorise
from gpq_faiss.methods.dqn import pairwise_cosine
from gpq_faiss.methods.dtq import group_hard_triplets, reconstruct
from gpq_faiss.methods.ninh import SLICE, piecewise_threshold
from gpq_faiss.methods.pq import fit_codebooks
from gpq_faiss.methods.pqn import asymmetric_triplets, soft_quantise
from gpq_faiss.methods.ssdh import batch_graph, contrast, same_class
from gpq_faiss.methods.ssgah import draw_triplets
from gpq_faiss.methods.subic import SUBIC, block_log_softmax, entropies


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=drawn(seed), dtype=torch.float64)


def some_labels(n: int, classes: int, seed: int) -> Tensor:
    """Several labels a row, and rows without any."""
    return (torch.rand(n, classes, generator=drawn(seed)) < 0.4).double()


def labels_of(ids: list[int], classes: int) -> Tensor:
    """One label a row; -1 is an unlabelled row."""
    return torch.cat([torch.eye(classes), torch.zeros(1, classes)])[ids]


def alike(y: Tensor, i: int, j: int) -> bool:
    return bool((y[i] * y[j]).any())


def triplets_of(y: Tensor, group: int = 100) -> Iterator[tuple[int, int, int]]:
    """Anchors, positives and negatives in one group of rows."""
    known = [i for i in range(len(y)) if y[i].any()]
    for a, p, n in itertools.product(known, repeat=3):
        if a != p and alike(y, a, p) and not alike(y, a, n) and a // group == p // group == n // group:
            yield a, p, n


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def apart(x: Tensor, i: int, j: int) -> float:
    return float((x[i] - x[j]).square().sum())


def hinges(h: Tensor, y: Tensor, margin: float) -> float:
    return mean([max(0.0, margin + apart(h, a, p) - apart(h, a, n)) for a, p, n in triplets_of(y)])


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 9),
    classes=st.integers(1, 4),
    margin=st.sampled_from([0.0, 0.3, 5.0]),
    seed=st.integers(0, 10**6),
)
def test_losses_over_triplets_and_pairs(n: int, classes: int, margin: float, seed: int) -> None:
    h, q, y = normal(n, 3, seed=seed), normal(n, 3, seed=seed + 1), some_labels(n, classes, seed)
    found = float(triplet_ranking(squared_distances(h, h), y, margin))
    assert found == pytest.approx(hinges(h, y, margin), abs=1e-9)
    for group in (4, 100):
        logistic = [1 / (1 + math.exp(3 * float(h[a] @ (q[p] - q[n])))) for a, p, n in triplets_of(y, group)]
        if n <= group or n == 8:  # several groups are of equal size
            assert float(asymmetric_triplets(h, q, y, group=group, scale=3.0)) == pytest.approx(
                mean(logistic), abs=1e-9
            )
    pairs = [(i, j) for i, j in itertools.product(range(n), repeat=2) if y[i].any() and y[j].any()]
    kinds: dict[bool, list[float]] = {True: [], False: []}
    for i, j in pairs:
        if i != j:
            theta = float(h[i] @ h[j]) / 2
            kinds[alike(y, i, j)].append(math.log1p(math.exp(-theta if alike(y, i, j) else theta)))
    assert float(pairwise_likelihood(h, y)) == pytest.approx(sum(map(mean, kinds.values())) / 2, abs=1e-9)
    cosine = torch.nn.functional.normalize(h, dim=1)
    squares = [((1 if alike(y, i, j) else -1) - float(cosine[i] @ cosine[j])) ** 2 for i, j in pairs]
    assert float(pairwise_cosine(h, y)) == pytest.approx(mean(squares), abs=1e-9)


def test_the_ranking_term_has_the_gradient_of_the_loop() -> None:
    h = normal(8, 4, seed=1).requires_grad_()
    y = torch.eye(3, dtype=torch.float64)[[0, 0, 1, 1, 2, 2, 0, 1]]
    assert torch.autograd.gradcheck(lambda v: triplet_ranking(squared_distances(v, v), y, 0.7), (h,))


@pytest.mark.parametrize("ids", [[0, 0, 0], [0, 1, 2], [-1, -1]])
def test_a_batch_without_triplets_costs_nothing(ids: list[int]) -> None:
    x, y = torch.randn(len(ids), 4, requires_grad=True), labels_of(ids, 3)
    triplets = group_hard_triplets(x, y, 5.0, torch.Generator())
    assert all(len(t) == 0 for t in (*triplets, *draw_triplets(y, drawn())))
    distances = squared_distances(x, x)
    for loss in (
        asymmetric_triplets(x, x, y),
        triplet_ranking(distances, y, 1.0),
        triplet_margin(x[triplets[0]] - x[triplets[1]], x[triplets[0]] - x[triplets[2]], 5.0),
    ):
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss.detach()) == 0
        assert not bool(x.grad.any())  # type: ignore[union-attr]


@pytest.mark.parametrize(("group", "margin"), [(100, 0.0), (5, 0.0), (100, 4.0)])
def test_every_pair_takes_one_negative_that_violates_the_margin(group: int, margin: float) -> None:
    z, y = normal(10, 4), labels_of([0, 1, 0, -1, 2, 1, 0, 2, 1, 0], 3)
    y[4, 0] = 1  # two labels
    candidates: dict[tuple[int, int], set[int]] = {}
    for a, p, n in triplets_of(y, group):
        if apart(z, a, p) - apart(z, a, n) + margin > 0:
            candidates.setdefault((a, p), set()).add(n)
    found: dict[tuple[int, int], set[int]] = {}
    generator = drawn()
    for _ in range(60):
        triplets = group_hard_triplets(z, y, margin, generator, group)
        pairs = list(zip(triplets[0].tolist(), triplets[1].tolist(), strict=True))
        assert len(pairs) == len(set(pairs)) == len(candidates)
        for pair, n in zip(pairs, triplets[2].tolist(), strict=True):
            found.setdefault(pair, set()).add(n)
    assert found == candidates, "each of them at random"
    rows = list(zip(*(t.tolist() for t in triplets), strict=True))
    expected = mean([max(0.0, margin + apart(z, a, p) - apart(z, a, n)) for a, p, n in rows])
    a, p, n = triplets
    assert float(triplet_margin(z[a] - z[p], z[a] - z[n], margin)) == pytest.approx(expected, rel=1e-12)


def test_drawn_triplets_are_of_one_class_and_another() -> None:
    y = some_labels(16, 5, 0)
    a, p, n = draw_triplets(y, drawn())
    known = set(triplets_of(y))
    assert all(row in known for row in zip(a.tolist(), p.tolist(), n.tolist(), strict=True))
    assert a.tolist() == sorted({anchor for anchor, _, _ in known})


def test_contrast_against_a_loop() -> None:
    d = torch.rand(6, 6, generator=drawn(2), dtype=torch.float64) * 4
    near, far = (torch.rand(6, 6, generator=drawn(seed)) < p for seed, p in ((3, 0.3), (4, 0.5)))
    pull = [float(v) for v in d[near]]
    push = [max(0.0, 1.5 - math.sqrt(float(v) + 1e-6)) ** 2 for v in d[far]]
    assert float(contrast(d, near, far, 1.5)) == pytest.approx((mean(pull) + mean(push)) / 2, abs=1e-12)
    nobody = torch.zeros(6, 6, dtype=torch.bool)
    assert float(contrast(d, nobody, nobody, 1.5)) == 0
    h = torch.full((4, 3), 0.5, requires_grad=True)  # equal codes have a finite gradient
    everyone = ~torch.eye(4, dtype=torch.bool)
    contrast(squared_distances(h, h), everyone, everyone, 2.0).backward()
    assert h.grad is not None
    assert torch.isfinite(h.grad).all()


@settings(max_examples=15, deadline=None)
@given(n=st.integers(3, 30), near=st.floats(0.01, 0.6), far=st.floats(0.01, 0.4), seed=st.integers(0, 10**6))
def test_graph_of_a_mini_batch(n: int, near: float, far: float, seed: int) -> None:
    x = normal(n, 4, seed=seed)
    neighbours, distant = batch_graph(x, near, far)
    n_near = max(1, min(round(near * n), (n - 1) // 2))
    n_far = max(1, min(round(far * n), n - 1 - n_near))
    for i in range(n):
        order = sorted((j for j in range(n) if j != i), key=lambda j: apart(x, i, j))
        assert set(neighbours[i].nonzero()[:, 0].tolist()) == set(order[:n_near])
        assert set(distant[i].nonzero()[:, 0].tolist()) == set(order[-n_far:])


def test_pseudo_label_is_the_most_probable_class() -> None:
    y = torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    logits = torch.tensor([[0.0, 0, 2], [5, 0, 0], [0, 0, 1]])
    same = [[1, 0, 1, 0, 1], [1, 0, 0, 1, 0], [1, 0, 1, 0, 1]]
    assert same_class(y, logits).int().tolist() == same


def test_context_loss_against_a_loop() -> None:
    e, w = normal(5, 4), normal(7, 4, seed=1)
    right, wrong = torch.randint(7, (5,), generator=drawn()), torch.randint(7, (5, 3), generator=drawn(1))
    losses = []
    for i in range(5):
        losses.append(math.log1p(math.exp(-float(w[right[i]] @ e[i]))))
        losses += [math.log1p(math.exp(float(w[c] @ e[i]))) for c in wrong[i]]
    assert float(context_loss(e, w, right, wrong)) == pytest.approx(mean(losses), abs=1e-12)


def test_entropies_are_those_of_a_loop_and_have_their_ends() -> None:
    def bits_of(p: Any) -> float:
        return -sum(float(v) * math.log2(v) for v in p if v > 0)

    log_z = block_log_softmax(normal(5, 12) * 3, 3)
    z = log_z.exp().numpy()
    np.testing.assert_allclose(z.sum(axis=2), 1)
    found = [float(v) for v in entropies(log_z)]
    expected = np.mean([sum(bits_of(z[i, m]) for m in range(3)) for i in range(5)])
    assert found == pytest.approx([expected, sum(bits_of(z[:, m].mean(axis=0)) for m in range(3))])
    rows = {"sure": torch.eye(4), "unsure": torch.full((6, 4), 0.25), "collapsed": torch.eye(4)[[1, 1, 1]]}
    ends = {k: [float(v) for v in entropies(p[:, None].clamp_min(1e-20).log())] for k, p in rows.items()}
    for name, wanted in {"sure": [0, 2], "unsure": [2, 2], "collapsed": [0, 0]}.items():
        assert ends[name] == pytest.approx(wanted, abs=1e-5)


def test_soft_quantisation_is_a_softmax_over_codewords_and_hard_in_the_limit() -> None:
    x, Z = (torch.nn.functional.normalize(t, dim=2) for t in (normal(3, 2, 4), normal(2, 5, 4, seed=1)))
    soft, hard = soft_quantise(x, Z, 5.0), soft_quantise(x, Z, 1e4)
    for b, m in itertools.product(range(3), range(2)):
        weight = (5 * Z[m] @ x[b, m]).softmax(0)
        torch.testing.assert_close(soft[b, m], weight @ Z[m])
        torch.testing.assert_close(hard[b, m], Z[m, (Z[m] @ x[b, m]).argmax()])


def test_a_bit_of_ninh_is_a_function_of_its_slice_and_thresholds_are_piece_wise() -> None:
    s = torch.tensor([0.0, 0.29, 0.31, 0.5, 0.69, 0.71, 1.0], requires_grad=True)
    out = piecewise_threshold(s, 0.2)
    assert out.tolist() == pytest.approx([0, 0, 0.31, 0.5, 0.69, 1, 1])
    out.sum().backward()
    assert s.grad is not None
    assert s.grad.tolist() == [0, 0, 1, 1, 1, 0, 0]
    method = made("ninh", features(), 4)
    x = torch.randn(6, 4 * SLICE, generator=drawn(1))
    for bit in range(4):
        own = slice(SLICE * bit, SLICE * bit + SLICE)
        expected = torch.sigmoid(x[:, own].relu() @ method.weight[bit])
        torch.testing.assert_close(method.encoded(x)[:, bit], expected)


# Losses of a batch ----------------------------------------------------------------------------------------------------


def test_ssdh() -> None:
    method, batch = made("ssdh", digits()).eval(), first_batch(digits(), 12, 9)
    found = parts_of(method, batch)
    with torch.no_grad():
        h = method.exported()(batch.x).sigmoid()
        deep = method.extractor.trunk_features(method.extractor.input(batch.x))
        logits = method.classifier(deep)
    d = squared_distances(h, h)
    assert found["rank"] == pytest.approx(hinges(h[:12], batch.y, method.margin_rank) / 2, rel=1e-4)
    graph = batch_graph(deep, method.near, method.far)
    assert found["embedding"] == pytest.approx(float(contrast(d, *graph, method.margin_pair)), rel=1e-4)
    classes = torch.cat([batch.y.argmax(1), logits[12:].argmax(1)])
    same = classes[12:, None] == classes
    themselves = torch.eye(21, dtype=torch.bool)[12:]
    pseudo = contrast(d[12:], same & ~themselves, ~same, method.margin_pair)
    assert found["pseudo"] == pytest.approx(float(pseudo), rel=1e-4)
    total = found["rank"] + found["classification"] + method.weight * (found["embedding"] + found["pseudo"])
    assert found["total"] == pytest.approx(total, rel=1e-5)


def test_subic() -> None:
    method, batch = made("subic", features()).eval(), first_batch(features(), 20, 5)
    method.gamma, method.mu = 0.3, 0.7
    found = parts_of(method, batch)
    total = found["classification"] + 0.3 * found["mean_entropy"] - 0.7 * found["batch_entropy"]
    assert found["total"] == pytest.approx(total, rel=1e-5)
    log_p = method.classifier(method.network(batch.x[:20])).log_softmax(dim=1)
    naive = -float((log_p * batch.y).sum().detach()) / 20 / math.log(10)
    assert found["classification"] == pytest.approx(naive, rel=1e-5)
    with pytest.raises(UsageError, match="at least 2"):
        SUBIC(quick_config(), features(), 8, 1)


def test_ninh() -> None:
    assert made("ninh", features(), bits=48).margin == 4
    method, batch = made("ninh", features(), bits=12).eval(), first_batch(features(), 30, 9)
    with torch.no_grad():
        method.weight.mul_(30)
        shifted = method.exported()(batch.x)
    values = piecewise_threshold(shifted + 0.5, 0.4)
    assert ((values == 0) | (values == 1)).any()
    bits = np.unpackbits(method.coder().encode(shifted.numpy()), axis=1, bitorder="little")[:, :12]
    np.testing.assert_array_equal(bits, values.numpy() > 0.5)
    assert parts_of(method, batch)["total"] == pytest.approx(hinges(values[:30], batch.y, 1.0), rel=1e-4)


def test_pqn_learns_its_codewords_through_the_loss() -> None:
    """Without any k-means: the gradient reaches codewords and network alike."""
    method = made("pqn", features())
    method.losses(first_batch(features(), 30, 0), amp=False)["total"].backward()  # type: ignore[no-untyped-call]
    assert bool(method.codewords.raw.grad.any(dim=2).all())  # type: ignore[union-attr]
    assert all(p.grad is not None for p in method.parameters())


# DQN and DTQ, which alternate between network and codebooks --------------------------------------------------------------


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
    first = fit_codebooks(x, 3, 16, seed=1)
    assert first.shape == (3, 16, 4)
    assert error_of(x, first) < 0.75 * error_of(x, x[:16].reshape(16, 3, 4).transpose(1, 0, 2))
    again = fit_codebooks(x, 3, 16, start=first, seed=0)
    assert error_of(x, again) <= error_of(x, first) + 1e-5
    assert np.abs(again - first).max() < 0.5, "a fit from the start would have numbered the codewords anew"
    np.testing.assert_array_equal(first, fit_codebooks(x, 3, 16, seed=1))
    with pytest.raises(DataError, match="at least 16"):
        fit_codebooks(x[:15], 3, 16, seed=0)


def test_codewords_are_the_means_of_their_items_after_training() -> None:
    method: Any = trained("dqn").method
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


# CNNH -----------------------------------------------------------------------------------------------------------------


def sets_of_labels(n: int, classes: int, several: bool, seed: int) -> np.ndarray:
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


def test_the_codes_are_one_a_class_and_far_apart() -> None:
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


def test_the_loss_of_cnnh_is_the_error_of_the_codes() -> None:
    method, batch = made("cnnh", features(), bits=12).eval(), first_batch(features(), 3, 2)
    rows, y = np.concatenate([batch.rows, [10**6]]), sets_of_labels(4, 3, True, 3)
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

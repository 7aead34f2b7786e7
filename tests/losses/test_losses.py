"""The losses against naive loops written from the equations (float64), hand-worked cases, and gradcheck."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import MARGIN, npair, soft_npair, soft_npair_of_posteriors, triplet
from gpq_faiss.nn.quantizer import intra_normalize, reexpress, soft_assign

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(s * t for s, t in zip(a, b, strict=True))


def softmax(a: Vector) -> Vector:
    e = [math.exp(v - max(a)) for v in a]
    return [v / sum(e) for v in e]


def normed(a: Vector) -> Vector:
    return [v / math.sqrt(dot(a, a)) for v in a]


def naive_soft(scores: Tensor, p: Tensor, r: Tensor) -> float:
    S, P, R = scores.tolist(), p.tolist(), r.tolist()
    items = [j for j in range(len(R)) if sum(R[j]) > 0]
    lost = []
    for i in range(len(P)):
        t = {j: dot(P[i], R[j]) for j in items}
        whole = sum(t.values())
        if whole:
            logs = dict(zip(items, softmax([S[i][j] for j in items]), strict=True))
            lost.append(-sum(t[j] / whole * math.log(logs[j]) for j in items))
    return sum(lost) / len(lost) if lost else 0.0


def naive_npair(x: Tensor, q: Tensor, labels: Tensor) -> float:
    """Eq. 2, by the shares of classes that are labels."""
    scores = [[sum(dot(a, b) for a, b in zip(i, j, strict=True)) for j in q.tolist()] for i in x.tolist()]
    return naive_soft(torch.tensor(scores, dtype=torch.float64), labels, labels)


def logits(x: Tensor, W: Tensor, variant: str, beta: float) -> list[list[Vector]]:
    """Of every row and sub-space; in the authors' variant one for all sub-spaces."""
    X, V = x.tolist(), W.tolist()
    cosines = [[[dot(row[m], normed(w)) for w in V[m]] for m in range(len(V))] for row in X]
    if variant == "paper":
        return [[[beta * v for v in sub] for sub in row] for row in cosines]
    return [[[beta**2 * sum(column) / len(row) for column in zip(*row, strict=True)]] for row in cosines]


def naive_classification(x: Tensor, W: Tensor, labels: Tensor, variant: str, beta: float) -> float:
    Y = labels.tolist()
    rows = [i for i in range(len(Y)) if sum(Y[i]) > 0]
    total = 0.0
    for i in rows:
        target = [v / sum(Y[i]) for v in Y[i]]
        each = [softmax(sub) for sub in logits(x, W, variant, beta)[i]]
        total -= sum(t * math.log(s) for p in each for t, s in zip(target, p, strict=True)) / len(each)
    return total / len(rows) if rows else 0.0


def naive_entropy(x: Tensor, W: Tensor, variant: str, beta: float) -> float:
    each = [softmax(sub) for row in logits(x, W, variant, beta) for sub in row]
    return sum(-v * math.log(max(v, 1e-300)) for p in each for v in p) / len(each)


def naive_triplet(x: Tensor, q: Tensor, labels: Tensor) -> float:
    X, Q, Y = x.tolist(), q.tolist(), labels.tolist()
    n, M = len(X), len(X[0])
    s = [[sum(dot(X[i][m], Q[j][m]) for m in range(M)) / M for j in range(n)] for i in range(n)]
    losses = []
    for a in range(n):
        positives = [j for j in range(n) if j != a and dot(Y[a], Y[j]) > 0]
        negatives = [j for j in range(n) if sum(Y[a]) > 0 and sum(Y[j]) > 0 and dot(Y[a], Y[j]) == 0]
        if not positives or not negatives:
            continue
        for p in positives:
            easier = [s[a][j] for j in negatives if s[a][j] < s[a][p]]
            chosen = max(easier) if easier else min(s[a][j] for j in negatives)
            losses.append(max(0.0, MARGIN + chosen - s[a][p]))
    return sum(losses) / len(losses) if losses else 0.0


@st.composite
def batches(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x and q [B, M, d] unit-norm, W [M, C, d] raw, labels multi-hot [B, C] with unlabelled rows."""
    B, M, d, C = (draw(st.integers(1, hi)) for hi in (7, 4, 5, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, q = intra_normalize(normal(B, M * d), M), intra_normalize(normal(B, M * d), M)
    labels = draw(st.lists(st.lists(st.booleans(), min_size=C, max_size=C), min_size=B, max_size=B))
    return x, q, 3 * normal(M, C, d), torch.tensor(labels, dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from(["paper", "code"]), st.floats(0.1, 6))
def test_losses_are_the_equations(
    batch: tuple[Tensor, Tensor, Tensor, Tensor], variant: Any, beta: float
) -> None:
    x, q, W, labels = batch
    assert float(npair(x, q, labels)) == pytest.approx(naive_npair(x, q, labels), abs=1e-9)
    assert float(triplet(x, q, labels)) == pytest.approx(naive_triplet(x, q, labels), abs=1e-9)
    got = float(subspace_classification(x, W, shares(labels, x), beta, variant))
    assert got == pytest.approx(naive_classification(x, W, labels, variant, beta), abs=1e-9)
    entropy = float(subspace_entropy(x, W, beta, variant))
    assert entropy == pytest.approx(naive_entropy(x, W, variant, beta), abs=1e-9)
    assert -1e-12 <= entropy <= math.log(W.shape[1]) + 1e-12


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_unlabelled_rows_change_neither_losses_nor_gradients(variant: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x = intra_normalize(torch.randn(6, 8, generator=generator, dtype=torch.float64), 2).requires_grad_()
    W = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1]])
    known = labels.any(dim=1)
    for loss in (
        lambda v, y: npair(v, v, y),
        lambda v, y: subspace_classification(v, W, shares(y, v), variant=variant),
        lambda v, y: triplet(v, v, y),
    ):
        (gradient,) = torch.autograd.grad(loss(x, labels), x)
        (kept,) = torch.autograd.grad(loss(x[known], labels[known]), x)
        torch.testing.assert_close(loss(x, labels), loss(x[known], labels[known]))
        torch.testing.assert_close(gradient, kept)
        assert gradient[known].abs().sum() > 0
        # No labelled row at all: zero, with a zero gradient rather than NaN.
        nothing = loss(x, torch.zeros_like(labels))
        assert nothing.item() == 0
        assert torch.equal(torch.autograd.grad(nothing, x)[0], torch.zeros_like(x))


def test_gradients() -> None:
    """gradcheck of each loss through normalisation, soft assignment and z'."""
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    raw, Z, W = parameter(4, 6), parameter(2, 3, 3), parameter(2, 3, 3)
    labels = torch.tensor([[1, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]])

    def pairs(raw: Tensor, Z: Tensor, W: Tensor) -> Tensor:
        x = intra_normalize(raw, 2)
        return npair(x, soft_assign(x, reexpress(Z, W, 3.0), 3.0), labels)

    assert torch.autograd.gradcheck(pairs, (raw, Z, W))
    y = shares(labels, raw)
    for variant in ("paper", "code"):

        def classified(r: Tensor, w: Tensor, variant: Any = variant) -> Tensor:
            x = intra_normalize(r, 2)
            return subspace_classification(x, w, y, 2.0, variant) + subspace_entropy(x, w, 2.0, variant)

        assert torch.autograd.gradcheck(classified, (raw, W))

    def mined(r: Tensor, z: Tensor) -> Tensor:
        x = intra_normalize(r, 2)
        return triplet(x, soft_assign(x, z, 3.0), labels)

    assert torch.autograd.gradcheck(mined, (raw, Z))


def test_half_precision_region_computes_in_full() -> None:
    generator = torch.Generator().manual_seed(2)
    x = intra_normalize(torch.randn(8, 24, generator=generator), 2)
    W = torch.randn(2, 5, 12, generator=generator)
    y = torch.eye(5)[torch.arange(8) % 5]

    def all_losses() -> list[Tensor]:
        q = soft_assign(x, W, 20.0)
        return [
            npair(x, q, y),
            triplet(x, q, y),
            subspace_classification(x, W, y),
            subspace_entropy(x, W),
        ]

    plain = all_losses()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = all_losses()
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def probabilities(n: int, C: int, generator: torch.Generator) -> Tensor:
    """Class probabilities float64 [n, C]: some of labels, some zero, some in between."""
    p = torch.rand(n, C, generator=generator, dtype=torch.float64).pow(4)
    p = p / p.sum(dim=1, keepdim=True)
    kind = torch.randint(4, (n,), generator=generator)
    p[kind == 0] = 0
    labels = torch.randint(C, (int((kind == 1).sum()),), generator=generator)
    p[kind == 1] = torch.eye(C, dtype=torch.float64)[labels]
    return p


@settings(max_examples=60, deadline=None)
@given(A=st.integers(1, 6), B=st.integers(1, 7), C=st.integers(1, 5), seed=st.integers(0, 10_000))
def test_soft_npair_is_the_loop_over_queries_and_items(A: int, B: int, C: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    p, r = probabilities(A, C, generator), probabilities(B, C, generator)
    scores = 5 * torch.randn(A, B, generator=generator, dtype=torch.float64)
    assert float(soft_npair(scores, p, r)) == pytest.approx(naive_soft(scores, p, r), rel=1e-9, abs=1e-9)
    p, r = (p + 0.01, r + 0.01)
    sums = torch.randn(B, C, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(soft_npair_of_posteriors(p, r, sums), soft_npair(p @ sums.T, p, r))
    nothing = scores.requires_grad_()
    soft_npair(nothing, 0 * p, 0 * r).backward()  # type: ignore[no-untyped-call]
    assert nothing.grad is not None
    assert not nothing.grad.any()

"""Intra-normalisation, assignments, z' and the losses against naive loops written from the
equations (float64), and gradcheck."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import MARGIN, npair, triplet
from gpq_faiss.nn.quantizer import (
    NORM_EPS,
    Codebooks,
    intra_normalize,
    reexpress,
    soft_assign,
    subspace_cosine,
    zero_subvectors,
)


def mean(values):
    return float(sum(values) / len(values)) if values else 0.0


def normed(a):
    return a / (a @ a).sqrt()


def naive_assign(x, words, alpha):
    """Eq. 1 for one sub-vector and one codebook."""
    weights = [math.exp(alpha * normed(w) @ x) for w in words]
    return normed(
        sum(weight * normed(w) for weight, w in zip(weights, words, strict=True)) / sum(weights)
    )


def naive_soft(scores, p, r):
    items = [j for j in range(len(r)) if r[j].any()]
    lost = []
    for section, row in zip(p, scores, strict=True):
        t = [section @ r[j] for j in items]
        if sum(t):
            logs = row[items].log_softmax(0)
            lost.append(-sum(v / sum(t) * log for v, log in zip(t, logs, strict=True)))
    return mean(lost)


def naive_npair(x, q, labels):
    """Eq. 2, by the shares of classes that are labels."""
    scores = [[sum(a @ b for a, b in zip(i, j, strict=True)) for j in q] for i in x]
    return naive_soft(torch.tensor(scores, dtype=torch.float64), labels.double(), labels.double())


def logits(row, W, variant, beta):
    """Of one row in every sub-space; in the authors' variant one for all sub-spaces."""
    cosines = [
        torch.stack([normed(w) @ sub for w in section]) for sub, section in zip(row, W, strict=True)
    ]
    return (
        [beta * c for c in cosines]
        if variant == "paper"
        else [beta**2 * sum(cosines) / len(cosines)]
    )


def naive_classification(x, W, labels, variant, beta):
    labelled = [(row, y / y.sum()) for row, y in zip(x, labels.double(), strict=True) if y.any()]
    return mean(
        [-y @ v.log_softmax(0) for row, y in labelled for v in logits(row, W, variant, beta)]
    )


def naive_entropy(x, W, variant, beta):
    entry = [v for row in x for v in logits(row, W, variant, beta)]
    return mean([-v.softmax(0) @ v.log_softmax(0) for v in entry])


def naive_triplet(x, q, labels):
    n, y = len(x), labels.double()
    s = [[sum(a @ b for a, b in zip(i, j, strict=True)) / len(i) for j in q] for i in x]
    losses = []
    for a in range(n):
        positives = [j for j in range(n) if j != a and y[a] @ y[j] > 0]
        negatives = [j for j in range(n) if y[a].any() and y[j].any() and y[a] @ y[j] == 0]
        for p in positives if negatives else ():
            easier = [s[a][j] for j in negatives if s[a][j] < s[a][p]]
            chosen = max(easier) if easier else min(s[a][j] for j in negatives)
            losses.append((MARGIN + chosen - s[a][p]).clamp_min(0))
    return mean(losses)


@given(
    shape=st.tuples(*(st.integers(1, limit) for limit in (4, 4, 5, 6, 5))),
    seed=st.integers(0, 2**32),
    alpha=st.floats(0.1, 20),
)
def test_assignments_and_z_prime_are_the_equations(shape, seed, alpha):
    B, M, d, K, C = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = (B, M * d), (M, K, d), (M, C, d)
    raw, Z, W = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    x = intra_normalize(raw, M)
    soft, prime = soft_assign(x, 5 * Z, alpha), reexpress(5 * Z, W, alpha)
    for m in range(M):
        for b in range(B):
            sub = normed(raw[b, m * d : (m + 1) * d])
            torch.testing.assert_close(x[b, m], sub, rtol=0, atol=1e-9)
            torch.testing.assert_close(
                soft[b, m], naive_assign(sub, Z[m], alpha), rtol=0, atol=1e-7
            )
        for k in range(K):
            expected = naive_assign(normed(Z[m, k]), W[m], alpha)
            torch.testing.assert_close(prime[m, k], expected, rtol=0, atol=1e-7)


def test_sub_vectors_without_direction_are_harmless():
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    assert intra_normalize(x.bfloat16(), 2).dtype == torch.float32
    assert intra_normalize(x[:0], 2).shape == (0, 2, 12)
    with pytest.raises(RuntimeError, match="multiply up to the size of dim 1"):
        intra_normalize(torch.ones(3, 25), 2)
    x = torch.ones(4, 6)
    x[1, 3:], x[2, :3], x[3, 4] = 0, 1e-30, math.nan
    assert zero_subvectors(x, 2).tolist() == [
        [False, False],
        [False, True],
        [True, False],
        [False, True],
    ]
    assert zero_subvectors(torch.full((1, 2), math.inf), 1).tolist() == [[True]]
    zero = torch.zeros(1, 6, requires_grad=True)
    out = intra_normalize(zero, 2)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 2, 3))
    assert zero.grad.abs().max() <= 1 / NORM_EPS * 1.001


def test_parameters_start_on_the_sphere_by_seed_and_their_length_does_not_matter():
    a, again, b = (
        Codebooks(2, 5, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(a.raw, again.raw)
    assert not torch.equal(a.raw, b.raw)
    with torch.no_grad():
        a.raw.mul_(7)
    torch.testing.assert_close(a(), again.raw)
    x = intra_normalize(torch.ones(3, 24), 2)
    torch.testing.assert_close(
        subspace_cosine(x, a.raw), torch.einsum("bmd,mcd->bmc", x, again.raw)
    )


# Losses


@st.composite
def batches(draw):
    """x and q [B, M, d] unit-norm, W [M, C, d] raw, labels multi-hot [B, C] with unlabelled
    rows.
    """
    B, M, d, C = (draw(st.integers(1, hi)) for hi in (7, 4, 5, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, q = intra_normalize(normal(B, M * d), M), intra_normalize(normal(B, M * d), M)
    labels = draw(st.lists(st.lists(st.booleans(), min_size=C, max_size=C), min_size=B, max_size=B))
    return x, q, 3 * normal(M, C, d), torch.tensor(labels, dtype=torch.uint8)


@given(batches(), st.sampled_from(["paper", "code"]), st.floats(0.1, 6))
def test_losses_are_the_equations(batch, variant, beta):
    x, q, W, labels = batch
    assert float(npair(x, q, labels)) == pytest.approx(naive_npair(x, q, labels), abs=1e-9)
    assert float(triplet(x, q, labels)) == pytest.approx(naive_triplet(x, q, labels), abs=1e-9)
    got = float(subspace_classification(x, W, shares(labels, x), beta, variant))
    assert got == pytest.approx(naive_classification(x, W, labels, variant, beta), abs=1e-9)
    entropy = float(subspace_entropy(x, W, beta, variant))
    assert entropy == pytest.approx(naive_entropy(x, W, variant, beta), abs=1e-9)
    assert -1e-12 <= entropy <= math.log(W.shape[1]) + 1e-12


@pytest.mark.parametrize("variant", ["paper", "code"])
def test_unlabelled_rows_change_neither_losses_nor_gradients(variant):
    generator = torch.Generator().manual_seed(3)
    x = intra_normalize(
        torch.randn(6, 8, generator=generator, dtype=torch.float64), 2
    ).requires_grad_()
    W = torch.randn(2, 3, 4, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 0, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1]])
    labelled = labels.any(dim=1)
    for loss in (
        lambda v, y: npair(v, v, y),
        lambda v, y: subspace_classification(v, W, shares(y, v), variant=variant),
        lambda v, y: triplet(v, v, y),
    ):
        (gradient,) = torch.autograd.grad(loss(x, labels), x)
        (retained,) = torch.autograd.grad(loss(x[labelled], labels[labelled]), x)
        torch.testing.assert_close(loss(x, labels), loss(x[labelled], labels[labelled]))
        torch.testing.assert_close(gradient, retained)
        assert gradient[labelled].abs().sum() > 0
        # No labelled row at all: zero, with a zero gradient rather than NaN.
        nothing = loss(x, torch.zeros_like(labels))
        assert nothing.item() == 0
        assert torch.equal(torch.autograd.grad(nothing, x)[0], torch.zeros_like(x))

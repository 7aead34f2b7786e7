"""Intra-normalisation, assignments, z' and the losses against naive loops written from the
equations (float64)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import MARGIN, npair, triplet
from gpq_faiss.nn.quantizer import (
    intra_normalize,
    reexpress,
    soft_assign,
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


def naive_npair(x, q, labels):
    """Eq. 2, by the shares of classes that are labels."""
    losses = []
    for row, y in zip(x, labels, strict=True):
        shared = torch.stack([y @ other for other in labels])
        scores = [sum(a @ b for a, b in zip(row, other, strict=True)) for other in q]
        losses.append(-(shared / shared.sum()) @ torch.stack(scores).log_softmax(0))
    return mean(losses)


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
    return mean(
        [
            -(y / y.sum()) @ v.log_softmax(0)
            for row, y in zip(x, labels, strict=True)
            for v in logits(row, W, variant, beta)
        ]
    )


def naive_entropy(x, W, variant, beta):
    entry = [v for row in x for v in logits(row, W, variant, beta)]
    return mean([-v.softmax(0) @ v.log_softmax(0) for v in entry])


def naive_triplet(x, q, labels):
    n, y = len(x), labels
    s = [[sum(a @ b for a, b in zip(i, j, strict=True)) / len(i) for j in q] for i in x]
    losses = []
    for a in range(n):
        positives = [j for j in range(n) if j != a and y[a] @ y[j] > 0]
        negatives = [j for j in range(n) if y[a] @ y[j] == 0]
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


def test_sub_vectors_without_direction_are_recognised():
    x = torch.ones(4, 6)
    x[1, 3:], x[2, :3], x[3, 4] = 0, 1e-30, math.nan
    assert zero_subvectors(x, 2).tolist() == [[0, 0], [0, 1], [1, 0], [0, 1]]


# Losses


@st.composite
def batches(draw):
    """x and q [B, M, d] unit-norm, W [M, C, d] raw, labels multi-hot [B, C], at least one a row."""
    B, M, d, C = (draw(st.integers(1, hi)) for hi in (7, 4, 5, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x, q = intra_normalize(normal(B, M * d), M), intra_normalize(normal(B, M * d), M)
    row = st.lists(st.booleans(), min_size=C, max_size=C).filter(any)
    labels = draw(st.lists(row, min_size=B, max_size=B))
    return x, q, 3 * normal(M, C, d), torch.tensor(labels, dtype=torch.float64)


@given(batches(), st.sampled_from(["paper", "code"]), st.floats(0.1, 6))
def test_losses_are_the_equations(batch, variant, beta):
    x, q, W, labels = batch
    assert float(npair(x, q, labels)) == pytest.approx(naive_npair(x, q, labels), abs=1e-9)
    assert float(triplet(x, q, labels)) == pytest.approx(naive_triplet(x, q, labels), abs=1e-9)
    loss = float(subspace_classification(x, W, shares(labels), beta, variant))
    assert loss == pytest.approx(naive_classification(x, W, labels, variant, beta), abs=1e-9)
    loss = float(subspace_entropy(x, W, beta, variant))
    assert loss == pytest.approx(naive_entropy(x, W, variant, beta), abs=1e-9)

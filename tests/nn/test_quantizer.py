"""Intra-normalisation, assignments, z' and the gradient reversal against naive loops of their equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.nn.quantizer import (
    NORM_EPS,
    Codebooks,
    GradientReversal,
    SubspaceClassifier,
    _lloyd_step,
    hard_assign,
    intra_normalize,
    reexpress,
    reverse_gradient,
    soft_assign,
    subspace_cosine,
    zero_subvectors,
)

Vector = list[float]


def dot(a: Vector, b: Vector) -> float:
    return sum(s * t for s, t in zip(a, b, strict=True))


def normed(a: Vector) -> Vector:
    return [v / math.sqrt(dot(a, a)) for v in a]


def naive_soft(x: Vector, words: list[Vector], alpha: float) -> Vector:
    """Eq. 1 for one sub-vector and one codebook."""
    words = [normed(w) for w in words]
    e = [math.exp(alpha * dot(x, w)) for w in words]
    mixed = [sum(ek * w[i] for ek, w in zip(e, words, strict=True)) / sum(e) for i in range(len(x))]
    return normed(mixed)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, float]:
    """x [B, M, d] unit-norm, raw Z [M, K, d], raw W [M, C, d], α."""
    B, M, d, K, C = (draw(st.integers(1, hi)) for hi in (4, 4, 5, 6, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return (
        intra_normalize(normal(B, M * d), M),
        5 * normal(M, K, d),
        normal(M, C, d),
        draw(st.floats(0.1, 20)),
    )


@settings(max_examples=60, deadline=None)
@given(shapes())
def test_assignments_and_z_prime_are_the_equations(case: tuple[Tensor, Tensor, Tensor, float]) -> None:
    x, Z, W, alpha = case
    soft = soft_assign(x, Z, alpha)
    hard = hard_assign(x, Z)
    words, prototypes, rows = Z.tolist(), W.tolist(), x.tolist()
    for b in range(len(x)):
        for m in range(len(words)):
            np.testing.assert_allclose(soft[b, m], naive_soft(rows[b][m], words[m], alpha), atol=1e-7)
            cosines = [dot(rows[b][m], normed(z)) for z in words[m]]
            assert cosines[int(hard[b, m])] == pytest.approx(max(cosines), abs=1e-12)
    prime = reexpress(Z, W, alpha)
    for m in range(len(words)):
        for k, z in enumerate(words[m]):
            np.testing.assert_allclose(prime[m, k], naive_soft(normed(z), prototypes[m], alpha), atol=1e-7)
    torch.testing.assert_close(prime.norm(dim=-1), torch.ones_like(prime[..., 0]))


def test_hand_worked_soft_assignment() -> None:
    """x on the first of two codewords at right angles: weights e^α : 1, so tan of the angle is e^-α."""
    x = torch.tensor([[[1.0, 0]]], dtype=torch.float64)
    Z = torch.tensor([[[2.0, 0], [0, 7]]], dtype=torch.float64)
    q = soft_assign(x, Z, 1.5)
    assert float(q[0, 0, 1] / q[0, 0, 0]) == pytest.approx(math.exp(-1.5))
    assert hard_assign(x, Z).tolist() == [[0]]
    # The sign of the exponent: the nearest codeword wins, not the farthest.
    assert q[0, 0, 0] > q[0, 0, 1]


def test_soft_assignment_hardens_with_alpha() -> None:
    generator = torch.Generator().manual_seed(5)
    x = intra_normalize(torch.randn(20, 24, generator=generator), 2)
    books = Codebooks(2, 16, 12, generator=generator)
    chosen = books()[torch.arange(2), hard_assign(x, books()).long()]
    torch.testing.assert_close(soft_assign(x, books(), 1e5), chosen)
    # W is a set of unit vectors as well: z' over a W that contains Z is Z in the limit.
    torch.testing.assert_close(reexpress(books.raw, books.raw, 1e5), books())


def test_ties_take_the_first_codeword() -> None:
    Z = torch.tensor([[[0.0, 1], [1, 0], [1, 0], [-1, 0]]])
    assert hard_assign(torch.tensor([[[1.0, 0]]]), Z).tolist() == [[1]]
    assert hard_assign(torch.tensor([[[1.0, 0]]]), Z).dtype == torch.uint8
    with pytest.raises(UsageError, match="257 codewords"):
        hard_assign(torch.ones(1, 1, 2), torch.ones(1, 257, 2))


def test_intra_normalisation_shapes_and_dtypes() -> None:
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    out = intra_normalize(x, 2)
    assert out.shape == (3, 2, 12)
    torch.testing.assert_close(out[1, 1], x[1, 12:] / x[1, 12:].norm())
    assert torch.equal(intra_normalize(x.view(3, 2, 12), 2), out)
    assert intra_normalize(x.bfloat16(), 2).dtype == torch.float32
    assert intra_normalize(x.double(), 2).dtype == torch.float64
    for bad in (torch.ones(3, 25), torch.ones(24), torch.ones(3, 4, 6)):
        with pytest.raises(UsageError, match="cannot be split into 2 sub-vectors"):
            intra_normalize(bad, 2)


def test_sub_vectors_without_direction_are_found_and_harmless() -> None:
    x = torch.ones(4, 6)
    x[1, 3:] = 0
    x[2, :3] = 1e-30
    x[3, 4] = math.nan
    assert zero_subvectors(x, 2).tolist() == [[False, False], [False, True], [True, False], [False, True]]
    assert zero_subvectors(torch.full((1, 2), math.inf), 1).tolist() == [[True]]
    zero = torch.zeros(1, 6, requires_grad=True)
    out = intra_normalize(zero, 2)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 2, 3))
    assert zero.grad is not None
    assert zero.grad.abs().max() <= 1 / NORM_EPS * 1.001


def test_gradients_through_everything() -> None:
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    raw, Z, W = parameter(2, 6), parameter(2, 3, 3), parameter(2, 4, 3)
    check = torch.autograd.gradcheck
    assert check(lambda r, z: soft_assign(intra_normalize(r, 2), z, 4.0), (raw, Z))
    assert check(lambda z, w: reexpress(z, w, 4.0), (Z, W))
    assert check(subspace_cosine, (parameter(2, 2, 3), W))


def test_reversal_is_the_identity_forward_and_the_negative_backward() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, 5.0, -1.0], dtype=torch.float64)
    for scale in (1.0, 0.25):
        out = GradientReversal(scale)(x)
        assert torch.equal(out, x)
        (gradient,) = torch.autograd.grad((out * weight).sum(), x)
        assert torch.equal(gradient, -scale * weight)
    # Reversed twice is forward again, so gradcheck (finite differences) holds for the pair and fails for one.
    assert torch.autograd.gradcheck(lambda t: reverse_gradient(reverse_gradient(t.sin())), (x,))
    assert not torch.autograd.gradcheck(lambda t: reverse_gradient(t.sin()), (x,), raise_exception=False)


def test_parameters_start_uniform_on_the_sphere_and_by_seed() -> None:
    for make in (Codebooks, SubspaceClassifier):
        a, b = (make(2, 5, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
        again = make(2, 5, 12, generator=torch.Generator().manual_seed(1))
        assert torch.equal(a.raw, again.raw)
        assert not torch.equal(a.raw, b.raw)
        assert a().shape == (2, 5, 12)
        with torch.no_grad():
            a.raw.mul_(7)
        torch.testing.assert_close(a(), again())
        with pytest.raises(UsageError, match="at least 1"):
            make(2, 0, 12)
    classifier = SubspaceClassifier(2, 5)
    x = intra_normalize(torch.ones(3, 24), 2)
    torch.testing.assert_close(classifier.cosine(x), torch.einsum("bmd,mcd->bmc", x, classifier()))


@pytest.mark.parametrize("iterations", [0, 5])
def test_codebooks_start_from_samples(iterations: int) -> None:
    generator = torch.Generator().manual_seed(4)
    samples = torch.randn(60, 2 * 3, generator=generator) * 4
    books = Codebooks(2, 8, 3)
    books.initialise(samples, iterations=iterations, generator=torch.Generator().manual_seed(9))
    first = books.raw.detach().clone()
    books.initialise(samples, iterations=iterations, generator=torch.Generator().manual_seed(9))
    assert torch.equal(books.raw, first)
    torch.testing.assert_close(first.norm(dim=-1), torch.ones(2, 8))
    x = intra_normalize(samples, 2)
    nearest = subspace_cosine(x, first).amax(dim=-1)
    if iterations == 0:  # every codeword is one of the samples, and no sample serves twice
        assert ((nearest > 1 - 1e-6).sum(dim=0) == 8).all()
    else:
        start = Codebooks(2, 8, 3)
        start.initialise(samples, generator=torch.Generator().manual_seed(9))
        assert nearest.mean() > subspace_cosine(x, start()).amax(dim=-1).mean()
        # A fixed point of Lloyd's step would be the mean direction of its samples; five steps come close.
        chosen = hard_assign(x, first)[:, 0]
        means = torch.stack([x[chosen == k, 0].mean(0) for k in range(8)])
        assert torch.cosine_similarity(means, first[0], dim=-1).min() > 0.9


def test_a_lloyd_step_by_hand() -> None:
    """Two samples share codeword 0, nobody takes codeword 1: it moves to the worst served of them."""
    x = torch.tensor([[1.0, 0, 0], [0.6, 0.8, 0], [0, 0, 1]])
    Z = torch.tensor([[1.0, 0, 0], [-1, 0, 0], [0, 0, 1]])
    torch.testing.assert_close(
        _lloyd_step(x, Z),
        torch.tensor([[1.6, 0.8, 0], [0.6, 0.8, 0], [0, 0, 1]]) / torch.tensor([[3.2**0.5], [1], [1]]),
    )
    # Samples that cancel out leave their codeword in place.
    opposite = torch.tensor([[1.0, 0], [-1.0, 0]])
    assert torch.equal(_lloyd_step(opposite, torch.tensor([[0.0, 1]])), torch.tensor([[0.0, 1]]))


def test_kmeans_finds_clusters_and_survives_duplicates() -> None:
    clusters = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [-1, 0, 0]])
    books = Codebooks(1, 4, 3)
    for seed in range(5):
        books.initialise(clusters.repeat(25, 1), iterations=3, generator=torch.Generator().manual_seed(seed))
        assert sorted(hard_assign(clusters[:, None], books()).flatten().tolist()) == [0, 1, 2, 3]
    books.initialise(torch.ones(10, 3), iterations=3)  # fewer distinct samples than codewords
    assert torch.isfinite(books.raw).all()


def test_samples_that_cannot_serve_are_refused() -> None:
    books = Codebooks(2, 4, 3)
    with pytest.raises(DataError, match="3 samples cannot initialise 4 codewords"):
        books.initialise(torch.ones(3, 6))
    with pytest.raises(UsageError, match=r"\[5, 8\] given to codebooks of shape \[2, 4, 3\]"):
        books.initialise(torch.ones(5, 8))
    bad = torch.ones(5, 6)
    bad[3, 3:] = 0
    with pytest.raises(DataError, match="sample 3 has a zero or non-finite"):
        books.initialise(bad)

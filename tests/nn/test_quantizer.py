"""Intra-normalisation, assignments, z' and the gradient reversal against naive loops of their equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.nn.quantizer import (
    NORM_EPS,
    Codebooks,
    SubspaceClassifier,
    intra_normalize,
    reexpress,
    reverse_gradient,
    soft_assign,
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
    words, prototypes, rows = Z.tolist(), W.tolist(), x.tolist()
    for b in range(len(x)):
        for m in range(len(words)):
            np.testing.assert_allclose(soft[b, m], naive_soft(rows[b][m], words[m], alpha), atol=1e-7)
    prime = reexpress(Z, W, alpha)
    for m in range(len(words)):
        for k, z in enumerate(words[m]):
            np.testing.assert_allclose(prime[m, k], naive_soft(normed(z), prototypes[m], alpha), atol=1e-7)
    torch.testing.assert_close(prime.norm(dim=-1), torch.ones_like(prime[..., 0]))


def test_intra_normalisation_shapes_and_dtypes() -> None:
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    out = intra_normalize(x, 2)
    assert out.shape == (3, 2, 12)
    torch.testing.assert_close(out[1, 1], x[1, 12:] / x[1, 12:].norm())
    assert torch.equal(intra_normalize(x.view(3, 2, 12), 2), out)
    assert intra_normalize(x.bfloat16(), 2).dtype == torch.float32
    assert intra_normalize(x.double(), 2).dtype == torch.float64
    assert intra_normalize(x[:0], 2).shape == (0, 2, 12)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        intra_normalize(torch.ones(3, 25), 2)


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


def test_reversal_is_the_identity_forward_and_the_negative_backward() -> None:
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([2.0, 5.0, -1.0], dtype=torch.float64)
    out = reverse_gradient(x)
    assert torch.equal(out, x)
    (gradient,) = torch.autograd.grad((out * weight).sum(), x)
    assert torch.equal(gradient, -weight)


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
    classifier = SubspaceClassifier(2, 5, 12, generator=torch.Generator())
    x = intra_normalize(torch.ones(3, 24), 2)
    torch.testing.assert_close(classifier.cosine(x), torch.einsum("bmd,mcd->bmc", x, classifier()))

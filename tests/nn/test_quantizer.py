"""Intra-normalisation, assignments and z' against naive loops of their equations."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.nn.quantizer import (
    NORM_EPS,
    Codebooks,
    intra_normalize,
    reexpress,
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
    return normed([sum(ek * w[i] for ek, w in zip(e, words, strict=True)) / sum(e) for i in range(len(x))])


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, most) for most in (4, 4, 5, 6, 5))),
    seed=st.integers(0, 2**32),
    alpha=st.floats(0.1, 20),
)
def test_assignments_and_z_prime_are_the_equations(shape: tuple[int, ...], seed: int, alpha: float) -> None:
    B, M, d, K, C = shape
    rng = np.random.default_rng(seed)
    raw, Z, W = (torch.from_numpy(rng.normal(size=s)) for s in ((B, M * d), (M, K, d), (M, C, d)))
    x = intra_normalize(raw, M)
    soft, prime = soft_assign(x, 5 * Z, alpha), reexpress(5 * Z, W, alpha)
    for m in range(M):
        words, prototypes = Z[m].tolist(), W[m].tolist()
        for b in range(B):
            sub = normed(raw[b, m * d : (m + 1) * d].tolist())
            np.testing.assert_allclose(x[b, m], sub, atol=1e-9)
            np.testing.assert_allclose(soft[b, m], naive_soft(sub, words, alpha), atol=1e-7)
        for k in range(K):
            np.testing.assert_allclose(
                prime[m, k], naive_soft(normed(words[k]), prototypes, alpha), atol=1e-7
            )


def test_intra_normalisation_shapes_and_dtypes() -> None:
    x = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    assert torch.equal(intra_normalize(x.view(3, 2, 12), 2), intra_normalize(x, 2))
    assert intra_normalize(x.bfloat16(), 2).dtype == torch.float32
    assert intra_normalize(x[:0], 2).shape == (0, 2, 12)
    with pytest.raises(RuntimeError, match="invalid for input of size"):
        intra_normalize(torch.ones(3, 25), 2)


def test_sub_vectors_without_direction_are_found_and_harmless() -> None:
    x = torch.ones(4, 6)
    x[1, 3:], x[2, :3], x[3, 4] = 0, 1e-30, math.nan
    assert zero_subvectors(x, 2).tolist() == [[False, False], [False, True], [True, False], [False, True]]
    assert zero_subvectors(torch.full((1, 2), math.inf), 1).tolist() == [[True]]
    zero = torch.zeros(1, 6, requires_grad=True)
    out = intra_normalize(zero, 2)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 2, 3))
    assert zero.grad is not None
    assert zero.grad.abs().max() <= 1 / NORM_EPS * 1.001


def test_parameters_start_on_the_sphere_by_seed_and_their_length_does_not_matter() -> None:
    a, again, b = (Codebooks(2, 5, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a.raw, again.raw)
    assert not torch.equal(a.raw, b.raw)
    with torch.no_grad():
        a.raw.mul_(7)
    torch.testing.assert_close(a(), again.raw)
    x = intra_normalize(torch.ones(3, 24), 2)
    torch.testing.assert_close(subspace_cosine(x, a.raw), torch.einsum("bmd,mcd->bmc", x, again.raw))

"""Codewords that add up to vectors: the search for codes against trying every code, and the same codes as codes of a product
quantiser against the sums themselves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.encode import encode
from gpq_faiss.codes.scores import score_codes
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.nn.additive import assign, product_form, query_form

seeds = st.integers(0, 10_000)


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape)).to(dtype)


def belief(n: int, E: int, seed: int) -> Tensor:
    """Posteriors, most of them sure of one of E classes: float32 [n, E]."""
    return torch.from_numpy(np.random.default_rng([seed, n]).dirichlet(np.full(E, 0.3), n)).float()


def sums(codewords: Tensor, codes: Tensor) -> Tensor:
    """Σ_m S[m, code_m], [B, E]."""
    return torch.stack([codewords[m][codes[:, m]] for m in range(len(codewords))]).sum(dim=0)


# -------------------------------------------------------------------------------------------------------------- assign


@given(B=st.integers(1, 6), M=st.integers(1, 4), K=st.integers(2, 5), E=st.integers(1, 6), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_a_beam_of_every_code_finds_the_best_code(B: int, M: int, K: int, E: int, seed: int) -> None:
    targets, S = drawn(B, E, seed=seed), drawn(M, K, E, seed=seed + 1)
    found = assign(targets, S, beam=K**M)
    assert found.shape == (B, M)
    assert found.dtype == torch.int64
    every = torch.tensor(list(itertools.product(range(K), repeat=M)))
    distances = (targets.unsqueeze(1) - sums(S, every).unsqueeze(0)).square().sum(dim=2)
    reached = (targets - sums(S, found)).square().sum(dim=1)
    torch.testing.assert_close(reached, distances.min(dim=1).values, rtol=1e-9, atol=1e-12)


@given(M=st.integers(1, 4), K=st.integers(2, 5), E=st.integers(1, 5), beam=st.integers(1, 9), seed=seeds)
@settings(max_examples=40, deadline=None)
def test_a_beam_keeps_the_best_partial_sums(M: int, K: int, E: int, beam: int, seed: int) -> None:
    """The same search item by item, with sorted lists."""
    targets, S = drawn(4, E, seed=seed), drawn(M, K, E, seed=seed + 1)
    found = assign(targets, S, beam=beam)
    words = S.numpy()
    for t, codes in zip(targets.numpy(), found.tolist(), strict=True):
        kept: list[tuple[int, ...]] = [()]
        for _ in range(M):

            def distance(code: tuple[int, ...], t: np.ndarray = t) -> float:
                return float(((t - sum(words[i, k] for i, k in enumerate(code))) ** 2).sum())

            kept = sorted([(*code, k) for code in kept for k in range(K)], key=distance)[:beam]
        assert tuple(codes) == kept[0]


# -------------------------------------------------------------------------------------------------------- product form

shapes = {
    "M": st.integers(1, 5),
    "K": st.sampled_from([4, 8, 16]),
    "d": st.integers(3, 20),
    "E": st.integers(1, 24),
    "seed": seeds,
}


def short(n: int, E: int, seed: int) -> Tensor:
    """Vectors of norm 1 at most, float32 [n, E]; the first of norm 1, the second of zeros."""
    found = drawn(n, E, seed=seed, dtype=torch.float32)
    reach = torch.linspace(0.1, 1, n)
    reach[:2] = torch.tensor([1.0, 0.0])
    return torch.nn.functional.normalize(found, dim=1) * reach.unsqueeze(1)


@given(**shapes)
@settings(max_examples=60, deadline=None)
def test_words_and_queries_are_unit_norm_and_score_as_the_sums(
    M: int, K: int, d: int, E: int, seed: int
) -> None:
    S, queries = drawn(M, K, E, seed=seed, dtype=torch.float32), short(9, E, seed + 1)
    kept, basis, words = product_form(S, d)
    q = query_form(queries, basis)
    assert (kept.shape, basis.shape, words.shape) == ((M, K, E), (M, E, d - 2), (M, K, d))
    assert q.shape == (9, M, d)
    torch.testing.assert_close(words.norm(dim=2), torch.ones(M, K))
    torch.testing.assert_close(q.norm(dim=2), torch.ones(9, M), rtol=0, atol=1e-5)
    if d - 2 >= min(E, K):
        torch.testing.assert_close(kept, S, rtol=1e-4, atol=1e-5)
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, K, (12, M)))
    of_words = torch.einsum("qmd,nmd->qn", q, words[torch.arange(M), codes])
    scale = kept.norm(dim=2).max()
    torch.testing.assert_close(of_words * scale, queries @ sums(kept, codes).T, rtol=1e-4, atol=2e-5)


@given(K=st.sampled_from([4, 8]), E=st.integers(5, 12), d=st.integers(3, 6), seed=seeds)
@settings(max_examples=30, deadline=None)
def test_too_few_dimensions_keep_the_main_directions_of_each_codebook(
    K: int, E: int, d: int, seed: int
) -> None:
    S = drawn(3, K, E, seed=seed, dtype=torch.float32)
    kept, _, _ = product_form(S, d)
    for m in range(3):
        values, vectors = np.linalg.eigh(S[m].double().numpy().T @ S[m].double().numpy())
        main = vectors[:, np.argsort(-values)[: d - 2]]
        np.testing.assert_allclose(kept[m].numpy(), S[m].double().numpy() @ main @ main.T, atol=1e-4)
    if d - 2 < min(E, K):
        assert not torch.allclose(kept, S, atol=1e-3)


# ------------------------------------------------------------------------------------------------------------ in Faiss


@pytest.mark.parametrize(
    ("M", "K", "d", "E"), [(3, 16, 18, 40), (6, 16, 12, 10), (4, 8, 6, 12), (2, 4, 3, 1)]
)
def test_a_plain_index_of_the_words_ranks_as_the_sums(M: int, K: int, d: int, E: int) -> None:
    """With (4, 8, 6, 12) something is lost: then the sums are those of the codewords that are left."""
    data = belief(400, E, 5) if E > 1 else torch.rand(400, 1)
    kept, basis, words = product_form(fit_codewords(data, M, K, seed=0), d)
    codes = assign(data, kept)
    Z = np.ascontiguousarray(words.numpy())
    items = words[torch.arange(M), codes].flatten(1).numpy()
    queries = data[:20]
    index = inject(Z)
    index.add(items)
    q = query_form(queries, basis).flatten(1).numpy()
    scores, ids = index.search(q, 400)
    scale = float(kept.norm(dim=2).max())
    oracle = (queries.double() @ sums(kept, codes).double().T).numpy()
    np.testing.assert_allclose(scores * scale, np.take_along_axis(oracle, ids, 1), atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(oracle, ids, 1), -np.sort(-oracle, axis=1), atol=2e-5)
    np.testing.assert_allclose(score_codes(q, encode(items, Z), Z) * scale, oracle, atol=2e-5)


@pytest.mark.parametrize(("M", "E"), [(3, 10), (6, 10), (12, 10), (12, 60)])
def test_the_nearest_codewords_of_an_item_vector_are_its_code(M: int, E: int) -> None:
    data = belief(600, E, 6)
    kept, _, words = product_form(fit_codewords(data, M, 16, seed=0), 18)
    codes = assign(data, kept)
    found = unpack_codes(encode(words[torch.arange(M), codes].flatten(1).numpy(), words.numpy()), M, 16)
    other = found != codes.numpy()
    m = np.nonzero(other)[1]
    # Codewords that float32 cannot tell apart are as good as one.
    a, b = words[m, found[other].astype(np.int64)], words[m, codes[torch.from_numpy(other)]]
    assert float((a - b).norm(dim=1).max() if len(m) else 0) < 1e-3
    assert other.mean() < 0.01

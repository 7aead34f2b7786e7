"""Codewords that add up to vectors: the search for codes against plain lists, and the same codes as codes of a product quantiser against
the sums themselves."""

from __future__ import annotations

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
from gpq_faiss.nn.additive import assign, assign_logits, product_form, query_form

seeds = st.integers(0, 10_000)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def posteriors(n: int, E: int, seed: int) -> Tensor:
    """Most of them are sure of one of E classes: float64 [n, E]."""
    return torch.from_numpy(np.random.default_rng([seed, n]).dirichlet(np.full(E, 0.3), n))


def sums(codewords: Tensor, codes: Tensor) -> Tensor:
    """Σ_m S[m, code_m], [B, E]."""
    return codewords[torch.arange(len(codewords)), codes].sum(dim=1)


@given(
    M=st.integers(1, 4),
    K=st.integers(2, 5),
    E=st.integers(1, 5),
    beam=st.sampled_from([1, 2, 5, 9, 5**4]),
    logits=st.booleans(),
    seed=seeds,
)
@settings(max_examples=60, deadline=None)
def test_a_beam_keeps_the_best_partial_sums(
    M: int, K: int, E: int, beam: int, logits: bool, seed: int
) -> None:
    """The same search item by item, with sorted lists; the widest beam has every code."""
    S = drawn(M, K, E, seed=seed + 1)
    targets = posteriors(4, E, seed) if logits else drawn(4, E, seed=seed)
    found = (assign_logits if logits else assign)(targets, S, beam=beam)
    assert found.shape == (4, M)
    for t, codes in zip(targets, found.tolist(), strict=True):

        def cost(code: tuple[int, ...], t: Tensor = t) -> float:
            total = sums(S[: len(code)], torch.tensor([code]))[0]
            return float(-(t * total.log_softmax(dim=0)).sum() if logits else (t - total).square().sum())

        kept: list[tuple[int, ...]] = [()]
        for _ in range(M):
            kept = sorted([(*code, k) for code in kept for k in range(K)], key=cost)[:beam]
        assert cost(tuple(codes)) == pytest.approx(cost(kept[0]), rel=1e-9, abs=1e-12)


@given(
    M=st.integers(1, 5), K=st.sampled_from([4, 8, 16]), d=st.integers(3, 20), E=st.integers(1, 24), seed=seeds
)
@settings(max_examples=60, deadline=None)
def test_codewords_and_queries_are_unit_norm_and_score_as_the_sums(
    M: int, K: int, d: int, E: int, seed: int
) -> None:
    S = drawn(M, K, E, seed=seed).float()
    # Queries of norm 1 at most; one of norm 1, one of zeros.
    lengths = torch.cat([torch.tensor([1.0, 0.0]), torch.linspace(0.1, 0.9, 7)])
    queries = torch.nn.functional.normalize(drawn(9, E, seed=seed + 1).float(), dim=1) * lengths[:, None]
    kept, basis, words = product_form(S, d)
    q = query_form(queries, basis)
    assert (kept.shape, basis.shape, words.shape) == ((M, K, E), (M, E, d - 2), (M, K, d))
    assert q.shape == (9, M, d)
    torch.testing.assert_close(words.norm(dim=2), torch.ones(M, K))
    torch.testing.assert_close(q.norm(dim=2), torch.ones(9, M), rtol=0, atol=1e-5)
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, K, (12, M)))
    of_words = torch.einsum("qmd,nmd->qn", q, words[torch.arange(M), codes])
    scale = kept.norm(dim=2).max()
    torch.testing.assert_close(of_words * scale, queries @ sums(kept, codes).T, rtol=1e-4, atol=2e-5)
    if d - 2 >= min(E, K):
        torch.testing.assert_close(kept, S, rtol=1e-4, atol=1e-5)
        return
    # Too few dimensions keep the main directions of each codebook.
    for m, own in enumerate(S.double().numpy()):
        main = np.linalg.svd(own)[2][: d - 2]
        np.testing.assert_allclose(kept[m], own @ main.T @ main, atol=1e-3)


@pytest.mark.parametrize(
    ("M", "K", "d", "E"), [(3, 16, 18, 40), (6, 16, 12, 10), (12, 16, 18, 60), (4, 8, 6, 12), (2, 4, 3, 1)]
)
def test_a_plain_index_of_the_codewords_ranks_as_the_sums(M: int, K: int, d: int, E: int) -> None:
    """With (4, 8, 6, 12) something is lost: then the sums are those of the codewords that are left."""
    data = (posteriors(400, E, 5) if E > 1 else torch.rand(400, 1)).float()
    kept, basis, words = product_form(fit_codewords(data, M, K, seed=0), d)
    codes = assign(data, kept)
    Z = np.ascontiguousarray(words.numpy())
    items = words[torch.arange(M), codes].flatten(1).numpy()
    index = inject(Z)
    index.add(items)
    q = query_form(data[:20], basis).flatten(1).numpy()
    scores, ids = index.search(q, 400)
    scale = float(kept.norm(dim=2).max())
    oracle = (data[:20].double() @ sums(kept, codes).double().T).numpy()
    np.testing.assert_allclose(scores * scale, np.take_along_axis(oracle, ids, 1), atol=2e-5)
    np.testing.assert_allclose(np.take_along_axis(oracle, ids, 1), -np.sort(-oracle, axis=1), atol=2e-5)
    np.testing.assert_allclose(score_codes(q, encode(items, Z), Z) * scale, oracle, atol=2e-5)
    # The nearest codewords of an item vector are its code, but for codewords that float32 cannot tell apart.
    found = unpack_codes(encode(items, Z), M, K).astype(np.int64)
    apart = (words[torch.arange(M), found] - words[torch.arange(M), codes]).norm(dim=2)
    assert float(apart.max()) < 1e-3

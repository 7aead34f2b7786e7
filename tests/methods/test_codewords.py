"""Codewords that add up to vectors, or to logits: the search for codes, the same codes as codes of
a product quantiser, the places of the codewords, score tables, and the choice between both kinds.
"""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from gpq_faiss.methods import codewords as module
from gpq_faiss.methods.codewords import (
    fit_class_codebooks,
    fit_logit_codewords,
    fit_tables,
)
from gpq_faiss.nn.additive import assign, assign_logits, product_form, query_form

seeds = st.integers(0, 10_000)


def drawn(*shape, seed):
    return torch.from_numpy(np.random.default_rng([seed, *shape]).normal(size=shape))


def posteriors(n, C=10, sharp=6.0, seed=0):
    """Class probabilities, most of them sure of one class, float [n, C]."""
    logits = torch.randn(n, C, generator=torch.Generator().manual_seed(seed))
    logits[torch.arange(n), torch.arange(n) % C] += sharp
    return logits.softmax(dim=1)


def sums(S, codes):
    """Σ_m S[m, code_m], [B, E]."""
    return S[torch.arange(len(S)), codes].sum(dim=1)


@given(
    M=st.integers(1, 4),
    K=st.integers(2, 5),
    E=st.integers(1, 5),
    beam=st.sampled_from([1, 2, 5, 9, 5**4]),
    logits=st.booleans(),
    seed=seeds,
)
def test_a_beam_keeps_the_best_partial_sums(M, K, E, beam, logits, seed):
    """The same search item by item, with sorted lists; the widest beam has every code."""
    S = drawn(M, K, E, seed=seed + 1)
    targets = posteriors(4, E, 2.0, seed).double() if logits else drawn(4, E, seed=seed)
    result = (assign_logits if logits else assign)(targets, S, beam=beam)
    assert result.shape == (4, M)
    for t, codes in zip(targets, result.tolist(), strict=True):

        def cost(code, t=t):
            total = sums(S[: len(code)], torch.tensor([code]))[0]
            return float(
                -(t * total.log_softmax(dim=0)).sum() if logits else (t - total).square().sum()
            )

        retained = [()]
        for _ in range(M):
            retained = sorted([(*code, k) for code in retained for k in range(K)], key=cost)[:beam]
        assert cost(tuple(codes)) == pytest.approx(cost(retained[0]), rel=1e-9, abs=1e-12)


@given(
    M=st.integers(1, 5),
    K=st.sampled_from([4, 8, 16]),
    d=st.integers(3, 20),
    E=st.integers(1, 24),
    seed=seeds,
)
def test_the_product_form_has_unit_norm_and_scores_as_sums(M, K, d, E, seed):
    S = drawn(M, K, E, seed=seed).float()
    # Queries of norm 1 at most; one of norm 1, one of zeros.
    lengths = torch.cat([torch.tensor([1.0, 0.0]), torch.linspace(0.1, 0.9, 7)])
    queries = (
        torch.nn.functional.normalize(drawn(9, E, seed=seed + 1).float(), dim=1) * lengths[:, None]
    )
    retained, basis, words = product_form(S, d)
    q = query_form(queries, basis)
    assert (retained.shape, basis.shape, words.shape) == ((M, K, E), (M, E, d - 2), (M, K, d))
    assert q.shape == (9, M, d)
    torch.testing.assert_close(words.norm(dim=2), torch.ones(M, K))
    torch.testing.assert_close(q.norm(dim=2), torch.ones(9, M), rtol=0, atol=1e-5)
    codes = torch.from_numpy(np.random.default_rng(seed).integers(0, K, (12, M)))
    of_words = torch.einsum("qmd,nmd->qn", q, words[torch.arange(M), codes])
    scale = retained.norm(dim=2).max()
    torch.testing.assert_close(
        of_words * scale, queries @ sums(retained, codes).T, rtol=1e-4, atol=2e-5
    )
    if d - 2 >= min(E, K):
        torch.testing.assert_close(retained, S, rtol=1e-4, atol=1e-5)
        return
    # Too few dimensions keep the main directions of each codebook.
    for m, section in enumerate(S.double().numpy()):
        main = np.linalg.svd(section)[2][: d - 2]
        np.testing.assert_allclose(retained[m], section @ main.T @ main, atol=1e-3)


def test_tables_are_near_the_optimum_of_the_logistic_regression(monkeypatch):
    """It is convex: L-BFGS over all pairs finds the optimum."""
    monkeypatch.setattr(module, "_ITERATIONS", 3)
    p = posteriors(300, 8)
    codewords = fit_logit_codewords(p, 2, 16, seed=0)
    codes, shared = assign_logits(p, codewords), p @ p.T

    def least(tables, *free):
        """The loss, with the best offset and the best values of those that are free."""
        offset = torch.tensor(-5.0, requires_grad=True)
        optimizer = torch.optim.LBFGS([offset, *free], max_iter=1000, line_search_fn="strong_wolfe")

        def loss():
            optimizer.zero_grad()
            result = functional.binary_cross_entropy_with_logits(
                p @ sums(tables, codes).T + offset, shared
            )
            result.backward()
            return result

        optimizer.step(loss)
        return loss().item()

    tables = fit_tables(p, codes, codewords, seed=0)
    assert torch.equal(tables, fit_tables(p, codes, codewords, seed=0))
    best = codewords.clone().requires_grad_(True)
    optimum = least(best, best)
    assert least(tables) - optimum < 0.1 * (least(codewords) - optimum)


def test_short_codes_tell_well_separated_classes_apart():
    p = torch.eye(100).repeat(4, 1) * 0.98 + 0.02 / 100
    assert len(fit_class_codebooks(p, p, 3, 16, seed=0).assign(p[:100]).unique(dim=0)) == 100


def test_many_classes_take_sums_of_logits_and_few_of_probabilities(monkeypatch):
    monkeypatch.setattr(module, "_TABLE_STEPS", 10)
    monkeypatch.setattr(module, "_ITERATIONS", 2)
    small_set, p = posteriors(300, 4, 3.0), posteriors(300, 50)
    assert not len(fit_class_codebooks(small_set, small_set, 3, 16, seed=0).logits)
    large = fit_class_codebooks(p, p, 2, 16, seed=0)
    assert len(large.logits) == 2
    assert not torch.equal(large.tables, large.logits)
    sample = posteriors(300, 40, 3.0)  # five codebooks have two codewords for each class
    fitted = [fit_class_codebooks(sample, sample, A, 16, seed=0) for A in (4, 5)]
    assert [len(codebooks.logits) for codebooks in fitted] == [4, 0]
    targets = torch.cat([posteriors(50, 50, seed=3), torch.eye(50)])
    alone = torch.cat([large.assign(t.unsqueeze(0)) for t in targets])
    assert torch.equal(large.assign(targets), alone), "codes do not depend on the batch"

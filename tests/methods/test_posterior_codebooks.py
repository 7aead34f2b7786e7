"""Codebooks for class posteriors: logit codes against all codes, their tables, and the choice between the kinds without labels."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpq_faiss.errors import DataError
from gpq_faiss.methods.codewords import (
    fit_class_codebooks,
    fit_logit_codewords,
    fit_tables,
    weights_of_parts,
)
from gpq_faiss.nn.additive import assign_logits


def beliefs(n: int, C: int, sharp: float = 6.0, seed: int = 0) -> Tensor:
    """Class probabilities, most of them sure of one class, float [n, C]."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, C, generator=generator)
    logits[torch.arange(n), torch.arange(n) % C] += sharp
    return logits.softmax(dim=1)


def cross_entropy(targets: Tensor, codewords: Tensor, codes: Tensor) -> Tensor:
    """By definition, float [n]."""
    s = codewords[torch.arange(len(codewords)), codes].sum(dim=1).double()
    return -(targets.double() * (s - s.logsumexp(dim=1, keepdim=True))).sum(dim=1)


@given(M=st.integers(1, 3), K=st.sampled_from([2, 4]), C=st.integers(1, 5), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=40)
def test_a_wide_beam_finds_the_code_of_least_cross_entropy(M: int, K: int, C: int, seed: int) -> None:
    codewords = 2 * torch.randn(M, K, C, generator=torch.Generator().manual_seed(seed))
    targets = beliefs(7, C, 2.0, seed)
    found = assign_logits(targets, codewords, beam=K**M)
    assert found.shape == (7, M)
    every = torch.tensor(list(itertools.product(range(K), repeat=M)))
    least = torch.stack([cross_entropy(targets, codewords, code.expand(7, M)) for code in every]).amin(dim=0)
    torch.testing.assert_close(cross_entropy(targets, codewords, found), least, rtol=1e-4, atol=1e-5)


def test_codes_do_not_depend_on_the_batch_and_extremes_are_finite() -> None:
    codewords = torch.randn(4, 16, 6, generator=torch.Generator().manual_seed(1)).clamp(-20, 20)
    codewords[0, 0] = 20.0 * torch.eye(6)[0] - 20.0 * torch.eye(6)[1]
    targets = torch.cat([beliefs(30, 6), torch.eye(6)])
    together = assign_logits(targets, codewords)
    alone = torch.cat([assign_logits(t.unsqueeze(0), codewords) for t in targets])
    assert torch.equal(together, alone)
    assert torch.isfinite(cross_entropy(targets, codewords, together)).all()
    assert assign_logits(torch.zeros(0, 6), codewords).shape == (0, 4)


def test_turns_lower_the_cross_entropy_below_that_of_one_codebook() -> None:
    p = beliefs(600, 40)
    entropy = float(-(p * p.log()).sum(dim=1).mean())
    costs = []
    for M in (1, 2, 3):
        codewords = fit_logit_codewords(p, M, 16, seed=0)
        assert codewords.shape == (M, 16, 40)
        costs.append(float(cross_entropy(p, codewords, assign_logits(p, codewords)).mean()))
    # 16 codewords cannot tell 40 classes; 16 x 16 products of probabilities can.
    assert costs[0] - entropy > 2 * (costs[1] - entropy)
    assert costs[1] >= costs[2] > entropy - 1e-4


def test_tables_lower_the_n_pair_loss_of_fixed_codes() -> None:
    p = beliefs(500, 8)
    codewords = fit_logit_codewords(p, 2, 16, seed=0)
    codes = assign_logits(p, codewords)

    def loss(tables: Tensor) -> float:
        scores = p @ tables[torch.arange(2), codes].sum(dim=1).T
        target = p @ p.T
        return float(-(target / target.sum(1, keepdim=True) * scores.log_softmax(dim=1)).sum(dim=1).mean())

    fitted = fit_tables(p, codes, codewords, seed=0)
    assert loss(fitted) < loss(codewords)
    assert torch.equal(fitted, fit_tables(p, codes, codewords, seed=0))
    with_one_class_lost = fitted.clone()
    with_one_class_lost[:, :, 0] = 0
    assert loss(fitted) < loss(with_one_class_lost)


def test_many_classes_take_sums_of_logits_and_few_of_probabilities() -> None:
    few, p = beliefs(300, 4, 3.0), beliefs(300, 50)
    many = fit_class_codebooks(p, p, 2, 16, seed=0)
    assert not fit_class_codebooks(few, few, 3, 16, seed=0).by_logits
    assert many.by_logits
    assert not torch.equal(many.tables, many.logits)
    codes = many.assign(beliefs(50, 50, seed=3))
    assert codes.shape == (50, 2)
    assert torch.equal(codes, torch.cat([many.assign(t.unsqueeze(0)) for t in beliefs(50, 50, seed=3)]))


def test_too_few_items_are_refused() -> None:
    for p in (beliefs(15, 3), beliefs(15, 40)):
        with pytest.raises(DataError, match="15 items are too few for 16 codewords"):
            fit_class_codebooks(p, p, 2, 16, seed=0)


def test_without_feature_codebooks_the_class_has_all_the_weight() -> None:
    p = beliefs(300, 4)
    found = fit_class_codebooks(p, p, 2, 16, seed=0)
    none = torch.zeros(0, 16, 0)
    assert weights_of_parts(found, none, p, p, torch.zeros(300, 0), 0.5).tolist() == [1.0, 0.0]
    residual = torch.nn.functional.normalize(
        torch.randn(300, 5, generator=torch.Generator().manual_seed(0)), dim=1
    )
    words = residual[:16].unsqueeze(0)
    light, heavy = (weights_of_parts(found, words, p, p, residual, w) for w in (0.02, 0.5))
    ratio = lambda weights: float(weights[1] / weights[0])  # noqa: E731
    np.testing.assert_allclose(ratio(heavy) / ratio(light), (0.5 / 0.5) / (0.02 / 0.98), rtol=1e-4)

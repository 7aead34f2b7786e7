"""The score regression loss against a loop over pairs."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpq_faiss.losses import ScoreRegressionLoss
from gpq_faiss.nn.quantizer import unit


@given(
    B=st.integers(1, 6),
    M=st.integers(1, 4),
    d=st.integers(1, 4),
    C=st.integers(1, 4),
    seed=st.integers(0, 99),
)
@settings(deadline=None, max_examples=50)
def test_against_a_loop(B: int, M: int, d: int, C: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, q = (unit(torch.randn(B, M, d, generator=g, dtype=torch.float64)) for _ in range(2))
    y = torch.rand(B, C, generator=g) < 0.4
    terms = []
    for i in range(B):
        for j in range(B):
            if y[i].any() and y[j].any():
                score = sum(float(x[i, m] @ q[j, m]) for m in range(M)) / M
                terms.append((score - float((y[i] & y[j]).any())) ** 2)
    expected = np.mean(terms) if terms else 0.0
    np.testing.assert_allclose(float(ScoreRegressionLoss()(x, q, y)), expected, atol=1e-12)


def test_gradcheck() -> None:
    g = torch.Generator().manual_seed(0)
    x, q = (torch.randn(4, 2, 3, generator=g, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = torch.tensor([[1, 0], [1, 1], [0, 0], [0, 1]])
    assert torch.autograd.gradcheck(lambda a, b: ScoreRegressionLoss()(a, b, y), (x, q))


def test_the_ideal_score_has_no_loss() -> None:
    """Two classes on orthogonal directions: the score is 1 within and 0 across."""
    x = torch.eye(2).repeat(2, 1).unsqueeze(1)
    y = torch.eye(2).repeat(2, 1)
    assert float(ScoreRegressionLoss()(x, x, y)) == 0.0
    assert float(ScoreRegressionLoss()(x, x, torch.zeros(4, 2))) == 0.0

"""The soft ranking loss against a naive loop over the same draws, and what its minimum orders by."""

from __future__ import annotations

import math

import pytest
import torch

from gpq_faiss.errors import UsageError
from gpq_faiss.losses import SoftRankingLoss


def naive(
    scores: torch.Tensor, relevance: torch.Tensor, first: torch.Tensor, second: torch.Tensor, a: float
) -> float:
    total = 0.0
    for i in range(len(scores)):
        for j, k in zip(first[i].tolist(), second[i].tolist(), strict=True):
            lead = a * (float(scores[i, j]) - float(scores[i, k]))
            tj, tk = float(relevance[i, j]), float(relevance[i, k])
            total += tj * (1 - tk) * math.log1p(math.exp(-lead)) + tk * (1 - tj) * math.log1p(math.exp(lead))
    return total / first.numel()


def test_it_is_the_expected_logistic_loss_of_the_drawn_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(5, 7, generator=generator, dtype=torch.float64) / 10
    relevance = torch.rand(5, 7, generator=generator, dtype=torch.float64)
    loss = SoftRankingLoss(pairs=11, scale=3.0).double()
    torch.manual_seed(4)
    found = float(loss(scores, relevance))
    torch.manual_seed(4)
    first, second = torch.randint(7, (5, 11)), torch.randint(7, (5, 11))
    assert found == pytest.approx(naive(scores, relevance, first, second, 3.0), rel=1e-6)


def test_descending_it_orders_items_by_relevance() -> None:
    torch.manual_seed(1)
    relevance = torch.rand(6, 20)
    scores = torch.zeros(6, 20, requires_grad=True)
    loss = SoftRankingLoss(pairs=400, scale=1.0)
    optimizer = torch.optim.Adam([scores], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss(scores, relevance).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    difference = relevance[:, :, None] - relevance[:, None]
    ordered = (scores[:, :, None] > scores[:, None])[difference > 0.1]
    assert ordered.float().mean() > 0.97


def test_items_of_equal_certainty_pull_at_nothing() -> None:
    loss = SoftRankingLoss(pairs=50)
    for value in (0.0, 1.0):
        assert float(loss(torch.randn(3, 8), torch.full((3, 8), value))) == 0.0


@pytest.mark.parametrize(("pairs", "scale"), [(0, 1.0), (5, 0.0), (5, -1.0), (5, math.nan)])
def test_what_cannot_be_is_refused(pairs: int, scale: float) -> None:
    with pytest.raises(UsageError, match="must be above 0"):
        SoftRankingLoss(pairs=pairs, scale=scale)

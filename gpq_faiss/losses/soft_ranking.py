"""The soft ranking loss: every pair of items in the order of the probability that they are relevant. Not in the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import UsageError


class SoftRankingLoss(nn.Module):
    """Logistic loss over triples of a query and two items, weighted by the probability that just one of these is relevant.

    For a query i and items j, k of relevance t_ij and t_ik in [0, 1] it is
    ``t_ij (1 - t_ik) softplus(a (s_ik - s_ij)) + t_ik (1 - t_ij) softplus(a (s_ij - s_ik))``: the expected logistic loss of the pair
    (RankNet; Burges et al., ICML 2005) if relevance were drawn by these probabilities. It needs no labels, only a posterior, so
    unlabelled items take part as labelled ones do; and it asks for an order, which the bounded sum of unit-norm parts can keep where it
    could not reach the probabilities themselves.

    Args:
        pairs: of items drawn for every query of a batch.
        scale: what a starts from; it is learnt.

    Raises:
        UsageError: ``pairs`` below 1, or a scale that is not above 0.
    """

    def __init__(self, pairs: int = 192, scale: float = 10.0) -> None:
        super().__init__()
        if pairs < 1 or not scale > 0:
            raise UsageError(f"soft ranking with {pairs} pairs and scale {scale}: both must be above 0")
        self.pairs = pairs
        self.log_scale = nn.Parameter(torch.tensor(scale).log())

    def forward(self, scores: Tensor, relevance: Tensor) -> Tensor:
        """The mean over queries and drawn pairs, a scalar.

        Args:
            scores: float [Q, N], of N items for Q queries.
            relevance: float [Q, N], probabilities.
        """
        Q, N = scores.shape
        with torch.autocast(scores.device.type, enabled=False):
            first = torch.randint(N, (Q, self.pairs), device=scores.device)
            second = torch.randint(N, (Q, self.pairs), device=scores.device)
            lead = self.log_scale.exp() * (scores.gather(1, first) - scores.gather(1, second))
            t1, t2 = relevance.gather(1, first), relevance.gather(1, second)
            loss = t1 * (1 - t2) * functional.softplus(-lead) + t2 * (1 - t1) * functional.softplus(lead)
            return loss.mean()

"""The N-pair product quantisation loss (eq. 2) with class probabilities in place of labels. Not in the paper.

Class probabilities give the probability that two items share a class, t_ij = p_i·p_j, so unlabelled items contribute, too. One-hot
rows give the targets of eq. 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SoftNPairLoss(nn.Module):
    """Mean over queries i of -Σ_j t_ij log softmax_j(S_ij), where t_ij = p_i·r_j, rows normalised to sum to 1.

    Queries and items with all-zero probabilities are ignored, as are queries without any possible match. Without queries the loss is 0.
    """

    def forward(self, scores: Tensor, p: Tensor, r: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            scores: float [A, B], S: search scores times a scale.
            p: float [A, C], class probabilities of the queries.
            r: float [B, C], class probabilities of the items.
        """
        with torch.autocast(scores.device.type, enabled=False):
            target = p.to(scores.dtype) @ r.to(scores.dtype).T
        # A finite floor, not -inf: 0 * -inf would be NaN.
        logits = scores.masked_fill(~(r > 0).any(dim=1), torch.finfo(scores.dtype).min / 2)
        whole = target.sum(dim=1, keepdim=True)
        known = whole > 0
        target = target / torch.where(known, whole, torch.ones_like(whole))
        return -(target * logits.log_softmax(dim=1)).sum() / known.sum().clamp_min(1)


def soft_npair_of_posteriors(p: Tensor, r: Tensor, sums: Tensor) -> Tensor:
    """:class:`SoftNPairLoss` of the scores S = p · sums, for positive p and r, in half the time: Σ_j t_ij S_ij needs no matrix t.

    Args:
        p: float [A, C], class probabilities of the queries.
        r: float [B, C], class probabilities of the items.
        sums: float [B, C], vectors by which items are scored.
    """
    matched = (p @ (r.T @ sums) * p).sum(dim=1) / (p @ r.sum(dim=0)).clamp_min(torch.finfo(p.dtype).tiny)
    loss: Tensor = ((p @ sums.T).logsumexp(dim=1) - matched).mean()
    return loss

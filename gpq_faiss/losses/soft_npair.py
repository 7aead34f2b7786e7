"""The N-pair product quantisation loss (eq. 2) with class probabilities in place of labels. Not in the paper.

With labels, items that have none never reach the loss that makes the codes. Class probabilities give the probability
that two items share a class,
t_ij = p_i·p_j, and with labels that are certain (one-hot rows) these are the targets of eq. 2.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SoftNPairLoss(nn.Module):
    """Mean over queries i of -Σ_j t_ij log softmax_j(S_ij), where t_ij = p_i·r_j, each row made to sum to 1.

    Queries and items whose probabilities are all zero are not known and do not enter, nor does a query that can share a class with none of
    the items. Without any other query the loss is 0.
    """

    def forward(self, scores: Tensor, p: Tensor, r: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            scores: float [A, B], S: what a search would score items with, times a scale.
            p: float [A, C], class probabilities of the queries.
            r: float [B, C], those of the items.
        """
        with torch.autocast(scores.device.type, enabled=False):
            target = p.to(scores.dtype) @ r.to(scores.dtype).T
        # A finite floor, not -inf: 0 * -inf would be NaN.
        logits = scores.masked_fill(~(r > 0).any(dim=1), torch.finfo(scores.dtype).min / 2)
        whole = target.sum(dim=1, keepdim=True)
        known = whole > 0
        target = target / torch.where(known, whole, torch.ones_like(whole))
        return -(target * logits.log_softmax(dim=1)).sum() / known.sum().clamp_min(1)

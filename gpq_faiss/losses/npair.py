"""The N-pair product quantisation loss (eq. 2), with labels, or with class probabilities, which are not in the paper.

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
        """The loss of scores S float [A, B], for class probabilities p float [A, C] of queries and r float [B, C] of items."""
        with torch.autocast(scores.device.type, enabled=False):
            target = p.to(scores.dtype) @ r.to(scores.dtype).T
        # A finite floor, not -inf: 0 * -inf would be NaN. Masks instead of indexing avoid GPU synchronisation.
        logits = scores.masked_fill(~(r > 0).any(dim=1), torch.finfo(scores.dtype).min / 2)
        whole = target.sum(dim=1, keepdim=True)
        known = whole > 0
        target = target / torch.where(known, whole, torch.ones_like(whole))
        return -(target * logits.log_softmax(dim=1)).sum() / known.sum().clamp_min(1)


class NPairPQLoss(SoftNPairLoss):
    """Cross entropy between similarity by label and asymmetric similarity (eq. 2).

    Scores are X Qᵀ, summed over the M sub-spaces: vectors against soft-assigned vectors, as in search. Unlabelled rows are neither anchors
    nor in the softmax.

    Examples:
        >>> x = torch.eye(2)[:, None]  # two items in one sub-space of two dimensions, orthogonal
        >>> round(float(NPairPQLoss()(x, x, labels=torch.eye(2))), 4)  # log(1 + 1/e)
        0.3133
    """

    def forward(self, x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """The loss of unit-norm sub-vectors and their soft assignment, float [B, M, d], with multi-hot labels [B, C] (zero: unlabelled)."""
        y = multihot(labels, x)
        with torch.autocast(x.device.type, enabled=False):
            scores = x.flatten(1) @ q.flatten(1).to(x.dtype).T
        return super().forward(scores, y, y)


def soft_npair_of_posteriors(p: Tensor, r: Tensor, sums: Tensor) -> Tensor:
    """:class:`SoftNPairLoss` of the scores S = p · sums, for positive class probabilities p float [A, C] of queries and r float [B, C] of
    items, in half the time: Σ_j t_ij S_ij needs no matrix t."""
    matched = (p @ (r.T @ sums) * p).sum(dim=1) / (p @ r.sum(dim=0)).clamp_min(torch.finfo(p.dtype).tiny)
    loss: Tensor = ((p @ sums.T).logsumexp(dim=1) - matched).mean()
    return loss


def multihot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels [B, C] of any dtype as 0/1 with dtype and device of ``like``; values above 0 are labels."""
    return (labels > 0).to(device=like.device, dtype=like.dtype)


def label_pairs(labels: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of labelled rows, bool [B, B], of multi-hot labels [B, C]: different rows that share a label, and rows that share none;
    computed with dtype and device of ``like``."""
    y = multihot(labels, like)
    known = y.any(dim=1)
    with torch.autocast(y.device.type, enabled=False):
        shared = y @ y.T > 0
    positive = shared & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    return positive, ~shared & known & known[:, None]

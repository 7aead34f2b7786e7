"""The N-pair product quantisation loss (eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NPairPQLoss(nn.Module):
    """Cross entropy between similarity by label and asymmetric similarity (eq. 2).

    Logits are S = X Qᵀ, summed over the M sub-spaces: vectors against soft-assigned vectors, as in search.
    Targets are the rows of Y Yᵀ normalised to sum to 1, with multi-hot Y. The loss is the mean over the labelled rows of -Σ_j target_ij
    log softmax_j(S_ij).

    Unlabelled rows are neither anchors nor in the softmax. A batch without labels has loss 0.

    Examples:
        >>> x = torch.eye(2)[:, None]  # two items in one sub-space of two dimensions, orthogonal
        >>> round(float(NPairPQLoss()(x, x, labels=torch.eye(2))), 4)  # log(1 + 1/e)
        0.3133
    """

    def forward(self, x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            x: float [B, M, d], unit-norm sub-vectors.
            q: float [B, M, d], their soft assignment.
            labels: multi-hot [B, C], any dtype; a zero row is unlabelled.
        """
        y = multihot(labels, x)
        known = y.any(dim=1)
        with torch.autocast(x.device.type, enabled=False):
            logits = x.flatten(1) @ q.flatten(1).to(x.dtype).T
            target = y @ y.T
        # A finite floor, not -inf: 0 * -inf would be NaN. Masks instead of indexing avoid GPU synchronisation.
        logits = logits.masked_fill(~known, torch.finfo(logits.dtype).min / 2)
        target = target / target.sum(dim=1, keepdim=True).clamp_min(1)
        return -(target * logits.log_softmax(dim=1)).sum() / known.sum().clamp_min(1)


def multihot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels [B, C] of any dtype as 0/1 with dtype and device of ``like``; values above 0 are labels."""
    return (labels > 0).to(device=like.device, dtype=like.dtype)


def label_pairs(labels: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs of labelled rows, bool [B, B]: different rows that share a label, and rows that share none.

    Args:
        labels: multi-hot [B, C], any dtype; a zero row is unlabelled and in no pair.
        like: of the dtype and device to compute in.
    """
    y = multihot(labels, like)
    known = y.any(dim=1)
    with torch.autocast(y.device.type, enabled=False):
        shared = y @ y.T > 0
    positive = shared & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    return positive, ~shared & known & known[:, None]

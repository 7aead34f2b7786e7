"""The N-pair product quantisation loss (eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NPairPQLoss(nn.Module):
    """Cross entropy between who is similar to whom by label and by asymmetric similarity (eq. 2).

    Logits are S = X Qᵀ, summed over the M sub-spaces: vectors against soft-assigned vectors, as in search.
    Targets are Y Yᵀ with each row normalised to sum 1, Y being multi-hot; single-label data are the special
    case of one 1 per row. The loss is the mean over the labelled rows of -Σ_j target_ij log softmax_j(S_ij).

    Rows without any label enter neither as anchors nor in the softmax. A batch without a labelled row has
    loss 0.

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
        # A finite floor, not -inf: 0 * -inf would be NaN. Masks rather than indexing keep a GPU from waiting.
        logits = logits.masked_fill(~known, torch.finfo(logits.dtype).min / 2)
        target = target / target.sum(dim=1, keepdim=True).clamp_min(1)
        return -(target * logits.log_softmax(dim=1)).sum() / known.sum().clamp_min(1)


def multihot(labels: Tensor, like: Tensor) -> Tensor:
    """Labels [B, C] of any dtype as 0/1 of the dtype and device of ``like``; above 0 is a label."""
    return (labels > 0).to(device=like.device, dtype=like.dtype)

"""The score regression loss: what a search computes, fitted to relevance itself. Not in the paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .npair import multihot


class ScoreRegressionLoss(nn.Module):
    """Mean squared difference of the retrieval score and relevance, over all pairs of labelled rows.

    The score of query i and item j is (1/M) Σ_m x_im·q_jm, the one that ranks a search, divided by M; relevance is 1 where the
    rows share a label and 0 where not. Its minimum is the probability that the two share a label, which is what a ranking should
    go by; the N-pair loss (eq. 2) only asks for the right order within a batch.

    Rows without any label do not enter. A batch without a labelled row has loss 0.
    """

    def forward(self, x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            x: float [B, M, d], unit-norm sub-vectors.
            q: float [B, M, d], their soft assignment.
            labels: multi-hot [B, C], any dtype; a zero row is unlabelled.
        """
        y = multihot(labels, x)
        known = y.any(dim=1).to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            score = x.flatten(1) @ q.flatten(1).to(x.dtype).T / x.shape[1]
            relevant = (y @ y.T > 0).to(x.dtype)
        pairs = known[:, None] * known[None, :]
        return ((score - relevant).square() * pairs).sum() / pairs.sum().clamp_min(1)

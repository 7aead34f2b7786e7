"""The triplet loss of the variant GPQ-T, which replaces the N-pair PQ loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .npair import label_pairs

MARGIN = 0.1
"""Required lead of the positive, the paper's."""


class TripletPQLoss(nn.Module):
    """Triplets of vectors against soft-assigned vectors: max(0, margin + s(a, n) - s(a, p)).

    s(i, j) is the mean over the M sub-spaces of the cosine of x_i with q_j (asymmetric, as in search), so the
    margin is independent of the code length. A positive of an anchor is another labelled row that shares at
    least one label with it, a negative a labelled row that shares none; unlabelled rows are ignored.

    Semi-hard mining inside the batch (Schroff et al. 2015): every pair (a, p) takes the most similar negative that is less similar
    than p; if there is none, the least similar negative. Mean over all pairs whose anchor has a negative. Memory is O(B²): negatives
    are found by binary search in the anchor's sorted negatives. A batch without triplets has loss 0.
    """

    def forward(self, x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """The loss of unit-norm sub-vectors and their soft assignment, float [B, M, d], with multi-hot labels [B, C] (zero: unlabelled)."""
        positive, negative = label_pairs(labels, x)
        with torch.autocast(x.device.type, enabled=False):
            similarity = x.flatten(1) @ q.flatten(1).to(x.dtype).T / x.shape[1]
        used = positive & negative.any(dim=1, keepdim=True)
        ordered = similarity.masked_fill(~negative, 9.0).sort(dim=1).values  # any cosine is below 9
        below = torch.searchsorted(ordered.detach(), similarity.detach().contiguous())
        # `below` negatives are less similar than the positive; with none, entry 0 is the least similar.
        chosen = ordered.gather(1, (below - 1).clamp_min(0))
        loss = (MARGIN + chosen - similarity).relu()
        return loss.masked_fill(~used, 0).sum() / used.sum().clamp_min(1)

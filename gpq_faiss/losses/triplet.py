"""The triplet loss of the variant GPQ-T, which replaces the N-pair PQ loss."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ..errors import UsageError
from .npair import label_pairs

Mining = Literal["semihard", "hardest"]


class TripletPQLoss(nn.Module):
    """Triplets of vectors against soft-assigned vectors: max(0, margin + s(a, n) - s(a, p)).

    s(i, j) is the mean over the M sub-spaces of the cosine of x_i with q_j (asymmetric, as in search), so the
    margin is independent of the code length. A positive of an anchor is another labelled row that shares at
    least one label with it, a negative a labelled row that shares none; unlabelled rows are ignored.

    Mining, inside the batch:

    * ``"semihard"`` (Schroff et al. 2015): every pair (a, p) takes the most similar negative that is less similar
      than p; if there is none, the least similar negative. Mean over all pairs whose anchor has a negative.
    * ``"hardest"`` (Hermans et al. 2017): every anchor takes its least similar positive and its most similar
      negative. Mean over anchors that have both.

    Memory is O(B²): semi-hard negatives are found by binary search in the anchor's sorted negatives. A batch
    without triplets has loss 0.

    Args:
        margin: required lead of the positive; the paper's is 0.1.
        mining: ``"semihard"`` or ``"hardest"``.

    Raises:
        UsageError: unknown mining, or a negative margin.
    """

    def __init__(self, margin: float = 0.1, mining: Mining = "semihard") -> None:
        super().__init__()
        if mining not in get_args(Mining):
            raise UsageError(f"triplet mining {mining!r} is not one of {', '.join(get_args(Mining))}")
        if not margin >= 0:
            raise UsageError(f"the triplet margin is {margin}: it must not be negative")
        self.margin = margin
        self.mining = mining

    def forward(self, x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar.

        Args:
            x: float [B, M, d], unit-norm sub-vectors.
            q: float [B, M, d], their soft assignment.
            labels: multi-hot [B, C], any dtype; a zero row is unlabelled.
        """
        positive, negative = label_pairs(labels, x)
        with torch.autocast(x.device.type, enabled=False):
            similarity = x.flatten(1) @ q.flatten(1).to(x.dtype).T / x.shape[1]
        has_negative = negative.any(dim=1)
        if self.mining == "hardest":
            used = positive.any(dim=1) & has_negative
            easiest = similarity.masked_fill(~positive, 9.0).amin(dim=1)  # any cosine is below 9
            hardest = similarity.masked_fill(~negative, -9.0).amax(dim=1)
            loss = (self.margin + hardest - easiest).relu()
        else:
            used = positive & has_negative[:, None]
            ordered = similarity.masked_fill(~negative, 9.0).sort(dim=1).values
            below = torch.searchsorted(ordered.detach(), similarity.detach().contiguous())
            # `below` negatives are less similar than the positive; with none, entry 0 is the least
            # similar.
            chosen = ordered.gather(1, (below - 1).clamp_min(0))
            loss = (self.margin + chosen - similarity).relu()
        return loss.masked_fill(~used, 0).sum() / used.sum().clamp_min(1)

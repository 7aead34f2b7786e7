"""Losses of pairs: N-pair product quantisation (eq. 2), and the triplets of GPQ-T.

Labels are multi-hot, float [B, C]; every row has at least one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

MARGIN = 0.1
"""Required lead of a triplet's positive, the paper's."""


def npair(x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy between similarity by label and asymmetric similarity (eq. 2), a
    scalar.

    Scores are X Qᵀ, summed over the M sub-spaces: unit-norm vectors x against soft-assigned vectors
    q, float [B, M, d], as in search.

    Examples:
        >>> x = torch.eye(2)[:, None]  # two items in one sub-space of two dimensions, orthogonal
        >>> round(float(npair(x, x, labels=torch.eye(2))), 4)  # log(1 + 1/e)
        0.3133
    """
    shared = labels @ labels.T
    targets = shared / shared.sum(dim=1, keepdim=True)
    return F.cross_entropy(x.flatten(1) @ q.flatten(1).T, targets)


def triplet(x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of triplets of vectors and soft-assigned vectors, a scalar.

    It is max(0, margin + s(a, n) - s(a, p)); the arguments are those of :func:`npair`. s(i, j) is
    the mean over the M sub-spaces of the cosine of x_i with q_j (asymmetric, as in search).
    Positives p share a label with the anchor a, negatives n none. Semi-hard mining inside the batch
    (Schroff et al. 2015): every pair (a, p) takes the most similar negative that is less similar
    than p, or else the least similar one. The loss is the mean over all pairs whose anchor has a
    negative, 0 without any.
    """
    positive, negative = label_pairs(labels)
    similarity = x.flatten(1) @ q.flatten(1).T / x.shape[1]
    used = positive & negative.any(dim=1, keepdim=True)
    ordered = similarity.masked_fill(~negative, 9.0).sort(dim=1).values  # any cosine is below 9
    below = torch.searchsorted(ordered.detach(), similarity.detach().contiguous())
    # `below` negatives are less similar than the positive; with none, entry 0 is the least similar.
    chosen = ordered.gather(1, (below - 1).clamp_min(0))
    return masked_mean((MARGIN + chosen - similarity).relu(), used)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the values where the mask, of the same shape, is true; 0 without any.

    All values must be finite, also where the mask is false."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def label_pairs(labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs of rows share a label, and which share none, both bool [B, B].

    The first excludes pairs of a row with itself.
    """
    shared = labels @ labels.T > 0
    return shared & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device), ~shared

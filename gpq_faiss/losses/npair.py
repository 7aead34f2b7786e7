"""Losses of pairs: N-pair product quantisation (eq. 2), and the triplets of GPQ-T.

The N-pair loss takes labels or class probabilities. Class probabilities, which are not in the
paper, give the probability that two items share a class, t_ij = p_i·p_j, so unlabelled items
contribute, too. One-hot rows give the targets of eq. 2.
"""

from __future__ import annotations

import torch
from torch import Tensor

MARGIN = 0.1
"""Required lead of a triplet's positive, the paper's."""


def npair(x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy between similarity by label and asymmetric similarity (eq. 2), a
    scalar.

    Scores are X Qᵀ, summed over the M sub-spaces: unit-norm vectors x against soft-assigned vectors
    q, float [B, M, d], as in search. Rows without any of the multi-hot labels [B, C] are neither
    anchors nor in the softmax.

    Examples:
        >>> x = torch.eye(2)[:, None]  # two items in one sub-space of two dimensions, orthogonal
        >>> round(float(npair(x, x, labels=torch.eye(2))), 4)  # log(1 + 1/e)
        0.3133
    """
    y = multihot(labels, x)
    labelled = y.any(dim=1)
    # Masks in place of indexing avoid a synchronisation with the GPU; 0 * -inf would be NaN.
    logits = (x.flatten(1) @ q.flatten(1).T).masked_fill(~labelled, torch.finfo(x.dtype).min / 2)
    target = y @ y.T
    target = target / torch.where(labelled, target.sum(dim=1), 1.0)[:, None]
    return -(target * logits.log_softmax(dim=1)).sum() / labelled.sum().clamp_min(1)


def triplet(x: Tensor, q: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of triplets of vectors and soft-assigned vectors, a scalar.

    It is max(0, margin + s(a, n) - s(a, p)); the arguments are those of :func:`npair`. s(i, j) is
    the mean over the M sub-spaces of the cosine of x_i with q_j (asymmetric, as in search).
    Positives p share a label with the anchor a, negatives n none; unlabelled rows are ignored.
    Semi-hard mining inside the batch (Schroff et al. 2015): every pair (a, p) takes the most
    similar negative that is less similar than p, or else the least similar one. The loss is the
    mean over all pairs whose anchor has a negative, 0 without any.
    """
    positive, negative = label_pairs(labels, x)
    similarity = x.flatten(1) @ q.flatten(1).T / x.shape[1]
    used = positive & negative.any(dim=1, keepdim=True)
    ordered = similarity.masked_fill(~negative, 9.0).sort(dim=1).values  # any cosine is below 9
    below = torch.searchsorted(ordered.detach(), similarity.detach().contiguous())
    # `below` negatives are less similar than the positive; with none, entry 0 is the least similar.
    chosen = ordered.gather(1, (below - 1).clamp_min(0))
    loss = (MARGIN + chosen - similarity).relu()
    return masked_mean(loss, used)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of the finite values where the mask, of the same shape, is true; 0 without
    any."""
    return (values * mask).sum() / mask.sum().clamp_min(1)


def multihot(labels: Tensor, like: Tensor) -> Tensor:
    """Return labels [B, C] of any dtype as 0/1 with the dtype and device of ``like``.

    Values above 0 are labels.
    """
    return (labels > 0).to(device=like.device, dtype=like.dtype)


def label_pairs(labels: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return which pairs of labelled rows share a label, and which share none, both bool [B, B].

    The first excludes pairs of a row with itself. Labels are multi-hot [B, C]; the computation has
    the dtype and device of ``like``.
    """
    y = multihot(labels, like)
    labelled = y.any(dim=1)
    shared = y @ y.T > 0
    positive = shared & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    return positive, ~shared & labelled & labelled[:, None]

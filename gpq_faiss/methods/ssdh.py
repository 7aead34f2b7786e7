"""SSDH, semi-supervised deep hashing with a graph built in every mini-batch.

Zhang and Peng, "SSDH: Semi-supervised Deep Hashing for Large Scale Image Retrieval", IEEE
Transactions on Circuits and Systems for Video Technology, 2017 (arXiv 1607.08477). The network's
deep features go into a hash layer, h = sigmoid(u) in [0, 1]^q, and into a classifier. With d(i, j)
= ||h_i - h_j||², the loss is the sum of

* the supervised ranking term, for labelled triplets (a, p, n): max(0, m_t + d(a, p) - d(a, n));
* the embedding term, λ times the contrast of neighbours and of distant items, labelled or not: d(i,
  j) for neighbours, max(0, m_p - sqrt d(i, j))² for distant ones, by the deep features of the same
  mini-batch, so that the graph improves with the network;
* the pseudo-label term, λ times the same contrast between each unlabelled item and items of the
  same class or another one, by predicted classes (for labelled partners by their labels);
* the classifier's cross entropy on the labelled items.

A bit is 1 if u > 0. λ = 0.1, m_t = 1, m_p = 2.5 for 12 bits and 3 above, the nearest 8 of 128 as
neighbours and distant ones from the farthest tenth are the authors' published settings for the
CNN-F network. Deviations, and why:

* The margin m_t is ``bits / 8``, at least 1, chosen on held-out items: squared distances grow with
  the code length.
* The ranking term is halved; near and far pairs are averaged separately with equal weight; the
  paper sums over all pairs. All triplets and pairs of the mini-batch are averaged, not a few per
  anchor.
* The classifier is a softmax over labels with equal shares (the authors' is a sigmoid where items
  have several labels), and negatives of the pseudo-label term are items of any other class (theirs:
  of the least probable one).
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..losses.classification import shares
from ..losses.npair import masked_mean
from ..nn.backbones import make_head
from .baseline import Baseline, squared_distances, start_small, triplet_ranking
from .trainable import TrainingBatch, weighted


def contrast(distances: Tensor, near: Tensor, far: Tensor, margin: float) -> Tensor:
    """Half the sum of mean d over the pairs ``near`` and mean max(0, margin - sqrt d)² over the
    pairs ``far``, a scalar, of squared distances float [B, B]; either kind of pairs, bool [B, B],
    may be empty."""
    # The root has an infinite gradient at 0, for equal rows.
    gap = (margin - (distances + 1e-6).sqrt()).relu().square()
    return (masked_mean(distances, near) + masked_mean(gap, far)) / 2


@torch.no_grad()
def batch_graph(features: Tensor, near: float, far: float) -> tuple[Tensor, Tensor]:
    """The neighbours of each row of features float [B, W] and its distant rows, two bool [B, B];
    ``near`` and ``far`` are their shares of the batch, at least one row each."""
    B = len(features)
    order = squared_distances(features, features).fill_diagonal_(-1).argsort(dim=1)
    ranks = order.argsort(dim=1)  # 0 is the row itself
    n_near = max(1, min(round(near * B), (B - 1) // 2))
    n_far = max(1, min(round(far * B), B - 1 - n_near))
    return (ranks > 0) & (ranks <= n_near), ranks >= B - n_far


class SSDH(Baseline):
    """See the module docstring. The exported network gives u, whose sign is the code."""

    uses_unlabelled = True
    weight = 0.1
    """λ."""
    near, far = 8 / 128, 10 / 128
    """Shares of a mini-batch that count as neighbours and as distant."""

    def build(self) -> None:
        self.margin_rank = max(1.0, self.bits / 8)
        self.margin_pair = 2.5 if self.bits <= 12 else 3.0
        head = cast(nn.Linear, self.backbone.head)
        start_small(head, self.draws)
        self.classifier = make_head(head.in_features, self.n_classes, self.draws)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        n = len(batch.y)
        deep = self.trunk_features(batch.x, amp)
        h = self.backbone.head(deep).sigmoid()
        logits = self.classifier(deep)
        d = squared_distances(h, h)
        parts = {
            "rank": triplet_ranking(d[:n, :n], batch.y, self.margin_rank) / 2,
            "embedding": contrast(
                d, *batch_graph(deep.detach(), self.near, self.far), self.margin_pair
            ),
            "classification": F.cross_entropy(logits[:n], shares(batch.y)),
        }
        if len(deep) > n:
            pairs = class_pairs(batch.y, logits[n:].detach())
            parts["pseudo"] = contrast(d[n:], *pairs, self.margin_pair)
        return weighted(parts, embedding=self.weight, pseudo=self.weight)


def class_pairs(y: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of a batch share a class with unlabelled rows, and which do not, two bool [U, B +
    U]. The class of an unlabelled row is the most probable of its logits [U, C]; the labelled rows
    have multi-hot labels [B, C]. The first leaves out pairs of a row with itself."""
    pseudo = F.one_hot(logits.argmax(dim=1), y.shape[1]).to(y.dtype)
    shared = pseudo @ torch.cat([y, pseudo]).T > 0
    partners = shared.clone()
    partners[:, len(y) :].fill_diagonal_(False)
    return partners, ~shared

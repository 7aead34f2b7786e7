"""SUBIC: Jain, Zepeda, Pérez and Gribonval, "SUBIC: A Supervised, Structured Binary Code for Image
Search", ICCV 2017.

The network ends in M blocks of K softmax activations z; the code has a 1 at the largest activation
of each block, so it has M log2 K bits. A linear classifier on the activations is trained jointly,
and two block entropies make activations nearly one-hot and all K of a block equally frequent::

    L = CE(z, y) / log2 C  +  γ/(M log2 K) mean_i Σ_m H(z_im)  -  μ/(M log2 K) Σ_m H(mean_i z_im)

with entropies and the cross entropy in bits: the classification loss, the mean entropy and the
(negative) batch entropy. Search is asymmetric: the inner product of the query's activations with
the code.

Deviations:

* K = 16, as for the product codes: a block is a codebook of 4 bits. The paper's blocks are larger.
* γ = 0.03 and μ = 0.3, chosen on held-out items; with 1 and 1, the defaults of the authors'
  published code, the entropies outweigh the classes within 500 steps. The targets of an item with
  several labels are its labels with equal shares.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn

from ..losses.classification import cross_entropy, shares
from .baseline import Baseline
from .coders import ProductCoder
from .trainable import TrainingBatch, weighted

_BIT = math.log(2.0)


def block_log_softmax(raw: Tensor, M: int) -> Tensor:
    """Log of the block softmax, float [B, M, K], of the network's output [B, M * K]."""
    return raw.reshape(len(raw), M, -1).log_softmax(dim=-1)


class SUBIC(Baseline):
    """See the module docstring."""

    gamma, mu = 0.03, 0.3
    """Weights of the mean entropy and of the batch entropy."""

    def build(self) -> None:
        width = self.output_width()
        self.classifier = nn.Linear(width, self.n_classes)
        draws = torch.Generator().manual_seed(self.seed + 1)
        bound = 1 / math.sqrt(width)
        nn.init.uniform_(self.classifier.weight, -bound, bound, generator=draws)
        nn.init.zeros_(self.classifier.bias)

    def output_width(self) -> int:
        return self.M * self.K

    def vectors(self, raw: Tensor) -> Tensor:
        return block_log_softmax(raw, self.M).exp().flatten(1)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        log_z = block_log_softmax(self.raw(batch, amp), self.M)
        log_p = self.classifier(log_z.exp().flatten(1)).log_softmax(dim=1)
        z = log_z.exp()
        bits = self.M * math.log2(self.K)
        mean_entropy = -(z * log_z).sum() / len(z)
        frequency = z.mean(dim=0)
        # The logarithm of 0 would have an infinite gradient.
        batch_entropy = -torch.special.xlogy(frequency, frequency.clamp_min(1e-30)).sum()
        classification = cross_entropy(log_p, shares(batch.y))
        parts = {
            # log C of a single class would be 0.
            "classification": classification / math.log(max(2, self.n_classes)),
            "mean_entropy": mean_entropy / _BIT / bits,
            "batch_entropy": batch_entropy / _BIT / bits,
        }
        return weighted(parts, mean_entropy=self.gamma, batch_entropy=-self.mu)

    def coder(self) -> ProductCoder:
        """Coder of one-hot blocks: the unit vector nearest to a block is that of its largest
        activation."""
        return ProductCoder(
            np.broadcast_to(np.eye(self.K, dtype=np.float32), (self.M, self.K, self.K))
        )

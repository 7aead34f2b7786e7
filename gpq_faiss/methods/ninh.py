"""Network-in-network hashing (Lai, Pan, Liu and Yan, "Simultaneous Feature Learning and Hash Coding
with Deep Neural Networks", CVPR 2015; also DNNH): triplets in the unit cube, one small layer per
bit.

*Divide and encode* (sect. 3.2): each bit has a slice of 50 features, with a fully connected unit
and a sigmoid s = 1 / (1 + exp(-β v)), and a piece-wise threshold that makes most values 0 or 1 in
training:

    g(s) = 0 if s < 0.5 - ε,    s if 0.5 - ε <= s <= 0.5 + ε,    1 if s > 0.5 + ε.

*Triplet ranking loss* (eq. 2), for an item, a similar and a dissimilar one, on F in [0, 1]^bits:

    max(0, 1 + ||F(I) - F(I+)||² - ||F(I) - F(I-)||²).

A bit is F > 0.5; codes are compared by Hamming distance. Supervised.

Deviations: the shared backbone replaces the network in network, with a ReLU after its layer to the
50 features per bit (in the paper averages of ReLUs); all triplets of a batch are used, not a random
sample; β and ε are 1 and 0.4. With a margin of 1 for every length, most triplets of long codes soon
have no loss, so it is bits / 12: the paper's for 12 bits, 4 for 48, chosen on held-out items.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .baseline import Baseline, triplet_ranking
from .trainable import TrainingBatch

SLICE = 50
"""Features per bit, as in the paper."""
EPSILON = 0.4
"""ε of the piece-wise threshold; β is 1."""


def piecewise_threshold(s: Tensor, epsilon: float) -> Tensor:
    """g(s), which has no gradient where it is 0 or 1."""
    s = torch.where(s > 0.5 + epsilon, torch.ones_like(s), s)
    return torch.where(s < 0.5 - epsilon, torch.zeros_like(s), s)


class NINH(Baseline):
    """Triplet ranking with divide-and-encode. The exported network gives s - 0.5: a bit is 1 if it
    is above 0."""

    def build(self) -> None:
        self.margin = self.bits / 12
        # As torch's linear layers.
        self.weight = nn.Parameter(
            (torch.rand(self.bits, SLICE, generator=self.draws) * 2 - 1) * (1 / math.sqrt(SLICE))
        )
        self.bias = nn.Parameter(torch.zeros(self.bits))

    def output_width(self) -> int:
        return self.bits * SLICE

    def encoded(self, raw: Tensor) -> Tensor:
        """s of the backbone's output, float [B, bits]."""
        slices = raw.relu().view(len(raw), self.bits, SLICE)
        return torch.sigmoid((slices * self.weight).sum(dim=2) + self.bias)

    def vectors(self, raw: Tensor) -> Tensor:
        """s - 0.5. The threshold moves no value across 0.5, so codes do not need it."""
        return self.encoded(raw) - 0.5

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        values = piecewise_threshold(self.encoded(self.raw(batch, amp)), EPSILON)
        # Not clamped at 0: the diagonal is never used.
        squares = values.square().sum(dim=1)
        distances = squares[:, None] + squares - 2 * values @ values.T
        return {"total": triplet_ranking(distances, batch.y, self.margin)}

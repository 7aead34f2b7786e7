"""Deep Quantization Network: Cao, Long, Wang, Zhu and Wen, "Deep Quantization Network for Efficient
Image Retrieval", AAAI 2016.

A bottleneck z = tanh(W f + b) is trained on pairs of labelled items and kept close to its product
quantisation::

    L = Σ_ij (s_ij - cos(z_i, z_j))²     s_ij = 1 where the two share a label, else -1
    Q = Σ_i ||z_i - C h_i||²             C block diagonal, h_i a codeword of each block
    min L + λ Q

alternately: the network by gradient, C and h by k-means in each part of z. Search uses the
asymmetric quantiser distance, Σ_m ||z_qm - C_m h_m||². Both sums are means (over pairs; over items
and dimensions), so that λ depends neither on the batch nor on D.

Deviations: codebooks are refitted after each pass over the labelled items, to the network's outputs
of that pass, and after the last step; λ applies from the first fit on. h of a batch is the
currently nearest codeword, not that of the last pass. λ = 0.03, chosen on held-out items; with ten
times as much the vectors shrink, and the ranking gets worse.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..faissio.kmeans import fit_codebooks
from .baseline import Alternating
from .coders import Floats, ProductCoder
from .trainable import TrainingBatch, weighted


def pairwise_cosine(z: Tensor, labels: Tensor) -> Tensor:
    """Mean of (s_ij - cos(z_i, z_j))² over all pairs of rows of vectors float [B, D] with multi-hot
    labels [B, C]."""
    unit = F.normalize(z, dim=1)
    target = 2 * (labels @ labels.T > 0).to(z.dtype) - 1
    return (target - unit @ unit.T).square().mean()


class DQN(Alternating):
    """See the module docstring."""

    weight = 0.03
    """λ of the quantisation loss."""

    def output_width(self) -> int:
        return self.M * self.d

    def nearest(self, z: Tensor) -> Tensor:
        """Return the nearest codewords C h, concatenated, float [B, M * d], of z [B, M * d]."""
        parts = z.reshape(len(z), self.M, self.d)
        half = 0.5 * self.codewords.square().sum(dim=2)
        best = (torch.einsum("bmd,mkd->bmk", parts, self.codewords) - half).argmax(dim=2)
        return self.codewords[torch.arange(self.M, device=z.device), best].flatten(1)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        z = self.outputs(batch, amp)
        parts = {
            "cosine": pairwise_cosine(z, batch.y),
            # A product, not a branch, so that a GPU need not synchronise.
            "quantisation": (z - self.nearest(z.detach())).square().mean() * self.fitted,
        }
        return weighted(parts, quantisation=self.weight)

    def refit(self, positions: Tensor, x: Floats) -> Floats:
        """k-means from the present codebooks on."""
        start = self.codewords.cpu().numpy() if bool(self.fitted) else None
        return fit_codebooks(x, self.M, self.K, start=start, seed=self.seed)

    def coder(self) -> ProductCoder:
        return ProductCoder(self.codewords.cpu().numpy(), "l2")

"""Product Quantization Network: Yu, Yuan, Fang and Jin, "Product Quantization Network for Fast
Image Retrieval", ECCV 2018.

A layer assigns each intra-normalised sub-vector softly to the codewords of its codebook, so that
the codewords are ordinary weights of the network; a triplet loss then compares vectors with
*quantised* vectors, as a search does::

    s_m = Σ_k softmax_k(α x_m·c_mk) c_mk     x_m and c_mk have length 1
    l   = 1 / (1 + exp(<x, s⁺> - <x, s⁻>))     asymmetric triplet loss, through a sigmoid (eq. 15)

As α grows, the layer approaches the hard assignment used to encode items. The score is Σ_m
x_m·c_m[b_m].

The full paper was not available: the loss is as cited by others. Deviations: triplets are all those
of a batch, not a selection per mini-epoch; sub-vectors have the length of the other methods
(``quantizer.subdim``); similarities are multiplied by ``scale`` = 8 in the loss, chosen on held-out
items; with the paper's 1 the sigmoid is nearly linear.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..losses.npair import label_pairs, masked_mean
from ..nn.quantizer import intra_normalize, random_directions, subspace_cosine, unit
from .baseline import Baseline
from .coders import ProductCoder
from .trainable import TrainingBatch


def asymmetric_triplets(x: Tensor, q: Tensor, labels: Tensor, *, scale: float = 8.0) -> Tensor:
    """Mean over all triplets (a, p, n) of σ(scale <x_a, q_n> - scale <x_a, q_p>), a scalar: eq. 15;
    0 without triplets.

    x are vectors and q quantised ones, float [B, D], with multi-hot labels [B, C]; O(B³) memory.
    """
    similarity = scale * (x @ q.T)
    positive, negative = label_pairs(labels)
    anchor, positive_row = positive.nonzero(as_tuple=True)
    loss = (similarity[anchor] - similarity[anchor, positive_row][:, None]).sigmoid()
    return masked_mean(loss, negative[anchor])


class PQN(Baseline):
    """See the module docstring."""

    alpha = 10.0
    """Sharpness of the soft assignment."""

    def build(self) -> None:
        self.codewords = random_directions(
            self.M, self.K, self.d, torch.Generator().manual_seed(self.seed)
        )

    def output_width(self) -> int:
        return self.M * self.d

    def vectors(self, raw: Tensor) -> Tensor:
        return intra_normalize(raw, self.M).flatten(1)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        x = intra_normalize(self.raw(batch, amp), self.M)
        Z = unit(self.codewords)
        weight = (self.alpha * subspace_cosine(x, Z)).softmax(dim=-1)
        # Unlike in GPQ's soft assignment, the result is not normalised: uncertain assignments are
        # short and count less.
        q = torch.einsum("bmk,mkd->bmd", weight, Z)
        return {"total": asymmetric_triplets(x.flatten(1), q.flatten(1), batch.y)}

    @torch.no_grad()
    def coder(self) -> ProductCoder:
        return ProductCoder(unit(self.codewords).cpu().numpy())

"""Deep Triplet Quantization: Liu, Cao, Long, Wang and Wang, "Deep Triplet Quantization", ACM Multimedia 2018.

Vectors z = tanh(W f + b) are trained on triplets of anchor, positive and negative, and kept close to sums of M full-width
codewords, one from each codebook::

    L = Σ max(0, ||z_a - z_p||² - ||z_a - z_n||² + δ)                                       triplet loss
    Q = Σ_i ||z_i - Σ_m C_m b_im||² + γ Σ_{m≠m'} ||C_mᵀ C_m'||²                              with weak orthogonality
    min L + λ Q

alternately: the network by gradient, the codes b by iterated conditional modes, each codebook in closed form. Weak orthogonality keeps
codebooks from being redundant. *Group hard* selects triplets: within a group of items, every pair of anchor and positive takes one
random negative among those that violate the margin. Search maximises the inner product of the query with Σ_m C_m b_m.

Both sums are means (over triplets; over items), so that λ does not depend on the batch.

Deviations:

* Groups are parts of the batch, of at most ``group`` items, not of the whole training set.
* Codebooks are initialised by residual k-means. Codes and codebooks are refitted after each pass over the labelled items, to the network's
  outputs of that pass, and after the last step; λ applies from the first fit on.
* Weak orthogonality is imposed between different codebooks. The paper's exact equation was not available.
* δ = 15, chosen on held-out items; 30 in the authors' published code for D = 64.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..losses.npair import label_pairs
from .additive import AdditiveCoder, iterated_conditional_modes, reconstruct, update_codebooks
from .baseline import Alternating, triplet_margin
from .coders import Floats
from .dqn import fit_product_codebooks
from .trainable import TrainingBatch

WIDTH = 64
"""D of the authors' experiments, for all code lengths."""


def group_hard_triplets(
    z: Tensor, labels: Tensor, margin: float, generator: torch.Generator, group: int = 250
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of anchors, positives and negatives, int64 [T] each, of vectors float [B, D] with multi-hot labels [B, C].

    In a group of consecutive rows every ordered pair that shares a label takes one random negative among the group's labelled rows that
    share none with the anchor and violate the margin: ||z_a - z_p||² - ||z_a - z_n||² + margin > 0; if there is one. ``generator`` is on
    the CPU.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    start = 0
    for zg, yg in zip(*(t.chunk(max(1, -(-len(z) // group))) for t in (z.detach(), labels)), strict=True):
        distance = torch.cdist(zg, zg).square()
        positive, negative = label_pairs(yg, zg)
        a, p = positive.nonzero(as_tuple=True)
        hard = negative[a] & (distance[a, p][:, None] - distance[a] + margin > 0)
        draw = torch.rand(hard.shape, generator=generator).to(z.device)
        best, n = draw.masked_fill(~hard, -1).max(dim=1) if len(a) else (draw.new_empty(0), a)
        there = best >= 0
        parts.append((start + a[there], start + p[there], start + n[there]))
        start += len(zg)
    a, p, n = (torch.cat(column) for column in zip(*parts, strict=True))
    return a, p, n


class DTQ(Alternating):
    """Network, codebooks, and the vectors and codes of the labelled items."""

    name = "dtq"
    margin = 15.0
    """δ, for vectors in (-1, 1)^D."""
    weight = 0.1
    """λ of the quantisation loss."""
    orthogonality = 1e-4
    """γ of weak orthogonality."""
    codes: Tensor

    def output_width(self) -> int:
        return WIDTH

    def first(self, draws: torch.Generator) -> Tensor:
        return torch.randn(self.M, self.K, WIDTH, generator=draws) / math.sqrt(self.M)

    def allocate(self, items: int) -> None:
        super().allocate(items)
        self.register_buffer("codes", torch.zeros(items, self.M, dtype=torch.uint8))

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The triplet loss of group-hard triplets and the quantisation loss."""
        z = self.outputs(batch, amp)
        a, p, n = group_hard_triplets(z, batch.y, self.margin, batch.generator)
        total = triplet_margin(z[a] - z[p], z[a] - z[n], self.margin)
        parts = {"triplet": total, "triplets": z.new_tensor(float(len(a)))}
        if bool(self.fitted):
            codes = self.codes[self.positions(batch)].long()
            sums = self.codewords[torch.arange(self.M, device=z.device), codes].sum(dim=1)
            parts["quantisation"] = (z - sums).square().sum(dim=1).mean()
            total = total + self.weight * parts["quantisation"]
        return {"total": total, **parts}

    def refit(self, at: Tensor, x: Floats) -> Floats:
        """Codes and codebooks in turns."""
        C = self.codewords.cpu().numpy() if bool(self.fitted) else self._first_codebooks(x)
        for _ in range(3):
            codes = iterated_conditional_modes(x, C, sweeps=3)
            C = update_codebooks(x, codes, C, orthogonality=self.orthogonality)
        codes = iterated_conditional_modes(x, C, sweeps=3)
        self.codes[at] = torch.from_numpy(codes).to(self.codes.device)
        return C

    def _first_codebooks(self, x: Floats) -> Floats:
        """Initial codebooks by residual k-means."""
        C = np.zeros((self.M, self.K, WIDTH), np.float32)
        residual = x.copy()
        for m in range(self.M):
            C[m] = fit_product_codebooks(residual, 1, self.K, seed=self.seed + m)[0]
            residual -= reconstruct(iterated_conditional_modes(residual, C[m : m + 1]), C[m : m + 1])
        return C

    def coder(self) -> AdditiveCoder:
        return AdditiveCoder(self.codewords.cpu().numpy())

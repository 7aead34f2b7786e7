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
* Codebooks are initialised by residual k-means.
* Codes and codebooks are refitted after each pass over the labelled items, to the network's outputs of that pass, and after the last
  step; λ applies from the first fit on.
* Weak orthogonality is imposed between different codebooks. The paper's exact equation was not available.
* δ = 15, chosen on held-out items of two seeds: 0.648 mAP at 12 bits, and 0.644 with 30, the value of the authors' published code
  for D = 64. The effect is small; that of λ from 0.02 to 0.5 is smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset
from ..data.reader import Reader
from ..errors import UsageError
from ..losses.npair import multihot
from ..nn.backbones import Backbone
from ..nn.model import build_extractor, input_description
from .additive import AdditiveCoder, iterated_conditional_modes, reconstruct, update_codebooks
from .base import Floats
from .dqn import BoundedNetwork, fit_product_codebooks
from .memory import TrainingVectors
from .trainable import TrainableMethod, TrainingBatch

WIDTH = 64
"""D of the authors' experiments, for all code lengths."""


def group_hard_triplets(
    z: Tensor, labels: Tensor, margin: float, generator: torch.Generator, group: int = 250
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of anchors, positives and negatives, int64 [T] each.

    Rows are split into consecutive groups. In a group every ordered pair of different rows that share a label takes one random
    negative among the group's rows that share no label with the anchor and violate the margin: ||z_a - z_p||² -
    ||z_a - z_n||² + margin > 0. A pair without such a row gives no triplet.

    Args:
        z: float [B, D].
        labels: multi-hot [B, C]; zero rows are ignored.
        margin: δ.
        generator: random generator on the CPU.
        group: maximum rows per group.
    """
    y = multihot(labels, z)
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    start = 0
    for zg, yg in zip(*(t.chunk(max(1, -(-len(z) // group))) for t in (z.detach(), y)), strict=True):
        distance = torch.cdist(zg, zg).square()
        shared = yg @ yg.T > 0
        known = yg.any(dim=1)
        positive = shared & ~torch.eye(len(zg), dtype=torch.bool, device=z.device)
        negative = ~shared & known & known[:, None]
        a, p = positive.nonzero(as_tuple=True)
        hard = negative[a] & (distance[a, p][:, None] - distance[a] + margin > 0)
        draw = torch.rand(hard.shape, generator=generator).to(z.device)
        best, n = draw.masked_fill(~hard, -1).max(dim=1) if len(a) else (draw.new_empty(0), a)
        there = best >= 0
        parts.append((start + a[there], start + p[there], start + n[there]))
        start += len(zg)
    a, p, n = (torch.cat(column) for column in zip(*parts, strict=True))
    return a, p, n


def triplet_margin_loss(z: Tensor, triplets: tuple[Tensor, Tensor, Tensor], margin: float) -> Tensor:
    """Mean over triplets of max(0, ||z_a - z_p||² - ||z_a - z_n||² + δ); 0 without triplets."""
    a, p, n = triplets
    near = (z[a] - z[p]).square().sum(dim=1)
    far = (z[a] - z[n]).square().sum(dim=1)
    return (near - far + margin).relu().sum() / max(1, len(a))


class DTQ(TrainableMethod):
    """Network, codebooks, and the vectors and codes of the labelled items.

    Args:
        backbone: of output width D.
        M, K: codebooks, and codewords per codebook.
        width: D.
        margin: δ, for vectors in (-1, 1)^D.
        weight: λ of the quantisation loss.
        orthogonality: γ of weak orthogonality.
        group: see :func:`group_hard_triplets`.
        seed: of the first codebooks.
    """

    name = "dtq"
    uses_unlabelled = False
    codewords: Tensor
    fitted: Tensor
    codes: Tensor

    def __init__(  # noqa: PLR0913
        self,
        backbone: Backbone,
        M: int,
        K: int = 16,
        width: int = WIDTH,
        *,
        margin: float = 15.0,
        weight: float = 0.1,
        orthogonality: float = 1e-4,
        group: int = 250,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if min(margin, weight, orthogonality) < 0:
            raise UsageError(
                f"dtq: margin {margin}, weight {weight} and orthogonality {orthogonality} cannot be negative"
            )
        self.network = BoundedNetwork(backbone)
        self.margin, self.weight, self.orthogonality, self.group = margin, weight, orthogonality, group
        self.seed = seed
        self.M, self.K, self.width = M, K, width
        generator = torch.Generator().manual_seed(seed + 1)
        # Used only to encode with an untrained network.
        self.register_buffer("codewords", torch.randn(M, K, width, generator=generator) / M**0.5)
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("codes", torch.empty(0, M, dtype=torch.uint8))
        self.memory = TrainingVectors(width)
        self._steps = 0
        self._batch = 1

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Allocate memory for the vectors and codes of the labelled items."""
        del reader, y
        self.memory.allocate(rows)
        self.codes = torch.zeros(len(rows), self.M, dtype=torch.uint8, device=self.codes.device)

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Store the number of the last step."""
        del step, sample
        self._steps = steps

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The triplet loss of group-hard triplets and the quantisation loss."""
        n = len(batch.y)
        self._batch = n
        with torch.autocast(batch.x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw = self.network.backbone(batch.x[:n])
        z = raw.float().tanh()
        self.memory.keep(batch.rows, z)
        chosen = group_hard_triplets(z, batch.y, self.margin, batch.generator, self.group)
        triplet = triplet_margin_loss(z, chosen, self.margin)
        parts = {"triplet": triplet, "triplets": z.new_tensor(float(len(chosen[0])))}
        total = triplet
        if bool(self.fitted):
            codes = self.codes[self.memory.positions(batch.rows)].long()
            sums = self.codewords[torch.arange(self.M, device=z.device), codes].sum(dim=1)
            parts["quantisation"] = (z - sums).square().sum(dim=1).mean()
            total = total + self.weight * parts["quantisation"]
        return {"total": total, **parts}

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Fit codes and codebooks after each pass over the labelled items, and after the last step."""
        each = max(1, -(-len(self.memory) // self._batch))
        if not len(self.memory) or ((step + 1) % each and step + 1 != self._steps):
            return
        at, vectors = self.memory.known()
        x = vectors.cpu().numpy()
        C = self.codewords.cpu().numpy() if bool(self.fitted) else self._first_codebooks(x)
        for _ in range(3):
            codes = iterated_conditional_modes(x, C, sweeps=3)
            C = update_codebooks(x, codes, C, orthogonality=self.orthogonality)
        codes = iterated_conditional_modes(x, C, sweeps=3)
        self.codewords.copy_(torch.from_numpy(C))
        self.codes[at] = torch.from_numpy(codes).to(self.codes.device)
        self.fitted.fill_(True)

    def _first_codebooks(self, x: Floats) -> Floats:
        """Initial codebooks by residual k-means."""
        C = np.zeros((self.M, self.K, self.width), np.float32)
        residual = x.copy()
        for m in range(self.M):
            C[m] = fit_product_codebooks(residual, 1, self.K, seed=self.seed + m)[0]
            residual -= reconstruct(iterated_conditional_modes(residual, C[m : m + 1]), C[m : m + 1])
        return C

    def exported(self) -> nn.Module:
        """The backbone with tanh."""
        return self.network

    def coder(self) -> AdditiveCoder:
        """Coder of the codebooks, inner product."""
        return AdditiveCoder(self.codewords.cpu().numpy())


def build(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> DTQ:
    """An untrained DTQ for ``dataset``."""
    del n_classes
    q, seed = config.quantizer, config.training.seed
    generator = torch.Generator().manual_seed(seed)
    backbone = build_extractor(config, input_description(dataset, image_size), WIDTH, generator)
    return DTQ(backbone, q.codebooks, q.codewords, seed=seed)

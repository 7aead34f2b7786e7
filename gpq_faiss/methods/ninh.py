"""Network-in-network hashing (Lai, Pan, Liu and Yan, "Simultaneous Feature Learning and Hash Coding with Deep Neural Networks", CVPR
2015; also DNNH): triplets in the unit cube, one small layer per bit.

*Divide and encode* (sect. 3.2): the network's features, 50 per bit, are divided into one slice per bit; each slice has a fully
connected unit with a sigmoid s = 1 / (1 + exp(-β v)), and a piece-wise threshold that makes most values 0 or 1 in training:

    g(s) = 0 if s < 0.5 - ε,    s if 0.5 - ε <= s <= 0.5 + ε,    1 if s > 0.5 + ε.

*Triplet ranking loss* (eq. 2), for an item, a similar and a dissimilar one, on F in [0, 1]^bits:

    max(0, 1 + ||F(I) - F(I+)||² - ||F(I) - F(I-)||²).

A bit is F > 0.5; codes are compared by Hamming distance. Supervised: unlabelled items are not used. Items that
share a label are similar.

Deviations: the shared backbone replaces the network in network, with a ReLU after its layer to the 50 features per bit (in the paper
averages of ReLUs); all triplets of a batch are used, not a random sample; β and ε are 1 and 0.4 (an ε of 0.1 loses
0.09 at 12 bits, none at all gains nothing). With a margin of 1 for every length, most triplets of long codes soon
have no loss, so it is bits / 12: the paper's for 12 bits, 4 for 48. mAP on a held-out tenth of the labelled CIFAR-10 features:
at 48 bits 0.55 with a margin of 1, 0.59 with 4, 0.55 with 12; at 12 bits 0.57 with 1, 0.50 with 3.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset
from ..errors import UsageError
from ..losses.npair import multihot
from ..nn.backbones import Backbone
from ..nn.model import build_extractor, input_description
from .coders import SignCoder
from .trainable import TrainableMethod, TrainingBatch

SLICE = 50
"""Features per bit, as in the paper."""


class DivideAndEncode(nn.Module):
    """From features [B, bits · slice] to values in [0, 1], one per slice.

    Args:
        bits: number of slices.
        slice_width: features per slice.
        beta: β of the sigmoid.
        epsilon: ε of the piece-wise threshold; 0.5 or more disables it.
        generator: for the initial weights.
    """

    def __init__(
        self, bits: int, slice_width: int, beta: float, epsilon: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.beta = beta
        self.epsilon = epsilon
        # Initialised like torch's linear layers with `slice_width` inputs.
        bound = 1 / math.sqrt(slice_width)
        self.weight = nn.Parameter((torch.rand(bits, slice_width, generator=generator) * 2 - 1) * bound)
        self.bias = nn.Parameter(torch.zeros(bits))

    def before_threshold(self, features: Tensor) -> Tensor:
        """s, float [B, bits]."""
        slices = features.view(len(features), *self.weight.shape)
        return torch.sigmoid(self.beta * ((slices * self.weight).sum(dim=2) + self.bias))

    def forward(self, features: Tensor) -> Tensor:
        """g(s), float [B, bits]."""
        return piecewise_threshold(self.before_threshold(features), self.epsilon)


def piecewise_threshold(s: Tensor, epsilon: float) -> Tensor:
    """Values above 0.5 + ε become 1, values below 0.5 - ε become 0, without gradient; others are unchanged."""
    s = torch.where(s > 0.5 + epsilon, torch.ones_like(s), s)
    return torch.where(s < 0.5 - epsilon, torch.zeros_like(s), s)


def triplet_ranking_loss(values: Tensor, labels: Tensor, margin: float = 1.0) -> Tensor:
    """Mean of max(0, margin + ||f_a - f_p||² - ||f_a - f_n||²) over all triplets of a batch (eq. 2), a scalar.

    p is another row that shares a label with a, n shares none; unlabelled rows are ignored. A batch without triplets has loss 0.
    Memory is O(B²): among an anchor's sorted negatives those within the margin come first, so their sum is a prefix sum.

    Args:
        values: float [B, bits].
        labels: multi-hot [B, C].
        margin: 1 in the paper.
    """
    y = multihot(labels, values)
    known = y.any(dim=1)
    shared = y @ y.T > 0
    positive = shared & ~torch.eye(len(y), dtype=torch.bool, device=y.device)
    negative = ~shared & known & known[:, None]
    # From squares and products, to avoid [B, B, bits] differences. The diagonal is never used.
    squares = values.square().sum(dim=1)
    distance = squares[:, None] + squares - 2 * values @ values.T
    # Squared distances are at most the number of bits; non-negatives sort behind them.
    beyond = 4.0 * values.shape[1] + 4 * margin + 4
    ordered = distance.masked_fill(~negative, beyond).sort(dim=1).values
    sums = torch.nn.functional.pad(ordered.cumsum(dim=1), (1, 0))
    limit = distance + margin
    # Number of negatives nearer than the limit, for every pair of anchor and positive.
    near = torch.searchsorted(ordered.detach(), limit.detach().contiguous())
    near = torch.minimum(near, negative.sum(dim=1, keepdim=True))
    lost = near * limit - sums.gather(1, near)
    triplets = (positive.sum(dim=1) * negative.sum(dim=1)).sum()
    return (lost * positive).sum() / triplets.clamp_min(1)


class _Network(nn.Module):
    """Input to F - 0.5, float [B, bits]: a bit is 1 if it is above 0."""

    def __init__(self, backbone: Backbone, encode: DivideAndEncode) -> None:
        super().__init__()
        self.backbone = backbone
        self.encode = encode

    def features(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        # The threshold moves no value across 0.5, so codes do not need it.
        return self.encode.before_threshold(self.features(x).float().relu()) - 0.5


class NINH(TrainableMethod):
    """Triplet ranking with divide-and-encode.

    Args:
        config: of the run; ``config.quantizer.bits`` is the code length.
        input_: description of the items, see :func:`~gpq_faiss.nn.model.input_description`.
        slice_width: features per bit.
        beta: of the sigmoid.
        epsilon: of the piece-wise threshold.
        margin: of the triplets; by default bits / 12.

    Raises:
        UsageError: a hyper-parameter out of range.
    """

    name = "ninh"
    uses_unlabelled = False

    def __init__(
        self,
        config: Config,
        input_: dict[str, object],
        *,
        slice_width: int = SLICE,
        beta: float = 1.0,
        epsilon: float = 0.4,
        margin: float | None = None,
    ) -> None:
        super().__init__()
        if slice_width < 1 or beta <= 0 or epsilon <= 0 or (margin or 0) < 0:
            raise UsageError(
                f"{self.name}: slice_width, beta and epsilon must be above 0, the margin not negative"
            )
        self.bits = config.quantizer.bits
        self.margin = self.bits / 12 if margin is None else margin
        generator = torch.Generator().manual_seed(config.training.seed)
        backbone = build_extractor(config, input_, self.bits * slice_width, generator)
        self.network = _Network(backbone, DivideAndEncode(self.bits, slice_width, beta, epsilon, generator))

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The triplet ranking loss of the labelled items."""
        x = batch.x[: len(batch.y)]
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            features = self.network.features(x)
        values = self.network.encode(features.float().relu())
        return {"total": triplet_ranking_loss(values, batch.y, self.margin)}

    def exported(self) -> nn.Module:
        """The network up to F - 0.5."""
        return self.network

    def coder(self) -> SignCoder:
        """A bit is 1 if F > 0.5."""
        return SignCoder(self.bits)


def build(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> NINH:
    """An untrained NINH for ``dataset``."""
    del n_classes
    return NINH(config, input_description(dataset, image_size))

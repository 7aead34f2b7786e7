"""What the trained methods of other papers share: the backbone of all methods, a function of its
output, and refitted codebooks."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset, Reader
from ..losses.npair import label_pairs
from ..nn.backbones import build_extractor, input_description
from .coders import Coder, Floats, SignCoder
from .trainable import TrainableMethod, TrainingBatch, run_network


class Baseline(TrainableMethod):
    """A trained method, coded by the signs of its network's outputs unless it has another coder; a
    :data:`.registry.Builder`.

    Sub-classes may have another :meth:`output_width` and other :meth:`vectors`, and add their own
    parts in :meth:`build`, with initial weights from ``draws``, which the backbone used first.
    """

    uses_unlabelled = False

    def __init__(self, config: Config, dataset: Dataset, image_size: int, n_classes: int) -> None:
        super().__init__()
        q = config.quantizer
        self.bits, self.M, self.K, self.d = q.bits, q.codebooks, q.codewords, q.subdim
        self.config = config
        self.items = len(dataset)
        self.n_classes = n_classes
        self.seed = config.training.seed
        self.draws = torch.Generator().manual_seed(self.seed)
        self.backbone = build_extractor(
            config, input_description(dataset, image_size), self.output_width(), self.draws
        )
        self.build()

    def forward(self, x: Tensor) -> Tensor:
        """The exported vectors of items, float32 [B, E]."""
        return self.vectors(self.backbone(x).float())

    def output_width(self) -> int:
        """Width of the backbone's output."""
        return self.bits

    def vectors(self, raw: Tensor) -> Tensor:
        """The exported vectors of the backbone's output."""
        return raw

    def build(self) -> None:
        """Add what the method has beside the backbone."""

    def raw(self, batch: TrainingBatch, amp: bool) -> Tensor:
        """The backbone's output for the labelled items of a batch, float32 [B, width]."""
        return run_network(self.backbone, batch.x[: len(batch.y)], amp)

    def coder(self) -> Coder:
        """Coder of the signs, Hamming distance."""
        return SignCoder(self.bits)


class Alternating(Baseline):
    """A method that refits its codebooks between steps: after each pass over the labelled items, to
    the network's outputs of that pass, and after the last step. Vectors are tanh of the backbone's
    output.

    In the state, for checkpoints: the ``latest`` vector of each labelled item, zeros before its
    first; and the ``codewords``, float32 [M, K, d], zeros until they are ``fitted``.
    """

    def build(self) -> None:
        self.codewords = nn.Buffer(torch.zeros(self.M, self.K, self.d))
        self.fitted = nn.Buffer(torch.zeros((), dtype=torch.bool))

    @abstractmethod
    def refit(self, positions: Tensor, x: Floats) -> Floats:
        """Return new codewords for vectors ``x`` float32 [n, width] of the labelled items at
        ``positions`` int64 [n]."""

    def vectors(self, raw: Tensor) -> Tensor:
        return raw.tanh()

    def fit_labels(
        self, reader: Reader, rows: NDArray[np.int64], y: Floats, unlabelled: NDArray[np.int64]
    ) -> None:
        self.latest = nn.Buffer(torch.zeros(len(rows), self.output_width()))

    def outputs(self, batch: TrainingBatch, amp: bool) -> Tensor:
        """The vectors of the labelled items, float32 [B, width], which are stored."""
        z = self.vectors(self.raw(batch, amp))
        self.latest[batch.positions] = z.detach()
        return z

    @torch.no_grad()
    def after_step(self, step: int, steps: int) -> None:
        steps_per_pass = -(-len(self.latest) // self.config.training.batch_labelled)
        if (step + 1) % steps_per_pass == 0 or step + 1 == steps:
            positions = self.latest.any(dim=1).nonzero()[:, 0]
            codewords = self.refit(positions, self.latest[positions].cpu().numpy())
            self.codewords.copy_(torch.from_numpy(codewords))
            self.fitted.fill_(True)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||², float [n, m] >= 0, of float [n, D] and [m, D]."""
    return (a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T).clamp_min(0)


def triplet_ranking(distances: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean of max(0, margin + d(a, p) - d(a, n)) over *all* triplets, of distances float [B, B] and
    multi-hot labels [B, C]; 0 without any.

    p is another row that shares a label with a, n a labelled one that shares none. Those of an
    anchor's sorted negatives within the margin come first, so their sum is a prefix sum: O(B²)
    memory and O(B² log B) time for B³ triplets.
    """
    positive, negative = label_pairs(labels)
    ordered = distances.masked_fill(~negative, torch.inf).sort(dim=1).values
    prefix = F.pad(ordered.masked_fill(ordered.isinf(), 0).cumsum(dim=1), (1, 0))
    bound = distances + margin
    inside = torch.searchsorted(ordered.detach(), bound.detach().contiguous())
    loss = (inside * bound - prefix.gather(1, inside)).masked_fill(~positive, 0).sum()
    triplets = (positive.sum(dim=1) * negative.sum(dim=1)).sum()
    return loss / triplets.clamp_min(1)


def triplet_margin(to_positive: Tensor, to_negative: Tensor, margin: float) -> Tensor:
    """Mean of max(0, margin + ||a - p||² - ||a - n||²), of the differences a - p and a - n, float
    [T, D] each; 0 without any."""
    lead = to_positive.square().sum(dim=1) - to_negative.square().sum(dim=1)
    return (lead + margin).relu().sum() / max(1, len(lead))


def start_small(layer: nn.Linear, draws: torch.Generator) -> None:
    """Initialise a hash layer with normal weights of standard deviation 0.005, as the authors of
    SSDH do: larger ones give random codes, which the losses first have to undo (BGDH, CIFAR-10
    features, 48 bits, 500 steps: mAP 0.38 with Xavier weights, 0.54 with these)."""
    nn.init.normal_(layer.weight, std=0.005, generator=draws)
    nn.init.zeros_(layer.bias)

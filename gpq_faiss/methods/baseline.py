"""What the trained methods of other papers share: the extractor of all methods, a function of its output, and refitted codebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset
from ..data.reader import Reader
from ..losses.npair import label_pairs
from ..nn.backbones import Backbone
from ..nn.model import build_extractor, input_description
from .base import Coder
from .coders import SignCoder
from .trainable import TrainableMethod, TrainingBatch


def half_precision(x: Tensor, amp: bool) -> AbstractContextManager[None]:
    """Context of bf16 on the device of ``x``, if ``amp``."""
    return torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp)


class Output(nn.Module):
    """The extractor and a function of its output: input to vectors float32 [B, E]."""

    def __init__(self, backbone: Backbone, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.backbone = backbone
        self.then = then

    def forward(self, x: Tensor, normalised: bool = False) -> Tensor:
        """The vectors of items, or of items after the extractor's normalisation."""
        backbone = self.backbone
        v = x if normalised else backbone.input(x)
        return self.then(backbone.head(backbone.trunk_features(v)).float())


class Baseline(TrainableMethod):
    """A trained method, coded by the signs of its network's outputs unless it has another coder; a :data:`.registry.Builder`.

    Sub-classes may have another :meth:`output_width` and other :meth:`vectors`, and add parameters of their own.

    Attributes:
        network: input to exported vectors.
        draws: random generator of the initial weights, used by the extractor first.
    """

    uses_unlabelled = False

    def __init__(self, config: Config, dataset: Dataset, image_size: int, n_classes: int) -> None:
        super().__init__()
        q = config.quantizer
        self.bits, self.M, self.K, self.d = q.bits, q.codebooks, q.codewords, q.subdim
        self.n_classes, self.seed = n_classes, config.training.seed
        self.draws = torch.Generator().manual_seed(self.seed)
        description = input_description(dataset, image_size)
        backbone = build_extractor(config, description, self.output_width(), self.draws)
        self.network: nn.Module = Output(backbone, self.vectors)

    def output_width(self) -> int:
        """Width of the extractor's output; by default one number per bit."""
        return self.bits

    def vectors(self, raw: Tensor) -> Tensor:
        """The exported vectors of the extractor's output; by default unchanged."""
        return raw

    @property
    def extractor(self) -> Backbone:
        """The extractor in :attr:`network`."""
        return cast(Backbone, self.network.backbone)

    def raw(self, batch: TrainingBatch, amp: bool) -> Tensor:
        """The extractor's output for the labelled items of a batch, float32 [B, width]."""
        x = batch.x[: len(batch.y)]
        with half_precision(x, amp):
            raw: Tensor = self.extractor(x)
        return raw.float()

    def exported(self) -> nn.Module:
        """The network."""
        return self.network

    def coder(self) -> Coder:
        """Coder of the signs, Hamming distance."""
        return SignCoder(self.bits)


class Alternating(Baseline):
    """A method that refits its codebooks between steps: after each pass over the labelled items, to the network's outputs of that pass, and
    after the last step. Vectors are tanh of the extractor's output.

    Attributes:
        rows, kept, seen: of the labelled items, ascending; the latest vector of each, and whether there is one. Buffers, so that
            checkpoints include them.
        codewords: of the coder; random until they are ``fitted``, to encode with an untrained network.
    """

    rows: Tensor
    kept: Tensor
    seen: Tensor
    codewords: Tensor
    fitted: Tensor

    def __init__(self, config: Config, dataset: Dataset, image_size: int, n_classes: int) -> None:
        super().__init__(config, dataset, image_size, n_classes)
        self.register_buffer("codewords", self.first(torch.Generator().manual_seed(self.seed + 1)))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.allocate(np.empty(0, np.int64))
        self._steps = 0
        self._batch = 1

    def first(self, draws: torch.Generator) -> Tensor:
        """Random codewords."""
        raise NotImplementedError

    def refit(self, at: Tensor, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """New codewords for vectors ``x`` float32 [n, width] of the items ``at`` int64 [n]."""
        raise NotImplementedError

    def vectors(self, raw: Tensor) -> Tensor:
        """Vectors in (-1, 1)."""
        return raw.tanh()

    def allocate(self, rows: NDArray[np.int64]) -> None:
        """Memory for the vectors of the labelled items ``rows``."""
        n, device = len(rows), self.codewords.device
        self.register_buffer("rows", torch.from_numpy(np.array(rows)).to(device))
        self.register_buffer("kept", torch.zeros(n, self.output_width(), device=device))
        self.register_buffer("seen", torch.zeros(n, dtype=torch.bool, device=device))

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Allocate the memory."""
        self.allocate(rows)

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Store the number of the last step."""
        self._steps = steps

    def positions(self, batch: TrainingBatch) -> Tensor:
        """Indices int64 [B] of the labelled items of a batch in :attr:`rows`."""
        return torch.searchsorted(self.rows, torch.from_numpy(np.array(batch.rows)).to(self.rows.device))

    def outputs(self, batch: TrainingBatch, amp: bool) -> Tensor:
        """The vectors of the labelled items, float32 [B, width], which are kept."""
        z = self.vectors(self.raw(batch, amp))
        self._batch = len(z)
        if len(self.rows):
            at = self.positions(batch)
            self.kept[at] = z.detach()
            self.seen[at] = True
        return z

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Refit when it is due."""
        each = max(1, -(-len(self.rows) // self._batch))
        if not len(self.rows) or ((step + 1) % each and step + 1 != self._steps):
            return
        at = self.seen.nonzero()[:, 0]
        codewords = self.refit(at, self.kept[at].cpu().numpy())
        self.codewords.copy_(torch.from_numpy(codewords))
        self.fitted.fill_(True)


def squared_distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||², float [n, m] >= 0, of float [n, D] and [m, D]."""
    with torch.autocast(a.device.type, enabled=False):
        squares = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
    return squares.clamp_min(0)


def triplet_ranking(distances: Tensor, labels: Tensor, margin: float) -> Tensor:
    """Mean of max(0, margin + d(a, p) - d(a, n)) over *all* triplets, of distances float [B, B] and multi-hot labels [B, C]; 0 without any.

    p is another row that shares a label with a, n one that shares none; unlabelled rows are ignored. Among an anchor's sorted
    negatives those within the margin come first, so their sum is a prefix sum: O(B²) memory and O(B² log B) time for B³ triplets.
    """
    positive, negative = label_pairs(labels, distances)
    ordered = distances.masked_fill(~negative, torch.inf).sort(dim=1).values
    prefix = F.pad(ordered.masked_fill(ordered.isinf(), 0).cumsum(dim=1), (1, 0))
    bound = distances + margin
    inside = torch.searchsorted(ordered.detach(), bound.detach().contiguous())
    loss = (inside * bound - prefix.gather(1, inside)).masked_fill(~positive, 0).sum()
    triplets = (positive.sum(dim=1) * negative.sum(dim=1)).sum()
    return loss / triplets.clamp_min(1)


def make_linear(width: int, out: int, draws: torch.Generator) -> nn.Linear:
    """A linear layer with Xavier-uniform weights from a generator and zero bias."""
    layer = nn.Linear(width, out)
    nn.init.xavier_uniform_(layer.weight, generator=draws)
    nn.init.zeros_(layer.bias)
    return layer


def start_small(layer: nn.Linear, draws: torch.Generator) -> None:
    """Initialise a hash layer with normal weights of standard deviation 0.005, as the authors of SSDH do.

    Larger weights give random codes that the losses first have to undo. BGDH on the CIFAR-10 features at
    48 bits, 500 steps: mAP 0.38 with Xavier weights, 0.54 with these.
    """
    nn.init.normal_(layer.weight, std=0.005, generator=draws)
    nn.init.zeros_(layer.bias)

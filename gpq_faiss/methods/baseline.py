"""What the trained methods of other papers share: the extractor of all methods, a function of its output, and refitted codebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Dataset
from ..data.reader import Reader
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

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.backbone(x).float())


class Baseline(TrainableMethod):
    """A trained method, coded by the signs of its network's outputs unless it has another coder.

    Args:
        config, dataset, image_size: as for a :data:`.registry.Builder`.
        width: of the extractor's output.
        then: from this output to the exported vectors; default: unchanged.

    Attributes:
        network: input to exported vectors.
        draws: random generator of the initial weights, used by the extractor first.
    """

    uses_unlabelled = False

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        image_size: int,
        width: int,
        then: Callable[[Tensor], Tensor] = lambda raw: raw,
    ) -> None:
        super().__init__()
        q = config.quantizer
        self.bits, self.M, self.K, self.d = q.bits, q.codebooks, q.codewords, q.subdim
        self.seed = config.training.seed
        self.draws = torch.Generator().manual_seed(self.seed)
        backbone = build_extractor(config, input_description(dataset, image_size), width, self.draws)
        self.network: nn.Module = Output(backbone, then)

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
    after the last step.

    Attributes:
        rows, vectors, seen: of the labelled items, ascending; the latest output of each, and whether there is one. Buffers, so that
            checkpoints include them.
        codewords: of the coder; random until they are ``fitted``, to encode with an untrained network.
    """

    rows: Tensor
    vectors: Tensor
    seen: Tensor
    codewords: Tensor
    fitted: Tensor

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        image_size: int,
        width: int,
        codewords: Callable[[torch.Generator], Tensor],
    ) -> None:
        super().__init__(config, dataset, image_size, width, torch.tanh)
        self.register_buffer("codewords", codewords(torch.Generator().manual_seed(self.seed + 1)))
        self.register_buffer("fitted", torch.zeros((), dtype=torch.bool))
        self.register_buffer("rows", torch.empty(0, dtype=torch.int64))
        self.register_buffer("vectors", torch.empty(0, width))
        self.register_buffer("seen", torch.empty(0, dtype=torch.bool))
        self._steps = 0
        self._batch = 1

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Allocate memory for the vectors of the labelled items."""
        del reader, y
        device = self.vectors.device
        self.rows = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
        self.vectors = torch.zeros(len(rows), self.vectors.shape[1], device=device)
        self.seen = torch.zeros(len(rows), dtype=torch.bool, device=device)

    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Store the number of the last step."""
        del step, sample
        self._steps = steps

    def positions(self, batch: TrainingBatch) -> Tensor:
        """Indices int64 [B] of the labelled items of a batch in :attr:`rows`."""
        return torch.searchsorted(
            self.rows, torch.from_numpy(np.ascontiguousarray(batch.rows)).to(self.rows.device)
        )

    def outputs(self, batch: TrainingBatch, amp: bool) -> Tensor:
        """The vectors of the labelled items, float32 [B, width], which are kept."""
        z = self.raw(batch, amp).tanh()
        self._batch = len(z)
        if len(self.rows):
            at = self.positions(batch)
            self.vectors[at] = z.detach()
            self.seen[at] = True
        return z

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        """Refit when it is due."""
        each = max(1, -(-len(self.rows) // self._batch))
        if not len(self.rows) or ((step + 1) % each and step + 1 != self._steps):
            return
        at = self.seen.nonzero()[:, 0]
        codebooks = self.refit(at, self.vectors[at].cpu().numpy())
        self.codewords.copy_(torch.from_numpy(codebooks))
        self.fitted.fill_(True)

    def refit(self, at: Tensor, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """New codebooks for vectors ``x`` float32 [n, width] of the items ``at`` int64 [n]."""
        raise NotImplementedError

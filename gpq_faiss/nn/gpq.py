"""The network of GPQ: a backbone, its codewords Z and the sub-prototypes W of the cosine classifier; and the base of all networks."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ..config import Config
from .backbones import Backbone
from .quantizer import Codebooks, at_least_float32, intra_normalize, reexpress


class CodeNetwork(nn.Module):
    """From images or features to item and query vectors, M sub-vectors of unit norm, with the codebooks of the items.

    Attributes:
        asymmetric: whether queries and items have different vectors.
        items_are_codewords: whether item vectors consist of codewords.
    """

    asymmetric = False
    items_are_codewords = False
    M: int

    def codebooks(self) -> Tensor:
        """The codewords to export, float [M, K, d], unit-norm."""
        raise NotImplementedError

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """Sub-vectors of any length, float32 [B, M·d], of items or queries; with ``amp``, the backbone runs in bf16."""
        raise NotImplementedError

    def finish(self, raw: Tensor) -> Tensor:
        """Sub-vectors of :meth:`raw` made unit-norm, float32 [B, M·d]."""
        return intra_normalize(raw, self.M).flatten(1)

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors float32 [B, M·d], for searching an index."""
        return self.finish(self.raw(x, queries=True))

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors to quantise, float32 [B, M·d]."""
        return self.finish(self.raw(x))


class GPQNetwork(CodeNetwork):
    """From images or features to intra-normalised vectors: a backbone to float [B, M·d], M codebooks of K codewords, C classes, and the
    sharpness α of the soft assignment from Z and W to z'; ``generator`` draws the initial codewords and prototypes."""

    def __init__(self, config: Config, backbone: Backbone, C: int, generator: torch.Generator) -> None:
        super().__init__()
        q = config.quantizer
        self.backbone = backbone
        self.codewords = Codebooks(q.codebooks, q.codewords, q.subdim, generator=generator)
        self.classifier = Codebooks(q.codebooks, C, q.subdim, generator=generator)
        self.M, self.alpha = q.codebooks, config.alpha

    def codebooks(self) -> Tensor:
        """z', float [M, K, d], unit-norm: the codebooks in training, encoding and export."""
        return reexpress(self.codewords.raw, self.classifier.raw, self.alpha)

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        # No more than the backbone: cosines times α = 20 need more than eight bits. An exported graph has no such region.
        with torch.autocast(x.device.type, dtype=torch.bfloat16) if amp else nullcontext():
            return at_least_float32(self.backbone(x))

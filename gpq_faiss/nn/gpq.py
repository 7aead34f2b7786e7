"""The network of GPQ: a backbone, its codewords Z and the sub-prototypes W of the cosine classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .quantizer import Codebooks, SubspaceClassifier, intra_normalize, reexpress


class GPQNetwork(nn.Module):
    """Images or features to intra-normalised vectors, with the codebooks that quantise them.

    Args:
        backbone: input to float [B, M·d].
        M: codebooks.
        K: codewords of each.
        d: dimensions of a sub-vector.
        C: classes.
        alpha: scale of the soft assignment that makes z' of Z and W.
        generator: source of the first codewords and prototypes.
    """

    def __init__(
        self, backbone: nn.Module, M: int, K: int, d: int, C: int, *, alpha: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.codewords = Codebooks(M, K, d, generator=generator)
        self.classifier = SubspaceClassifier(M, C, d, generator=generator)
        self.M = M
        self.alpha = alpha

    def codebooks(self) -> Tensor:
        """z', float [M, K, d], unit-norm: what trains, encodes and is exported."""
        return reexpress(self.codewords.raw, self.classifier.raw, self.alpha)

    def forward(self, x: Tensor) -> Tensor:
        """The vector that is quantised, float32 [B, M·d], each of its M sub-vectors unit-norm."""
        return intra_normalize(self.backbone(x), self.M).flatten(1)

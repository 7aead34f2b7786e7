"""The network of GPQ: a backbone, its codewords Z and the sub-prototypes W of the cosine classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .quantizer import Codebooks, SubspaceClassifier, intra_normalize, reexpress


class GPQNetwork(nn.Module):
    """From images or features to intra-normalised vectors, with the codebooks that quantise them.

    Args:
        backbone: input to float [B, M·d].
        M: codebooks.
        K: codewords per codebook.
        d: dimensions of a sub-vector.
        C: classes.
        alpha: sharpness α of the soft assignment from Z and W to z'.
        generator: for the initial codewords and prototypes.
    """

    asymmetric = False
    """Whether queries and items have different vectors."""
    items_are_codewords = False
    """Whether item vectors consist of codewords."""

    def __init__(
        self,
        backbone: nn.Module,
        M: int,
        K: int,
        d: int,
        C: int,
        *,
        alpha: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.codewords = Codebooks(M, K, d, generator=generator)
        self.classifier = SubspaceClassifier(M, C, d, generator=generator)
        self.M = M
        self.alpha = alpha

    def codebooks(self) -> Tensor:
        """z', float [M, K, d], unit-norm: the codebooks in training, encoding and export."""
        return reexpress(self.codewords.raw, self.classifier.raw, self.alpha)

    def directions(self, raw: Tensor) -> Tensor:
        """The backbone's output [B, M·d] as unit-norm sub-vectors [B, M, d] to classify and quantise."""
        return intra_normalize(raw, self.M)

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """The backbone's output float32 [B, M·d]; the same for items and queries."""
        del queries
        # Only the backbone runs in bf16: cosines times α = 20 need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw: Tensor = self.backbone(x)
        return raw.float()

    def finish(self, raw: Tensor) -> Tensor:
        """From the backbone's output to the quantised vector, float32 [B, M·d], each of the M sub-vectors unit-norm."""
        return self.directions(raw).flatten(1)

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors: as :meth:`forward`."""
        return self.finish(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors to quantise, float32 [B, M·d], each of the M sub-vectors unit-norm."""
        return self.finish(self.backbone(x))

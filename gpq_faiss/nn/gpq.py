"""The network of GPQ: a backbone, its codewords Z and the sub-prototypes W of the cosine classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .quantizer import Codebooks, SubspaceClassifier, intra_normalize, reexpress, soft_assign


class GPQNetwork(nn.Module):
    """Images or features to intra-normalised vectors, with the codebooks that quantise them.

    Args:
        backbone: input to float [B, M·d].
        M: codebooks.
        K: codewords of each.
        d: dimensions of a sub-vector.
        C: classes.
        alpha: scale of the soft assignment that makes z' of Z and W.
        reexpress_vectors: quantise x' = s(x; α, W) instead of x. The codewords are z' = s(z; α, W) anyway and lie in the cone
            of the sub-prototypes; so do the vectors then, as mixtures of classes by their posterior. Not in the paper.
        generator: source of the first codewords and prototypes.
    """

    asymmetric = False
    """Whether queries have vectors of their own."""
    items_are_codewords = False
    """Whether an item's vector is the codewords of its code already."""

    def __init__(
        self,
        backbone: nn.Module,
        M: int,
        K: int,
        d: int,
        C: int,
        *,
        alpha: float,
        reexpress_vectors: bool = False,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.codewords = Codebooks(M, K, d, generator=generator)
        self.classifier = SubspaceClassifier(M, C, d, generator=generator)
        self.M = M
        self.alpha = alpha
        self.reexpress_vectors = reexpress_vectors
        if reexpress_vectors and d >= C:
            # Classes that have nothing in common at first: mixtures of them then tell how much of each they hold.
            with torch.no_grad():
                self.classifier.raw.copy_(
                    torch.linalg.qr(self.classifier.raw.transpose(1, 2))[0].transpose(1, 2)
                )

    def codebooks(self) -> Tensor:
        """z', float [M, K, d], unit-norm: what trains, encodes and is exported."""
        return reexpress(self.codewords.raw, self.classifier.raw, self.alpha)

    def directions(self, raw: Tensor) -> Tensor:
        """The backbone's output [B, M·d] as unit-norm sub-vectors [B, M, d], for the classifier."""
        return intra_normalize(raw, self.M)

    def vectors(self, directions: Tensor) -> Tensor:
        """What is quantised of the directions [B, M, d]: themselves, or re-expressed."""
        if self.reexpress_vectors:
            return soft_assign(directions, self.classifier.raw, self.alpha)
        return directions

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """The backbone's output float32 [B, M·d]; the same for items and queries."""
        del queries
        # Only the backbone runs in bf16: cosines times α = 20 need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw: Tensor = self.backbone(x)
        return raw.float()

    def finish(self, raw: Tensor) -> Tensor:
        """What is quantised of the backbone's output, float32 [B, M·d], each of the M sub-vectors unit-norm."""
        return self.vectors(self.directions(raw)).flatten(1)

    def queries(self, x: Tensor) -> Tensor:
        """What an index is searched with: as :meth:`forward`."""
        return self.finish(self.backbone(x))

    def forward(self, x: Tensor) -> Tensor:
        """The vector that is quantised, float32 [B, M·d], each of its M sub-vectors unit-norm."""
        return self.finish(self.backbone(x))

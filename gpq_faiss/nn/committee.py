"""A GPQ network that codes what a committee of classifiers believes. Not in the paper.

    x ─► trunk ─┬─► N class networks ─► mean posterior p ─┐
                └────────────────────────────────────────┴─► item vectors (codes), query vectors (searches)

In the paper's network each sub-vector has its own view of the classes, and a code is the sum of M views. Here they all know what the
whole committee believes and share out the work of saying it. Queries get vectors of their own: a vector that is searched with
wants the items that are surely of its class first, while the codeword that is nearest to an unsure item is that of unsure ones.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from .backbones import Backbone
from .heads import SubspaceHeads
from .quantizer import Codebooks, SubspaceClassifier, intra_normalize, unit

CLASS_DIM = 48
"""Dimensions in which a class network compares items with classes. No code is made of them: they need not be as few as a sub-vector's."""
_LEAST = 1e-4
"""Probabilities below are as good as none."""


class CommitteeNetwork(nn.Module):
    """Images or features to item vectors, and to query vectors, with the codebooks that quantise the former.

    Args:
        backbone: its ``head`` is the N class networks, float [B, N·CLASS_DIM].
        N: class networks.
        M: codebooks.
        K: codewords of each.
        d: dimensions of a sub-vector.
        C: classes.
        width: of the trunk's features.
        hidden: hidden units a sub-space of the networks that make item and query vectors.
        beta: scale of the cosines that posteriors are made of.
        noise: deviation of the Gaussian noise on the trunk's features that those networks see in training.
        generator: source of the first weights.

    Attributes:
        prototypes: float [M, C, d], vectors of items of average features that are surely of a class (:meth:`settle`).
    """

    asymmetric = True
    """Whether queries have vectors of their own."""

    def __init__(
        self,
        backbone: Backbone,
        N: int,
        M: int,
        K: int,
        d: int,
        C: int,
        *,
        width: int,
        hidden: int,
        beta: float,
        noise: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = SubspaceClassifier(N, C, CLASS_DIM, generator=generator)
        self.codewords = Codebooks(M, K, d, generator=generator)
        self.items = SubspaceHeads(width + 2 * C, M, hidden, d, generator=generator)
        self.asks = SubspaceHeads(width + 2 * C, M, hidden, d, generator=generator)
        self.N, self.M, self.width = N, M, width
        self.beta = beta
        self.noise = noise
        self.prototypes: Tensor
        self.register_buffer("prototypes", torch.zeros(M, C, d))
        # Images' trunks have features of any scale; embeddings are standardised.
        self.even = (
            nn.LayerNorm(width, elementwise_affine=False) if backbone.spec.kind == "images" else nn.Identity()
        )

    def codebooks(self) -> Tensor:
        """Codewords, float [M, K, d], unit-norm: what trains, encodes and is exported."""
        return unit(self.codewords.raw)

    def features(self, x: Tensor, amp: bool = False) -> tuple[Tensor, Tensor]:
        """The trunk's features float [B, width], and the class networks' outputs float [B, N·CLASS_DIM]."""
        # Only the backbone runs in bf16: scaled cosines need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            features = self.backbone.trunk_features(self.backbone.input(x))
            raw = self.backbone.head(features)
        return features.float(), cast(Tensor, raw.float())

    def directions(self, raw: Tensor) -> Tensor:
        """The class networks' outputs as unit-norm vectors [B, N, CLASS_DIM]."""
        return intra_normalize(raw, self.N)

    def posterior(self, raw: Tensor) -> Tensor:
        """Mean class probabilities of the committee, float [B, C]."""
        return (self.beta * self.classifier.cosine(self.directions(raw))).softmax(dim=2).mean(dim=1)

    def knowledge(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What item and query vectors are made from, float [B, width + 2C]."""
        features = self.even(features)
        if self.training and self.noise:
            features = features + self.noise * torch.randn_like(features)
        # Logarithms tell small probabilities apart, the probabilities themselves large ones; all of a scale with the features.
        return torch.cat([0.5 * features, posterior.clamp_min(_LEAST).log() / 3 + 1.5, 3 * posterior], dim=1)

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """Sub-vectors float32 [B, M·d] before they are normalised."""
        features, raw = self.features(x, amp)
        return cast(
            Tensor, (self.asks if queries else self.items)(self.knowledge(features, self.posterior(raw)))
        )

    def finish(self, raw: Tensor) -> Tensor:
        """Sub-vectors of :meth:`raw` made unit-norm, float32 [B, M·d]."""
        return intra_normalize(raw, self.M).flatten(1)

    @torch.no_grad()
    def settle(self) -> None:
        """Work out :attr:`prototypes`, once the weights are what they will be."""
        certain = torch.eye(self.prototypes.shape[1], device=self.prototypes.device)
        average = torch.zeros(len(certain), self.width, device=certain.device)
        items = self.finish(self.items(self.knowledge(average, certain)))
        self.prototypes.copy_(items.reshape(len(certain), self.M, -1).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors float32 [B, M·d], which are quantised."""
        return self.finish(self.raw(x))

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors float32 [B, M·d], which an index is searched with."""
        return self.finish(self.raw(x, queries=True))

"""A GPQ network that codes what a committee of classifiers believes. Not in the paper.

    x ─► trunk ─┬─► N class networks ─► mean posterior p ─┐
                └─► (neighbours > 0: main directions) ────┴─► target t ─┬─► codes, whose codewords add up to t of the softened p
                                                                        └─► query vectors

In the paper's network each sub-vector has its own view of the classes, and a code is the sum of M views. Here there is one belief,
and the codewords of all codebooks share out the work of saying it (:mod:`.additive`). What a search scores is then what the targets say of
query and item: the probability Σ_c p_c(query) p'_c(item) that they are of one class, where p' is p softened.

Softened, because a network that has seen the labels is surer than it is right, and a ranking is made at its top: codewords near p itself
are spent on doubtful items, and the sure ones get a handful of codes for each class. In p' the committee is as sure, on average, as it
will be right, and the sure ones lie further apart, in the same order where two classes are in question.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .additive import assign, product_form, query_form
from .backbones import Backbone
from .quantizer import SubspaceClassifier, intra_normalize

CLASS_DIM = 48
"""Dimensions in which a class network compares items with classes. No code is made of them: they need not be as few as a sub-vector's."""
DIRECTIONS = 32
"""Main directions of the features that a target with neighbours keeps."""
SOFTENING = 0.6
"""Power that an item's class probabilities are raised to, where nothing is known of how often they are right."""
LEAST_SOFTENING = 0.25
"""Lower powers leave little but the order. Of a handful of labels no accuracy can be told."""
_HALVINGS = 20


class CommitteeNetwork(nn.Module):
    """Images or features to item vectors, which are codewords already, and to query vectors.

    Args:
        backbone: its ``head`` is the N class networks, float [B, N·CLASS_DIM].
        N: class networks.
        M: codebooks.
        K: codewords of each.
        d: dimensions of a sub-vector.
        C: classes.
        width: of the trunk's features.
        beta: scale of the cosines that posteriors are made of.
        neighbours: share of the target that is the item's place among the features.
        generator: source of the first weights.

    Attributes:
        softening: float [], power of an item's class probabilities.
        sums: float [M, K, E], codewords that add up to targets (:meth:`place`).
        words: float [M, K, d], the same as unit-norm codewords of the product quantiser.
        prototypes: float [M, C, d], query vectors of items of average features that are surely of a class.
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
        beta: float,
        neighbours: float,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.classifier = SubspaceClassifier(N, C, CLASS_DIM, generator=generator)
        self.N, self.M, self.d, self.C = N, M, d, C
        self.beta = beta
        self.neighbours = neighbours
        kept = min(DIRECTIONS, width) if neighbours else 0
        self.mean: Tensor
        self.axes: Tensor
        self.softening: Tensor
        self.sums: Tensor
        self.basis: Tensor
        self.words: Tensor
        self.prototypes: Tensor
        self.register_buffer("mean", torch.zeros(width if neighbours else 0))
        self.register_buffer("axes", torch.eye(len(self.mean), kept))
        # With the weights: codewords are of no use with another. Beside neighbours it is harmful: the codewords have those to spread over.
        self.register_buffer("softening", torch.tensor(1.0 if neighbours else SOFTENING))
        for name in ("sums", "basis", "words", "prototypes"):
            self.register_buffer(name, None)
        self.place(torch.randn(M, K, C + kept, generator=generator))
        # Images' trunks have features of any scale; embeddings are standardised.
        self.even = (
            nn.LayerNorm(width, elementwise_affine=False) if backbone.spec.kind == "images" else nn.Identity()
        )

    def codebooks(self) -> Tensor:
        """Codewords, float [M, K, d], unit-norm: what is exported."""
        return self.words

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

    def softened(self, posterior: Tensor) -> Tensor:
        """Class probabilities of items, float [B, C], raised to the power ``softening`` and made to sum to 1 again."""
        even = posterior**self.softening
        return even / even.sum(dim=1, keepdim=True)

    def targets(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What is searched with, and of the :meth:`softened` posterior what is coded; float [B, E], of norm 1 at most.

        The inner product of two targets is ``(1 - w) p·p' + w cos(f, f')``, with w = ``neighbours`` and f the features in their main
        directions.
        """
        if not self.neighbours:
            return posterior
        place = functional.normalize((self.even(features) - self.mean) @ self.axes, dim=1)
        return torch.cat([(1 - self.neighbours) ** 0.5 * posterior, self.neighbours**0.5 * place], dim=1)

    def coded(self, x: Tensor, amp: bool = False) -> Tensor:
        """What the codewords of an item are to add up to, float [B, E]."""
        features, raw = self.features(x, amp)
        return self.targets(features, self.softened(self.posterior(raw)))

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """Sub-vectors float32 [B, M·d]: of items the codewords of their codes; of queries what is searched with."""
        if queries:
            features, raw = self.features(x, amp)
            return query_form(self.targets(features, self.posterior(raw)), self.basis).flatten(1)
        targets = self.coded(x, amp)
        codes = assign(targets, self.sums)
        items = self.words[torch.arange(self.M, device=codes.device), codes].flatten(1)
        # An input that the network cannot take (infinite, say) has no nearest codeword: it must not look as if it had.
        return items + 0 * targets.sum(dim=1, keepdim=True)

    def finish(self, raw: Tensor) -> Tensor:
        """Sub-vectors of :meth:`raw` made unit-norm, float32 [B, M·d]."""
        return intra_normalize(raw, self.M).flatten(1)

    @torch.no_grad()
    def soften(self, posterior: Tensor, accuracy: float) -> None:
        """Set the power by which the greatest of the class probabilities float [n, C] is ``accuracy`` on average, from
        :data:`LEAST_SOFTENING` to 1; nothing where there are neighbours."""
        if self.neighbours:
            return
        log_p = posterior.double().log()

        def sureness(power: float) -> float:
            return float((power * log_p).softmax(dim=1).amax(dim=1).mean())

        low, high = LEAST_SOFTENING, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if sureness(middle) < accuracy else (low, middle)
        self.softening.fill_((low + high) / 2)

    @torch.no_grad()
    def survey(self, features: Tensor) -> None:
        """Take mean and main directions of the trunk's features float [n, width], n at least 2; nothing where there are no neighbours."""
        if self.neighbours:
            even = self.even(features)
            self.mean.copy_(even.mean(dim=0))
            _, vectors = torch.linalg.eigh(torch.cov(even.double().T).cpu())
            self.axes.copy_(vectors.flip(1)[:, : self.axes.shape[1]])

    @torch.no_grad()
    def place(self, sums: Tensor) -> None:
        """Set the codewords: ``sums`` float [M, K, E], which add up to targets."""
        self.sums, self.basis, self.words = product_form(sums, self.d)
        certain = torch.zeros(self.C, sums.shape[2], device=sums.device)
        certain[:, : self.C] = (1 - self.neighbours) ** 0.5 * torch.eye(self.C, device=sums.device)
        self.prototypes = query_form(certain, self.basis).transpose(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors float32 [B, M·d], each sub-vector a codeword."""
        return self.finish(self.raw(x))

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors float32 [B, M·d], which an index is searched with."""
        return self.finish(self.raw(x, queries=True))

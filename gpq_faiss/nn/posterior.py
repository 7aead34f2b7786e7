"""Class-posterior codes: a committee of class networks, and codewords that add up to its posterior. Not in the paper.

    x ─► trunk ─┬─► N class networks ─► mean posterior p ─► class codebooks: codewords that add up to p, or to its logits
                └─► features less their prediction from p: r ─► feature codebooks: codewords that add up to r

The score of a query and an item is, nearly, the probability that they share a class, plus a small weight times the similarity of their
features. The first codebooks hold the class; the others hold what p does not predict, so that items of one class are still ranked by
similarity. Both are sums of codewords (:mod:`.additive`), so an inner-product ``IndexPQ`` holds them.

With few classes, codewords add up to the tempered posterior p' (least squares). With many classes a few codewords cannot add up to a
probability vector; codewords that add up to *logits* multiply probabilities, like the digits of an error-correcting code. The score tables
are then another choice than the codes: those that rank best (:mod:`gpq_faiss.methods.posterior_codebooks`).

p' is p tempered, because a network is overconfident after its training: codewords near p itself would go to doubtful items, and the
confident ones would share a handful of codes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .additive import assign, assign_logits, product_form, query_form
from .backbones import Backbone
from .quantizer import SubspaceClassifier, at_least_float32, intra_normalize

CLASS_DIM = 48
"""Dimensions in which a class network compares items with classes. No code is made of them: they need not be as few as a sub-vector's."""
DIRECTIONS = 48
"""Principal axes of the features that feature codebooks keep."""
TEMPERATURE_POWER = 0.6
"""Power of an item's class probabilities, where nothing is known of how often they are right."""
LEAST_POWER = 0.25
"""Lower powers leave little but the order. A handful of labels gives no accuracy."""
_HALVINGS = 20
_CLASS_CODEBOOKS_PER_BIT = 1.2
"""Class codebooks for each bit of the class, log2 C: 4 for 10 classes, 8 for 100. ``benchmarks/posterior.py`` compares numbers."""


def count_class_codebooks(M: int, C: int) -> int:
    """How many of M codebooks hold the class, of C: all where codes are short for that many classes."""
    return min(M, max(1, round(_CLASS_CODEBOOKS_PER_BIT * math.log2(C))))


class PosteriorNetwork(nn.Module):
    """Images or features to item vectors, which are codewords already, and to query vectors.

    Args:
        backbone: its ``head`` is the N class networks, float [B, N·CLASS_DIM].
        N: class networks.
        shape: M, K, d: codebooks, codewords of each, dimensions of a sub-vector.
        C: classes.
        width: of the trunk's features.
        beta: scale of the cosines that posteriors are made of.
        A: class codebooks; the other M - A are feature codebooks. 0: all codebooks code class and features jointly.
        generator: source of the first weights.

    Attributes:
        power: float [], power that tempers an item's class probabilities.
        principal_axes, offset, prediction: float [width, E], [E], [C, E], what feature codebooks code of the trunk's features; E may be 0.
        tables: float [A, K, C], class codewords, whose sum the posterior of a query is scored with.
        logits: float [A, K, C], class codewords that codes are chosen by: ``by_logits`` their sum is an item's logits, else they are
            ``tables`` and their sum is p'.
        feature_codewords: float [M - A, K, E]; [M, K, C + E] of joint codebooks.
        weights: float [2], of the two parts of a query; of joint codebooks those of queries and of items.
        by_logits: bool [], how class codes are chosen.
        pq_codewords: float [M, K, d], the unit-norm codewords of the product quantiser.
        prototypes: float [M, C, d], query vectors of items of average features and certain class.
    """

    asymmetric = True
    """Whether queries have vectors of their own."""
    items_are_codewords = True
    """Whether an item's vector is the codewords of its code already."""

    def __init__(
        self,
        backbone: Backbone,
        N: int,
        shape: tuple[int, int, int],
        C: int,
        *,
        width: int,
        beta: float,
        A: int,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        M, K, d = shape
        self.backbone = backbone
        self.classifier = SubspaceClassifier(N, C, CLASS_DIM, generator=generator)
        self.N, self.M, self.A, self.d, self.C = N, M, A, d, C
        self.beta = beta
        E = min(DIRECTIONS, width) if self.A < M else 0
        self.principal_axes: Tensor
        self.offset: Tensor
        self.prediction: Tensor
        self.power: Tensor
        self.logits: Tensor
        self.tables: Tensor
        self.feature_codewords: Tensor
        self.weights: Tensor
        self.by_logits: Tensor
        self.basis: Tensor
        self.pq_codewords: Tensor
        self.prototypes: Tensor
        self.register_buffer("principal_axes", torch.eye(width, E))
        self.register_buffer("offset", torch.zeros(E))
        self.register_buffer("prediction", torch.zeros(C, E))
        # With the weights: codewords are of no use with another.
        self.register_buffer("power", torch.tensor(TEMPERATURE_POWER))
        for name in (
            "logits",
            "tables",
            "feature_codewords",
            "weights",
            "by_logits",
            "basis",
            "pq_codewords",
            "prototypes",
        ):
            self.register_buffer(name, None)
        self._by_logits = False
        tables = torch.randn(self.A, K, C, generator=generator)
        coded = torch.randn(M - self.A, K, E if self.A else C + E, generator=generator)
        self.place(tables, tables, coded, torch.ones(2), by_logits=False)
        # Images' trunks have features of any scale; embeddings are standardised.
        self.even = (
            nn.LayerNorm(width, elementwise_affine=False) if backbone.spec.kind == "images" else nn.Identity()
        )

    def trained(self) -> dict[str, Tensor]:
        """What a training changes: the state without what codewords are fitted with."""
        return {k: v for k, v in self.state_dict().items() if k.startswith(("backbone.", "classifier."))}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        # As a Python bool, so that an exported graph holds one of the two ways alone.
        self._by_logits = bool(self.by_logits)

    def codebooks(self) -> Tensor:
        """Codewords, float [M, K, d], unit-norm: what is exported."""
        return self.pq_codewords

    def features(self, x: Tensor, amp: bool = False) -> tuple[Tensor, Tensor]:
        """The trunk's features float [B, width], and the class networks' outputs float [B, N·CLASS_DIM]."""
        # Only the backbone runs in bf16: scaled cosines need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            features = self.backbone.trunk_features(self.backbone.input(x))
            raw = self.backbone.head(features)
        return at_least_float32(features), at_least_float32(raw)

    def directions(self, raw: Tensor) -> Tensor:
        """The class networks' outputs as unit-norm vectors [B, N, CLASS_DIM]."""
        return intra_normalize(raw, self.N)

    def posterior(self, raw: Tensor) -> Tensor:
        """Mean class probabilities of the committee, float [B, C]."""
        return (self.beta * self.classifier.cosine(self.directions(raw))).softmax(dim=2).mean(dim=1)

    def tempered(self, posterior: Tensor) -> Tensor:
        """Class probabilities of items, float [B, C], raised to :attr:`power` and made to sum to 1 again."""
        even = posterior**self.power
        return even / even.sum(dim=1, keepdim=True)

    def residual(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What class probabilities do not predict of the features: unit-norm float [B, E].

        The features' direction less its linear prediction from the posterior, in the principal axes of what is left; beside joint codebooks
        less its mean.
        """
        direction = functional.normalize(self.even(features), dim=1)
        return functional.normalize(
            direction @ self.principal_axes - posterior @ self.prediction - self.offset, dim=1
        )

    def feature_targets(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What feature codewords add up to: :meth:`residual`, float [B, E]; or class probabilities and that, weighted, float [B, C + E],
        whose inner product is (1 - w) p·p' + w cos for the weights (√(1 - w), √w)."""
        left = self.residual(features, posterior)
        if self.A:
            return left
        return torch.cat([self.weights[0] * posterior, self.weights[1] * left], dim=1)

    def assign(self, features: Tensor, posterior: Tensor) -> Tensor:
        """Codes int64 [B, M] of items by their trunk's features float [B, width] and posteriors float [B, C]."""
        parts = []
        if self.A:
            tempered = self.tempered(posterior)
            parts.append(
                assign_logits(tempered, self.logits) if self._by_logits else assign(tempered, self.tables)
            )
        if self.A < self.M:
            parts.append(assign(self.feature_targets(features, posterior), self.feature_codewords))
        return torch.cat(parts, dim=1)

    def codes(self, x: Tensor, amp: bool = False) -> Tensor:
        """Codes int64 [B, M] of items."""
        features, raw = self.features(x, amp)
        return self.assign(features, self.posterior(raw))

    def cost(self, features: Tensor, posterior: Tensor, codes: Tensor) -> Tensor:
        """What :meth:`assign` keeps small, float [B], for codes int64 [B, M]: the cross entropy or the squared distance of the class part
        plus the squared distance of the feature part."""
        cost = torch.zeros_like(posterior[:, 0])
        if self.A:
            tempered = self.tempered(posterior)
            classes = torch.arange(self.A), codes[:, : self.A]
            if self._by_logits:
                log_p = self.logits[classes].sum(dim=1).log_softmax(dim=1)
                cost = -(tempered * log_p).sum(dim=1)
            else:
                cost = (tempered - self.tables[classes].sum(dim=1)).square().sum(dim=1)
        if self.A < self.M:
            wanted = self.feature_targets(features, posterior)
            coded = self.feature_codewords[torch.arange(self.M - self.A), codes[:, self.A :]].sum(dim=1)
            cost = cost + (wanted - coded).square().sum(dim=1)
        return cost

    def query_targets(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What the codewords of both parts are scored with, float [B, C + E], of norm 1 at most."""
        if not self.A:
            return self.feature_targets(features, posterior)
        parts = [self.weights[0] * posterior]
        if self.A < self.M:
            parts.append(self.weights[1] * self.residual(features, posterior))
        return torch.cat(parts, dim=1)

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        """Sub-vectors float32 [B, M·d]: of items the codewords of their codes; of queries what is searched with."""
        features, raw = self.features(x, amp)
        posterior = self.posterior(raw)
        if queries:
            return query_form(self.query_targets(features, posterior), self.basis).flatten(1)
        codes = self.assign(features, posterior)
        items = self.pq_codewords[torch.arange(self.M, device=codes.device), codes].flatten(1)
        # An input that the network cannot take (infinite, say) has no nearest codeword: it must not look as if it had.
        return items + 0 * posterior.sum(dim=1, keepdim=True)

    def finish(self, raw: Tensor) -> Tensor:
        """Sub-vectors of :meth:`raw` made unit-norm, float32 [B, M·d]."""
        return intra_normalize(raw, self.M).flatten(1)

    @torch.no_grad()
    def fit_power(self, posterior: Tensor, accuracy: float) -> None:
        """Set the power by which the greatest of the class probabilities float [n, C] is ``accuracy`` on average, from
        :data:`LEAST_POWER` to 1. Half of that (its square root) where feature codebooks separate confident items."""
        log_p = posterior.double().clamp_min(1e-30).log()

        def confidence(power: float) -> float:
            return float((power * log_p).softmax(dim=1).amax(dim=1).mean())

        low, high = LEAST_POWER, 1.0
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (middle, high) if confidence(middle) < accuracy else (low, middle)
        power = (low + high) / 2
        self.power.fill_(power if self.A == self.M else power**0.5)

    @torch.no_grad()
    def fit_residual(self, features: Tensor, posterior: Tensor) -> None:
        """Fit the linear prediction of the trunk's features float [n, width] from class probabilities float [n, C], and the principal axes
        of the rest."""
        if self.A == self.M:
            return
        direction = functional.normalize(self.even(features), dim=1).double().cpu()
        if not self.A:
            # Joint codebooks hold the whole direction: nothing of it is left to the class.
            posterior = torch.zeros_like(posterior)
        p = torch.cat([posterior, torch.ones_like(posterior[:, :1])], dim=1).double().cpu()
        # A ridge of one hundredth of an item: classes without any are predicted as the mean.
        gram = p.T @ p + 1e-2 * torch.eye(p.shape[1], dtype=torch.double)
        prediction = torch.linalg.solve(gram, p.T @ direction)
        left = direction - p @ prediction
        _, vectors = torch.linalg.eigh(left.T @ left)
        axes = vectors.flip(1)[:, : self.principal_axes.shape[1]]
        # The sign of an eigenvector is arbitrary: the greatest entry is positive.
        axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
        self.principal_axes.copy_(axes)
        self.prediction.copy_((prediction @ axes)[:-1])
        self.offset.copy_((prediction @ axes)[-1])

    @torch.no_grad()
    def place(
        self, logits: Tensor, tables: Tensor, feature_codewords: Tensor, weights: Tensor, *, by_logits: bool
    ) -> None:
        """Set the codewords; see the attributes for their shapes. ``weights`` are scaled to norm 1."""
        self.weights = functional.normalize(weights.float(), dim=0)
        self.by_logits = torch.tensor(by_logits, device=tables.device)
        self._by_logits = by_logits
        own = self.C if self.A else 0
        E = feature_codewords.shape[2]
        # Both parts at one scale: the weights are the queries' own.
        scales = _longest(tables), _longest(feature_codewords)
        additive_codewords = [functional.pad(tables / scales[0], (0, E + own - self.C))]
        if self.A < self.M:
            additive_codewords.append(functional.pad(feature_codewords / scales[1], (own, 0)))
        kept, self.basis, self.pq_codewords = product_form(torch.cat(additive_codewords), self.d)
        # Codes are chosen by what sub-vectors of d dimensions hold of the codewords: all of them from K + 2 dimensions on.
        self.tables = kept[: self.A, :, : self.C] * scales[0]
        self.feature_codewords = kept[self.A :, :, own:] * scales[1]
        self.logits = logits if by_logits else self.tables
        certain = functional.pad(
            self.weights[0] * torch.eye(self.C, device=tables.device), (0, E + own - self.C)
        )
        self.prototypes = query_form(certain, self.basis).transpose(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Item vectors float32 [B, M·d], each sub-vector a codeword."""
        return self.finish(self.raw(x))

    def queries(self, x: Tensor) -> Tensor:
        """Query vectors float32 [B, M·d], which an index is searched with."""
        return self.finish(self.raw(x, queries=True))


def _longest(codewords: Tensor) -> Tensor:
    """The norm of the longest of codewords float [L, K, E]; 1 of none."""
    if not codewords.numel():
        return torch.ones((), device=codewords.device)
    longest: Tensor = codewords.norm(dim=2).max().clamp_min(1e-12)
    return longest

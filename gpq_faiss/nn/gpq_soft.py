"""The network of GPQ with soft targets: items and queries are computed from class probabilities p of class networks.

::

    x ─► class networks ─► p ─┬─► sub-vectors x_m ─► the nearest codeword of each sub-space
                              └─► queries E[W | p] = Σ_c p_c w_mc

In every sub-space, a query that is half cat and half dog scores as the mean of both. So queries have separate vectors, longer for
confident p. Not in the paper.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..config import Config
from .additive import missing
from .backbones import Backbone
from .gpq import CodeNetwork
from .posterior import PosteriorNetwork
from .quantizer import Codebooks, intra_normalize, subspace_cosine, unit

HIDDEN = 512
"""Hidden units between class probabilities and sub-vectors."""
_FLOOR = 1e-3
"""Added to probabilities before the logarithm: differences among the most confident do not matter for short codes."""
_SPREAD = 2.0
"""Divisor of the centred logarithms."""
_FIRST_SCALE = 10.0


class SoftGPQNetwork(CodeNetwork):
    """From images or features to item vectors, quantised to the nearest codewords, and to query vectors.

    Sub-vectors use ``d - 1`` dimensions. The last one is 0 in items and codewords; in queries it completes the norm to 1 without
    changing scores. The codewords of ``classes`` are not used, so they are as small as can be.

    Attributes:
        codewords, classifier: Z and W, [M, K, d - 1] and [M, C, d - 1], of any length.
        log_scale: logarithm of the factor on the mean score of the sub-spaces in training.
        prototypes: float [M, C, d], query vectors of the classes (:meth:`set_queries`).
    """

    asymmetric = True

    def __init__(self, config: Config, backbone: Backbone, C: int, generator: torch.Generator) -> None:
        super().__init__()
        M, d = config.quantizer.codebooks, config.quantizer.subdim
        alone = replace(config.posterior, feature_weight=0.0)
        least = replace(config.quantizer, codebooks=1, codewords=1, subdim=3)  # type: ignore[arg-type]
        of_classes = replace(config, quantizer=least, posterior=alone)
        self.classes = PosteriorNetwork(of_classes, backbone, C, generator)
        self.M = M
        self.codewords = Codebooks(M, config.quantizer.codewords, d - 1, generator=generator)
        self.classifier = Codebooks(M, C, d - 1, generator=generator)
        self.log_scale = nn.Parameter(torch.tensor(math.log(_FIRST_SCALE)))
        self.layers = nn.Sequential(
            _linear(C, HIDDEN, generator), nn.ReLU(), _linear(HIDDEN, M * (d - 1), generator)
        )
        self.set_queries()

    @property
    def backbone(self) -> nn.Module:
        """The backbone of the class networks."""
        return self.classes.backbone

    def codebooks(self) -> Tensor:
        return functional.pad(self.codewords(), (0, 1))

    def posterior(self, x: Tensor, amp: bool = False) -> Tensor:
        """Mean class probabilities, float [B, C]."""
        return self.classes.posterior(self.classes.features(x, amp)[1])

    def raw_subvectors(self, p: Tensor) -> Tensor:
        """Sub-vectors float [B, M·(d - 1)] of class probabilities float [B, C], of any length."""
        log_p = (p + _FLOOR).log()
        raw: Tensor = self.layers((log_p - log_p.mean(dim=1, keepdim=True)) / _SPREAD)
        return raw

    def scores(self, p: Tensor, items: Tensor) -> Tensor:
        """Scaled mean score of the sub-spaces, float [A, B], of queries E[W | p], the mean sub-prototypes under class probabilities p float
        [A, C], for items float [B, M, d - 1]."""
        queries = torch.einsum("bc,mcd->bmd", p, self.classifier())
        return self.log_scale.exp() / self.M * queries.flatten(1) @ items.flatten(1).T

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        p = self.posterior(x, amp)
        if queries:
            inside = torch.einsum("bc,mcd->bmd", p, self.prototypes[..., :-1])
            return torch.cat([inside, missing(inside)], dim=-1).flatten(1)
        flat = self.raw_subvectors(p)
        return functional.pad(flat.reshape(flat.shape[0], self.M, -1), (0, 1)).flatten(1)

    @torch.no_grad()
    def codes(self, p: Tensor) -> Tensor:
        """Codes int64 [B, M] of items with class probabilities float [B, C]."""
        x = intra_normalize(self.raw_subvectors(p), self.M)
        return subspace_cosine(x, self.codewords.raw).argmax(dim=2)

    @torch.no_grad()
    def set_queries(self, tables: Tensor | None = None) -> None:
        """Set the query prototypes to W, or to vectors that realise the score tables float [M, K, C] up to a positive factor.

        Any table of K scores can be realised if the K codewords are independent, which needs d > K: with the pseudo-inverse of the
        codewords times the table.
        """
        found = self.classifier()
        if tables is not None:
            found = (torch.linalg.pinv(self.codewords().double()) @ tables.double()).transpose(1, 2)
            # A mean of vectors is not longer than the longest; one factor for all, since tables are added.
            found = found / found.norm(dim=2).max().clamp_min(torch.finfo(torch.float64).tiny)
        self.prototypes = nn.Buffer(torch.cat([found, missing(found)], dim=2).float())


def straight_through(x: Tensor, Z: Tensor, alpha: float) -> Tensor:
    """The nearest codewords float [B, M, d], of Z [M, K, d] (normalised here), of unit-norm sub-vectors [B, M, d]; with the gradient of
    the softmax_k(α x_m·z_mk)-weighted mean of codewords."""
    weight = (alpha * subspace_cosine(x, Z)).softmax(dim=-1)
    hard = torch.zeros_like(weight).scatter_(-1, weight.argmax(dim=-1, keepdim=True), 1)
    with torch.autocast(x.device.type, enabled=False):
        return torch.einsum("bmk,mkd->bmd", hard + weight - weight.detach(), unit(Z))


def _linear(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
    nn.init.kaiming_uniform_(layer.weight, a=5**0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer

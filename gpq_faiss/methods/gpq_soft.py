"""GPQ with soft targets: L_NPQ + λ1 L_cls - λ2 L_SEM over class probabilities of labelled and unlabelled items.

::

    x ─► class networks ─► p ─┬─► sub-vectors x_m ─► the nearest codeword of each sub-space
                              └─► queries E[W | p] = Σ_c p_c w_mc

In the paper only the classifier's losses use unlabelled items; the N-pair loss (eq. 2), which shapes the codes, uses labels alone.
Here class networks, trained in the same steps with labels and the entropy mini-max (:mod:`.posterior`), predict the
class of every item, and the similarity of a pair is the probability that it shares a class, t_ij = p_i·p_j. So the more numerous
unlabelled items shape the codes, too.

Sub-vectors, codewords Z and sub-prototypes W are the paper's: each sub-vector is coded by its nearest codeword; W classifies sub-vectors
(eq. 3, with class probabilities as targets); W maximises and the network minimises the entropy (eq. 4). In every sub-space, a query that
is half cat and half dog scores as the mean of both. So queries have separate vectors, longer for confident p.

After training, the queries' score tables are refitted to the final codes by least squares on p_i·p_j, if classes are few and sub-vectors
have more dimensions than there are codewords: with many classes they would rank worse. Not in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ..config import Config
from ..data.reader import Reader
from ..losses.classification import shares, subspace_classification, subspace_entropy
from ..losses.npair import soft_npair
from ..nn.additive import missing
from ..nn.backbones import Backbone
from ..nn.quantizer import Codebooks, intra_normalize, reverse_gradient, subspace_cosine, unit
from .codewords import least_squares
from .posterior import PosteriorCodes
from .trainable import CodeMethod, TrainingBatch, weighted

HIDDEN = 512
"""Hidden units between class probabilities and sub-vectors."""
_FLOOR = 1e-3
"""Added to probabilities before the logarithm: differences among the most confident do not matter for short codes."""
_SPREAD = 2.0
"""Divisor of the centred logarithms."""
_FIRST_SCALE = 10.0
_ITEMS = 20_000
"""Unlabelled items for fitting score tables."""
_RATE = 5.0
"""Factor on the learning rate of the parts that make the codes: two small layers, codewords and prototypes, which hardly overfit."""


class SoftGPQ(CodeMethod):
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
        super().__init__(config)
        M, d = config.quantizer.codebooks, config.quantizer.subdim
        alone = replace(config.posterior, feature_weight=0.0)
        least = replace(config.quantizer, codebooks=1, codewords=1, subdim=3)  # type: ignore[arg-type]
        of_classes = replace(config, quantizer=least, posterior=alone)
        self.classes = PosteriorCodes(of_classes, backbone, C, generator)
        self.codewords = Codebooks(M, config.quantizer.codewords, d - 1, generator=generator)
        self.classifier = Codebooks(M, C, d - 1, generator=generator)
        self.log_scale = nn.Parameter(torch.tensor(math.log(_FIRST_SCALE)))
        self.layers = nn.Sequential(
            _linear(C, HIDDEN, generator), nn.ReLU(), _linear(HIDDEN, M * (d - 1), generator)
        )
        self.set_queries()

    def fit_labels(
        self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32], unlabelled: NDArray[np.int64]
    ) -> None:
        self.classes.fit_labels(reader, rows, y, unlabelled)

    def optimizer(self, config: Config) -> torch.optim.Optimizer:
        optimizer = self.classes.optimizer(config)
        ours = [p for name, p in self.named_parameters() if not name.startswith("classes.")]
        optimizer.add_param_group({"params": ours, "times": _RATE})
        return optimizer

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

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The terms that have a weight, and their sum; those of the class networks with the prefix ``class_``."""
        loss, n = self.config.loss, len(batch.y)
        theirs = self.classes.losses(batch, amp=amp)
        p = self._posterior(batch.x, amp)
        target = torch.cat([shares(batch.y, p), p[n:]])
        raw, W = self.raw_subvectors(p), self.classifier.raw
        x = intra_normalize(raw, self.M)
        codewords = straight_through(x, self.codewords.raw, self.config.alpha)
        parts = {
            "class": theirs.pop("total"),
            "npair": soft_npair(self.scores(target, codewords), target, target),
            "classification": subspace_classification(x, W, target, self.config.beta),
        }
        if loss.lambda2 and len(raw) > n:
            others = intra_normalize(reverse_gradient(raw[n:]), self.M)
            parts["entropy"] = subspace_entropy(others, W, self.config.beta)
        found = weighted(parts, classification=loss.lambda1, entropy=-loss.lambda2)
        del found["class"]
        return found | {f"class_{name}": value for name, value in theirs.items()}

    @torch.no_grad()
    def _posterior(self, x: Tensor, amp: bool) -> Tensor:
        """Class probabilities, without dropout and noise."""
        training = self.training
        p = self.eval().posterior(x, amp)
        self.train(training)
        return p

    @torch.no_grad()
    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Use W for queries; after the training, with few classes, score tables fitted to the codes."""
        _, K, d = self.eval().codebooks().shape
        tables = None
        if final and self.classifier.raw.shape[1] <= 2 * K < 2 * d:
            p = torch.cat([self.posterior(x) for x in sample(_ITEMS)])
            tables = least_squares(p, self.codes(p), K)
        self.set_queries(tables)


def straight_through(x: Tensor, Z: Tensor, alpha: float) -> Tensor:
    """The nearest codewords float [B, M, d], of Z [M, K, d] (normalised here), of unit-norm sub-vectors [B, M, d]; with the gradient of
    the softmax_k(α x_m·z_mk)-weighted mean of codewords."""
    weight = (alpha * subspace_cosine(x, Z)).softmax(dim=-1)
    hard = torch.zeros_like(weight).scatter_(-1, weight.argmax(dim=-1, keepdim=True), 1)
    return torch.einsum("bmk,mkd->bmd", hard + weight - weight.detach(), unit(Z))


def _linear(n_in: int, n_out: int, generator: torch.Generator) -> nn.Linear:
    layer = nn.Linear(n_in, n_out, device="meta").to_empty(device="cpu")
    nn.init.kaiming_uniform_(layer.weight, a=5**0.5, generator=generator)
    nn.init.zeros_(layer.bias)
    return layer

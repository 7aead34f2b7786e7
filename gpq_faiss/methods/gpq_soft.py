"""GPQ with soft targets: L_NPQ + λ1 L_cls - λ2 L_SEM over class probabilities of labelled and unlabelled items.

In the paper only the classifier's losses use unlabelled items; the N-pair loss (eq. 2), which shapes the codes, uses labels alone.
Here class networks, trained in the same steps with labels and the entropy mini-max (:mod:`.posterior`), predict the
class of every item, and the similarity of a pair is the probability that it shares a class, t_ij = p_i·p_j. So the more numerous
unlabelled items shape the codes, too.

Sub-vectors, codewords Z and sub-prototypes W are the paper's: each sub-vector is coded by its nearest codeword; W classifies sub-vectors
(eq. 3, with class probabilities as targets); W maximises and the network minimises the entropy (eq. 4). Queries are E[W | p].

After training, the queries' score tables are refitted to the final codes by least squares on p_i·p_j, if classes are few and sub-vectors
have more dimensions than there are codewords: with many classes they would rank worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..config import TrainingConfig
from ..losses.classification import shares, subspace_classification, subspace_entropy
from ..losses.npair import soft_npair
from ..nn.gpq_soft import SoftGPQNetwork, straight_through
from ..nn.posterior import PosteriorNetwork
from ..nn.quantizer import intra_normalize, reverse_gradient
from .codewords import are_few, least_squares
from .posterior import PosteriorCodes
from .trainable import TrainingBatch, weighted

_ITEMS = 20_000
"""Unlabelled items for fitting score tables."""
_RATE = 5.0
"""Factor on the learning rate of the parts that make the codes: two small layers, codewords and prototypes, which hardly overfit."""


class SoftGPQ(PosteriorCodes):
    """See the module docstring."""

    name = "gpq"
    network: SoftGPQNetwork
    codes_only = ()
    uses_unlabelled = True

    @property
    def classes(self) -> PosteriorNetwork:
        return self.network.classes

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        optimizer = super().optimizer(config)
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ours = [p for p in self.parameters() if p.requires_grad and id(p) not in theirs]
        optimizer.add_param_group({"params": ours, "times": _RATE})
        return optimizer

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The terms that have a weight, and their sum; those of the class networks with the prefix ``class_``."""
        loss, net, n = self.config.loss, self.network, len(batch.y)
        theirs = super().losses(batch, amp=amp)
        p = batch.joint(lambda x: self._posterior(x, amp))
        target = torch.cat([shares(batch.y, p), p[n:]])
        raw, W = net.raw_subvectors(p), net.classifier.raw
        x = intra_normalize(raw, net.M)
        codewords = straight_through(x, net.codewords.raw, self.config.alpha)
        parts = {
            "class": theirs.pop("total"),
            "npair": soft_npair(net.scores(target, codewords), target, target),
            "classification": subspace_classification(x, W, target, self.config.beta),
        }
        if loss.lambda2 and len(raw) > n:
            others = intra_normalize(reverse_gradient(raw[n:]), net.M)
            parts["entropy"] = subspace_entropy(others, W, self.config.beta)
        found = weighted(parts, classification=loss.lambda1, entropy=-loss.lambda2)
        del found["class"]
        return found | {f"class_{name}": value for name, value in theirs.items()}

    @torch.no_grad()
    def _posterior(self, x: Tensor, amp: bool) -> Tensor:
        """Class probabilities, without dropout and noise."""
        training = self.network.training
        p = self.network.eval().posterior(x, amp)
        self.network.train(training)
        return p

    @torch.no_grad()
    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Use W for queries; after the training, with few classes, score tables fitted to the codes."""
        net = self.network.eval()
        _, K, d = net.codebooks().shape
        tables = None
        if final and are_few(net.classifier.raw.shape[1], K) and d > K:
            p = torch.cat([net.posterior(x) for x in sample(_ITEMS)])
            tables = least_squares(p, net.codes(p), K)
        net.set_queries(tables)

"""GPQ on what a committee of classifiers believes: λ1 L_cls - λ2 L_SEM + λ4 L_rank. Beyond the paper.

The cosine classifiers and the entropy mini-max of the paper (eq. 3, 4) train N class networks on labelled and unlabelled items. Their
mean posterior says of any two items how likely they share a class, and the sub-vectors, codewords and query vectors learn to rank by
that (:class:`~gpq_faiss.losses.SoftRankingLoss`), on all items alike. Reasons and figures: ``docs/recommended.md``.
"""

from __future__ import annotations

import logging
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..config import Config, TrainingConfig
from ..data.base import FeatureDataset
from ..data.reader import Reader
from ..losses import SoftRankingLoss, SubspaceClassification, SubspaceEntropy
from ..nn.backbones import MLP
from ..nn.committee import CommitteeNetwork
from ..nn.heads import SubspaceHeads
from ..nn.quantizer import reverse_gradient
from .averaged import AveragedMethod
from .shrinkage import MOST_ROWS, least_error_noise
from .trainable import TrainingBatch

log = logging.getLogger(__name__)

_CODE_RATE = 4.0
"""How many times the learning rate item vectors, query vectors and codewords move with."""
_NEIGHBOUR_SCALE = 20.0
"""Steepness of the step from items that are no neighbours to those that are, in cosines."""
_NOISE_OF_RIDGE = 1.5
"""How many times the noise that suits a linear model a committee of perceptrons needs: it has more to learn by heart with. Measured."""


class CommitteeGPQ(AveragedMethod[CommitteeNetwork]):
    """See the module's head."""

    def __init__(self, network: CommitteeNetwork, config: Config) -> None:
        super().__init__(network, config)
        loss = config.loss
        self.classification = SubspaceClassification(loss.classification, loss.beta)
        self.entropy = SubspaceEntropy(loss.beta)
        self.ranking = SoftRankingLoss()

    def directions(self, network: CommitteeNetwork, x: Tensor) -> Tensor:
        """Item vectors [B, M·d]."""
        return cast(Tensor, network(x))

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Set the class networks' noise by the labels, if ``network.adapt_noise`` asks for it and they see the features themselves."""
        heads = self.network.backbone.head
        bare = isinstance(self.network.backbone, MLP) and not self.network.backbone.spec.hidden
        if not (
            self.config.network.adapt_noise
            and bare
            and isinstance(heads, SubspaceHeads)
            and isinstance(reader.dataset, FeatureDataset)
        ):
            return
        every = -(-len(rows) // MOST_ROWS)
        values, _ = reader.fetch(rows[::every])
        y = y[::every]
        x = self.network.backbone.input(torch.from_numpy(values)).numpy()
        heads.noise = _NOISE_OF_RIDGE * least_error_noise(x, y / y.sum(axis=1, keepdims=True))
        log.info("noise of deviation %.2f on the inputs, for %d labelled items", heads.noise, len(rows))

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """As every method's, with larger steps for what makes the codes: it begins late, on inputs that are settled."""
        optimizer = super().optimizer(config)
        net = self.network
        codes = {
            id(p) for part in (net.items, net.asks, net.codewords, self.ranking) for p in part.parameters()
        }
        (group,) = optimizer.param_groups
        group["params"], own = (
            [p for p in group["params"] if id(p) not in codes],
            [p for p in group["params"] if id(p) in codes],
        )
        optimizer.add_param_group({"params": own, "times": _CODE_RATE})
        return optimizer

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The terms that have a weight, and their sum."""
        loss, n, net, x = self.config.loss, len(batch.y), self.network, batch.x
        features, raw = net.features(x, amp)
        prototypes = net.classifier.raw
        parts = {"classification": self.classification(net.directions(raw[:n]), prototypes, batch.y)}
        total = loss.lambda1 * parts["classification"]
        if loss.lambda2 and len(x) > n:
            parts["entropy"] = self.entropy(net.directions(reverse_gradient(raw[n:])), prototypes)
            total = total - loss.lambda2 * parts["entropy"]
        if batch.step >= self.first_codebook_step(batch.steps):
            parts["ranking"] = self._ranking(batch, features, raw, amp)
            total = total + loss.lambda4 * parts["ranking"]
        return {"total": total, **parts}

    def _ranking(self, batch: TrainingBatch, features: Tensor, raw: Tensor, amp: bool) -> Tensor:
        """The order of the codes for every item of the batch as a query, against that of the committee."""
        net, n = self.network, len(batch.y)
        with torch.no_grad():
            # What will be exported is asked, without noise or dropout, and learns nothing from the codes: two classes that a
            # codebook cannot hold apart are no reason to confuse them.
            if self.average is not None:
                features, raw = self.average.features(batch.x, amp)
                posterior = self.average.posterior(raw)
            else:
                features, posterior = features.detach(), net.posterior(raw.detach())
            belief = posterior.clone()
            belief[:n] = batch.y / batch.y.sum(dim=1, keepdim=True)
            relevance = belief @ belief.T
            relevance[:n, :n] = (batch.y @ batch.y.T > 0).to(relevance.dtype)
            share = self.config.loss.neighbours
            if share:
                relevance = (1 - share) * relevance + share * neighbours(net.even(features), belief.shape[1])
        knowledge = net.knowledge(features, posterior)
        items = net.finish(net.items(knowledge)).reshape(len(knowledge), net.M, -1)
        asked = net.finish(net.asks(knowledge))
        codebooks = net.codebooks()
        cosine = torch.einsum("bmd,mkd->bmk", items, codebooks)
        soft = torch.einsum("bmk,mkd->bmd", (self.config.quantizer.alpha * cosine).softmax(dim=2), codebooks)
        # Scores are those of the codes themselves; gradients go through the soft assignment (eq. 1).
        hard = codebooks[torch.arange(net.M, device=cosine.device), cosine.argmax(dim=2)]
        coded = (hard + (soft - soft.detach())).flatten(1)
        return cast(Tensor, self.ranking(asked @ coded.T / net.M, relevance))


def neighbours(features: Tensor, classes: int) -> Tensor:
    """How surely two items of a batch are neighbours by their features float [B, W], in [0, 1]: float [B, B].

    The nearest 1/C of all pairs count as neighbours, as many as are of one class where classes are equally large.
    """
    directions = functional.normalize(features - features.mean(dim=0), dim=1)
    cosine = directions @ directions.T
    limit = cosine.flatten().kthvalue(max(1, int(cosine.numel() * (1 - 1 / classes)))).values
    return torch.sigmoid(_NEIGHBOUR_SCALE * (cosine - limit))

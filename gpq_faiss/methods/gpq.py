"""Generalized Product Quantization (Jang and Cho, CVPR 2020): L_NPQ + λ1 L_cls - λ2 L_SEM.

The labelled items pull the soft-assigned codewords towards their classes (N-pair, eq. 2) and train a cosine classifier
in each sub-space (eq. 3); the unlabelled ones enter by the entropy of that classifier, which the classifier maximises
and the network, behind a gradient reversal layer, minimises (eq. 4).

The paper's variants are settings: GPQ-F is ``network.backbone = "cnnf"``, GPQ-H has ``loss.lambda1 = loss.lambda2 = 0``, and GPQ-T
takes the triplet loss of margin 0.1 in place of the N-pair loss, ``loss.metric = "triplet"``. So is what the authors' released code does
otherwise than the paper (preset ``authors``): ``network.tap``, ``network.batch_statistics``, ``loss.classification``, ``loss.entropy``,
``training.padding``.

Beyond the paper, and off in the preset ``paper``: an average of the weights is exported; the codewords are placed on the data once
the classifier has learnt something; vectors are re-expressed over the sub-prototypes as codewords are; and the score itself is
regressed on relevance. Reasons and figures: ``docs/recommended.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..config import Config
from ..data.base import Dataset
from ..losses import (
    NPairPQLoss,
    ScoreRegressionLoss,
    SubspaceClassification,
    SubspaceEntropy,
    TripletPQLoss,
)
from ..nn.gpq import GPQNetwork
from ..nn.gpq_beliefs import BeliefNetwork
from ..nn.model import build_network, input_description
from ..nn.posterior import PosteriorNetwork
from ..nn.quantizer import reverse_gradient, soft_assign
from .averaged import AveragedMethod
from .gpq_beliefs import BeliefGPQ
from .posterior import PosteriorCodes
from .trainable import TrainingBatch


class GPQ(AveragedMethod[GPQNetwork]):
    """The method of the paper over any backbone."""

    def __init__(self, network: GPQNetwork, config: Config) -> None:
        super().__init__(network, config)
        loss = config.loss
        self.metric = TripletPQLoss(loss.margin) if loss.metric == "triplet" else NPairPQLoss()
        self.regression = ScoreRegressionLoss()
        self.classification = SubspaceClassification(loss.classification, loss.beta)
        self.entropy = SubspaceEntropy(loss.beta, loss.entropy)

    def first_codebook_step(self, steps: int) -> int:
        """The step, of ``steps``, from which the codewords take part: the first without the classification loss, since there would be
        nothing to train before."""
        return int(self.config.training.codebook_start * steps) if self.config.loss.lambda1 else 0

    @torch.no_grad()
    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Place the codewords by spherical k-means on unlabelled items, when their turn comes; not at the first step, where the
        network means nothing yet."""
        if step != self.first_codebook_step(steps) or not step:
            return
        source = self.exported().eval()
        directions = torch.cat([source.directions(source.backbone(x)) for x in sample(5000)])
        generator = torch.Generator().manual_seed(self.config.training.seed)
        self.network.codewords.initialise(directions.float(), iterations=10, generator=generator)
        if self.average is not None:
            self.average.codewords.load_state_dict(self.network.codewords.state_dict())
        self.network.train()

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The terms that have a weight, and their sum; see the module's head."""
        loss, n, net, x = self.config.loss, len(batch.y), self.network, batch.x
        # Only the backbone runs in bf16: cosines times α = 20 need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            if self.config.network.batch_statistics == "apart" and len(x) > n:
                raw = torch.cat([net.backbone(x[:n]), net.backbone(x[n:])])
            else:
                raw = net.backbone(x)
        raw = raw.float()
        labelled = net.directions(raw[:n])
        prototypes = net.classifier.raw
        parts: dict[str, Tensor] = {}
        total = raw.new_zeros(())
        if batch.step >= self.first_codebook_step(batch.steps):
            vectors = net.vectors(labelled)
            quantised = soft_assign(vectors, net.codebooks(), net.alpha)
            if loss.lambda0:
                parts[loss.metric] = self.metric(vectors, quantised, batch.y)
                total = total + loss.lambda0 * parts[loss.metric]
            if loss.lambda3:
                parts["regression"] = self.regression(vectors, quantised, batch.y)
                total = total + loss.lambda3 * parts["regression"]
        if loss.lambda1:
            parts["classification"] = self.classification(labelled, prototypes, batch.y)
            total = total + loss.lambda1 * parts["classification"]
        if loss.lambda2 and len(x) > n:
            unlabelled = net.directions(reverse_gradient(raw[n:]))
            parts["entropy"] = self.entropy(unlabelled, prototypes)
            total = total - loss.lambda2 * parts["entropy"]
        return {"total": total, **parts}


def build_gpq(
    config: Config, dataset: Dataset, image_size: int, n_classes: int
) -> GPQ | BeliefGPQ | PosteriorCodes:
    """A fresh GPQ for the items of ``dataset``: the paper's, the one with soft targets, or the one that codes a committee's posterior."""
    network = build_network(config, input_description(dataset, image_size), n_classes)
    if isinstance(network, BeliefNetwork):
        return BeliefGPQ(network, config)
    if isinstance(network, PosteriorNetwork):
        return PosteriorCodes(network, config)
    return GPQ(network, config)

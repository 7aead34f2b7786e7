"""Generalized Product Quantization (Jang and Cho, CVPR 2020): L_NPQ + λ1 L_cls - λ2 L_SEM.

Labelled items pull the soft-assigned codewords towards their classes (N-pair, eq. 2) and train a cosine classifier in each sub-space
(eq. 3). Unlabelled items enter through the entropy of that classifier, which the classifier maximises and the network, through a
gradient reversal layer, minimises (eq. 4).

The paper's variants are settings: GPQ-F is ``network.backbone = "cnnf"``, GPQ-H has ``loss.lambda1 = loss.lambda2 = 0``, and GPQ-T
uses the triplet loss with margin 0.1 instead of the N-pair loss, ``gpq.variant = "triplet"``. With ``gpq.variant = "authors"`` it follows
the authors' released code where that differs from the paper (preset ``authors``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..config import Config
from ..data.base import Dataset
from ..losses.classification import Variant, shares, subspace_classification, subspace_entropy
from ..losses.npair import npair, triplet
from ..nn.gpq import GPQNetwork
from ..nn.model import build_network, input_description
from ..nn.quantizer import intra_normalize, reverse_gradient, soft_assign
from .gpq_soft import SoftGPQ
from .posterior import PosteriorCodes
from .trainable import CodeMethod, TrainingBatch, weighted


class GPQ(CodeMethod):
    """The method of the paper over any backbone."""

    network: GPQNetwork

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Loss terms with non-zero weight and their sum."""
        loss, beta, n, net = self.config.loss, self.config.beta, len(batch.y), self.network
        of, items = self.config.gpq.variant, len(batch.x) if batch.share is None else batch.share.total
        # The authors run labelled and unlabelled items as two batches.
        parts_of_batch = [(0, n), (n, items)] if of == "authors" and items > n else [(0, items)]
        raw = torch.cat([batch.joint(lambda x: net.raw(x, amp=amp), *part) for part in parts_of_batch])
        labelled, W = intra_normalize(raw[:n], net.M), net.classifier.raw
        quantised = soft_assign(labelled, net.codebooks(), net.alpha)
        pairs = triplet if of == "triplet" else npair
        parts: dict[str, Tensor] = {pairs.__name__: pairs(labelled, quantised, batch.y)}
        if loss.lambda1:
            y = shares(batch.y, labelled)
            kind: Variant = "paper" if of == "printed" else "code"
            parts["classification"] = subspace_classification(labelled, W, y, beta, kind)
        if loss.lambda2 and len(raw) > n:
            unlabelled = intra_normalize(reverse_gradient(raw[n:]), net.M)
            kind = "code" if of == "authors" else "paper"
            parts["entropy"] = subspace_entropy(unlabelled, W, beta, kind)
        found = weighted(parts, classification=loss.lambda1, entropy=-loss.lambda2)
        return self.extra_losses.add(found, raw, batch.y)


def build_gpq(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> CodeMethod:
    """An untrained method for ``dataset``: the paper's GPQ, GPQ with soft targets, or class-posterior codes."""
    network = build_network(config, input_description(dataset, image_size), n_classes)
    kinds: dict[str, Callable[..., CodeMethod]] = {
        "gpq": GPQ,
        "gpq-soft": SoftGPQ,
        "posterior": PosteriorCodes,
    }
    return kinds[config.method](network, config)

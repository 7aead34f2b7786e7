"""Generalized Product Quantization (Jang and Cho, CVPR 2020): L_NPQ + λ1 L_cls - λ2 L_SEM.

Labelled items pull the soft-assigned codewords towards their classes (N-pair, eq. 2) and train a
cosine classifier in each sub-space (eq. 3). Unlabelled items enter through the entropy of that
classifier, which the classifier maximises and the network, through a gradient reversal layer,
minimises (eq. 4).

The paper's variants are settings: GPQ-F is ``network.backbone = "cnnf"``, GPQ-H has ``loss.lambda1
= loss.lambda2 = 0``, and GPQ-T uses the triplet loss with margin 0.1 instead of the N-pair loss,
``method = "gpq-triplet"``. Eq. 3 is that of the authors' released code, or as printed with
``method = "gpq-printed"``; eq. 4 and the rest are the paper's, or those of the code with ``method =
"gpq-authors"`` (preset ``authors``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..data.base import Dataset
from ..losses.classification import shares, subspace_classification, subspace_entropy
from ..losses.npair import npair, triplet
from ..nn.backbones import Backbone, build_extractor, input_description
from ..nn.quantizer import (
    intra_normalize,
    random_directions,
    reexpress,
    reverse_gradient,
    soft_assign,
)
from .posterior import PosteriorCodes
from .trainable import CodeMethod, TrainingBatch, run_network, weighted


class GPQ(CodeMethod):
    """The method of the paper: the backbone gives float [B, M·d]; codewords Z, and sub-prototypes W
    of C classes, are drawn by ``generator``."""

    def __init__(
        self, config: Config, backbone: Backbone, C: int, generator: torch.Generator
    ) -> None:
        super().__init__(config, backbone)
        q = config.quantizer
        self.codewords = random_directions(q.codebooks, q.codewords, q.subdim, generator)
        self.prototypes = random_directions(q.codebooks, C, q.subdim, generator)
        self.uses_unlabelled = config.loss.lambda2 > 0

    def codebooks(self) -> Tensor:
        """z', float [M, K, d], unit-norm: the codebooks in training, encoding and export."""
        return reexpress(self.codewords, self.prototypes, self.config.alpha)

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        return run_network(self.backbone, x, amp)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Loss terms with non-zero weight and their sum."""
        loss = self.config.loss
        beta = self.config.beta
        n = len(batch.y)
        method = self.config.method
        # The authors run labelled and unlabelled items as two batches.
        sizes = (
            [n, len(batch.x) - n]
            if method == "gpq-authors" and len(batch.x) > n
            else [len(batch.x)]
        )
        raw = torch.cat([self.raw(x, amp=amp) for x in torch.split(batch.x, sizes)])
        labelled = intra_normalize(raw[:n], self.M)
        quantised = soft_assign(labelled, self.codebooks(), self.config.alpha)
        pairs = triplet if method == "gpq-triplet" else npair
        parts: dict[str, Tensor] = {pairs.__name__: pairs(labelled, quantised, batch.y)}
        if loss.lambda1:
            parts["classification"] = subspace_classification(
                labelled,
                self.prototypes,
                shares(batch.y),
                beta,
                "paper" if method == "gpq-printed" else "code",
            )
        if loss.lambda2 and len(raw) > n:
            unlabelled = intra_normalize(reverse_gradient(raw[n:]), self.M)
            parts["entropy"] = subspace_entropy(
                unlabelled, self.prototypes, beta, "code" if method == "gpq-authors" else "paper"
            )
        return weighted(parts, classification=loss.lambda1, entropy=-loss.lambda2)


def build_network(config: Config, input_: Mapping[str, Any], n_classes: int) -> CodeMethod:
    """Build an untrained GPQ, or class-posterior codes, with random weights or those of
    ``config.network.weights``; ``input_`` is that of :func:`.build_extractor`."""
    # One generator for everything, so that the seed determines the initial weights.
    generator = torch.Generator().manual_seed(config.training.seed)
    backbone = build_extractor(config, input_, config.quantizer.width, generator)
    network = PosteriorCodes if config.method == "posterior" else GPQ
    return network(config, backbone, n_classes, generator)


def build_gpq(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> CodeMethod:
    """As :func:`build_network`, for ``dataset``."""
    return build_network(config, input_description(dataset, image_size), n_classes)

"""Generalized Product Quantization (Jang and Cho, CVPR 2020): L_NPQ + λ1 L_cls - λ2 L_SEM.

The labelled items pull the soft-assigned codewords towards their classes (N-pair, eq. 2) and train a cosine classifier
in each sub-space (eq. 3); the unlabelled ones enter by the entropy of that classifier, which the classifier maximises
and the network, behind a gradient reversal layer, minimises (eq. 4).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config
from ..data.base import Dataset, FeatureDataset
from ..data.reader import Reader
from ..losses import NPairPQLoss, SubspaceClassification, SubspaceEntropy
from ..nn.gpq import GPQNetwork
from ..nn.model import build_network
from ..nn.quantizer import intra_normalize, reverse_gradient, soft_assign
from .trainable import TrainableMethod, TrainingBatch


class GPQ(TrainableMethod):
    """The method of the paper over any backbone."""

    name = "gpq"

    def __init__(self, network: GPQNetwork, config: Config) -> None:
        super().__init__()
        self.network = network
        self.config = config
        loss = config.loss
        self.npair = NPairPQLoss()
        self.classification = SubspaceClassification(loss.classification, loss.beta)
        self.entropy = SubspaceEntropy(loss.beta)

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """Standardise features by the mean and deviation of (at most 50,000 of) the training rows."""
        if isinstance(reader.dataset, FeatureDataset):
            step = -(-len(rows) // 50_000)
            values, _ = reader.fetch(rows[::step])
            self.network.backbone.fit_standardisation(torch.from_numpy(values))  # type: ignore[operator]

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """The three terms and their sum; see the module's head."""
        loss, n, net = self.config.loss, len(batch.x), self.network
        x = torch.cat([batch.x, batch.unlabelled])
        # Only the backbone runs in bf16: cosines times α = 20 need more than eight bits.
        with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=amp):
            raw = net.backbone(x)
        raw = raw.float()
        labelled = intra_normalize(raw[:n], net.M)
        prototypes = net.classifier.raw
        quantised = soft_assign(labelled, net.codebooks(), net.alpha)
        parts = {"npair": self.npair(labelled, quantised, batch.y)}
        total = parts["npair"]
        if loss.lambda1:
            parts["classification"] = self.classification(labelled, prototypes, batch.y)
            total = total + loss.lambda1 * parts["classification"]
        if loss.lambda2 and len(batch.unlabelled):
            unlabelled = intra_normalize(reverse_gradient(raw[n:]), net.M)
            parts["entropy"] = self.entropy(unlabelled, prototypes)
            total = total - loss.lambda2 * parts["entropy"]
        return {"total": total, **parts}

    def exported(self) -> GPQNetwork:
        """The network itself."""
        return self.network

    @torch.no_grad()
    def codebooks(self) -> NDArray[np.float32]:
        """z', float32 [M, K, d]."""
        return np.ascontiguousarray(self.exported().codebooks().float().cpu().numpy())


def build_gpq(config: Config, dataset: Dataset, image_size: int, n_classes: int) -> GPQ:
    """A fresh GPQ for the items of ``dataset``."""
    input_ = (
        {"kind": "features", "width": dataset.width}
        if isinstance(dataset, FeatureDataset)
        else {"kind": "images", "image_size": image_size}
    )
    return GPQ(build_network(config, input_, n_classes), config)

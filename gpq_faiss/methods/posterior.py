"""Class-posterior codes: λ1 L_cls - λ2 L_SEM train class networks, and codewords add up to their posteriors. Not in the paper.

The cosine classifiers and the entropy mini-max of the paper (eq. 3, 4) train N class networks on labelled and unlabelled items; these
also learn pseudo-labels, propagated from the labels to unlabelled neighbours; their weight is larger with fewer labels
(:mod:`.propagation`). By their mean posterior two items share a class with the probability p·p'. Codewords are then fitted so that
their sums are near the posteriors of unlabelled items (:mod:`.codewords`), which makes the score of a code nearly that probability.
Reasons and figures: ``docs/recommended.md``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import COMMITTEE_RATE, CONVOLUTION_RATE, Config, TrainingConfig
from ..data.reader import Reader
from ..errors import DataError
from ..losses import SubspaceClassification, SubspaceEntropy, SubspaceSoftTargets
from ..nn.backbones import MLP
from ..nn.heads import SubspaceHeads
from ..nn.posterior import PosteriorNetwork
from ..nn.quantizer import reverse_gradient
from .averaged import AveragedMethod
from .codewords import fit_codewords
from .leave_one_out import MOST_ROWS, leave_one_out
from .posterior_codebooks import ClassCodebooks, fit_class_codebooks, weights_of_parts
from .propagation import items_to_compare, propagate
from .trainable import TrainableMethod, TrainingBatch

log = logging.getLogger(__name__)

_ITEMS = 20_000
"""Unlabelled items for fitting codebooks."""
LEAST_SHARE = 0.85
"""Labels are propagated if neighbours predict left-out labels with at least this share of a linear model's accuracy."""


class PosteriorCodes(AveragedMethod[PosteriorNetwork]):
    """See the module docstring."""

    name = "posterior"
    codes_only = (
        "quantizer.codebooks",
        "quantizer.codewords",
        "quantizer.subdim",
        "posterior.feature_weight",
        "posterior.class_codebooks",
    )

    def __init__(self, network: PosteriorNetwork, config: Config) -> None:
        super().__init__(network, config)
        beta = config.loss.beta
        self.classification = SubspaceClassification(beta)
        self.propagation = SubspaceSoftTargets(beta)
        self.entropy = SubspaceEntropy(beta)
        self.accuracy: float | None = None
        """Expected accuracy on unseen items, estimated from the labels; None: unknown, as with convolutions."""
        self.rows = np.empty(0, np.int64)
        """Rows of all training items, ascending; after :meth:`fit_labels` those that take part in label propagation."""
        self.pseudo_labels: Tensor | None = None
        """Class probabilities float32 [n, C] of the items ``rows`` by label propagation (zeros: unknown); None: no propagation."""
        self.weight = 0.0
        """Weight of the cross entropy with the pseudo-labels."""

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """As in the base class; also store the rows."""
        super().fit_inputs(reader, rows)
        self.rows = np.unique(rows)

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Estimate the committee's accuracy from the labels, propagate them to unlabelled items, and choose the noise, if
        ``network.noise`` is ``auto`` and the class networks take features or pixels directly. With convolutions nothing is estimated, as
        pixel distances mean little."""
        backbone = self.network.backbone
        if not isinstance(backbone, MLP):
            return
        every = -(-len(rows) // MOST_ROWS)
        x, there = self._vectors(reader, rows[::every])
        found = leave_one_out(x, y[::every][there])
        self.accuracy = found.accuracy
        log.info("%d labelled items: leave-one-out accuracy %.0f %%", len(rows), 100 * found.accuracy)
        head = backbone.head
        bare = not backbone.spec.hidden
        if self.config.network.noise == "auto" and bare and isinstance(head, SubspaceHeads):
            head.noise = found.noise
            log.info("input noise with standard deviation %.2f", found.noise)
        self._propagate(reader, rows, y)

    def prepared(self) -> dict[str, Any]:
        """The accuracy, the input noise and the pseudo-labels."""
        return {
            "accuracy": self.accuracy,
            "noise": getattr(self.network.backbone.head, "noise", None),
            "rows": torch.from_numpy(self.rows),
            "pseudo_labels": self.pseudo_labels,
            "weight": self.weight,
        }

    def take_prepared(self, found: dict[str, Any]) -> None:
        """See :meth:`prepared`."""
        self.accuracy, self.weight = found["accuracy"], found["weight"]
        self.rows, self.pseudo_labels = found["rows"].numpy(), found["pseudo_labels"]
        if found["noise"] is not None:
            self.network.backbone.head.noise = found["noise"]

    def adopt(self, other: TrainableMethod) -> None:
        """Take over the class networks, their average and the estimated accuracy."""
        assert isinstance(other, PosteriorCodes)
        self.accuracy = other.accuracy
        self.network.load_state_dict(other.network.trained(), strict=False)
        if self.average is not None and other.average is not None:
            self.average.load_state_dict(other.average.trained(), strict=False)

    def _propagate(self, reader: Reader, labelled: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Propagate labels to unlabelled items, if their weight is large enough."""
        began = time.monotonic()
        config = self.config
        weight = config.posterior.propagation * y.shape[1] / len(labelled)
        if not config.training.batch_unlabelled:
            return
        assert isinstance(self.network.backbone, MLP)
        rows = items_to_compare(
            labelled,
            np.setdiff1d(self.rows, labelled),
            weight,
            width=self.network.backbone.flat_width,
            classes=y.shape[1],
            seed=config.training.seed,
        )
        if rows is None:
            return
        self.rows = rows
        x, there = self._vectors(reader, self.rows)
        self.rows = self.rows[there]
        seen = np.isin(labelled, self.rows)
        pseudo_labels, accuracy = propagate(x, np.searchsorted(self.rows, labelled[seen]), y[seen])
        if self.accuracy is not None and accuracy < LEAST_SHARE * self.accuracy:
            log.info(
                "labels are not propagated: neighbours predict only %.0f %% of the left-out labels",
                100 * accuracy,
            )
            return
        self.pseudo_labels = torch.from_numpy(pseudo_labels.astype(np.float32))
        self.weight = weight
        log.info(
            "labels propagated to %d items in %.0f s, weight %.2f",
            int(pseudo_labels.any(axis=1).sum()) - int(seen.sum()),
            time.monotonic() - began,
            weight,
        )

    @torch.no_grad()
    def _vectors(
        self, reader: Reader, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Inputs of the class networks, float32 [n, W], centred, and the readable rows."""
        values, there = reader.fetch(rows)
        backbone = self.network.backbone
        if backbone.spec.kind == "features":
            return backbone.input(torch.from_numpy(values)).numpy(), there
        pixels = backbone.input(torch.from_numpy(values).float() / 255).flatten(1)
        return (pixels - pixels.mean(dim=0)).numpy(), there

    def _pseudo_labels_of(self, rows: NDArray[np.int64]) -> Tensor:
        """Pseudo-labels of the items ``rows``, float32 [n, C]; zeros for those not in the propagation."""
        assert self.pseudo_labels is not None
        at = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        return self.pseudo_labels[at] * torch.from_numpy(self.rows[at] == rows)[:, None]

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """As in the base class, with larger steps for class networks that are perceptrons, and smaller ones over convolutions."""
        optimizer = super().optimizer(config)
        net = self.network
        if not isinstance(net.backbone.head, SubspaceHeads):
            optimizer.param_groups[0]["times"] = CONVOLUTION_RATE
            return optimizer
        own = {id(p) for part in (net.backbone.head, net.classifier) for p in part.parameters()}
        (group,) = optimizer.param_groups
        group["params"], larger = (
            [p for p in group["params"] if id(p) not in own],
            [p for p in group["params"] if id(p) in own],
        )
        optimizer.add_param_group({"params": larger, "times": COMMITTEE_RATE})
        return optimizer

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Loss terms with non-zero weight and their sum."""
        loss, n, net = self.config.loss, len(batch.y), self.network
        raw = batch.joint(lambda x: net.features(x, amp)[1])
        prototypes = net.classifier.raw
        parts = {"classification": self.classification(net.directions(raw[:n]), prototypes, batch.y)}
        total = loss.lambda1 * parts["classification"]
        if self.pseudo_labels is not None and len(raw) > n:
            pseudo_labels = self._pseudo_labels_of(batch.unlabelled_rows).to(raw.device)
            parts["propagation"] = self.propagation(net.directions(raw[n:]), prototypes, pseudo_labels)
            total = total + loss.lambda1 * self.weight * parts["propagation"]
        if loss.lambda2 and len(raw) > n:
            parts["entropy"] = self.entropy(net.directions(reverse_gradient(raw[n:])), prototypes)
            total = total - loss.lambda2 * parts["entropy"]
        return self.extra_losses.add({"total": total, **parts}, raw, batch.y)

    @torch.no_grad()
    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Fit the codebooks to the committee's posteriors of unlabelled items; to more items if ``final``."""
        source = self.exported().eval()
        parts = [source.features(x) for x in sample(_ITEMS if final else _ITEMS // 4)]
        features = torch.cat([features for features, _ in parts])
        posterior = source.posterior(torch.cat([raw for _, raw in parts]))
        if not torch.isfinite(posterior).all():
            raise DataError("the network's outputs became infinite: lower training.learning_rate")
        if self.accuracy is not None:
            source.fit_power(posterior, self.accuracy)
        source.fit_residual(features, posterior)
        found, feature_codewords, weights = self._fit(source, features, posterior)
        for network in (source, self.network):
            device = network.tables.device
            network.place(
                found.logits.to(device),
                found.tables.to(device),
                feature_codewords.to(device),
                weights.to(device),
                by_logits=found.by_logits,
            )
            for name in ("power", "principal_axes", "offset", "prediction"):
                getattr(network, name).copy_(getattr(source, name))

    def _fit(
        self, source: PosteriorNetwork, features: Tensor, posterior: Tensor
    ) -> tuple[ClassCodebooks, Tensor, Tensor]:
        """Class codebooks, feature codewords and their weights, for unlabelled items."""
        K, seed, w = (
            self.config.quantizer.codewords,
            self.config.training.seed,
            self.config.posterior.feature_weight,
        )
        if not source.A:
            # Class and features are weighted before codewords are fitted, with the network's current weights.
            source.weights = torch.tensor([1 - w, w], device=posterior.device).sqrt()
            joint = fit_codewords(source.feature_targets(features, posterior), source.M, K, seed=seed)
            none = joint.new_zeros(0, K, posterior.shape[1])
            return ClassCodebooks(False, none, none), joint, source.weights
        tempered = source.tempered(posterior)
        with torch.enable_grad():
            found = fit_class_codebooks(posterior, tempered, source.A, K, seed=seed)
        residual = source.residual(features, posterior)
        feature_codewords = residual.new_zeros(0, K, residual.shape[1]).cpu()
        if source.A < source.M:
            feature_codewords = fit_codewords(residual, source.M - source.A, K, seed=seed)
        weights = weights_of_parts(
            found, feature_codewords, posterior.cpu(), tempered.cpu(), residual.cpu(), w
        )
        return found, feature_codewords, weights

"""Class-posterior codes: λ1 L_cls - λ2 L_SEM train class networks, and codewords add up to their posteriors. Not in the paper.

N class networks learn the labels by the cosine classifiers of the paper (eq. 3) and, where labels are few, pseudo-labels propagated from
the labels to unlabelled neighbours (:mod:`.propagation`); only then, or if the entropy mini-max (eq. 4) has a weight, do steps have
unlabelled items. By their mean posterior two items share a class with the probability p·p'. Codewords are then fitted so that their
sums are near the posteriors of unlabelled items (:mod:`.codewords`), which makes the score of a code nearly that probability.
Reasons and figures: ``docs/recommended.md``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import Config, TrainingConfig
from ..data.reader import Reader
from ..losses.classification import shares, subspace_classification, subspace_entropy
from ..nn.backbones import MLP
from ..nn.device import to_input
from ..nn.gpq import CodeNetwork
from ..nn.posterior import PosteriorNetwork, SubspaceHeads
from ..nn.quantizer import reverse_gradient
from .codewords import ClassCodebooks, check_targets, fit_class_codebooks, fit_codewords, weights_of_parts
from .leave_one_out import MOST_ROWS, leave_one_out
from .propagation import PseudoLabels, propagate_labels
from .trainable import CodeMethod, TrainableMethod, TrainingBatch, weighted

log = logging.getLogger(__name__)

_ITEMS = 10_000
"""Unlabelled items for fitting codebooks."""
_CLASS_RATE = 2.0
"""Factor on the learning rate of class networks that are perceptrons."""
_CONVOLUTION_RATE = 0.5
"""Factor on the learning rate of class networks over convolutions, and of these."""


class PosteriorCodes(CodeMethod):
    """See the module docstring."""

    name = "posterior"
    codes_only: tuple[str, ...] = (
        "quantizer.codebooks",
        "quantizer.codewords",
        "quantizer.subdim",
        "posterior.feature_weight",
        "posterior.class_codebooks",
    )

    def __init__(self, network: CodeNetwork, config: Config) -> None:
        super().__init__(network, config)
        self.accuracy: float | None = None
        """Expected accuracy on unseen items, estimated from the labels; None: unknown, as with convolutions."""
        self.rows = np.empty(0, np.int64)  # of all training items, ascending
        self.pseudo_labels: PseudoLabels | None = None

    @property
    def classes(self) -> PosteriorNetwork:
        """The class networks."""
        return cast(PosteriorNetwork, self.network)

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        super().fit_inputs(reader, rows)
        self.rows = np.unique(rows)

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Estimate the accuracy from the labels, propagate them to unlabelled items, and choose the noise, if ``network.noise`` is ``auto``
        and class networks take the input directly. With convolutions nothing is estimated, as pixel distances mean little."""
        backbone, config = self.classes.backbone, self.config
        if not isinstance(backbone, MLP):
            return
        every = -(-len(rows) // MOST_ROWS)
        x, there = self._vectors(reader, rows[::every])
        found = leave_one_out(x, y[::every][there])
        self.accuracy = found.accuracy
        log.info("%d labelled items: leave-one-out accuracy %.0f %%", len(rows), 100 * found.accuracy)
        head = backbone.head
        if config.network.noise == "auto" and not backbone.spec.hidden and isinstance(head, SubspaceHeads):
            head.noise = found.noise
            log.info("input noise with standard deviation %.2f", found.noise)
        if config.training.batch_unlabelled:
            self.pseudo_labels = propagate_labels(
                functools.partial(self._vectors, reader),
                rows,
                y,
                np.setdiff1d(self.rows, rows),
                labels_per_class=config.posterior.propagation,
                accuracy=found.accuracy,
                seed=config.training.seed,
            )

    def prepared(self) -> dict[str, Any]:
        told = self.pseudo_labels
        return {
            "accuracy": self.accuracy,
            "noise": getattr(self.classes.backbone.head, "noise", None),
            "told": told and [torch.from_numpy(told.rows), torch.from_numpy(told.p), told.weight],
        }

    def take_prepared(self, found: dict[str, Any]) -> None:
        self.accuracy, head = found["accuracy"], self.classes.backbone.head
        if isinstance(head, SubspaceHeads):
            head.noise = found["noise"]
        if found["told"]:
            rows, p, weight = found["told"]
            self.pseudo_labels = PseudoLabels(rows.numpy(), p.numpy(), weight)

    def adopt(self, other: TrainableMethod) -> None:
        assert isinstance(other, PosteriorCodes)
        self.accuracy = other.accuracy
        self.classes.backbone, self.classes.classifier = other.classes.backbone, other.classes.classifier

    @torch.no_grad()
    def _vectors(
        self, reader: Reader, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """Inputs of the class networks, float32 [n, W], centred, and the readable rows."""
        values, there = reader.fetch(rows)
        x = self.classes.backbone.input(to_input(values, torch.device("cpu"))).flatten(1)
        return (x - x.mean(dim=0) if reader.image_size else x).numpy(), there

    @property
    def uses_unlabelled(self) -> bool:  # type: ignore[override]
        return self.pseudo_labels is not None or self.config.loss.lambda2 > 0

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """Adam, with larger steps for class networks that are perceptrons, and smaller ones over convolutions."""
        net = self.classes
        trained = [p for p in (*net.parameters(), *self.extra_losses.parameters()) if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained, "times": _CONVOLUTION_RATE}]
        if isinstance(net.backbone.head, SubspaceHeads):
            own = {id(p) for part in (net.backbone.head, net.classifier) for p in part.parameters()}
            rest, mine = ([p for p in trained if (id(p) in own) == is_own] for is_own in (False, True))
            groups = [{"params": rest}, {"params": mine, "times": _CLASS_RATE}]
        # One pass over the memory instead of several.
        return torch.optim.Adam(groups, lr=config.learning_rate, betas=(config.beta1, 0.999), fused=True)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Loss terms with non-zero weight and their sum."""
        loss, n, net = self.config.loss, len(batch.y), self.classes
        raw = batch.joint(lambda x: net.features(x, amp)[1])
        W, beta = net.classifier.raw, self.config.beta
        labelled, y = net.directions(raw[:n]), shares(batch.y, raw)
        parts = {"classification": subspace_classification(labelled, W, y, beta)}
        told = self.pseudo_labels
        if told is not None and len(raw) > n:
            p = torch.from_numpy(told.of(batch.unlabelled_rows)).to(raw.device)
            parts["propagation"] = subspace_classification(net.directions(raw[n:]), W, p, beta)
        if loss.lambda2 and len(raw) > n:
            parts["entropy"] = subspace_entropy(net.directions(reverse_gradient(raw[n:])), W, beta)
        share = loss.lambda1 * (told.weight if told is not None else 0)
        found = weighted(parts, classification=loss.lambda1, propagation=share, entropy=-loss.lambda2)
        return self.extra_losses.add(found, raw, batch.y)

    @torch.no_grad()
    def fit_codebooks(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Fit the codebooks to the class networks' posteriors of unlabelled items; to more items if ``final``."""
        source, config = self.classes.eval(), self.config
        parts = [source.features(x) for x in sample(_ITEMS if final else _ITEMS // 2)]
        features = torch.cat([features for features, _ in parts])
        posterior = source.posterior(torch.cat([raw for _, raw in parts]))
        K, seed, w = config.quantizer.codewords, config.training.seed, config.posterior.feature_weight
        check_targets(posterior, K)
        if self.accuracy is not None:
            source.fit_power(posterior, self.accuracy)
        source.fit_residual(features, posterior)
        if source.A:
            tempered, residual = source.tempered(posterior), source.residual(features, posterior)
            with torch.enable_grad():
                found = fit_class_codebooks(posterior, tempered, source.A, K, seed=seed)
            words = torch.zeros(0, K, residual.shape[1])
            if source.A < source.M:
                words = fit_codewords(residual, source.M - source.A, K, seed=seed)
            weights = weights_of_parts(found, words, posterior.cpu(), tempered.cpu(), residual.cpu(), w)
        else:
            # Class and features are weighted before codewords are fitted, with the network's current weights.
            source.weights = weights = torch.tensor([1 - w, w], device=posterior.device).sqrt()
            words = fit_codewords(source.feature_targets(features, posterior), source.M, K, seed=seed)
            none = words.new_zeros(0, K, posterior.shape[1])
            found = ClassCodebooks(False, none, none)
        placed = (t.to(source.tables.device) for t in (found.logits, found.tables, words, weights))
        source.place(*placed, by_logits=found.by_logits)

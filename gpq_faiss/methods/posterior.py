"""Class-posterior codes: λ1 L_cls - λ2 L_SEM train class networks, and codewords add up to what these believe. Not in the paper.

The cosine classifiers and the entropy mini-max of the paper (eq. 3, 4) train N class networks on labelled and unlabelled items; these
also learn what the labels say of the unlabelled items around them, which counts for more the fewer labels there are
(:mod:`.propagation`). Their mean posterior says of any two items how likely they share a class, p·p'. Codewords are then placed so that
their sums are near the posteriors of unlabelled items (:mod:`.codewords`), which makes the score of a code nearly that probability.
Reasons and figures: ``docs/recommended.md``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..config import COMMITTEE_RATE, Config, TrainingConfig
from ..data.reader import Reader
from ..errors import DataError
from ..losses import SubspaceClassification, SubspaceEntropy, SubspaceSoftTargets
from ..nn.backbones import MLP
from ..nn.heads import SubspaceHeads
from ..nn.posterior import PosteriorNetwork
from ..nn.quantizer import reverse_gradient
from .averaged import AveragedMethod
from .codewords import fit_codewords
from .posterior_codebooks import fit_class_codebooks, weights_of_parts
from .propagation import items_to_compare, propagate
from .shrinkage import MOST_ROWS, leave_one_out
from .trainable import TrainableMethod, TrainingBatch

log = logging.getLogger(__name__)

_ITEMS = 20_000
"""Unlabelled items that codebooks are fitted to."""
LEAST_SHARE = 0.85
"""Of the accuracy of a linear model: labels are propagated where neighbours know at least that much of left-out labels."""


class PosteriorCodes(AveragedMethod[PosteriorNetwork]):
    """See the module's head."""

    name = "posterior"
    codes_only = (
        "quantizer.codebooks",
        "quantizer.codewords",
        "quantizer.subdim",
        "quantizer.feature_weight",
        "quantizer.class_codebooks",
    )

    def __init__(self, network: PosteriorNetwork, config: Config) -> None:
        super().__init__(network, config)
        loss = config.loss
        self.classification = SubspaceClassification(loss.classification, loss.beta)
        self.propagation = SubspaceSoftTargets(loss.beta)
        self.entropy = SubspaceEntropy(loss.beta)
        self.accuracy: float | None = None
        """How often the likeliest class of an item will be its own, as far as the labels say; None: not known, as of images
        that are convolved."""
        self.rows = np.empty(0, np.int64)
        """Of all training items, ascending; after :meth:`fit_labels` of those that labels are propagated between."""
        self.told: Tensor | None = None
        """Class probabilities float32 [n, C] of the items ``rows``, as propagated labels tell them (zeros: nothing); None: none are."""
        self.weight = 0.0
        """Of the cross entropy with these."""

    def fit_inputs(self, reader: Reader, rows: NDArray[np.int64]) -> None:
        """As every method's; and remember which items there are."""
        super().fit_inputs(reader, rows)
        self.rows = np.unique(rows)

    def fit_labels(self, reader: Reader, rows: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Learn from the labels how often the committee will be right, what they say of the unlabelled items around them, and the
        noise of features, if ``network.adapt_noise`` asks for it and the class networks see the features themselves. Of images that are
        convolved nothing is learnt: how their pixels lie says little."""
        backbone = self.network.backbone
        if not isinstance(backbone, MLP):
            return
        every = -(-len(rows) // MOST_ROWS)
        x, there = self._vectors(reader, rows[::every])
        found = leave_one_out(x, y[::every][there])
        self.accuracy = found.accuracy
        log.info("%d labelled items, left out one by one: %.0f %% right", len(rows), 100 * found.accuracy)
        head = backbone.head
        bare = backbone.spec.kind == "features" and not backbone.spec.hidden
        if self.config.network.adapt_noise and bare and isinstance(head, SubspaceHeads):
            head.noise = found.noise
            log.info("noise of deviation %.2f on the inputs", found.noise)
        self._propagate(reader, rows, y)

    def adopt(self, other: TrainableMethod) -> None:
        """The class networks, their average, and how often they will be right."""
        assert isinstance(other, PosteriorCodes)
        self.accuracy = other.accuracy
        self.network.load_state_dict(other.network.trained(), strict=False)
        if self.average is not None and other.average is not None:
            self.average.load_state_dict(other.average.trained(), strict=False)

    def _propagate(self, reader: Reader, labelled: NDArray[np.int64], y: NDArray[np.float32]) -> None:
        """Tell unlabelled items what labels say of them, where it would count for enough; as many of them as can be compared."""
        began = time.monotonic()
        config = self.config
        weight = config.loss.propagation * y.shape[1] / len(labelled)
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
        told, accuracy = propagate(x, np.searchsorted(self.rows, labelled[seen]), y[seen])
        if self.accuracy is not None and accuracy < LEAST_SHARE * self.accuracy:
            log.info(
                "labels are not propagated: by its neighbours %.0f %% of the left-out labels would be right",
                100 * accuracy,
            )
            return
        self.told = torch.from_numpy(told.astype(np.float32))
        self.weight = weight
        log.info(
            "labels propagated to %d items in %.0f s, of weight %.2f",
            int(told.any(axis=1).sum()) - int(seen.sum()),
            time.monotonic() - began,
            weight,
        )

    @torch.no_grad()
    def _vectors(
        self, reader: Reader, rows: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
        """What the class networks see of the items, float32 [n, W], centred, and which of the items could be read."""
        values, there = reader.fetch(rows)
        backbone = self.network.backbone
        if backbone.spec.kind == "features":
            return backbone.input(torch.from_numpy(values)).numpy(), there
        pixels = backbone.input(torch.from_numpy(values).float() / 255).flatten(1)
        return (pixels - pixels.mean(dim=0)).numpy(), there

    def _told(self, rows: NDArray[np.int64]) -> Tensor:
        """What the items ``rows`` were told, float32 [n, C]; zeros for those that were not compared."""
        assert self.told is not None
        at = np.searchsorted(self.rows, rows).clip(max=len(self.rows) - 1)
        return self.told[at] * torch.from_numpy(self.rows[at] == rows)[:, None]

    def optimizer(self, config: TrainingConfig) -> torch.optim.Optimizer:
        """As every method's, with larger steps for class networks that are perceptrons."""
        optimizer = super().optimizer(config)
        net = self.network
        if not isinstance(net.backbone.head, SubspaceHeads):
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
        """The terms that have a weight, and their sum."""
        loss, n, net, x = self.config.loss, len(batch.y), self.network, batch.x
        _, raw = net.features(x, amp)
        prototypes = net.classifier.raw
        parts = {"classification": self.classification(net.directions(raw[:n]), prototypes, batch.y)}
        total = loss.lambda1 * parts["classification"]
        if self.told is not None and len(x) > n:
            told = self._told(batch.unlabelled_rows).to(raw.device)
            parts["propagation"] = self.propagation(net.directions(raw[n:]), prototypes, told)
            total = total + loss.lambda1 * self.weight * parts["propagation"]
        if loss.lambda2 and len(x) > n:
            parts["entropy"] = self.entropy(net.directions(reverse_gradient(raw[n:])), prototypes)
            total = total - loss.lambda2 * parts["entropy"]
        return {"total": total, **parts}

    @torch.no_grad()
    def settle(self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False) -> None:
        """Fit the codebooks to what the committee, as it is now, believes of unlabelled items; in the end to more of them."""
        source = self.exported().eval()
        parts = [source.features(x) for x in sample(_ITEMS if final else _ITEMS // 4)]
        features = torch.cat([features for features, _ in parts])
        posterior = source.posterior(torch.cat([raw for _, raw in parts]))
        if not torch.isfinite(posterior).all():
            raise DataError("the network's outputs became infinite: lower training.learning_rate")
        if self.accuracy is not None:
            source.fit_power(posterior, self.accuracy)
        source.fit_residual(features, posterior)
        K, seed = self.config.quantizer.codewords, self.config.training.seed
        tempered = source.tempered(posterior)
        with torch.enable_grad():
            found = fit_class_codebooks(posterior, tempered, source.A, K, seed=seed)
        residual = source.residual(features, posterior)
        feature_codewords = residual.new_zeros(0, K, residual.shape[1]).cpu()
        if source.A < source.M:
            feature_codewords = fit_codewords(residual, source.M - source.A, K, seed=seed)
        weights = weights_of_parts(
            found,
            feature_codewords,
            posterior.cpu(),
            tempered.cpu(),
            residual.cpu(),
            self.config.quantizer.feature_weight,
        )
        for network in (source, self.network):
            device = network.tables.device
            network.place(
                found.logits.to(device),
                found.tables.to(device),
                feature_codewords.to(device),
                weights.to(device),
                by_logits=found.by_logits,
            )
            for name in ("power", "axes", "offset", "prediction"):
                getattr(network, name).copy_(getattr(source, name))

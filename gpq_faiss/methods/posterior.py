"""Class-posterior codes: λ1 L_cls - λ2 L_SEM train class networks, and codewords add up to their
posteriors. Not in the paper.

    x ─► trunk ─┬─► N class networks ─► mean posterior p ─► class codebooks
                └─► features minus their prediction from p: r ─► feature codebooks

Sums of codewords approximate p or its logits, and r.

The class networks learn the labels by the cosine classifiers of the paper (eq. 3; few classes of
images by plain logits) and, where labels are few, pseudo-labels propagated from the labels to
unlabelled neighbours (:mod:`.propagation`); only then, or if the entropy mini-max (eq. 4) has a
weight, do steps have unlabelled items. By their mean posteriors, items i and j share a class with
the probability p_i·p_j. Codewords are then fitted so that their sums are near the posteriors of
unlabelled items (:mod:`.codewords`), which makes the score of a code nearly that probability, plus
a small weight times the similarity of the features. Both parts are additive quantisers
(:mod:`gpq_faiss.nn.additive`), which an inner-product ``IndexPQ`` can represent. Reasons and
figures: ``docs/recommended.md``.

p is tempered because networks are mostly overconfident after training: fitted to p itself,
most codewords would be spent on uncertain items, and confident items would share a handful of
codes. With hundreds of classes and few labels they may be too cautious instead: then p is
sharpened, or the many classes that it does not exclude would outweigh the few that it means.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..config import Config
from ..data.base import Reader
from ..errors import DataError
from ..losses.classification import cross_entropy, shares, subspace_entropy
from ..nn.additive import assign, assign_logits, product_form, query_form
from ..nn.augment import distort
from ..nn.backbones import MLP, Backbone, make_head
from ..nn.device import to_input
from ..nn.heads import SubspaceHeads
from ..nn.quantizer import (
    intra_normalize,
    random_directions,
    reverse_gradient,
    subspace_cosine,
)
from .coders import Floats, Rows
from .codewords import ClassCodebooks, fit_class_codebooks, fit_codewords, weights_of_parts
from .leave_one_out import MOST_ROWS, leave_one_out
from .propagation import PseudoLabels, propagate_labels
from .trainable import CodeMethod, TrainingBatch, run_network, weighted
from .unseen import MOST_COMPARED, has_unseen_classes

log = logging.getLogger(__name__)

CLASS_DIM = 48
"""Output dimensions of a class network."""
CLASS_HIDDEN = 1024
"""Hidden units of a class network."""
DIRECTIONS = 48
"""Principal axes of the residual that feature codebooks encode."""
TEMPERATURE_POWER = 0.6
"""Default power of an item's class probabilities, if their accuracy is unknown."""
MOST_LABELS = 1.5
"""Mean number of labels of an item up to which labels are propagated: neighbours share some of
several labels, and pseudo-labels mix them."""
LEAST_POWER, MOST_POWER = 0.25, 8.0
"""Limits of the power: lower ones keep little but the order, higher ones little but the first
class."""
MOST_CONFIDENCE = 0.9
"""Networks are not sharpened beyond this mean confidence: 10 simulated classes, told apart without
error, lost 0.1 mAP by it."""
_LESS_ERROR = 0.9
"""Dimensions are scaled one by one if the leave-one-out error is then less than this share."""
_CLASS_CODEBOOKS_PER_BIT = 1.2
"""Class codebooks per bit of an item's labels, log2 C for each: of one label 4 for 10 classes, 8
for 100."""
_ITEMS = 10_000
"""Unlabelled items for fitting codebooks."""
_CLASS_RATE = 2.0
"""Factor on the learning rate of class networks that are perceptrons, or over pretrained
convolutions."""
_FEW_CLASSES = 32
"""Up to this many classes, a single linear layer replaces the cosine heads of a convolutional
network."""
UNSEEN_ENTROPY, UNSEEN_FEATURES = 0.4, 0.7
"""λ2, and the weight of the features, where unlabelled items are of classes without labels."""
_CONVOLUTION_RATE = 0.5
"""Factor on the learning rate of cosine classifiers over convolutions, and of these; also of
convolutions that have learnt before."""
_LABELS_FIRST = 0.2
"""Share of the steps of a fine-tuning before it uses unlabelled images."""
_CONFIDENCE = 0.9
"""Minimum probability of the class of an unlabelled image that is learnt."""
_DECAY = 0.99
"""Share of the old weights in a step of their moving average."""


def _check_accuracy(accuracy: float, labels: Floats) -> None:
    """Warn if a leave-one-out accuracy is that of chance, where most classes have several items;
    ``labels`` are multi-hot, float32 [n, C]."""
    counts = labels.sum(axis=0)
    share = counts.max() / len(labels)
    chance = share + 2 * np.sqrt(share * (1 - share) / len(labels))
    if accuracy <= chance < 1 and np.median(counts[counts > 0]) > 1:
        log.warning(
            "the labels hardly depend on the vectors: leave-one-out accuracy is %.0f %%, and "
            "that of naming the most frequent class %.0f %%: are both in the same order?",
            100 * accuracy,
            100 * share,
        )


class PosteriorCodes(CodeMethod):
    """From images or features to item vectors, which consist of codewords, and to query vectors.

    The head of ``backbone`` is replaced by N class networks, float [B, N·CLASS_DIM], whose cosines
    with ``prototypes`` are logits. Over convolutions, for up to 32 classes and without the entropy,
    it is replaced by a single linear layer of logits, float [B, C], and ``prototypes`` is None.

    Of the M codebooks of K codewords of d dimensions, A are for the C classes, a number that
    follows from the labels, and M - A for the features; with A = 0, all encode both jointly.

    Attributes:
        power: float [], exponent of class probabilities: of items (tempering), or of queries and
            items (sharpening) if it is more than 1.
        principal_axes, offset, prediction: float [width, E], [E], [C, E], of the residual that
            feature codebooks encode; E may be 0.
        tables: float [A, K, C], class codewords for scoring: a query's posterior is multiplied by
            their sum.
        logits: float [A, K, C], class codewords for encoding, whose sum approximates an item's
            logits; empty, [0, K, C], if items are encoded by ``tables``, whose sum then
            approximates the tempered posterior.
        feature_codewords: float [M - A, K, E]; for joint codebooks [M, K, C + E].
        weights: float [2], of the class and feature parts of a query; for joint codebooks of
            queries and items.
        pq_codewords: float [M, K, d], the unit-norm codewords of the product quantiser.
    """

    name = "posterior"
    asymmetric = True
    items_are_codewords = True

    def __init__(
        self, config: Config, backbone: Backbone, C: int, generator: torch.Generator
    ) -> None:
        super().__init__(config, backbone)
        network = config.network
        self.K, self.d, self.C = config.quantizer.codewords, config.quantizer.subdim, C
        self.N = config.posterior.networks
        self.beta = config.beta
        self.width = cast(nn.Linear, backbone.head).in_features
        self.unseen = config.posterior.unseen_classes is True
        """Whether codes are for classes without labels, too."""
        is_perceptron = isinstance(backbone, MLP)
        # Over convolutions logits learn few classes faster; cosines learn many classes of few items
        # better. The entropy needs cosines.
        linear = C <= _FEW_CLASSES and not self.entropy_weight and not is_perceptron
        if is_perceptron:
            backbone.head = SubspaceHeads(
                self.width,
                self.N,
                network.hidden[-1] if network.hidden else CLASS_HIDDEN,
                CLASS_DIM,
                dropout=config.dropout,
                noise=network.first_noise,
                generator=generator,
            )
        else:
            # Convolutions learn the features; perceptrons on top would slow this down.
            backbone.head = make_head(self.width, C if linear else self.N * CLASS_DIM, generator)
        self.prototypes = None if linear else random_directions(self.N, C, CLASS_DIM, generator)
        self.power = nn.Buffer(torch.tensor(TEMPERATURE_POWER))
        self._sharpened = False
        self._make_codebooks(self._count_class_codebooks())
        # Trunks of images give features of any scale; embeddings are standardised.
        self.standardise = (
            nn.LayerNorm(self.width, elementwise_affine=False)
            if backbone.spec.kind == "images"
            else nn.Identity()
        )
        self.consistent = (
            network.weights != "none"
            and config.posterior.propagation > 0
            and not (self.entropy_weight or is_perceptron)
        )
        """Whether unlabelled images are learnt by consistency, in place of their entropy."""
        self.student = copy.deepcopy(backbone) if self.consistent else None
        """The network that learns if :attr:`backbone` is the moving average of its weights."""
        if self.student:
            backbone.requires_grad_(False)
        self.accuracy: float | None = None
        """Expected accuracy on unseen items, estimated from the labels; None: unknown, as with
        convolutions."""
        self.pseudo_labels: PseudoLabels | None = None

    def _count_class_codebooks(self, labels: float = 1.0) -> int:
        """Number of class codebooks, for a mean number of labels an item.

        It is M, so that no codebook is for the features, if codes are short, labels are many, or
        the features have no weight; and 0 (joint codebooks) for classes without labels.
        """
        settings = self.config.posterior
        if self.unseen:
            return 0
        if not settings.feature_weight:
            return self.M
        if settings.class_codebooks != "auto":
            return min(self.M, settings.class_codebooks)
        return min(self.M, max(1, round(_CLASS_CODEBOOKS_PER_BIT * labels * math.log2(self.C))))

    def _make_codebooks(self, A: int) -> None:
        """Make room for A codebooks of classes and M - A of features, which are fitted later."""
        device = self.power.device
        E = min(DIRECTIONS, self.width) if A < self.M else 0
        self.A = A
        # Buffers, to be saved with the weights: codewords fit these weights only.
        self.principal_axes = nn.Buffer(torch.eye(self.width, E, device=device))
        self.offset = nn.Buffer(torch.zeros(E, device=device))
        self.prediction = nn.Buffer(torch.zeros(self.C, E, device=device))
        self.weights: Tensor = nn.Buffer(torch.tensor([1.0, 0.0], device=device))
        self.place(
            ClassCodebooks(torch.zeros(A, self.K, self.C), torch.zeros(0, self.K, self.C)),
            torch.zeros(self.M - A, self.K, E if A else self.C + E),
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **options: Any) -> Any:
        """Load a state, with its numbers of codebooks, which followed from labels and classes."""
        self._make_codebooks(len(state_dict["tables"]))
        self.logits = nn.Buffer(torch.empty_like(state_dict["logits"], device=self.power.device))
        keys = super().load_state_dict(state_dict, *args, **options)
        self._sharpened = bool(self.power > 1)  # for exporters: it decides a branch of forward
        return keys

    @property
    def entropy_weight(self) -> float:
        """λ2, the weight of the entropy of unlabelled items."""
        return UNSEEN_ENTROPY if self.unseen else self.config.loss.lambda2

    def codebooks(self) -> Tensor:
        return self.pq_codewords

    def features(
        self, x: Tensor, amp: bool = False, network: Backbone | None = None
    ) -> tuple[Tensor, Tensor]:
        """The trunk's features float [B, width], and the outputs of the head (above) float [B,
        any], of :attr:`backbone` or another ``network``; with ``amp`` by bf16."""
        network = network or self.backbone
        features = run_network(lambda x: network.trunk_features(network.input(x)), x, amp)
        return features, run_network(network.head, features, amp)

    def class_logits(self, raw: Tensor) -> Tensor:
        """Logits of the class networks, float [B, N, C]; of a linear layer [B, 1, C]."""
        if self.prototypes is None:
            return raw.unsqueeze(1)
        return self.beta * subspace_cosine(intra_normalize(raw, self.N), self.prototypes)

    def _cross_entropy(self, raw: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy of the class networks (eq. 3), a scalar, for targets float [B, C]."""
        return cross_entropy(self.class_logits(raw).log_softmax(dim=2).mean(dim=1), targets)

    def mean_posterior(self, raw: Tensor) -> Tensor:
        """Mean class probabilities of the class networks, float [B, C]."""
        return self.class_logits(raw).softmax(dim=2).mean(dim=1)

    def posterior(self, raw: Tensor) -> Tensor:
        """Class probabilities, float [B, C]: the mean of the class networks, sharpened if
        :attr:`power` is more than 1."""
        p = self.mean_posterior(raw)
        # Divided by the greatest first, or the power of many classes would underflow.
        return self._raised(p / p.amax(dim=1, keepdim=True)) if self._sharpened else p

    def tempered(self, posterior: Tensor) -> Tensor:
        """Class probabilities of items, float [B, C], tempered if :attr:`power` is less than 1."""
        return posterior if self._sharpened else self._raised(posterior)

    def _raised(self, p: Tensor) -> Tensor:
        """Probabilities raised to :attr:`power` and normalised to sum 1."""
        powers = p**self.power
        return powers / powers.sum(dim=1, keepdim=True)

    def residual(self, features: Tensor, posterior: Tensor) -> Tensor:
        """What class probabilities do not predict of the features: unit-norm features minus their
        linear prediction from the posterior (for joint codebooks minus their mean), in the
        residual's principal axes; unit-norm float [B, E]."""
        direction = nn.functional.normalize(self.standardise(features), dim=1)
        return nn.functional.normalize(
            direction @ self.principal_axes - posterior @ self.prediction - self.offset, dim=1
        )

    def feature_targets(self, features: Tensor, posterior: Tensor) -> Tensor:
        """Targets of feature codewords: :meth:`residual`, float [B, E]. For joint codebooks class
        probabilities and residual, weighted by (√(1 - w), √w), float [B, C + E], whose inner
        product is (1 - w) p·p' + w cos."""
        return (self.residual if self.A else self.query_targets)(features, posterior)

    def assign(self, features: Tensor, posterior: Tensor) -> Tensor:
        """Codes int64 [B, M] of items with trunk features float [B, width] and posteriors float [B,
        C]."""
        parts = []
        if self.A:
            tempered = self.tempered(posterior)
            parts.append(
                assign_logits(tempered, self.logits)
                if len(self.logits)
                else assign(tempered, self.tables)
            )
        if self.A < self.M:
            parts.append(assign(self.feature_targets(features, posterior), self.feature_codewords))
        return torch.cat(parts, dim=1)

    def query_targets(self, features: Tensor, posterior: Tensor) -> Tensor:
        """Queries in the space of the additive codewords of both parts, float [B, C + E], norm at
        most 1."""
        return torch.cat(
            [self.weights[0] * posterior, self.weights[1] * self.residual(features, posterior)],
            dim=1,
        )

    def raw(self, x: Tensor, *, queries: bool = False, amp: bool = False) -> Tensor:
        features, raw = self.features(x, amp)
        posterior = self.posterior(raw)
        if queries:
            return query_form(self.query_targets(features, posterior), self.basis).flatten(1)
        codes = self.assign(features, posterior)
        items = self.pq_codewords[torch.arange(self.M, device=codes.device), codes].flatten(1)
        # Propagates NaN: an invalid input (infinite, say) has no nearest codeword and must not seem
        # to have one.
        return items + 0 * posterior.sum(dim=1, keepdim=True)

    @torch.no_grad()
    def fit_power(self, posterior: Tensor, accuracy: float) -> None:
        """Set the power for which the confidence, the mean of the largest class probability (of
        :meth:`mean_posterior`, float [n, C]), equals ``accuracy``.

        It lies between :data:`LEAST_POWER` and 1. With more than 2 K classes it may be larger, up
        to :data:`MOST_POWER` and to the confidence :data:`MOST_CONFIDENCE`, and without feature
        codebooks it is not smaller than 1. Feature codebooks separate confident items: with them
        the square root of a power below 1 is used.
        """
        log_p = posterior.double().clamp_min(1e-30).log()

        def confidence(power: float) -> float:
            return float((power * log_p).softmax(dim=1).amax(dim=1).mean())

        # Not joint codebooks: the accuracy is that of classes with labels, and they are for items
        # of others. Nor to certainty: codes would be the same for all items of a class, and few
        # classes have nothing to gain.
        sharp = min(accuracy, MOST_CONFIDENCE)
        many_classes = self.A > 0 and self.C > 2 * self.K
        self._sharpened = many_classes and confidence(1.0) < sharp
        if self._sharpened:
            low, high, aim = 1.0, MOST_POWER, sharp
        else:
            low, high, aim = LEAST_POWER, 1.0, accuracy
        for _ in range(20):
            power = (low + high) / 2
            low, high = (power, high) if confidence(power) < aim else (low, power)
        if not self._sharpened:
            power = power**0.5 if self.A < self.M else 1.0 if many_classes else power
        self.power.fill_(power)

    @torch.no_grad()
    def fit_residual(self, features: Tensor, posterior: Tensor) -> None:
        """Fit the linear prediction of the trunk's features float [n, width] from class
        probabilities float [n, C], and the principal axes of its residual."""
        if self.A == self.M:
            return
        direction = nn.functional.normalize(self.standardise(features), dim=1).double().cpu()
        if not self.A:
            # Joint codebooks encode the whole direction: nothing is predicted from the class.
            posterior = torch.zeros_like(posterior)
        p = torch.cat([posterior, torch.ones_like(posterior[:, :1])], dim=1).double().cpu()
        # Ridge penalty of 1/100 item: classes without items are predicted as the mean.
        prediction = torch.linalg.solve(
            p.T @ p + 1e-2 * torch.eye(p.shape[1], dtype=torch.double), p.T @ direction
        )
        residual = direction - p @ prediction
        ascending = torch.linalg.eigh(residual.T @ residual).eigenvectors
        axes = ascending.flip(1)[:, : self.principal_axes.shape[1]]
        # The sign of an eigenvector is arbitrary: make the largest entry positive.
        axes = axes * axes.gather(0, axes.abs().argmax(dim=0, keepdim=True)).sign()
        self.principal_axes.copy_(axes)
        self.prediction.copy_((prediction @ axes)[:-1])
        self.offset.copy_((prediction @ axes)[-1])

    @torch.no_grad()
    def place(self, classes: ClassCodebooks, feature_codewords: Tensor) -> None:
        """Set the codewords; the attributes say their shapes."""
        start = self.C if self.A else 0  # of the features; joint codewords hold both parts
        tables, logits, feature_codewords = (
            t.to(self.power.device) for t in (*classes, feature_codewords)
        )
        # Both parts on one scale; only queries are weighted.
        scales = [
            x.norm(dim=2).max().clamp_min(1e-12) if len(x) else 1.0
            for x in (tables, feature_codewords)
        ]
        of_features = nn.functional.pad(feature_codewords / scales[1], (start, 0))
        of_classes = nn.functional.pad(tables / scales[0], (0, of_features.shape[2] - self.C))
        projected, basis, pq_codewords = product_form(torch.cat([of_classes, of_features]), self.d)
        # Encoding uses the codewords as representable in sub-vectors of d dimensions (exact for d
        # >= K + 2).
        self.tables = nn.Buffer(projected[: self.A, :, : self.C] * scales[0])
        self.logits = nn.Buffer(logits)
        self.feature_codewords = nn.Buffer(projected[self.A :, :, start:] * scales[1])
        self.basis, self.pq_codewords = nn.Buffer(basis), nn.Buffer(pq_codewords)

    def fit_labels(self, reader: Reader, rows: Rows, y: Floats, unlabelled: Rows) -> None:
        """Choose the number of class codebooks from the mean number of labels of an item.

        Perceptrons also learn from distances between inputs, which mean little between the pixels
        that convolutions take: estimate the accuracy, recognise classes without labels, propagate
        labels to unlabelled items, and choose the noise, if ``network.noise`` is ``auto`` and class
        networks take the input directly.
        """
        labels = float(y.sum() / max(1, y.any(axis=1).sum()))
        if isinstance(self.backbone, MLP):
            self._learn_from_vectors(reader, rows, y, unlabelled)
        self._make_codebooks(self._count_class_codebooks(labels))

    def _learn_from_vectors(self, reader: Reader, rows: Rows, y: Floats, unlabelled: Rows) -> None:
        """The part of :meth:`fit_labels` that compares vectors."""
        config = self.config
        stride = -(-len(rows) // MOST_ROWS)
        x, readable = self._vectors(reader, rows[::stride])
        labels = y[::stride][readable]
        noise, self.accuracy, error = leave_one_out(x, labels)
        if not reader.image_size:
            deviations = self.backbone.input.deviations.numpy()
            scaled = leave_one_out(x / deviations, labels)
            if scaled[2] < _LESS_ERROR * error:
                log.info("each dimension is scaled to unit variance: labels are learnt better")
                self.backbone.input.std.mul_(self.backbone.input.deviations)
                noise, self.accuracy, _ = scaled
                x = x / deviations
        log.info(
            "%d labelled items: leave-one-out accuracy %.0f %%, useful input noise %.2f",
            len(rows),
            100 * self.accuracy,
            noise,
        )
        _check_accuracy(self.accuracy, labels)
        if config.network.noise == "auto" and not self.backbone.spec.hidden:
            cast(SubspaceHeads, self.backbone.head).noise = noise
        if not config.training.batch_unlabelled or not len(unlabelled):
            return
        if config.posterior.unseen_classes == "auto":
            compared = unlabelled[:: -(-len(unlabelled) // MOST_COMPARED)]
            self.unseen = has_unseen_classes(x, labels, self._vectors(reader, compared)[0])
        if self.unseen:
            log.info(
                "codes are made for items of other classes than the labelled ones, too "
                "(posterior.unseen_classes=false serves the labelled classes alone)"
            )
        elif y.sum() <= MOST_LABELS * len(y):
            self.pseudo_labels = propagate_labels(
                lambda chosen: self._vectors(reader, chosen),
                rows,
                y,
                unlabelled,
                labels_per_class=config.posterior.propagation,
                accuracy=self.accuracy,
                seed=config.training.seed,
            )

    @torch.no_grad()
    def _vectors(self, reader: Reader, rows: Rows) -> tuple[Floats, NDArray[np.bool_]]:
        """Inputs of the class networks, float32 [n, W], centred, and the readable rows."""
        values, readable = reader.fetch(rows)
        x = self.backbone.input(to_input(values, torch.device("cpu"))).flatten(1)
        return (x - x.mean(dim=0) if reader.image_size else x).numpy(), readable

    @property
    def uses_unlabelled(self) -> bool:  # type: ignore[override]
        return self.consistent or self.pseudo_labels is not None or self.entropy_weight > 0

    def optimizer(self, config: Config) -> torch.optim.Optimizer:
        """Adam, with larger steps for class networks that are perceptrons or over a pretrained
        network, and smaller ones for cosines over convolutions and for pretrained convolutions."""
        head = (self.student or self.backbone).head
        pretrained = config.network.weights != "none"
        perceptron = isinstance(head, SubspaceHeads)
        slow_trunk = not perceptron and (self.prototypes is not None or pretrained)
        trunk_rate = _CONVOLUTION_RATE if slow_trunk else 1.0
        class_rate = _CLASS_RATE if perceptron or pretrained else trunk_rate
        class_weights = {*head.parameters(), self.prototypes}
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {
                "params": [p for p in trained if p not in class_weights],
                "rate_factor": trunk_rate,
            },
            {"params": [p for p in trained if p in class_weights], "rate_factor": class_rate},
        ]
        # One pass over the memory instead of several.
        return torch.optim.Adam(
            groups, lr=config.training.learning_rate, betas=(config.beta1, 0.999), fused=True
        )

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """Loss terms with non-zero weight and their sum."""
        loss = self.config.loss
        n = len(batch.y)
        x = batch.x
        targets = None
        if self.consistent and len(x) > n:
            x = x[:n]
            if batch.step >= _LABELS_FIRST * batch.steps:
                targets = self._confident(batch.x[n:], amp)
                # Images that are not learnt need no distorted view.
                confident = targets.any(dim=1)
                if confident.any():
                    x = torch.cat([x, distort(batch.x[n:][confident], batch.generator)])
        raw = self.features(x, amp, self.student)[1]
        parts = {"classification": self._cross_entropy(raw[:n], shares(batch.y))}
        if targets is not None and len(raw) > n:
            consistency = self._cross_entropy(raw[n:], targets[confident])
            parts["consistency"] = confident.float().mean() * consistency
        if self.pseudo_labels is not None and len(raw) > n:
            p = torch.from_numpy(self.pseudo_labels.take(batch.unlabelled_rows)).to(raw.device)
            parts["propagation"] = self._cross_entropy(raw[n:], p)
        if self.prototypes is not None and self.entropy_weight and len(raw) > n:
            directions = intra_normalize(reverse_gradient(raw[n:]), self.N)
            parts["entropy"] = subspace_entropy(directions, self.prototypes, self.beta)
        return weighted(
            parts,
            classification=loss.lambda1,
            consistency=loss.lambda1,
            propagation=loss.lambda1 * self.pseudo_labels.weight if self.pseudo_labels else 0.0,
            entropy=-self.entropy_weight,
        )

    @torch.no_grad()
    def after_step(self, step: int, steps: int) -> None:
        """Update the moving average of the student's weights, a better teacher than the student
        (Tarvainen and Valpola, "Mean teachers", NeurIPS 2017)."""
        if self.student:
            decay = min(_DECAY, (step + 1) / (step + 10))
            for mean, value in zip(
                self.backbone.state_dict().values(), self.student.state_dict().values(), strict=True
            ):
                mean.copy_(mean.lerp(value, 1 - decay) if value.is_floating_point() else value)

    def after_training(self) -> None:
        self.student = None

    @torch.no_grad()
    def _confident(self, x: Tensor, amp: bool) -> Tensor:
        """Sharpened class probabilities, float [U, C], of unlabelled images float [U, 3, S, S];
        zeros where no class is likely enough (Sohn et al., "FixMatch", NeurIPS 2020)."""
        p = self.mean_posterior(self.features(x, amp)[1])
        confident = p.amax(dim=1, keepdim=True) >= _CONFIDENCE
        return confident * p.square() / p.square().sum(dim=1, keepdim=True)

    @torch.no_grad()
    def fit_codebooks(
        self, sample: Callable[[int], Iterator[Tensor]], *, final: bool = False
    ) -> None:
        """Fit the codebooks to the class networks' posteriors of unlabelled items; to more items if
        ``final``."""
        self.eval()
        config = self.config
        outputs = [self.features(x) for x in sample(_ITEMS if final else _ITEMS // 2)]
        features, raw = (torch.cat(tensors) for tensors in zip(*outputs, strict=True))
        A, K = self.A, self.K
        seed = config.training.seed
        w = UNSEEN_FEATURES if self.unseen else config.posterior.feature_weight
        p = self.mean_posterior(raw)
        if not torch.isfinite(p).all():
            raise DataError("the network's outputs became infinite: lower training.learning_rate")
        if self.accuracy is not None:
            self.fit_power(p, self.accuracy)
        posterior = self.posterior(raw)
        self.fit_residual(features, posterior)
        weights = self.weights
        if not A:
            # Joint codewords are fitted to the weighted sum of both parts.
            self.weights = weights = torch.tensor([1 - w, w], device=p.device).sqrt()
        targets = self.feature_targets(features, posterior)
        class_codebooks = ClassCodebooks(torch.zeros(0, K, self.C), torch.zeros(0, K, self.C))
        feature_codewords = torch.zeros(0, K, 0)
        if A < self.M:
            feature_codewords = fit_codewords(targets, self.M - A, K, seed=seed)
        if A:
            tempered = self.tempered(posterior)
            class_codebooks = fit_class_codebooks(posterior, tempered, A, K, seed=seed)
        if 0 < A < self.M:
            weights = weights_of_parts(
                class_codebooks,
                feature_codewords,
                posterior.cpu(),
                tempered.cpu(),
                targets.cpu(),
                w,
            )
        self.weights = nn.functional.normalize(weights.to(p.device), dim=0)
        self.place(class_codebooks, feature_codewords)

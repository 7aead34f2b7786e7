"""Ranking by a plain supervised classifier: the baseline for supervised codes.

A two-layer perceptron learns the classes of the labelled rows. An item is stored as its class probabilities p; the score is the
probability that query and item share a class, p(query) · p(item), assuming independence. A supervised code that ranks below this has
learnt less than the classes alone tell (Sablayrolles, Douze, Usunier and Jégou, "How should we evaluate supervised hashing?", ICASSP
2017).

The targets of an item with several labels are its labels with equal shares, as in GPQ's classifier.
No compression: the code is C float32 numbers, whatever the requested number of bits.

Two variants measure parts of class-posterior codes without compression: ``classifier-6`` is the mean of six such networks;
``classifier-propagated`` also learns labels propagated to unlabelled items. :class:`ClassConfidence` is the simplest code of a
classifier: the likeliest class and its probability.
"""

from __future__ import annotations

import math
from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.labels import Labels
from ..errors import UsageError
from .base import Coder, Codes, Floats, labelled_rows
from .float_features import dot_rows
from .leave_one_out import leave_one_out
from .posterior import LEAST_SHARE
from .propagation import items_to_compare, propagate

_RATE, _DECAY = 1e-3, 1e-2  # learning rate and weight decay
_DROPOUT, _INPUT_DROPOUT = 0.5, 0.2
_ENCODE_ROWS = 4096  # fixed, so that probabilities do not depend on the number of vectors


class Classifier(Coder):
    """Linear - ReLU - dropout - linear - softmax on standardised, noisy inputs, trained with AdamW on the labelled rows.

    The learning rate decays to 0 along a half cosine; the noise is estimated from the labels (:mod:`.leave_one_out`).

    Args:
        bits: ignored; :attr:`bits` is 32 · C after :meth:`fit`.
    """

    name = "classifier"
    hidden, steps, batch = 512, 1000, 500
    networks = 1
    """Number of networks whose probabilities are averaged."""
    propagation = 0.0
    """Weight of labels propagated to unlabelled rows, in labels per class, as the setting ``posterior.propagation``."""

    _nets: list[nn.Sequential]
    _mean: Floats
    _scale: float

    def __init__(self, bits: int = 1, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)

    def probabilities(self, x: NDArray[Any]) -> Floats:
        """Class probabilities float32 [n, C] of vectors float32 [n, width]."""
        return self._probabilities(self._inputs(x, "vectors"))

    def index(self) -> Any:
        """``faiss.IndexFlatIP`` over the C probabilities."""
        self._require_fit()
        return faiss.IndexFlatIP(self.code_size // 4)

    def search_input(self, xq: NDArray[Any]) -> NDArray[Any]:
        """The class probabilities."""
        return self.probabilities(xq)

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        rows = labelled_rows(labels, self.name)
        assert labels is not None
        y = labels.dense(rows)
        # One scale for all dimensions keeps their proportions, which carry information.
        self._mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._scale = float(np.sqrt(x.var(axis=0, dtype=np.float64).mean())) or 1.0
        self.code_size = 4 * labels.n_classes
        self.bits = 8 * self.code_size
        # torch's layers draw from the global generator: seed a fork, so that the caller's state is unchanged.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            learnt = self._standardised(x[rows])
            found = leave_one_out(learnt.numpy(), y)
            pseudo_labels = self._propagated(x, rows, y, found.accuracy)
            targets = torch.from_numpy(y / y.sum(axis=1, keepdims=True))
            self._nets = [
                self._train(learnt, targets, found.noise, pseudo_labels) for _ in range(self.networks)
            ]

    def _propagated(
        self, x: Floats, labelled: NDArray[np.int64], y: Floats, accuracy: float
    ) -> tuple[Tensor, Tensor, float] | None:
        """Rows float32 [n, width] with propagated labels, their class probabilities float32 [n, C] and weight; None if the conditions
        for propagation in class-posterior codes are not met."""
        weight = self.propagation * y.shape[1] / len(labelled)
        others = np.setdiff1d(np.arange(len(x)), labelled)
        rows = items_to_compare(
            labelled, others, weight, width=x.shape[1], classes=y.shape[1], seed=self.seed
        )
        if rows is None:
            return None
        compared = self._standardised(x[rows])
        pseudo_labels, right = propagate(compared.numpy(), np.searchsorted(rows, labelled), y)
        unlabelled = np.isin(rows, others)
        if right < LEAST_SHARE * accuracy:
            return None
        return compared[unlabelled], torch.from_numpy(pseudo_labels[unlabelled].astype(np.float32)), weight

    def _train(
        self, x: Tensor, y: Tensor, noise: float, pseudo_labels: tuple[Tensor, Tensor, float] | None
    ) -> nn.Sequential:
        net = nn.Sequential(
            nn.Dropout(_INPUT_DROPOUT),
            nn.Linear(x.shape[1], self.hidden),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(self.hidden, y.shape[1]),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=_DECAY)

        def seen(rows: Tensor) -> Tensor:
            return rows + noise * torch.randn(rows.shape) if noise else rows

        batch = min(self.batch, len(x))
        order, at = torch.randperm(len(x)), 0
        for step in range(1, self.steps + 1):
            if at + batch > len(x):
                order, at = torch.randperm(len(x)), 0
            rows = order[at : at + batch]
            at += batch
            loss = nn.functional.cross_entropy(net(seen(x[rows])), y[rows])
            if pseudo_labels is not None:
                others, p, weight = pseudo_labels
                some = torch.randint(len(others), (self.batch,))
                loss = loss + weight * nn.functional.cross_entropy(net(seen(others[some])), p[some])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done, before = (1 + math.cos(math.pi * i / self.steps) for i in (step, step - 1))
            optimizer.param_groups[0]["lr"] *= done / before
        return net.eval()

    def _standardised(self, x: Floats) -> Tensor:
        return torch.from_numpy((x - self._mean) / np.float32(self._scale))

    @torch.inference_mode()
    def _probabilities(self, x: Floats) -> Floats:
        out = np.empty((len(x), self.code_size // 4), np.float32)
        for i in range(0, len(x), _ENCODE_ROWS):
            block = self._standardised(x[i : i + _ENCODE_ROWS])
            out[i : i + _ENCODE_ROWS] = torch.stack([net(block).softmax(dim=1) for net in self._nets]).mean(
                dim=0
            )
        return out

    def _encode(self, x: Floats) -> Codes:
        return self._probabilities(x).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return dot_rows(self._probabilities(xq), codes.view(np.float32))


class SixClassifiers(Classifier):
    """Mean of six networks, as many as class-posterior codes have."""

    name = "classifier-6"
    networks = 6


class PropagatedClassifier(Classifier):
    """With labels propagated to unlabelled items, weighted as in class-posterior codes."""

    name = "classifier-propagated"
    propagation = 20.0


class ClassConfidence(Coder):
    """The likeliest class of an item and its probability, in ``bits``: a lower bound for codes of a classifier.

    The class takes as many bits as it needs; the others, at most 16, hold its probability, quantised uniformly in [0, 1]. The other
    classes share the rest equally. The score is the probability that query and item share a class.

    Args:
        bits: code length, at least what the class needs.
        seed: of the classifier.

    Raises:
        UsageError: from :meth:`fit`: too few bits for the classes.
    """

    name = "class-confidence"

    def __init__(self, bits: int, *, seed: int = 0) -> None:
        super().__init__(bits, seed=seed)
        self.classifier = Classifier(seed=seed)
        self.code_size = 8  # stored as two int32 numbers, of which ``bits`` bits are used
        self._levels = 1

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        classes = 0 if labels is None else labels.n_classes
        left = self.bits - max(0, classes - 1).bit_length()
        if left < 0:
            raise UsageError(f"{self.name}: {self.bits} bits are too few to name one of {classes} classes")
        self.classifier.seed = self.seed
        self.classifier.fit(x, labels)
        self._levels = 2 ** min(left, 16)

    def _encode(self, x: Floats) -> Codes:
        p = self.classifier.probabilities(x)
        sure = np.minimum(p.max(axis=1) * self._levels, self._levels - 1)
        return np.stack([p.argmax(axis=1), sure.astype(np.int64)], axis=1).astype(np.int32).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        p = self.classifier.probabilities(xq)
        of_class, level = np.ascontiguousarray(codes).view(np.int32).T
        sure = ((level + 0.5) / self._levels).astype(np.float32)
        rest = (1 - sure) / max(1, p.shape[1] - 1)
        mine = p[:, of_class]
        return np.asarray(mine * sure + (1 - mine) * rest, np.float32)

"""Ranking by a plain supervised classifier: the baseline for supervised codes.

A two-layer perceptron learns the classes of the labelled rows. An item is stored as its class probabilities p; the score is the
probability that query and item share a class, p(query) · p(item), assuming independence. A supervised code that ranks below this has
learnt less than the classes alone tell (Sablayrolles, Douze, Usunier and Jégou, "How should we evaluate supervised hashing?", ICASSP
2017). ``classifier-6`` is the mean of six such networks.

The targets of an item with several labels are its labels with equal shares, as in GPQ's classifier.
No compression: the code is C float32 numbers, whatever the requested number of bits.
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
from .coders import Floats
from .float_features import FloatFeatures
from .leave_one_out import leave_one_out

_RATE, _DECAY = 1e-3, 1e-2  # learning rate and weight decay
_DROPOUT, _INPUT_DROPOUT = 0.5, 0.2
_ENCODE_ROWS = 4096  # fixed, so that probabilities do not depend on the number of vectors


class Classifier(FloatFeatures):
    """Linear - ReLU - dropout - linear - softmax on standardised, noisy inputs, trained with AdamW on the labelled rows.

    The learning rate decays to 0 along a half cosine; the noise is estimated from the labels (:mod:`.leave_one_out`). A code has 32 · C
    bits.
    """

    name = "classifier"
    unit = False
    hidden, steps, batch = 512, 1000, 500
    networks = 1
    """Number of networks whose probabilities are averaged."""

    _nets: list[nn.Sequential]
    _mean: Floats
    _scale: float

    def index(self) -> Any:
        """``faiss.IndexFlatIP`` over the C probabilities."""
        self._require_fit()
        return faiss.IndexFlatIP(self.code_size // 4)

    def search_input(self, xq: NDArray[Any]) -> Floats:
        """The class probabilities float32 [Q, C]."""
        return self._stored(self._inputs(xq, "queries"))

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        rows, labels = self._labelled(labels)
        y = labels.dense(rows)
        # One scale for all dimensions keeps their proportions, which carry information.
        self._mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._scale = float(np.sqrt(x.var(axis=0, dtype=np.float64).mean())) or 1.0
        self._store(labels.n_classes)
        # torch's layers draw from the global generator: seed a fork, so that the caller's state is unchanged.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            learnt = self._standardised(x[rows])
            noise = leave_one_out(learnt.numpy(), y).noise
            targets = torch.from_numpy(y / y.sum(axis=1, keepdims=True))
            self._nets = [self._train(learnt, targets, noise) for _ in range(self.networks)]

    def _train(self, x: Tensor, y: Tensor, noise: float) -> nn.Sequential:
        net = nn.Sequential(
            nn.Dropout(_INPUT_DROPOUT),
            nn.Linear(x.shape[1], self.hidden),
            nn.ReLU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(self.hidden, y.shape[1]),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=_RATE, weight_decay=_DECAY)
        batch = min(self.batch, len(x))
        order, at = torch.randperm(len(x)), 0
        for step in range(1, self.steps + 1):
            if at + batch > len(x):
                order, at = torch.randperm(len(x)), 0
            rows = order[at : at + batch]
            at += batch
            seen = x[rows] + noise * torch.randn(batch, x.shape[1]) if noise else x[rows]
            loss = nn.functional.cross_entropy(net(seen), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done, before = (1 + math.cos(math.pi * i / self.steps) for i in (step, step - 1))
            optimizer.param_groups[0]["lr"] *= done / before
        return net.eval()

    def _standardised(self, x: Floats) -> Tensor:
        return torch.from_numpy((x - self._mean) / np.float32(self._scale))

    @torch.inference_mode()
    def _stored(self, x: Floats) -> Floats:
        """Class probabilities."""
        out = np.empty((len(x), self.code_size // 4), np.float32)
        for i in range(0, len(x), _ENCODE_ROWS):
            block = self._standardised(x[i : i + _ENCODE_ROWS])
            each = torch.stack([net(block).softmax(dim=1) for net in self._nets])
            out[i : i + _ENCODE_ROWS] = each.mean(dim=0)
        return out


class SixClassifiers(Classifier):
    """Mean of six networks, as many as class-posterior codes have."""

    name = "classifier-6"
    networks = 6

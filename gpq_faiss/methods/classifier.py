"""The ranking of a plain supervised classifier: the one that keeps supervised codes honest.

A net of two layers learns the classes of the labelled rows; an item is kept as its class probabilities p, and two items are as near
as the probability that they are of one class, p(query) · p(item), as if drawn independently. A supervised code that ranks
below this has learnt less about the neighbours than the classes alone tell. (Sablayrolles, Douze, Usunier and Jégou, "How should
we evaluate supervised hashing?", ICASSP 2017, on why this baseline has to be there.)

With several labels an item the targets are its labels, each with an equal share, as in GPQ's own classifier.
No compression: the code is C float32 numbers, whatever number of bits the codes beside it have.
"""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ..data.labels import Labels
from ..errors import DataError, UsageError
from .base import Codes, Floats, Method
from .float_features import dot_rows
from .shrinkage import leave_one_out

_ENCODE_ROWS = 4096  # fixed, so that a vector's probabilities do not depend on how many are asked for


class Classifier(Method):
    """Linear - ReLU - dropout - linear - softmax on standardised and noisy inputs, trained by AdamW on the labelled rows.

    Args:
        bits: not used: a table asks every method for some number of bits. :attr:`bits` is 32 · C after :meth:`fit`.
        hidden: width of the hidden layer.
        steps: optimiser steps.
        batch: rows a step (all of them, if there are fewer).
        learning_rate: at the start; it falls to 0 along a half cosine.
        weight_decay: of AdamW.
        dropout: share of hidden units left out in each step.
        input_dropout: share of inputs left out in each step.
        noise: deviation of Gaussian noise on the standardised inputs in each step; None: what the labels call for, as for
            GPQ's committee (:mod:`.shrinkage`).

    Raises:
        UsageError: a hyper-parameter that cannot be.
    """

    name = "classifier"

    def __init__(
        self,
        bits: int = 1,
        *,
        seed: int = 0,
        hidden: int = 512,
        steps: int = 1000,
        batch: int = 500,
        learning_rate: float = 1e-3,
        weight_decay: float = 1e-2,
        dropout: float = 0.5,
        input_dropout: float = 0.2,
        noise: float | None = None,
    ) -> None:
        super().__init__(bits, seed=seed)
        if min(hidden, steps, batch) < 1 or learning_rate <= 0 or weight_decay < 0:
            raise UsageError(
                f"{self.name}: hidden, steps, batch and learning_rate must be above 0, weight_decay not below"
            )
        if not (0 <= dropout < 1 and 0 <= input_dropout < 1):
            raise UsageError(
                f"{self.name}: dropout {dropout} and input_dropout {input_dropout} must be in [0, 1)"
            )
        self.hidden = hidden
        self.steps = steps
        self.batch = batch
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.dropout = dropout
        if noise is not None and not noise >= 0:
            raise UsageError(f"{self.name}: noise {noise} must not be below 0")
        self.input_dropout = input_dropout
        self.noise = noise
        self.losses: list[float] = []
        """Loss of each step of the last :meth:`fit`."""
        self._net = nn.Sequential()
        self._mean: Floats = np.empty(0, np.float32)
        self._scale = 1.0

    def settings(self) -> dict[str, Any]:
        names = (
            "hidden",
            "steps",
            "batch",
            "learning_rate",
            "weight_decay",
            "dropout",
            "input_dropout",
            "noise",
        )
        return {**super().settings(), **{name: getattr(self, name) for name in names}}

    def probabilities(self, x: NDArray[Any]) -> Floats:
        """Class probabilities float32 [n, C] of vectors float32 [n, width]."""
        return self._probabilities(self._inputs(x, "vectors"))

    def index(self) -> Any:
        """``faiss.IndexFlatIP`` over the C probabilities."""
        self._require_fit()
        return faiss.IndexFlatIP(self.code_size // 4)

    def index_input(self, x: NDArray[Any]) -> NDArray[Any]:
        """The class probabilities."""
        return self.probabilities(x)

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        if labels is None or not labels.has().any():
            raise DataError(
                f"{self.name}: no labelled item, but it learns from labels alone: label some, or leave it out"
            )
        rows = np.flatnonzero(labels.has())
        y = labels.dense(rows)
        # One scale for all dimensions keeps their proportions, which in features are information.
        self._mean = x.mean(axis=0, dtype=np.float64).astype(np.float32)
        self._scale = float(np.sqrt(x.var(axis=0, dtype=np.float64).mean())) or 1.0
        self.code_size = 4 * labels.n_classes
        self.bits = 8 * self.code_size
        # torch's layers draw from its global generator: seed a fork of it, and leave the caller's as it was.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            learnt = self._standardised(x[rows])
            noise = leave_one_out(learnt.numpy(), y).noise if self.noise is None else self.noise
            self._train(learnt, torch.from_numpy(y / y.sum(axis=1, keepdims=True)), noise)

    def _train(self, x: Tensor, y: Tensor, noise: float) -> None:
        self._net = net = nn.Sequential(
            nn.Dropout(self.input_dropout),
            nn.Linear(x.shape[1], self.hidden),
            nn.ReLU(),
            nn.Dropout(self.dropout),
            nn.Linear(self.hidden, y.shape[1]),
        )
        optimizer = torch.optim.AdamW(net.parameters(), lr=self.learning_rate, weight_decay=self.weight_decay)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        batch, self.losses = min(self.batch, len(x)), []
        order, at = torch.randperm(len(x)), 0
        for _ in range(self.steps):
            if at + batch > len(x):
                order, at = torch.randperm(len(x)), 0
            rows = order[at : at + batch]
            at += batch
            seen = x[rows]
            if noise:
                seen = seen + noise * torch.randn(seen.shape)
            loss = nn.functional.cross_entropy(net(seen), y[rows])
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            self.losses.append(float(loss.detach()))
        net.eval()

    def _standardised(self, x: Floats) -> Tensor:
        return torch.from_numpy((x - self._mean) / np.float32(self._scale))

    @torch.inference_mode()
    def _probabilities(self, x: Floats) -> Floats:
        out = np.empty((len(x), self.code_size // 4), np.float32)
        for i in range(0, len(x), _ENCODE_ROWS):
            out[i : i + _ENCODE_ROWS] = (
                self._net(self._standardised(x[i : i + _ENCODE_ROWS])).softmax(dim=1).numpy()
            )
        return out

    def _encode(self, x: Floats) -> Codes:
        return self._probabilities(x).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return dot_rows(self._probabilities(xq), codes.view(np.float32))

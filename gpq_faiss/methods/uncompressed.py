"""What supervised codes have to beat, without compression: the features themselves, and a plain
supervised classifier.

``float``: the exact cosine of the input vectors. An item keeps all its 32-bit numbers, whatever the
requested number of bits.

``classifier``: a two-layer perceptron learns the classes of the labelled rows. An item is stored as
its class probabilities p, C float32 numbers; the score is the probability that query and item share
a class, p(query) · p(item), assuming independence. A supervised code that ranks below this has
learnt less than the classes alone tell (Sablayrolles, Douze, Usunier and Jégou, "How should we
evaluate supervised hashing?", ICASSP 2017). The targets of an item with several labels are its
labels with equal shares, as in GPQ's classifier. ``classifier-6`` is the mean of six such networks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from ..data.labels import Labels
from ..nn.backbones import Normalisation
from .coders import Coder, Codes, Floats, dot_rows
from .leave_one_out import leave_one_out

_RATE = 1e-3
"""Learning rate."""
_DECAY = 1e-2
"""Weight decay."""
_DROPOUT = 0.5
"""Dropout rate of the hidden layer."""
_INPUT_DROPOUT = 0.2
"""Dropout rate of the inputs."""


class FloatFeatures(Coder):
    """Exact cosine similarity; the code is the unit vector as float32 bytes."""

    name = "float"
    unit = True

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        self.code_size, self.bits = 4 * x.shape[1], 32 * x.shape[1]

    def _stored(self, x: Floats) -> Floats:
        """What is stored of vectors, and compared."""
        return x

    def _encode(self, x: Floats) -> Codes:
        return self._stored(x).view(np.uint8)

    def _score(self, xq: Floats, codes: Codes) -> Floats:
        return dot_rows(self._stored(xq), codes.view(np.float32))


class Classifier(FloatFeatures):
    """Linear - ReLU - dropout - linear - softmax on standardised, noisy inputs, trained with AdamW
    on the labelled rows.

    The learning rate decays to 0 along a half cosine; the noise is estimated from the labels
    (:mod:`.leave_one_out`).
    """

    name = "classifier"
    unit = False
    hidden = 512
    steps = 1000
    batch = 500
    networks = 1
    """Number of networks whose probabilities are averaged."""

    def _fit(self, x: Floats, labels: Labels | None) -> None:
        rows, labels = self._labelled(labels)
        y = labels.dense(rows)
        self._normalise = Normalisation(x.shape[1])
        self._normalise.fit(torch.from_numpy(x))
        self.code_size, self.bits = 4 * labels.n_classes, 32 * labels.n_classes
        # torch's layers draw from the global generator: seed a fork, so that the caller's state is
        # unchanged.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed)
            learnt = self._normalise(torch.from_numpy(x[rows]))
            noise, _, _ = leave_one_out(learnt.numpy(), y)
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
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.steps)
        batch = min(self.batch, len(x))
        order = torch.empty(0, dtype=torch.long)
        for _ in range(self.steps):
            if len(order) < batch:
                order = torch.randperm(len(x))
            rows, order = order[:batch], order[batch:]
            noisy = x[rows] + noise * torch.randn(batch, x.shape[1])
            loss = nn.functional.cross_entropy(net(noisy), y[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        return net.eval()

    @torch.inference_mode()
    def _stored(self, x: Floats) -> Floats:
        inputs = self._normalise(torch.from_numpy(x))
        return torch.stack([net(inputs).softmax(dim=1) for net in self._nets]).mean(dim=0).numpy()


class SixClassifiers(Classifier):
    """Mean of six networks, as many as class-posterior codes have."""

    name = "classifier-6"
    networks = 6

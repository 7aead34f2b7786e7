"""SSGAH, semi-supervised generative adversarial hashing: triplets for unlabelled items from a generator.

Wang, Hu, Cheng and Hou, "Semi-supervised Generative Adversarial Hashing for Image Retrieval", ECCV 2018. Three networks:

* the generator G turns an item x (labelled or not) and noise into a similar item x⁺ and a dissimilar one x⁻;
* the discriminator D separates real triplets (x, p, n) of labelled items from synthetic ones (x, x⁺, x⁻), so that G learns
  similarity and not just the appearance of items;
* the hashing network H, with h = sigmoid(u), learns from both (semi-supervised ranking loss):
  mean max(0, m + d(a, p) - d(a, n)) over real triplets, plus λ times the same over synthetic ones, d(i, j) = ||h_i - h_j||².

G and H are adversaries as well (adversary ranking loss): G maximises the ranking loss of its triplets, as far as D accepts them. With
V = E log D(real) + E log(1 - D(synthetic)), D maximises V and G minimises it. For embeddings G and D are perceptrons, for images small
convolutional networks. Where an equation of the paper was not available, the form above is used. Deviations, and why:

* The three networks step together: ``total`` is the sum of their losses, each with the *other* networks' weights and inputs detached, so
  every network gets the gradient of its own objective only. G maximises log D: log(1 - D) has no gradient when D is certain.
* D also sees real triplets in the wrong order (x, n, p) as synthetic ones. Otherwise, with few labels, it does not learn similarity.
* D is spectrally normalised (Miyato et al., ICLR 2018), gets noisy inputs, and has the target 0.9 for real triplets: on
  embeddings it otherwise detects all synthetic ones after a few steps, and G cannot learn.
* The weight of synthetic triplets rises from 0 at a quarter of the steps to full at three quarters, as an untrained G is useless.
* m is ``bits / 8`` (at least 1), and λ 0.03, chosen on held-out labelled items of the CIFAR-10 features: with 0.2 the ranking is worse, as
  G, H's adversary, makes similar items that are farther than its dissimilar ones, and D accepts them.
* The real triplets of H are all those of the mini-batch, those of D one for each labelled item. The hash layer has small weights at first.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from ..config import Config
from ..data.base import Dataset
from ..losses.npair import label_pairs
from .baseline import Baseline, half_precision, squared_distances, start_small, triplet_ranking
from .trainable import TrainingBatch

Pair = tuple[Tensor, Tensor]


def perceptron(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, with a leaky ReLU and dropout after all but the last."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.LeakyReLU(0.2), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


class FeatureGenerator(nn.Module):
    """From standardised embeddings [n, W] and noise [n, Z] to similar and dissimilar embeddings, two float [n, W]."""

    def __init__(self, width: int, noise: int, hidden: int) -> None:
        super().__init__()
        self.layers = perceptron(width + noise, hidden, hidden, 2 * width)

    def forward(self, x: Tensor, z: Tensor) -> Pair:
        """See the class."""
        similar, dissimilar = self.layers(torch.cat([x, z], dim=1)).chunk(2, dim=1)
        return similar, dissimilar


class ImageGenerator(nn.Module):
    """From normalised images [n, 3, S, S] of at least 4 pixels and noise [n, Z], added at the bottleneck, to similar and dissimilar images:
    a convolutional encoder-decoder with skip connections."""

    def __init__(self, noise: int, hidden: int) -> None:
        super().__init__()
        half = hidden // 2
        self.down1 = nn.Conv2d(3, half, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(half, hidden, 3, stride=2, padding=1)
        self.up1 = nn.Conv2d(hidden + noise, half, 3, padding=1)
        self.up2 = nn.Conv2d(2 * half, half, 3, padding=1)
        self.out = nn.Conv2d(half + 3, 6, 3, padding=1)

    def forward(self, x: Tensor, z: Tensor) -> Pair:
        """See the class."""
        fine = F.leaky_relu(self.down1(x), 0.2)
        coarse = F.leaky_relu(self.down2(fine), 0.2)
        spread = z[:, :, None, None].expand(-1, -1, *coarse.shape[2:])
        up = F.leaky_relu(self.up1(torch.cat([coarse, spread], dim=1)), 0.2)
        up = F.leaky_relu(self.up2(torch.cat([_enlarge(up, fine), fine], dim=1)), 0.2)
        # Normalised pixels are within about ±2.7 (ImageNet's mean and deviation).
        similar, dissimilar = (3 * self.out(torch.cat([_enlarge(up, x), x], dim=1)).tanh()).chunk(2, dim=1)
        return similar, dissimilar


def _enlarge(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


class Discriminator(nn.Module):
    """From triplets of items [n, ...], side by side, to the logit that they are real, float [n]: a perceptron for embeddings, strided
    convolutions for images.

    Args:
        width: of embeddings; 0 for images.
        hidden: widest layer.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        if width:
            self.layers = perceptron(3 * width, hidden, hidden, 1, dropout=0.3)
            return
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise((9, hidden // 4, hidden // 2, hidden)):
            layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, 1))

    def forward(self, x: Tensor, similar: Tensor, dissimilar: Tensor) -> Tensor:
        """See the class."""
        return cast(Tensor, self.layers(torch.cat([x, similar, dissimilar], dim=1)))[:, 0]


def frozen(module: nn.Module, *args: Any) -> Tensor:
    """``module(*args)`` with gradients for the arguments, not for its weights."""
    weights = {name: p.detach() for name, p in module.named_parameters()}
    return cast(Tensor, functional_call(module, weights, args))


@contextlib.contextmanager
def keep_statistics(module: nn.Module) -> Iterator[None]:
    """Context in which batch norms do not update their running statistics."""
    norms = [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [m.momentum for m in norms]
    for m in norms:
        m.momentum = 0.0
    try:
        yield
    finally:
        for m, momentum in zip(norms, momenta, strict=True):
            m.momentum = momentum


def draw_triplets(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of multi-hot labels [B, C] a random row that shares a label and one that shares none, if both exist.

    Returns:
        Anchors, positives and negatives, each int64 [T], T <= B; drawn on the CPU.
    """
    positive, negative = label_pairs(labels.cpu(), torch.empty(0))
    a = (positive.any(1) & negative.any(1)).nonzero()[:, 0]
    if not len(a):
        return a, a, a
    p, n = (torch.multinomial(m[a].float(), 1, generator=generator)[:, 0] for m in (positive, negative))
    return a.to(labels.device), p.to(labels.device), n.to(labels.device)


def ranking(a: Tensor, p: Tensor, n: Tensor, margin: float) -> Tensor:
    """Mean of max(0, margin + ||a - p||² - ||a - n||²) over rows, a scalar."""
    lead = (a - p).square().sum(1) - (a - n).square().sum(1)
    return (margin + lead).relu().mean()


class SSGAH(Baseline):
    """See the module docstring. The exported network is H up to u, whose sign is the code."""

    name = "ssgah"
    uses_unlabelled = True
    synthetic, adversary = 0.03, 0.02
    """λ, weight of the synthetic triplets for H, and the weight of the adversary ranking loss, for G."""
    blur, smooth = 0.2, 0.9
    """Standard deviation of the noise on D's inputs (normalised items have about 1), and the target of D for real triplets."""
    noise = 32
    """Width of the noise."""

    def __init__(self, config: Config, dataset: Dataset, image_size: int, n_classes: int) -> None:
        super().__init__(config, dataset, image_size, n_classes)
        start_small(cast(nn.Linear, self.extractor.head), self.draws)
        self.margin = max(1.0, self.bits / 8)
        width, hidden = self.extractor.spec.in_width, 256 if self.extractor.spec.in_width else 64
        self.generator: nn.Module
        self.generator = (
            FeatureGenerator(width, self.noise, hidden) if width else ImageGenerator(self.noise, hidden)
        )
        self.discriminator = Discriminator(width, hidden)
        for layer in (*self.generator.modules(), *self.discriminator.modules()):
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                nn.init.kaiming_normal_(layer.weight, a=0.2, generator=self.draws)
                nn.init.zeros_(cast(Tensor, layer.bias))
        # Its power iteration starts from torch's global random generator.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (), generator=self.draws)))
            for layer in list(self.discriminator.modules()):
                if isinstance(layer, (nn.Linear, nn.Conv2d)):
                    spectral_norm(layer)

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        """``rank`` and ``synthetic`` for H, ``discriminator`` for D, ``generator`` and ``adversary`` for G; and their
        total, in which each network gets gradients from its own loss only."""
        x, n, k = batch.x, len(batch.y), len(batch.x)
        v = self.extractor.input(x).detach()
        with half_precision(x, amp):
            h = self.network(v, True).sigmoid()
        parts = {"rank": triplet_ranking(squared_distances(h[:n], h[:n]), batch.y, self.margin)}

        z = torch.randn(k, self.noise, generator=batch.generator).to(x.device)
        made: Pair = self.generator(v, z)
        still = [m.detach() for m in made]
        with keep_statistics(self.network):
            hashed = self.network(torch.cat(still), True).sigmoid()
            seen = frozen(self.network, torch.cat(made), True).sigmoid()
        parts["synthetic"] = ranking(h, hashed[:k], hashed[k:], self.margin)
        parts["adversary"] = ranking(h.detach(), seen[:k], seen[k:], self.margin)

        a, p, q = draw_triplets(batch.y, batch.generator)

        def blurred(*items: Tensor) -> list[Tensor]:
            return [
                t + self.blur * torch.randn(t.shape, generator=batch.generator).to(t.device) for t in items
            ]

        fake = F.softplus(self.discriminator(*blurred(v, *still))).mean()  # -log(1 - D)
        parts["discriminator"] = fake
        if len(a):
            logit = self.discriminator(*blurred(v[a], v[p], v[q]))
            real = F.binary_cross_entropy_with_logits(logit, torch.full_like(logit, self.smooth))
            swapped = F.softplus(self.discriminator(*blurred(v[a], v[q], v[p]))).mean()
            parts["discriminator"] = (fake + swapped) / 2 + real
        parts["generator"] = F.softplus(-frozen(self.discriminator, *blurred(v, *made))).mean()  # -log D
        # Triplets of an untrained generator are misleading.
        trust = min(1.0, max(0.0, 2 * batch.step / batch.steps - 0.5))
        total = (
            parts["rank"]
            + trust * self.synthetic * parts["synthetic"]
            + parts["discriminator"]
            + parts["generator"]
            - self.adversary * parts["adversary"]
        )
        return {"total": total, **parts}

"""SSGAH, semi-supervised generative adversarial hashing: triplets for unlabelled items from a
generator.

Wang, Hu, Cheng and Hou, "Semi-supervised Generative Adversarial Hashing for Image Retrieval", ECCV
2018. Three networks:

* the generator G turns an item x (labelled or not) and noise into a similar item x⁺ and a
  dissimilar one x⁻;
* the discriminator D separates real triplets (x, p, n) of labelled items from synthetic ones (x,
  x⁺, x⁻), so that G learns similarity and not just the appearance of items;
* the hashing network H, with h = sigmoid(u), learns from both (semi-supervised ranking loss): mean
  max(0, m + d(a, p) - d(a, n)) over real triplets, plus λ times the same over synthetic ones, d(i,
  j) = ||h_i - h_j||².

G and H are adversaries as well (adversary ranking loss): G maximises the ranking loss of its
triplets, as far as D accepts them. With V = E log D(real) + E log(1 - D(synthetic)), D maximises V
and G minimises it. For embeddings G and D are perceptrons, for images small convolutional networks.
Where an equation of the paper was not available, the form above is used. Deviations, and why:

* The three networks step together: ``total`` is the sum of their losses, each with the *other*
  networks' weights and inputs detached, so every network gets the gradient of its own objective
  only. G maximises log D: log(1 - D) has no gradient when D is certain.
* D also sees real triplets in the wrong order (x, n, p) as synthetic ones. Otherwise, with few
  labels, it does not learn similarity.
* D is spectrally normalised (Miyato et al., ICLR 2018), has noisy inputs, and the target 0.9 for
  real triplets: on embeddings it otherwise detects all synthetic ones after a few steps, and G
  cannot learn. An untrained G misleads: its triplets' weight rises from 0 at a quarter of the steps
  to full at three quarters.
* m is ``bits / 8`` (at least 1), and λ 0.03, chosen on held-out labelled items of the CIFAR-10
  features: with 0.2 the ranking is worse, as G, H's adversary, makes similar items that are farther
  than its dissimilar ones, and D accepts them.
* The real triplets of H are all those of the mini-batch, those of D one for each labelled item. The
  hash layer has small weights at first.
"""

from __future__ import annotations

import functools
import itertools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from ..losses.npair import label_pairs
from .baseline import Baseline, squared_distances, start_small, triplet_margin, triplet_ranking
from .trainable import TrainingBatch, weighted

Pair = tuple[Tensor, Tensor]


def perceptron(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Linear layers, with a leaky ReLU and dropout after all but the last."""
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise(widths):
        layers += [nn.Linear(n_in, n_out), nn.LeakyReLU(0.2), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


class Generator(nn.Module):
    """From normalised items x [n, ...] and noise z [n, Z] to similar and dissimilar ones, like x: a
    perceptron for embeddings of ``width``; for images (0; of at least 4 pixels) convolutions down
    and up, with skip connections, and the noise at the bottleneck."""

    def __init__(self, width: int, noise: int, hidden: int) -> None:
        super().__init__()
        self.layers: nn.Module | None = None
        if width:
            self.layers = perceptron(width + noise, hidden, hidden, 2 * width)
            return
        half = hidden // 2
        self.down1 = nn.Conv2d(3, half, 3, stride=2, padding=1)
        self.down2 = nn.Conv2d(half, hidden, 3, stride=2, padding=1)
        self.up1 = nn.Conv2d(hidden + noise, half, 3, padding=1)
        self.up2 = nn.Conv2d(2 * half, half, 3, padding=1)
        self.out = nn.Conv2d(half + 3, 6, 3, padding=1)

    def forward(self, x: Tensor, z: Tensor) -> Pair:
        if self.layers is not None:
            similar, dissimilar = self.layers(torch.cat([x, z], dim=1)).chunk(2, dim=1)
            return similar, dissimilar
        fine = F.leaky_relu(self.down1(x), 0.2)
        coarse = F.leaky_relu(self.down2(fine), 0.2)
        spread = z[:, :, None, None].expand(-1, -1, *coarse.shape[2:])
        up = F.leaky_relu(self.up1(torch.cat([coarse, spread], dim=1)), 0.2)
        up = F.leaky_relu(self.up2(torch.cat([_enlarge(up, fine), fine], dim=1)), 0.2)
        # Normalised pixels are within about ±2.7 (ImageNet's mean and deviation).
        similar, dissimilar = (3 * self.out(torch.cat([_enlarge(up, x), x], dim=1)).tanh()).chunk(
            2, dim=1
        )
        return similar, dissimilar


def _enlarge(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[2:], mode="nearest")


class Discriminator(nn.Module):
    """From triplets of items [n, ...], side by side, to the logit that they are real, float [n]: a
    perceptron for embeddings of ``width``, strided convolutions for images (0)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        if width:
            self.layers = perceptron(3 * width, hidden, hidden, 1, dropout=0.3)
            return
        layers: list[nn.Module] = []
        for n_in, n_out in itertools.pairwise((9, hidden // 4, hidden // 2, hidden)):
            layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
        self.layers = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, 1)
        )

    def forward(self, x: Tensor, similar: Tensor, dissimilar: Tensor) -> Tensor:
        return cast(Tensor, self.layers(torch.cat([x, similar, dissimilar], dim=1)))[:, 0]


def fixed(module: nn.Module) -> dict[str, Tensor]:
    """The weights without gradients."""
    return {name: p.detach() for name, p in module.named_parameters()}


def draw_triplets(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of multi-hot labels [B, C] a random row that shares a label and one that shares
    none, if both exist: int64 [T] each, with their anchors first; drawn on the CPU."""
    positive, negative = label_pairs(labels.cpu(), torch.empty(0))
    a = (positive.any(1) & negative.any(1)).nonzero()[:, 0]
    if not len(a):
        return a, a, a
    p, n = (
        torch.multinomial(m[a].float(), 1, generator=generator)[:, 0] for m in (positive, negative)
    )
    return a, p, n


class SSGAH(Baseline):
    """See the module docstring. The exported network is H up to u, whose sign is the code."""

    uses_unlabelled = True
    synthetic, adversary = 0.03, 0.02
    """λ, weight of the synthetic triplets for H, and the weight of the adversary ranking loss, for
    G."""
    blur, smooth = 0.2, 0.9
    """Standard deviation of the noise on D's inputs (normalised items have about 1), and the target
    of D for real triplets."""
    noise = 32
    """Width of the noise."""

    def build(self) -> None:
        start_small(cast(nn.Linear, self.extractor.head), self.draws)
        self.margin = max(1.0, self.bits / 8)
        width, hidden = self.extractor.spec.in_width, 256 if self.extractor.spec.in_width else 64
        self.generator = Generator(width, self.noise, hidden)
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
        n, k = len(batch.y), len(batch.x)
        v = self.extractor.input(batch.x).detach()
        with torch.autocast(v.device.type, torch.bfloat16, amp):
            h = self.extractor(v, True).float().sigmoid()
        parts = {"rank": triplet_ranking(squared_distances(h[:n], h[:n]), batch.y, self.margin)}

        z = torch.randn(k, self.noise, generator=batch.generator).to(v.device)
        synthetic: Pair = self.generator(v, z)
        still = [m.detach() for m in synthetic]
        # Statistics of batch norms are of real items only.
        buffers = {name: b.clone() for name, b in self.extractor.named_buffers()}
        hashed = functional_call(self.extractor, buffers, (torch.cat(still), True)).sigmoid()
        hashed_for_generator = functional_call(
            self.extractor, buffers | fixed(self.extractor), (torch.cat(synthetic), True)
        ).sigmoid()
        parts["synthetic"] = triplet_margin(h - hashed[:k], h - hashed[k:], self.margin)
        adversary = triplet_margin(
            h.detach() - hashed_for_generator[:k],
            h.detach() - hashed_for_generator[k:],
            self.margin,
        )

        a, p, q = draw_triplets(batch.y, batch.generator)

        def blurred(*items: Tensor) -> list[Tensor]:
            draw = functools.partial(torch.randn, generator=batch.generator)
            return [t + self.blur * draw(t.shape).to(t.device) for t in items]

        fake = F.softplus(self.discriminator(*blurred(v, *still))).mean()  # -log(1 - D)
        parts["discriminator"] = fake
        if len(a):
            logit = self.discriminator(*blurred(v[a], v[p], v[q]))
            real = F.binary_cross_entropy_with_logits(logit, torch.full_like(logit, self.smooth))
            swapped = F.softplus(self.discriminator(*blurred(v[a], v[q], v[p]))).mean()
            parts["discriminator"] = (fake + swapped) / 2 + real
        accepted = functional_call(
            self.discriminator, fixed(self.discriminator), (*blurred(v, *synthetic),)
        )
        parts["generator"] = F.softplus(-accepted).mean()  # -log D
        parts["adversary"] = adversary
        trust = min(1.0, max(0.0, 2 * batch.step / batch.steps - 0.5))
        return weighted(parts, synthetic=trust * self.synthetic, adversary=-self.adversary)

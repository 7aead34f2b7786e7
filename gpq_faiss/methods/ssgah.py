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

import itertools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import spectral_norm

from ..losses.npair import label_pairs
from .baseline import Baseline, squared_distances, start_small, triplet_margin, triplet_ranking
from .trainable import TrainingBatch, run_network, weighted

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
        if width:
            self.layers = perceptron(width + noise, hidden, hidden, 2 * width)
        else:
            half = hidden // 2
            channels = [
                (3, half),
                (half, hidden),
                (hidden + noise, half),
                (2 * half, half),
                (half + 3, 6),
            ]
            self.convolutions = nn.ModuleList(
                nn.Conv2d(n_in, n_out, 3, stride, padding=1)
                for (n_in, n_out), stride in zip(channels, (2, 2, 1, 1, 1), strict=True)
            )

    def forward(self, x: Tensor, z: Tensor) -> Pair:
        if x.ndim == 2:
            return cast(Pair, self.layers(torch.cat([x, z], dim=1)).chunk(2, dim=1))
        down1, down2, up1, up2, out = self.convolutions
        fine = F.leaky_relu(down1(x), 0.2)
        coarse = F.leaky_relu(down2(fine), 0.2)
        spread = z[:, :, None, None].expand(-1, -1, *coarse.shape[2:])
        up = F.leaky_relu(up1(torch.cat([coarse, spread], dim=1)), 0.2)
        up = F.leaky_relu(up2(torch.cat([F.interpolate(up, fine.shape[2:]), fine], dim=1)), 0.2)
        pixels = out(torch.cat([F.interpolate(up, x.shape[2:]), x], dim=1))
        # Normalised pixels are within about ±2.7 (ImageNet's mean and deviation).
        return cast(Pair, (3 * pixels.tanh()).chunk(2, dim=1))


def make_discriminator(width: int, hidden: int) -> nn.Sequential:
    """Make a network from triplets of items [n, ...], side by side, to the logit that they are
    real, float [n, 1]: a perceptron for embeddings of ``width``, strided convolutions for images
    (0)."""
    if width:
        return perceptron(3 * width, hidden, hidden, 1, dropout=0.3)
    layers: list[nn.Module] = []
    for n_in, n_out in itertools.pairwise((9, hidden // 4, hidden // 2, hidden)):
        layers += [nn.Conv2d(n_in, n_out, 3, stride=2, padding=1), nn.LeakyReLU(0.2)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(hidden, 1))


def detached_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of a network by name, for calls through which it gets no gradient."""
    return {name: p.detach() for name, p in module.named_parameters()}


def draw_triplets(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """For each row of multi-hot labels [B, C] a random row that shares a label and one that shares
    none, if both exist: int64 [T] each, with their anchors first; drawn on the CPU."""
    positive, negative = label_pairs(labels.cpu())
    a = (positive.any(1) & negative.any(1)).nonzero()[:, 0]
    if not len(a):
        return a, a, a
    p, n = (torch.multinomial(m[a].float(), 1, generator=generator) for m in (positive, negative))
    return a, p[:, 0], n[:, 0]


class SSGAH(Baseline):
    """See the module docstring. The exported network is H up to u, whose sign is the code."""

    uses_unlabelled = True
    synthetic, adversary = 0.03, 0.02
    """λ, weight of the synthetic triplets for H, and the weight of the adversary ranking loss, for
    G."""
    input_noise, smooth = 0.2, 0.9
    """Standard deviation of the noise on D's inputs (normalised items have about 1), and the target
    of D for real triplets."""
    noise_width = 32
    """Width of the noise."""

    def build(self) -> None:
        start_small(cast(nn.Linear, self.backbone.head), self.draws)
        self.margin = max(1.0, self.bits / 8)
        width = self.backbone.spec.in_width
        hidden = 256 if width else 64
        self.generator = Generator(width, self.noise_width, hidden)
        self.discriminator = make_discriminator(width, hidden)
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

    def synthetic_ranking(self, h: Tensor, pairs: Pair, state: dict[str, Tensor]) -> Tensor:
        """The ranking loss of synthetic triplets, whose anchors have the hashes h float [n, bits].
        ``state`` replaces weights and buffers of the hashing network."""
        hashed = functional_call(self.backbone, state, (torch.cat(pairs), True)).sigmoid()
        similar, dissimilar = hashed.chunk(2)
        return triplet_margin(h - similar, h - dissimilar, self.margin)

    def discriminator_logits(
        self, generator: torch.Generator, *triplets: Tensor, state: dict[str, Tensor] | None = None
    ) -> Tensor:
        """The discriminator's logits of noisy triplets, float [n]; ``state`` replaces its
        weights."""
        noisy = [
            items
            + self.input_noise * torch.randn(items.shape, generator=generator).to(items.device)
            for items in triplets
        ]
        out = functional_call(self.discriminator, state or {}, (torch.cat(noisy, dim=1),))
        return cast(Tensor, out)[:, 0]

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        n = len(batch.y)
        draws = batch.generator
        v = self.backbone.input(batch.x).detach()
        h = run_network(lambda v: self.backbone(v, True), v, amp).sigmoid()
        z = torch.randn(len(v), self.noise_width, generator=draws).to(v.device)
        synthetic: Pair = self.generator(v, z)
        detached = synthetic[0].detach(), synthetic[1].detach()
        # Statistics of batch norms are of real items only.
        buffers = {name: b.clone() for name, b in self.backbone.named_buffers()}
        frozen = buffers | detached_weights(self.backbone)
        parts = {
            "rank": triplet_ranking(squared_distances(h[:n], h[:n]), batch.y, self.margin),
            "synthetic": self.synthetic_ranking(h, detached, buffers),
            "adversary": self.synthetic_ranking(h.detach(), synthetic, frozen),
        }
        a, p, q = draw_triplets(batch.y, draws)
        parts["discriminator"] = F.softplus(
            self.discriminator_logits(draws, v, *detached)
        ).mean()  # -log(1 - D)
        if len(a):
            logits = self.discriminator_logits(draws, v[a], v[p], v[q])
            real = F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, self.smooth))
            swapped = F.softplus(self.discriminator_logits(draws, v[a], v[q], v[p])).mean()
            parts["discriminator"] = (parts["discriminator"] + swapped) / 2 + real
        accepted = self.discriminator_logits(
            draws, v, *synthetic, state=detached_weights(self.discriminator)
        )
        parts["generator"] = F.softplus(-accepted).mean()  # -log D
        trust = min(1.0, max(0.0, 2 * batch.step / batch.steps - 0.5))
        return weighted(parts, synthetic=trust * self.synthetic, adversary=-self.adversary)

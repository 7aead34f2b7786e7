"""BGDH, semi-supervised deep hashing with a bipartite graph between the data and anchors.

Yan, Zhang and Li, "Semi-Supervised Deep Hashing with a Bipartite Graph", IJCAI 2017, in its
inductive variant: an embedding e(x), trained to predict the context of x in the graph, is fed to
the hash layer together with the deep features. The loss is

* for the labelled items the negative log-likelihood of pairwise similarity, log(1 + exp θ_ij) -
  s_ij θ_ij with θ_ij = u_i·u_j / 2, and η times the quantisation error ||u_i - sign u_i||² (Li et
  al., "Feature Learning based Deep Supervised Hashing with Pairwise Labels", IJCAI 2016);
* for all items λ times the graph term, -log σ(γ w_c·e_i) (Yang et al., "Revisiting Semi-Supervised
  Learning with Graph Embeddings", ICML 2016): γ = 1 for a context c reached by a random walk from
  i, -1 for a random one.

The graph (Liu et al., "Hashing with Graphs", ICML 2011): anchors are the k-means centres of a
sample of the training items; an item is linked to its s nearest anchors with weights z ~ exp(-||x -
a||² / t) that sum to 1, by which walks alternate between items and anchors. Its features are the
(standardised) embeddings; for images those of a copy of the network, frozen after a third of the
steps (at the first with pretrained weights), as random weights tell nothing. Until then there is no
graph term.

The full paper was not available: the terms follow its abstract and the works it builds on.
Deviations, and why:

* The contexts are the anchors, not the items: so there are A vectors w_c for any size of the data
  set. Items along the walk are summed out exactly: the step from anchor to anchor has the
  probabilities T = Λ⁻¹ ZᵀZ over the sample.
* Pairs are those of the mini-batch, and sums are means, with equal weight for similar and
  dissimilar pairs (as in Cao et al., "HashNet", ICCV 2017): with nine dissimilar pairs to a similar
  one the plain mean learns next to nothing in 500 steps.
* The hash layer starts with small weights. λ, η, the number of anchors and the walk were chosen on
  the CIFAR-10 features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..faissio.kmeans import kmeans
from ..losses.npair import label_pairs, masked_mean
from ..nn.backbones import Backbone, make_head
from .baseline import Baseline, squared_distances, start_small
from .trainable import TrainingBatch, weighted

EMBEDDING = 128
"""Width of e(x)."""


class BipartiteGraph(nn.Module):
    """Graph of items with features [n, W] and at most A anchors, ``nearest`` per item; memory O(A·W
    + A²) for any number of items.

    Buffers, so that a resumed training uses the same graph: the number of anchors ``used``, int64
    [], 0 before :meth:`fit`; ``anchors`` float32 [A, W]; ``bandwidth`` t, float32 [];
    ``transitions`` T, float32 [A, A], probabilities from anchor to anchor via an item.
    """

    def __init__(self, anchors: int, width: int, nearest: int) -> None:
        super().__init__()
        self.nearest = nearest
        self.used = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.anchors = nn.Buffer(torch.zeros(anchors, width))
        self.bandwidth = nn.Buffer(torch.ones(()))
        self.transitions = nn.Buffer(torch.zeros(anchors, anchors))

    @torch.no_grad()
    def fit(self, sample: Tensor, seed: int) -> None:
        """Fit the graph to a sample float [n, W]."""
        used = min(len(self.anchors), len(sample))
        self.used.fill_(used)
        self.anchors[:used].copy_(
            torch.from_numpy(kmeans(sample.cpu().numpy(), used, seed, niter=15))
        )
        d = squared_distances(sample, self.anchors[:used]).topk(self.nearest, largest=False).values
        self.bandwidth.copy_(d.mean().clamp_min(1e-12))
        Z = sample.new_zeros(len(sample), len(self.anchors)).scatter(
            1, *self.nearest_anchors(sample)
        )
        T = Z.T @ Z
        # An anchor without items only leads to itself.
        T.diagonal()[T.sum(1) == 0] = 1
        self.transitions.copy_(T / T.sum(1, keepdim=True))

    def nearest_anchors(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the anchors to which items [n, W] are linked, int64 [n, s], and the weights of
        the links, float [n, s]."""
        d, near = squared_distances(x, self.anchors[: int(self.used)]).topk(
            self.nearest, largest=False
        )
        return near, (-d / self.bandwidth).softmax(dim=1)

    @torch.no_grad()
    def walk(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """A context for every item float [n, W]: the first or the second anchor of a random walk,
        int64 [n], on the CPU."""
        near, weight = (t.cpu() for t in self.nearest_anchors(x))
        first = near.gather(1, torch.multinomial(weight, 1, generator=generator))[:, 0]
        goes_on = torch.randint(2, first.shape, generator=generator) > 0
        second = torch.multinomial(self.transitions.cpu()[first], 1, generator=generator)[:, 0]
        return torch.where(goes_on, second, first)


def pairwise_likelihood(u: Tensor, labels: Tensor) -> Tensor:
    """Half the sum of mean -log σ(θ_ij) over pairs that share a label and mean -log σ(-θ_ij) over
    those that do not, a scalar, for u float [B, bits] and multi-hot labels [B, C]; θ_ij = u_i·u_j /
    2, i != j."""
    positive, negative = label_pairs(labels)
    theta = u @ u.T / 2
    return (
        masked_mean(F.softplus(-theta), positive) + masked_mean(F.softplus(theta), negative)
    ) / 2


class BGDH(Baseline):
    """See the module docstring. The embedding is the backbone's output; the sign of the hash
    layer's output u is the code."""

    uses_unlabelled = True
    weight, quantisation = 1.0, 0.1
    """λ of the graph term, and η."""
    nearest = 5
    """s, anchors per item."""
    negatives = 5
    """Random contexts per context reached by a walk."""

    def build(self) -> None:
        backbone = self.backbone
        deep = cast(nn.Linear, backbone.head).in_features
        self.hidden = make_head(EMBEDDING, EMBEDDING, self.draws)
        self.hash = nn.Linear(deep + EMBEDDING, self.bits)
        start_small(self.hash, self.draws)
        # What the graph sees: the input, or a frozen copy, as features of the network in training
        # would drift away from the anchors.
        self.graph_input: nn.Module = backbone.input
        if backbone.spec.kind == "images":
            self.graph_input = copy.deepcopy(backbone).requires_grad_(False)
            self.graph_input.head = nn.Identity()
        anchors = max(self.nearest, min(500, self.items // 10))
        self.graph = BipartiteGraph(anchors, backbone.spec.in_width or deep, self.nearest)
        self.contexts = nn.Parameter(
            torch.randn(anchors, EMBEDDING, generator=self.draws) / EMBEDDING**0.5
        )

    def output_width(self) -> int:
        return EMBEDDING

    def hash_and_embedding(self, deep: Tensor) -> tuple[Tensor, Tensor]:
        """The outputs u of the hash layer, float [n, bits], and e, float [n, 128], of deep
        features float [n, W]."""
        e = self.backbone.head(deep)
        return self.hash(torch.cat([deep, self.hidden(e).relu()], dim=1)), e

    def forward(self, x: Tensor) -> Tensor:
        return self.hash_and_embedding(self.trunk_features(x))[0]

    @torch.no_grad()
    def before_step(self, step: int, steps: int, sample: Callable[[int], Iterator[Tensor]]) -> None:
        """Build the graph, when it is due, from 20 training items per possible anchor."""
        of_images = isinstance(self.graph_input, Backbone)
        first = steps // 3 if of_images and self.config.network.weights == "none" else 0
        if step >= first and not int(self.graph.used):
            if of_images:
                self.graph_input.load_state_dict(self.backbone.state_dict(), strict=False)
            items = sample(20 * len(self.graph.anchors))
            self.graph.fit(torch.cat([self.graph_features(x) for x in items]), self.seed)

    @torch.no_grad()
    def graph_features(self, x: Tensor) -> Tensor:
        """What the graph sees of items, float32 [n, W]."""
        return cast(Tensor, self.graph_input.eval()(x)).float()

    def losses(self, batch: TrainingBatch, *, amp: bool) -> dict[str, Tensor]:
        u, e = self.hash_and_embedding(self.trunk_features(batch.x, amp))
        labelled = u[: len(batch.y)]
        parts = {
            "pairs": pairwise_likelihood(labelled, batch.y),
            "quantisation": (labelled - torch.where(labelled > 0, 1.0, -1.0)).square().mean(),
        }
        if used := int(self.graph.used):
            positive = self.graph.walk(self.graph_features(batch.x), batch.generator)
            negatives = torch.randint(used, (len(e), self.negatives), generator=batch.generator)
            context_ids = torch.cat([positive[:, None], negatives], dim=1).to(e.device)
            scores = torch.einsum("nre,ne->nr", self.contexts[context_ids], e)
            likelihood = F.logsigmoid(scores[:, 0]).sum() + F.logsigmoid(-scores[:, 1:]).sum()
            parts["graph"] = -likelihood / scores.numel()
        return weighted(parts, quantisation=self.quantisation, graph=self.weight)

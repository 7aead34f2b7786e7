"""Small class-posterior codes for tests: settings, networks, items, and scores by definition."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.methods import codewords
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.posterior import PosteriorNetwork

C, WIDTH, D = 5, 9, 18
CLASS_CODEBOOKS = (3, 2)
"""Of three: with and without a feature codebook."""
WITH_JOINT = (*CLASS_CODEBOOKS, 0)
"""And joint ones."""


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    """Score tables are fitted in fewer steps than by default: the tests ask what they are, not how good."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codewords, "_TABLE_STEPS", 60)
        patched.setattr(codewords, "_LOGIT_STEPS", 10)
        yield


def config_of(A: int = 3, **training: object) -> Config:
    features = {"feature_weight": 0.0} if A == 3 else {"feature_weight": 0.3, "class_codebooks": A}
    changes = {"quantizer": {"codebooks": 3}, "loss": {"lambda2": 0.1}, "network": {"hidden": [16]}}
    changes |= {"posterior": {"networks": 4, **features}, "training": training}
    return validate(merge(preset("recommended"), changes))


def method(A: int = 3, *, width: int = WIDTH, **changes: dict[str, object]) -> PosteriorCodes:
    config = merge(config_of(A), changes)
    net = build_network(config, {"kind": "features", "width": width}, C)
    assert isinstance(net, PosteriorNetwork)
    return PosteriorCodes(net, config)


def network(A: int = 3, *, width: int = WIDTH) -> PosteriorNetwork:
    """A network that means nothing, with codebooks fitted to what it says."""
    return copy.deepcopy(_network(A, width))


@functools.cache
def _network(A: int, width: int) -> PosteriorNetwork:
    made = method(A, width=width)
    made.fit_codebooks(Sampler(items(600, width=width)))
    return made.network.eval()


def items(n: int, seed: int = 0, width: int = WIDTH) -> Tensor:
    """Features whose directions are of unlike weight, float32 [n, width]."""
    x = np.random.default_rng([seed, n]).normal(size=(n, width)) * np.linspace(2, 0.5, width) + 0.3
    return torch.from_numpy(x).float()


def seen(net: PosteriorNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """Features and posteriors."""
    with torch.no_grad():
        features, raw = net.features(x)
        return features, net.posterior(raw)


def scored(net: PosteriorNetwork, ask: Tensor, codes: Tensor) -> Tensor:
    """Scores by definition, float [Q, n]: the weighted sum of two inner products, each by the longest codeword of its part."""
    features, p = seen(net, ask)
    A = net.A
    if not A:
        coded = net.feature_codewords[torch.arange(net.M), codes].sum(1)
        return net.feature_targets(features, p) @ coded.T / net.feature_codewords.norm(dim=2).max()
    total = net.weights[0] * p @ net.tables[torch.arange(A), codes[:, :A]].sum(1).T
    total = total / net.tables.norm(dim=2).max()
    if A < net.M:
        words = net.feature_codewords
        likeness = net.residual(features, p) @ words[torch.arange(net.M - A), codes[:, A:]].sum(1).T
        total = total + net.weights[1] * likeness / words.norm(dim=2).max()
    return total


class Sampler:
    """What :meth:`fit_codebooks` draws from; remembers how many items it was requested."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.asked: list[int] = []

    def __call__(self, n: int) -> Iterator[Tensor]:
        self.asked.append(n)
        yield from torch.split(self.x[:n], 100)

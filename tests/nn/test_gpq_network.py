"""The network of GPQ: heads of their own for the sub-spaces, re-expressed vectors, codebooks placed on data; and what holds of
every preset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_factory import reexpressed

from gpq_faiss.config import PRESETS, Config, LossConfig, preset, validate
from gpq_faiss.errors import UsageError
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.gpq_beliefs import BeliefGPQ
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.gpq import GPQNetwork
from gpq_faiss.nn.gpq_beliefs import BeliefNetwork
from gpq_faiss.nn.heads import SubspaceHeads
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.posterior import PosteriorNetwork
from gpq_faiss.nn.quantizer import unit


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@given(
    B=st.integers(1, 5),
    width=st.integers(1, 6),
    M=st.integers(1, 4),
    hidden=st.integers(1, 5),
    d=st.integers(1, 4),
)
@settings(deadline=None, max_examples=30)
def test_heads_are_m_perceptrons_side_by_side(B: int, width: int, M: int, hidden: int, d: int) -> None:
    heads = SubspaceHeads(width, M, hidden, d, generator=generator())
    with torch.no_grad():
        heads.bias.normal_(generator=generator(1))
    x = torch.randn(B, width, generator=generator(2))
    out = heads(x).detach().view(B, M, d)
    for m in range(M):
        for b in range(B):
            units = [
                max(
                    0.0,
                    float(
                        sum(x[b, i] * heads.into.detach()[m, i, h] for i in range(width))
                        + heads.bias.detach()[m, 0, h]
                    ),
                )
                for h in range(hidden)
            ]
            expected = [
                sum(u * float(heads.out.detach()[m, h, j]) for h, u in enumerate(units)) for j in range(d)
            ]
            np.testing.assert_allclose(out[b, m].numpy(), expected, rtol=1e-4, atol=1e-5)


def test_noise_is_drawn_for_each_subspace_and_only_in_training() -> None:
    heads = SubspaceHeads(8, 3, 16, 4, noise=1.0, generator=generator())
    # The same weights in every sub-space: only the noise can tell them apart.
    with torch.no_grad():
        heads.into.copy_(heads.into[:1].expand_as(heads.into))
        heads.out.copy_(heads.out[:1].expand_as(heads.out))
    x = torch.randn(5, 8, generator=generator(1))
    noisy = heads(x).view(5, 3, 4)
    assert not torch.allclose(noisy[:, 0], noisy[:, 1])
    heads.eval()
    quiet = heads(x).view(5, 3, 4)
    torch.testing.assert_close(quiet[:, 0], quiet[:, 1])
    torch.testing.assert_close(heads(x), heads(x), rtol=0, atol=0)


@pytest.mark.parametrize("wrong", [{"M": 0}, {"hidden": 0}, {"dropout": 1.0}, {"noise": -1.0}])
def test_impossible_heads_are_refused(wrong: dict[str, float]) -> None:
    arguments = {"in_width": 4, "M": 2, "hidden": 3, "d": 2, **wrong}
    with pytest.raises(UsageError, match="heads of"):
        SubspaceHeads(**arguments, generator=generator())  # type: ignore[arg-type]


def network(C: int = 4, *, reexpress: bool = True) -> GPQNetwork:
    return GPQNetwork(
        torch.nn.Linear(7, 3 * 6), 3, 8, 6, C, alpha=20.0, reexpress_vectors=reexpress, generator=generator()
    )


def test_reexpressed_vectors_are_mixtures_of_the_prototypes_by_their_posterior() -> None:
    net = network()
    x = torch.randn(9, 7, generator=generator(1))
    directions = net.directions(net.backbone(x)).detach().numpy().astype(np.float64)
    W = unit(net.classifier.raw).detach().numpy().astype(np.float64)
    out = net(x).detach().view(9, 3, 6).numpy()
    for b in range(9):
        for m in range(3):
            weight = np.exp([20.0 * directions[b, m] @ w for w in W[m]])
            mixture = (weight / weight.sum()) @ W[m]
            np.testing.assert_allclose(out[b, m], mixture / np.linalg.norm(mixture), atol=1e-5)
    plain = network(reexpress=False)
    torch.testing.assert_close(plain(x).view(9, 3, 6), plain.directions(plain.backbone(x)))


def test_prototypes_start_orthogonal_where_they_can() -> None:
    for C in (2, 4, 6):
        W = unit(network(C).classifier.raw)
        gram = torch.einsum("mcd,mkd->mck", W, W)
        torch.testing.assert_close(gram, torch.eye(C).expand(3, C, C), rtol=0, atol=1e-5)
    assert torch.isfinite(network(9)(torch.randn(2, 7))).all()  # more classes than dimensions


def test_a_codeword_on_a_direction_becomes_its_vector() -> None:
    """Codewords and vectors pass through the same map, so placing codewords by k-means on directions is right."""
    net = network()
    x = torch.randn(8, 7, generator=generator(3))
    directions = net.directions(net.backbone(x)).detach()
    with torch.no_grad():
        net.codewords.raw.copy_(directions.transpose(0, 1))
    vectors = net.vectors(directions)
    torch.testing.assert_close(net.codebooks(), vectors.transpose(0, 1))


CONFIGS = {n: c for n, c in PRESETS.items() if c.network.backbone != "vgg"} | {"reexpressed": reexpressed()}
"""Every preset for features, and every setting of the network without a committee."""


def any_method(config: Config) -> GPQ | BeliefGPQ | PosteriorCodes:
    network = build_network(config, {"kind": "features", "width": 10}, 3)
    if isinstance(network, BeliefNetwork):
        return BeliefGPQ(network, config)
    if isinstance(network, PosteriorNetwork):
        return PosteriorCodes(network, config)
    return GPQ(network, config)


def method(config: Config) -> GPQ:
    made = any_method(config)
    assert isinstance(made, GPQ)
    return made


def batch(step: int, steps: int = 10, unlabelled: int = 6) -> TrainingBatch:
    y = torch.eye(3)[torch.arange(12) % 3]
    return TrainingBatch(
        torch.randn(12 + unlabelled, 10, generator=generator(step)),
        y,
        step,
        steps,
        generator(),
    )


def test_the_classifier_trains_alone_until_the_codebooks_start() -> None:
    gpq = method(reexpressed())
    assert set(gpq.losses(batch(2), amp=False)) == {"total", "classification", "entropy"}
    assert set(gpq.losses(batch(3), amp=False)) == {
        "total",
        "npair",
        "classification",
        "entropy",
        "regression",
    }
    paper = method(preset("paper"))
    assert set(paper.losses(batch(0), amp=False)) == {"total", "npair", "classification", "entropy"}


def test_codewords_are_placed_once_on_the_data() -> None:
    gpq = method(reexpressed())
    asked: list[int] = []

    def sample(n: int) -> Iterator[torch.Tensor]:
        asked.append(n)
        yield from torch.randn(200, 10, generator=generator(5)).split(50)

    before = gpq.codebooks().copy()
    for step in (0, 1, 2, 4):
        gpq.before_step(step, 10, sample)
    assert not asked
    np.testing.assert_array_equal(gpq.codebooks(), before)
    gpq.before_step(3, 10, sample)
    assert len(asked) == 1
    assert not np.array_equal(gpq.codebooks(), before)
    torch.testing.assert_close(gpq.network.codewords.raw.data, gpq.exported().codewords.raw.data)
    assert gpq.network.training


@pytest.mark.parametrize("name", ["recommended", "reexpressed"])
def test_the_average_follows_the_weights_and_is_what_is_exported(name: str) -> None:
    base = CONFIGS[name]
    config = replace(base, training=replace(base.training, ema=0.99))
    gpq = any_method(config)
    assert gpq.exported() is gpq.average
    mean = {k: v.clone() for k, v in gpq.network.state_dict().items()}
    for step in range(5):
        with torch.no_grad():
            for p in gpq.network.parameters():
                p.add_(torch.randn(p.shape, generator=generator(step)))
        gpq.after_step(step)
        decay = min(config.training.ema, (step + 1) / (step + 10))
        now = gpq.network.state_dict()
        mean = {
            k: decay * v + (1 - decay) * now[k] if v.is_floating_point() else now[k] for k, v in mean.items()
        }
    for entry, value in gpq.exported().state_dict().items():
        torch.testing.assert_close(value, mean[entry])
    plain = method(preset("paper"))
    assert plain.exported() is plain.network


def test_the_total_is_the_weighted_sum_of_its_parts() -> None:
    weights = LossConfig(lambda0=0.3, lambda1=0.7, lambda2=0.2, lambda3=5.0)
    gpq = method(replace(preset("paper"), loss=weights)).eval()
    parts = gpq.losses(batch(9), amp=False)
    expected = (
        0.3 * parts["npair"]
        + 0.7 * parts["classification"]
        - 0.2 * parts["entropy"]
        + 5 * parts["regression"]
    )
    torch.testing.assert_close(parts["total"], expected)


def test_the_entropy_is_raised_by_the_classifier_and_lowered_by_the_network() -> None:
    """One step down the total: each side of the reversal moves the entropy its own way (eq. 4)."""
    config = replace(preset("paper"), loss=LossConfig(lambda0=1e-12, lambda1=0.0, lambda2=1.0))
    for side, sign in (("classifier", 1), ("backbone", -1)):
        gpq = method(config).eval()
        before = gpq.losses(batch(9, unlabelled=40), amp=False)
        before["total"].backward()
        with torch.no_grad():
            for p in getattr(gpq.network, side).parameters():
                if p.grad is not None:
                    p.sub_(1e-3 * p.grad / p.grad.norm().clamp_min(1e-12))
        after = gpq.losses(batch(9, unlabelled=40), amp=False)
        assert sign * float((after["entropy"] - before["entropy"]).detach()) > 0, side


@pytest.mark.parametrize("name", list(CONFIGS))
def test_bf16_stays_close(name: str) -> None:
    gpq = any_method(CONFIGS[name]).eval()
    exact, rounded = gpq.losses(batch(9), amp=False), gpq.losses(batch(9), amp=True)
    assert set(exact) == set(rounded)
    assert all(v.dtype == torch.float32 for v in rounded.values())
    for part, value in exact.items():
        torch.testing.assert_close(rounded[part], value, rtol=0.1, atol=0.05)
    assert any(not torch.equal(rounded[p], exact[p]) for p in exact), "autocast did nothing"


@pytest.mark.parametrize("name", list(CONFIGS))
def test_vectors_of_bf16_are_float32_unit_norm_and_close(name: str) -> None:
    """Items and queries as an encoder makes them: the backbone in bf16, all after it in float32."""
    net = any_method(CONFIGS[name]).exported().eval()
    x = torch.randn(20, 10, generator=generator(6))
    with torch.no_grad():
        for queries in (False, True):
            exact = net.finish(net.raw(x, queries=queries))
            rounded = net.finish(net.raw(x, queries=queries, amp=True))
            assert rounded.dtype == torch.float32
            torch.testing.assert_close(exact, net.queries(x) if queries else net(x), rtol=0, atol=1e-6)
            torch.testing.assert_close(rounded.reshape(20, net.M, -1).norm(dim=2), torch.ones(20, net.M))
            cosine = (exact * rounded).sum(dim=1) / net.M
            if isinstance(net, PosteriorNetwork) and not queries:
                # Items are codewords, which a small error changes only where two are nearly as good.
                assert int((cosine > 0.9999).sum()) >= 18
                assert float((net.codes(x, amp=True) == net.codes(x)).all(dim=1).float().mean()) >= 0.8
            else:
                assert float(cosine.min()) > 0.99
                assert not torch.equal(exact, rounded), "autocast did nothing"


@pytest.mark.parametrize("name", list(CONFIGS))
def test_gradients_reach_every_parameter(name: str) -> None:
    gpq = any_method(CONFIGS[name])
    losses = gpq.losses(batch(9), amp=False)
    losses["total"].backward()  # type: ignore[no-untyped-call]
    missing = [
        n for n, p in gpq.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert not missing


def test_a_config_without_any_loss_for_codewords_is_refused() -> None:
    config = replace(preset("paper"), loss=LossConfig(lambda0=0.0))
    with pytest.raises(UsageError, match="nothing would train the codewords"):
        validate(config)

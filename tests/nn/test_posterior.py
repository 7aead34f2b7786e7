"""Class-posterior codes: what the network believes, what it codes, and where its codewords come from."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.encode import encode as encode_vectors
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.data.digits import open_digits
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.faissio.model import read_prototypes
from gpq_faiss.losses import SubspaceClassification, SubspaceEntropy
from gpq_faiss.methods import posterior_codebooks
from gpq_faiss.methods.codewords import fit_codewords
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.posterior_codebooks import fit_class_codebooks
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.additive import assign, assign_logits
from gpq_faiss.nn.heads import SubspaceHeads
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.posterior import (
    CLASS_DIM,
    DIRECTIONS,
    LEAST_POWER,
    TEMPERATURE_POWER,
    PosteriorNetwork,
    count_class_codebooks,
)
from gpq_faiss.pipeline import encode, search
from gpq_faiss.stages.index import index
from gpq_faiss.stages.train import train
from gpq_faiss.store import RowReader

C, WIDTH, D = 5, 9, 18
CLASS_CODEBOOKS = (3, 2)
"""Of three: with and without a feature codebook."""
WITH_JOINT = (*CLASS_CODEBOOKS, 0)
"""And joint ones."""


@pytest.fixture(scope="module", autouse=True)
def few_steps() -> Iterator[None]:
    """Score tables are fitted in fewer steps than by default: these tests ask what they are, not how good."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(posterior_codebooks, "_TABLE_STEPS", 60)
        patched.setattr(posterior_codebooks, "_LOGIT_STEPS", 10)
        yield


def config_of(A: int = 3, **training: object) -> Config:
    features = {"feature_weight": 0.0} if A == 3 else {"feature_weight": 0.3, "class_codebooks": A}
    return validate(
        merge(
            preset("recommended"),
            {
                "quantizer": {"codebooks": 3},
                "posterior": {"committee": 4, "committee_hidden": 16, **features},
                "training": training,
            },
        )
    )


def method(A: int = 3, *, width: int = WIDTH, ema: float = 0.99) -> PosteriorCodes:
    config = config_of(A, ema=ema)
    net = build_network(config, {"kind": "features", "width": width}, C)
    assert isinstance(net, PosteriorNetwork)
    return PosteriorCodes(net, config)


def network(A: int = 3, *, width: int = WIDTH) -> PosteriorNetwork:
    """A network that means nothing, with codebooks fitted to what it says."""
    return copy.deepcopy(_network(A, width))


@functools.cache
def _network(A: int, width: int) -> PosteriorNetwork:
    made = method(A, width=width, ema=0.0)
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


# ------------------------------------------------------------------------------------------------------- what is coded


def test_the_posterior_is_the_mean_of_the_class_networks() -> None:
    net = network()
    _, raw = net.features(items(6))
    found = net.posterior(raw)
    parts = raw.reshape(6, 4, CLASS_DIM)
    each = []
    for n in range(4):
        W = net.classifier.raw[n] / net.classifier.raw[n].norm(dim=1, keepdim=True)
        v = parts[:, n] / parts[:, n].norm(dim=1, keepdim=True)
        each.append(torch.softmax(net.beta * v @ W.T, dim=1))
    assert torch.allclose(found, torch.stack(each).mean(0), atol=1e-5)
    assert torch.allclose(found.sum(1), torch.ones(6), atol=1e-5)


def test_the_posterior_of_items_is_tempered() -> None:
    """To p^t / Σ p^t: the order of the classes stays, and that of items by the odds of two classes."""
    net = network()
    p = seen(net, items(50))[1]
    soft = net.tempered(p)
    t = float(net.power)
    assert 0 < t < 1
    expected = np.array([[v**t for v in row] for row in p.double().tolist()])
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(soft.numpy(), expected, rtol=1e-5)
    assert torch.equal(soft.argsort(dim=1), p.argsort(dim=1))
    assert bool((soft.max(dim=1).values < p.max(dim=1).values).all())
    # One that is sure of its class stays so; equal classes stay equal.
    assert torch.equal(net.tempered(torch.eye(C)), torch.eye(C))
    torch.testing.assert_close(net.tempered(torch.full((1, C), 1 / C)), torch.full((1, C), 1 / C))


@given(aim=st.floats(0.05, 1.0), seed=st.integers(0, 50), n=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_the_committee_is_made_as_sure_as_it_is_right(aim: float, seed: int, n: int) -> None:
    net = network()
    p = torch.softmax(4 * torch.randn(n, C, generator=torch.Generator().manual_seed(seed)), dim=1)
    p[0] = torch.eye(C)[0]  # some probabilities are 0
    net.fit_power(p, aim)
    power = float(net.power)

    def sureness(at: float) -> float:
        raised = p.double() ** at
        return float((raised / raised.sum(dim=1, keepdim=True)).amax(dim=1).mean())

    assert LEAST_POWER <= power <= 1
    clamped = min(max(aim, sureness(LEAST_POWER)), sureness(1.0))
    assert float(net.tempered(p).amax(dim=1).mean()) == pytest.approx(clamped, abs=1e-4)


def test_beside_feature_codebooks_the_power_is_the_square_root() -> None:
    p = torch.softmax(4 * torch.randn(50, C, generator=torch.Generator().manual_seed(1)), dim=1)
    alone, beside = network(), network(2)
    alone.fit_power(p, 0.6)
    beside.fit_power(p, 0.6)
    assert LEAST_POWER < float(alone.power) < 1
    assert float(beside.power) == pytest.approx(float(alone.power) ** 0.5, rel=1e-6)


def test_a_known_accuracy_tempers_what_is_coded() -> None:
    made = method()
    draw = Sampler(items(600))
    made.fit_codebooks(draw)
    first = made.codebooks().copy()
    assert float(made.exported().power) == pytest.approx(TEMPERATURE_POWER)
    p = made.exported().posterior(made.exported().features(items(600))[1])
    # Between what the greatest and the least power give.
    made.accuracy = float(0.8 * p.amax(dim=1).mean() + 0.2 / C)
    made.fit_codebooks(draw)
    assert made.average is not None
    assert float(made.average.power) == float(made.network.power) != pytest.approx(TEMPERATURE_POWER)
    assert float(made.average.tempered(p).amax(dim=1).mean()) == pytest.approx(made.accuracy, abs=1e-4)
    assert not np.allclose(made.codebooks(), first, atol=0.01)


def test_power_and_kind_of_codes_are_kept_with_the_weights() -> None:
    net, other = network(2), network(2)
    assert float(net.power) != 1
    net.place(net.tables, net.tables, net.feature_codewords, net.weights, by_logits=True)
    other.power.fill_(1.0)
    x = items(40, 1)
    assert not torch.equal(other.codes(x), net.codes(x))
    other.load_state_dict(net.state_dict())
    assert float(other.power) == float(net.power)
    assert torch.equal(other.codes(x), net.codes(x))
    for missing in ("power", "by_logits"):
        state = {name: value for name, value in net.state_dict().items() if name != missing}
        with pytest.raises(RuntimeError, match=missing):
            other.load_state_dict(state)


@pytest.mark.parametrize("width", [WIDTH, DIRECTIONS + 8])
def test_the_residual_is_what_the_posterior_does_not_say_in_principal_axes(width: int) -> None:
    net = network(2, width=width)
    everything, q = seen(net, items(600, width=width))
    features, p = seen(net, items(20, 1, width))
    found = net.residual(features, p).double().numpy()
    # The same by numpy: least squares with an intercept, then the singular vectors of what is left.
    whole = everything.double().numpy()
    whole /= np.linalg.norm(whole, axis=1, keepdims=True)
    X = np.c_[q.double().numpy(), np.ones(600)]
    B = np.linalg.solve(X.T @ X + 1e-2 * np.eye(C + 1), X.T @ whole)
    left = whole - X @ B
    _, _, V = np.linalg.svd(left, full_matrices=False)
    kept = min(DIRECTIONS, width)
    f = features.double().numpy()
    f = f / np.linalg.norm(f, axis=1, keepdims=True) - np.c_[p.double().numpy(), np.ones(20)] @ B
    f = f @ V[:kept].T
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    assert found.shape == (20, kept)
    np.testing.assert_allclose(found @ found.T, f @ f.T, atol=1e-4)


def test_of_images_the_residual_is_that_of_evened_features() -> None:
    """Their trunks have features of any scale."""
    net = build_network(config_of(2), {"kind": "images", "image_size": 8}, C)
    assert isinstance(net, PosteriorNetwork)
    net.eval()
    features, p = seen(net, torch.rand(30, 3, 8, 8))
    net.fit_residual(features, p)
    torch.testing.assert_close(
        net.residual(7 * features + 2, p), net.residual(features, p), rtol=0, atol=1e-3
    )


@pytest.mark.parametrize(
    ("C", "expected"), [(1, 1), (2, 1), (5, 3), (10, 4), (21, 5), (100, 8), (242, 10), (1100, 12)]
)
def test_class_codebooks_grow_with_the_bits_of_the_class(C: int, expected: int) -> None:
    assert count_class_codebooks(12, C) == expected
    assert count_class_codebooks(3, C) == min(expected, 3)
    config = merge(preset("recommended"), {"posterior": {"committee": 1, "committee_hidden": 4}})
    net = build_network(config, {"kind": "features", "width": 4}, C)
    assert isinstance(net, PosteriorNetwork)
    assert expected == net.A
    assert net.tables.shape == (expected, 16, C)
    assert net.feature_codewords.shape == (12 - expected, 16, 4 if expected < 12 else 0)


@pytest.mark.parametrize("by_logits", [False, True])
@pytest.mark.parametrize("A", WITH_JOINT)
def test_item_vectors_are_the_codewords_of_the_best_sum(A: int, by_logits: bool) -> None:
    net = network(A)
    if by_logits:
        net.place(4 * net.tables, net.tables, net.feature_codewords, net.weights, by_logits=True)
    x = items(40, 1)
    features, p = seen(net, x)
    with torch.no_grad():
        found = net(x).reshape(40, 3, D)
    tempered = net.tempered(p)
    if A:
        codes = assign_logits(tempered, net.logits) if by_logits else assign(tempered, net.tables)
        if A < 3:
            codes = torch.cat([codes, assign(net.residual(features, p), net.feature_codewords)], dim=1)
    else:
        codes = assign(net.feature_targets(features, p), net.feature_codewords)
    assert torch.equal(net.codes(x), codes)
    for m in range(3):
        torch.testing.assert_close(found[:, m], net.codebooks()[m][codes[:, m]])
    assert len({*map(tuple, codes.tolist())}) > 10  # or a constant would do
    # Encoding them as any vectors gives these codes.
    packed = encode_vectors(found.flatten(1).numpy(), net.codebooks().numpy())
    np.testing.assert_array_equal(unpack_codes(packed, 3, 16), codes.numpy())
    # Nearly the least cost of all 4,096 codes.
    every = torch.tensor(list(itertools.product(range(16), repeat=3)))
    least = torch.stack([net.cost(features, p, code.expand(40, 3)) for code in every]).min(dim=0).values
    reached = net.cost(features, p, codes)
    assert float((reached - least).min()) > -1e-5
    assert float((reached - least).mean()) < 0.1 * float(least.mean()) + 0.01


@pytest.mark.parametrize("by_logits", [False, True])
@pytest.mark.parametrize("A", WITH_JOINT)
def test_vectors_are_unit_norm_and_score_as_the_codewords_do(A: int, by_logits: bool) -> None:
    """The score is posterior · sum of class codewords, and residual · sum of feature codewords: a product quantiser adds nothing."""
    net = network(A)
    net.place(4 * net.tables, net.tables, net.feature_codewords, net.weights, by_logits=by_logits)
    x, ask = items(50, 1), items(7, 2)
    with torch.no_grad():
        vectors, queries = net(x), net.queries(ask)
        codes = net.codes(x)
    for found in (vectors, queries, net.codebooks()):
        norms = found.reshape(-1, D).norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-5)
    torch.testing.assert_close(queries @ vectors.T, scored(net, ask, codes), rtol=1e-4, atol=2e-5)


def test_codes_are_chosen_among_the_codewords_that_are_left() -> None:
    """With fewer dimensions than the codewords have: what is lost of them must not decide."""
    config = merge(config_of(), {"quantizer": {"subdim": 5}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, PosteriorNetwork)
    whole = torch.randn(3, 16, C, generator=torch.Generator().manual_seed(0))
    net.place(whole, whole, torch.zeros(0, 16, 0), torch.tensor([1.0, 0.0]), by_logits=False)
    net.eval()
    assert not torch.allclose(net.tables, whole, atol=0.1)
    assert torch.equal(net.logits, net.tables)
    x = items(40, 1)
    with torch.no_grad():
        vectors, queries, codes = net(x), net.queries(x), net.codes(x)
    scale = whole.norm(dim=2).max() / net.tables.norm(dim=2).max()
    torch.testing.assert_close(queries @ vectors.T, scored(net, x, codes), rtol=1e-3, atol=1e-3)
    assert float(scale) >= 1


@pytest.mark.parametrize("A", WITH_JOINT)
def test_an_infinite_input_gives_no_vector(A: int) -> None:
    net = network(A)
    x = items(4, 1)
    x[1, 3], x[2] = float("inf"), float("nan")
    with torch.no_grad():
        vectors, queries = net(x), net.queries(x)
    for found in (vectors, queries):
        assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]
    with pytest.raises(DataError, match="vectors to encode"):
        encode_vectors(vectors.numpy(), net.codebooks().numpy())


@pytest.mark.parametrize("A", CLASS_CODEBOOKS)
def test_prototypes_are_queries_for_one_class(A: int) -> None:
    net = network(A)
    assert net.prototypes.shape == (3, C, D)
    torch.testing.assert_close(net.prototypes.norm(dim=2), torch.ones(3, C), rtol=0, atol=1e-5)
    for m in range(3):
        inside = net.weights[0] * net.basis[m][:C]
        torch.testing.assert_close(net.prototypes[m, :, : D - 2], inside)
        assert not net.prototypes[m, :, D - 2].any()
    # An item that is surely of a class is found by the query for it.
    tables = fit_codewords(torch.eye(C).repeat(8, 1), A, 16, seed=0)
    net.place(tables, tables, net.feature_codewords, net.weights, by_logits=False)
    codes = torch.cat([assign(torch.eye(C), net.tables), torch.zeros(C, 3 - A, dtype=torch.long)], dim=1)
    vectors = net.pq_codewords[torch.arange(3), codes]
    scores = torch.einsum("cmd,mqd->cq", vectors, net.prototypes)
    assert scores.argmax(dim=1).tolist() == list(range(C))


# ---------------------------------------------------------------------------------------------------------- the method


@pytest.mark.parametrize("A", CLASS_CODEBOOKS)
def test_settling_fits_codebooks_to_what_the_average_believes(A: int) -> None:
    made = method(A)
    with torch.no_grad():
        for p in made.network.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    assert made.average is not None
    random = made.codebooks().copy()
    draw = Sampler(items(700))
    made.fit_codebooks(draw)
    net = made.exported()
    assert net is made.average
    features, posterior = seen(net, items(700))
    assert not torch.allclose(posterior, seen(made.network.eval(), items(700))[1], atol=1e-3)
    found = fit_class_codebooks(posterior, net.tempered(posterior), A, 16, seed=made.config.training.seed)
    assert net._by_logits == found.by_logits
    # Wide enough for 16 codewords: nothing is lost but digits.
    torch.testing.assert_close(net.tables, found.tables, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(made.codebooks(), random)
    for name, value in made.network.named_buffers():
        if not name.startswith("backbone"):
            torch.testing.assert_close(value, net.get_buffer(name), msg=name)
    if A < 3:
        expected = fit_codewords(net.residual(features, posterior), 1, 16, seed=made.config.training.seed)
        torch.testing.assert_close(net.feature_codewords, expected, rtol=1e-4, atol=1e-5)
    made.fit_codebooks(draw, final=True)
    assert draw.asked[1] > draw.asked[0] >= 1000


@pytest.mark.parametrize("w", [0.02, 0.7, 1.0])
def test_joint_codewords_add_up_to_class_and_features(w: float) -> None:
    """By least squares, so that a score is nearly (1 - w) p·p' + w cos of the centred directions in their principal axes."""
    config = merge(config_of(0, ema=0.0), {"posterior": {"feature_weight": w}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, PosteriorNetwork)
    PosteriorCodes(net, config).fit_codebooks(Sampler(items(600)))
    net.eval()
    assert net.A == 0
    assert net.feature_codewords.shape == (3, 16, C + WIDTH)
    features, p = seen(net, items(600))
    whole = torch.nn.functional.normalize(features, dim=1)
    centred = torch.nn.functional.normalize(whole - whole.mean(dim=0), dim=1)
    wanted = (1 - w) * p @ p.T + w * centred @ centred.T
    targets = net.feature_targets(features, p)
    torch.testing.assert_close(targets @ targets.T, wanted, rtol=0, atol=1e-4)
    expected = fit_codewords(targets, 3, 16, seed=config.training.seed)
    torch.testing.assert_close(net.feature_codewords, expected, rtol=1e-4, atol=1e-5)
    scores = scored(net, items(600), net.codes(items(600)))
    assert np.corrcoef(scores.flatten(), wanted.flatten())[0, 1] > 0.9
    # A query for a class alone is part of what a query holds.
    torch.testing.assert_close(net.prototypes[:, :, : D - 2], (1 - w) ** 0.5 * net.basis[:, :C])


@pytest.mark.parametrize("w", [0.02, 0.5, 1.0])
def test_class_and_features_are_weighed_in_their_own_deviations(w: float) -> None:
    config = merge(config_of(2, ema=0.0), {"posterior": {"feature_weight": w}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, PosteriorNetwork)
    PosteriorCodes(net, config).fit_codebooks(Sampler(items(600)))
    net.eval()
    x = items(600)
    codes = net.codes(x)
    features, p = seen(net, x)
    own = p[:500] @ net.tables[torch.arange(2), codes[:, :2]].sum(1).T
    like = net.residual(features, p)[:500] @ net.feature_codewords[0, codes[:, 2]].T
    total = scored(net, x[:500], codes)
    # The whole is a multiple of (1 - w) own / σ + w like / σ'.
    expected = (1 - w) * own / own.std() + w * like / like.std()
    np.testing.assert_allclose(np.corrcoef(total.flatten(), expected.flatten())[0, 1], 1, atol=1e-4)


def test_codewords_follow_the_network() -> None:
    made = method(ema=0.0)
    draw = Sampler(items(600))
    made.fit_codebooks(draw)
    first = made.codebooks().copy()
    made.fit_codebooks(draw)
    np.testing.assert_array_equal(made.codebooks(), first)
    with torch.no_grad():
        made.network.classifier.raw.add_(torch.randn(made.network.classifier.raw.shape))
    made.fit_codebooks(draw)
    assert not np.allclose(made.codebooks(), first, atol=0.01)


def test_too_few_items_for_codebooks_are_refused() -> None:
    with pytest.raises(DataError, match="15 items cannot place 16 codewords"):
        method().fit_codebooks(Sampler(items(15)))


def test_a_saved_state_brings_the_codewords_back() -> None:
    made = method(2)
    made.fit_codebooks(Sampler(items(600)))
    fresh = method(2)
    fresh.load_state_dict(made.state_dict())
    x = items(10, 3)
    for ask in (False, True):
        assert torch.equal(
            made.exported().raw(x, queries=ask),
            fresh.exported().raw(x, queries=ask),
        )


def batch(n: int = 15, unlabelled: int = 30) -> TrainingBatch:
    y = torch.eye(C)[torch.arange(n) % C]
    return TrainingBatch(items(n + unlabelled, 5), y, 3, 10, torch.Generator())


def test_the_loss_is_that_of_the_class_networks() -> None:
    made = method().eval()
    parts = made.losses(batch(), amp=False)
    net, loss = made.network, made.config.loss
    with torch.no_grad():
        v = net.features(batch().x)[1].reshape(45, 4, CLASS_DIM)
        v = v / v.norm(dim=2, keepdim=True)
        classification = SubspaceClassification("paper", loss.beta)(v[:15], net.classifier.raw, batch().y)
        entropy = SubspaceEntropy(loss.beta)(v[15:], net.classifier.raw)
    torch.testing.assert_close(parts["classification"].detach(), classification)
    torch.testing.assert_close(parts["entropy"].detach(), entropy)
    expected = loss.lambda1 * classification - loss.lambda2 * entropy
    torch.testing.assert_close(parts["total"].detach(), expected)
    assert set(made.losses(batch(unlabelled=0), amp=False)) == {"total", "classification"}


@pytest.mark.parametrize("part", ["classification", "entropy"])
def test_both_losses_teach_the_class_networks_and_none_the_codewords(part: str) -> None:
    made = method(2)
    before = made.codebooks().copy()
    made.losses(batch(), amp=False)[part].backward()  # type: ignore[no-untyped-call]
    taught = {n for n, p in made.network.named_parameters() if p.grad is not None and bool(p.grad.any())}
    assert taught == {"classifier.raw", *(f"backbone.head.{name}" for name in ("into", "bias", "out"))}
    assert taught == {n for n, _ in made.network.named_parameters()}
    optimizer = made.optimizer(made.config.training)
    optimizer.step()
    made.after_step(0)
    np.testing.assert_allclose(made.codebooks(), before, atol=1e-6)


def test_the_class_networks_lower_the_entropy_that_the_classifier_raises() -> None:
    """The mini-max of eq. 4: gradients of the entropy, those of the networks with the other sign."""
    made = method().eval()
    net = made.network
    assert isinstance(net.backbone.head, SubspaceHeads)
    parameters = [net.classifier.raw, net.backbone.head.out]
    found = torch.autograd.grad(made.losses(batch(), amp=False)["entropy"], parameters)
    plain = SubspaceEntropy(made.config.loss.beta)(
        net.directions(net.features(batch().x[15:])[1]), net.classifier.raw
    )
    expected = torch.autograd.grad(plain, parameters)
    assert all(bool((g.abs() > 1e-5).any()) for g in expected)
    torch.testing.assert_close(found, (expected[0], -expected[1]))


def test_the_class_networks_move_faster_than_a_trunk() -> None:
    config = merge(config_of(), {"network": {"hidden": [8]}})
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, PosteriorNetwork)
    slow, fast = PosteriorCodes(net, config).optimizer(config.training).param_groups
    own = {id(p) for p in (*net.backbone.head.parameters(), *net.classifier.parameters())}
    assert {id(p) for p in fast["params"]} == own
    assert {id(p) for p in slow["params"]} == {id(p) for p in net.parameters()} - own
    assert len(slow["params"]) > 0
    assert fast["times"] == 2.0


def test_over_convolutions_the_class_networks_are_linear_and_move_as_these() -> None:
    config = merge(config_of(), {"network": {"backbone": "vgg"}})
    state = torch.random.get_rng_state()
    nets = [build_network(config, {"kind": "images", "image_size": 32}, C) for _ in range(2)]
    assert torch.equal(torch.random.get_rng_state(), state)
    net = nets[0]
    assert isinstance(net, PosteriorNetwork)
    assert isinstance(net.backbone.head, nn.Linear)
    assert net.backbone.head.out_features == net.N * CLASS_DIM
    for one, other in zip(*(made.state_dict().values() for made in nets), strict=True):
        assert torch.equal(one, other)
    (group,) = PosteriorCodes(net, config).optimizer(config.training).param_groups
    assert group.get("times", 1.0) == 1.0
    assert len(group["params"]) == len(list(net.parameters()))
    x = torch.rand(3, 3, 32, 32)
    assert net.eval().posterior(net.features(x)[1]).sum(dim=1).tolist() == pytest.approx([1, 1, 1], abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- whole path


@pytest.fixture(scope="module", params=CLASS_CODEBOOKS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("committee")
    config = config_of(request.param, steps=60, batch_labelled=50, batch_unlabelled=100, validation=0.0)
    return train(open_digits(), folder / "model", config=config, labelled="10-per-class")


def test_a_search_ranks_by_belief_in_the_sums_of_codewords(model: Path, tmp_path: Path) -> None:
    data = open_digits()
    codes = encode(model, data, tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    result = search(model, built, data, rows="0:5", k=7)
    encoder = Encoder.load(model)
    _, xq = encoder.embed_rows(data, np.arange(5), queries=True)
    _, xb = encoder.embed_rows(data, np.arange(len(data)))
    Z = encoder.model.codebooks
    chosen = np.einsum("nmd,mkd->nmk", xb.reshape(-1, 3, D), Z).argmax(2)
    scores = xq @ Z[np.arange(3), chosen].reshape(-1, 3 * D).T
    best = -np.sort(-scores, axis=1)[:, :7]
    assert np.abs(result.scores - best).max() < 1e-5
    with RowReader(codes) as reader:
        np.testing.assert_array_equal(unpack_codes(reader.block(), 3, 16), chosen)
    # The same without any vector: beliefs, and the codewords that add up to them.
    net = encoder.model.network
    assert isinstance(net, PosteriorNetwork)
    with Reader(data, encoder.model.image_size) as images, torch.no_grad():
        pixels = torch.from_numpy(images.fetch(np.arange(5))[0]).float() / 255
        expected = scored(net, pixels, torch.from_numpy(chosen)).numpy()
    np.testing.assert_allclose(scores, expected, atol=1e-4)


def test_item_vectors_are_no_queries(model: Path, tmp_path: Path) -> None:
    codes = encode(model, open_digits(), tmp_path / "codes.h5")
    built = index(model, codes, tmp_path / "index.faiss")
    with pytest.raises(MismatchError, match="holds vectors of items"):
        search(model, built, str(tmp_path / "features.h5"), k=3)


def test_the_prototypes_of_a_model_are_its_queries_for_one_class(model: Path) -> None:
    net = Encoder.load(model).model.network
    assert isinstance(net, PosteriorNetwork)
    found = read_prototypes(model)
    assert found.shape == (10, 3 * D)
    np.testing.assert_allclose(found, net.prototypes.transpose(0, 1).flatten(1).numpy(), atol=1e-6)
    # Placed anew they say the same; directions of no weight may be others.
    again = copy.deepcopy(net)
    again.place(net.logits, net.tables, net.feature_codewords, net.weights, by_logits=net._by_logits)
    scores = [torch.einsum("mcd,mkd->mck", n.prototypes, n.pq_codewords) for n in (again, net)]
    torch.testing.assert_close(*scores, rtol=0, atol=1e-4)


def test_an_infinite_item_is_not_encoded(tmp_path: Path) -> None:
    """Features that are finite, and too large for the network."""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "x.npy", rng.normal(size=(120, 6)).astype(np.float32))
    np.save(tmp_path / "y.npy", np.arange(120) % 3)
    data = open_data(f"features:{tmp_path / 'x.npy'}", labels=str(tmp_path / "y.npy"))
    config = config_of(steps=3, batch_labelled=20, batch_unlabelled=20, validation=0.0)
    made = train(data, tmp_path / "model", config=config, labelled="10-per-class", protocol="none")
    huge = np.load(tmp_path / "x.npy")
    huge[7] = 3e38
    np.save(tmp_path / "huge.npy", huge)
    with pytest.raises(DataError):
        encode(made, f"features:{tmp_path / 'huge.npy'}", tmp_path / "codes.h5")
    assert not (tmp_path / "codes.h5").exists()


# ------------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("section", "changes", "named"),
    [
        ("posterior", {"committee": 0}, "posterior.committee"),
        ("posterior", {"committee_hidden": 0}, "posterior.committee_hidden"),
        ("posterior", {"feature_weight": 1.5}, "posterior.feature_weight"),
        ("posterior", {"feature_weight": -0.1}, "posterior.feature_weight"),
        ("posterior", {"class_codebooks": -1}, "posterior.class_codebooks"),
        ("posterior", {"class_codebooks": "all"}, "posterior.class_codebooks"),
        ("loss", {"lambda1": 0.0}, "loss.lambda1"),
        ("quantizer", {"subdim": 2}, "quantizer.subdim"),
    ],
)
def test_settings_that_cannot_be_are_refused(section: str, changes: dict[str, float], named: str) -> None:
    config = config_of()
    config = dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **changes)}
    )
    with pytest.raises(UsageError, match=named):
        validate(config)


def test_more_class_codebooks_than_codebooks_are_all_of_them() -> None:
    config = merge(config_of(2), {"posterior": {"class_codebooks": 9}})
    net = build_network(validate(config), {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, PosteriorNetwork)
    assert net.A == net.M == 3

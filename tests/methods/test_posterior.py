"""Class-posterior codes: class probabilities, what is coded, vectors of items and queries; losses
and codebooks fitted to the network."""

import copy
import functools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpq_faiss.codes.bits import unpack_codes
from gpq_faiss.codes.encode import encode as encode_vectors
from gpq_faiss.config import preset, validate
from gpq_faiss.data.base import Reader
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.methods import codewords
from gpq_faiss.methods.codewords import ClassCodebooks, fit_codewords
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.posterior import (
    CLASS_DIM,
    DIRECTIONS,
    LEAST_POWER,
    MOST_CONFIDENCE,
    MOST_POWER,
)
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.augment import distort

C, WIDTH, D = 5, 9, 18
CLASS_CODEBOOKS = (3, 2)
"""Of three: with and without a feature codebook. With 0 they are joint ones."""


@pytest.fixture(scope="module", autouse=True)
def few_steps():
    """Score tables are fitted in fewer steps than by default: the tests ask what they are, not how
    good."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(codewords, "_TABLE_STEPS", 60)
        yield


def config_of(A=3):
    features = {"feature_weight": 0.0} if A == 3 else {"feature_weight": 0.3, "class_codebooks": A}
    changes = {"quantizer": {"codebooks": 3}, "loss": {"lambda2": 0.1}, "network": {"hidden": [16]}}
    changes |= {"posterior": {"networks": 4, **features}}
    return validate(preset("recommended").with_settings(changes))


def method(A=3, *, width=WIDTH, **changes):
    config = config_of(A).with_settings(changes)
    return build_network(config, {"kind": "features", "width": width}, C)


def network(A=3, *, width=WIDTH):
    """A network that means nothing, with codebooks fitted to what it says."""
    return copy.deepcopy(_network(A, width))


@functools.cache
def _network(A, width):
    built = method(A, width=width)
    built.fit_codebooks(Sampler(items(600, width=width)))
    return built.eval()


def items(n, seed=0, width=WIDTH):
    """Features whose directions are of unlike weight, float32 [n, width]."""
    x = np.random.default_rng([seed, n]).normal(size=(n, width)) * np.linspace(2, 0.5, width) + 0.3
    return torch.from_numpy(x).float()


def seen(net, x):
    """Features and posteriors."""
    with torch.no_grad():
        features, raw = net.features(x)
        return features, net.posterior(raw)


def scored(net, ask, codes):
    """Scores by definition, float [Q, n]: the weighted sum of two inner products, each by the
    longest codeword of its part."""
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

    def __init__(self, x):
        self.x = x
        self.asked = []

    def __call__(self, n):
        self.asked.append(n)
        yield from torch.split(self.x[:n], 100)


def test_the_posterior_averages_the_networks_and_is_tempered_for_items():
    """To p^t / Σ p^t: the order of the classes stays, and that of items by the odds of two
    classes.
    """
    net = network()
    raw = net.features(items(50))[1].detach()
    parts, entry = raw.reshape(50, 4, CLASS_DIM), []
    for n in range(4):
        W = net.prototypes[n] / net.prototypes[n].norm(dim=1, keepdim=True)
        v = parts[:, n] / parts[:, n].norm(dim=1, keepdim=True)
        entry.append(torch.softmax(net.beta * v @ W.T, dim=1))
    p = net.posterior(raw)
    torch.testing.assert_close(p, torch.stack(entry).mean(0), rtol=0, atol=1e-5)
    t = float(net.power)
    assert 0 < t < 1
    expected = np.array([[v**t for v in row] for row in p.double().tolist()])
    np.testing.assert_allclose(
        net.tempered(p).detach(), expected / expected.sum(1, keepdims=True), rtol=1e-5
    )
    # One that is sure of its class stays so; equal classes stay equal.
    assert torch.equal(net.tempered(torch.eye(C)), torch.eye(C))
    torch.testing.assert_close(net.tempered(torch.full((1, C), 1 / C)), torch.full((1, C), 1 / C))


@given(aim=st.floats(0.05, 1.0), seed=st.integers(0, 50), n=st.integers(1, 60))
def test_the_networks_are_made_as_sure_as_they_are_right(aim, seed, n):
    """Too sure ones for items alone, beside feature codebooks by the square root of that power, and
    of few classes; too cautious ones for queries too."""
    net, with_features = network(), network(2)
    p = torch.softmax(2 * torch.randn(n, C, generator=torch.Generator().manual_seed(seed)), dim=1)
    p[0] = torch.eye(C)[0]  # some probabilities are 0
    for entry in (net, with_features):
        entry.mean_posterior = lambda raw: p
        with mock.patch.object(entry, "K", 2):  # five classes are many then
            entry.fit_power(p, aim)

    def sureness(exponent):
        raised = p.double() ** exponent
        return float((raised / raised.sum(dim=1, keepdim=True)).amax(dim=1).mean())

    assert LEAST_POWER <= float(net.power) <= MOST_POWER
    items_of, queries_of = net.tempered(net.posterior(None)), net.posterior(None)
    sharp = min(aim, MOST_CONFIDENCE)
    if sureness(1.0) < sharp:
        expected = min(sharp, sureness(MOST_POWER))
        assert torch.equal(queries_of, items_of)
        assert float(with_features.power) == float(net.power)
        assert float(items_of.amax(dim=1).mean()) == pytest.approx(expected, abs=1e-4)
        return
    # Codes of many classes alone need not be made less sure.
    assert float(net.power) == 1
    assert torch.equal(queries_of, p)
    expected = min(max(aim, sureness(LEAST_POWER)), sureness(1.0))
    assert sureness(float(with_features.power) ** 2) == pytest.approx(expected, abs=1e-4)
    net.fit_power(p, aim)  # five classes are few
    assert float(net.power) == pytest.approx(float(with_features.power) ** 2, rel=1e-5)


def test_power_and_kind_of_codes_are_kept_with_the_weights():
    net, second = network(2), network(2)
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=net.tables.shape)).float()
    net.place(ClassCodebooks(net.tables, logits), net.feature_codewords)
    second.power.fill_(1.0)
    x = items(40, 1)
    assert not torch.equal(second.assign(*seen(second, x)), net.assign(*seen(net, x)))
    second.load_state_dict(net.state_dict())
    assert torch.equal(second.assign(*seen(second, x)), net.assign(*seen(net, x)))
    assert torch.equal(second.logits, logits)


@pytest.mark.parametrize("width", [WIDTH, DIRECTIONS + 8])
def test_the_residual_is_a_regression_residual_in_principal_axes(width):
    net = network(2, width=width)
    everything, q = (t.double().numpy() for t in seen(net, items(600, width=width)))
    features, p = seen(net, items(20, 1, width))
    result = net.residual(features, p).double().numpy()
    # The same by numpy: least squares with an intercept, then the singular vectors of what is left.
    everything /= np.linalg.norm(everything, axis=1, keepdims=True)
    X = np.c_[q, np.ones(600)]
    B = np.linalg.solve(X.T @ X + 1e-2 * np.eye(C + 1), X.T @ everything)
    V = np.linalg.svd(everything - X @ B, full_matrices=False)[2][: min(DIRECTIONS, width)]
    f = features.double().numpy()
    f = f / np.linalg.norm(f, axis=1, keepdims=True) - np.c_[p.double().numpy(), np.ones(20)] @ B
    f = f @ V.T
    f /= np.linalg.norm(f, axis=1, keepdims=True)
    assert result.shape == (20, len(V))
    np.testing.assert_allclose(result @ result.T, f @ f.T, atol=1e-4)


@pytest.mark.parametrize(
    ("n", "expected"), [(1, 1), (2, 1), (5, 3), (10, 4), (21, 5), (100, 8), (242, 10), (1100, 12)]
)
def test_class_codebooks_grow_with_the_bits_of_the_class(n, expected):
    config = preset("recommended").with_settings(
        {"posterior": {"networks": 1}, "network": {"hidden": [4]}}
    )
    net = build_network(config, {"kind": "features", "width": 4}, n)
    assert net.tables.shape == (expected, 16, n)
    assert len(net.feature_codewords) == 12 - expected
    short = config.with_settings({"quantizer": {"codebooks": 3}})
    assert min(expected, 3) == build_network(short, {"kind": "features", "width": 4}, n).A


def costs(net, features, p, codes):
    """What a code should have the least of, float [B, n], for codes [n, M]: cross entropy or
    squared error of the class part plus squared error of the feature part."""
    A, cost, tempered = net.A, torch.zeros(len(p), len(codes)), net.tempered(p)
    if A:
        words = net.logits if len(net.logits) else net.tables
        summed = words[torch.arange(A), codes[:, :A]].sum(dim=1)
        entropy = -tempered @ summed.log_softmax(dim=1).T
        cost = entropy if len(net.logits) else torch.cdist(tempered, summed).square()
    if A < net.M:
        coded = net.feature_codewords[torch.arange(net.M - A), codes[:, A:]].sum(dim=1)
        cost = cost + torch.cdist(net.feature_targets(features, p), coded).square()
    return cost


@torch.no_grad()
@pytest.mark.parametrize(
    ("A", "by_logits"), [(3, False), (3, True), (2, False), (2, True), (0, False)]
)
def test_item_vectors_and_scores_are_those_of_the_best_sum(A, by_logits):
    """The score is posterior · sum of class codewords, and residual · sum of feature codewords: a
    product quantiser adds nothing."""
    net = network(A)
    if by_logits:
        net.place(ClassCodebooks(net.tables, 4 * net.tables), net.feature_codewords)
    x, ask = items(40, 1), items(7, 2)
    features, p = seen(net, x)
    vectors, queries, codes = net(x), net.queries(ask), net.assign(*seen(net, x))
    assert torch.equal(vectors.reshape(40, 3, D), net.codebooks()[torch.arange(3), codes])
    assert len({*map(tuple, codes.tolist())}) > 10  # or a constant would do
    # Encoding them as any vectors gives these codes.
    packed = encode_vectors(vectors.numpy(), net.codebooks().numpy())
    np.testing.assert_array_equal(unpack_codes(packed, 3, 16), codes.numpy())
    # Nearly the least cost of all 4,096 codes.
    least = costs(net, features, p, torch.cartesian_prod(*3 * [torch.arange(16)])).amin(dim=1)
    reached = costs(net, features, p, codes).diagonal()
    assert float((reached - least).min()) > -1e-5
    assert float((reached - least).mean()) < 0.1 * float(least.mean()) + 0.01
    for result in (vectors, queries, net.codebooks()):
        norms = result.reshape(-1, D).norm(dim=1)
        torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-5)
    torch.testing.assert_close(queries @ vectors.T, scored(net, ask, codes), rtol=1e-4, atol=2e-5)


@torch.no_grad()
@pytest.mark.parametrize("A", [*CLASS_CODEBOOKS, 0])
def test_an_infinite_input_gives_no_vector(A):
    net = network(A)
    x = items(4, 1)
    x[1, 3], x[2] = float("inf"), float("nan")
    for result in (net.queries(x), net(x)):
        assert result.isfinite().all(dim=1).tolist() == [True, False, False, True]
    with pytest.raises(DataError, match="vectors to encode"):
        encode_vectors(net(x).numpy(), net.codebooks().numpy())


# The method


def fitted(A, w):
    """A network with A class codebooks of three and the feature weight ``w``, with codebooks fitted
    to 600 items."""
    built = method(A, posterior={"feature_weight": w})
    built.fit_codebooks(Sampler(items(600)))
    return built.eval()


@pytest.mark.parametrize("w", [0.02, 1.0])
def test_joint_codewords_add_up_to_class_and_features(w):
    """By least squares, so that a score is nearly (1 - w) p·p' + w cos of the centred directions in
    their principal axes."""
    net = fitted(0, w)
    assert (net.A, net.feature_codewords.shape) == (0, (3, 16, C + WIDTH))
    features, p = seen(net, items(600))
    full = torch.nn.functional.normalize(features, dim=1)
    centred = torch.nn.functional.normalize(full - full.mean(dim=0), dim=1)
    target = (1 - w) * p @ p.T + w * centred @ centred.T
    targets = net.feature_targets(features, p)
    torch.testing.assert_close(targets @ targets.T, target, rtol=0, atol=1e-4)
    expected = fit_codewords(targets, 3, 16, seed=config_of().training.seed)
    torch.testing.assert_close(net.feature_codewords, expected, rtol=1e-4, atol=1e-5)
    scores = scored(net, items(600), net.assign(*seen(net, items(600))))
    assert np.corrcoef(scores.flatten(), target.flatten())[0, 1] > 0.9


@pytest.mark.parametrize(
    "factors",
    [np.where(np.arange(600) % 150, 1, 1e4)[:, None], 10.0 ** np.linspace(2, -2, WIDTH)],
    ids=["outliers", "units"],
)
def test_labels_are_learnt_in_spite_of(factors):
    x, y = items(600).numpy(), np.arange(600) % C
    x[:, -C:] += 6 * np.eye(C)[y]
    x, net = x * factors, method()
    with Reader(open_data(x, labels=y), 0) as reader:
        net.fit_inputs(reader, np.arange(600))
        net.fit_labels(reader, np.arange(600), np.eye(C, dtype=np.float32)[y], np.arange(0))
    assert net.accuracy > 0.9


def batch(n=15, unlabelled=30):
    y = torch.eye(C)[torch.arange(n) % C]
    return TrainingBatch(items(n + unlabelled, 5), y, 3, 10, torch.Generator())


def test_networks_lower_the_entropy_that_the_classifier_raises():
    """The mini-max of eq. 4: gradients of the entropy, those of the networks with the other
    sign.
    """
    built = method(2).eval()
    parts, net, beta, loss = (
        built.losses(batch(), amp=False),
        built,
        built.config.beta,
        built.config.loss,
    )
    v = net.features(batch().x)[1].reshape(45, 4, CLASS_DIM)
    v, W = v / v.norm(dim=2, keepdim=True), net.prototypes
    classification = subspace_classification(v[:15], W, shares(batch().y), beta)
    entropy = subspace_entropy(v[15:], W, beta)
    total = loss.lambda1 * classification - loss.lambda2 * entropy
    names, parameters = zip(*built.named_parameters(), strict=True)
    # None of the codewords.
    assert set(names) == {
        "prototypes",
        *(f"backbone.head.{name}" for name in ("into", "bias", "out")),
    }
    for name, plain, sign in (("classification", classification, 1), ("entropy", entropy, -1)):
        torch.testing.assert_close(parts[name], plain)
        result, expected = (
            torch.autograd.grad(value, parameters, retain_graph=True)
            for value in (parts[name], plain)
        )
        for parameter, ours, theirs in zip(names, result, expected, strict=True):
            assert theirs.abs().max() > 1e-5
            torch.testing.assert_close(ours, theirs if parameter == "prototypes" else sign * theirs)
    torch.testing.assert_close(parts["total"], total)
    assert set(built.losses(batch(unlabelled=0), amp=False)) == {"total", "classification"}


@pytest.mark.parametrize("n", [C, 32, 33])
def test_few_classes_over_convolutions_are_learnt_by_a_plain_classifier(n):
    changes = {
        "network": {"backbone": "vgg"},
        "loss": {"lambda2": 0},
        "quantizer": {"codewords": 8},
    }
    config = config_of().with_settings(changes)
    net = build_network(config, {"kind": "images", "image_size": 16}, n).eval()
    assert (net.prototypes is None) == (n <= 32)
    x, y = torch.rand(6, 3, 16, 16), torch.eye(n)[torch.arange(6) % n]
    raw = net.features(x)[1]
    if net.prototypes is None:
        torch.testing.assert_close(net.posterior(raw), raw.softmax(dim=1))
        torch.testing.assert_close(
            net.losses(TrainingBatch(x, y, 3, 10, torch.Generator()), amp=False)["total"],
            torch.nn.functional.cross_entropy(raw, y),
        )
    assert raw.shape[1] == (n if n <= 32 else 4 * CLASS_DIM)
    assert [group["rate_factor"] for group in net.optimizer(config).param_groups] == (
        [1.0, 1.0] if n <= 32 else [0.5, 0.5]
    )
    config = config.with_settings({"network": {"weights": "imagenet"}})
    assert net.optimizer(config).param_groups[0]["rate_factor"] == 0.5


def fine_tuned(folder):
    """A method over pretrained convolutions, in evaluation mode."""
    spec = {"kind": "images", "image_size": 16}
    plain = config_of().with_settings({"network": {"backbone": "vgg"}, "loss": {"lambda2": 0}})
    untrained = build_network(plain, spec, C)
    assert not untrained.uses_unlabelled
    torch.save(untrained.backbone.state_dict(), folder / "vgg.pth")
    pretrained = plain.with_settings({"network": {"weights": str(folder / "vgg.pth")}})
    return build_network(pretrained, spec, C).eval()


@torch.no_grad()
def test_the_model_is_a_moving_average_of_the_weights_that_learn(tmp_path):
    net = fine_tuned(tmp_path)
    average = net.backbone.head.weight.clone()
    net.student.head.weight += 1
    for step, expected in ((0, 0.9), (1, 1 - 0.1 * 2 / 11), (10_000, 1 - 0.99 * 0.1 * 2 / 11)):
        net.after_step(step, 20_000)
        torch.testing.assert_close(net.backbone.head.weight, average + expected)
    net.after_training()
    assert not any("student" in name for name in net.state_dict())


def test_unlabelled_images_are_learnt_by_consistency(tmp_path):
    net = fine_tuned(tmp_path)
    assert net.uses_unlabelled
    x, y = torch.rand(9, 3, 16, 16), torch.eye(C)[torch.arange(4)]
    batch = functools.partial(TrainingBatch, x, y)
    assert set(net.losses(batch(1, 10, torch.Generator()), amp=False)) == {
        "total",
        "classification",
    }
    p = net.mean_posterior(net.features(x[4:])[1]).detach()
    limit = float(p.amax(dim=1).median())
    confident = p.amax(dim=1) >= limit
    with mock.patch("gpq_faiss.methods.posterior._CONFIDENCE", limit):
        parts = net.losses(batch(2, 10, torch.Generator().manual_seed(3)), amp=False)
    views = net.features(distort(x[4:][confident], torch.Generator().manual_seed(3)))
    log_p = net.mean_posterior(views[1]).log().detach()
    expected = sum(
        -float((q**2 / (q**2).sum() * row).sum()) / 5
        for q, row in zip(p[confident], log_p, strict=True)
    )
    assert parts["consistency"].item() == pytest.approx(expected, rel=1e-4)
    assert parts["total"].item() == pytest.approx(
        parts["classification"].item() + expected, rel=1e-4
    )

"""The method of class-posterior codes: losses, codebooks fitted to the network, and settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import posterior_factory as factory
import pytest
import torch
from posterior_factory import CLASS_CODEBOOKS, WIDTH, C, Sampler, config_of, items, scored, seen

from gpq_faiss.config import merge
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.methods.codewords import fit_class_codebooks, fit_codewords
from gpq_faiss.methods.posterior import PosteriorCodes
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.posterior import CLASS_DIM, PosteriorNetwork

few_steps = factory.few_steps


@pytest.mark.parametrize("A", CLASS_CODEBOOKS)
def test_settling_fits_codebooks_to_what_the_network_believes(A: int) -> None:
    made = factory.method(A)
    random = made.codebooks().copy()
    draw = Sampler(items(700))
    made.fit_codebooks(draw)
    net = made.network
    features, posterior = seen(net, items(700))
    found = fit_class_codebooks(posterior, net.tempered(posterior), A, 16, seed=made.config.training.seed)
    assert net._by_logits == found.by_logits
    # Wide enough for 16 codewords: nothing is lost but digits.
    torch.testing.assert_close(net.tables, found.tables, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(made.codebooks(), random)
    if A < 3:
        expected = fit_codewords(net.residual(features, posterior), 1, 16, seed=made.config.training.seed)
        torch.testing.assert_close(net.feature_codewords, expected, rtol=1e-4, atol=1e-5)
    made.fit_codebooks(draw, final=True)
    assert draw.asked[1] > draw.asked[0] >= 1000


def fitted(A: int, w: float) -> PosteriorNetwork:
    """A network with A class codebooks of three and the feature weight ``w``, with codebooks fitted to 600 items."""
    config = merge(config_of(A), {"posterior": {"feature_weight": w}})
    net: Any = build_network(config, {"kind": "features", "width": WIDTH}, C)
    PosteriorCodes(net, config).fit_codebooks(Sampler(items(600)))
    return net.eval()


@pytest.mark.parametrize("w", [0.02, 1.0])
def test_joint_codewords_add_up_to_class_and_features(w: float) -> None:
    """By least squares, so that a score is nearly (1 - w) p·p' + w cos of the centred directions in their principal axes."""
    net = fitted(0, w)
    assert net.A == 0
    assert net.feature_codewords.shape == (3, 16, C + WIDTH)
    features, p = seen(net, items(600))
    whole = torch.nn.functional.normalize(features, dim=1)
    centred = torch.nn.functional.normalize(whole - whole.mean(dim=0), dim=1)
    wanted = (1 - w) * p @ p.T + w * centred @ centred.T
    targets = net.feature_targets(features, p)
    torch.testing.assert_close(targets @ targets.T, wanted, rtol=0, atol=1e-4)
    expected = fit_codewords(targets, 3, 16, seed=config_of().training.seed)
    torch.testing.assert_close(net.feature_codewords, expected, rtol=1e-4, atol=1e-5)
    scores = scored(net, items(600), net.codes(items(600)))
    assert np.corrcoef(scores.flatten(), wanted.flatten())[0, 1] > 0.9
    # A query for a class alone is part of what a query holds.
    torch.testing.assert_close(net.prototypes[:, :, : factory.D - 2], (1 - w) ** 0.5 * net.basis[:, :C])


@pytest.mark.parametrize("w", [0.02, 1.0])
def test_class_and_features_are_weighed_in_their_own_deviations(w: float) -> None:
    net = fitted(2, w)
    x = items(600)
    codes = net.codes(x)
    features, p = seen(net, x)
    own = p[:500] @ net.tables[torch.arange(2), codes[:, :2]].sum(1).T
    like = net.residual(features, p)[:500] @ net.feature_codewords[0, codes[:, 2]].T
    total = scored(net, x[:500], codes)
    # The whole is a multiple of (1 - w) own / σ + w like / σ'.
    expected = (1 - w) * own / own.std() + w * like / like.std()
    np.testing.assert_allclose(np.corrcoef(total.flatten(), expected.flatten())[0, 1], 1, atol=1e-4)


def batch(n: int = 15, unlabelled: int = 30) -> TrainingBatch:
    y = torch.eye(C)[torch.arange(n) % C]
    return TrainingBatch(items(n + unlabelled, 5), y, 3, 10, torch.Generator())


def test_the_loss_is_that_of_the_class_networks_which_lower_the_entropy_that_the_classifier_raises() -> None:
    """The mini-max of eq. 4: gradients of the entropy, those of the networks with the other sign."""
    made: Any = factory.method(2).eval()
    parts, net, beta, loss = made.losses(batch(), amp=False), made.network, made.config.beta, made.config.loss
    v = net.features(batch().x)[1].reshape(45, 4, CLASS_DIM)
    v, W = v / v.norm(dim=2, keepdim=True), net.classifier.raw
    classification = subspace_classification(v[:15], W, shares(batch().y, v), beta)
    entropy = subspace_entropy(v[15:], W, beta)
    total = loss.lambda1 * classification - loss.lambda2 * entropy
    names, parameters = zip(*made.network.named_parameters(), strict=True)
    # None of the codewords.
    assert set(names) == {"classifier.raw", *(f"backbone.head.{name}" for name in ("into", "bias", "out"))}
    for name, plain, sign in (("classification", classification, 1), ("entropy", entropy, -1)):
        torch.testing.assert_close(parts[name], plain)
        found, expected = (
            torch.autograd.grad(value, parameters, retain_graph=True) for value in (parts[name], plain)
        )
        for parameter, ours, theirs in zip(names, found, expected, strict=True):
            assert theirs.abs().max() > 1e-5
            torch.testing.assert_close(ours, theirs if parameter == "classifier.raw" else sign * theirs)
    torch.testing.assert_close(parts["total"], total)
    assert set(made.losses(batch(unlabelled=0), amp=False)) == {"total", "classification"}


def test_the_class_networks_move_faster_than_a_trunk() -> None:
    config = merge(config_of(), {"network": {"hidden": [8, 16]}})
    net: Any = build_network(config, {"kind": "features", "width": WIDTH}, C)
    slow, fast = PosteriorCodes(net, config).optimizer(config.training).param_groups
    own = {id(p) for p in (*net.backbone.head.parameters(), *net.classifier.parameters())}
    assert {id(p) for p in fast["params"]} == own
    assert {id(p) for p in slow["params"]} == {id(p) for p in net.parameters()} - own
    assert len(slow["params"]) > 0
    assert fast["times"] == 2.0
    # Over convolutions they are linear, and move as slowly as these; the seed alone gives their weights.
    config = merge(config, {"network": {"backbone": "vgg"}})
    net, again = (build_network(config, {"kind": "images", "image_size": 32}, C) for _ in range(2))
    assert isinstance(net.backbone.head, torch.nn.Linear)
    assert all(map(torch.equal, net.state_dict().values(), again.state_dict().values()))
    (group,) = PosteriorCodes(net, config).optimizer(config.training).param_groups
    assert (group["times"], len(group["params"])) == (0.5, len(list(net.parameters())))

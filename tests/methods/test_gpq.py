"""GPQ and its variants by their equations, and the preset ``authors``."""

import dataclasses

import numpy as np
import pytest
import torch
from model_factory import own_settings
from safetensors.torch import load_file

from gpq_faiss import evaluate, train
from gpq_faiss.config import preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import npair, triplet
from gpq_faiss.methods.gpq import build_network
from gpq_faiss.methods.registry import METHODS
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.augment import random_flip_crop
from gpq_faiss.nn.backbones import VGG, BackboneSpec, build_backbone
from gpq_faiss.nn.quantizer import intra_normalize, soft_assign

C, WIDTH, M = 4, 10, 3
LABELLED, ITEMS = 12, 20


def batch():
    """The two parts differ in mean and spread, so that joint statistics are neither's."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(ITEMS, WIDTH, generator=generator)
    x[LABELLED:] = 2 * x[LABELLED:] + 1.5
    return TrainingBatch(x, torch.eye(C)[torch.arange(LABELLED) % C], 0, 10, generator)


def floats(parts):
    return {name: value.item() for name, value in parts.items()}


# Variants


@pytest.mark.parametrize("base", [preset("paper"), own_settings()], ids=["paper", "own settings"])
@pytest.mark.parametrize("variant", ["gpq", "gpq-h", "gpq-t"])
def test_a_variant_is_its_losses(variant, base):
    small = {"quantizer": {"codebooks": 3, "subdim": 6}, "network": {"hidden": [24]}}
    config = base.with_settings(small).with_settings(dict(METHODS[variant].changes))
    data = open_data(np.eye(8, WIDTH, dtype=np.float32), labels=np.arange(8) % C)
    gpq = METHODS[variant].load()(config, data, 0, C).eval()
    x, y, net = batch().x, batch().y, gpq
    parts = gpq.losses(batch(), amp=False)
    labelled = intra_normalize(net.backbone(x[:12]), 3)
    loss = triplet if variant == "gpq-t" else npair
    expected = {loss.__name__: loss(labelled, soft_assign(labelled, net.codebooks(), 20.0), y)}
    weights = {loss.__name__: 1.0}
    if variant != "gpq-h":
        weights |= {"classification": config.loss.lambda1, "entropy": -config.loss.lambda2}
        W, beta, remaining = (
            net.classifier.raw,
            config.beta,
            intra_normalize(net.backbone(x[12:]), 3),
        )
        kind = "paper" if config.method == "gpq-printed" else "code"
        expected["classification"] = subspace_classification(labelled, W, shares(y, x), beta, kind)
        expected["entropy"] = subspace_entropy(remaining, W, beta)
        # Raised by the classifier, lowered by the network (eq. 4).
        for parameter, sign in ((W, 1), (net.backbone.head.weight, -1)):
            ours, plain = (
                torch.autograd.grad(v["entropy"], parameter, retain_graph=True)[0]
                for v in (parts, expected)
            )
            torch.testing.assert_close(ours, sign * plain)
            assert plain.any()
    for name, value in expected.items():
        torch.testing.assert_close(parts[name], value)
    assert set(parts) == {"total", *weights}
    torch.testing.assert_close(
        parts["total"], sum(weight * parts[name] for name, weight in weights.items())
    )
    parts["total"].backward()
    # Without a classifier the sub-prototypes still carry z' = s(z; α, W).
    assert net.classifier.raw.grad.any()


# The preset "authors"

D, HIDDEN = 5, 6


def small(variant="gpq-authors"):
    """GPQ of the preset over a perceptron with batch norm."""
    changes = {
        "quantizer": {"codebooks": M, "codewords": 4, "subdim": D},
        "network": {"backbone": "mlp", "hidden": [HIDDEN], "weights": "none"},
        "method": variant,
    }
    config = validate(preset("authors").with_settings(changes))
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    norm = torch.nn.BatchNorm1d(HIDDEN)
    net.backbone.layers.insert(1, norm)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
        norm.bias.copy_(torch.linspace(-0.2, 0.3, HIDDEN))
    return net.train()


def by_hand(gpq, parts):
    """The perceptron's output, each of ``parts`` normalised by its own mean and deviation, and the
    averages that move with each."""
    state = {k: v.double().numpy() for k, v in gpq.backbone.state_dict().items()}
    out, mean, variance = [], np.zeros(HIDDEN), np.ones(HIDDEN)
    for x in parts:
        h = x @ state["layers.0.weight"].T + state["layers.0.bias"]
        mean, variance = (
            0.9 * mean + 0.1 * h.mean(axis=0),
            0.9 * variance + 0.1 * h.var(axis=0, ddof=1),
        )
        h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)
        h = np.maximum(h * state["layers.1.weight"] + state["layers.1.bias"], 0)
        out.append(h @ state["head.weight"].T + state["head.bias"])
    return np.concatenate(out), mean, variance


@pytest.mark.parametrize("variant", ["gpq-authors", "gpq"])
def test_batch_statistics_and_entropy_are_those_of_a_plain_calculation(variant):
    gpq, batch_given = small(variant), batch()
    x = batch_given.x.double().numpy()
    raw, *averages = by_hand(gpq, [x[:LABELLED], x[LABELLED:]] if variant == "gpq-authors" else [x])
    parts = floats(gpq.losses(batch_given, amp=False))
    norm = gpq.backbone.get_submodule("layers.1")
    np.testing.assert_allclose(np.stack([norm.running_mean, norm.running_var]), averages, rtol=1e-4)
    split = raw.reshape(ITEMS, M, D)
    directions = split / np.linalg.norm(split, axis=2, keepdims=True)
    W = gpq.classifier.raw.detach().double()
    labelled, unlabelled = torch.from_numpy(directions).split([LABELLED, ITEMS - LABELLED])
    # The authors': one vote of all sub-spaces, scaled by β².
    kind = "code" if variant == "gpq-authors" else "paper"
    entropy = float(subspace_entropy(unlabelled, W, 4.0, kind))
    assert parts["entropy"] == pytest.approx(entropy, rel=1e-5)
    y = batch_given.y.double()
    classification = float(subspace_classification(labelled, W, shares(y, W), 4.0, "code"))
    assert parts["classification"] == pytest.approx(classification, rel=1e-5)
    quantised = soft_assign(labelled, gpq.codebooks().detach().double(), 20.0)
    pairs = float(npair(labelled, quantised, y))
    assert parts["npair"] == pytest.approx(pairs, rel=1e-5)
    assert parts["total"] == pytest.approx(pairs + 0.1 * classification - 0.1 * entropy, rel=1e-5)


def test_without_unlabelled_items_there_is_one_batch():
    batch_given = batch()
    alone = dataclasses.replace(batch_given, x=batch_given.x[:LABELLED])
    apart, joint = (small(s).losses(alone, amp=False) for s in ("gpq-authors", "gpq"))
    assert floats(apart) == floats(joint)


def test_it_starts_from_imagenet_weights_pads_by_their_mean_colour_and_ends_in_a_model(
    tmp_path, monkeypatch
):
    ids = np.arange(60) % 2
    pixels = (
        np.random.default_rng(0).integers(0, 180, (60, 16, 16, 3)) + 60 * ids[:, None, None, None]
    )
    pictures = open_data(pixels.astype(np.uint8), labels=ids)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    path = tmp_path / "torch" / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    path.parent.mkdir(parents=True)
    spec = BackboneSpec("vgg", "images", 4, image_size=16)
    vgg = build_backbone(spec, generator=torch.Generator().manual_seed(99))
    state = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.")}
    torch.save(state, path)
    recorded = []

    def spy(x, *args, colour, **options):
        recorded.append(colour.flatten())
        return random_flip_crop(x, *args, colour=colour, **options)

    monkeypatch.setattr("gpq_faiss.training.loop.random_flip_crop", spy)
    training = {"steps": 1, "batch_unlabelled": 20, "learning_rate": 1e-9, "augment": "crop"}
    config = preset("authors").with_settings({"quantizer": {"codebooks": 2}, "training": training})
    model = train(pictures, tmp_path / "model", config=config, labelled="5-per-class")
    torch.testing.assert_close(recorded, [torch.tensor([0.485, 0.456, 0.406])], check_dtype=False)
    trained = load_file(model / "model.safetensors")
    for name, tensor in state.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(
                trained[f"network.backbone.{name}"], tensor, atol=1e-7, rtol=0
            )
    assert int(trained["network.backbone.features.1.num_batches_tracked"]) == 2, (
        "a batch each, one step"
    )
    backbone = Encoder.load(model).model.network.get_submodule("backbone")
    assert (type(backbone), backbone.spec.tap) == (VGG, "pool"), "as it was trained"
    assert evaluate(model, pictures).method == "gpq (authors)"

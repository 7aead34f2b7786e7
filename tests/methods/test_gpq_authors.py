"""The preset ``authors``: each of its departures from ``paper`` against a plain calculation, and weights that are never random unasked."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from gpq_faiss import evaluate, train
from gpq_faiss.config import merge, preset, validate
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.losses.classification import shares, subspace_classification
from gpq_faiss.losses.npair import npair
from gpq_faiss.methods.gpq import GPQ
from gpq_faiss.methods.trainable import TrainingBatch
from gpq_faiss.nn.augment import random_flip_crop
from gpq_faiss.nn.backbones import MLP, VGG, BackboneSpec, build_backbone
from gpq_faiss.nn.gpq import GPQNetwork
from gpq_faiss.nn.model import build_network
from gpq_faiss.nn.quantizer import soft_assign

C, WIDTH, M, D = 3, 7, 2, 5
LABELLED, ITEMS = 9, 16
HIDDEN = 6


def small(variant: str = "authors") -> GPQ:
    """GPQ of the preset over a perceptron with batch norm."""
    changes = {
        "quantizer": {"codebooks": M, "codewords": 4, "subdim": D},
        "network": {"backbone": "mlp", "hidden": [HIDDEN], "weights": "none"},
        "gpq": {"variant": variant},
    }
    config = validate(merge(preset("authors"), changes))
    net = build_network(config, {"kind": "features", "width": WIDTH}, C)
    assert isinstance(net, GPQNetwork)
    assert isinstance(net.backbone, MLP)
    norm = torch.nn.BatchNorm1d(HIDDEN)
    net.backbone.layers.insert(1, norm)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, HIDDEN))
        norm.bias.copy_(torch.linspace(-0.2, 0.3, HIDDEN))
    return GPQ(net, config).train()


def batch() -> TrainingBatch:
    x = torch.randn(ITEMS, WIDTH, generator=torch.Generator().manual_seed(3))
    # The two batches differ in mean and spread, so that joint statistics are neither's.
    x[LABELLED:] = 2 * x[LABELLED:] + 1.5
    return TrainingBatch(x, torch.eye(C)[torch.arange(LABELLED) % C], 0, 10, torch.Generator())


def by_hand(gpq: GPQ, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """The perceptron's output, each of ``parts`` normalised by its own mean and deviation."""
    state = {k: v.double().numpy() for k, v in gpq.network.backbone.state_dict().items()}
    out = []
    for x in parts:
        h = x @ state["layers.0.weight"].T + state["layers.0.bias"]
        h = (h - h.mean(axis=0)) / np.sqrt(h.var(axis=0) + 1e-5)
        h = np.maximum(h * state["layers.1.weight"] + state["layers.1.bias"], 0)
        out.append(h @ state["head.weight"].T + state["head.bias"])
    return np.concatenate(out)


@pytest.mark.parametrize("variant", ["authors", "paper"])
def test_batch_statistics_and_entropy_are_those_of_a_plain_calculation(variant: str) -> None:
    gpq, given = small(variant), batch()
    x = given.x.double().numpy()
    raw = by_hand(gpq, [x[:LABELLED], x[LABELLED:]] if variant == "authors" else [x])
    parts = {k: v.item() for k, v in gpq.losses(given, amp=False).items()}
    split = raw.reshape(ITEMS, M, D)
    directions = split / np.linalg.norm(split, axis=2, keepdims=True)
    W = gpq.network.classifier.raw.detach().double()
    unit = (W / W.norm(dim=2, keepdim=True)).numpy()
    entropy = 0.0
    for item in directions[LABELLED:]:
        logits = [4 * unit[m] @ item[m] for m in range(M)]
        if variant == "authors":  # one vote of all sub-spaces, scaled by β²
            logits = [4 * np.mean(logits, axis=0)]
        for row in logits:
            p = np.exp(row) / np.exp(row).sum()
            entropy -= p @ np.log(p) / (ITEMS - LABELLED) / len(logits)
    assert parts["entropy"] == pytest.approx(entropy, rel=1e-5)
    labelled = torch.from_numpy(directions[:LABELLED])
    y = given.y.double()
    classification = float(subspace_classification(labelled, W, shares(y, W), 4.0, "code"))
    assert parts["classification"] == pytest.approx(classification, rel=1e-5)
    quantised = soft_assign(labelled, gpq.network.codebooks().detach().double(), 20.0)
    pairs = float(npair(labelled, quantised, y))
    assert parts["npair"] == pytest.approx(pairs, rel=1e-5)
    assert parts["total"] == pytest.approx(pairs + 0.1 * classification - 0.1 * entropy, rel=1e-5)


def test_apart_and_joint_differ_and_both_batches_move_the_averages() -> None:
    given = batch()
    apart, joint = small(), small("paper")
    h = apart.network.backbone.get_submodule("layers.0")(
        given.x
    ).detach()  # what batch norm sees, before any step
    losses = [gpq.losses(given, amp=False)["total"].item() for gpq in (apart, joint)]
    assert abs(losses[0] - losses[1]) > 1e-3
    for gpq, parts in ((apart, [h[:LABELLED], h[LABELLED:]]), (joint, [h])):
        mean, variance = torch.zeros(HIDDEN), torch.ones(HIDDEN)
        for part in parts:
            mean = 0.9 * mean + 0.1 * part.mean(0)
            variance = 0.9 * variance + 0.1 * part.var(0, unbiased=True)
        norm = gpq.network.backbone.get_submodule("layers.1")
        torch.testing.assert_close(norm.running_mean, mean)
        torch.testing.assert_close(norm.running_var, variance)


def test_without_unlabelled_items_there_is_one_batch() -> None:
    given = batch()
    alone = dataclasses.replace(given, x=given.x[:LABELLED])
    apart, joint = (small(s).losses(alone, amp=False) for s in ("authors", "paper"))
    assert {k: v.item() for k, v in apart.items()} == {k: v.item() for k, v in joint.items()}


# Weights and images --------------------------------------------------------------------------------------------------


def test_it_starts_from_imagenet_weights_pads_by_their_mean_colour_and_ends_in_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, root = np.random.default_rng(0), tmp_path / "pictures"
    for number, i in itertools.product(range(2), range(30)):
        (root / "ab"[number]).mkdir(exist_ok=True, parents=True)
        pixels = rng.integers(60 * number, 180 + 60 * number, (16, 16, 3), np.uint8)
        Image.fromarray(pixels).save(root / "ab"[number] / f"{i}.png")
    pictures = f"folder:{root}"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    place = tmp_path / "torch" / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    place.parent.mkdir(parents=True)
    spec = BackboneSpec("vgg", "images", 4, image_size=16)
    vgg = build_backbone(spec, generator=torch.Generator().manual_seed(99))
    state = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.")}
    torch.save(state, place)
    seen: list[torch.Tensor] = []

    def spy(x: torch.Tensor, *args: Any, colour: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append(colour.flatten())
        return random_flip_crop(x, *args, colour=colour, **options)

    monkeypatch.setattr("gpq_faiss.training.loop.random_flip_crop", spy)
    training = {"steps": 1, "batch_unlabelled": 20, "learning_rate": 1e-9, "augment": "crop"}
    config = merge(preset("authors"), {"quantizer": {"codebooks": 2}, "training": training})
    model = train(pictures, tmp_path / "model", config=config, labelled="5-per-class")
    torch.testing.assert_close(seen, [torch.tensor([0.485, 0.456, 0.406])], check_dtype=False)
    trained = load_file(model / "model.safetensors")
    for name, tensor in state.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(trained[f"network.backbone.{name}"], tensor, atol=1e-7, rtol=0)
    assert int(trained["network.backbone.features.1.num_batches_tracked"]) == 2, "a batch each, one step"
    backbone: Any = Encoder.load(model).model.network.get_submodule("backbone")
    assert (type(backbone), backbone.spec.tap) == (VGG, "pool"), "as it was trained"
    assert evaluate(model, pictures).method == "gpq (authors)"


def test_one_unlabelled_item_has_no_statistics() -> None:
    with pytest.raises(UsageError, match="one item has no batch statistics"):
        validate(merge(preset("authors"), {"training": {"batch_unlabelled": 1}}))

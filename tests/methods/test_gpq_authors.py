"""The preset ``authors``: each of its departures from ``paper`` against a plain calculation, and weights that are never random unasked."""

from __future__ import annotations

import dataclasses
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from gpq_faiss import evaluate, train
from gpq_faiss.config import Config, merge, preset, validate
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import DataError, UsageError
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


def small(details: str = "authors") -> GPQ:
    """GPQ of the preset over a perceptron with batch norm."""
    changes = {
        "quantizer": {"codebooks": M, "codewords": 4, "subdim": D},
        "network": {"backbone": "mlp", "hidden": [HIDDEN], "weights": "none"},
        "gpq": {"details": details},
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


@pytest.mark.parametrize("details", ["authors", "paper"])
def test_batch_statistics_and_entropy_are_those_of_a_plain_calculation(details: str) -> None:
    gpq, given = small(details), batch()
    x = given.x.double().numpy()
    raw = by_hand(gpq, [x[:LABELLED], x[LABELLED:]] if details == "authors" else [x])
    parts = {k: v.item() for k, v in gpq.losses(given, amp=False).items()}
    split = raw.reshape(ITEMS, M, D)
    directions = split / np.linalg.norm(split, axis=2, keepdims=True)
    W = gpq.network.classifier.raw.detach().double()
    unit = (W / W.norm(dim=2, keepdim=True)).numpy()
    entropy = 0.0
    for item in directions[LABELLED:]:
        logits = [4 * unit[m] @ item[m] for m in range(M)]
        if details == "authors":  # one vote of all sub-spaces, scaled by β²
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


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("pictures")
    for number, name in enumerate("ab"):
        (root / name).mkdir()
        for i in range(30):
            pixels = np.random.default_rng([number, i]).integers(
                60 * number, 180 + 60 * number, (16, 16, 3), np.uint8
            )
            Image.fromarray(pixels).save(root / name / f"{i}.png")
    return f"folder:{root}"


@pytest.fixture
def imagenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where torch keeps the weights; a network without a connection."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))

    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    place = tmp_path / "torch" / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    place.parent.mkdir(parents=True)
    return place


def short(**training: Any) -> Config:
    changes = {"quantizer": {"codebooks": 2}, "training": {"steps": 1, "batch_unlabelled": 20, **training}}
    return merge(preset("authors"), changes)


def test_without_imagenet_weights_it_is_an_error(pictures: str, imagenet: Path, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"cannot download vgg16_bn-6c64b313\.pth .*set network.weights"
    ) as caught:
        train(pictures, tmp_path / "model", config=short(), labelled="5-per-class")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()
    np.savez(tmp_path / "f.npz", features=np.ones((40, 4), np.float32), labels=np.arange(40) % 2)
    for data, message in (
        ("digits", "vgg needs images of at least 16 pixels"),
        (f"features:{tmp_path}/f.npz", "vgg takes images, but the data are features"),
    ):
        with pytest.raises(UsageError, match=message):
            train(data, tmp_path / "model", config=short(), labelled="5-per-class")


def test_it_starts_from_the_imagenet_weights_and_ends_in_a_model(
    pictures: str, imagenet: Path, tmp_path: Path
) -> None:
    vgg = build_backbone(
        BackboneSpec("vgg", "images", 4, image_size=16), generator=torch.Generator().manual_seed(99)
    )
    state = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.")}
    torch.save(state, imagenet)
    config = short(learning_rate=1e-9)
    out = train(pictures, tmp_path / "model", config=config, labelled="5-per-class")
    trained = load_file(out / "model.safetensors")
    for name, tensor in state.items():
        if "running" not in name and "num_batches" not in name:
            torch.testing.assert_close(trained[f"network.backbone.{name}"], tensor, atol=1e-7, rtol=0)
    assert int(trained["network.backbone.features.1.num_batches_tracked"]) == 2, "a batch each, one step"
    encoder = Encoder.load(out)
    backbone = encoder.model.network.get_submodule("backbone")
    assert isinstance(backbone, VGG)
    assert backbone.spec.tap == "pool", "as it was trained"
    assert evaluate(out, pictures).method == "gpq (authors)"


def test_crops_are_padded_by_the_mean_colour(
    pictures: str, imagenet: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vgg = build_backbone(
        BackboneSpec("vgg", "images", 4, image_size=16), generator=torch.Generator().manual_seed(99)
    )
    torch.save(vgg.state_dict(), imagenet)
    seen: list[torch.Tensor | None] = []

    def spy(x: torch.Tensor, *args: Any, colour: torch.Tensor | None, **options: Any) -> torch.Tensor:
        seen.append(colour)
        return random_flip_crop(x, *args, colour=colour, **options)

    monkeypatch.setattr("gpq_faiss.training.loop.random_flip_crop", spy)
    for details in ("authors", "paper"):
        config = merge(short(augment="crop"), {"gpq": {"details": details}})
        train(pictures, tmp_path / details, config=config, labelled="5-per-class")
    mean, black = seen
    assert black is None
    assert mean is not None
    torch.testing.assert_close(mean.flatten(), torch.tensor([0.485, 0.456, 0.406]), check_dtype=False)


@pytest.mark.parametrize(
    ("start", "changes", "message"),
    [
        ("authors", {"training": {"batch_unlabelled": 1}}, "one item has no batch statistics"),
        ("paper", {"gpq": {"details": "mine"}}, "gpq.details = 'mine': input should be 'paper' or 'authors'"),
    ],
)
def test_settings_that_cannot_be_together(start: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        validate(merge(preset(start), changes))

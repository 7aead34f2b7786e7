"""GPQ and its variants by their equations, and the preset ``authors``."""

import numpy as np
import pytest
import torch
from model_factory import own_settings
from safetensors.torch import load_file

from gpq_faiss import evaluate, train
from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.losses.classification import shares, subspace_classification, subspace_entropy
from gpq_faiss.losses.npair import npair, triplet
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
            net.prototypes,
            config.beta,
            intra_normalize(net.backbone(x[12:]), 3),
        )
        kind = "paper" if config.method == "gpq-printed" else "code"
        expected["classification"] = subspace_classification(labelled, W, shares(y), beta, kind)
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
    assert net.prototypes.grad.any()


# The preset "authors"

D, HIDDEN = 5, 6


def test_training_starts_from_imagenet_weights_and_pads_by_mean_colour(tmp_path, monkeypatch):
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

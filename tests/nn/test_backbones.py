"""Backbones: torchvision's shapes and values, weights from files, sizes, exports, and what is
refused."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.nn.backbones import (
    BACKBONES,
    IMAGENET_MEAN,
    IMAGENET_STD,
    BackboneSpec,
    build_backbone,
)
from gpq_faiss.nn.weights import load_into, read_weights


def images(batch, size, seed=0):
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def build(name, weights="none", seed=0, **changes):
    """Of images with 16 pixels per side, or of features where ``in_width`` is given."""
    size = 0 if "in_width" in changes else 64 if name in ("cnnf", "alexnet") else 16
    kind = "features" if "in_width" in changes else "images"
    options = {"kind": kind, "image_size": size, "out_width": 12, "hidden": (5,), **changes}
    generator = torch.Generator().manual_seed(seed)
    return build_backbone(BackboneSpec(name, **options), str(weights), generator=generator)


@pytest.fixture(scope="module")
def vgg16_bn():
    """torchvision's features with random values in every tensor, batch norm's statistics included:
    a tensor left out would show. The 500 MB of its classifier are shrunk, since no mapping may need
    them."""
    with torch.device("meta"):
        full = torchvision.models.vgg16_bn(weights=None)
    full.classifier = nn.Sequential(nn.Linear(8, 8))
    full = full.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for name, tensor in full.state_dict().items():
        if tensor.is_floating_point():
            spread = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(spread + 0.5 if "running_var" in name else (spread - 0.5) * 0.1)
    return full.eval()


@torch.no_grad()
def test_vgg_takes_vgg16_bn_up_to_conv4_3(vgg16_bn, tmp_path, monkeypatch):
    """From torch's cache; and an error says what to do without it."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    location = tmp_path / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    location.parent.mkdir(parents=True)
    location.write_bytes(b"cut short")
    with pytest.raises(DataError, match="delete a damaged file, or download it elsewhere"):
        build("vgg", "imagenet")
    # The real file is older than num_batches_tracked.
    theirs = {
        k: v for k, v in vgg16_bn.state_dict().items() if not k.endswith("num_batches_tracked")
    }
    torch.save(theirs, location)
    vgg, pooled = (build("vgg", "imagenet", seed=2, tap=tap).eval() for tap in ("block", "pool"))
    features = vgg16_bn.get_submodule("features")
    ours = {k: v for k, v in vgg.state_dict().items() if k.startswith("features.") and k in theirs}
    assert len(ours) == 10 * 6  # ten convolutions with batch norm: 2 + 4 tensors each
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert torch.equal(vgg.head.weight, build("vgg", seed=2).head.weight)
    for size in (16, 45):
        x = images(2, size)
        low = features[:23](
            torchvision.transforms.functional.normalize(x, IMAGENET_MEAN, IMAGENET_STD)
        )
        high = features[23:33](low)
        for net, third in ((vgg, low), (pooled, torch.nn.functional.max_pool2d(low, 2))):
            want = torch.cat([third.mean((2, 3)), high.mean((2, 3))], dim=1)
            torch.testing.assert_close(net.trunk_features(net.input(x)), want)
            torch.testing.assert_close(net(x), net.head(want))


@torch.no_grad()
def test_alexnet_takes_the_weights_of_torchvision(tmp_path):
    network = torchvision.models.alexnet().eval()
    save_file(network.state_dict(), tmp_path / "alexnet.safetensors")
    backbone = build("alexnet", tmp_path / "alexnet.safetensors").eval()
    network.classifier = network.classifier[:-1]
    x = images(2, 64)
    expected = network(torchvision.transforms.functional.normalize(x, IMAGENET_MEAN, IMAGENET_STD))
    torch.testing.assert_close(backbone.trunk_features(backbone.input(x)), expected)


@torch.no_grad()
@pytest.mark.parametrize("name", BACKBONES)
def test_the_seed_determines_the_weights_and_the_spec_the_shape(name):
    torch.manual_seed(1)
    state = torch.get_rng_state()
    net = build(name).eval()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again = build_backbone(net.spec, generator=torch.Generator().manual_seed(0)).eval()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), again.parameters(), strict=True))
    if name not in ("cnnf", "alexnet"):  # their 56 million weights take long
        assert not torch.equal(net.head.weight, build(name, seed=1).head.weight)
    x = images(2, net.spec.image_size)
    out = net(x)
    assert out.shape == (2, 12)
    torch.testing.assert_close(net(x.contiguous(memory_format=torch.channels_last)), out)


@pytest.mark.parametrize(
    ("key", "prefix"),
    [
        ("state_dict", ""),
        ("state_dict", "module."),
        ("model", "_orig_mod."),
        ("", "network.backbone."),
    ],
)
def test_own_weights_come_back_from_a_file(key, prefix, tmp_path):
    net = build("mlp", in_width=4, seed=1)
    net.input.fit(torch.rand(9, 4, generator=torch.Generator().manual_seed(0)))
    state = {prefix + k: v for k, v in net.state_dict().items()} | {
        "codebooks": torch.zeros(2, 4, 12)
    }
    path = tmp_path / ("weights.pth" if key else "weights.safetensors")
    if key:
        torch.save({key: state}, path)
    else:
        save_file(state, path)
    again = build("mlp", path, in_width=4)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    # Other bits: the trunk is taken, the last layer is new.
    wider = build("mlp", path, in_width=4, out_width=36)
    assert torch.equal(wider.state_dict()["layers.0.weight"], net.state_dict()["layers.0.weight"])
    assert wider.head.out_features == 36


def test_frozen_layers_do_not_change_in_training():
    net = build("vgg", image_size=16)
    net.freeze()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    net.train()(torch.rand(4, 3, 16, 16)).square().sum().backward()
    optimizer.step()
    changed = {k.rsplit(".", 1)[0] for k, v in net.state_dict().items() if not v.equal(before[k])}
    layers = [f"features.{number}" for number in (17, 18, 20, 21, 24, 25, 27, 28, 30, 31)]
    assert changed == {*layers, "head"}


def test_unfit_weights_name_the_first_tensor_and_change_nothing():
    net = build("vgg")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    cases = {
        r"'features\.3\.weight' has shape \[64, 3, 3, 3\] "
        r"where the backbone has \[64, 64, 3, 3\]": {
            **before,
            "features.3.weight": before["features.0.weight"],
            "features.7.weight": torch.zeros(1),
        },
        r"'features\.4\.running_mean' is missing": {
            k: v
            for k, v in before.items()
            if k not in ("features.4.running_mean", "features.30.bias")
        },
        r"'features\.0\.weight' is missing": {"conv1.weight": torch.zeros(3)},
    }
    for message, broken in cases.items():
        with pytest.raises(DataError, match=f"^file.pth: tensor {message}"):
            load_into(net, broken, "file.pth")
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


class Evil:
    def __reduce__(self):
        return Path.touch, (Path("evil-was-here"),)


def test_files_that_are_no_weights_and_no_pickle_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"epoch": 3}, tmp_path / "log.pth")
    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    for suffix in ("pth", "safetensors"):
        for i, content in enumerate((b"", b"not weights at all", b"PK\x03\x04 cut")):
            (tmp_path / f"{i}.{suffix}").write_bytes(content)
    for path in tmp_path.glob("*.*"):
        with pytest.raises(DataError, match=rf"{path.name} is not a weights file"):
            read_weights(path)
    with pytest.raises(
        DataError, match=r"nothing\.pth not found: a weights file \(network\.weights takes"
    ):
        read_weights(tmp_path / "nothing.pth")
    assert not (tmp_path / "evil-was-here").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "resnet"}, "no backbone 'resnet': choose one of vgg"),
        ({"name": "vgg", "in_width": 8}, "vgg takes images, but the data are features"),
        ({"name": "timm/resnet18", "in_width": 8}, "takes images, but the data are features"),
        ({"name": "vgg", "image_size": 15}, "at least 16 pixels per side, not 15"),
        ({"name": "cnnf", "image_size": 32}, "at least 63 pixels per side, not 32"),
        ({"name": "cnnf", "weights": "imagenet"}, "no ImageNet weights of backbone cnnf"),
    ],
)
def test_backbones_that_do_not_suit_the_data_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        build(**arguments)


def test_timm_models_by_name(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm")
    net = build("timm/test_resnet", image_size=32).eval()
    assert net(images(2, 32)).shape == (2, 12)
    # timm's own file names the tensors without our prefix, and has a classifier that is of no use
    # here.
    theirs = timm.create_model("test_resnet", num_classes=10).state_dict()
    save_file(theirs, tmp_path / "timm.safetensors")
    torch.save(
        {f"network.backbone.{k}": v for k, v in net.state_dict().items()}, tmp_path / "own.pth"
    )
    loaded, section = (
        build_backbone(net.spec, str(tmp_path / name), generator=torch.Generator()).state_dict()
        for name in ("timm.safetensors", "own.pth")
    )
    assert torch.equal(loaded["trunk.conv1.0.weight"], theirs["conv1.0.weight"])
    assert all(torch.equal(v, section[k]) for k, v in net.state_dict().items())
    with pytest.raises(UsageError, match="cannot make timm's model 'no_such_net'"):
        build("timm/no_such_net")
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ModuleNotFoundError, match="timm"):
        build_backbone(replace(net.spec, name="timm/resnet18"), generator=torch.Generator())

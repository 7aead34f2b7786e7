"""Backbones: torchvision's shapes and values, weights from files, sizes, exports, and what is refused."""

from __future__ import annotations

import dataclasses
import sys
import urllib.error
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.nn.backbones import BACKBONES, Backbone, build_backbone
from gpq_faiss.nn.inputs import IMAGENET_MEAN, IMAGENET_STD
from gpq_faiss.nn.joint import RowDropout
from gpq_faiss.nn.weights import imagenet_state, load_into, read_weights


def images(batch: int, size: int, seed: int = 0) -> Tensor:
    return torch.rand(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def normalised(x: Tensor) -> Tensor:
    return torchvision.transforms.functional.normalize(x, list(IMAGENET_MEAN), list(IMAGENET_STD))


def lived_in(module: nn.Module, seed: int) -> nn.Module:
    """Random values in every tensor, batch norm's statistics included: a tensor left out would show."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            spread = torch.rand(tensor.shape, generator=generator)
            tensor.copy_(spread + 0.5 if "running_var" in name else (spread - 0.5) * 0.1)
    return module.eval()


@pytest.fixture(scope="module")
def vgg16_bn() -> nn.Module:
    """torchvision's features; the 500 MB of its classifier are shrunk, since no mapping may need them."""
    with torch.device("meta"):
        whole = torchvision.models.vgg16_bn(weights=None)
    whole.classifier = nn.Sequential(nn.Linear(8, 8))
    return lived_in(whole.to_empty(device="cpu"), 1)


def test_vgg_takes_vgg16_bn_up_to_conv4_3(vgg16_bn: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "vgg16_bn.pth"
    torch.save(vgg16_bn.state_dict(), path)
    vgg = build_backbone("vgg", kind="images", image_size=32, out_width=36, weights=str(path), seed=2).eval()
    features = vgg16_bn.get_submodule("features")
    theirs, ours = features.state_dict(), vgg.get_submodule("features").state_dict()
    assert len(ours) == 10 * 7  # ten convolutions with batch norm: 2 + 5 tensors each
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    fresh = build_backbone("vgg", kind="images", image_size=32, out_width=36, seed=2)
    assert torch.equal(vgg.head.weight, fresh.head.weight)
    pooled = build_backbone(
        "vgg", kind="images", image_size=32, out_width=36, weights=str(path), seed=2, tap="pool"
    ).eval()
    for size in (16, 32, 45):
        x = images(2, size)
        with torch.no_grad():
            low = nn.Sequential(*list(features)[:23])(normalised(x))
            high = nn.Sequential(*list(features)[23:33])(low)
            want = torch.cat([low.mean((2, 3)), high.mean((2, 3))], dim=1)
            got = vgg.trunk_features(vgg.input(x))
        assert got.shape == (2, 768)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(vgg(x), vgg.head(want))
        with torch.no_grad():
            want = torch.cat([torch.nn.functional.max_pool2d(low, 2).mean((2, 3)), high.mean((2, 3))], dim=1)
            torch.testing.assert_close(pooled.trunk_features(pooled.input(x)), want)


def test_alexnet_takes_torchvisions() -> None:
    theirs = lived_in(torchvision.models.alexnet(weights=None), 3)
    ours = build_backbone("alexnet", kind="images", image_size=64, out_width=24, seed=0).eval()
    load_into(ours, theirs.state_dict(), "torchvision")
    for name, tensor in ours.state_dict().items():
        if name.startswith(("features", "classifier")):
            assert torch.equal(tensor, theirs.state_dict()[name]), name
    x = images(2, 64)
    with torch.no_grad():
        pooled = theirs.get_submodule("avgpool")(theirs.get_submodule("features")(normalised(x))).flatten(1)
        fc7 = nn.Sequential(*list(theirs.get_submodule("classifier"))[:6])(pooled)
        torch.testing.assert_close(ours(x), ours.head(fc7))
    assert ours.head.in_features == 4096


def test_cnnf_has_the_published_shapes_and_normalisation() -> None:
    net = build_backbone("cnnf", kind="images", image_size=224, out_width=12).eval()
    x, sides = net.input(images(1, 224)), []
    for layer in net.get_submodule("features"):  # type: ignore[attr-defined]
        before, x = x, layer(x)
        sides.append(x.shape[-1])
        if isinstance(layer, nn.LocalResponseNorm) and len(sides) < 4:
            # MatConvNet's formula, channel by channel: y_i = x_i (κ + α Σ_j x_j²)^-β over 5 neighbours.
            for i in (0, 1, 30, 63):
                near = before[:, max(0, i - 2) : i + 3].pow(2).sum(1)
                torch.testing.assert_close(x[:, i], before[:, i] / (2 + 1e-4 * near) ** 0.75)
    assert [sides[i] for i in (0, 3, 4, 7, 8, 10, 12, 14)] == [54, 27, 27, 13, 13, 13, 13, 6]
    assert torch.equal(net.get_submodule("avgpool")(x), x)  # the identity at 224
    weights = [p.numel() for n, p in net.named_parameters() if "weight" in n and "head" not in n]
    assert weights == [
        64 * 3 * 121,
        256 * 64 * 25,
        256**2 * 9,
        256**2 * 9,
        256**2 * 9,
        256 * 36 * 4096,
        4096**2,
    ]


def build_small(name: str, seed: int = 0, out_width: int = 24) -> Backbone:
    size = 64 if name in ("alexnet", "cnnf") else 16
    return build_backbone(name, kind="images", image_size=size, out_width=out_width, hidden=(20,), seed=seed)


@pytest.mark.parametrize("name", ["vgg", "mlp", "linear"])
def test_the_seed_alone_determines_the_weights(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    a, other = build_small(name), build_small(name, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    b = build_small(name)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.head.weight, other.head.weight)
    generators = [torch.Generator().manual_seed(s) for s in (5, 5)]
    c, d = (build_backbone("linear", kind="features", in_width=8, out_width=12, seed=g) for g in generators)
    assert torch.equal(c.head.weight, d.head.weight)


@pytest.mark.parametrize("name", BACKBONES)
def test_spec_rebuilds(name: str) -> None:
    net = build_small(name)
    again = build_backbone(**dataclasses.asdict(net.spec), seed=9)
    assert again.spec == net.spec
    again.load_state_dict(net.state_dict())
    x = images(2, net.spec.image_size)
    with torch.no_grad():
        out = net.eval()(x)
        assert torch.equal(out, again.eval()(x))
        torch.testing.assert_close(net(x.contiguous(memory_format=torch.channels_last)), out)
    assert out.shape == (2, 24)


def test_mlp_is_the_layers_it_names() -> None:
    net = build_backbone(
        "mlp",
        kind="features",
        in_width=6,
        out_width=24,
        hidden=(10, 7),
        dropout=0.5,
    )
    layers: Any = net.get_submodule("layers")
    assert [type(layer) for layer in layers] == 2 * [nn.Linear, nn.ReLU, RowDropout]
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    assert not torch.equal(net(x), net(x))  # dropout
    net.eval()
    want = x
    for layer in [*layers, net.head]:
        want = layer(want)
    assert torch.equal(net(x), want)


def test_standardisation_has_one_deviation_for_all_dimensions() -> None:
    spread = torch.tensor([1.0, 9, 0.1, 3, 0])
    x = torch.randn(101, 5, generator=torch.Generator().manual_seed(0)) * spread + 1e3
    net = build_backbone("linear", kind="features", in_width=5, out_width=12)
    assert torch.equal(net.input(x), x)
    net.fit_standardisation(x)
    torch.testing.assert_close(net.input(x).double().mean(0), torch.zeros(5).double(), atol=2e-3, rtol=0)
    found = net.state_dict()["input.std"]
    torch.testing.assert_close(found, x.double().var(0, correction=0).mean().sqrt().float().expand(5))
    net.fit_standardisation(torch.full((9, 5), 7.7))  # constant dimensions are not blown up
    assert net.input(torch.full((9, 5), 7.7)).abs().max() < 1e-5
    with pytest.raises(DataError, match="at least one row"):
        net.fit_standardisation(x[:0])
    with pytest.raises(DataError, match="NaN"):
        net.fit_standardisation(torch.full((2, 5), torch.nan))
    with pytest.raises(UsageError, match=r"\[2, 4\] given"):
        net.fit_standardisation(torch.ones(2, 4))
    with pytest.raises(UsageError, match="takes images"):
        build_small("linear").fit_standardisation(torch.ones(2, 5))


@pytest.mark.parametrize("name", ["vgg", "mlp"])
def test_torch_export_with_any_batch(name: str) -> None:
    net = build_small(name).eval()
    dynamic = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(net, (images(2, 16),), dynamic_shapes=dynamic)
    x = images(5, 16, seed=1)
    torch.testing.assert_close(program.module()(x), net(x))


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
@pytest.mark.parametrize("prefix", ["", "network.backbone.", "module."])
def test_own_weights_come_back_from_a_file(suffix: str, prefix: str, tmp_path: Path) -> None:
    net = build_backbone("mlp", kind="features", in_width=4, out_width=24, hidden=(5,), seed=1)
    net.fit_standardisation(torch.rand(9, 4, generator=torch.Generator().manual_seed(0)))
    state = {prefix + k: v for k, v in net.state_dict().items()} | {"codebooks": torch.zeros(2, 4, 12)}
    path = tmp_path / f"weights{suffix}"
    if suffix == ".pth":
        torch.save({"state_dict": state}, path)
    else:
        save_file(state, path)
    again = build_backbone("mlp", kind="features", in_width=4, out_width=24, hidden=(5,), weights=str(path))
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    # Other bits: the trunk is taken, the last layer is new.
    wider = build_backbone("mlp", kind="features", in_width=4, out_width=36, hidden=(5,), weights=str(path))
    assert torch.equal(wider.state_dict()["layers.0.weight"], net.state_dict()["layers.0.weight"])
    assert wider.head.out_features == 36


def test_weights_that_do_not_fit_name_the_first_tensor_and_change_nothing(tmp_path: Path) -> None:
    net = build_small("vgg")
    before = {k: v.clone() for k, v in net.state_dict().items()}
    state = dict(before)
    cases = {
        r"'features\.3\.weight' has shape \[64, 3, 3, 3\] where the backbone has \[64, 64, 3, 3\]": {
            **state,
            "features.3.weight": state["features.0.weight"],
            "features.7.weight": torch.zeros(1),
        },
        r"'features\.4\.running_mean' is missing": {
            k: v for k, v in state.items() if k not in ("features.4.running_mean", "features.30.bias")
        },
        r"'features\.0\.weight' is missing": {"conv1.weight": torch.zeros(3)},
        r"'features\.1\.bias' holds NaN": {**state, "features.1.bias": torch.full((64,), torch.nan)},
    }
    for message, broken in cases.items():
        with pytest.raises(DataError, match=f"^file.pth: tensor {message}"):
            load_into(net, broken, "file.pth")
        assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    path = tmp_path / "linear.pth"
    torch.save(nn.Linear(3, 4).state_dict(), path)
    with pytest.raises(DataError, match=r"linear\.pth: tensor 'features\.0\.weight' is missing"):
        build_backbone("vgg", kind="images", image_size=16, out_width=12, weights=str(path))


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no weights file .*nothing\.pth"):
        read_weights(tmp_path / "nothing.pth")
    for suffix in (".pth", ".safetensors"):
        for content in (b"", b"not weights at all", b"PK\x03\x04 cut"):
            path = tmp_path / f"foreign{suffix}"
            path.write_bytes(content)
            with pytest.raises(DataError, match=rf"foreign{suffix} is not a weights file") as caught:
                read_weights(path)
            assert "\n" not in str(caught.value)
    torch.save({"epoch": 3}, tmp_path / "log.pth")
    with pytest.raises(DataError, match="is not a state dict"):
        read_weights(tmp_path / "log.pth")


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("evil-was-here"),)


def test_no_pickle_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Evil()}, tmp_path / "evil.pth")
    with pytest.raises(DataError, match=r"evil\.pth is not a weights file"):
        read_weights(tmp_path / "evil.pth")
    assert not (tmp_path / "evil-was-here").exists()


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def offline(*_: object, **__: object) -> None:
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(DataError) as caught:
        build_backbone("vgg", kind="images", image_size=16, out_width=12, weights="imagenet")
    message = str(caught.value)
    assert "vgg16_bn-6c64b313.pth" in message
    assert "no route to host" in message
    assert str(tmp_path / "hub" / "checkpoints") in message
    assert "set network.weights" in message
    assert "\n" not in message
    place = tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(b"cut short")
    with pytest.raises(DataError, match=r"alexnet-owt-7be5be79\.pth is damaged .* delete it"):
        imagenet_state("alexnet")


def test_imagenet_weights_come_from_torchs_cache(
    vgg16_bn: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    place = tmp_path / "hub" / "checkpoints" / "vgg16_bn-6c64b313.pth"
    place.parent.mkdir(parents=True)
    # The real file is older than num_batches_tracked.
    state = {k: v for k, v in vgg16_bn.state_dict().items() if not k.endswith("num_batches_tracked")}
    torch.save(state, place)
    net = build_backbone("vgg", kind="images", image_size=16, out_width=12, weights="imagenet")
    assert torch.equal(net.state_dict()["features.30.weight"], state["features.30.weight"])


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"name": "resnet"}, "no backbone 'resnet': choose one of vgg"),
    ({"name": "vgg", "kind": "features", "in_width": 8}, "vgg takes images, but the data are features"),
    ({"name": "timm/resnet18", "kind": "features", "in_width": 8}, "takes images, but the data are features"),
    ({"name": "vgg", "kind": "sound"}, "no input kind 'sound'"),
    ({"name": "vgg", "image_size": 15}, "at least 16 pixels per side, not 15"),
    ({"name": "alexnet", "image_size": 32}, "at least 63 pixels per side, not 32"),
    ({"name": "linear", "image_size": 0}, "image_size 0"),
    ({"name": "mlp", "kind": "features"}, "in_width 0"),
    ({"name": "cnnf", "image_size": 64, "weights": "imagenet"}, "no ImageNet weights of backbone cnnf"),
    ({"name": "vgg", "tap": "top"}, "tap 'top' is not one of block, pool"),
    ({"name": "mlp", "dropout": 1.0}, "dropout is in"),
    ({"name": "mlp", "hidden": (0,)}, "widths start at 1"),
]


@pytest.mark.parametrize(("arguments", "message"), IMPOSSIBLE)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        build_backbone(**{"kind": "images", "image_size": 32, "out_width": 12, **arguments})
    assert "\n" not in str(caught.value)


def test_input_of_another_shape_is_refused() -> None:
    net = build_small("vgg").eval()
    with pytest.raises(UsageError, match="8x8 pixels given: at least 16"):
        net(images(1, 8))
    with pytest.raises(UsageError, match="uint8 given"):
        net(torch.zeros(1, 3, 16, 16, dtype=torch.uint8))
    with pytest.raises(UsageError, match=r"\[1, 1, 16, 16\] given"):
        net(torch.zeros(1, 1, 16, 16))
    with pytest.raises(UsageError, match="built for images of 16x16"):
        build_small("mlp")(images(1, 17))
    with pytest.raises(UsageError, match=r"\[1, 7\] given: \[B, 6\]"):
        build_backbone("linear", kind="features", in_width=6, out_width=12)(torch.ones(1, 7))


def test_timm_models_by_name(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")

    def build(**options: Any) -> Backbone:
        return build_backbone("timm/test_resnet", kind="images", image_size=32, out_width=12, **options)

    net = build(seed=1).eval()
    assert net(images(2, 32)).shape == (2, 12)
    # timm's own file names the tensors without our prefix, and has a classifier that is of no use here.
    theirs = timm.create_model("test_resnet", num_classes=10)
    save_file(theirs.state_dict(), tmp_path / "timm.safetensors")
    loaded = build(weights=str(tmp_path / "timm.safetensors"))
    assert torch.equal(loaded.state_dict()["trunk.conv1.0.weight"], theirs.state_dict()["conv1.0.weight"])
    with pytest.raises(UsageError, match="timm has no model 'no_such_net'"):
        build_backbone("timm/no_such_net", kind="images", image_size=32, out_width=12)


def test_timm_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'gpq-faiss\[timm\]'"):
        build_backbone("timm/resnet18", kind="images", image_size=32, out_width=12)

"""What other packages add: the example package runs from the command line, and one clear line where
a package cannot be used.
"""

import importlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import done, gpq, only_line, refused
from sklearn.datasets import dump_svmlight_file

import gpq_faiss
from gpq_faiss import plugins
from gpq_faiss.config import from_dict, preset, to_dict
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.methods.gpq import build_gpq
from gpq_faiss.methods.registry import make_method
from gpq_faiss.nn.backbones import BackboneSpec, build_backbone

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpq-faiss-example"
SHORT = "--labelled 10-per-class --preset paper --bits 12 --set training.steps=4 --set training.batch_labelled=30"
LINEAR = "--set network.backbone=linear"
WITH_LOSS = preset("paper").with_settings(
    {"loss": {"extra": {"compactness": 0.5}}, "network": {"backbone": "linear"}}
)


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Makes a package known by its name and entry points, as an installer would; returns what it
    made. CODE is a module then.
    """
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "broken_module.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)

    def make(name, entry_points):
        about = tmp_path / "site" / f"{name.replace('-', '_')}-1.5.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = [
            f"[gpq_faiss.{kind}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
            for kind, names in entry_points.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(lines))
        importlib.invalidate_caches()
        plugins._installed.cache_clear()
        return about

    yield make
    plugins._installed.cache_clear()


@pytest.fixture
def example(install, monkeypatch):
    """The example package, by the entry points of its own pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    given = {
        kind.removeprefix("gpq_faiss."): names for kind, names in project["entry-points"].items()
    }
    assert set(given) == {"methods", "backbones", "losses", "data"}
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return install(project["name"], given)


def uninstall(package):
    shutil.rmtree(package)
    plugins._installed.cache_clear()


def test_a_method_runs_in_experiments_and_evaluations(example, tmp_path):
    listed = {
        row["method"]: row for row in json.loads(done("experiment", "methods", "--format", "json"))
    }
    assert listed["lsh"]["from"] == "Charikar, STOC 2002"
    (tmp_path / "grid.toml").write_text(
        'methods = ["lsh", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = "20-per-class"\n'
    )
    run = f"experiment run {tmp_path}/grid.toml digits --out {tmp_path}"
    done(f"{run}/runs")
    assert "lsh" in done("experiment", "report", tmp_path / "runs")
    done(f"train digits {SHORT} {LINEAR} --out {tmp_path}/model")
    table = done(f"evaluate {tmp_path}/model digits --protocol 1 --compare lsh,pq --format json")
    assert "lsh" in json.loads(table)["compared"]
    # Without the package, what it made is still read.
    uninstall(example)
    assert "lsh" in done("experiment", "report", tmp_path / "runs")
    assert "no method 'lsh': choose one of gpq" in refused(f"{run}/y", code=2)


@pytest.mark.parametrize("chosen", ["paper", pytest.param("recommended", marks=pytest.mark.slow)])
def test_a_backbone_and_a_loss_are_trained_with(example, tmp_path, chosen):
    bits = 4 if chosen == "recommended" else 12
    model = tmp_path / "model"
    train = f"train digits --labelled 10-per-class --bits {bits} --set training.steps=3 --preset {chosen}"
    done(f"{train} --set network.backbone=small-cnn --set loss.extra.compactness=0.5 --out {model}")
    about = json.loads((model / "config.json").read_text())
    assert about["backbone_of"] == "gpq-faiss-example 1.5"
    assert about["config"]["loss"]["extra"] == {"compactness": 0.5}
    line = json.loads((model / "metrics.jsonl").read_text().splitlines()[-1])
    assert any(name.endswith("compactness") and value > 0 for name, value in line.items())
    done("encode", model, "digits", "--out", tmp_path / "codes.h5")
    uninstall(example)
    wanted = (
        "has the backbone 'small-cnn' of gpq-faiss-example 1.5, which is not installed: install it"
    )
    assert refused("encode", model, "digits", "--out", tmp_path / "again.h5") == f"{model} {wanted}"
    assert from_dict(to_dict(WITH_LOSS)) == WITH_LOSS
    assert WITH_LOSS.fingerprint() != preset("paper").fingerprint()
    with pytest.raises(UsageError, match="no package has a loss of that name"):
        gpq_faiss.train("digits", tmp_path / "x", config=WITH_LOSS)


@pytest.mark.usefixtures("example")
def test_weights_of_a_backbone_come_from_a_file(tmp_path):
    spec, generator = BackboneSpec("small-cnn", "images", 6, image_size=8), torch.Generator()
    first = build_backbone(spec, generator=generator)
    torch.save(first.trunk.state_dict(), tmp_path / "small.pth")
    x = torch.rand(3, 3, 8, 8)
    with torch.inference_mode():
        wanted = first.trunk_features(first.input(x))
        for weights, same in ((str(tmp_path / "small.pth"), True), ("none", False)):
            second = build_backbone(spec, weights, generator=generator)
            assert torch.equal(second.trunk_features(second.input(x)), wanted) == same
    with pytest.raises(UsageError, match="no ImageNet weights of backbone small-cnn"):
        build_backbone(spec, "imagenet", generator=generator)
    wrong = r"'small-cnn' of gpq-faiss-example 1.5 cannot be built \(ValueError: it takes"
    with pytest.raises(UsageError, match=wrong):
        build_backbone(BackboneSpec("small-cnn", "features", 6, in_width=8), generator=generator)


@pytest.mark.usefixtures("example")
def test_a_loss_changes_what_is_learnt_and_none_changes_nothing(tmp_path):
    weights = []
    for name, own in {"none": "", "zero": "=0.0", "some": "=0.5"}.items():
        setting = own and f"--set loss.extra.compactness{own}"
        done(f"train digits {SHORT} {LINEAR} {setting} --out {tmp_path}/{name}")
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2]


@pytest.mark.usefixtures("example")
def test_a_source_of_data_is_read_as_any_other(tmp_path):
    x, y = np.random.default_rng(0).standard_normal((60, 5)), np.arange(60) % 3
    dump_svmlight_file(x + 3 * y[:, None], y, str(tmp_path / "a.txt"))
    spec = f"libsvm:{tmp_path}/a.txt"
    done(f"train {spec} --protocol none {SHORT} --out {tmp_path}/model")
    assert "60 codes" in done(f"encode {tmp_path}/model {spec} --out {tmp_path}/codes.h5")
    assert json.loads((tmp_path / "model" / "config.json").read_text())["data"]["name"] == spec
    missing = refused("train", "libsvm:none.txt", "--out", tmp_path / "x", code=2)
    assert "the source of data 'libsvm' of gpq-faiss-example 1.5 cannot open 'none.txt'" in missing
    assert "| libsvm:PATH" in refused("train", "nosuch:x", "--out", tmp_path / "x", code=2)


CODE = """
import torch
from torch import nn
from gpq_faiss.methods.registry import MethodEntry

class NotScalar(nn.Module):
    def forward(self, x, y):
        return x

class Needs(nn.Module):
    def __init__(self, size):
        super().__init__()

class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.centre = nn.Parameter(torch.randn(1))

    def forward(self, x, y):
        return ((x - self.centre) ** 2).mean()

class Plain:
    def __init__(self, bits):
        pass

entry = MethodEntry("x", "x", "unsupervised", "binary", "broken_module", "Plain")
absent = MethodEntry("x", "x", "unsupervised", "binary", "no_such_module", "X")
def two_dimensional(spec):
    return nn.Identity()
def fails(*args):
    raise OSError("the sensor\\nis off")
def nothing(*args):
    return None
"""


def centres(method):
    return [parameter for name, parameter in method.named_parameters() if name.endswith("centre")]


@pytest.mark.parametrize("chosen", ["paper", "recommended"])
def test_parameters_of_a_loss_are_trained_once_and_kept(install, chosen):
    install("centres", {"losses": {"centres": "broken_module:Centres"}})
    config = preset(chosen).with_settings(
        {"loss": {"extra": {"centres": 0.5}}, "network": {"backbone": "linear"}}
    )
    data = gpq_faiss.open_data(np.eye(12, 5, dtype=np.float32) + 1, labels=np.arange(12) % 3)
    method = build_gpq(config, data, 0, 3)
    (centre,) = centres(method)
    groups = method.optimizer(config).param_groups
    assert sum(parameter is centre for group in groups for parameter in group["params"]) == 1
    assert [name for name in method.state_dict() if name.endswith("centre")]
    again = build_gpq(config, data, 0, 3)
    assert centres(again)[0].tolist() == centre.tolist()


@pytest.mark.parametrize(
    ("kind", "name", "value", "args", "why"),
    [
        ("backbones", "vgg", "fails", "network.backbone=vgg", "has a name that is built in"),
        ("backbones", "mine", "none", "network.backbone=mine", "cannot be loaded .AttributeError"),
        ("backbones", "mine", "no_such:x", "network.backbone=mine", "cannot be loaded .ModuleNotFoundError"),
        ("backbones", "mine", "fails", "network.backbone=mine", "cannot be built .OSError: the sensor"),
        ("backbones", "mine", "nothing", "network.backbone=mine", "a torch.nn.Module is needed"),
        ("backbones", "mine", "two_dimensional", "network.backbone=mine", "not one vector per item"),
        ("losses", "entropy", "Needs", "loss.extra.entropy=1", "has a name that is built in"),
        ("losses", "mine", "Needs", "loss.extra.mine=1", "cannot be made .TypeError"),
        ("losses", "mine", "fails", "loss.extra.mine=1", "cannot be made .OSError"),
        ("losses", "mine", "nothing", "loss.extra.mine=1", "a class of torch.nn.Module is needed"),
        ("losses", "mine", "NotScalar", "loss.extra.mine=1", "does not return a scalar tensor"),
        ("losses", "mine", "Needs", "loss.extra.other=1", "no package has a loss of that name .installed: mine"),
        ("data", "digits", "fails", "", "has a name that is built in"),
        ("data", "mine", "fails", "mine:x", "cannot open 'x' .OSError: the sensor is off"),
        ("data", "mine", "nothing", "mine:x", "a data set, a table or an array is needed"),
    ],
)  # fmt: skip
def test_a_package_that_cannot_be_used_is_one_line(install, tmp_path, kind, name, value, args, why):
    install("broken-package", {kind: {name: value if ":" in value else f"broken_module:{value}"}})
    data, setting = (
        (args, "") if args.startswith("mine:") else ("digits", f"--set {args}" if args else "")
    )
    result = gpq(f"train {data} {SHORT} {setting} --out {tmp_path}/model")
    assert result.exit_code in (1, 2), repr(result.exception)
    line = only_line(result.stderr)
    assert re.search(why, line), line
    if "is built in" in why or "cannot be" in why:
        assert "of broken-package 1.5" in line
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("fails", "a MethodEntry of gpq_faiss.methods.registry is needed"),
        ("entry", "Plain is not a Coder"),
        ("absent", "module no_such_module is not installed"),
    ],
)
def test_a_method_that_cannot_be_used_is_one_line(install, value, why):
    entry_points = {"methods": {"mine": f"broken_module:{value}"}}
    install("broken-package", entry_points)
    with pytest.raises((UsageError, DataError), match=why):
        make_method("mine", 12)
    install("other-package", entry_points)
    wanted = "the method 'mine' of broken-package 1.5 is one of other-package 1.5 too: uninstall one of them"
    assert wanted in refused("experiment", "methods", code=2)

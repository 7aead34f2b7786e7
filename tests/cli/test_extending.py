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

import pytest
from commands import done, gpq, only_line, refused

from gpq_faiss import plugins
from gpq_faiss.errors import UsageError
from gpq_faiss.methods.registry import make_method

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpq-faiss-example"
SHORT = (
    "--labelled 10-per-class --preset paper --bits 12 --set training.steps=4"
    " --set training.batch_labelled=30"
)
LINEAR = "--set network.backbone=linear"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a package with entry points in the module CODE."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "broken_module.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)

    def make(name, entry_points):
        package = tmp_path / "site" / f"{name.replace('-', '_')}-1.5.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n")
        lines = [
            f"[gpq_faiss.{kind}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items())
            for kind, names in entry_points.items()
        ]
        (package / "entry_points.txt").write_text("\n".join(lines))
        importlib.invalidate_caches()
        plugins._installed.cache_clear()
        return package

    yield make
    plugins._installed.cache_clear()


@pytest.fixture
def example(install, monkeypatch):
    """The example package, by the entry points of its own pyproject.toml."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    entry_points = {
        kind.removeprefix("gpq_faiss."): names for kind, names in project["entry-points"].items()
    }
    assert set(entry_points) == {"methods", "backbones"}
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return install(project["name"], entry_points)


def uninstall(package):
    shutil.rmtree(package)
    plugins._installed.cache_clear()


def test_method_runs_in_experiments_and_evaluations(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listed = json.loads(done("experiment methods --format json"))
    assert {"lsh", "pq"} <= {row["method"] for row in listed}
    grid = 'methods = ["lsh", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = "20-per-class"\n'
    (tmp_path / "grid.toml").write_text(grid)
    done("experiment run grid.toml digits --out runs")
    done(f"train digits {SHORT} {LINEAR} --out model")
    assert "lsh" in done("evaluate model digits --protocol 1 --compare lsh,pq --format csv")
    # Without the package, what it made is still read.
    uninstall(example)
    assert "lsh" in done("experiment report runs")
    line = refused("experiment run grid.toml digits --out other", code=2)
    assert "method 'lsh' is unknown" in line


@pytest.mark.parametrize("name", ["paper", pytest.param("recommended", marks=pytest.mark.slow)])
def test_backbone_is_trained(example, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    train = "train digits --labelled 10-per-class --bits 4 --set training.steps=3"
    train += " --set network.backbone=small-cnn"
    done(f"{train} --preset {name} --out model")
    description = json.loads((tmp_path / "model/config.json").read_text())
    assert description["backbone_of"] == "gpq-faiss-example 1.5"
    done("encode model digits --out codes.h5")
    uninstall(example)
    message = "has the backbone 'small-cnn' of gpq-faiss-example 1.5, which is not installed"
    assert message in refused("encode model digits --out again.h5")


CODE = """
from torch import nn

def flat(spec):
    return nn.Identity()
def fails(*args):
    raise OSError("the sensor\\nis off")
def nothing(*args):
    return None
"""


@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("vgg", "fails", "has a name that is built in"),
        ("mine", "none", "cannot be loaded .AttributeErr"),
        ("mine", "fails", "cannot be built .OSError: the"),
        ("mine", "nothing", "a torch.nn.Module is needed"),
        ("mine", "flat", "not one vector per item"),
    ],
)
def test_unusable_backbone_is_one_line(install, tmp_path, name, entry, message):
    install("broken-package", {"backbones": {name: f"broken_module:{entry}"}})
    result = gpq(f"train digits {SHORT} --set network.backbone={name} --out {tmp_path}/model")
    assert result.exit_code in (1, 2), repr(result.exception)
    assert re.search(message, only_line(result.stderr))
    assert not (tmp_path / "model").exists()


def test_unusable_method_is_a_usage_error(install):
    install("broken-package", {"methods": {"mine": "broken_module:absent"}})
    message = "'mine' of broken-package 1.5 cannot be loaded .AttributeError"
    with pytest.raises(UsageError, match=message):
        make_method("mine", 12)

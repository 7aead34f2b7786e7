"""Grids: what a TOML means, and what is refused in it."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from experiment.experiments import small_grid
from PIL import Image

from gpq_faiss.config import Config, from_dict, merge, preset, validate
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.experiment.grid import built_in_grids, grid_from, method_config, read_grid
from gpq_faiss.experiment.specs import RunSpec, plan, split_of
from gpq_faiss.methods.registry import METHODS, make_builder
from gpq_faiss.training.loop import resolve_image_size


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return open_data("digits")


def test_the_built_in_grids_are_those_of_the_paper_and_more() -> None:
    grids = {name: read_grid(name) for name in built_in_grids()}
    assert set(grids) == {
        "table2",
        "table3",
        "ablation",
        "likeness",
        "pairs",
        "sensitivity",
        "scale",
        "tsne",
        "voronoi",
    }
    for name in ("table2", "table3"):
        assert grids[name].methods == tuple(METHODS)
        assert grids[name].bits == (12, 24, 32, 48)
        assert grids[name].protocol == {"table2": "1", "table3": "2"}[name]
        assert len(grids[name].seeds) == 3
    weights = {
        (v.config["loss"]["lambda1"], v.config["loss"]["lambda2"]) for v in grids["sensitivity"].variations
    }
    assert len(weights) == 25
    assert (0.1, 0.1) in weights
    assert grids["sensitivity"].preset == "paper"
    assert grids["table3"].preset == "unseen-classes"
    names = [v.name for v in grids["ablation"].variations]
    assert (names[0], names[-1]) == ("recommended", "last weights instead of the average")


@pytest.mark.parametrize("perceptron", [True, False], ids=["features", "images"])
@pytest.mark.parametrize("name", list(built_in_grids()))
def test_every_run_of_a_built_in_grid_has_settings_that_can_be(name: str, perceptron: bool) -> None:
    grid = read_grid(name)
    seen: dict[str, set[str]] = {}
    for variation in grid.variations:
        for method in grid.methods_of(variation):
            if not METHODS[method].deep:
                continue
            config = method_config(
                grid, variation, method, perceptron=perceptron, base=preset(variation.preset or grid.preset)
            )
            config = validate(config)
            # Variations that change the sets and not the settings are told apart by these.
            sizes = f"{variation.labelled} {variation.unlabelled} {variation.database}"
            known = seen.setdefault(method, set())
            assert f"{config.fingerprint()} {sizes}" not in known, (
                f"{method}: '{variation.name}' changes nothing"
            )
            known.add(f"{config.fingerprint()} {sizes}")
    assert {"gpq", "posterior"} & set(seen)


def test_a_grid_from_a_file_and_options_over_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('methods = ["pq", "gpq"]\nbits = [8]\nlabelled = ["0.1"]\n[config.training]\nsteps = 7\n')
    grid = read_grid(path)
    assert (grid.name, grid.title, grid.bits, grid.seeds) == ("mine", "mine", (8,), (0,))
    other = grid.with_options(bits=(12,), seeds=None, labelled=("all",))
    assert (other.bits, other.seeds, other.labelled) == ((12,), (0,), ("all",))
    table = read_grid("table2")
    assert table.with_options(bits=(12,)).title == table.title == "Table 2: mAP under protocol 1"
    assert table.with_options(protocol="2").title == "Table 2: mAP under protocol 2"
    # In the order of the tables, whatever the order in the file.
    assert other.methods_of(other.variations[0]) == ("gpq", "pq")


_ONLY_WEIGHTS = (
    r"kind sensitivity shows loss\.lambda1 and loss\.lambda2 and nothing else that variations change"
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": ["pq"]}, "unknown key 'method': known here are title"),
        ({"methods": ["lsh"]}, "no method 'lsh': choose one of gpq"),
        ({"methods": []}, "no methods"),
        ({"methods": ["pq", "pq"]}, "methods has an entry twice"),
        ({"bits": [12, "24"]}, "a list of int is expected"),
        ({"bits": [0]}, "bits = 0"),
        ({"bits": 12}, "bits = 12: list is expected"),
        ({"seeds": [-1]}, "seed -1"),
        ({"seeds": [True]}, "a list of int is expected"),
        ({"kind": "pie"}, "kind = 'pie': choose one of table"),
        ({"protocol": "none"}, "protocol 'none'"),
        ({"protocol": "transfer:2"}, "a share of classes is above 0 and below 1"),
        ({"protocol": "3"}, "no protocol '3': choose one of 1, 2, transfer"),
        ({"labelled": "0.1"}, "labelled = '0.1': list is expected"),
        ({"queries": 100}, "queries = 100: str is expected"),
        ({"preset": "best"}, "no preset 'best'"),
        ({"vectors": -1}, "vectors = -1"),
        ({"config": {"loss": {"lambda9": 1}}}, "setting 'loss.lambda9' is unknown"),
        ({"config": {"loss": {"lambda1": "big"}}}, "loss.lambda1 = 'big': input should be a valid number"),
        ({"settings": {"lsh": {}}}, "no method 'lsh'"),
        ({"settings": {"gpq": {"los": {}}}}, "setting 'los' is unknown"),
        ({"variation": ["x"]}, r"write \[\[variation\]\]"),
        ({"variation": [{"nam": "x"}]}, "unknown key 'variation 1: nam'"),
        ({"variation": [{"name": "x"}, {"name": "x"}]}, "two variations are named 'x'"),
        ({"variation": [{"methods": ["lsh"]}]}, "no method 'lsh'"),
        ({"variation": [{"database": 0}]}, "database = 0"),
        ({"variation": [{"config": {"loss": {"x": 1}}}]}, "setting 'loss.x' is unknown"),
        ({"product": {"lambda1": [1]}}, 'write section and setting, as in "loss.lambda1"'),
        ({"product": {"loss.lambda1": 1.0}}, "a list of values is expected"),
        ({"product": {"loss.lambda1": []}}, "a list of values is expected"),
        ({"product": {"loss.lambda1": [0.0] * 400, "loss.lambda2": [0.0] * 400}}, "more than 100,000"),
        ({"product": {"loss.x": [1.0]}}, "setting 'loss.x' is unknown"),
        ({"seeds": [2**31 - 1]}, "seed 2147483647: 0 to 2147483646 are possible"),
        ({"settings": {"gpq": 3}}, r"settings\.gpq = 3: write \[settings\.gpq\.SECTION\]"),
        ({"settings": {"pq": {"training": {"steps": 3}}}}, r"settings\.pq: only networks have settings"),
        (
            {"config": {"training": {"seed": 3}}},
            r"training\.seed is not changed .*: it follows from the grid's seeds",
        ),
        ({"product": {"training.seed": [1, 2]}}, "follows from the grid's seeds"),
        ({"product": {"quantizer.codebooks": [4, 6]}}, "follows from the grid's bits"),
        ({"settings": {"gpq": {"quantizer": {"codebooks": 4}}}}, "follows from the grid's bits"),
        ({"variation": [{"config": {"preset": "paper"}}]}, "follows from the grid's preset"),
        (
            {"kind": "sensitivity", "product": {"loss.lambda1": [0.0, 1.0], "loss.beta": [4.0, 5.0]}},
            _ONLY_WEIGHTS,
        ),
        ({"kind": "sensitivity", "variation": [{}, {"name": "x", "database": 50}]}, _ONLY_WEIGHTS),
        ({"kind": "sensitivity", "variation": [{}, {"name": "x", "preset": "paper"}]}, _ONLY_WEIGHTS),
        (
            {"kind": "scale", "product": {"loss.lambda2": [0.0, 0.1]}},
            "shows the numbers of items and nothing else",
        ),
    ],
)
def test_what_a_grid_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        grid_from({"methods": ["pq"]} | values, "g")


def test_files_that_are_no_grid(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no grid 'table9': choose one of ablation.*, or name a \.toml file"
    ):
        read_grid("table9")
    with pytest.raises(DataError, match="not found"):
        read_grid(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("methods = [")
    with pytest.raises(DataError, match="is not TOML"):
        read_grid(bad)
    bad.write_text("bits = [0]")
    with pytest.raises(UsageError, match=r"bad\.toml: bits = 0"):
        read_grid(bad)
    with pytest.raises(DataError, match="is a folder"):
        read_grid((tmp_path / "folder.toml").mkdir() or tmp_path / "folder.toml")


def test_the_page_on_experiments_names_the_grids_and_its_example_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [
        "table2",
        "table3",
        "ablation",
        "likeness",
        "pairs",
        "sensitivity",
        "scale",
        "tsne",
        "voronoi",
    ]
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    grid = grid_from(tomllib.loads(block), "page")
    assert [v.name for v in grid.variations] == ["", "no entropy"]
    assert grid.settings["pqn"] == {"training": {"learning_rate": 0.002}}


# --------------------------------------------------------------------------------------------------------------- plans


def test_runs_are_the_whole_grid_seeds_outermost(digits: Dataset) -> None:
    grid = small_grid(
        variation=[{}, {"name": "more", "methods": ["gpq"], "config": {"loss": {"lambda2": 0.5}}}]
    )
    specs = plan(grid, digits, preset("paper")).specs
    # A method that keeps no code has one run per seed.
    assert [(c.method, c.bits, c.seed, c.variation) for c in specs[: len(specs) // 2]] == [
        ("gpq", 12, 0, ""),
        ("gpq", 24, 0, ""),
        ("pq", 12, 0, ""),
        ("pq", 24, 0, ""),
        ("float", 0, 0, ""),
        ("gpq", 12, 0, "more"),
        ("gpq", 24, 0, "more"),
    ]
    assert [c.seed for c in specs] == sorted(c.seed for c in specs)
    assert len({c.name for c in specs}) == len({c.identity for c in specs}) == len(specs)
    assert all(re.fullmatch(r"[a-z0-9._-]+", c.name) for c in specs)
    of = {(c.method, c.bits, c.seed, c.variation): c for c in specs}
    settings = of["gpq", 24, 1, "more"].settings
    assert settings["quantizer"]["codebooks"] == 6
    assert settings["training"]["seed"] == 1
    assert settings["training"]["steps"] == 20
    assert settings["loss"]["lambda2"] == 0.5
    assert of["gpq", 24, 1, ""].settings["loss"]["lambda2"] == 0.1


def test_a_run_is_another_when_anything_that_matters_is(digits: Dataset) -> None:
    def identity(base: Any = None, **changes: Any) -> str:
        grid = small_grid(**({"methods": ["gpq"], "bits": [12], "seeds": [0]} | changes))
        return plan(grid, digits, base or preset("paper")).specs[0].identity

    same = identity()
    assert identity(title="another title", kind="ablation") == same
    others = [
        identity(bits=[24]),
        identity(seeds=[1]),
        identity(labelled=["10-per-class"]),
        identity(protocol="2"),
        identity(protocol="transfer"),
        identity(protocol="transfer:8,9"),
        identity(queries="5-per-class"),
        identity(vectors=5),
        identity(methods=["gpq-h"]),
        identity(config={"training": {"steps": 21}}),
        identity(base=preset("recommended")),
        identity(variation=[{"database": 100}]),
        plan(small_grid(methods=["pq"], bits=[12]), digits, preset("paper")).specs[0].identity,
        plan(small_grid(methods=["pq"], bits=[24]), digits, preset("paper")).specs[0].identity,
    ]
    assert len({same, *others}) == len(others) + 1


def test_several_numbers_of_labels_are_told_apart(digits: Dataset) -> None:
    grid = small_grid(
        methods=["gpq"],
        bits=[12],
        seeds=[0],
        labelled=["5-per-class", "0.1"],
        variation=[{}, {"name": "own", "labelled": "9-per-class"}],
    )
    specs = plan(grid, digits, preset("paper")).specs
    assert [(c.variation, c.labelled) for c in specs] == [
        ("", "5-per-class"),
        ("own", "9-per-class"),
        ("", "0.1"),
    ]
    assert len({c.name for c in specs}) == 3
    assert "5-per-class" in specs[0].name


def test_settings_are_layered(digits: Dataset) -> None:
    grid = small_grid(
        config={"loss": {"beta": 5.0}, "training": {"steps": 9}},
        settings={"gpq-h": {"loss": {"beta": 6.0}}},
        variation=[
            {"name": "v", "config": {"training": {"steps": 11}}},
            {"name": "p", "preset": "recommended"},
            {"name": "m", "preset": "recommended", "config": {"network": {"backbone": "mlp"}}},
        ],
    )
    first, second, third = grid.variations

    def config(method: str, variation: Any = first, perceptron: bool = True) -> Any:
        return method_config(grid, variation, method, perceptron=perceptron, base=preset("paper"))

    assert config("gpq").loss.beta == 5.0
    assert config("gpq-h").loss.beta == 6.0
    assert (config("gpq-h").loss.lambda1, config("gpq-h").loss.lambda2) == (0.0, 0.0)
    assert config("gpq-t").gpq.metric == "triplet"
    assert config("gpq").training.steps == 11
    assert config("gpq", second).training.steps == 9
    assert config("gpq", second).network == preset("recommended").network
    # A committee is GPQ's own; the others have a perceptron where there is nothing to convolve.
    assert config("pqn", second).method == "gpq"
    assert config("pqn", second).network.hidden == (512,)
    assert config("pqn", second, perceptron=False).network.hidden == ()
    assert config("pqn", third, perceptron=False).network.hidden == (512,)
    assert config("pqn", third, perceptron=False).network.noise == 0.5
    # The budget is shared; what is GPQ's own is not.
    shared = (
        "steps",
        "batch_labelled",
        "batch_unlabelled",
        "learning_rate",
        "beta1",
        "schedule",
        "validation",
    )
    for name in shared:
        assert getattr(config("pqn", second).training, name) == getattr(config("gpq", second).training, name)
    assert config("pqn", second).training.ema == 0.0
    assert dataclasses.replace(config("pqn", second).loss, beta=4.0) == preset("paper").loss


def test_settings_of_networks_are_no_other_run_of_what_is_none(digits: Dataset) -> None:
    grid = small_grid(
        methods=["gpq", "pq"],
        bits=[12],
        seeds=[0],
        product={"loss.lambda1": [0.0, 0.1]},
        variation=[
            {"name": "few", "database": 100},
            {"name": "few, paper", "database": 100, "preset": "paper"},
        ],
    )
    specs = plan(grid, digits, preset("paper")).specs
    assert [(c.method, c.variation) for c in specs] == [
        ("gpq", "few"),
        ("pq", "few"),
        ("gpq", "few, paper"),
        ("gpq", "lambda1 = 0.0"),
        ("pq", "lambda1 = 0.0"),
        ("gpq", "lambda1 = 0.1"),
    ]


def test_a_revision_of_a_method_makes_its_runs_anew(digits: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def identities() -> dict[str, str]:
        specs = plan(small_grid(bits=[12], seeds=[0]), digits, preset("paper")).specs
        return {spec.method: spec.identity for spec in specs}

    before = identities()
    newer = dataclasses.replace(METHODS["pq"], revision=METHODS["pq"].revision + 1)
    monkeypatch.setitem(METHODS, "pq", newer)
    after = identities()
    assert {name for name in before if before[name] != after[name]} == {"pq"}


def test_queries_are_as_many_as_are_asked_for(digits: Dataset, tmp_path: Path) -> None:
    def queries(spec: str) -> np.ndarray:
        (spec,) = plan(
            small_grid(methods=["pq"], bits=[12], seeds=[0], queries=spec), digits, preset("paper")
        ).specs
        return spec.split(digits).query

    few = queries("7-per-class")
    assert (digits.require_labels().dense(few).sum(axis=0) == 7).all()
    (tmp_path / "q.txt").write_text("5\n3\n1000\n")
    assert queries(str(tmp_path / "q.txt")).tolist() == [3, 5, 1000]
    for spec, message in (
        ("7", "--queries 7: write N-per-class, or name a file"),
        ("0-per-class", "queries = 0"),
    ):
        with pytest.raises(UsageError, match=message):
            queries(spec)
    with pytest.raises(UsageError, match="protocol 2 chooses queries itself"):
        plan(small_grid(protocol="2", queries="7-per-class"), digits, preset("paper"))


def test_what_cannot_be_is_said_before_anything_runs(digits: Dataset) -> None:
    with pytest.raises(UsageError, match="13 bits"):
        plan(small_grid(bits=[13]), digits, preset("paper"))
    with pytest.raises(UsageError, match=r"nothing to run \(gpq-f: "):
        plan(small_grid(methods=["gpq-f"]), digits, preset("paper"))
    with pytest.raises(DataError, match="500-per-class"):
        plan(small_grid(labelled=["500-per-class"]), digits, preset("paper"))
    planned = plan(small_grid(methods=["gpq-f", "pq"]), digits, preset("paper"))
    assert set(planned.left_out) == {"gpq-f"}
    assert {c.method for c in planned.specs} == {"pq"}


def test_gpq_f_sees_small_images_at_the_size_that_its_network_takes(tmp_path: Path) -> None:
    """CNN-F takes no image under 63 pixels, and those of CIFAR-10 have 32."""
    for name, colour in (("a", 50), ("b", 200)):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.new("RGB", (32, 32), (colour, 10 * i, 0)).save(tmp_path / name / f"{i}.png")
    images = open_data(f"folder:{tmp_path}")
    grid = small_grid(
        methods=["gpq-f", "gpq"], bits=[12], seeds=[0], labelled=["2-per-class"], queries="1-per-class"
    )

    def specs(base: Config) -> dict[str, RunSpec]:
        return {spec.method: spec for spec in plan(grid, images, base).specs}

    found = specs(preset("paper"))
    sizes = {name: spec.settings["network"]["image_size"] for name, spec in found.items()}
    assert sizes == {"gpq-f": 224, "gpq": 0}
    variant = found["gpq-f"]
    config = from_dict(dict(variant.settings))
    made = make_builder("gpq-f")(config, images, resolve_image_size(config, images), 2)
    with torch.no_grad():
        assert made.exported()(torch.rand(1, 3, 224, 224)).shape == (1, config.quantizer.width)
    # What is set counts.
    base = merge(preset("paper"), {"network": {"image_size": 100}})
    assert specs(base)["gpq-f"].settings["network"]["image_size"] == 100


def test_smaller_sets_are_parts_of_larger_ones(digits: Dataset) -> None:
    def split(**sizes: int) -> Any:
        return split_of(digits, "1", 3, "10-per-class", **sizes)

    whole, some, few = split(), split(unlabelled=400, database=300), split(unlabelled=100, database=50)
    assert (len(some.unlabelled), len(some.database)) == (400, 300)
    assert set(few.unlabelled) < set(some.unlabelled) < set(whole.unlabelled)
    assert set(few.database) < set(some.database) < set(whole.database)
    assert (some.query == whole.query).all()
    assert (some.labelled == whole.labelled).all()
    assert split(unlabelled=10**9).hash == whole.hash

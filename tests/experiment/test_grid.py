"""Grids: what a TOML means, what is refused in it, and which runs it has."""

import dataclasses
import itertools
import re
import tomllib
from pathlib import Path

import pytest
from experiment.experiments import DIGITS, small_grid

from gpq_faiss.config import preset, validate
from gpq_faiss.errors import GpqError, UsageError
from gpq_faiss.experiment.grid import (
    built_in_grids,
    grid_from,
    method_config,
    plan,
    read_grid,
)
from gpq_faiss.methods.registry import METHODS

ROOT = Path(__file__).parents[2]


def specs_of(**changes):
    return plan(small_grid(**changes), DIGITS)


def test_built_in_grids_are_documented_and_valid():
    """Every run of one has settings that can be, and a variation changes something."""
    page = (ROOT / "docs" / "experiments.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.M)) == set(built_in_grids())
    for grid, perceptron in itertools.product(map(read_grid, built_in_grids()), (True, False)):
        configs = [
            (
                method,
                validate(
                    method_config(grid, variation, method, perceptron=perceptron)
                ).fingerprint(),
            )
            for variation in grid.variations
            for method in grid.methods_of(variation)
            if METHODS[method].deep
        ]
        assert 0 < len(configs) == len(set(configs)), grid.name
    for name, protocol in (("table2", "1"), ("table3", "2")):
        grid = read_grid(name)
        assert (grid.methods, grid.bits, grid.protocol) == (
            tuple(METHODS),
            (12, 24, 32, 48),
            protocol,
        )
    (block,) = re.findall(r"```toml\n(.*?)```", page, re.S)
    shown = grid_from({"name": "page"} | tomllib.loads(block))
    assert [v.name for v in shown.variations] == ["", "no entropy"]


def test_options_change_a_grid_of_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('methods = ["pq", "gpq"]\nbits = [8]\n[config.training]\nsteps = 7\n')
    grid = read_grid(path)
    assert (grid.name, grid.title, grid.bits, grid.seeds) == ("mine", "mine", (8,), (0,))
    changed = grid.with_options(bits=(12,), seeds=None)
    assert (changed.bits, changed.config) == ((12,), {"training": {"steps": 7}})
    assert grid.with_options(methods=("all",)).methods == tuple(METHODS)


@pytest.mark.parametrize(
    ("text", "message"),
    [("bits = [0]", r"a\.toml: bits\.0 = 0"), ("methods = [", r"a\.toml is not TOML")],
)
def test_errors_in_a_grid_name_its_file(tmp_path, text, message):
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(GpqError, match=message):
        read_grid(tmp_path / "a.toml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"method": ["pq"]}, "key 'method' is unknown: did you mean 'methods'"),
        ({"methods": []}, r"methods = \[\]: .* at least 1 item"),
        ({"methods": 5}, "methods = 5: input should be a valid array"),
        ({"methods": ["faiss:PQ4"]}, "method 'faiss:PQ4' is unknown"),
        ({"bits": [12, "24"]}, r"bits\.1 = '24': input should be a valid integer"),
        ({"bits": [0]}, r"bits\.0 = 0: input should be greater than or equal to 1"),
        ({"seeds": [True]}, r"seeds\.0 = True: input should be a valid integer"),
        ({"kind": "pie"}, "kind = 'pie': input should be 'table', 'ablation'"),
        ({"protocol": "none"}, "protocol 'none'"),
        ({"protocol": "3"}, "protocol '3': an experiment needs queries: take 1, 2 or transfer"),
        ({"config": {"loss": {"lambda9": 1}}}, "setting 'loss.lambda9' is unknown"),
        ({"config": {"loss": {"lambda1": float("nan")}}}, "lambda1"),
        ({"config": {"training": {"seed": 3}}}, "follow from the grid's preset, seeds"),
        ({"variation": ["x"]}, "variation.0 = 'x'"),
        ({"variation": [{"nam": "x"}]}, "key 'variation.0.nam' is unknown: did you mean 'name'"),
        ({"variation": [{"name": "x"}, {"name": "x"}]}, "two variations have the same name"),
        ({"variation": [{"config": {"loss": {"x": 1}}}]}, "setting 'loss.x' is unknown"),
        ({"variation": [{"config": {"preset": "paper"}}]}, "follow from the grid's preset"),
        ({"product": {"lambda1": [1]}}, "lambda1"),
        (
            {"product": {"loss.lambda1": 1.0}},
            r"product\.loss\.lambda1 = 1.0: input should be a valid array",
        ),
    ],
)
def test_invalid_grids_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        grid_from({"name": "g", "methods": ["pq"]} | values)


# Plans --------------------------------------------------------------------------------------------


def test_runs_are_the_whole_grid_with_seeds_outermost():
    specs = specs_of(variation=[{}, {"name": "more", "config": {"loss": {"lambda2": 0.5}}}])
    # A method without codes has one run per seed, and one without a network none of these settings.
    runs = [("gpq", 12, ""), ("gpq", 24, ""), ("gpq", 12, "more"), ("gpq", 24, "more")]
    runs += [("pq", 12, ""), ("pq", 24, ""), ("float", 0, "")]
    assert [(s.method, s.bits, s.variation, s.seed) for s in specs] == [
        (*run, seed) for seed in (0, 1) for run in runs
    ]
    assert len({s.name for s in specs}) == len({s.identity for s in specs}) == len(specs)
    assert all(re.fullmatch(r"[a-z0-9._-]+", s.name) for s in specs)


def test_convolutional_methods_are_left_out_of_tiny_images(caplog):
    assert {spec.method for spec in specs_of(methods=["gpq-f", "pq"])} == {"pq"}
    assert "gpq-f: left out, as convolutions need larger images" in caplog.text
    with pytest.raises(UsageError, match="no method can run on digits: choose others"):
        specs_of(methods=["gpq-f"])


def test_runs_have_the_settings_of_grid_and_variation():
    variation = {"name": "more", "config": {"loss": {"lambda2": 0.5}}}
    settings = specs_of(methods=["gpq"], bits=[24], seeds=[1], variation=[variation])[0].settings
    assert (settings["quantizer"]["codebooks"], settings["loss"]["lambda2"]) == (6, 0.5)
    assert (settings["training"]["seed"], settings["training"]["steps"]) == (1, 20)


def test_identities_differ_with_anything_that_matters(monkeypatch):
    def identity(**changes):
        single = {"methods": ["gpq"], "bits": [12], "seeds": [0]} | changes
        return specs_of(**single)[0].identity

    unchanged = identity()
    assert identity(title="another title", kind="ablation") == unchanged
    changes = [
        *(
            {"bits": [24]},
            {"seeds": [1]},
            {"vectors": 5},
            {"methods": ["gpq-h"]},
            {"methods": ["pq"]},
        ),
        *({"labelled": "10-per-class"}, {"queries": "5-per-class"}, {"preset": "recommended"}),
        *({"protocol": protocol} for protocol in ("2", "transfer")),
        {"config": {"training": {"steps": 21}}},
    ]
    identities = [identity(**change) for change in changes]
    pq = METHODS["pq"]
    monkeypatch.setitem(METHODS, "pq", dataclasses.replace(pq, revision=pq.revision + 1))
    assert identity() == unchanged
    identities.append(identity(methods=["pq"]))
    assert len({unchanged, *identities}) == len(identities) + 1


def test_settings_are_layered():
    grid = small_grid(
        config={"loss": {"lambda2": 5.0}, "training": {"steps": 9}},
        variation=[{"name": "v", "config": {"training": {"steps": 11}}}],
    )
    (variation,) = grid.variations
    gpq, without = (
        method_config(grid, variation, name, perceptron=True) for name in ("gpq", "gpq-h")
    )
    assert (gpq.loss.lambda2, gpq.training.steps) == (5.0, 11)
    assert (without.loss.lambda1, without.loss.lambda2) == (0.0, 5.0)


@pytest.mark.parametrize(("perceptron", "hidden"), [(True, (512,)), (False, ())])
def test_baselines_share_budget_and_network_but_not_losses(perceptron, hidden):
    grid = small_grid(preset="recommended")
    gpq, pqn = (
        method_config(grid, grid.variations[0], name, perceptron=perceptron)
        for name in ("gpq", "pqn")
    )
    assert (pqn.training, pqn.network.hidden, pqn.method) == (gpq.training, hidden, "gpq")
    assert pqn.loss == gpq.loss == preset("paper").loss


def test_cnn_f_enlarges_small_images():
    """CNN-F takes no image under 63 pixels, and those of CIFAR-10 have 32."""
    grid = small_grid(methods=["gpq-f"])
    config = method_config(grid, grid.variations[0], "gpq-f", perceptron=False)
    assert (config.network.image_size, config.network.backbone) == (224, "cnnf")

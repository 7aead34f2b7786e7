"""Several models in one table: the figures of each alone, names that tell them apart, and splits
that must agree."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from model_factory import digits

from gpq_faiss import encode, open_data, train
from gpq_faiss.config import preset
from gpq_faiss.errors import DataError, GpqError, MismatchError
from gpq_faiss.faissio.model import read_description
from gpq_faiss.stages.evaluate import evaluate, model_name

OTHER = "gpq (authors)"


def few_steps(name, codebooks=3):
    """A preset, shortened until it takes a second."""
    changes = {
        "network": {"backbone": "mlp", "hidden": [16], "weights": "none"},
        "posterior": {"networks": 2, "propagation": 0.0},
        "quantizer": {"codebooks": codebooks},
        "training": {"steps": 10},
    }
    return preset(name).with_settings(changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    for name, config in (
        ("ours", few_steps("recommended")),
        ("gpq", few_steps("authors")),
        ("printed", few_steps("paper")),
        ("longer", few_steps("paper", codebooks=6)),
    ):
        train(digits(), root / name, config=config, labelled="20-per-class")
    return root


def test_every_row_is_the_evaluation_of_that_model(models, monkeypatch):
    """``gpq`` is a folder where there is one, since no method of that name is fitted here; ``pq``
    is always the method."""
    monkeypatch.chdir(models)
    Path("pq").symlink_to("gpq")
    together = evaluate("ours", digits(), compare=["printed", "pq", "gpq", "longer", "float"])
    rows = {row["method"]: row for row in together.rows((1, 10))}
    printed, longer = (f"gpq (paper): {name}" for name in ("printed", "longer"))
    assert list(rows) == ["posterior", printed, "pq", OTHER, longer, "float"], (
        "in the requested order"
    )
    for name, folder in (
        ("posterior", "ours"),
        (printed, "printed"),
        (OTHER, "gpq"),
        (longer, "longer"),
    ):
        (alone,) = evaluate(folder, digits()).rows((1, 10))
        assert rows[name] == alone | {"method": name}
    assert [row["bits"] for row in rows.values()] == [12, 12, 12, 12, 24, "-"]
    content = together.to_dict()["compared"]
    fingerprint = read_description(models / "gpq")["model_fingerprint"]
    assert [content[name]["model_fingerprint"] for name in ("pq", OTHER)] == [None, fingerprint]
    Path("pq").unlink()
    alone = evaluate("ours", digits(), compare=["pq"])
    assert {row["method"]: row for row in alone.rows((1, 10))}.items() <= rows.items()


def test_json_and_plot_have_the_names_of_the_table(models, tmp_path):
    result = evaluate(models / "ours", digits(), compare=[str(models / "printed"), "pq"])
    content = result.to_dict()
    assert [content["method"], *content["compared"]] == ["posterior", "gpq (paper)", "pq"]
    assert content["compared"]["gpq (paper)"]["bits"] == 12
    assert json.loads(json.dumps(content)) == content
    picture = result.draw(tmp_path / "pr.svg").read_text()
    assert all(f"{name}, 12 bits  (mAP" in picture for name in ("posterior", "gpq (paper)", "pq"))


@pytest.mark.parametrize(
    ("section", "change", "says"),
    [
        ("split", {"hash": "0" * 16, "seed": 1}, "protocol 1, seed 1"),
        ("split", {"hash": "0" * 16, "protocol": "2"}, "protocol 2, seed 0"),
        ("split", {"hash": "0" * 16}, "protocol 1, seed 0"),
        ("data", {"fingerprint": "another"}, "protocol 1, seed 0"),
        *(("data", nothing, None) for nothing in (None, {})),
        *(("split", nothing, None) for nothing in ([], {"protocol": "1"})),
    ],
)
def test_a_model_of_another_split_or_of_none_is_refused(models, tmp_path, section, change, says):
    bad = shutil.copytree(models / "printed", tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(
        json.dumps(config | {section: config[section] | change if says else change})
    )
    if says is None:
        for model, compare in ((models / "ours", [str(bad)]), (bad, [])):
            with pytest.raises(
                DataError, match=r"bad: config\.json does not say what the model was trained on"
            ):
                evaluate(model, digits(), compare=compare)
        return
    with pytest.raises(MismatchError) as caught:
        evaluate(models / "ours", digits(), compare=["pq", str(bad)])
    line = str(caught.value)
    assert line.startswith(
        f"--compare {bad}: it was trained on other data or another split ({says})"
    )
    assert "train" in line.rpartition(":")[2], "what to do"


def test_what_is_no_row_of_its_own_is_refused(models, tmp_path):
    for compare, message in (
        (["pq", "pq"], "has a row already"),
        ([f"{models}/gpq/../ours"], "has a row already"),
        ([str(models / "gpq"), f"{models}/./gpq/"], "has a row already"),
        (["luck"], "neither the folder of a model nor a method"),
        (["dtq"], "gpq experiment run"),
        ([str(tmp_path)], "is not a model folder"),
    ):
        with pytest.raises(GpqError, match=message):
            evaluate(models / "ours", digits(), compare=compare)


def test_codes_that_are_no_database_are_refused(shop, tmp_path):
    queries = open_data(shop.data, labels=shop.labels)
    for labels, says in (
        ({}, "has no labels"),
        ({"labels": np.full(len(queries), -1), "class_names": ["0"]}, "no item has a label"),
        ({"labels": np.zeros(len(queries), int), "class_names": ["owl"]}, "no class in common"),
    ):
        np.savez(tmp_path / "x.npz", features=np.load(shop.features), **labels)
        data, how = f"features:{tmp_path}/x.npz", {"keep_features": False, "overwrite": True}
        codes = encode(shop.model, data, tmp_path / "codes.h5", **how)
        with pytest.raises(DataError, match=says):
            evaluate(shop.model, queries, codes=codes)


def test_a_model_is_named_by_method_and_preset():
    for method, used, name in (
        ("posterior", "recommended", "posterior"),
        ("gpq-authors", "authors", "gpq-authors (authors)"),
        ("gpq", "recommended", "gpq (recommended)"),
    ):
        assert model_name({"method": method, "config": {"preset": used}}) == name
    assert model_name({"config": {}}) == "gpq (paper)"

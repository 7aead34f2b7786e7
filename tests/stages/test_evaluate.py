"""Several models in one table: the figures of each alone, equal splits, and TREC files."""

import json
import shutil

import numpy as np
import pytest
from model_factory import digits

from gpq_faiss import encode, evaluate, open_data, train
from gpq_faiss.config import preset
from gpq_faiss.errors import DataError, GpqError, MismatchError


def few_steps(name, codebooks=3):
    """Return a preset, shortened until it takes a second."""
    changes = {
        "network": {"backbone": "mlp", "hidden": [16]},
        "posterior": {"networks": 2, "propagation": 0.0},
        "quantizer": {"codebooks": codebooks},
        "training": {"steps": 10},
    }
    return preset(name).with_settings(changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Train three models on the same split of the digits."""
    root = tmp_path_factory.mktemp("models")
    configs = {
        "ours": few_steps("recommended"),
        "paper": few_steps("paper"),
        "longer": few_steps("paper", codebooks=6),
    }
    for name, config in configs.items():
        train(digits(), root / name, config=config, labelled="20-per-class")
    return root


def test_every_row_is_the_evaluation_of_that_model(models, monkeypatch):
    monkeypatch.chdir(models)
    together = evaluate("ours", digits(), compare=["paper", "pq", "longer", "float"])
    rows = {row["method"]: row for row in together.rows((1, 10))}
    folders = {"posterior": "ours", "gpq (paper)": "paper", "gpq (paper): longer": "longer"}
    assert list(rows) == ["posterior", "gpq (paper)", "pq", "gpq (paper): longer", "float"]
    for name, folder in folders.items():
        (alone,) = evaluate(folder, digits(), protocol=1).rows((1, 10))
        assert rows[name] == alone | {"method": name}
    assert [row["bits"] for row in rows.values()] == [12, 12, 12, 24, "-"]


def test_json_and_plot_have_the_names_of_the_table(models, tmp_path):
    result = evaluate(models / "ours", digits(), compare=[str(models / "paper"), "pq"])
    document = result.to_dict()
    assert [document["method"], *document["compared"]] == ["posterior", "gpq (paper)", "pq"]
    assert document["compared"]["gpq (paper)"]["bits"] == 12
    assert json.loads(json.dumps(document)) == document
    picture = result.draw(tmp_path / "pr.svg").read_text()
    assert all(f"{name}, 12 bits  (mAP" in picture for name in ("posterior", "gpq (paper)", "pq"))


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("split", {"hash": "0" * 16, "seed": 1}, "protocol 1, seed 1"),
        ("split", {"hash": "0" * 16, "protocol": "2"}, "protocol 2, seed 0"),
        ("data", {"fingerprint": "another"}, "protocol 1, seed 0"),
    ],
)
def test_model_of_another_split_is_refused(models, tmp_path, section, change, message):
    changed_model = shutil.copytree(models / "paper", tmp_path / "other")
    config = json.loads((changed_model / "config.json").read_text())
    config[section] |= change
    (changed_model / "config.json").write_text(json.dumps(config))
    with pytest.raises(MismatchError, match=message):
        evaluate(models / "ours", digits(), compare=["pq", str(changed_model)])


def test_models_of_other_seeds_with_the_same_split_are_compared(models, tmp_path):
    other = shutil.copytree(models / "paper", tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    config["split"]["seed"] = 1  # the split is that of the same files
    (other / "config.json").write_text(json.dumps(config))
    assert "gpq (paper)" in evaluate(models / "ours", digits(), compare=[str(other)]).measured


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("luck", "neither the folder of a model nor a method"),
        ("dtq", "gpq experiment run"),
        ("/", "is not a model folder"),
    ],
)
def test_unknown_row_is_refused(models, name, message):
    with pytest.raises(GpqError, match=message):
        evaluate(models / "ours", digits(), compare=[name])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (None, "no item has a label"),
        (np.full(240, -1), "no item has a label"),
        (["another"] * 240, r"no class of .* is one of .*codes.h5 \(another, ...\)"),
    ],
)
def test_codes_without_labels_of_the_queries_are_refused(shop, tmp_path, labels, message):
    data = open_data(np.load(shop.features), labels=labels)
    codes = encode(shop.model, data, tmp_path / "codes.h5", keep_features=False)
    queries = open_data(shop.data, labels=shop.labels)
    with pytest.raises(DataError, match=message):
        evaluate(shop.model, queries, codes=codes)


def test_trec_files_are_read_by_ir_measures(models, tmp_path):
    measures = pytest.importorskip("ir_measures", reason="pip install ir-measures")
    result = evaluate(models / "ours", digits())
    run, qrels = result.run.write(tmp_path / "run.trec", k=10_000)
    figures = measures.calc_aggregate(
        [measures.AP],
        list(measures.read_trec_qrels(str(qrels))),
        list(measures.read_trec_run(str(run))),
    )
    # Other order within ties.
    assert figures[measures.AP] == pytest.approx(result.ranking.map, abs=0.02)

"""Several models in one table: the figures of each alone, names that tell them apart, and splits that must agree."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpq_faiss import train
from gpq_faiss.config import Config, merge, preset
from gpq_faiss.data.standard import open_digits
from gpq_faiss.errors import DataError, MismatchError, UsageError
from gpq_faiss.faissio.model import read_description
from gpq_faiss.stages.evaluate import evaluate, model_name


def few_steps(name: str, codebooks: int = 3, seed: int = 0) -> Config:
    """A preset, shortened until it takes a second."""
    changes = {
        "network": {"backbone": "mlp", "hidden": [16]},
        "posterior": {"networks": 2, "propagation": 0.0},
        "quantizer": {"codebooks": codebooks},
        "training": {"steps": 10, "seed": seed},
    }
    return merge(preset(name), changes)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root, digits, paper = tmp_path_factory.mktemp("models"), open_digits(), few_steps("paper")
    for name, config, options in (
        ("ours", few_steps("recommended"), {}),
        ("gpq", few_steps("gpq"), {}),
        ("printed", paper, {}),
        ("longer", few_steps("paper", codebooks=6), {}),
        ("seed", few_steps("paper", seed=1), {}),
        ("labels", paper, {"labelled": "21-per-class"}),
        ("two", paper, {"protocol": "2"}),
        ("data", paper, {"data": replace(digits, fingerprint="another", name="copy")}),
    ):
        train(**{"data": digits, "out": root / name, "config": config, "labelled": "20-per-class"} | options)  # type: ignore[arg-type]
    return root


def test_every_row_is_the_evaluation_of_that_model(models: Path) -> None:
    wanted = ("printed", "pq", "gpq", "longer", "float")
    compare = [str(models / name) if (models / name).exists() else name for name in wanted]
    together = evaluate(models / "ours", open_digits(), compare=compare)
    rows = {row["method"]: row for row in together.rows((1, 10))}
    printed, longer = (f"gpq (paper): {models / name}" for name in ("printed", "longer"))
    assert list(rows) == ["posterior", printed, "pq", "gpq", longer, "float"], "in the requested order"
    for name, folder in (("posterior", "ours"), (printed, "printed"), ("gpq", "gpq"), (longer, "longer")):
        alone = evaluate(models / folder, open_digits())
        expected = {**alone.rows((1, 10))[0], "method": name}
        assert rows[name] == expected
    assert [row["bits"] for row in rows.values()] == [12, 12, 12, 12, 24, "-"]
    alone = evaluate(models / "ours", open_digits(), compare=["pq"])
    assert {row["method"]: row for row in alone.rows((1, 10))}.items() <= rows.items()


def test_json_and_plot_have_the_names_of_the_table(models: Path, tmp_path: Path) -> None:
    found = evaluate(models / "ours", open_digits(), compare=[str(models / "printed"), "pq"])
    told = found.to_dict()
    assert [told["method"], *told["compared"]] == ["posterior", "gpq (paper)", "pq"]
    entry = told["compared"]["gpq (paper)"]
    description = read_description(models / "printed")
    assert entry["model_fingerprint"] == description["model_fingerprint"]
    assert entry["bits"] == 12
    assert told["compared"]["pq"]["model_fingerprint"] is None
    assert json.loads(json.dumps(told)) == told
    picture = found.draw(tmp_path / "pr.svg").read_text()
    assert all(f"{name}, 12 bits  (mAP" in picture for name in ("posterior", "gpq (paper)", "pq"))


@pytest.mark.parametrize(
    ("other", "of"),
    [("seed", "1, seed 1"), ("labels", "1, seed 0"), ("two", "2, seed 0"), ("data", "1, seed 0")],
)
def test_a_model_of_another_split_is_refused(models: Path, other: str, of: str) -> None:
    with pytest.raises(MismatchError) as caught:
        evaluate(models / "ours", open_digits(), compare=["pq", str(models / other)])
    text = str(caught.value)
    assert text.startswith(
        f"--compare {models / other}: it was trained on other data or another split (protocol {of})"
    )
    assert "\n" not in text
    assert "train" in text.rpartition(":")[2], "what to do"


def test_what_is_no_row_of_its_own_is_refused(models: Path, tmp_path: Path) -> None:
    ours = models / "ours"
    for compare, message in (
        (["pq", "pq"], "has a row already"),
        ([f"{models}/gpq/../ours"], "has a row already"),
        ([str(models / "gpq"), f"{models}/./gpq/"], "has a row already"),
        (["luck"], "neither the folder of a model nor a method"),
        (["dtq"], "gpq experiment run"),
    ):
        with pytest.raises(UsageError, match=message):
            evaluate(ours, open_digits(), compare=compare)
    with pytest.raises(DataError, match="is not a model folder"):
        evaluate(ours, open_digits(), compare=[str(tmp_path)])


@pytest.mark.parametrize(
    "damage", [{"data": None}, {"data": {}}, {"split": []}, {"split": {"protocol": "1"}}]
)
def test_a_model_that_does_not_say_what_it_was_trained_on(
    models: Path, tmp_path: Path, damage: dict[str, Any]
) -> None:
    bad = shutil.copytree(models / "printed", tmp_path / "bad")
    config = json.loads((bad / "config.json").read_text())
    (bad / "config.json").write_text(json.dumps(config | damage))
    for model, compare in ((models / "ours", [str(bad)]), (bad, [])):
        with pytest.raises(DataError, match=r"bad: config\.json does not say what the model was trained on"):
            evaluate(model, open_digits(), compare=compare)


def test_a_folder_of_the_name_of_a_method(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``gpq`` is a folder where there is one, since no method of that name is fitted here; ``pq`` is always the method."""
    monkeypatch.chdir(tmp_path)
    for name in ("gpq", "pq"):
        (tmp_path / name).symlink_to(models / "gpq")
    found = evaluate(models / "ours", open_digits(), compare=["gpq", "pq"])
    expected = evaluate(models / "ours", open_digits(), compare=[str(models / "gpq"), "pq"])
    assert found.to_dict()["compared"] == expected.to_dict()["compared"]


def test_a_model_is_named_by_method_and_preset() -> None:
    for method, used, name in (
        ("posterior", "recommended", "posterior"),
        ("posterior", "unseen-classes", "posterior (unseen-classes)"),
        ("gpq", "gpq", "gpq"),
        ("gpq", "recommended", "gpq (recommended)"),
    ):
        assert model_name({"method": method, "config": {"preset": used}}) == name
    assert model_name({"config": {}}) == "gpq (paper)"

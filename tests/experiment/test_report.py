"""Reports are derived from the files of runs, in every form; figures show these runs."""

import json
import shutil

import numpy as np
import pytest
from experiment.experiments import ONE, SHORT, SMALL, complete

from gpq_faiss.errors import DataError, GpqError, OutputExistsError
from gpq_faiss.experiment.pictures import draw_experiment
from gpq_faiss.experiment.report import report_experiment
from gpq_faiss.experiment.runs import read_run

SHORT_GPQ = {"methods": ["gpq"], "bits": [12], "seeds": [0], "config": SHORT}
PAGES = ["text", "markdown", "latex"]


def tables(folder):
    report = json.loads(report_experiment(folder, "json"))
    return {name: table["rows"] for name, table in report["tables"].items()}


# Tables -------------------------------------------------------------------------------------------


def test_rows_are_in_the_order_of_methods_and_variations(finished):
    kept_bits = read_run(finished / "float_any_seed0.h5").bits_kept
    order = ["gpq", "gpq (λ2 = 0)", "pq", f"float ({kept_bits:,} bits per item)"]
    assert all([row["method"] for row in rows] == order for rows in tables(finished).values())


def test_cells_are_mean_and_deviation_over_the_files_of_seeds(finished):
    rows = {row["method"]: row for row in tables(finished)["map"]}
    runs = [read_run(finished / f"pq_24bits_seed{seed}.h5") for seed in (0, 1)]
    for column, values in (
        ("24", [run.arrays["ap"].mean() for run in runs]),
        ("P@10", [run.arrays["precision"][list(run.arrays["ks"]).index(10)] for run in runs]),
        ("NN10@100", [run.neighbour_recall.nn10_at_100 for run in runs]),
    ):
        expected = np.mean(values), np.std(values, ddof=1), 2
        assert list(rows["pq"][column].values()) == pytest.approx(expected, abs=1e-12)


def test_notes_state_data_budget_convention_and_machine(finished):
    text = report_experiment(finished, "markdown")
    for note in (
        "compare these figures with each other",
        "expected value over random order within ties",
        "gpq: 20 steps of up to 40 labelled",
        'have the preset paper, changed by {"training": {"steps": 20, ',
        "protocol 1, labelled 20-per-class: 100 queries, 200 labelled and 1,497 unlabelled",
        "NN10@100: share of a query's 10 nearest items",
        "Machine: ",
    ):
        assert note in text
    assert "missing" not in text


def test_every_form_has_steps_if_they_differ(tmp_path):
    variation = [{}, {"name": "longer", "config": {"training": {"steps": 3}}}]
    complete(tmp_path, **SHORT_GPQ, variation=variation)
    for form in (*PAGES, "csv"):
        assert "steps" in report_experiment(tmp_path, form, table="map").split("longer")[0]


# Missing runs -------------------------------------------------------------------------------------


def test_every_form_says_how_many_runs_are_missing(finished, tmp_path, caplog):
    folder = shutil.copytree(finished, tmp_path / "less")
    names = ["float_any_seed0", "pq_12bits_seed1", "pq_24bits_seed1"]
    for name in names:
        (folder / f"{name}.h5").unlink()
    assert sorted(json.loads(report_experiment(folder, "json"))["missing"]) == names
    for form in PAGES:
        assert "(3 of 14 runs missing)" in report_experiment(folder, form, table="map")
    report_experiment(folder, "csv")
    assert "3 of 14 runs are missing, or are of other settings" in caplog.text
    assert "pq_12bits_seed1" in report_experiment(folder)


@pytest.mark.parametrize("key", ["grid", "planned", "experiment_format"])
def test_damaged_descriptions_are_refused(finished, tmp_path, key):
    content = json.loads((finished / "experiment.json").read_text())
    (tmp_path / "experiment.json").write_text(json.dumps(content | {key: 7}))
    with pytest.raises(DataError, match=f"experiment.json is not .* damaged .*{key}"):
        report_experiment(tmp_path)


def test_folders_without_runs_are_refused(finished, tmp_path):
    with pytest.raises(DataError, match=r"experiment\.json not found"):
        report_experiment(tmp_path)
    shutil.copy(finished / "experiment.json", tmp_path)
    with pytest.raises(DataError, match="no finished run"):
        report_experiment(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"table": "grid"}, "no table 'grid' here: choose one of map, depth, pr, sec"),
        ({"form": "yaml"}, "format 'yaml' is unknown: use one of text, markdown"),
    ],
)
def test_unknown_tables_and_forms_are_refused(finished, options, message):
    with pytest.raises(GpqError, match=message):
        report_experiment(finished, **options)


# Figures ------------------------------------------------------------------------------------------


def draw(folder, kind, out):
    """Return name -> caption of the figures of a kind."""
    content = json.loads((folder / "experiment.json").read_text())
    content["grid"]["kind"] = kind
    (folder / "experiment.json").write_text(json.dumps(content))
    return {path.name: caption for caption, path in draw_experiment(folder, out).items()}


def test_figures_of_a_table_are_in_its_markdown_although_runs_are_missing(finished, tmp_path):
    missing = shutil.ignore_patterns("pq_24bits_*")
    drawn = draw_experiment(shutil.copytree(finished, tmp_path / "less", ignore=missing), tmp_path)
    names = {path.stem for path in drawn.values()}
    assert names == {"map", "neighbours", "pr", "precision", "recall"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    text = report_experiment(finished, pictures={text: path.name for text, path in drawn.items()})
    assert "![mAP over bits per code](map.png)\n\nmAP over bits per code.\n" in text
    with pytest.raises(OutputExistsError):
        draw_experiment(finished, tmp_path)


def test_heat_maps_leave_missing_cells_empty(tmp_path):
    product = {"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.1]}
    complete(tmp_path, **SHORT_GPQ, product=product)
    next(tmp_path.glob("gpq_*lambda1-0.0-lambda2-0.0*.h5")).unlink()
    assert draw(tmp_path, "sensitivity", tmp_path).keys() == {"sensitivity-gpq-12.png"}


@pytest.mark.parametrize("kind", ["voronoi", "tsne"])
def test_vectors_become_points(tmp_path, kind):
    flat = {"training": SMALL | {"steps": 3}, "quantizer": {"subdim": 2}}
    complete(tmp_path, **ONE | {"methods": ["gpq"], "config": flat, "vectors": 40})
    assert "40 items of the database" in draw(tmp_path, kind, tmp_path)[f"{kind}.png"]

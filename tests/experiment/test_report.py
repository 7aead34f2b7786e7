"""Reports are derived from the files of runs, in every form; figures show the runs that are
there."""

import csv
import io
import json
import shutil

import h5py
import numpy as np
import pytest
from experiment.experiments import DIGITS, ONE, SHORT, SMALL, complete, small_grid

from gpq_faiss.errors import DataError, GpqError, OutputExistsError
from gpq_faiss.experiment.pictures import cell_borders, draw_experiment, tsne
from gpq_faiss.experiment.plan import plan
from gpq_faiss.experiment.report import read_experiment, report_experiment
from gpq_faiss.experiment.runs import begin, read_run

FORMS = ["text", "markdown", "latex"]


def missing_after_request(folder, **changes):
    """Return what is missing after a call that is cut off before its first run."""
    grid = small_grid(**changes)
    specs, left_out = plan(grid, DIGITS)
    begin(folder, grid, DIGITS, specs, left_out)
    return read_experiment(folder).missing()


def tables(folder):
    report = json.loads(report_experiment(folder, "json"))
    return {name: table["rows"] for name, table in report["tables"].items()}


# Tables -------------------------------------------------------------------------------------------


def test_rows_are_in_the_order_of_methods_and_variations(finished):
    kept = read_run(finished / "float_any_seed0.h5").bits_kept
    order = ["gpq", "gpq (λ2 = 0)", "pq", f"float ({kept:,} bits per item)"]
    assert all([row["method"] for row in rows] == order for rows in tables(finished).values())


def test_columns_of_each_table(finished):
    columns = {name: list(rows[0])[1:] for name, rows in tables(finished).items()}
    assert columns == {
        "map": ["12", "24", "P@1", "P@10", "NN10@100"],
        "depth": [f"{letter}@{k}" for letter in "PR" for k in (1, 10, 100, 1000)],
        "pr": [f"{i / 10:.2f}" for i in range(1, 11)],
        "seconds": ["fit", "encode", "rank"],
    }


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


def test_csv_has_the_digits_of_json(finished):
    written = csv.DictReader(io.StringIO(report_experiment(finished, "csv")))
    for line, row in zip(written, tables(finished)["map"], strict=True):
        assert float(line["12"]) == row["12"]["mean"]
        assert float(line["24_deviation"]) == row["24"]["deviation"]


@pytest.mark.parametrize(("form", "sign"), [("text", "±"), ("markdown", "±"), ("latex", r"$\pm$")])
def test_tables_of_people_show_four_digits(finished, form, sign):
    text = report_experiment(finished, form)
    for row in tables(finished)["map"]:
        assert f"{row['12']['mean']:.4f} {sign} {row['12']['deviation']:.4f}" in text


def test_notes_state_data_budget_convention_and_machine(finished):
    text = report_experiment(finished, "markdown")
    for note in (
        "compare these figures with each other",
        "gpq-f has no row",
        "expected value over random order within ties",
        "20 steps of up to 40 labelled items",
        'have the settings of the preset paper, with training = {"steps": 20, ',
        "protocol 1, labelled 20-per-class: 100 queries, 200 labelled and 1,497 unlabelled",
        "NN10@100: share of a query's 10 nearest items",
        "Machine: ",
    ):
        assert note in text
    assert "missing" not in text
    assert "Machine" not in report_experiment(finished, "markdown", table="seconds")


def test_departures_from_papers_are_noted(tmp_path):
    complete(tmp_path, methods=["itq", "subic"], bits=[12], seeds=[0], config=SHORT)
    text = report_experiment(tmp_path)
    assert "subic: its blocks have K = 16; itq: vectors are scaled to length 1 first" in text
    assert "ssdh" not in text


@pytest.mark.parametrize("form", [*FORMS, "csv"])
def test_every_form_has_steps_if_they_differ(tmp_path, form):
    variation = [{}, {"name": "longer", "config": {"training": {"steps": 3}}}]
    one = {"methods": ["gpq"], "bits": [12], "seeds": [0], "config": SHORT}
    complete(tmp_path, **one, variation=variation)
    assert "steps" in report_experiment(tmp_path, form, table="map").split("longer")[0]


def test_rows_of_one_method_have_the_names_of_variations(tmp_path):
    one = {"variation": [{"name": "short", "config": SHORT}], "bits": [12], "seeds": [0]}
    for methods, names in ((["gpq"], ["short"]), (["gpq", "pq"], ["gpq (short)", "pq (short)"])):
        complete(tmp_path, methods=methods, **one)
        assert [row["method"] for row in tables(tmp_path)["map"]] == names


# Missing runs -------------------------------------------------------------------------------------


def test_every_form_says_how_many_runs_are_missing(finished, tmp_path, caplog):
    folder = shutil.copytree(finished, tmp_path / "less")
    names = ["float_any_seed0", "pq_12bits_seed1", "pq_24bits_seed1"]
    for name in names:
        (folder / f"{name}.h5").unlink()
    assert sorted(json.loads(report_experiment(folder, "json"))["missing"]) == names
    for form in FORMS:
        assert "(3 of 14 runs missing)" in report_experiment(folder, form)
    report_experiment(folder, "csv")
    line = "3 of 14 runs are missing, or are of other settings, data or versions"
    assert line in report_experiment(folder, "markdown", table="map")
    assert line in caplog.text


def test_requested_runs_without_a_file_are_missing(tmp_path):
    """The files alone could not tell of a seed and a method that no call came to."""
    complete(tmp_path, **ONE)
    assert read_experiment(tmp_path).missing() == []
    more = ONE | {"methods": ["pq", "itq"], "seeds": [0, 1]}
    expected = {"pq_12bits_seed1", "itq_12bits_seed0", "itq_12bits_seed1"}
    assert set(missing_after_request(tmp_path, **more)) == expected
    complete(tmp_path, **ONE)  # a call of fewer runs forgets none
    assert len(read_experiment(tmp_path).missing()) == 3


def test_runs_of_other_settings_are_missing(tmp_path):
    complete(tmp_path, **ONE)
    assert missing_after_request(tmp_path, **ONE, vectors=3) == ["pq_12bits_seed0"]


def test_folders_without_report_are_refused(finished, tmp_path):
    with pytest.raises(DataError, match=r"experiment\.json not found"):
        report_experiment(tmp_path)
    content = json.loads((finished / "experiment.json").read_text())
    for key in ("grid", "data", "variations", "planned", "experiment_format"):
        (tmp_path / "experiment.json").write_text(json.dumps(content | {key: 7}))
        with pytest.raises(DataError, match=f"experiment.json is damaged .*'{key}'"):
            report_experiment(tmp_path)
    shutil.copy(finished / "experiment.json", tmp_path)
    with pytest.raises(DataError, match="no finished run"):
        report_experiment(tmp_path)
    (tmp_path / "pq.h5").write_bytes((finished / "pq_12bits_seed0.h5").read_bytes()[:-3000])
    with pytest.raises(DataError, match=r"pq\.h5"):
        report_experiment(tmp_path)


def test_unknown_tables_and_forms_are_refused(finished):
    with pytest.raises(GpqError, match="no table 'grid' here: choose one of map, depth, pr, sec"):
        report_experiment(finished, table="grid")
    with pytest.raises(GpqError, match="format 'yaml': choose one of text, markdown"):
        report_experiment(finished, form="yaml")


# Figures ------------------------------------------------------------------------------------------


def draw(folder, kind, out, **options):
    """Return name -> caption of the figures of a kind."""
    content = json.loads((folder / "experiment.json").read_text())
    content["grid"]["kind"] = kind
    (folder / "experiment.json").write_text(json.dumps(content))
    return {path.name: caption for caption, path in draw_experiment(folder, out, **options).items()}


def test_figures_of_a_table_are_in_its_markdown(finished, tmp_path):
    drawn = draw_experiment(finished, tmp_path)
    names = {path.stem for path in drawn.values()}
    assert names == {"map", "neighbours", "pr", "precision", "recall"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    text = report_experiment(finished, pictures={text: path.name for text, path in drawn.items()})
    caption = "mAP over the length of the code"
    assert f"![{caption}](map.png)\n\n{caption}.\n" in text
    with pytest.raises(OutputExistsError):
        draw_experiment(finished, tmp_path)


def test_heat_maps_need_runs_that_differ_in_weights_alone(tmp_path):
    product = {"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.1]}
    one = {"bits": [12], "seeds": [0], "config": SHORT}
    complete(tmp_path, methods=["gpq", "pq"], **one, product=product)
    next(tmp_path.glob("gpq_*lambda1-0.0-lambda2-0.0*.h5")).unlink()  # leaves its cell empty
    assert draw(tmp_path, "sensitivity", tmp_path).keys() == {"sensitivity-gpq-12.png"}
    with h5py.File(next(tmp_path.glob("gpq_*lambda1-0.1-lambda2-0.1*.h5")), "r+") as file:
        settings = json.loads(file.attrs["settings"])
        settings["loss"] |= {"lambda1": 0.0}
        file.attrs["settings"] = json.dumps(settings)
    with pytest.raises(DataError, match="several runs have the same weights"):
        draw_experiment(tmp_path, tmp_path / "out")


def test_heat_maps_need_gpq(tmp_path):
    complete(tmp_path, **ONE)
    with pytest.raises(DataError, match="no run of GPQ"):
        draw(tmp_path, "sensitivity", tmp_path)


def test_vectors_become_tsne_and_codebooks(tmp_path):
    flat = {"training": SMALL | {"steps": 3}, "quantizer": {"subdim": 2}}
    complete(tmp_path, **ONE | {"methods": ["gpq"], "config": flat, "vectors": 40})
    (caption,) = draw(tmp_path, "voronoi", tmp_path).values()
    assert caption.startswith("Codebooks in two dimensions, gpq, with 40 items of the database")
    (caption,) = draw(tmp_path, "tsne", tmp_path).values()
    assert "40 items of the database, drawn at random by seed 0" in caption


def test_figures_of_vectors_need_them(finished, tmp_path):
    complete(tmp_path, **ONE)
    with pytest.raises(DataError, match="keeps vectors: run it again, for vectors with"):
        draw(tmp_path, "tsne", tmp_path)
    folder = shutil.copytree(finished, tmp_path / "wide")
    with pytest.raises(DataError, match="codewords of 12 dimensions cannot be drawn"):
        draw(folder, "voronoi", tmp_path / "out")


def test_tsne_keeps_clusters_together_and_repeats():
    rng = np.random.default_rng(0)
    x = np.repeat(rng.standard_normal((3, 16)), 15, axis=0) + 0.05 * rng.standard_normal((45, 16))
    points = tsne(x.astype(np.float32))
    np.testing.assert_array_equal(points, tsne(x.astype(np.float32)))
    centres = points.reshape(3, 15, 2).mean(axis=1)
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).argmin(axis=1)
    assert (nearest == np.repeat(np.arange(3), 15)).all()


def test_borders_of_cells_are_equally_near_to_two_codewords():
    Z = np.random.default_rng(0).standard_normal((16, 2))
    Z /= np.linalg.norm(Z, axis=1, keepdims=True)
    angles = cell_borders(Z)
    assert (np.diff(angles) > 0).all()
    nearness = np.sort(np.stack([np.cos(angles), np.sin(angles)], axis=1) @ Z.T, axis=1)
    np.testing.assert_allclose(nearness[:, -1], nearness[:, -2], atol=1e-12)
    cells = np.searchsorted(angles, np.arctan2(Z[:, 1], Z[:, 0])) % 16
    assert sorted(cells) == list(range(16))  # one codeword each

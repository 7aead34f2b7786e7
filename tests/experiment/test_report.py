"""Reports are the files of the runs, in every form; pictures are drawn of what is there."""

import csv
import io
import json
import shutil

import h5py
import numpy as np
import pytest
from experiment.experiments import DIGITS, ONE, SHORT, SMALL, made, small_grid

from gpq_faiss.errors import DataError, GpqError, OutputExistsError
from gpq_faiss.experiment.pictures import cell_borders, draw_experiment, tsne
from gpq_faiss.experiment.report import read_experiment, report_experiment
from gpq_faiss.experiment.runs import begin, plan, read_run


def ask(folder, **changes):
    """What is missing after a call that is cut off before its first run."""
    grid = small_grid(**changes)
    specs, left_out = plan(grid, DIGITS)
    begin(folder, grid, DIGITS, specs, left_out)
    return read_experiment(folder).missing()


def tables(folder):
    found = json.loads(report_experiment(folder, "json"))["tables"]
    return {name: table["rows"] for name, table in found.items()}


# Tables -----------------------------------------------------------------------------------------------------------------


def test_tables_are_the_means_of_the_files(done):
    runs = {run["identity"]: run for run in json.loads(report_experiment(done, "json"))["runs"]}
    kept = read_run(done / "float_any_seed0.h5").bits_kept
    order = ["gpq", "gpq (λ2 = 0)", "pq", f"float ({kept:,} bits per item)"]
    found, lines = tables(done), []
    for path in done.glob("*.h5"):
        run = read_run(path)
        line = run.seconds | {"mAP": run.arrays["ap"].mean()}
        line |= {"NN10@100": run.likeness.nn10_at_100} if run.likeness else {}
        columns = (
            ("P@{}", "ks", "precision"),
            ("R@{}", "ks", "recall"),
            ("{:.2f}", "pr_recall", "pr_precision"),
        )
        for column, x, y in columns:
            line |= {column.format(a): b for a, b in zip(run.arrays[x], run.arrays[y], strict=True)}
        assert {name: runs[run.identity][name] for name in line} == pytest.approx(line, abs=1e-12)
        row = {"gpq": order[bool(run.variation)], "pq": "pq", "float": order[-1]}[run.method]
        lines.append(line | {"row": row, "bits": run.bits})
    assert len(runs) == len(lines) == 14
    assert {name: list(rows[0])[1:] for name, rows in found.items()} == {
        "map": ["12", "24", "NN10@100"],
        "depth": [f"{letter}@{k}" for letter in "PR" for k in (1, 10, 100, 1000)],
        "pr": [f"{i / 10:.2f}" for i in range(1, 11)],
        "seconds": ["fit", "encode", "rank"],
    }
    for name, rows in found.items():
        assert [row["method"] for row in rows] == order
        cells = [(row["method"], *cell) for row in rows for cell in list(row.items())[1:]]
        for row, column, cell in cells:
            bits, figure = (int(column), "mAP") if column in ("12", "24") else (24, column)
            there = (0, 12, 24) if name == "seconds" else (0, bits)
            values = [line[figure] for line in lines if line["row"] == row and line["bits"] in there]
            expected = np.mean(values), np.std(values, ddof=1), len(values)
            assert list(cell.values()) == pytest.approx(expected, abs=1e-12), (row, column)
    assert found["map"][-1]["NN10@100"]["mean"] == 1
    written = csv.DictReader(io.StringIO(report_experiment(done, "csv")))
    for line, row in zip(written, found["map"], strict=True):
        for bits in ("12", "24"):
            assert (float(line[bits]), float(line[f"{bits}_deviation"])) == tuple(row[bits].values())[:2]


@pytest.mark.parametrize(("form", "plus"), [("text", "±"), ("markdown", "±"), ("latex", r"$\pm$")])
def test_tables_for_people_show_the_same(done, form, plus):
    text = report_experiment(done, form)
    for row in tables(done)["map"]:
        shown = row["method"].replace("λ", r"$\lambda$") if form == "latex" else row["method"]
        line = next(line for line in text.splitlines() if line.lstrip("| ").startswith(f"{shown} "))
        assert all(f"{row[b]['mean']:.4f} {plus} {row[b]['deviation']:.4f}" in line for b in ("12", "24"))
    notes = (
        "compare these figures with each other",
        "gpq-f has no row",
        "expected value over random order within ties",
        "20 steps of up to 40 labelled items",
        "Rows that do not say otherwise have the settings of the preset paper, with training.steps = 20, ",
        "protocol 1, labelled 20-per-class: 100 queries, 200 labelled and 1,497 unlabelled",
        "NN10@100: share of a query's 10 nearest items",
        "Machine: ",
    )
    assert all((part in text) == (form != "latex") for part in notes)
    assert "Departures" not in text
    assert "missing" not in text
    assert "Machine" not in report_experiment(done, form, table="seconds")


def test_a_report_says_what_differs_from_papers_and_presets(tmp_path):
    config = {"loss": {"lambda1": 3.0}, **SHORT}
    made(tmp_path / "x", methods=["gpq", "itq", "subic"], bits=[12], seeds=[0], config=config)
    text = report_experiment(tmp_path / "x")
    assert "of the preset paper, with loss.lambda1 = 3.0, training.steps = 2, " in text
    assert "subic: its blocks have K = 16; itq: vectors are scaled to length 1 first" in text
    assert "ssdh" not in text


# What is missing --------------------------------------------------------------------------------------------------------


def test_every_form_says_how_many_runs_are_missing(done, tmp_path, caplog):
    folder = tmp_path / "less"
    shutil.copytree(done, folder)
    left_out = ["float_any_seed0", "pq_12bits_seed1", "pq_24bits_seed1"]
    for name in left_out:
        (folder / f"{name}.h5").unlink()
    missing = json.loads(report_experiment(folder, "json"))["missing"]
    assert sorted(missing) == left_out
    line = "3 of 14 runs are missing, or are of other settings, data or versions than requested last: "
    for form, captions in (("text", 3), ("markdown", 3), ("latex", 4)):
        text = report_experiment(folder, form)
        assert text.count("(3 of 14 runs missing)") == captions
        if form != "latex":
            assert f"{line}{', '.join(missing)}." in text
            assert line in report_experiment(folder, form, table="map")
    report_experiment(folder, "csv")
    assert any(line in record.message for record in caplog.records)


def test_runs_that_no_call_came_to_and_those_of_other_settings_are_missing(tmp_path):
    """A seed and a method of which nothing is there: the files alone could not tell."""
    made(tmp_path, **ONE)
    assert read_experiment(tmp_path).missing() == []
    assert "of the preset" not in report_experiment(tmp_path)  # which no array method has
    with pytest.raises(DataError, match="keeps vectors: run it again, for vectors with"):
        draw_kind(tmp_path, "tsne", tmp_path)
    more = ONE | {"methods": ["pq", "itq"], "seeds": [0, 1]}
    assert set(ask(tmp_path, **more)) == {"pq_12bits_seed1", "itq_12bits_seed0", "itq_12bits_seed1"}
    # A later call of fewer runs forgets nothing, and making them ends it.
    made(tmp_path, **ONE)
    assert len(read_experiment(tmp_path).missing()) == 3
    made(tmp_path, **more)
    assert read_experiment(tmp_path).missing() == []
    assert ask(tmp_path, **more, vectors=3) == list(read_experiment(tmp_path).about.planned)


def test_rows_of_one_method_are_named_by_their_variation(tmp_path):
    one = {"variation": [{"name": "short", "config": SHORT}], "bits": [12], "seeds": [0]}
    for methods, names in ((["gpq"], ["short"]), (["gpq", "pq"], ["gpq (short)", "pq (short)"])):
        made(tmp_path, methods=methods, **one)
        assert [row["method"] for row in tables(tmp_path)["map"]] == names
    # A method that is no more comes last.
    with h5py.File(next(tmp_path.glob("gpq*.h5")), "r+") as file:
        file.attrs["method"] = "abolished"
    assert [row["method"] for row in tables(tmp_path)["map"]] == ["pq (short)", "abolished (short)"]


def test_what_there_is_no_report_of(done, tmp_path):
    def refused(message, folder=tmp_path, **options):
        with pytest.raises(GpqError, match=message):
            report_experiment(folder, **options)

    refused(r"experiment\.json not found")
    about = json.loads((done / "experiment.json").read_text())
    for key in ("grid", "data", "variations", "planned", "experiment_format"):
        for damaged in ({k: v for k, v in about.items() if k != key}, about | {key: {"x": {}}}):
            (tmp_path / "experiment.json").write_text(json.dumps(damaged))
            refused(f"experiment.json is damaged .*'{key}'")
    shutil.copy(done / "experiment.json", tmp_path)
    refused("no finished run")
    refused("no table 'grid' here: choose one of map, depth, pr, sec", done, table="grid")
    refused("format 'yaml': choose one of text, markdown", done, form="yaml")
    source = done / "pq_12bits_seed0.h5"
    (tmp_path / source.name).write_bytes(source.read_bytes()[:-3000])
    refused(source.name)
    # A copy of a run is no other seed.
    for name in (source.name, "pq_12bits_seed0-copy.h5"):
        shutil.copy(source, tmp_path / name)
    refused(r"is the same run as pq_12bits_seed0.*: delete one")


# Pictures ---------------------------------------------------------------------------------------------------------------


def draw_kind(folder, kind, out, **options):
    """Name -> caption of the pictures of a kind."""
    about = json.loads((folder / "experiment.json").read_text())
    (folder / "experiment.json").write_text(json.dumps(about | {"kind": kind}))
    return {path.name: caption for caption, path in draw_experiment(folder, out, **options).items()}


def test_pictures_of_a_table_are_in_its_reports(done, tmp_path):
    drawn = draw_experiment(done, tmp_path / "plots")
    assert {path.stem for path in drawn.values()} == {"map", "likeness", "pr", "precision", "recall"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn.values())
    text = report_experiment(done, pictures={caption: path.name for caption, path in drawn.items()})
    assert "![mAP over the length of the code](map.png)\n\nmAP over the length of the code.\n" in text
    with pytest.raises(OutputExistsError):
        draw_experiment(done, tmp_path / "plots")


def test_sensitivity_has_a_picture_for_each_method(tmp_path):
    product = {"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.1], "training.learning_rate": [1e-4]}
    both = {"sensitivity-gpq-12.png", "sensitivity-gpq-t-12.png"}
    grid = {"bits": [12], "seeds": [0], "config": SHORT, "product": product}
    made(tmp_path, methods=["gpq", "gpq-t", "pq"], **grid)
    assert draw_kind(tmp_path, "sensitivity", tmp_path).keys() == both
    assert len(tables(tmp_path)["map"]) == 9
    # A corner that is missing leaves its cell empty.
    next(tmp_path.glob("gpq_*lambda1-0.0-lambda2-0.0*.h5")).unlink()
    assert draw_kind(tmp_path, "sensitivity", tmp_path, overwrite=True).keys() == both
    # Other changes have no place in it.
    with h5py.File(next(tmp_path.glob("gpq_*lambda1-0.1-lambda2-0.1*.h5")), "r+") as file:
        settings = json.loads(file.attrs["settings"])
        settings["loss"] |= {"lambda1": 0.0}
        file.attrs["settings"] = json.dumps(settings)
    with pytest.raises(DataError, match="several runs have the same weights"):
        draw_experiment(tmp_path, tmp_path / "r")
    for path in tmp_path.glob("gpq*.h5"):
        path.unlink()
    with pytest.raises(DataError, match="no run of GPQ"):
        draw_experiment(tmp_path, tmp_path / "q")


def test_vectors_become_tsne_and_flat_codebooks(done, tmp_path):
    flat = {"training": SMALL | {"steps": 3}, "quantizer": {"subdim": 2}}
    made(tmp_path, **ONE | {"methods": ["gpq"], "config": flat, "vectors": 40})
    about = "Codebooks in two dimensions, gpq, with 40 items of the database drawn at random by seed 0"
    assert draw_kind(tmp_path, "voronoi", tmp_path) == {"voronoi.png": about}
    ((name, caption),) = draw_kind(tmp_path, "tsne", tmp_path).items()
    assert name == "tsne.png"
    assert "40 items of the database, drawn at random by seed 0" in caption
    shutil.copytree(done, tmp_path / "w")
    with pytest.raises(DataError, match="codewords of 12 dimensions cannot be drawn"):
        draw_kind(tmp_path / "w", "voronoi", tmp_path / "none")


def test_tsne_keeps_clusters_together_and_repeats():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((3, 16))
    x = np.repeat(centres, 15, axis=0) + 0.05 * rng.standard_normal((45, 16))
    places = tsne(x.astype(np.float32))
    np.testing.assert_array_equal(places, tsne(x.astype(np.float32)))
    middle = places.reshape(3, 15, 2).mean(axis=1)
    nearest = np.linalg.norm(places[:, None] - middle, axis=2).argmin(axis=1)
    assert (nearest == np.repeat(np.arange(3), 15)).all()


def test_borders_of_cells_are_equally_near_to_two_codewords():
    Z = np.random.default_rng(0).standard_normal((16, 2))
    Z /= np.linalg.norm(Z, axis=1, keepdims=True)
    angles = cell_borders(Z)
    assert (np.diff(angles) > 0).all()
    nearness = np.sort(np.stack([np.cos(angles), np.sin(angles)], axis=1) @ Z.T, axis=1)
    np.testing.assert_allclose(nearness[:, -1], nearness[:, -2], atol=1e-12)
    # Each cell has one codeword.
    cells = np.searchsorted(angles, np.arctan2(Z[:, 1], Z[:, 0])) % 16
    assert sorted(cells) == list(range(16))

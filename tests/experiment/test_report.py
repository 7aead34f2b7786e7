"""Reports are the files of the runs, in every form; pictures are drawn of what is there."""

from __future__ import annotations

import csv
import dataclasses
import html
import io
import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from experiment.experiments import SMALL, small_grid

from gpq_faiss.config import merge, preset
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.experiment import pictures
from gpq_faiss.experiment.pictures import draw_experiment, tsne
from gpq_faiss.experiment.published import read_published
from gpq_faiss.experiment.report import notes_of, report_experiment, save_report_page
from gpq_faiss.experiment.results import Missing, missing_runs, read_experiment, scale_rows, weight_panels
from gpq_faiss.experiment.run import begin, describe, run_experiment
from gpq_faiss.experiment.runfile import read_run
from gpq_faiss.experiment.specs import plan
from gpq_faiss.store import read_arrays

DIGITS = open_data("digits")
PNG = b"\x89PNG"
ONE: dict[str, Any] = {"methods": ["pq"], "bits": [12], "seeds": [0]}
SHORT = {"training": SMALL | {"steps": 2}}


def made(folder: Path, **changes: Any) -> Path:
    assert not run_experiment(small_grid(**changes), DIGITS, folder).failed
    return folder


def ask(folder: Path, **changes: Any) -> Missing:
    """What is missing after a call that is cut off before its first run."""
    grid, base = small_grid(**changes), preset("paper")
    specs, left_out = plan(grid, DIGITS, base)
    begin(folder, describe(grid, DIGITS, base, None, left_out), specs, renamed=False)
    return missing_runs(read_experiment(folder))


def tables(folder: Path, **options: Any) -> dict[str, list[dict[str, Any]]]:
    found = json.loads(report_experiment(folder, "json", **options))["tables"]
    return {name: table["rows"] for name, table in found.items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpq (two variations), pq and float at two lengths and two seeds, gpq-f left out."""
    variations = [{}, {"name": "λ2 = 0", "methods": ["gpq"], "config": {"loss": {"lambda2": 0.0}}}]
    folder = tmp_path_factory.mktemp("report") / "small"
    return made(folder, methods=["float", "pq", "gpq", "gpq-f"], variation=variations)


@pytest.fixture(scope="module")
def by_hand(done: Path) -> dict[tuple[str, int], tuple[float, float]]:
    """(row, bits) -> mean and deviation over seeds, straight from the APs in the HDF5 files."""
    found: dict[tuple[str, int], list[float]] = {}
    for path in sorted(done.glob("*.h5")):
        arrays, about = read_arrays(path, "a run")
        name = about["method"] + (f" ({about['variation']})" if about["variation"] else "")
        for bits in [about["bits"]] if about["bits"] else [12, 24]:
            found.setdefault((name, bits), []).append(float(arrays["ap"].mean()))
    return {key: (float(np.mean(v)), float(np.std(v, ddof=1))) for key, v in found.items()}


def rows_of(done: Path) -> list[str]:
    _, about = read_arrays(done / "float_any_seed0.h5", "a run", set())
    return ["gpq", "gpq (λ2 = 0)", "pq", f"float ({about['bits_kept']:,} bits per item)"]


# Tables -----------------------------------------------------------------------------------------------------------------


def test_csv_and_json_hold_the_means_of_the_files(done: Path, by_hand: dict[Any, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(report_experiment(done, "csv"))))
    table = tables(done)["map"]
    assert [line["method"] for line in lines] == [row["method"] for row in table] == rows_of(done)
    for line, row in zip(lines, table, strict=True):
        name = "float" if line["method"].startswith("float") else line["method"]
        for bits in (12, 24):
            mean, deviation = map(pytest.approx, by_hand[name, bits])
            assert float(line[f"{bits}"]) == mean
            assert float(line[f"{bits}_deviation"]) == deviation
            assert line[f"{bits}_n"] == "2"
            assert row[f"{bits}"] == {"mean": mean, "deviation": deviation, "n": 2}
    runs = json.loads(report_experiment(done, "json"))["runs"]
    assert len(runs) == len(list(done.glob("*.h5"))) == 14
    for run in runs:
        length = f"{run['bits']}bits" if run["bits"] else "any"
        stem = f"{run['method']}_{length}_seed{run['seed']}"
        (path,) = (p for p in done.glob(f"{stem}*.h5") if bool(run["variation"]) == (p.stem != stem))
        arrays, _ = read_arrays(path, "a run")
        assert run["map"] == pytest.approx(arrays["ap"].mean(), abs=1e-12)
        for name, array in (
            ("precision", "precision"),
            ("recall", "recall"),
            ("precision_at_recall", "pr_precision"),
        ):
            assert list(run[name].values()) == arrays[array].tolist()


@pytest.mark.parametrize(("form", "plus"), [("text", "±"), ("markdown", "±"), ("latex", r"$\pm$")])
def test_tables_for_people_show_the_same(done: Path, by_hand: dict[Any, Any], form: Any, plus: str) -> None:
    text = report_experiment(done, form)
    for name in rows_of(done):
        key = "float" if name.startswith("float") else name
        shown = name.replace("λ", r"$\lambda$") if form == "latex" else name
        line = next(line for line in text.splitlines() if line.lstrip("| ").startswith(f"{shown} "))
        for bits in (12, 24):
            mean, deviation = by_hand[key, bits]
            assert f"{mean:.4f} {plus} {deviation:.4f}" in line
    if form != "latex":
        for part in (
            "What differs from the paper: the data are digits",
            "gpq-f has no row",
            "expected value over random order within ties",
            "20 steps of up to 40 labelled items",
            "Rows that do not say otherwise have the settings of the preset paper.",
            "protocol 1, labelled 20 per class: 100 queries, 200 labelled and 1,497 unlabelled",
            "Machine: ",
        ):
            assert part in text
    assert "Departures" not in text
    assert "missing" not in text


def test_a_report_says_what_differs_from_papers_and_presets(tmp_path: Path) -> None:
    base = merge(preset("paper"), {"loss": {"beta": 3.0}, "training": {"learning_rate": 1e-3}})
    methods = {"methods": ["gpq", "itq", "subic"], "bits": [12], "seeds": [0]}
    run_experiment(small_grid(**methods, config=SHORT), DIGITS, tmp_path / "x", base=base)
    text = report_experiment(tmp_path / "x")
    assert "of the preset paper, with loss.beta = 3.0, training.learning_rate = 0.001." in text
    assert "subic: its blocks have K = 16; itq: vectors are scaled to length 1 first" in text
    assert "ssdh" not in text
    assert "of the preset" not in report_experiment(made(tmp_path / "y", **ONE))


def test_other_tables_are_those_of_the_files(done: Path) -> None:
    found = tables(done)
    assert list(found) == ["map", "likeness", "depth", "pr", "seconds"]
    pq = {name: next(row for row in rows if row["method"] == "pq") for name, rows in found.items()}
    runs = {bits: [read_run(done / f"pq_{bits}bits_seed{seed}.h5") for seed in (0, 1)] for bits in (12, 24)}
    arrays = [run.arrays for run in runs[24]]

    def mean(values: Any) -> Any:
        return pytest.approx(np.mean(list(values)))

    for k in (1, 10, 100, 1000):
        at = int(np.flatnonzero(arrays[0]["ks"] == k)[0])
        for letter, name in (("P", "precision"), ("R", "recall")):
            assert pq["depth"][f"{letter}@{k}"]["mean"] == mean(a[name][at] for a in arrays)
    assert list(pq["pr"]) == ["method", *(f"{i / 10:g}" for i in range(1, 11))]
    for level in (0.1, 0.5, 1.0):
        at = int(np.argmin(np.abs(arrays[0]["pr_recall"] - level)))
        assert pq["pr"][f"{level:g}"]["mean"] == mean(a["pr_precision"][at] for a in arrays)
    likeness = {bits: [run.about["likeness"] for run in of] for bits, of in runs.items()}
    for bits, of in likeness.items():
        nn10 = [one["nn10_at_100"] for one in of]
        assert pq["likeness"][str(bits)]["mean"] == mean(nn10)
        assert pq["likeness"][str(bits)]["deviation"] == pytest.approx(np.std(nn10, ddof=1))
    assert pq["map"]["NN10@100"] == pq["likeness"]["24"]
    assert pq["likeness"]["within class"]["mean"] == mean(one["within_class"] for one in likeness[24])
    distinct = (one["distinct_in_tops"] / (10 * one["queries"]) for one in likeness[24])
    assert pq["likeness"]["distinct in tops"]["mean"] == mean(distinct)
    floats = next(row for row in found["map"] if row["method"].startswith("float"))
    assert floats["NN10@100"]["mean"] == 1
    seconds = (run.about["seconds"]["fit"] for of in runs.values() for run in of)
    assert pq["seconds"]["fit"]["mean"] == mean(seconds)
    assert "What differs" not in report_experiment(done, "text", table="seconds")
    assert "NN10@100: share of a query's 10 nearest items" in report_experiment(done, "markdown")


def test_the_rate_of_class_networks_is_that_of_their_network(tmp_path: Path) -> None:
    few = {"posterior": {"committee_hidden": 16}, "training": SMALL | {"steps": 2}}
    experiment = read_experiment(
        made(tmp_path, methods=["posterior"], bits=[4], seeds=[0], preset="recommended", config=few)
    )
    (run,) = experiment.runs
    for backbone, perceptron, expected in (
        ("auto", True, "Class networks are trained at 2 times"),
        ("mlp", False, "Class networks are trained at 2 times"),
        ("auto", False, "Class networks over convolutions, and these, are trained at 0.5 times"),
        ("vgg", True, "Class networks over convolutions, and these, are trained at 0.5 times"),
    ):
        network = run.about["settings"]["network"] | {"backbone": backbone}
        about = run.about | {"settings": run.about["settings"] | {"network": network}}
        data = experiment.about["data"] | {"perceptron": perceptron}
        other = dataclasses.replace(
            experiment,
            about=experiment.about | {"data": data},
            runs=(dataclasses.replace(run, about=about),),
        )
        (rate,) = [line for line in notes_of(other) if line.startswith("Class networks")]
        assert rate.startswith(expected)


# What is missing --------------------------------------------------------------------------------------------------------


def test_every_form_says_how_many_runs_are_missing(
    done: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "less"
    shutil.copytree(done, folder)
    left_out = ["float_any_seed0", "pq_12bits_seed1", "pq_24bits_seed1"]
    for name in left_out:
        (folder / f"{name}.h5").unlink()
    forms: Any = ("text", "markdown")
    line = "3 of 14 runs are missing: float_any_seed0, pq_12bits_seed1, pq_24bits_seed1."
    missing = json.loads(report_experiment(folder, "json"))["missing"]
    assert (missing["asked"], sorted(missing["runs"]), missing["outdated"]) == (14, left_out, [])
    line = f"3 of 14 runs are missing: {', '.join(missing['runs'])}."
    for form in forms:
        text = report_experiment(folder, form)
        assert line in text
        assert text.count("(3 of 14 runs missing)") == 4, "the tables with a caption"
        assert line in report_experiment(folder, form, table="map")
    latex = report_experiment(folder, "latex")
    assert latex.count("(3 of 14 runs missing)") == latex.count(r"\caption") == 5
    report_experiment(folder, "csv")
    assert [r.message for r in caplog.records if line in r.message]


def test_runs_that_no_call_came_to_are_missing_too(tmp_path: Path) -> None:
    """A seed and a method of which nothing is there: the files alone could not tell."""
    folder = made(tmp_path / "x", **ONE)
    assert missing_runs(read_experiment(folder)).short == ""
    more = ONE | {"methods": ["pq", "itq"], "seeds": [0, 1]}
    found = ask(folder, **more)
    lacking = {"pq_12bits_seed1", "itq_12bits_seed0", "itq_12bits_seed1"}
    assert (found.asked, set(found.runs), found.outdated) == (4, lacking, [])
    # A later call of fewer runs forgets nothing, and making them ends it.
    made(folder, **ONE)
    assert len(missing_runs(read_experiment(folder)).runs) == 3
    made(folder, **more)
    assert missing_runs(read_experiment(folder)).short == ""


def test_a_run_of_other_settings_is_out_of_date_until_it_is_made_again(tmp_path: Path) -> None:
    one = ONE | {"methods": ["gpq"]}
    folder = made(tmp_path / "x", **one, config=SHORT)
    changed = one | {"config": {"training": SMALL | {"steps": 3}}}
    assert ask(folder, **changed).outdated == ["gpq_12bits_seed0"]
    assert "Out of date: 1 runs" in report_experiment(folder)
    made(folder, **changed)
    assert "Out of date" not in report_experiment(folder)


def test_rows_of_one_method_are_named_by_their_variation(tmp_path: Path) -> None:
    one = {"variation": [{"name": "short", "config": SHORT}], "bits": [12], "seeds": [0]}
    folder = made(tmp_path / "x", methods=["gpq"], **one)
    assert read_experiment(folder).rows == ["short"]
    ask(folder, methods=["gpq", "pq"], **one)
    assert read_experiment(folder).rows == ["gpq (short)"]


def test_runs_of_a_method_that_is_no_more_are_reported_last(tmp_path: Path) -> None:
    folder = made(tmp_path / "x", methods=["gpq", "pq"], bits=[12], seeds=[0])
    with h5py.File(folder / "pq_12bits_seed0.h5", "r+") as file:
        file.attrs["method"] = "abolished"
    experiment = read_experiment(folder)
    assert [row["method"] for row in scale_rows(experiment)] == ["gpq", "abolished"]
    assert [panel.at for panel in weight_panels(experiment)] == ["gpq at 12 bits, 20 per class labelled"]


# Published figures ------------------------------------------------------------------------------------------------------


def test_published_figures_stand_beside_ours(
    done: Path, tmp_path: Path, by_hand: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "paper.csv"
    path.write_text("method,12,24\ngpq,0.5,0.6\npqn,,0.25\n\n")
    figures = read_published(path)
    assert figures == {("gpq", 12): 0.5, ("gpq", 24): 0.6, ("pqn", 24): 0.25}
    rows = tables(done, published=figures)["published"]
    # Every row of ours, beside the figure of its method.
    names = [row["method"].partition(" (6,1")[0] for row in rows]
    assert names == ["gpq", "gpq (λ2 = 0)", "pqn", "pq", "float"]
    for row in rows[:2]:
        assert (row["12, published"], row["24, published"]) == (0.5, 0.6)
        assert row["12, ours"]["mean"] == pytest.approx(by_hand[row["method"], 12][0])
    assert (rows[2]["24, ours"], rows[2]["12, published"], rows[3]["24, published"]) == (None, None, None)
    report_experiment(done, published={("pq", 24): 0.1, ("pq", 16): 0.1, ("gpq", 48): 0.1})
    assert [record.message for record in caplog.records] == [
        f"no run has {bits} bits: figures published for them are not shown" for bits in (16, 48)
    ]


def test_of_many_published_tables_the_experiments_own_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    rows = ["cifar10,1,gpq,12,0.5", "cifar10,2,gpq,12,0.3", "nuswide,1,gpq,12,0.8", "", "cifar10,1,pq,24,0.2"]
    path.write_text("\n".join(["data_set,protocol,method,bits,map", *rows]))
    for name in ("cifar10", "CIFAR-10 features", "cifar10 (JPEG)"):
        assert read_published(path, name, "1") == {("gpq", 12): 0.5, ("pq", 24): 0.2}
    assert read_published(path, "CIFAR-10", "2") == {("gpq", 12): 0.3}
    assert read_published(path, "NUS-WIDE", "1") == {("gpq", 12): 0.8}
    told = r"has no figure of .* it has cifar10 protocol 1, cifar10 protocol 2, nuswide"
    for name, protocol in (("digits", "1"), ("nuswide", "2"), ("cifar", "1")):
        with pytest.raises(DataError, match=told):
            read_published(path, name, protocol)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("bits,12", "first line must be method"),
        ("method,x\ngpq,0.1", "'x' is no code length"),
        ("method,-12\ngpq,0.1", "'-12' is no code length"),
        ("method,12\nlsh,0.1", "line 2: no method 'lsh'"),
        ("method,12\ngpq,58.1", "'58.1' is no mAP between 0 and 1"),
        ("method,12\ngpq,much", "'much' is no mAP"),
        ("method,12\ngpq,0.1,0.2", "line 2: 3 fields, not 2"),
        ("method,12,12\ngpq,0.1,0.2", "'gpq' of 12 bits is there twice"),
        ("method,12\ngpq,0.1\npq,0.1\ngpq,0.2", "line 4: 'gpq' of 12 bits is there twice"),
        ("method,12", "has no figure"),
        ("method,12\ngpq,", "has no figure"),
        ("data_set,protocol,method,bits,map\nc,1,lsh,12,0.5", "no method 'lsh'"),
        ("data_set,protocol,method,bits,map\nc,1,gpq,x,0.5", "'x' is no code length"),
        ("data_set,protocol,method,bits,map\nc,1,gpq,12", "4 fields, not 5"),
        ("data_set,protocol,method,bits,map\nc,1,gpq,12,0.1\nc,1,gpq,12,0.1", "line 3: 'gpq' of 12 bits"),
    ],
)
def test_what_no_published_table_can_be(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        read_published(tmp_path / "x.csv")


# What there is no report of ---------------------------------------------------------------------------------------------


def test_what_there_is_no_report_of(done: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"experiment\.json not found"):
        report_experiment(tmp_path)
    shutil.copy(done / "experiment.json", tmp_path)
    with pytest.raises(DataError, match="no finished run"):
        report_experiment(tmp_path)
    with pytest.raises(UsageError, match="no table 'grid' here: choose one of map, likeness, depth, pr, sec"):
        report_experiment(done, table="grid")
    with pytest.raises(UsageError, match="format 'pdf'"):
        report_experiment(done, "pdf")  # type: ignore[arg-type]
    source = done / "pq_12bits_seed0.h5"
    (tmp_path / source.name).write_bytes(source.read_bytes()[:-3000])
    with pytest.raises(DataError) as caught:
        report_experiment(tmp_path)
    assert str(tmp_path / source.name) in str(caught.value)
    assert "\n" not in str(caught.value)
    # A copy of a run is no other seed.
    for name in (source.name, "pq_12bits_seed0-copy.h5"):
        shutil.copy(source, tmp_path / name)
    with pytest.raises(DataError, match=r"is the same run as pq_12bits_seed0.*: delete one"):
        report_experiment(tmp_path)


@pytest.mark.parametrize(
    "key", ["grid", "title", "kind", "data", "protocol", "labelled", "variations", "left_out"]
)
def test_a_damaged_description_is_told_of(done: Path, tmp_path: Path, key: str) -> None:
    about = json.loads((done / "experiment.json").read_text())
    for damaged in ({k: v for k, v in about.items() if k != key}, about | {key: 3}):
        (tmp_path / "experiment.json").write_text(json.dumps(damaged))
        with pytest.raises(DataError, match=f"experiment.json is damaged .'{key}'"):
            report_experiment(tmp_path)


# Pictures ---------------------------------------------------------------------------------------------------------------


def drawn_names(folder: Path, out: Path, **options: Any) -> set[str]:
    return {path.stem for path in draw_experiment(folder, out, **options).values()}


def test_pictures_of_a_table_are_in_its_reports(done: Path, tmp_path: Path) -> None:
    drawn = draw_experiment(done, tmp_path / "plots")
    assert {path.name for path in drawn.values()} == {
        f"{name}.png" for name in ("map", "likeness", "pr", "precision", "recall")
    }
    assert all(path.read_bytes()[:4] == PNG for path in drawn.values())
    text = report_experiment(done, pictures={caption: path.name for caption, path in drawn.items()})
    assert "![mAP over the length of the code](map.png)\n\nmAP over the length of the code.\n" in text
    with pytest.raises(OutputExistsError):
        draw_experiment(done, tmp_path / "plots")
    assert draw_experiment(done, tmp_path / "plots", overwrite=True) == drawn
    page = save_report_page(done, tmp_path / "o.html").read_text()
    assert page.count("<svg") == len(drawn)
    for rows in tables(done).values():
        for row in rows:
            assert html.escape(str(row["method"])) in page
            assert all(f"{cell['mean']:.1f}" in page for cell in row.values() if isinstance(cell, dict))
    with pytest.raises(OutputExistsError):
        save_report_page(done, tmp_path / "o.html")
    with pytest.raises(UsageError, match="a page ends in"):
        save_report_page(done, tmp_path / "o.pdf")


def test_galleries_show_the_images_of_the_runs(done: Path, tmp_path: Path) -> None:
    drawn = draw_experiment(done, tmp_path, images=DIGITS)
    captions = {path.stem: caption for caption, path in drawn.items() if "gallery" in path.stem}
    assert set(captions) == {f"gallery-{which}" for which in ("1", "2", "3", "best", "worst")}
    assert captions["gallery-1"].endswith(f"from the top: {', '.join(rows_of(done))}")
    ap = sorted(read_run(done / "gpq_24bits_seed0.h5").arrays["ap"])
    assert captions["gallery-best"].endswith(f"{rows_of(done)[0]}, AP {ap[-1]:.3f} to {ap[-5]:.3f}")
    assert captions["gallery-worst"].endswith(f", AP {ap[0]:.3f} to {ap[4]:.3f}")
    page = save_report_page(done, tmp_path / "o.html", images=DIGITS).read_text()
    assert all(html.escape(caption) in page for caption in captions.values())
    np.save(tmp_path / "x.npy", np.eye(20, dtype=np.float32))
    with pytest.raises(MismatchError, match="galleries need the images"):
        draw_experiment(done, tmp_path, images=open_data(f"features:{tmp_path / 'x.npy'}"), overwrite=True)


def test_runs_on_features_have_galleries_of_the_images_behind_them(tmp_path: Path) -> None:
    assert isinstance(DIGITS, ImageDataset)
    read = DIGITS.read(np.arange(len(DIGITS)))
    pixels = np.stack([image[:, :, 0].ravel() for image in read if image is not None])
    labels = DIGITS.require_labels().class_ids()

    def runs(name: str, order: Any, classes: Any) -> Path:
        np.save(tmp_path / f"{name}.npy", pixels[order].astype(np.float32))
        np.save(tmp_path / f"{name}-labels.npy", classes[order])
        data = open_data(f"features:{tmp_path / name}.npy", labels=str(tmp_path / f"{name}-labels.npy"))
        assert not run_experiment(small_grid(**ONE), data, tmp_path / name).failed
        return tmp_path / name

    # Classes may be numbered otherwise; items may not.
    same = runs("same", np.arange(len(labels)), 9 - labels)
    assert "gallery-3" in drawn_names(same, tmp_path / "p", images=DIGITS)
    other = runs("other", np.random.default_rng(0).permutation(len(labels)), labels)
    with pytest.raises(MismatchError, match="its labels are not those of the runs"):
        draw_experiment(other, tmp_path / "q", images=DIGITS)


def test_sensitivity_has_a_table_and_a_picture_for_each_method_and_number_of_labels(tmp_path: Path) -> None:
    product = {"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.2, 0.1]}
    grid: dict[str, Any] = {"kind": "sensitivity", "bits": [12], "seeds": [0], "product": product}
    folder = made(tmp_path / "s", methods=["gpq", "gpq-t", "pq"], config=SHORT, **grid)
    found = tables(folder)
    assert list(found) == ["grid-gpq", "grid-gpq-t"]
    assert [list(row) for row in found["grid-gpq"]] == [["method", "λ2 = 0", "λ2 = 0.1", "λ2 = 0.2"]] * 2
    for path in folder.glob("gpq*.h5"):
        run = read_run(path)
        loss = run.about["settings"]["loss"]
        row = next(r for r in found[f"grid-{run.method}"] if r["method"] == f"λ1 = {loss['lambda1']:g}")
        assert row[f"λ2 = {loss['lambda2']:g}"]["mean"] == pytest.approx(run.arrays["ap"].mean())
    names = {"sensitivity-gpq", "sensitivity-gpq-t"}
    assert drawn_names(folder, tmp_path / "p") == names
    # A number of labels more is a grid more, and no mean over both.
    more = made(
        tmp_path / "more", methods=["gpq"], labelled=["5-per-class", "20-per-class"], config=SHORT, **grid
    )
    found = tables(more)
    assert list(found) == ["grid-5-per-class", "grid-20-per-class"]
    assert all(row["λ2 = 0.1"]["n"] == 1 for rows in found.values() for row in rows)
    # A corner that is missing leaves its cell empty, and the columns in order.
    for path in folder.glob("gpq_*lambda1-0.0-lambda2-0.0*.h5"):
        path.unlink()
    rows = tables(folder)["grid-gpq"]
    assert [list(row) for row in rows] == [["method", "λ2 = 0", "λ2 = 0.1", "λ2 = 0.2"]] * 2
    assert rows[0]["λ2 = 0"] is None
    assert drawn_names(folder, tmp_path / "p", overwrite=True) == names
    for path in folder.glob("gpq*.h5"):
        path.unlink()
    with pytest.raises(DataError, match="no run of GPQ"):
        report_experiment(folder)


def test_scale_tells_sizes_and_draws_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    databases = [{"name": f"d{n}", "database": n} for n in (100, 10_000, 20_000)]
    sizes = [*databases, {"name": "u", "unlabelled": 50}]
    folder = made(tmp_path / "s", kind="scale", **ONE, variation=sizes)
    rows = tables(folder)["scale"]
    # What is larger than the data is the whole, and counts once.
    assert [(row["unlabelled"], row["database"]) for row in rows] == [(50, 1497), (1497, 1497), (1497, 100)]
    assert all(row["mAP"]["n"] == 1 for row in rows)
    assert drawn_names(folder, tmp_path / "p") == {"unlabelled", "database", "rank"}
    # Lengths and numbers of labels are kept apart.
    labels = ["5-per-class", "20-per-class"]
    two = [{"name": f"d{n}", "database": n} for n in (100, 400)]
    changes = ONE | {"bits": [12, 24], "labelled": labels, "variation": two}
    folder = made(tmp_path / "t", kind="scale", **changes)
    rows = tables(folder)["scale"]
    assert [(r["bits"], r["labelled"], r["database"]) for r in rows] == [
        (bits, labelled, n)
        for bits in (12, 24)
        for labelled in ("5 per class", "20 per class")
        for n in (400, 100)
    ]
    drawn: list[dict[str, Any]] = []
    monkeypatch.setattr(
        pictures, "plot_curves", lambda lines, path, **options: drawn.append(dict(lines)) or path
    )
    assert drawn_names(folder, tmp_path / "q") == {"database", "rank"}
    assert list(drawn[0]) == [f"pq, {bits} bits, {n} per class" for bits in (12, 24) for n in (5, 20)]
    across, up = drawn[0]["pq, 24 bits, 5 per class"]
    assert (across.tolist(), up[1]) == ([100, 400], rows[4]["mAP"]["mean"])


def test_vectors_become_tsne_and_flat_codebooks(done: Path, tmp_path: Path) -> None:
    flat = {"training": SMALL | {"steps": 3}, "quantizer": {"subdim": 2}}
    one = ONE | {"methods": ["gpq"], "config": flat, "vectors": 40}
    folder = made(tmp_path / "v", kind="voronoi", **one)
    drawn = {path.name: caption for caption, path in draw_experiment(folder, tmp_path).items()}
    about = "Codebooks in two dimensions, gpq, with 40 items of the database drawn at random by seed 0"
    assert drawn == {"voronoi.png": about}
    shutil.copytree(done, tmp_path / "none")
    for other in (folder, tmp_path / "none"):
        about = json.loads((other / "experiment.json").read_text())
        (other / "experiment.json").write_text(json.dumps(about | {"kind": "tsne"}))
    drawn = {path.name: caption for caption, path in draw_experiment(folder, tmp_path).items()}
    assert list(drawn) == ["tsne.png"]
    assert "40 items of the database, drawn at random by seed 0" in drawn["tsne.png"]
    with pytest.raises(DataError, match="no run keeps vectors"):
        draw_experiment(tmp_path / "none", tmp_path / "none")


def test_tsne_keeps_clusters_together_and_repeats() -> None:
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((3, 16))
    x = np.repeat(centres, 15, axis=0) + 0.05 * rng.standard_normal((45, 16))
    places = tsne(x.astype(np.float32))
    assert places.shape == (45, 2)
    np.testing.assert_array_equal(places, tsne(x.astype(np.float32)))
    middle = places.reshape(3, 15, 2).mean(axis=1)
    nearest = np.linalg.norm(places[:, None] - middle, axis=2).argmin(axis=1)
    assert (nearest == np.repeat(np.arange(3), 15)).all()

"""Reports are the files of the runs, in every form; pictures are drawn of what is there."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
from experiment.experiments import SMALL, small_grid

from gpq_faiss.config import merge, preset, to_dict
from gpq_faiss.data.base import ImageDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, MismatchError, OutputExistsError, UsageError
from gpq_faiss.experiment import pictures, report
from gpq_faiss.experiment.grid import Grid
from gpq_faiss.experiment.page import save_report_page
from gpq_faiss.experiment.pictures import draw_experiment, tsne
from gpq_faiss.experiment.published import read_published
from gpq_faiss.experiment.report import report_experiment
from gpq_faiss.experiment.results import missing_runs, read_experiment, row_name, runs_at
from gpq_faiss.experiment.run import note_planned, run_experiment
from gpq_faiss.experiment.runfile import read_run
from gpq_faiss.experiment.specs import plan
from gpq_faiss.report.maps import (
    FlatCodebook,
    cell_borders,
    plot_codebooks,
    plot_curves,
    plot_heat_map,
    plot_scatters,
)
from gpq_faiss.store import read_arrays

DIGITS = open_data("digits")
PNG = b"\x89PNG"


def made(folder: Path, **changes: Any) -> Path:
    grid: Grid = small_grid(**changes)
    assert not run_experiment(grid, DIGITS, folder).failed
    return folder


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """gpq (two variations), pq and float at two lengths and two seeds, gpq-f left out."""
    variations = [{}, {"name": "λ2 = 0", "methods": ["gpq"], "config": {"loss": {"lambda2": 0.0}}}]
    return made(
        tmp_path_factory.mktemp("report") / "small",
        methods=["float", "pq", "gpq", "gpq-f"],
        variation=variations,
    )


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


def float_row(done: Path) -> str:
    _, about = read_arrays(done / "float_any_seed0.h5", "a run", set())
    return f"float ({about['bits_kept']:,} bits per item)"


def rows_of(done: Path) -> list[str]:
    return ["gpq", "gpq (λ2 = 0)", "pq", float_row(done)]


def test_csv_and_json_hold_the_means_of_the_files(done: Path, by_hand: dict[Any, Any]) -> None:
    lines = list(csv.DictReader(io.StringIO(report_experiment(done, "csv"))))
    value = json.loads(report_experiment(done, "json"))
    table = value["tables"]["map"]["rows"]
    assert [line["method"] for line in lines] == [row["method"] for row in table] == rows_of(done)
    for line, row in zip(lines, table, strict=True):
        name = "float" if line["method"].startswith("float") else line["method"]
        for bits in (12, 24):
            mean, deviation = by_hand[name, bits]
            assert float(line[f"{bits}"]) == pytest.approx(mean, abs=1e-12)
            assert float(line[f"{bits}_deviation"]) == pytest.approx(deviation, abs=1e-12)
            assert line[f"{bits}_n"] == "2"
            assert row[f"{bits}"] == {
                "mean": pytest.approx(mean),
                "deviation": pytest.approx(deviation),
                "n": 2,
            }
    assert len(value["runs"]) == len(list(done.glob("*.h5"))) == 14
    for run in value["runs"]:
        stem = f"{run['method']}_{run['bits']}bits" if run["bits"] else f"{run['method']}_any"
        paths = [
            p for p in done.glob(f"{stem}_seed{run['seed']}*.h5") if bool(run["variation"]) == ("-" in p.stem)
        ]
        arrays, _ = read_arrays(paths[0], "a run")
        assert run["map"] == pytest.approx(arrays["ap"].mean(), abs=1e-12)
        assert list(run["precision"].values()) == arrays["precision"].tolist()


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
        assert "What differs from the paper: the data are digits" in text
        assert "gpq-f has no row" in text
        assert "expected value over random order within ties" in text
        assert "20 steps of 40 labelled items" in text
        assert "Rows that do not say otherwise have the settings of the preset paper." in text
        assert "protocol 1, labelled 20 per class: 100 queries, 200 labelled and 1,497 unlabelled" in text
        assert "Machine: " in text


def test_a_report_says_where_methods_depart_from_their_papers(done: Path, tmp_path: Path) -> None:
    assert "Departures" not in report_experiment(done, "markdown")
    folder = made(tmp_path / "more", methods=["itq", "subic"], bits=[12], seeds=[0])
    text = report_experiment(folder, "markdown")
    assert "subic: its blocks have K = 16; itq: vectors are scaled to length 1 first" in text
    assert "ssdh" not in text


def test_likeness_stands_beside_map(done: Path) -> None:
    rows = json.loads(report_experiment(done, "json"))["tables"]
    about = [read_run(done / f"pq_{bits}bits_seed{seed}.h5").likeness for bits in (12, 24) for seed in (0, 1)]
    nn10 = [one["nn10_at_100"] for one in about]
    beside = next(row for row in rows["map"]["rows"] if row["method"] == "pq")
    assert beside["NN10@100"]["mean"] == pytest.approx(np.mean(nn10[2:]))
    line = next(row for row in rows["likeness"]["rows"] if row["method"] == "pq")
    for bits, two in ((12, nn10[:2]), (24, nn10[2:])):
        assert line[str(bits)]["mean"] == pytest.approx(np.mean(two))
        assert line[str(bits)]["deviation"] == pytest.approx(np.std(two, ddof=1))
    assert line["within class"]["mean"] == pytest.approx(np.mean([one["within_class"] for one in about[2:]]))
    distinct = [one["distinct_in_tops"] / (10 * one["queries"]) for one in about[2:]]
    assert line["distinct in tops"]["mean"] == pytest.approx(np.mean(distinct))
    floats = next(row for row in rows["map"]["rows"] if row["method"].startswith("float"))
    assert floats["NN10@100"]["mean"] == 1
    assert "NN10@100: share of a query's 10 nearest items" in report_experiment(done, "markdown")


@pytest.mark.parametrize("value", [None, '{"nn10_at_100": "much"}'], ids=["missing", "wrong"])
def test_a_run_without_its_likeness_is_damaged(done: Path, tmp_path: Path, value: str | None) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(done, folder)
    with h5py.File(folder / "pq_24bits_seed0.h5", "r+") as h5:
        del h5.attrs["likeness"]
        if value is not None:
            h5.attrs["likeness"] = value
    with pytest.raises(DataError, match="'likeness' is missing or wrong"):
        report_experiment(folder, "text")


def test_depth_and_seconds_are_those_of_the_files(done: Path) -> None:
    rows = json.loads(report_experiment(done, "json"))["tables"]["depth"]["rows"]
    arrays = [read_arrays(done / f"pq_24bits_seed{seed}.h5", "a run")[0] for seed in (0, 1)]
    pq = next(row for row in rows if row["method"] == "pq")
    for k in (1, 10, 100, 1000):
        at = [int(np.flatnonzero(a["ks"] == k)[0]) for a in arrays]
        for letter, name in (("P", "precision"), ("R", "recall")):
            mean = np.mean([a[name][i] for a, i in zip(arrays, at, strict=True)])
            assert pq[f"{letter}@{k}"]["mean"] == pytest.approx(mean)
    seconds = report_experiment(done, "text", table="seconds")
    assert "gpq" in seconds
    assert "What differs" not in seconds


def test_the_curve_is_that_of_the_files(done: Path) -> None:
    value = json.loads(report_experiment(done, "json"))
    arrays = [read_arrays(done / f"pq_24bits_seed{seed}.h5", "a run")[0] for seed in (0, 1)]
    pq = next(row for row in value["tables"]["pr"]["rows"] if row["method"] == "pq")
    assert list(pq) == ["method", *(f"{i / 10:g}" for i in range(1, 11))]
    for level in (0.1, 0.5, 1.0):
        at = int(np.argmin(np.abs(arrays[0]["pr_recall"] - level)))
        assert pq[f"{level:g}"]["mean"] == pytest.approx(np.mean([a["pr_precision"][at] for a in arrays]))
    run = next(r for r in value["runs"] if (r["method"], r["bits"], r["seed"]) == ("pq", 24, 0))
    assert list(run["precision_at_recall"].values()) == arrays[0]["pr_precision"].tolist()


# ------------------------------------------------------------------------------------------------------ what is missing


def copied(done: Path, folder: Path, *left_out: str) -> Path:
    """The experiment without some of its runs."""
    shutil.copytree(done, folder)
    for name in left_out:
        (folder / f"{name}.h5").unlink()
    return folder


def test_a_whole_table_says_nothing_of_missing_runs(done: Path) -> None:
    for form in ("text", "markdown", "latex"):
        assert "missing" not in report_experiment(done, form)  # type: ignore[arg-type]
    assert json.loads(report_experiment(done, "json"))["missing"] == {"asked": 14, "runs": {}, "outdated": []}


def test_every_form_says_how_many_runs_are_missing(
    done: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copied(done, tmp_path / "less", "pq_12bits_seed1", "pq_24bits_seed1", "float_any_seed0")
    line = "3 of 14 runs are missing: pq (12 bits seed 1, 24 bits seed 1); float (seed 0)."
    for form in ("text", "markdown"):
        text = report_experiment(folder, form)  # type: ignore[arg-type]
        assert line in text
        assert text.count("(3 of 14 runs missing)") == 4, "the tables with a caption"
        assert line in report_experiment(folder, form, table="map")  # type: ignore[arg-type]
    latex = report_experiment(folder, "latex")
    assert latex.count("(3 of 14 runs missing)") == latex.count(r"\caption") == 5
    assert json.loads(report_experiment(folder, "json"))["missing"]["runs"]["pq"] == [
        "12 bits seed 1",
        "24 bits seed 1",
    ]
    report_experiment(folder, "csv")
    assert [r.message for r in caplog.records if line in r.message]


def test_runs_that_no_call_came_to_are_missing_too(tmp_path: Path) -> None:
    """A seed and a method of which nothing is there: the files alone could not tell."""
    folder = made(tmp_path / "x", methods=["pq"], bits=[12], seeds=[0])
    assert missing_runs(read_experiment(folder)).short == ""
    # An interrupted call has noted what was requested before its first run.
    specs = plan(small_grid(methods=["pq", "itq"], bits=[12], seeds=[0, 1]), DIGITS, preset("paper")).specs
    note_planned(folder, specs)
    found = missing_runs(read_experiment(folder))
    assert (found.asked, found.count, found.outdated) == (4, 3, ())
    assert dict(found.runs) == {"pq": ("12 bits seed 1",), "itq": ("12 bits seed 0", "12 bits seed 1")}
    # A later call of fewer runs forgets nothing, and making them ends it.
    made(folder, methods=["pq"], bits=[12], seeds=[0])
    assert missing_runs(read_experiment(folder)).count == 3
    made(folder, methods=["pq", "itq"], bits=[12], seeds=[0, 1])
    assert missing_runs(read_experiment(folder)).short == ""


def test_a_run_of_other_settings_is_out_of_date_until_it_is_made_again(tmp_path: Path) -> None:
    few = {"training": SMALL | {"steps": 2}}
    folder = made(tmp_path / "x", methods=["gpq"], bits=[12], seeds=[0], config=few)
    changed = small_grid(methods=["gpq"], bits=[12], seeds=[0], config={"training": SMALL | {"steps": 3}})
    specs = plan(changed, DIGITS, preset("paper")).specs
    note_planned(folder, specs)
    assert missing_runs(read_experiment(folder)).outdated == ("gpq_12bits_seed0",)
    assert "Out of date: 1 runs" in report_experiment(folder)
    assert run_experiment(changed, DIGITS, folder).made == 1
    assert "Out of date" not in report_experiment(folder)


def test_a_report_tells_what_the_command_changed_of_the_preset(tmp_path: Path) -> None:
    base = merge(preset("paper"), {"loss": {"beta": 3.0}, "training": {"learning_rate": 1e-3}})
    few = {"methods": ["gpq"], "bits": [12], "seeds": [0], "config": {"training": SMALL | {"steps": 2}}}
    run_experiment(small_grid(**few), DIGITS, tmp_path / "x", base=base)
    assert "of the preset paper, with loss.beta = 3.0, training.learning_rate = 0.001." in report_experiment(
        tmp_path / "x"
    )
    assert "of the preset" not in report_experiment(
        made(tmp_path / "y", methods=["pq"], bits=[12], seeds=[0])
    )


def test_published_figures_stand_beside_ours(
    done: Path, tmp_path: Path, by_hand: dict[Any, Any], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "paper.csv"
    path.write_text("method,12,24\ngpq,0.5,0.6\npqn,,0.25\n\n")
    figures = read_published(path)
    assert figures == {("gpq", 12): 0.5, ("gpq", 24): 0.6, ("pqn", 24): 0.25}
    rows = json.loads(report_experiment(done, "json", published=figures))["tables"]["published"]["rows"]
    # Every row of ours, beside the figure of its method.
    assert [row["method"].partition(" (6,1")[0] for row in rows] == [
        "gpq",
        "gpq (λ2 = 0)",
        "pqn",
        "pq",
        "float",
    ]
    for row, name in ((rows[0], "gpq"), (rows[1], "gpq (λ2 = 0)")):
        assert row["12, published"] == 0.5
        assert row["24, published"] == 0.6
        assert row["12, ours"]["mean"] == pytest.approx(by_hand[name, 12][0])
    assert rows[2]["24, ours"] is None
    assert rows[2]["12, published"] is None
    assert rows[3]["24, published"] is None
    assert rows[3]["24, ours"]["mean"] == pytest.approx(by_hand["pq", 24][0])
    report_experiment(done, published={("pq", 24): 0.1, ("pq", 16): 0.1, ("gpq", 48): 0.1})
    assert [record.message for record in caplog.records] == [
        f"no run has {bits} bits: figures published for them are not shown" for bits in (16, 48)
    ]
    assert "Beside the published figures" in report_experiment(done, "markdown", published=figures)
    for text, message in (
        ("bits,12\n", "first line must be method"),
        ("method,x\n", "first line must be method"),
        ("method,12\nlsh,0.1\n", "line 2: no method 'lsh'"),
        ("method,12\ngpq,58.1\n", "'58.1' is no mAP between 0 and 1"),
        ("method,12\ngpq,much\n", "'much' is no mAP"),
        ("method,12\ngpq,0.1,0.2\n", "2 figures for 1 code lengths"),
        ("method,12,12\ngpq,0.1,0.2\n", "12 bits, not a code length, or repeated"),
        ("method,-12\ngpq,0.1\n", "-12 bits, not a code length"),
        ("method,12\ngpq,0.1\npq,0.1\ngpq,0.2\n", "line 4: 'gpq' is there twice"),
        ("method,12\n", "has no figure"),
        ("method,12\ngpq,\n", "has no figure"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_published(path)
    with pytest.raises(DataError, match="not found"):
        read_published(tmp_path / "none.csv")


def test_of_many_published_tables_the_experiments_own_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    head = "data_set,protocol,method,bits,map\n"
    rows = ["cifar10,1,gpq,12,0.5", "cifar10,2,gpq,12,0.3", "nuswide,1,gpq,12,0.8", "", "cifar10,1,pq,24,0.2"]
    path.write_text(head + "\n".join(rows) + "\n")
    for name in ("cifar10", "CIFAR-10 features", "cifar10 (JPEG)"):
        assert read_published(path, name, "1") == {("gpq", 12): 0.5, ("pq", 24): 0.2}
    assert read_published(path, "CIFAR-10", "2") == {("gpq", 12): 0.3}
    assert read_published(path, "NUS-WIDE", "1") == {("gpq", 12): 0.8}
    for name, protocol in (("digits", "1"), ("nuswide", "2"), ("cifar", "1")):
        with pytest.raises(
            DataError, match=r"has no figure of .* it has cifar10 protocol 1, cifar10 protocol 2, nuswide"
        ):
            read_published(path, name, protocol)
    for row, message in (
        ("cifar10,1,lsh,12,0.5", "no method 'lsh'"),
        ("cifar10,1,gpq,x,0.5", "'x' is no code length"),
        ("cifar10,1,gpq,12,58", "'58' is no mAP"),
        ("cifar10,1,gpq,12", "4 fields, not 5"),
        ("cifar10,1,gpq,12,0.1\ncifar10,1,gpq,12,0.1", "line 3: 'gpq' of 12 bits is there twice"),
    ):
        path.write_text(f"{head}{row}\n")
        with pytest.raises(DataError, match=message):
            read_published(path, "cifar10", "1")


def test_what_there_is_no_report_of(done: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"experiment\.json not found"):
        report_experiment(tmp_path)
    (tmp_path / "experiment.json").write_bytes((done / "experiment.json").read_bytes())
    with pytest.raises(DataError, match="no finished run"):
        report_experiment(tmp_path)
    with pytest.raises(
        UsageError, match="no table 'grid' here: choose one of map, likeness, depth, pr, seconds"
    ):
        report_experiment(done, table="grid")
    with pytest.raises(UsageError, match="format 'pdf'"):
        report_experiment(done, "pdf")  # type: ignore[arg-type]
    source = done / "pq_12bits_seed0.h5"
    (tmp_path / source.name).write_bytes(source.read_bytes()[:-3000])
    with pytest.raises(DataError) as caught:
        report_experiment(tmp_path)
    assert str(tmp_path / source.name) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_copy_of_a_run_is_no_other_seed(done: Path, tmp_path: Path) -> None:
    for name in ("experiment.json", "pq_12bits_seed0.h5"):
        (tmp_path / name).write_bytes((done / name).read_bytes())
    report_experiment(tmp_path)
    (tmp_path / "pq_12bits_seed0-copy.h5").write_bytes((done / "pq_12bits_seed0.h5").read_bytes())
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


# ------------------------------------------------------------------------------------------------------------- pictures


def test_pictures_of_a_table(done: Path, tmp_path: Path) -> None:
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
    assert all(
        path.suffix == ".svg" for path in draw_experiment(done, tmp_path / "plots", ending="svg").values()
    )


def test_the_page_has_the_tables_and_pictures_inside(done: Path, tmp_path: Path) -> None:
    page = save_report_page(done, tmp_path / "o.html").read_text()
    assert page.count("<svg") == len(draw_experiment(done, tmp_path / "plots"))
    for table in json.loads(report_experiment(done, "json"))["tables"].values():
        for row in table["rows"]:
            for cell in row.values():
                if isinstance(cell, dict):
                    assert f"{cell['mean']:.1f}" in page
            assert html.escape(str(row.get("method", ""))) in page
    with pytest.raises(OutputExistsError):
        save_report_page(done, tmp_path / "o.html")
    with pytest.raises(UsageError, match="a page ends in"):
        save_report_page(done, tmp_path / "o.pdf")


def test_galleries_show_the_images_of_the_runs(done: Path, tmp_path: Path) -> None:
    drawn = draw_experiment(done, tmp_path, images=DIGITS)
    assert {"gallery-1.png", "gallery-2.png", "gallery-3.png"} < {path.name for path in drawn.values()}
    caption = next(caption for caption, path in drawn.items() if path.name == "gallery-1.png")
    assert caption.endswith(f"from the top: {', '.join(rows_of(done))}")
    extremes = {
        path.name: caption for caption, path in drawn.items() if re.match("(Best|Worst) queries", caption)
    }
    assert sorted(extremes) == ["gallery-best.png", "gallery-worst.png"]
    experiment = read_experiment(done)
    run = next(
        run
        for run in runs_at(experiment, max(experiment.bits), experiment.labelled[-1])
        if run.seed == experiment.seeds[0] and row_name(experiment, run) == rows_of(done)[0]
    )
    ap = sorted(read_run(run.path, {"ap"}).arrays["ap"])
    assert extremes["gallery-best.png"].endswith(f"{rows_of(done)[0]}, AP {ap[-1]:.3f} to {ap[-5]:.3f}")
    assert extremes["gallery-worst.png"].endswith(f", AP {ap[0]:.3f} to {ap[4]:.3f}")
    page = save_report_page(done, tmp_path / "o.html", images=DIGITS).read_text()
    assert all(html.escape(caption) in page for caption in extremes.values())
    np.save(tmp_path / "x.npy", np.eye(20, dtype=np.float32))
    with pytest.raises(MismatchError, match="galleries need the images"):
        draw_experiment(done, tmp_path, images=open_data(f"features:{tmp_path / 'x.npy'}"), overwrite=True)


def test_runs_on_features_have_galleries_of_the_images_behind_them(tmp_path: Path) -> None:
    assert isinstance(DIGITS, ImageDataset)
    pixels = np.stack([image[:, :, 0].ravel() for image in DIGITS.read(np.arange(len(DIGITS)))])  # type: ignore[arg-type]
    labels = DIGITS.require_labels().dense().argmax(axis=1)

    def runs(name: str, order: Any, classes: Any) -> Path:
        np.save(tmp_path / f"{name}.npy", pixels[order].astype(np.float32))
        np.save(tmp_path / f"{name}-labels.npy", classes[order])
        data = open_data(f"features:{tmp_path / name}.npy", labels=str(tmp_path / f"{name}-labels.npy"))
        grid = small_grid(methods=["pq"], bits=[12], seeds=[0])
        assert not run_experiment(grid, data, tmp_path / name).failed
        return tmp_path / name

    # Classes may be numbered otherwise; items may not.
    same = runs("same", np.arange(len(labels)), 9 - labels)
    assert "gallery-3.png" in {
        path.name for path in draw_experiment(same, tmp_path / "p", images=DIGITS).values()
    }
    other = runs("other", np.random.default_rng(0).permutation(len(labels)), labels)
    with pytest.raises(MismatchError, match="its labels are not those of the runs"):
        draw_experiment(other, tmp_path / "q", images=DIGITS)


def test_sensitivity_has_a_table_and_a_picture_for_each_method_with_weights(tmp_path: Path) -> None:
    weights = {"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.2]}
    folder = made(
        tmp_path / "s",
        kind="sensitivity",
        methods=["gpq", "gpq-t", "pq"],
        bits=[12],
        seeds=[0],
        product=weights,
        config={"training": SMALL | {"steps": 2}},
    )
    tables = json.loads(report_experiment(folder, "json"))["tables"]
    assert list(tables) == ["grid-gpq", "grid-gpq-t"]
    for path in folder.glob("gpq*.h5"):
        arrays, about = read_arrays(path, "a run")
        loss = json.loads(about["settings"])["loss"]
        rows = tables[f"grid-{about['method']}"]["rows"]
        row = next(r for r in rows if r["method"] == f"λ1 = {loss['lambda1']:g}")
        assert row[f"λ2 = {loss['lambda2']:g}"]["mean"] == pytest.approx(arrays["ap"].mean())
    names = {path.name for path in draw_experiment(folder, tmp_path / "p").values()}
    assert names == {"sensitivity-gpq.png", "sensitivity-gpq-t.png"}
    # A number of labels more is a grid more, and no mean over both.
    more = tmp_path / "more"
    few = {
        "methods": ["gpq"],
        "bits": [12],
        "seeds": [0],
        "product": weights,
        "labelled": ["5-per-class", "20-per-class"],
    }
    made(more, kind="sensitivity", config={"training": SMALL | {"steps": 2}}, **few)
    value = json.loads(report_experiment(more, "json"))
    assert list(value["tables"]) == ["grid-5-per-class", "grid-20-per-class"]
    assert all(
        spec["n"] == 1
        for row in value["tables"]["grid-5-per-class"]["rows"]
        for spec in list(row.values())[1:]
    )
    # A corner that is missing leaves its spec empty, and the columns in order.
    for path in folder.glob("gpq_*lambda1-0.0-lambda2-0.0*.h5"):
        path.unlink()
    rows = json.loads(report_experiment(folder, "json"))["tables"]["grid-gpq"]["rows"]
    assert [list(row) for row in rows] == [["method", "λ2 = 0", "λ2 = 0.2"]] * 2
    assert rows[0]["λ2 = 0"] is None
    assert "(1 of 9 runs missing)" in report_experiment(folder, "latex")
    draw_experiment(folder, tmp_path / "p", overwrite=True)
    for path in folder.glob("gpq*.h5"):
        path.unlink()
    with pytest.raises(DataError, match="no run of GPQ"):
        report_experiment(folder)


def test_sensitivity_is_a_table_of_weights_and_a_heat_map(tmp_path: Path) -> None:
    folder = made(
        tmp_path / "s",
        kind="sensitivity",
        methods=["gpq"],
        bits=[12],
        seeds=[0],
        product={"loss.lambda1": [0.0, 0.1], "loss.lambda2": [0.0, 0.3, 0.1]},
        config={"training": SMALL | {"steps": 3}},
    )
    rows = json.loads(report_experiment(folder, "json"))["tables"]["grid"]["rows"]
    assert [row["method"] for row in rows] == ["λ1 = 0", "λ1 = 0.1"]
    assert list(rows[0]) == ["method", "λ2 = 0", "λ2 = 0.1", "λ2 = 0.3"]
    for path in folder.glob("*.h5"):
        arrays, about = read_arrays(path, "a run")
        loss = json.loads(about["settings"])["loss"]
        row = next(r for r in rows if r["method"] == f"λ1 = {loss['lambda1']:g}")
        assert row[f"λ2 = {loss['lambda2']:g}"]["mean"] == pytest.approx(arrays["ap"].mean())
    assert [path.name for path in draw_experiment(folder, tmp_path).values()] == ["sensitivity-12.png"]


def test_scale_tells_sizes_and_draws_lines(tmp_path: Path) -> None:
    sizes = [{"name": f"d{n}", "database": n} for n in (100, 10_000, 20_000)] + [
        {"name": "u", "unlabelled": 50}
    ]
    folder = made(tmp_path / "s", kind="scale", methods=["pq"], bits=[12], seeds=[0], variation=sizes)
    rows = json.loads(report_experiment(folder, "json"))["tables"]["scale"]["rows"]
    # What is larger than the data is the whole, and counts once.
    assert [(row["unlabelled"], row["database"]) for row in rows] == [(50, 1497), (1497, 1497), (1497, 100)]
    assert all(row["mAP"]["n"] == 1 for row in rows)
    names = {path.name for path in draw_experiment(folder, tmp_path).values()}
    assert names == {"unlabelled.png", "database.png", "rank.png"}


def test_scale_keeps_lengths_and_numbers_of_labels_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = made(
        tmp_path / "s",
        kind="scale",
        methods=["pq"],
        bits=[12, 24],
        seeds=[0],
        labelled=["5-per-class", "20-per-class"],
        variation=[{"name": f"d{n}", "database": n} for n in (100, 400)],
    )
    rows = json.loads(report_experiment(folder, "json"))["tables"]["scale"]["rows"]
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
    assert len(draw_experiment(folder, tmp_path / "p")) == len(drawn) == 2
    assert list(drawn[0]) == [f"pq, {bits} bits, {n} per class" for bits in (12, 24) for n in (5, 20)]
    sizes, values = drawn[0]["pq, 24 bits, 5 per class"]
    assert sizes.tolist() == [100, 400]
    assert values[1] == rows[4]["mAP"]["mean"]


def test_vectors_become_tsne_and_flat_codebooks(done: Path, tmp_path: Path) -> None:
    flat = {"training": SMALL | {"steps": 3}, "quantizer": {"subdim": 2}}
    folder = made(
        tmp_path / "v", kind="voronoi", methods=["gpq"], bits=[12], seeds=[0], config=flat, vectors=40
    )
    drawn = draw_experiment(folder, tmp_path)
    assert [path.name for path in drawn.values()] == ["voronoi.png"]
    assert list(drawn) == [
        "Codebooks in two dimensions, gpq, with 40 items of the database drawn at random by seed 0"
    ]
    about = json.loads((folder / "experiment.json").read_text())
    (folder / "experiment.json").write_text(json.dumps(about | {"kind": "tsne"}))
    drawn = draw_experiment(folder, tmp_path)
    assert [path.name for path in drawn.values()] == ["tsne.png"]
    assert "40 items of the database, drawn at random by seed 0" in next(iter(drawn))
    # No vectors, and codewords of more dimensions.
    about = json.loads((done / "experiment.json").read_text())
    try:
        (done / "experiment.json").write_text(json.dumps(about | {"kind": "tsne"}))
        with pytest.raises(DataError, match="no run keeps vectors"):
            draw_experiment(done, tmp_path / "none")
    finally:
        (done / "experiment.json").write_text(json.dumps(about))


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


def test_borders_of_cells_are_equally_near_to_two_codewords() -> None:
    rng = np.random.default_rng(1)
    Z = rng.standard_normal((16, 2))
    Z /= np.linalg.norm(Z, axis=1, keepdims=True)
    angles = cell_borders(Z)
    assert (np.diff(angles) > 0).all()
    nearness = np.sort(np.stack([np.cos(angles), np.sin(angles)], axis=1) @ Z.T, axis=1)
    np.testing.assert_allclose(nearness[:, -1], nearness[:, -2], atol=1e-12)
    # Each spec has one codeword.
    specs = np.searchsorted(angles, np.arctan2(Z[:, 1], Z[:, 0])) % 16
    assert sorted(specs) == list(range(16))


def test_pictures_refuse_what_they_cannot_draw(tmp_path: Path) -> None:
    out = tmp_path / "p.png"
    x = np.zeros((4, 2))
    for call in (
        lambda: plot_curves({}, out, x="x", y="y"),
        lambda: plot_curves({"a": ([1, 2], [1])}, out, x="x", y="y"),
        lambda: plot_heat_map([[1.0]], out, rows=["a", "b"], columns=["c"], x="x", y="y"),
        lambda: plot_heat_map([[np.nan]], out, rows=["a"], columns=["c"], x="x", y="y"),
        lambda: plot_scatters({}, [], out),
        lambda: plot_scatters({"a": (np.zeros((4, 3)), np.zeros(4, int))}, ["0"], out),
        lambda: plot_codebooks([], [], out),
        lambda: plot_codebooks([FlatCodebook("a", np.zeros((4, 3)), x, np.zeros(4, int))], ["0"], out),
    ):
        with pytest.raises(DataError):
            call()
    assert not out.exists()
    names = [f"class {i}" for i in range(30)]
    plot_scatters({"a": (x, np.array([-1, 3, 12, 29]))}, names, out, title="t")
    assert out.read_bytes()[:4] == PNG


@pytest.mark.parametrize(
    ("backbone", "perceptron", "expected"),
    [
        ("auto", True, "Class networks are trained at 2 times"),
        ("mlp", False, "Class networks are trained at 2 times"),
        ("auto", False, "Class networks over convolutions, and these, are trained at 0.5 times"),
        ("vgg", True, "Class networks over convolutions, and these, are trained at 0.5 times"),
    ],
)
def test_the_rate_of_class_networks_is_that_of_their_network(
    backbone: str, perceptron: bool, expected: str
) -> None:
    settings = to_dict(merge(preset("recommended"), {"network": {"backbone": backbone}}))
    about = {"settings": settings, "counts": {"labelled": 500, "unlabelled": 500}, "steps": 800}
    run = SimpleNamespace(about=about, bits=48, method="posterior", variation="")
    experiment: Any = SimpleNamespace(
        about={"data": {"perceptron": perceptron}}, runs=[run], one_method=False
    )
    (rate,) = [line for line in report._budget(experiment) if line.startswith("Class networks")]
    assert rate.startswith(expected)

"""What a report says of runs that are not there, in folders that several calls and versions have filled."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from experiment.experiments import SMALL, small_grid

from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data
from gpq_faiss.experiment.report import scale_rows, weight_panels
from gpq_faiss.experiment.results import Experiment, Run, missing_runs, read_experiment, row_names
from gpq_faiss.experiment.run import note_planned, run_experiment
from gpq_faiss.experiment.specs import plan

DIGITS = open_data("digits")


def made(folder: Path, **changes: Any) -> Path:
    assert not run_experiment(small_grid(**changes), DIGITS, folder).failed
    return folder


def ask(folder: Path, **changes: Any) -> None:
    """As a call that is cut off before its first run."""
    specs = plan(small_grid(**changes), DIGITS, preset("paper")).specs
    note_planned(folder, specs)


def test_what_is_missing_is_called_as_the_tables_call_it(tmp_path: Path) -> None:
    one = [{"name": "short", "config": {"training": SMALL | {"steps": 2}}}]
    folder = made(tmp_path / "x", methods=["gpq"], bits=[12], seeds=[0], variation=one)
    assert row_names(read_experiment(folder)) == ["short"]
    ask(folder, methods=["gpq", "pq"], bits=[12], seeds=[0, 1], variation=one)
    experiment = read_experiment(folder)
    assert row_names(experiment) == ["gpq (short)"]
    assert dict(missing_runs(experiment).runs) == {
        "gpq (short)": ("12 bits seed 1",),
        "pq (short)": ("12 bits seed 0", "12 bits seed 1"),
    }


def test_labels_of_which_no_run_is_there_are_named(tmp_path: Path) -> None:
    labels = ["20-per-class", "10-per-class"]
    folder = made(tmp_path / "x", methods=["pq"], bits=[12], seeds=[0], labelled=labels)
    for path in folder.glob("*10-per-class*.h5"):
        path.unlink()
    missing = missing_runs(read_experiment(folder))
    assert (dict(missing.runs), missing.asked) == ({"pq, 10 per class": ("12 bits seed 0",)}, 2)


def test_runs_of_a_method_that_is_no_more_are_reported_last(tmp_path: Path) -> None:
    experiment = read_experiment(made(tmp_path / "x", methods=["gpq", "pq"], bits=[12], seeds=[0]))

    def renamed(run: Run) -> Run:
        return dataclasses.replace(run, about=run.about | {"method": "old"}) if run.method == "pq" else run

    old: Experiment = dataclasses.replace(experiment, runs=tuple(map(renamed, experiment.runs))[::-1])
    assert [row["method"] for row in scale_rows(old)] == ["gpq", "old"]
    assert [panel.method for panel in weight_panels(old)] == ["gpq"]

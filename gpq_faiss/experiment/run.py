"""Run the missing runs of a grid.

    grid, data  ─►  FOLDER/  (experiment.json, split_HASH.json, one HDF5 per run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only runs that are
missing, failed or outdated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import Config, preset, to_dict
from ..data.base import Dataset
from ..data.open import open_data
from ..errors import DataError, MismatchError, UsageError
from ..files import check_output, read_json, recover, write_json
from ..methods.measure import needs_perceptron
from ..nn.device import resolve_device
from ..progress import stage
from .grid import Grid, read_grid, refuse_the_grids_own
from .specs import RunSpec, plan
from .workers import RunContext, RunResult, make_again, make_runs, tidy

log = logging.getLogger(__name__)

ABOUT = "experiment.json"
_FORMAT = 1
_NEEDED: dict[str, type] = {
    "grid": str,
    "title": str,
    "kind": str,
    "data": dict,
    "protocol": str,
    "labelled": list,
    "preset": str,
    "changes": dict,
    "variations": list,
    "left_out": dict,
    "failed": dict,
    "planned": dict,
}

Progress = Callable[..., None]
"""Called with the number of finished runs and of all runs."""


@dataclass
class Summary:
    """Summary of a call.

    Attributes:
        folder: of the experiment.
        total: number of runs of the grid.
        there: number of runs finished before.
        made: number of runs finished by this call.
        failed: name of a run -> reason.
        elsewhere: runs in progress in another process.
        left_out: method -> reason why it has no run.
    """

    folder: Path
    total: int = 0
    there: int = 0
    made: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)

    def add(self, result: RunResult) -> None:
        """Count and log a run that has ended."""
        spec = result.spec
        if result.status == "done":
            self.made += 1
            seconds = ", ".join(f"{k} {v:.1f} s" for k, v in result.seconds.items())
            n = self.there + self.made
            log.info("%s: mAP %.4f (%s) [%d of %d]", spec.label, result.map, seconds, n, self.total)
        elif result.status == "failed":
            self.failed[spec.name] = result.text
            log.warning("%s failed: %s", spec.label, result.text)
        else:
            self.elsewhere.append(spec.name)
            log.info("%s: %s", spec.label, result.text)


def plain_name(dataset: Dataset) -> str:
    """The data set's name without folders, which differ between machines."""
    kind, colon, path = dataset.name.partition(":")
    return f"{kind}:{Path(path).name}" if colon else Path(kind).name


def run_experiment(  # noqa: PLR0913
    grid: Grid | str | Path,
    data: object,
    out: str | Path,
    *,
    dataset: Dataset | None = None,
    data_args: Mapping[str, Any] | None = None,
    base: Config | None = None,
    device: str = "cpu",
    jobs: int = 1,
    data_name: str | None = None,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
    progress: Progress | None = None,
) -> Summary:
    """Run all runs of ``grid`` that are missing in the folder ``out``.

    Args:
        grid: a grid, the name of a built-in one, or a TOML file.
        data: anything that :func:`gpq_faiss.open_data` accepts; several jobs need a DATA name.
        out: folder of the experiment.
        dataset: the opened ``data``, if available.
        data_args: for :func:`gpq_faiss.data.open.open_data`.
        base: base settings of trained methods (default: the grid's preset).
        device: device of networks.
        jobs: concurrent runs, each in its own process with one thread.
        data_name: name of the data in tables (default: the data set's name without folders).
        overwrite: repeat finished runs; each is replaced once the new one is complete. If interrupted, the next call makes the
            remaining ones, with or without ``overwrite``.
        checkpoint_seconds: time between checkpoints of a training.
        progress: called when a run ends.

    Raises:
        UsageError: an invalid grid, setting or option.
        DataError: data that cannot be read or split; a folder that cannot be written.
        MismatchError: the folder contains another experiment.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs: it must be at least 1")
    if jobs > 1 and not isinstance(data, str):
        raise UsageError("several jobs open the data themselves: give its name, not a data set")
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    base = base or preset(grid.preset)
    refuse_the_grids_own(_changes(base))
    resolve_device(device)
    folder = _check_folder(out)
    if dataset is None:
        dataset = open_data(data, **(data_args or {}))
    planned = plan(grid, dataset, base)
    about = _about(grid, dataset, base, data_name or plain_name(dataset), planned.left_out)
    folder.mkdir(exist_ok=True)
    about = _begin(folder, about, renamed=data_name is not None)
    for spec in planned.specs:
        path = folder / f"split_{spec.split_hash}.json"
        recover(path)
        if not path.exists():
            spec.split(dataset).save(path)
    context = RunContext(
        folder,
        grid.name,
        data if isinstance(data, str) else "",
        dict(data_args or {}),
        about["data"]["name"],
        device,
        checkpoint_seconds,
    )
    if overwrite:
        make_again(context, planned.specs)
    done: list[RunSpec] = []
    todo: list[RunSpec] = []
    for spec in planned.specs:
        (done if context.done(spec) else todo).append(spec)
    note_planned(folder, planned.specs)
    tidy(context, done)
    summary = Summary(folder, len(planned.specs), len(done), left_out=planned.left_out)
    for name, why in planned.left_out.items():
        log.info("%s is left out: %s", name, why)
    if done:
        log.info("%d of %d runs are done", summary.there, summary.total)
    if progress is not None:
        progress(summary.there, summary.total)
    with stage(grid.name, summary.total, "run", done=summary.there) as runs:

        def report(result: RunResult) -> None:
            summary.add(result)
            runs.advance()
            if progress is not None:
                progress(summary.there + summary.made + len(summary.failed), summary.total)

        try:
            make_runs(context, todo, dataset=dataset, jobs=jobs, report=report)
        finally:
            _note_failures(folder, planned.specs, summary)
    return summary


def _check_folder(out: str | Path) -> Path:
    folder = check_output(out, overwrite=True, folder=True)
    foreign = folder.exists() and not (folder / ABOUT).exists()
    if foreign and any(not path.name.startswith(".") for path in folder.iterdir()):
        raise DataError(f"{folder} holds something other than an experiment: choose another --out")
    return folder


def _changes(base: Config) -> dict[str, Any]:
    """The settings in which ``base`` differs from its preset, nested."""
    of_preset, now = to_dict(preset(base.preset)), to_dict(base)
    changed: dict[str, Any] = {}
    for section, values in now.items():
        if isinstance(values, dict):
            different = {k: v for k, v in values.items() if v != of_preset[section][k]}
            if different:
                changed[section] = different
    return changed


def _about(
    grid: Grid, dataset: Dataset, base: Config, data_name: str, left_out: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "experiment_format": _FORMAT,
        "grid": grid.name,
        "title": grid.title,
        "kind": grid.kind,
        "data": {
            "name": data_name,
            "fingerprint": dataset.fingerprint,
            "kind": dataset.kind,
            "perceptron": needs_perceptron(dataset),
            "items": len(dataset),
            "notes": list(dataset.notes),
        },
        "protocol": grid.protocol,
        "labelled": list(grid.labelled),
        "queries": grid.queries,
        "preset": base.preset,
        "changes": _changes(base),
        "variations": [variation.name for variation in grid.variations],
        "left_out": dict(left_out),
        "failed": {},
        "planned": {},
    }


def read_about(folder: str | Path) -> dict[str, Any]:
    """The ``experiment.json`` of a folder.

    Raises:
        DataError: it is missing or damaged.
        MismatchError: it has another format.
    """
    path = Path(folder) / ABOUT
    about = read_json(path, "an experiment (gpq experiment run makes one)")
    if not isinstance(about, dict) or about.get("experiment_format") != _FORMAT:
        raise MismatchError(f"{path} is not an experiment of this version: choose another folder")
    for key, kind in _NEEDED.items():
        if not isinstance(about.get(key), kind):
            raise DataError(f"{path} is damaged ({key!r} is missing or wrong): choose another folder")
    return about


def _begin(folder: Path, about: dict[str, Any], *, renamed: bool) -> dict[str, Any]:
    """Write the description of the folder, or check that it agrees; keeps methods left out, failures and planned runs."""
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, about)
        return about
    before = read_about(folder)
    for what in ("grid", "protocol", "labelled", "queries", "preset", "changes"):
        if before.get(what) != about[what]:
            raise MismatchError(
                f"{folder} holds an experiment with {what} {before.get(what) or 'not set'}, not {about[what] or 'not set'}: "
                "choose another --out"
            )
    if before["data"]["fingerprint"] != about["data"]["fingerprint"]:
        raise MismatchError(
            f"{folder} holds runs on {before['data']['name']}, and these data differ: choose another --out"
        )
    merged = (
        before
        | about
        | {
            "data": about["data"] if renamed else before["data"],
            "left_out": before["left_out"] | about["left_out"],
            "failed": before["failed"],
            "planned": before["planned"],
        }
    )
    write_json(folder / ABOUT, merged)
    return merged


def note_planned(folder: Path, specs: tuple[RunSpec, ...]) -> None:
    """Record the runs requested by this call and earlier ones, so that reports can list missing ones."""
    about = read_about(folder)
    asked = {
        spec.name: {
            "method": spec.method,
            "bits": spec.bits,
            "seed": spec.seed,
            "variation": spec.variation,
            "labelled": spec.labelled,
            "identity": spec.identity,
        }
        for spec in specs
    }
    # Variations that are no longer in the grid are not expected.
    before = {name: run for name, run in about["planned"].items() if run["variation"] in about["variations"]}
    write_json(folder / ABOUT, about | {"planned": before | asked})


def _note_failures(folder: Path, specs: tuple[RunSpec, ...], summary: Summary) -> None:
    """Record why runs failed, for the report; removes runs that are done by now."""
    about = read_about(folder)
    failed = {
        name: why
        for name, why in about["failed"].items()
        if name not in {spec.name for spec in specs} and not (folder / f"{name}.h5").exists()
    }
    write_json(folder / ABOUT, about | {"failed": failed | summary.failed})

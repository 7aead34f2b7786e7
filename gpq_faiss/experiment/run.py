"""Run the missing runs of a grid.

    grid, data  ─►  FOLDER/  (experiment.json, split_HASH.json, one HDF5 per run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only runs that are
missing, failed or outdated.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

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


class _About(BaseModel):
    """What ``experiment.json`` must hold."""

    model_config = ConfigDict(strict=True)

    grid: str
    title: str
    kind: str
    data: dict[str, Any]
    protocol: str
    labelled: list[str | None]
    preset: str
    changes: dict[str, dict[str, Any]]
    variations: list[str]
    left_out: dict[str, str]
    failed: dict[str, str]
    planned: dict[str, dict[str, Any]]


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


def run_experiment(  # noqa: PLR0913
    grid: Grid | str | Path,
    data: object,
    out: str | Path,
    *,
    data_args: Mapping[str, Any] | None = None,
    base: Config | None = None,
    device: str = "cpu",
    jobs: int = 1,
    data_name: str | None = None,
    overwrite: bool = False,
    checkpoint_seconds: float = 60.0,
) -> Summary:
    """Run all runs of ``grid`` that are missing in the folder ``out``.

    Args:
        grid: a grid, the name of a built-in one, or a TOML file.
        data: anything that :func:`gpq_faiss.open_data` accepts; several jobs need a DATA name.
        out: folder of the experiment.
        data_args: for :func:`gpq_faiss.data.open.open_data`.
        base: base settings of trained methods (default: the grid's preset).
        device: device of networks.
        jobs: concurrent runs, each in its own process with one thread.
        data_name: name of the data in tables (default: the data set's name without folders).
        overwrite: repeat finished runs; each is replaced once the new one is complete. If interrupted, the next call makes the
            remaining ones, with or without ``overwrite``.
        checkpoint_seconds: time between checkpoints of a training.

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
    folder = check_output(out, overwrite=True, folder=True)
    if folder.exists() and not (folder / ABOUT).exists() and any(folder.glob("[!.]*")):
        raise DataError(f"{folder} holds something other than an experiment: choose another --out")
    dataset = open_data(data, **(data_args or {}))
    specs, left_out = plan(grid, dataset, base)
    folder.mkdir(exist_ok=True)
    about = describe(grid, dataset, base, data_name, left_out)
    about = begin(folder, about, specs, renamed=data_name is not None)
    for spec in specs:
        path = folder / f"split_{spec.split_hash}.json"
        recover(path)
        if not path.exists():
            spec.split(dataset).save(path)
    context = RunContext(folder, about, data, dict(data_args or {}), device, checkpoint_seconds)
    if overwrite:
        make_again(context, specs)
    done = [spec for spec in specs if context.done(spec)]
    tidy(context, done)
    summary = Summary(folder, len(specs), len(done), left_out=left_out)
    for name, why in left_out.items():
        log.info("%s is left out: %s", name, why)
    if done:
        log.info("%d of %d runs are done", len(done), len(specs))
    with stage(grid.name, len(specs), "run", done=len(done)) as runs:

        def report(result: RunResult) -> None:
            summary.add(result)
            runs.advance()

        names = {spec.name for spec in done}
        todo = [spec for spec in specs if spec.name not in names]
        try:
            make_runs(context, todo, dataset=dataset, jobs=jobs, report=report)
        finally:
            _note_failures(folder, specs, summary.failed)
    return summary


def _changes(base: Config) -> dict[str, dict[str, Any]]:
    """The settings in which ``base`` differs from its preset, nested."""
    original, now = to_dict(preset(base.preset)), to_dict(base)
    changed = {
        section: {k: v for k, v in values.items() if v != original[section].get(k)}
        for section, values in now.items()
        if isinstance(values, dict)
    }
    return {section: values for section, values in changed.items() if values}


# The folder's description -----------------------------------------------------------------------------------------------


def describe(
    grid: Grid, dataset: Dataset, base: Config, data_name: str | None, left_out: Mapping[str, str]
) -> dict[str, Any]:
    kind, _, path = dataset.name.partition(":")
    plain = (
        f"{kind}:{Path(path).name}" if path else Path(kind).name
    )  # without folders, which differ between machines
    return {
        "experiment_format": _FORMAT,
        "grid": grid.name,
        "title": grid.title,
        "kind": grid.kind,
        "data": {
            "name": data_name or plain,
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
    try:
        _About.model_validate(about)
    except ValidationError as error:
        wrong = error.errors()[0]["loc"][0]
        raise DataError(f"{path} is damaged ({wrong!r} is missing or wrong): choose another folder") from None
    return about


def begin(folder: Path, about: dict[str, Any], specs: Sequence[RunSpec], *, renamed: bool) -> dict[str, Any]:
    """Write the description of the folder with the runs that are requested now, or check that it agrees. What earlier calls requested,
    left out and failed to make is kept, so that reports can list it."""
    planned = {spec.name: {"variation": spec.variation, "identity": spec.identity} for spec in specs}
    if (folder / ABOUT).exists():
        before = read_about(folder)
        for what in ("grid", "protocol", "labelled", "queries", "preset", "changes"):
            old, new = (of.get(what) or "not set" for of in (before, about))
            if old != new:
                raise MismatchError(
                    f"{folder} holds an experiment with {what} {old}, not {new}: choose another --out"
                )
        if before["data"]["fingerprint"] != about["data"]["fingerprint"]:
            raise MismatchError(
                f"{folder} holds runs on {before['data']['name']}, and these data differ: choose another --out"
            )
        # Variations that are no longer in the grid are not expected.
        kept = {k: run for k, run in before["planned"].items() if run["variation"] in about["variations"]}
        planned = kept | planned
        left_out = before["left_out"] | about["left_out"]
        about = about | {"left_out": left_out, "failed": before["failed"]}
        about |= {} if renamed else {"data": before["data"]}
    about = about | {"planned": planned}
    write_json(folder / ABOUT, about)
    return about


def _note_failures(folder: Path, specs: Sequence[RunSpec], failed: Mapping[str, str]) -> None:
    """Record why runs failed, for the report; forget those of runs that are done by now."""
    about = read_about(folder)
    here = {spec.name for spec in specs}
    before = {
        name: why
        for name, why in about["failed"].items()
        if name not in here and not (folder / f"{name}.h5").exists()
    }
    write_json(folder / ABOUT, about | {"failed": {**before, **failed}})

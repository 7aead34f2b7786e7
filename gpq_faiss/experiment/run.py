"""Running a grid: which runs are missing, making them, and what failed.

    grid, data  ─►  FOLDER/  (experiment.json, split_HASH.json, one HDF5 a run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only what is missing or would
come out otherwise now; what failed is tried again.
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
from ..nn.device import resolve_device
from ..progress import stage
from ..stages.evaluate import needs_perceptron
from .cells import Cell, plan
from .grid import Grid, read_grid, refuse_the_grids_own
from .workers import Finished, Place, make_again, run_cells, tidy

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
}

Progress = Callable[..., None]
"""Called with runs done and all runs."""


@dataclass
class Summary:
    """What a call did.

    Attributes:
        folder: of the experiment.
        total: runs of the grid.
        there: runs that were done before.
        made: runs that this call made.
        failed: name of a run -> why.
        elsewhere: runs that another process is at.
        left_out: method -> why it has none.
    """

    folder: Path
    total: int = 0
    there: int = 0
    made: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    left_out: Mapping[str, str] = field(default_factory=dict)


def plain_name(dataset: Dataset) -> str:
    """The data set's name without folders, which are one machine's own."""
    kind, colon, path = dataset.name.partition(":")
    return f"{kind}:{Path(path).name}" if colon else Path(kind).name


def run_experiment(
    grid: Grid | str | Path,
    data: Dataset | str,
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
    """Make all runs of ``grid`` that are missing in the folder ``out``.

    Args:
        grid: a grid, the name of a built-in one, or a TOML file.
        data: a data set, or its name as on the command line; several jobs need the name.
        out: folder of the experiment.
        dataset: ``data`` opened, where the caller has done that already.
        data_args: for :func:`gpq_faiss.data.open.open_data`.
        base: settings of the trained methods that the grid's own change; default: its preset.
        device: where networks run.
        jobs: runs at a time, each on one thread in a process of its own.
        data_name: what tables call the data; default: the data set's name without folders.
        overwrite: make also those again that are done; each is replaced once it is made. If that is cut off, the next call
            makes the rest of them, with or without ``overwrite``.
        checkpoint_seconds: between two checkpoints of a training.
        progress: called as runs end.

    Raises:
        UsageError: a grid, a setting or an option that cannot be.
        DataError: data that cannot be read or split; a folder that cannot be written.
        MismatchError: the folder holds another experiment.
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
    if (
        folder.exists()
        and not (folder / ABOUT).exists()
        and any(not path.name.startswith(".") for path in folder.iterdir())
    ):
        raise DataError(f"{folder} holds something else than an experiment: choose another --out")
    if dataset is None:
        dataset = open_data(data, **(data_args or {})) if isinstance(data, str) else data
    planned = plan(grid, dataset, base)
    about = _about(grid, dataset, base, data_name or plain_name(dataset), planned.left_out)
    folder.mkdir(exist_ok=True)
    about = _begin(folder, about, renamed=data_name is not None)
    for cell in planned.cells:
        path = folder / f"split_{cell.split_hash}.json"
        recover(path)
        if not path.exists():
            cell.split(dataset).save(path)
    place = Place(
        folder,
        grid.name,
        data if isinstance(data, str) else "",
        dict(data_args or {}),
        about["data"]["name"],
        device,
        checkpoint_seconds,
    )
    if overwrite:
        make_again(place, planned.cells)
    done = {cell.name: place.done(cell) for cell in planned.cells}
    todo = [cell for cell in planned.cells if done[cell.name] is None]
    note_planned(folder, planned.cells, done)
    tidy(place, [cell for cell in planned.cells if done[cell.name] is not None])
    summary = Summary(folder, len(planned.cells), len(planned.cells) - len(todo), left_out=planned.left_out)
    for name, why in planned.left_out.items():
        log.info("%s is left out: %s", name, why)
    if summary.there:
        log.info("%d of %d runs are done", summary.there, summary.total)

    def tell(finished: Finished) -> None:
        cell = finished.cell
        if finished.status == "done":
            summary.made += 1
            seconds = ", ".join(f"{k} {v:.1f} s" for k, v in finished.seconds.items())
            log.info(
                "%s: mAP %.4f (%s) [%d of %d]",
                cell.label,
                finished.map,
                seconds,
                summary.there + summary.made,
                summary.total,
            )
        elif finished.status == "failed":
            summary.failed[cell.name] = finished.text
            log.warning("%s failed: %s", cell.label, finished.text)
        else:
            summary.elsewhere.append(cell.name)
            log.info("%s: %s", cell.label, finished.text)
        runs.advance()
        if progress is not None:
            progress(summary.there + summary.made + len(summary.failed), summary.total)

    if progress is not None:
        progress(summary.there, summary.total)
    with stage(grid.name, summary.total, "run", done=summary.there) as runs:
        try:
            run_cells(place, todo, dataset=dataset, jobs=jobs, tell=tell)
        finally:
            _note_failures(folder, planned.cells, summary)
    return summary


def _changes(base: Config) -> dict[str, Any]:
    """What ``base`` changes of its preset, nested."""
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
    """What ``experiment.json`` of a folder says.

    Raises:
        DataError: it is missing or damaged.
        MismatchError: it is of another format.
    """
    path = Path(folder) / ABOUT
    about = read_json(path, "an experiment (gpq experiment run makes one)")
    if not isinstance(about, dict) or about.get("experiment_format") != _FORMAT:
        raise MismatchError(f"{path} is no experiment of this version: choose another folder")
    for key, kind in _NEEDED.items():
        if not isinstance(about.get(key), kind):
            raise DataError(f"{path} is damaged ({key!r} is missing or wrong): choose another folder")
    return about


def _begin(folder: Path, about: dict[str, Any], *, renamed: bool) -> dict[str, Any]:
    """Write what the folder is, or check that it is just that; methods left out and failures are carried on."""
    if not (folder / ABOUT).exists():
        write_json(folder / ABOUT, about)
        return about
    before = read_about(folder)
    for what in ("grid", "protocol", "labelled", "queries", "preset", "changes"):
        if before.get(what) != about[what]:
            raise MismatchError(
                f"{folder} holds an experiment with {what} {before.get(what) or 'as it is'}, not {about[what] or 'as it is'}: "
                "choose another --out"
            )
    if before["data"]["fingerprint"] != about["data"]["fingerprint"]:
        raise MismatchError(
            f"{folder} holds runs on {before['data']['name']}, and these data are others: choose another --out"
        )
    merged = (
        before
        | about
        | {
            "data": about["data"] if renamed else before["data"],
            "left_out": before.get("left_out", {}) | about["left_out"],
            "failed": before.get("failed", {}),
            "planned": before.get("planned", {}),
        }
    )
    write_json(folder / ABOUT, merged)
    return merged


def note_planned(folder: Path, cells: tuple[Cell, ...], done: Mapping[str, str | None]) -> None:
    """Keep which runs were asked for, in this call and those before it, so that a report can tell which of them are missing.

    With each goes the identity of the file that counts as it: of one that is done, its own.
    """
    about = read_about(folder)
    asked = {
        cell.name: {
            "method": cell.method,
            "bits": cell.bits,
            "seed": cell.seed,
            "variation": cell.variation,
            "labelled": cell.labelled,
            "identity": done[cell.name] or cell.identity,
        }
        for cell in cells
    }
    # A variation that the grid has no more is not waited for.
    before = {
        name: run for name, run in about.get("planned", {}).items() if run["variation"] in about["variations"]
    }
    write_json(folder / ABOUT, about | {"planned": before | asked})


def _note_failures(folder: Path, cells: tuple[Cell, ...], summary: Summary) -> None:
    """Keep why runs failed for the report; runs that are done by now are forgotten."""
    about = read_about(folder)
    failed = {
        name: why
        for name, why in about.get("failed", {}).items()
        if name not in {cell.name for cell in cells} and not (folder / f"{name}.h5").exists()
    }
    write_json(folder / ABOUT, about | {"failed": failed | summary.failed})

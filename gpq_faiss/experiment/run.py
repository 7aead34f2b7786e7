"""Run the missing runs of a grid.

    grid, data  ─►  FOLDER/  (experiment.json, split_HASH.json, one HDF5 per run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only
runs that are missing or outdated, and continues interrupted trainings from their checkpoints in
``FOLDER/.partial``. A failed run is reported in one line and does not stop the others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import shutil
import traceback
from collections.abc import Generator, Mapping
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from joblib import Parallel, delayed

from ..data.base import Dataset
from ..data.open import open_data
from ..data.protocols import make_split
from ..errors import DataError, GpqError, UsageError, one_line
from ..files import check_output, unfinished
from ..nn.device import resolve_device
from ..progress import stage
from ..training.loop import RunOptions
from .compute import compute
from .grid import Grid, read_grid
from .plan import RunSpec, describe_plan, plan
from .runs import DESCRIPTION, begin, is_done, read_run, write_run

log = logging.getLogger(__name__)

CHECKPOINT_SECONDS = 60.0
"""Time between checkpoints of a training."""

_PARTIAL = ".partial"


@dataclass
class Summary:
    """Result of a call.

    Attributes:
        total: number of runs of the grid.
        existing, completed: number of runs that earlier calls and this one completed.
        failed: name of a run -> why it failed.
        left_out: method -> why it has no run.
    """

    folder: Path
    total: int
    existing: int
    completed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What all runs of an experiment share, sent to its processes."""

    folder: Path
    data: Any
    data_args: Mapping[str, Any] = field(hash=False)
    description: Mapping[str, str] = field(hash=False)
    device: str
    checkpoint_seconds: float

    def work(self, spec: RunSpec) -> Path:
        """Return the folder of the unfinished work of a run."""
        return self.folder / _PARTIAL / f"{spec.name}-{spec.identity}"


def run_experiment(
    grid: Grid | str | Path,
    data: object,
    out: str | Path,
    *,
    data_args: Mapping[str, Any] | None = None,
    device: str = "cpu",
    jobs: int = 1,
    data_name: str | None = None,
    overwrite: bool = False,
) -> Summary:
    """Run all runs of ``grid`` that are missing in the folder ``out``.

    Args:
        grid: a grid, the name of a built-in one, or a TOML file.
        data: anything that :func:`gpq_faiss.open_data` accepts; several jobs need a DATA name.
        out: folder of the experiment.
        data_args: arguments of :func:`gpq_faiss.open_data`.
        device: device of networks.
        jobs: number of concurrent runs, each in a process with one thread.
        data_name: name of the data in tables (default: the data set's name without folders).
        overwrite: repeat finished runs; each is replaced once the new one is complete.

    Raises:
        UsageError: an invalid grid, setting or option.
        DataError: data that cannot be read or split; a folder that cannot be written.
        BusyError: another process works in the folder.
        MismatchError: the folder contains another experiment.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs: it must be at least 1")
    if jobs > 1 and not isinstance(data, str):
        raise UsageError("several jobs open the data themselves: give its name, not a data set")
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    resolve_device(device)
    folder = check_output(out, overwrite=True, folder=True)
    if folder.exists() and not (folder / DESCRIPTION).exists() and any(folder.glob("[!.]*")):
        raise DataError(f"{folder} holds something other than an experiment: choose another --out")
    dataset = open_data(data, **(data_args or {}))
    specs, left_out = plan(grid, dataset)
    log.info(describe_plan(specs))
    for name, reason in left_out.items():
        log.info("%s is left out: %s", name, reason)
    keep: list[str] = []
    with unfinished(folder / _PARTIAL, folder, keep=keep):
        description = begin(folder, grid, dataset, specs, left_out, data_name)
        keep += [f"{name}-{identity}" for name, (_, identity) in description.planned.items()]
        context = RunContext(
            folder, data, data_args or {}, description.data, device, CHECKPOINT_SECONDS
        )
        todo = []
        for spec in specs:
            split = folder / f"split_{spec.split_hash}.json"
            if not split.exists():
                make_split(dataset, **spec.split_args).save(split)
            if overwrite or not is_done(folder / f"{spec.name}.h5", spec):
                todo.append(spec)
            else:  # the process may have been killed before it removed this
                shutil.rmtree(context.work(spec), ignore_errors=True)
        summary = Summary(folder, len(specs), len(specs) - len(todo), left_out=left_out)
        results: Generator[tuple[str, str]] = (
            (spec.name, complete_run(context, dataset, spec)) for spec in todo
        )
        if jobs > 1 and len(todo) > 1:
            processes = Parallel(n_jobs=jobs, return_as="generator_unordered")
            results = processes(delayed(_complete_in_process)(context, spec) for spec in todo)
        progress = stage(grid.name, len(specs), "run", done=summary.existing)
        try:
            with contextlib.closing(results), progress as runs:
                for name, failure in results:
                    runs.advance()
                    if failure:
                        summary.failed[name] = failure
                        log.warning("%s failed: %s", name, failure)
                        continue
                    summary.completed += 1
                    run = read_run(folder / f"{name}.h5")
                    seconds = ", ".join(f"{k} {v:.1f} s" for k, v in run.seconds.items())
                    log.info("%s: mAP %.4f (%s)", name, run.map, seconds)
        except BrokenProcessPool:
            raise DataError(
                f"{folder}: a process was killed (out of memory?): run the same command again, "
                "with fewer --jobs"
            ) from None
    return summary


def complete_run(context: RunContext, dataset: Dataset, spec: RunSpec) -> str:
    """Execute one run and write its file.

    Returns why it failed, empty if it did not; only signals are raised.
    """
    work = context.work(spec)
    try:
        device = str(resolve_device(context.device))
        options = RunOptions(device, True, checkpoint_seconds=context.checkpoint_seconds)
        arrays, measured = compute(spec, dataset, work, options)
        path = context.folder / f"{spec.name}.h5"
        write_run(path, spec, context.description, arrays, measured)
        shutil.rmtree(work, ignore_errors=True)
    except GpqError as error:
        return one_line(error, 500)
    except Exception as error:  # a defect of one method must not stop the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__} in {line}: {one_line(error, 500)}"
    return ""


@functools.cache
def _open_once(context: RunContext) -> Dataset:
    return open_data(context.data, **context.data_args)


def _complete_in_process(context: RunContext, spec: RunSpec) -> tuple[str, str]:
    return spec.name, complete_run(context, _open_once(context), spec)

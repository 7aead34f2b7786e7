"""Run the missing runs of a grid.

    grid, data  ─►  FOLDER/  (experiment.json, split_HASH.json, one HDF5 per run)

A folder holds one experiment: one grid on one data set under one protocol. A second call makes only runs that are missing or outdated,
and continues interrupted trainings from their checkpoints in ``FOLDER/.partial``. A failed run is reported in one line and does not stop
the others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.base import Dataset
from ..data.open import open_data
from ..data.protocols import make_split
from ..errors import DataError, GpqError, UsageError, one_line
from ..files import check_output, unfinished
from ..nn.device import resolve_device
from ..progress import stage
from ..signals import ended_by_signals
from ..training.loop import RunOptions
from .compute import compute
from .grid import Grid, read_grid
from .runs import ABOUT, RunSpec, begin, is_done, plan, read_run, write_run

log = logging.getLogger(__name__)

PRELOADED = [
    __name__,
    "gpq_faiss.methods.gpq",
    "gpq_faiss.methods.posterior",
    "gpq_faiss.evaluation.kernels",
    "torch._dynamo",
]
"""What every process of an experiment needs, the last by torch's first optimiser: 1.7 s of each process, if it is imported there."""

_PARTIAL = ".partial"


@dataclass
class Summary:
    """A call: numbers of runs of the grid, of those that were there before, and of those made; name of a failed run -> reason; method ->
    reason why it has no run."""

    folder: Path
    total: int
    there: int
    made: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunContext:
    """What all runs of an experiment share, sent to its processes; ``about`` is its description."""

    folder: Path
    about: Mapping[str, Any] = field(hash=False)
    data: object
    data_args: Mapping[str, Any] = field(hash=False)
    device: str
    checkpoint_seconds: float

    def work(self, spec: RunSpec) -> Path:
        """Folder of a run's unfinished work."""
        return self.folder / _PARTIAL / f"{spec.name}-{spec.identity}"


def run_experiment(  # noqa: PLR0913
    grid: Grid | str | Path,
    data: object,
    out: str | Path,
    *,
    data_args: Mapping[str, Any] | None = None,
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
        device: device of networks.
        jobs: concurrent runs, each in its own process with one thread.
        data_name: name of the data in tables (default: the data set's name without folders).
        overwrite: repeat finished runs; each is replaced once the new one is complete.
        checkpoint_seconds: time between checkpoints of a training.

    Raises:
        UsageError: an invalid grid, setting or option.
        DataError: data that cannot be read or split; a folder that cannot be written, or that another process works in.
        MismatchError: the folder contains another experiment.
    """
    if jobs < 1:
        raise UsageError(f"{jobs} jobs: it must be at least 1")
    if jobs > 1 and not isinstance(data, str):
        raise UsageError("several jobs open the data themselves: give its name, not a data set")
    grid = grid if isinstance(grid, Grid) else read_grid(grid)
    resolve_device(device)
    folder = check_output(out, overwrite=True, folder=True)
    if folder.exists() and not (folder / ABOUT).exists() and any(folder.glob("[!.]*")):
        raise DataError(f"{folder} holds something other than an experiment: choose another --out")
    dataset = open_data(data, **(data_args or {}))
    specs, left_out = plan(grid, dataset)
    kept: list[str] = []
    with unfinished(folder / _PARTIAL, folder, keep=kept):
        about = begin(folder, grid, dataset, specs, left_out, data_name)
        kept += [f"{name}-{run.identity}" for name, run in about.planned.items()]
        context = RunContext(folder, about.model_dump(), data, data_args or {}, device, checkpoint_seconds)
        todo = []
        for spec in specs:
            path, split = folder / f"{spec.name}.h5", folder / f"split_{spec.split_hash}.json"
            if not split.exists():
                make_split(dataset, **spec.split_args).save(split)
            if overwrite or not is_done(path, spec):
                todo.append(spec)
            else:  # killed between the run's file and this
                shutil.rmtree(context.work(spec), ignore_errors=True)
        summary = Summary(folder, len(specs), len(specs) - len(todo), left_out=left_out)
        results = ((spec.name, make_run(context, dataset, spec)) for spec in todo)
        if jobs > 1 and len(todo) > 1:
            results = make_in_processes(context, todo, jobs)
        for name, why in left_out.items():
            log.info("%s is left out: %s", name, why)
        with contextlib.closing(results), stage(grid.name, len(specs), "run", done=summary.there) as runs:
            for name, failure in results:
                runs.advance()
                if failure:
                    summary.failed[name] = failure
                    log.warning("%s failed: %s", name, failure)
                else:
                    summary.made += 1
                    run = read_run(folder / f"{name}.h5")
                    seconds = ", ".join(f"{k} {v:.1f} s" for k, v in run.seconds.items())
                    log.info("%s: mAP %.4f (%s)", name, run.map, seconds)
    return summary


def make_run(context: RunContext, dataset: Dataset, spec: RunSpec) -> str:
    """Execute one run and write its file. Returns why it failed, empty if it did not; only signals are raised."""
    work = context.work(spec)
    try:
        device = resolve_device(context.device)
        options = RunOptions(str(device), True, checkpoint_seconds=context.checkpoint_seconds)
        found = compute(spec, dataset, work, options)
        write_run(context.folder / f"{spec.name}.h5", context.about, spec, *found)
        shutil.rmtree(work, ignore_errors=True)
    except GpqError as error:
        return one_line(error, 500)
    except Exception as error:  # a bug in one method must not stop the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return f"{type(error).__name__} in {where}: {one_line(error, 500)}"
    return ""


def make_in_processes(context: RunContext, specs: Sequence[RunSpec], jobs: int) -> Generator[tuple[str, str]]:
    """Execute the runs in ``jobs`` processes, which open the data. Yields the name of each that ends, and why it failed. Raises DataError:
    a process was killed."""
    # Forks of a server that has imported this module and what runs need: torch is loaded once for all processes.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(PRELOADED)
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(min(jobs, len(specs)), forks, _start) as pool:
        try:
            runs = {pool.submit(_run_in_process, context, spec): spec.name for spec in specs}
            pool.submit(int)  # the pool looks for processes to watch at each call, before it starts one
            for future in as_completed(runs):
                yield runs[future], future.result()
        except BaseException as error:
            # After a signal, perhaps to this process only, the others save the state of their trainings and end.
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            if isinstance(error, BrokenProcessPool):
                raise DataError(
                    f"{context.folder}: a process was killed (out of memory?): run the same command again, with fewer --jobs"
                ) from None
            raise


def _start() -> None:
    """In a new process: Ctrl-C reaches all processes of a terminal, and only the parent handles it; if that is killed this one ends."""

    def end_with_parent() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


@functools.cache
def _opened(context: RunContext) -> Dataset:
    return open_data(context.data, **context.data_args)


def _run_in_process(context: RunContext, spec: RunSpec) -> str:
    try:
        with ended_by_signals():
            return make_run(context, _opened(context), spec)
    except KeyboardInterrupt:
        # The parent is ending, or another process was killed: none waits for another run.
        os._exit(1)

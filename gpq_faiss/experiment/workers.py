"""Execution of runs: sequentially in this process, or in parallel processes.

A failed run is reported in one line and does not stop the others, even if its process is killed. Each run works in its own locked folder
``.partial/NAME/``, so several calls may work on one experiment; a killed run is continued from there.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, Literal

from ..data.base import Dataset
from ..data.open import open_data
from ..errors import GpqError
from ..files import LOCK, lock, open_own, recover, write_error
from ..nn.device import resolve_device
from ..signals import ended_by_signals
from ..training.loop import RunOptions
from .compute import TrainingCache, compute
from .runfile import is_done, read_run, write_run
from .specs import RunSpec

_PARTIAL = ".partial"


@dataclass(frozen=True)
class RunContext:
    """Common parameters of all runs of an experiment, sent to the processes: its folder with its description, the data (with arguments of
    :func:`gpq_faiss.data.open.open_data`), the device of networks, and the time between two checkpoints."""

    folder: Path
    about: Mapping[str, Any] = field(hash=False)
    data: object
    data_args: Mapping[str, Any] = field(hash=False)
    device: str = "cpu"
    checkpoint_seconds: float = 60.0

    def file_of(self, spec: RunSpec) -> Path:
        """The file of a run."""
        return self.folder / f"{spec.name}.h5"

    def work_of(self, spec: RunSpec) -> Path:
        """The folder of its unfinished work."""
        return self.folder / _PARTIAL / spec.name

    def again(self, spec: RunSpec) -> Path:
        """Marker file: the run is to be repeated, and its old file does not count."""
        return self.work_of(spec) / "again"

    def done(self, spec: RunSpec) -> bool:
        """Whether the file of the run exists and counts."""
        return not self.again(spec).exists() and is_done(self.file_of(spec), spec)


@dataclass(frozen=True)
class RunResult:
    """How a run ended: ``done``, ``failed`` (``text`` says why), or in progress in another process (``elsewhere``)."""

    spec: RunSpec
    status: Literal["done", "failed", "elsewhere"]
    text: str = ""
    map: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def make_runs(
    context: RunContext,
    specs: Sequence[RunSpec],
    *,
    dataset: Dataset,
    jobs: int,
    report: Callable[[RunResult], None],
) -> None:
    """Execute all runs in order, ``jobs`` at a time; ``report`` is called in this thread when a run ends. With several jobs, each process
    opens the data."""
    if jobs > 1 and len(specs) > 1:
        _make_in_processes(context, specs, min(jobs, len(specs)), report)
        return
    cache = TrainingCache()
    for spec in specs:
        report(make_run(context, dataset, spec, cache))


def make_run(context: RunContext, dataset: Dataset, spec: RunSpec, cache: TrainingCache) -> RunResult:
    """Execute one run and write its file. Errors are returned in the result; only signals are raised."""
    try:
        with _claimed(context, spec) as work:
            if work is None:
                return RunResult(spec, "elsewhere", "in progress in another process")
            path = context.file_of(spec)
            if not context.done(spec):  # another process may have finished it since
                device = resolve_device(context.device)
                options = RunOptions(device, True, checkpoint_seconds=context.checkpoint_seconds)
                write_run(
                    path,
                    context.about,
                    spec,
                    *compute(spec, dataset, work / spec.identity, options, cache),
                )
            _clear(work)
            run = read_run(path)
            return RunResult(spec, "done", map=run.map, seconds=run.about["seconds"])
    except GpqError as error:
        return RunResult(spec, "failed", _one_line(error))
    except Exception as error:  # a bug in one method must not stop the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return RunResult(spec, "failed", f"{type(error).__name__} in {where}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


# Folders of unfinished work ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _claimed(context: RunContext, spec: RunSpec) -> Iterator[Path | None]:
    """Context with the run's locked folder of unfinished work, or None if another process has it.

    Leftovers are removed: those of killed writes, and checkpoints of other settings.
    """
    work = context.work_of(spec)
    try:
        held = lock(work / LOCK)
    except OSError as error:
        raise write_error(work, error) from error
    if held is None:
        yield None
        return
    try:
        recover(context.file_of(spec))
        _clear(work, spec.identity, context.again(spec).name)
        yield work
    finally:
        for remove in ((work / LOCK).unlink, work.rmdir, work.parent.rmdir):  # folders that are empty
            with contextlib.suppress(OSError):
                remove()
        os.close(held)


def _clear(work: Path, *keep: str) -> None:
    """Remove unfinished work, except ``keep`` and the lock, which the caller holds."""
    for path in work.iterdir():
        if path.is_dir() and path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)
        elif path.name not in (LOCK, *keep):
            path.unlink()


def make_again(context: RunContext, specs: Sequence[RunSpec]) -> None:
    """Mark these runs for repetition, without their unfinished work; each keeps its file until the new one exists.

    Runs in progress in another process are left to it.

    Raises:
        DataError: the folder cannot be written.
    """
    for spec in specs:
        with _claimed(context, spec) as work:
            if work is not None:
                _clear(work)
                try:
                    open_own(context.again(spec), "wb").close()
                except OSError as error:
                    raise write_error(context.again(spec), error) from error


def tidy(context: RunContext, specs: Sequence[RunSpec]) -> None:
    """Remove leftovers of processes killed at the very end of these runs, which are done."""
    for spec in specs:
        recover(context.file_of(spec))
        if context.work_of(spec).exists():
            with _claimed(context, spec) as work:
                if work is not None:
                    _clear(work)
    with contextlib.suppress(OSError):  # it is not there, or some run is under way
        (context.folder / _PARTIAL).rmdir()


# Processes --------------------------------------------------------------------------------------------------------------


def _make_in_processes(
    context: RunContext, specs: Sequence[RunSpec], jobs: int, report: Callable[[RunResult], None]
) -> None:
    """Executors of one process each: a process that is killed fails only its own run, and is replaced."""
    # Forks of a server that has imported this module: torch is loaded once for all processes.
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([__name__])
    watched, alive = forks.Pipe(duplex=False)

    def executor() -> ProcessPoolExecutor:
        return ProcessPoolExecutor(1, mp_context=forks, initializer=_start, initargs=(watched,))

    waiting = deque(specs)
    running: dict[Future[RunResult], tuple[RunSpec, ProcessPoolExecutor]] = {}
    idle = [executor() for _ in range(jobs)]
    try:
        while waiting or running:
            while waiting and idle:
                spec, free = waiting.popleft(), idle.pop()
                running[free.submit(_run_in_process, context, spec)] = spec, free
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                spec, free = running.pop(future)
                try:
                    report(future.result())
                except BrokenProcessPool:
                    report(RunResult(spec, "failed", "its process was killed (out of memory?)"))
                    free.shutdown()
                    free = executor()
                idle.append(free)
    finally:
        # After a signal, perhaps to this process only, the others save the state of their trainings and end.
        if running:
            alive.close()
        for free in [*idle, *(free for _, free in running.values())]:
            free.shutdown(cancel_futures=True)
        alive.close()
        watched.close()


def _start(watched: Connection) -> None:
    """Prepare a process for :func:`_run_in_process`."""
    # Ctrl-C reaches all processes of a terminal: only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(watched,), daemon=True).start()


def _end_with(watched: Connection) -> None:
    """End the run in progress when the parent closes its end of ``watched``, and the process when the parent was killed, so that
    the next call does not find the runs locked."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for([watched, parent.sentinel])
    if parent.is_alive():
        os.kill(os.getpid(), signal.SIGTERM)
    parent.join()
    os._exit(1)


@functools.cache
def _opened(context: RunContext) -> tuple[Dataset, TrainingCache]:
    return open_data(context.data, **context.data_args), TrainingCache()


def _run_in_process(context: RunContext, spec: RunSpec) -> RunResult:
    try:
        with ended_by_signals():
            dataset, cache = _opened(context)
            return make_run(context, dataset, spec, cache)
    except GpqError as error:  # of the data
        return RunResult(spec, "failed", _one_line(error))
    except KeyboardInterrupt:  # the parent is ending
        return RunResult(spec, "failed", "interrupted")

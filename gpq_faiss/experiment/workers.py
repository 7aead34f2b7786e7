"""Making the runs: one after the other in this process, or several at a time in processes of their own.

A run that fails is told of in one line and takes no other with it, even if its process is killed. Each works in a folder of its
own below ``.partial/``, under a lock, so that several calls may fill one folder; what a killed one leaves there is continued.
"""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import multiprocessing.connection
import os
import shutil
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..data.base import Dataset
from ..data.open import open_data
from ..errors import DataError, GpqError
from ..files import write_error
from .cells import Cell
from .compute import compute
from .runfile import done_as, read_run, write_run

Status = Literal["done", "failed", "elsewhere"]


@dataclass(frozen=True)
class Place:
    """What all runs of an experiment share; it travels to the processes.

    Attributes:
        folder: where their files go.
        grid: its name.
        data: as on the command line, and ``data_args`` for :func:`gpq_faiss.data.open.open_data`.
        data_name: what tables call the data.
        device: where networks run.
        checkpoint_seconds: between two checkpoints of a training.
    """

    folder: Path
    grid: str
    data: str
    data_args: Mapping[str, Any]
    data_name: str
    device: str = "cpu"
    checkpoint_seconds: float = 60.0

    def file_of(self, cell: Cell) -> Path:
        """The file of a run."""
        return self.folder / f"{cell.name}.h5"


@dataclass(frozen=True)
class Finished:
    """How a run ended: ``done``, ``failed`` (why is in ``text``), or under way in another process (``elsewhere``)."""

    cell: Cell
    status: Status
    text: str = ""
    map: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def run_cell(place: Place, dataset: Dataset, cell: Cell) -> Finished:
    """Make one run and write its file, whatever happens in it; only ctrl-C gets out."""
    try:
        with _claim(place, cell) as partial:
            if partial is None:
                return Finished(cell, "elsewhere", "another process is at it")
            path = place.file_of(cell)
            if done_as(path, cell) is None:  # another process may have finished it since
                outcome = compute(
                    cell,
                    dataset,
                    partial,
                    device=place.device,
                    checkpoint_seconds=place.checkpoint_seconds,
                )
                write_run(path, cell, place.grid, dataset, place.data_name, outcome)
            run = read_run(path)
            shutil.rmtree(partial, ignore_errors=True)
            return Finished(cell, "done", map=run.map, seconds=run.about["seconds"])
    except GpqError as error:
        return Finished(cell, "failed", _one_line(error))
    except Exception as error:  # a defect of one method must not end the others
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        return Finished(cell, "failed", f"{type(error).__name__} in {where}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


@contextlib.contextmanager
def _claim(place: Place, cell: Cell) -> Iterator[Path | None]:
    """The folder that the run works in, or None if another process has it. Leftovers of other settings are removed."""
    root = place.folder / ".partial"
    lock = root / f"{cell.name}.lock"
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = lock.open("a")
    except OSError as error:
        raise write_error(lock, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
            return
        mine = root / f"{cell.name}-{cell.identity}"
        for other in root.glob(f"{cell.name}-*"):
            if other != mine and other.is_dir() and len(other.name) == len(mine.name):
                shutil.rmtree(other, ignore_errors=True)
        yield mine
        lock.unlink(missing_ok=True)


def run_cells(
    place: Place,
    cells: Sequence[Cell],
    *,
    dataset: Dataset,
    jobs: int,
    tell: Callable[[Finished], None],
) -> None:
    """Make all runs, in their order, ``jobs`` at a time; ``tell`` hears of each as it ends.

    Args:
        dataset: used where there is one job; the processes of several open the data themselves.
    """
    if jobs == 1 or len(cells) <= 1:
        for cell in cells:
            tell(run_cell(place, dataset, cell))
        return
    _Pool(place, min(jobs, len(cells)), tell).run(cells)


# ---------------------------------------------------------------------------------------------------------- processes


def _work(place: Place, pipe: Any, parent: int) -> None:
    """A process: cells come in, how they ended goes out, until the other side closes."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        try:
            dataset: Dataset | None = open_data(place.data, **place.data_args)
            problem = ""
        except GpqError as error:
            dataset, problem = None, _one_line(error)
        while True:
            cell: Cell = pipe.recv()
            pipe.send(
                run_cell(place, dataset, cell) if dataset is not None else Finished(cell, "failed", problem)
            )
    except (EOFError, KeyboardInterrupt, BrokenPipeError):
        return


def _end_with(parent: int) -> None:
    """Do not outlive a parent that was killed: its next call would find the runs taken."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class _Worker:
    """A process and what it is doing."""

    def __init__(self, place: Place) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(place, theirs, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.cell: Cell | None = None

    def give(self, cell: Cell) -> None:
        self.cell = cell
        self.pipe.send(cell)

    def stop(self) -> None:
        self.pipe.close()
        self.process.join()


class _Pool:
    """A fixed number of processes; one that dies costs the run that it was at, and is replaced."""

    def __init__(self, place: Place, jobs: int, tell: Callable[[Finished], None]) -> None:
        self.place, self.jobs, self.tell = place, jobs, tell

    def run(self, cells: Sequence[Cell]) -> None:
        waiting = deque(cells)
        workers = [_Worker(self.place) for _ in range(self.jobs)]
        try:
            for worker in workers:
                self._feed(worker, waiting)
            while busy := [worker for worker in workers if worker.cell is not None]:
                for pipe in multiprocessing.connection.wait([worker.pipe for worker in busy]):
                    worker = next(w for w in busy if w.pipe is pipe)
                    if self._hear(worker):
                        self._feed(worker, waiting)
                    else:
                        workers.remove(worker)
                        if waiting:
                            workers.append(_Worker(self.place))
                            self._feed(workers[-1], waiting)
        finally:
            # After ctrl-C the processes have it too: a training saves its state and ends.
            for worker in workers:
                worker.stop()

    def _feed(self, worker: _Worker, waiting: deque[Cell]) -> None:
        if waiting:
            # A process that is dead already is heard of where all are: its end of the pipe is closed.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                worker.give(waiting.popleft())

    def _hear(self, worker: _Worker) -> bool:
        """Pass on what a worker says; False if it is dead."""
        cell, worker.cell = worker.cell, None
        assert cell is not None
        try:
            self.tell(worker.pipe.recv())
            return True
        except (EOFError, ConnectionResetError):
            worker.process.join()
            code = worker.process.exitcode or 0
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            hint = " (out of memory?)" if code == -9 else ""
            self.tell(Finished(cell, "failed", f"its process {how}{hint}"))
            return False


def clear_partial(place: Place, cells: Sequence[Cell]) -> None:
    """Forget runs that were begun and the files of those that are done: they are made again from the start.

    Raises:
        DataError: a file cannot be removed.
    """
    for cell in cells:
        for folder in (place.folder / ".partial").glob(f"{cell.name}-*"):
            shutil.rmtree(folder, ignore_errors=True)
        try:
            place.file_of(cell).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"cannot remove {place.file_of(cell)}: {error.strerror}") from None

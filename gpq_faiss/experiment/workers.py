"""Making the runs: one after the other in this process, or several at a time in processes of their own.

A run that fails is told of in one line and takes no other with it, even if its process is killed. Each works in a folder of its
own below ``.partial/``, under a lock, so that several calls may fill one folder; what a killed one leaves there is continued.
"""

from __future__ import annotations

import contextlib
import glob
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
from ..errors import GpqError
from ..files import discard, lock, open_own, recover, write_error
from ..signals import ended_by_signals
from .cells import Cell
from .compute import Earlier, compute
from .runfile import done_as, read_run, write_run

Status = Literal["done", "failed", "elsewhere"]
_PARTIAL = ".partial"


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

    def again(self, cell: Cell) -> Path:
        """A mark: the run is to be made again, and its file, if there is one, counts as none until that is done."""
        return self.folder / _PARTIAL / f"{cell.name}.again"

    def done(self, cell: Cell) -> str | None:
        """As :func:`.runfile.done_as`, of the run's file; None too where it is to be made again."""
        return None if self.again(cell).exists() else done_as(self.file_of(cell), cell)


@dataclass(frozen=True)
class Finished:
    """How a run ended: ``done``, ``failed`` (why is in ``text``), or under way in another process (``elsewhere``)."""

    cell: Cell
    status: Status
    text: str = ""
    map: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)


def run_cell(place: Place, dataset: Dataset, cell: Cell, earlier: Earlier) -> Finished:
    """Make one run and write its file, whatever happens in it; only ctrl-C gets out.

    Args:
        earlier: see :func:`.compute.compute`.
    """
    try:
        with _claim(place, cell) as partial:
            if partial is None:
                return Finished(cell, "elsewhere", "another process is at it")
            path = place.file_of(cell)
            if place.done(cell) is None:  # another process may have finished it since
                outcome = compute(
                    cell,
                    dataset,
                    partial,
                    earlier=earlier,
                    device=place.device,
                    checkpoint_seconds=place.checkpoint_seconds,
                )
                write_run(path, cell, place.grid, dataset, place.data_name, outcome)
                place.again(cell).unlink(missing_ok=True)
            run = read_run(path)
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
    """The folder that the run works in, or None if another process has it. Leftovers of other settings are removed.

    The folder goes once the run's file is there.
    """
    root, out = place.folder / _PARTIAL, place.file_of(cell)
    file = root / f"{cell.name}.lock"
    try:
        held = lock(file)
    except OSError as error:
        raise write_error(file, error) from error
    if held is None:
        yield None
        return
    mine = root / f"{cell.name}-{cell.identity}"
    try:
        recover(out)
        _clear(root, cell, keep=mine)
        yield mine
        if mine.exists():
            discard(mine, out)
    finally:
        with contextlib.suppress(OSError):
            file.unlink()
        os.close(held)
        with contextlib.suppress(OSError):
            root.rmdir()  # of the last one


def _clear(root: Path, cell: Cell, *, keep: Path | None = None) -> None:
    """Remove what was begun of a run, but the folder ``keep``; its lock is held."""
    for other in root.glob(f"{glob.escape(cell.name)}-*"):
        # The name of one run may begin that of another; what follows is an identity.
        ending = other.name.removeprefix(f"{cell.name}-")
        if other != keep and other.is_dir() and len(ending) == len(cell.identity):
            shutil.rmtree(other, ignore_errors=True)


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
        earlier = Earlier()
        for cell in cells:
            tell(run_cell(place, dataset, cell, earlier))
        return
    _Pool(place, min(jobs, len(cells)), tell).run(cells)


# ---------------------------------------------------------------------------------------------------------- processes


def _work(place: Place, pipe: Any, parent: int) -> None:
    """A process: cells come in, how they ended goes out, until the other side closes."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    with contextlib.suppress(EOFError, KeyboardInterrupt, BrokenPipeError), ended_by_signals():
        try:
            dataset: Dataset | None = open_data(place.data, **place.data_args)
            problem = ""
        except GpqError as error:
            dataset, problem = None, _one_line(error)
        earlier = Earlier()
        while True:
            cell: Cell = pipe.recv()
            pipe.send(
                run_cell(place, dataset, cell, earlier)
                if dataset is not None
                else Finished(cell, "failed", problem)
            )


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
        except BaseException:
            # A signal may have come to this process alone: a training saves its state and ends.
            for worker in workers:
                worker.process.terminate()
            raise
        finally:
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


def make_again(place: Place, cells: Sequence[Cell]) -> None:
    """Forget what was begun of these runs, and mark them to be made anew: each keeps its file until its new one is there.

    A run that another process is at stays with it.

    Raises:
        DataError: the folder cannot be written.
    """
    for cell in cells:
        with _claim(place, cell) as partial:
            if partial is not None:
                _clear(partial.parent, cell)
                try:
                    open_own(place.again(cell), "wb").close()
                except OSError as error:
                    raise write_error(place.again(cell), error) from error


def tidy(place: Place, cells: Sequence[Cell]) -> None:
    """Remove what processes that were killed at the very end of these runs, which are done, left of them."""
    for cell in cells:
        recover(place.file_of(cell))
        if any((place.folder / _PARTIAL).glob(f"{glob.escape(cell.name)}[.-]*")):
            with _claim(place, cell) as partial:
                if partial is not None:
                    _clear(partial.parent, cell)

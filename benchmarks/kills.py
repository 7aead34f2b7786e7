"""Kill commands by SIGKILL at random, and check that their outputs are never damaged.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 100

A trial runs train, encode, index or experiment in a fork of this process, which has imported all
modules, and kills it before a random file operation in the output folder, or after a random time.
The same command then continues (``train`` with ``--resume``), is killed again, and finishes in the
last attempt. Then all files must equal those of an uninterrupted run byte for byte, and there must
be no others. A stage that replaces an older output must have a complete output after every kill,
old or new. Metrics and times in runs of experiments are measured, so they are not compared.

On failure the exit code is 1, and the trial's folder is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_FILE_EVENTS = ("open", "os.", "shutil.")
_REMOVALS = ("os.remove", "os.rmdir")
_ATTEMPTS = 4  # maximum number of kills per trial
_STUCK = 600.0  # seconds after which an attempt counts as hanging


# Killing ------------------------------------------------------------------------------------------


def run_killed(
    work: Callable[[], object],
    folder: Path,
    operation: int | None = None,
    *,
    after: float | None = None,
) -> bool:
    """Do ``work`` in a fork of this process that is ended by SIGKILL.

    Args:
        work: the function; a SystemExit counts as normal end.
        folder: the folder whose file operations are counted.
        operation: kill just before this operation, counted from 0 by Python's audit events.
        after: kill after this number of seconds.

    Returns:
        True if the fork was killed, False if it finished first.

    Raises:
        AssertionError: ``work`` failed or hangs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if operation is not None:
                kill_at(folder, operation)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    timer = threading.Timer(_STUCK if after is None else after, os.kill, (pid, signal.SIGKILL))
    timer.start()
    try:
        _, status = os.waitpid(pid, 0)
    finally:
        timer.cancel()
        timer.join()
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, f"ended by signal {os.WTERMSIG(status)}"
        assert operation is not None or after is not None, "it hangs"
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


def kill_at(folder: Path, operation: int) -> None:
    """Kill this process by SIGKILL just before a file operation below ``folder``.

    Operations are counted from 0.
    """
    remaining = operation

    def kill_or_count() -> None:
        nonlocal remaining
        if remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        remaining -= 1

    _watch(folder, kill_or_count)


def _watch(folder: Path, callback: Callable[[], None]) -> None:
    """Call ``callback`` before every file operation below ``folder``."""
    below = str(folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        is_below = any(below in str(argument) for argument in args[:2])
        # rmtree names the files it removes without their folder.
        if event in _REMOVALS or (event.startswith(_FILE_EVENTS) and is_below):
            callback()

    sys.addaudithook(hook)


def every_kill(work: Callable[[], object], folder: Path, *, limit: int = 500) -> Iterator[int]:
    """Kill ``work`` before its first file operation, its second, ... until it finishes.

    Yields the number of the operation after each kill. The caller restores the initial state of the
    folder before it continues.
    """
    for operation in range(limit):
        if not run_killed(work, folder, operation):
            assert operation > 0, "no file operation was seen"
            return
        yield operation
    raise AssertionError(f"the work takes more than {limit} file operations")


# Stages -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A command to kill.

    Attributes:
        call: arguments without ``--out``.
        out: name of the output.
        again: arguments to add after a kill.
        old: arguments that make an older output to replace; empty if there is none.
    """

    call: tuple[str, ...]
    out: str
    again: tuple[str, ...] = ()
    old: tuple[str, ...] = ()


class Refused(AssertionError):
    """A command failed."""


def _gpq(*arguments: str) -> None:
    """Run ``gpq -q ARGUMENTS``. Raises Refused: it failed."""
    cli = importlib.import_module("gpq_cli.main").cli
    code: object = 0
    try:
        with contextlib.redirect_stdout(None):
            cli(["-q", *arguments], prog_name="gpq")
    except SystemExit as end:
        code = end.code
    if code:
        raise Refused(f"gpq {' '.join(arguments)} ended with {code}")


_SETTINGS = """preset = "paper"
[quantizer]
codebooks = 4
[network]
backbone = "linear"
[training]
steps = 40
batch_labelled = 30
batch_unlabelled = 30
learning_rate = 0.01
"""
_GRID = """methods = ["gpq", "pq"]
bits = [12]
seeds = [0]
labelled = "20-per-class"
preset = "paper"
[config.network]
backbone = "linear"
[config.training]
steps = 20
batch_labelled = 30
batch_unlabelled = 30
learning_rate = 0.01
"""


def prepare(root: Path) -> dict[str, Stage]:
    """Write small inputs below ``root``, and return the stages on them."""
    rng = np.random.default_rng(0)
    classes = np.arange(900) % 3
    centres = rng.standard_normal((3, 16))
    x = (centres[classes] + 0.4 * rng.standard_normal((900, 16))).astype(np.float32)
    np.save(root / "x.npy", x)
    np.save(root / "y.npy", classes)
    (root / "run.toml").write_text(_SETTINGS)
    (root / "grid.toml").write_text(_GRID)
    data = (f"features:{root}/x.npy", "--labels", f"{root}/y.npy")
    often = ("--checkpoint-seconds", "0.02")
    settings = ("--labelled", "20-per-class", "--preset", f"{root}/run.toml")
    train = ("train", *data, *settings, *often)
    model, codes = f"{root}/model", f"{root}/codes.h5"
    _gpq(*train, "--out", model)
    _gpq("encode", model, *data, "--out", codes)
    importlib.import_module("gpq_faiss.experiment.run")  # loaded once, not in every fork
    importlib.import_module("gpq_faiss.stages.index")
    encode = ("encode", model, *data, "--batch-size", "50")
    index, over = ("index", model, codes), ("--overwrite",)
    run = ("experiment", "run", f"{root}/grid.toml", *data)
    return {
        "train": Stage(train, "m", ("--resume",)),
        "train, replacing": Stage((*train, *over), "m", (), (*train, "--set", "training.seed=1")),
        "encode": Stage(encode, "codes.h5"),
        "encode, replacing": Stage((*encode, *over), "codes.h5", (), ("encode", model, *data)),
        "index": Stage(index, "i.faiss"),
        "index, replacing": Stage((*index, *over), "i.faiss", (), (*index, "--kind", "fused")),
        "index of lists": Stage(index, "i.lists"),
        "index of lists, replacing": Stage((*index, *over), "i.lists", (), (*index, "--no-names")),
        "experiment": Stage(run, "e"),
        "experiment, replacing": Stage((*run, *over), "e", (), run),
    }


# Products -----------------------------------------------------------------------------------------


def products(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder by name, with the content that must be equal in all runs."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() or not any(path.iterdir())
    }


def _content(path: Path) -> bytes:
    if not path.is_file() or path.name == "metrics.jsonl":
        return b""
    if path.suffix == ".h5" and path.parent.name == "e":
        from gpq_faiss.store.hdf5 import read_arrays

        arrays, attributes = read_arrays(path, "a run")
        attributes.pop("seconds")  # measured
        return repr(
            [(name, arrays[name].tobytes()) for name in arrays] + sorted(attributes.items())
        ).encode()
    return path.read_bytes()


def check_old_or_new(
    stage: Stage, folder: Path, old: dict[str, bytes], new: dict[str, bytes]
) -> None:
    """Check after a kill that every output is old or new, never a mixture of both."""

    def grouped(files: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
        groups: dict[str, dict[str, bytes]] = {}
        for name, content in files.items():
            key = name if stage.out == "e" else name.split("/")[0]
            if not any(component.startswith(".") for component in name.split("/")):
                groups.setdefault(key, {})[name] = content
        return groups

    groups, old_groups, new_groups = grouped(products(folder)), grouped(old), grouped(new)
    assert stage.out == "e" or stage.out in groups, f"{folder}: {stage.out} is gone"
    for key, files in groups.items():
        expected = old_groups.get(key), new_groups.get(key)
        assert files in expected, f"{folder}: {key} is neither the old nor the new"


# Trials -------------------------------------------------------------------------------------------


class Trials:
    """Trials of a stage, in a folder below ``root``.

    Attributes:
        trials, kills: number of trials and kills so far.
        operations: number of file operations of an uninterrupted run.
    """

    def __init__(self, name: str, stage: Stage, root: Path, seed: int) -> None:
        self.stage, self.root = stage, root / name.replace(" ", "-").replace(",", "")
        self.rng = np.random.default_rng([seed, *name.encode()])
        self.trials, self.kills, self.operations = 0, 0, 0
        old, new = self.root / "old", self.root / "new"
        old.mkdir(parents=True)
        if stage.old:
            self._run(stage.old, old)
        shutil.copytree(old, new)
        start = time.perf_counter()
        self._run(stage.call, new, count=self.root / "count")
        self.seconds = time.perf_counter() - start
        self.operations = int((self.root / "count").read_text())
        self.old, self.new = products(old), products(new)

    def _run(self, call: tuple[str, ...], folder: Path, *, count: Path | None = None) -> None:
        """Run a command to its end in a fork; ``count`` gets the number of file operations."""

        def work() -> None:
            operations: list[None] = []
            _watch(folder, lambda: operations.append(None))
            _gpq(*call, "--out", str(folder / self.stage.out))
            if count is not None:
                count.write_text(str(len(operations)))

        assert not run_killed(work, folder)

    def trial(self) -> None:
        """Kill and continue, and check that no file is missing, different or left over."""
        folder = self.root / f"trial{self.trials}"
        shutil.copytree(self.root / "old", folder)
        self.trials += 1
        attempts = int(self.rng.integers(1, _ATTEMPTS + 1))
        for attempt in range(attempts + 1):
            again = self.stage.again if attempt else ()

            def work(again: tuple[str, ...] = again) -> None:
                call = (*self.stage.call, *again, "--out", str(folder / self.stage.out))
                try:
                    _gpq(*call)
                except Refused:
                    # The output was complete before the kill, so it is made once more.
                    _gpq(*call, "--overwrite")

            options: dict[str, Any] = {}
            if attempt < attempts and self.rng.random() < 0.7:
                options = {"operation": int(self.rng.integers(0, self.operations))}
            elif attempt < attempts:
                options = {"after": float(self.rng.random()) * self.seconds}
            if not run_killed(work, folder, **options):
                break
            self.kills += 1
            if self.stage.old:
                check_old_or_new(self.stage, folder, self.old, self.new)
        files = products(folder)
        different = sorted(name for name in self.new if files.get(name) != self.new[name])
        assert not different, f"{folder}: {different} are not those of an uninterrupted run"
        assert files.keys() == self.new.keys(), (
            f"{folder}: {sorted(files.keys() - self.new.keys())}"
        )
        shutil.rmtree(folder)


def campaign(root: Path, kills: int, seed: int, only: str = "") -> int:
    """Kill at least ``kills`` times, evenly over the stages, and return the number of kills."""
    stages = {name: stage for name, stage in prepare(root).items() if only in name}
    total = 0
    for name, stage in stages.items():
        trials = Trials(name, stage, root, seed)
        while trials.kills < -(-kills // len(stages)):
            trials.trial()
        total += trials.kills
        counts = f"{trials.kills} kills in {trials.trials} trials"
        print(f"{name}: {counts}, {trials.operations} file operations", flush=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="at least so many (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    parser.add_argument("--only", default="", help="stages whose name contains this")
    options = parser.parse_args()
    # A fork has only the main thread, so imports in this process must not start others.
    os.environ["OMP_NUM_THREADS"] = "1"
    start = time.perf_counter()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        total = campaign(root, options.kills, options.seed, options.only)
    except AssertionError as error:
        print(f"failed: {error}\nall files are in {root}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(root)
    print(f"{total} kills: equal products, no leftovers ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()

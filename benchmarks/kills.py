"""Kill train, encode, index and experiment by SIGKILL at random: final outputs must be equal, without leftover files.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 100

A trial runs a command in a fork of this process, which has imported everything, and kills it: before its n-th file operation in
the output folder, or after a time, both random. The same command then continues (``train`` with ``--resume``), is killed
again, and finishes in the last attempt. All files must then equal those of an uninterrupted run, byte for byte, without
other files. Stages that replace an older output must have a complete one after every kill, old or new. Metrics and times
in runs of experiments are not compared, as they are measured.

On failure the exit code is 1, and the trial's folder is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
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
_ATTEMPTS = 4  # maximum kills per trial
_STUCK = 600.0  # seconds after which an attempt counts as hanging


# Killing ----------------------------------------------------------------------------------------------------------------


def run_killed(
    work: Callable[[], object], folder: Path, at: int | None = None, *, after: float | None = None
) -> bool:
    """Do ``work`` in a fork of this process that is ended by SIGKILL.

    Args:
        work: the function; a SystemExit counts as normal end.
        folder: whose file operations are counted.
        at: kill just before this operation, counted from 0 by Python's audit events.
        after: kill after so many seconds.

    Returns:
        Whether it was killed; False if it finished before.

    Raises:
        AssertionError: it failed or hangs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if at is not None:
                kill_at(folder, at)
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
        assert at is not None or after is not None, "it hangs"
        return True
    assert os.WEXITSTATUS(status) == 0, "the work failed by itself"
    return False


def kill_at(folder: Path, at: int) -> None:
    """From now on, end this process by SIGKILL just before its ``at``-th file operation below ``folder``."""
    left = at

    def seen() -> None:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1

    _watch(folder, seen)


def _watch(folder: Path, seen: Callable[[], None]) -> None:
    below = str(folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        # rmtree names the files it removes without their folder.
        if event in _REMOVALS or (
            event.startswith(_FILE_EVENTS) and any(below in str(part) for part in args[:2])
        ):
            seen()

    sys.addaudithook(hook)


def every_kill(work: Callable[[], object], folder: Path, *, most: int = 500) -> Iterator[int]:
    """Kill ``work`` before its first file operation, its second, ... until it finishes; yields after each kill.

    The caller restores the folder's initial state before continuing.
    """
    for at in range(most):
        if not run_killed(work, folder, at):
            assert at > 0, "no file operation was seen"
            return
        yield at
    raise AssertionError(f"the work takes more than {most} file operations")


# Stages -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A command."""

    call: tuple[str, ...]
    """Its arguments without ``--out``."""
    out: str
    again: tuple[str, ...] = ()
    """Arguments added after a kill."""
    over: tuple[str, ...] = ()
    """Arguments that created the older output to replace; empty if none."""
    main: str = ""
    """File of the output that differs between old and new; "" is the output itself."""


class Refused(AssertionError):
    """A command failed."""


def _gpq(*arguments: str) -> None:
    """``gpq -q ARGUMENTS``. Raises Refused: it failed."""
    cli = importlib.import_module("gpq_cli.main").cli
    code: object = 0
    try:
        with contextlib.redirect_stdout(None):
            cli(["-q", *arguments], prog_name="gpq")
    except SystemExit as end:
        code = end.code
    if code:
        raise Refused(f"gpq {' '.join(arguments)} ended with {code}")


def prepare(root: Path) -> dict[str, Stage]:
    """Small inputs below ``root``, and the stages on them."""
    rng = np.random.default_rng(0)
    classes = np.arange(900) % 3
    centres = rng.standard_normal((3, 16))
    x = (centres[classes] + 0.4 * rng.standard_normal((900, 16))).astype(np.float32)
    np.save(root / "x.npy", x)
    np.save(root / "y.npy", classes)
    settings = 'preset = "paper"\n[quantizer]\ncodebooks = 4\n[network]\nbackbone = "linear"\n[training]\n'
    settings += "steps = 40\nbatch_labelled = 30\nbatch_unlabelled = 30\nlearning_rate = 0.01\n"
    (root / "run.toml").write_text(settings)
    (root / "grid.toml").write_text(
        'methods = ["gpq", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = "20-per-class"\npreset = "paper"\n[config.network]\n'
        'backbone = "linear"\n[config.training]\nsteps = 20\nbatch_labelled = 30\nbatch_unlabelled = 30\nlearning_rate = 0.01\n'
    )
    data = (f"features:{root}/x.npy", "--labels", f"{root}/y.npy")
    config = ("--config", f"{root}/run.toml")
    often = ("--checkpoint-seconds", "0.02")
    train = ("train", *data, "--labelled", "20-per-class", "--preset", "paper", *config, *often)
    model, codes = f"{root}/model", f"{root}/codes.h5"
    _gpq(*train, "--out", model)
    _gpq("encode", model, *data, "--out", codes)
    for name in ("build.stream", "indexes.opening", "experiment.run"):  # loaded once, not in every fork
        importlib.import_module(f"gpq_faiss.{name}")
    encode = ("encode", model, *data, "--batch-size", "50")
    index = ("index", model, codes)
    memory = ("--memory", "64MB")
    run = ("experiment", "run", f"{root}/grid.toml", *data, *often)
    return {
        "train": Stage(train, "m", ("--resume",)),
        "train, replacing": Stage(
            (*train, "--overwrite"), "m", ("--resume",), (*train, "--seed", "1"), "model.safetensors"
        ),
        "encode": Stage(encode, "codes.h5"),
        "encode, replacing": Stage((*encode, "--overwrite"), "codes.h5", (), (*encode[:2], *data), "-"),
        "index": Stage(index, "i.faiss"),
        "index in a stream": Stage((*index, "--kind", "fastscan", *memory), "i.faiss"),
        "index, replacing": Stage((*index, *memory, "--overwrite"), "i.faiss", (), (*index, "--kind", "ivf")),
        "index with lists": Stage((*index, "--kind", "ivf", *memory), "i.faiss"),
        "experiment": Stage(run, "e"),
        "experiment, replacing": Stage((*run, "--overwrite"), "e", (), run, "-"),
    }


# Products ---------------------------------------------------------------------------------------------------------------


def products(folder: Path) -> dict[str, bytes]:
    """Every file below, with the content that must be equal in all runs."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink() or not any(path.iterdir())
    }


def _content(path: Path) -> bytes:
    if not path.is_file() or path.name == "metrics.jsonl":
        return b""
    if path.suffix == ".h5" and path.parent.name == "e":
        from gpq_faiss.store.hdf5 import read_arrays

        arrays, about = read_arrays(path, "a run")
        about.pop("seconds")  # measured
        shown = {key: array.tobytes().hex() for key, array in arrays.items()}
        return json.dumps([shown, {key: str(value) for key, value in about.items()}], sort_keys=True).encode()
    return path.read_bytes()


def _whole(stage: Stage, folder: Path, old: dict[str, bytes], new: dict[str, bytes]) -> None:
    """Assert that the replaced output is complete after a kill, the old or the new one."""
    now = {name: data for name, data in products(folder).items() if not name.startswith(".")}
    if stage.main == "-":  # several files, each replaced separately
        assert now.keys() >= old.keys(), f"{sorted(old.keys() - now.keys())} are gone"
        for name, before in old.items():
            assert now[name] in (before, new[name]), f"{name} is neither the old nor the new"
        return
    name = f"{stage.out}/{stage.main}" if stage.main else stage.out
    which = next((all_ for all_ in (old, new) if all_[name] == now.get(name)), None)
    assert which is not None, f"{name} is neither the old nor the new"
    for other, data in now.items():
        assert which.get(other) == data, f"{other} is not that of {name}"
    # An index without its sidecar is complete.
    assert which.keys() - now.keys() <= {f"{stage.out}.json"}


# Trials -----------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Counts of one stage: trials, kills, and maximum file operations per attempt."""

    trials: int = 0
    kills: int = 0
    operations: int = 0


class Trials:
    """Trials of a stage in the folder ``root``."""

    def __init__(self, name: str, stage: Stage, root: Path, seed: int) -> None:
        self.stage, self.root = stage, root / name.replace(" ", "-").replace(",", "")
        self.rng = np.random.default_rng([seed, *name.encode()])
        self.result = Result()
        self.old: dict[str, bytes] = {}
        self.root.mkdir()
        whole = self.root / "whole"
        whole.mkdir()
        if stage.over:
            old = self.root / "old"
            old.mkdir()
            self._run(stage.over, old)
            self.old = products(old)
            shutil.copytree(old, whole, dirs_exist_ok=True)
        begun = time.perf_counter()
        self._run(stage.call, whole, count=self.root / "count")
        self.seconds = time.perf_counter() - begun
        self.result.operations = int((self.root / "count").read_text())
        self.new = products(whole)

    def _run(self, call: tuple[str, ...], folder: Path, *, count: Path | None = None) -> None:
        """The whole command, in a fork; the number of its file operations goes to ``count``."""

        def work() -> None:
            seen = 0

            def see() -> None:
                nonlocal seen
                seen += 1

            _watch(folder, see)
            _gpq(*call, "--out", str(folder / self.stage.out))
            if count is not None:
                count.write_text(str(seen))

        assert not run_killed(work, folder)

    def trial(self, number: int) -> None:
        """Kill and continue repeatedly, and assert that no file is missing, different, or left over."""
        folder = self.root / f"trial{number}"
        if self.stage.over:
            shutil.copytree(self.root / "old", folder)
        else:
            folder.mkdir()
        self.result.trials += 1
        kills = int(self.rng.integers(1, _ATTEMPTS + 1))
        for attempt in range(kills + 1):
            call, last = self._next(folder, attempt), attempt == kills

            def work(call: tuple[str, ...] = call) -> None:
                # If the killed process had already put its output in place, the next start cleans up and then refuses to
                # replace it. Whether it is right is compared below.
                with contextlib.nullcontext() if self.stage.again else contextlib.suppress(Refused):
                    _gpq(*call, "--out", str(folder / self.stage.out))

            if last:
                assert not run_killed(work, folder)
                break
            if self.rng.random() < 0.7:  # before a file operation: there the outcome may change
                killed = run_killed(work, folder, int(self.rng.integers(0, self.result.operations)))
            else:
                killed = run_killed(work, folder, after=float(self.rng.random()) * self.seconds)
            self.result.kills += killed
            if self.stage.over:
                _whole(self.stage, folder, self.old, self.new)
            if not killed:
                break
        found = products(folder)
        for name in self.new:
            assert found.get(name) == self.new[name], f"{folder}: {name} is not that of a run that nobody cut"
        assert found.keys() == self.new.keys(), f"{folder}: {sorted(found.keys() - self.new.keys())} are left"
        shutil.rmtree(folder)

    def _next(self, folder: Path, attempt: int) -> tuple[str, ...]:
        """The command that comes next."""
        stage, out = self.stage, folder / self.stage.out
        if attempt == 0 or not stage.again:
            return stage.call
        # A training killed before recording that it replaces a model is started again.
        begun = (folder / f".{stage.out}.partial" / "begun.json").exists()
        if stage.over and not begun and products(out) != self._new_of(out.name):
            return stage.call
        return (*(part for part in stage.call if part != "--overwrite"), *stage.again)

    def _new_of(self, folder: str) -> dict[str, bytes]:
        return {
            name.removeprefix(f"{folder}/"): data
            for name, data in self.new.items()
            if name.startswith(f"{folder}/")
        }


def campaign(root: Path, kills: int, seed: int, only: str = "") -> dict[str, Result]:
    """At least ``kills`` kills, distributed evenly over the stages."""
    stages = {name: stage for name, stage in prepare(root).items() if only in name}
    results = {}
    for name, stage in stages.items():
        trials = Trials(name, stage, root, seed)
        while trials.result.kills < -(-kills // len(stages)):
            trials.trial(trials.result.trials)
        results[name] = trials.result
        r = trials.result
        print(f"{name}: {r.kills} kills in {r.trials} trials, {r.operations} file operations", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=100, help="at least so many in all (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="of the kills (default: 0)")
    parser.add_argument("--only", default="", help="stages whose name has this in it")
    options = parser.parse_args()
    # A fork has only the main thread, so imports here must not start others.
    os.environ["OMP_NUM_THREADS"] = "1"

    begun = time.perf_counter()
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        results = campaign(root, options.kills, options.seed, options.only)
    except AssertionError as error:
        print(f"failed: {error}\nwhat there is lies in {root}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(root)
    total = sum(result.kills for result in results.values())
    print(f"{total} kills: equal products, no leftovers ({time.perf_counter() - begun:.0f} s)")


if __name__ == "__main__":
    main()

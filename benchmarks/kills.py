"""Kill -9 over train, encode, index and experiment: whatever is killed when, the products are equal in the end and nothing is left.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --kills 100

A trial runs a command in a fork of this process, which has imported everything, and kills it: before its n-th file operation in
the folder of the output, or after a time, both drawn. The same command then goes on (``train`` with ``--resume``), is killed
again, and comes to its end in the last attempt. All files must then be those of a run that nobody cut, byte for byte, and there
must be no others. Stages that replace an older output have a whole one after every kill, the old or the new. Metrics and the
times that runs of experiments hold are left out of the comparison: they are measured.

Ends with exit code 1, and says where the trial lies, if that does not hold.
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
_ATTEMPTS = 4  # at most so many kills a trial
_STUCK = 600.0  # seconds after which an attempt counts as hanging


# Killing ----------------------------------------------------------------------------------------------------------------


def run_killed(
    work: Callable[[], object], folder: Path, at: int | None = None, *, after: float | None = None
) -> bool:
    """Do ``work`` in a fork of this process that is ended by SIGKILL.

    Args:
        work: a SystemExit of it counts as its end.
        folder: whose file operations are counted.
        at: kill just before this operation, counted from 0 by Python's audit events.
        after: kill after so many seconds.

    Returns:
        Whether it was killed; False if it came to its end before.

    Raises:
        AssertionError: the work failed by itself, or hangs.
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
        # What rmtree removes it names without its folder.
        if event in _REMOVALS or (
            event.startswith(_FILE_EVENTS) and any(below in str(part) for part in args[:2])
        ):
            seen()

    sys.addaudithook(hook)


def every_kill(work: Callable[[], object], folder: Path, *, most: int = 500) -> Iterator[int]:
    """Kill ``work`` before its first file operation, its second, ... until it comes to its end; yields after each kill.

    The caller puts the folder back into its first state before it goes on.
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
    """A command.

    Attributes:
        call: its arguments but ``--out``.
        out: name of its output.
        again: what is added after a kill.
        over: the arguments that made the older output which is replaced; none if empty.
        main: the file of the output that tells old from new; "" is the output itself.
    """

    call: tuple[str, ...]
    out: str
    again: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    main: str = ""


class Refused(AssertionError):
    """A command that did not end well."""


def _gpq(*arguments: str) -> None:
    """``gpq -q ARGUMENTS``.

    Raises:
        Refused: it failed.
    """
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
    (root / "grid-run.toml").write_text(
        settings.replace("[quantizer]\ncodebooks = 4\n", "").replace("= 40", "= 20")
    )
    (root / "grid.toml").write_text(
        'methods = ["gpq", "pq"]\nbits = [12]\nseeds = [0]\nlabelled = ["20-per-class"]\npreset = "paper"\n'
    )
    data = (f"features:{root}/x.npy", "--labels", f"{root}/y.npy")
    config = ("--config", f"{root}/run.toml")
    train = (
        "train",
        *data,
        "--labelled",
        "20-per-class",
        "--preset",
        "paper",
        *config,
        "--checkpoint-seconds",
        "0.02",
    )
    model, codes = f"{root}/model", f"{root}/codes.h5"
    _gpq(*train, "--out", model)
    _gpq("encode", model, *data, "--out", codes)
    encode = ("encode", model, *data, "--batch-size", "50")
    index = ("index", model, codes)
    memory = ("--memory", "64MB")
    run = (
        "experiment",
        "run",
        f"{root}/grid.toml",
        *data,
        "--config",
        f"{root}/grid-run.toml",
        "--checkpoint-seconds",
        "0.02",
    )
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
        "index with lists": Stage(
            (*index, "--kind", "ivf", "--lists", "8", "--recall", "0.9", *memory), "i.faiss"
        ),
        "experiment": Stage(run, "e"),
        "experiment, replacing": Stage((*run, "--overwrite"), "e", (), run, "-"),
    }


# Products ---------------------------------------------------------------------------------------------------------------


def products(folder: Path) -> dict[str, bytes]:
    """Every file below and what of it must be the same in every run."""
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file() or path.is_symlink() or not any(path.iterdir())
    }


def _content(path: Path) -> bytes:
    if not path.is_file() or path.name == "metrics.jsonl":
        return b""
    if path.suffix == ".h5" and path.parent.name == "e":
        from gpq_faiss.store import read_arrays

        arrays, about = read_arrays(path, "a run")
        about.pop("seconds")  # measured, as is the log
        shown = {key: array.tobytes().hex() for key, array in arrays.items() if key != "log"}
        return json.dumps([shown, {key: str(value) for key, value in about.items()}], sort_keys=True).encode()
    return path.read_bytes()


def _whole(stage: Stage, folder: Path, old: dict[str, bytes], new: dict[str, bytes]) -> None:
    """What is replaced must be there after every kill.

    Raises:
        AssertionError: it is not, or is neither the old nor the new.
    """
    now = {name: data for name, data in products(folder).items() if not name.startswith(".")}
    if stage.main == "-":  # several files, each for itself
        assert now.keys() >= old.keys(), f"{sorted(old.keys() - now.keys())} are gone"
        for name, before in old.items():
            assert now[name] in (before, new[name]), f"{name} is neither the old nor the new"
        return
    name = f"{stage.out}/{stage.main}" if stage.main else stage.out
    which = next((all_ for all_ in (old, new) if all_[name] == now.get(name)), None)
    assert which is not None, f"{name} is neither the old nor the new"
    for other, data in now.items():
        assert which.get(other) == data, f"{other} is not that of {name}"
    # An index without its sidecar is whole.
    assert which.keys() - now.keys() <= {f"{stage.out}.json"}


# Trials -----------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """Of one stage: trials, kills, and the most file operations that an attempt takes."""

    trials: int = 0
    kills: int = 0
    operations: int = 0


class Trials:
    """Trials of a stage.

    Args:
        name, stage: which.
        root: a folder for them.
        seed: of the kills.
    """

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
        """Kill, go on, kill, go on ... and compare.

        Raises:
            AssertionError: something was lost, is different, or is left over.
        """
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
                # Where what was killed last had put its output in place, the next start tidies up and then refuses to
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
        # A training that was killed before it had noted that it replaces a model is begun once more.
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
    """At least ``kills`` kills, shared out evenly over the stages.

    Raises:
        AssertionError: a trial went wrong.
    """
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
    # A fork has the main thread alone: what is imported here must have started no others.
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

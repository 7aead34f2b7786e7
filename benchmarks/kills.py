"""Kill commands and the service by SIGKILL, and check that nothing is damaged or lost.

    OMP_NUM_THREADS=1 python benchmarks/kills.py --step 1 --kills 50

Commands: encode and index run in forks of this process, which has imported all modules. A command
is killed before its first file operation in the output folder, continued and killed before its
second one, and so on until it finishes. After each kill every output must be complete, old or new,
and in the end equal to that of an uninterrupted run, with no other files. Service: clients add and
remove items, a rebuilt index replaces the served one, and the service gets SIGKILL. After each kill
the index with its changes must hold every acknowledged change, and nothing else except changes in
flight.

On failure the exit code is 1, and the folder is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILE_EVENTS = ("open", "os.", "shutil.")
_REMOVALS = ("os.remove", "os.rmdir")


# Killing ------------------------------------------------------------------------------------------


def run_killed(work: Callable[[], object], folder: Path, operation: int | None = None) -> bool:
    """Do ``work`` in a fork of this process that may be ended by SIGKILL.

    Args:
        work: the function.
        folder: the folder whose file operations are counted.
        operation: kill just before this operation, counted from 0 by Python's audit events.

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
            signal.alarm(600)  # it hangs
            if operation is not None:
                kill_at(folder, operation)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    killed = operation is not None and os.WIFSIGNALED(status)
    assert killed or status == 0, f"the work failed by itself, or hangs: status {status}"
    return killed


def kill_at(folder: Path, operation: int) -> None:
    """Kill this process by SIGKILL just before a file operation below ``folder``.

    Operations are counted from 0.
    """
    remaining = operation

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal remaining
        is_below = any(str(folder) in str(argument) for argument in args[:2])
        # rmtree names the files it removes without their folder.
        if event in _REMOVALS or (event.startswith(_FILE_EVENTS) and is_below):
            if remaining == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            remaining -= 1

    sys.addaudithook(hook)


def every_kill(
    work: Callable[[], object], folder: Path, *, step: int = 1, limit: int = 500
) -> Iterator[int]:
    """Kill ``work`` before its first file operation, its second, ... until it finishes.

    Yields the number of the operation after each kill, of which there is one in ``step``.
    """
    for operation in range(0, limit, step):
        if not run_killed(work, folder, operation):
            assert operation > 0, "no file operation was seen"
            return
        yield operation
    raise AssertionError(f"the work takes more than {limit} file operations")


# Commands -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """A command to kill.

    Attributes:
        call: arguments without ``--out``.
        out: name of the output.
        old: arguments that make an older output to replace; empty if there is none.
    """

    call: tuple[str, ...]
    out: str
    old: tuple[str, ...] = ()


def gpq(*arguments: str) -> bool:
    """Run ``gpq -q ARGUMENTS`` in this process, and return whether it succeeded."""
    cli = importlib.import_module("gpq_cli.main").cli
    try:
        with contextlib.redirect_stdout(None):
            return not cli(["-q", *arguments], prog_name="gpq", standalone_mode=True)
    except SystemExit as end:
        return not end.code


def prepare(root: Path) -> dict[str, Stage]:
    """Write small inputs below ``root``, and return the stages on them."""
    from common import clusters, save_features
    from serve import make_model

    save_features(root, *clusters(900, 3, 16, 0.4))
    data = (f"features:{root}/x.npy", "--labels", f"{root}/x-labels.npy")
    model, codes = str(make_model(root, 16)), f"{root}/codes.h5"
    assert gpq("encode", model, *data, "--out", codes)
    importlib.import_module("gpq_faiss.stages.index")  # loaded once, not in every fork
    encode, index = ("encode", model, *data, "--batch-size", "50"), ("index", model, codes)
    return {
        "encode": Stage(encode, "codes.h5"),
        "encode, replacing": Stage(
            (*encode, "--overwrite"), "codes.h5", (*encode[:-1], "100", "--no-features")
        ),
        "index": Stage(index, "i.faiss"),
        "index, replacing": Stage((*index, "--overwrite"), "i.faiss", (*index, "--kind", "fused")),
        "index of lists": Stage(index, "i.lists"),
        "index of lists, replacing": Stage(
            (*index, "--overwrite"), "i.lists", (*index, "--no-names")
        ),
    }


def products(folder: Path) -> dict[str, bytes]:
    """Return the content of the files below a folder by name."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def kill_command(stage: Stage, root: Path, step: int) -> int:
    """Kill and continue a command until it finishes, and return the number of kills.

    Raises:
        AssertionError: after a kill a file is neither old nor new, or at the end a file is missing,
            different or left over.
    """
    folder, new = root / "killed", root / "new"
    folder.mkdir(parents=True)

    def work(target: Path = folder) -> None:
        call = (*stage.call, "--out", str(target / stage.out))
        # Refused if the output was complete before the kill: it is made once more.
        assert gpq(*call) or gpq(*call, "--overwrite"), f"gpq {' '.join(call)} failed"

    if stage.old:
        assert gpq(*stage.old, "--out", str(folder / stage.out))
    shutil.copytree(folder, new)
    old, kills = products(folder), 0
    run_killed(functools.partial(work, new), new)
    expected = products(new)
    for _ in every_kill(work, folder, step=step):
        kills += 1
        files = products(folder)
        assert not stage.old or stage.out in files, f"{folder}: {stage.out} is gone"
        for name, content in files.items():
            if not any(word.startswith(".") for word in name.split("/")):  # unfinished work
                states = old.get(name), expected.get(name)
                assert content in states, f"{folder}: {name} is neither the old nor the new one"
    assert products(folder) == expected, f"{folder} differs from {new}"
    return kills


def main() -> None:
    """Kill the commands, then the service."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--step", type=int, default=1, help="kill before one operation in so many")
    parser.add_argument("--only", default="", help="commands whose name contains this")
    parser.add_argument("--kills", type=int, default=50, help="of the service (default: 50)")
    options = parser.parse_args()
    # A fork has only the main thread, so imports in this process must not start others.
    os.environ["OMP_NUM_THREADS"] = "1"
    root = Path(tempfile.mkdtemp(prefix="kills-"))
    try:
        for name, stage in prepare(root).items():
            if options.only in name:
                kills = kill_command(stage, root / name, options.step)
                print(f"{name}: {kills} kills, equal products, no leftovers", flush=True)
        (root / "service").mkdir()
        changes = importlib.import_module("serve").campaign(root / "service", options.kills)
        print(f"service: {options.kills} kills, {changes['acknowledged']:,} changes, none lost")
    except AssertionError as error:
        print(f"failed: {error}\nall files are in {root}", file=sys.stderr)
        sys.exit(1)
    shutil.rmtree(root)


if __name__ == "__main__":
    main()

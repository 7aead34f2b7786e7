"""Common code of the benchmarks: command lines, data, results files, timing, and one-line errors."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from gpq_faiss.data.base import Dataset, FeatureDataset
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.data.reader import Reader
from gpq_faiss.errors import DataError, GpqError, UsageError
from gpq_faiss.evaluation.ranking import RankingResult, rank_codes
from gpq_faiss.experiment.runs import describe_machine
from gpq_faiss.files import read_json, write_json, write_text
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.trainable import embed_rows
from gpq_faiss.training.loop import Training

__all__ = ["describe_machine"]

RESULTS = Path(__file__).parent / "results"
Value = TypeVar("Value")


def make_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with ``--out``, by default the file ``out`` of the results; ``doc`` is the script's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / out, help=".md lies beside it")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """``"1,2"`` to (1, 2)."""
    return tuple(int(part) for part in text.split(",") if part)


def data_path(*names: str) -> Path | None:
    """A path below the folder ``$GPQ_DATA``, or None if that is unset."""
    data = os.environ.get("GPQ_DATA")
    return Path(data, *names) if data else None


def require_data(value: Any, form: str, what: str) -> None:
    """Check that there are data.

    Raises:
        UsageError: ``value`` is None.
    """
    if value is None:
        raise UsageError(f"no data: pass --data {form}, or set GPQ_DATA to the folder of {what}")


def save_features(folder: Path, x: NDArray[Any], y: NDArray[Any], name: str = "x") -> FeatureDataset:
    """Features float [N, W] and their labels as .npy files ``NAME.npy`` and ``NAME-labels.npy``, and these opened."""
    np.save(folder / f"{name}.npy", x)
    np.save(folder / f"{name}-labels.npy", y)
    data = open_data(f"features:{folder / name}.npy", labels=f"{folder / name}-labels.npy")
    assert isinstance(data, FeatureDataset)
    return data


def clusters(
    items: int, classes: int, width: int, spread: float
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Simulated features around a centre for each class, with so many deviations of noise, and class numbers."""
    rng = np.random.default_rng(0)
    y = np.arange(items) % classes
    x = rng.standard_normal((classes, width))[y] + spread * rng.standard_normal((items, width))
    return x.astype(np.float32), y


def sums(
    x: NDArray[Any], y: NDArray[np.integer[Any]], items: int, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Items of several labels: each is the sum of one to three rows of x over the root of their number; and 0/1 for each class."""
    rng, found = np.random.default_rng(seed), np.zeros((items, x.shape[1]), np.float32)
    labels = np.zeros((items, int(y.max()) + 1), np.uint8)
    for i in range(items):
        rows = rng.choice(len(x), rng.integers(1, 4), replace=False)
        labels[i, y[rows]] = 1
        found[i] = x[rows].astype(np.float32).sum(axis=0) / len(rows) ** 0.5
    return found, labels


def several(
    items: int, classes: int, width: int, spread: float
) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """Simulated items of one to three labels: the sum of their centres over the root of their number, with so many deviations of noise."""
    rng, found = np.random.default_rng(1), np.zeros((items, width), np.float32)
    centres, labels = rng.normal(size=(classes, width)), np.zeros((items, classes), np.uint8)
    for i in range(items):
        own = rng.choice(classes, rng.integers(1, 4), replace=False)
        labels[i, own] = 1
        found[i] = centres[own].sum(axis=0) / len(own) ** 0.5 + spread * rng.normal(size=width)
    return found, labels


def gpq(
    *arguments: object, python: object = sys.executable, cwd: Path | None = None, check: bool = True
) -> Any:
    """``gpq -q ARGUMENTS`` in a process of its own, by the interpreter of any environment.

    Raises:
        DataError: it failed, and ``check``.
    """
    call = [str(part) for part in (python, "-m", "gpq_cli", "-q", *arguments)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(call, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise DataError(f"gpq {arguments[0]}: {done.stderr.strip()[-500:]}")
    return done


def use_threads(threads: int) -> None:
    """Set the number of threads of torch and Faiss."""
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


def timed(call: Callable[[], Value]) -> tuple[Value, float, float]:
    """The result of a call, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def vectors(
    fitted: Training,
    data: Dataset,
    rows: NDArray[np.int64],
    *,
    queries: bool = False,
    device: torch.device | None = None,
) -> NDArray[np.float32]:
    """Vectors of items or queries by the network of a training, on the CPU or another device."""
    with Reader(data, fitted.reader.image_size) as reader:
        return embed_rows(fitted.method, reader, rows, device or torch.device("cpu"), queries=queries)[0]


def rank_vectors(
    coder: Coder,
    xq: NDArray[np.float32],
    xb: NDArray[np.float32],
    query_labels: Labels,
    labels: Labels,
    **options: Any,
) -> RankingResult:
    """The ranking of all items for all queries, by the codes of the items."""
    of_both = query_labels.packed, labels.packed
    return rank_codes(lambda rows, codes: coder.score(xq[rows], codes), coder.encode(xb), *of_both, **options)


def own_command() -> str:
    """The command line of this script."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def machine_line(machine: dict[str, Any], command: str = "") -> str:
    """Machine and versions in a line, and the command if there is one."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    line = (
        f"Machine: {machine['cpu']}, {machine['cores']} cores ({machine['threads']['torch']} used), "
        f"{machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}, {machine['os']}; {versions}."
    )
    return f"{line} Command: `{command}`" if command else line


def read_results(out: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """The results of an earlier run, or ``fresh`` ones.

    Raises:
        DataError: the file is damaged, or holds something else.
    """
    if not out.exists():
        return fresh
    held = read_json(out, "the results of this benchmark")
    if not isinstance(held, dict) or not fresh.keys() <= held.keys():
        raise DataError(f"{out} does not hold results of this benchmark: name another --out")
    return held


def save(results: dict[str, Any], out: Path, markdown: Callable[[dict[str, Any]], str]) -> None:
    """Write the JSON and the Markdown generated from it."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_json(out, results)
    write_text(out.with_suffix(".md"), markdown(results))


def publish(results: dict[str, Any], out: Path, markdown: Callable[[dict[str, Any]], str]) -> None:
    """:func:`save` with machine and command, which stand at the end of the Markdown."""
    machine, command = describe_machine(), own_command()
    last = machine_line(machine, command)
    save(
        results | {"machine": machine, "command": command},
        out,
        lambda whole: f"{markdown(whole)}\n\n{last}\n",
    )


def run_main(main: Callable[[], None]) -> None:
    """Run a script; errors are printed in one line and give the exit code."""
    try:
        main()
    except GpqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)

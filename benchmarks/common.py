"""Common code of the benchmarks: command lines, data, timing, results files and errors."""

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

from gpq_faiss.data.base import Dataset, FeatureDataset, Reader
from gpq_faiss.data.labels import Labels
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import DataError, GpqError, UsageError
from gpq_faiss.evaluation.ranking import RankingResult, rank_codes
from gpq_faiss.experiment.runs import describe_machine, machine_line
from gpq_faiss.files import read_json, write_json, write_text
from gpq_faiss.methods.coders import Coder
from gpq_faiss.methods.trainable import embed_rows
from gpq_faiss.training.loop import Training

__all__ = ["describe_machine", "machine_line"]

RESULTS = Path(__file__).parent / "results"
Value = TypeVar("Value")
Floats = NDArray[np.float32]
Results = dict[str, Any]


# Command line -------------------------------------------------------------------------------------


def make_parser(doc: str | None, out: str) -> argparse.ArgumentParser:
    """Return a parser with the option ``--out`` (default: ``benchmarks/results/OUT``)."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=form)
    parser.add_argument("--out", type=Path, default=RESULTS / out, help=".md lies beside it")
    return parser


def numbers(text: str) -> tuple[int, ...]:
    """Parse ``"1,2"`` to (1, 2)."""
    return tuple(int(word) for word in text.split(",") if word)


def data_path(*names: str) -> Path | None:
    """Return a path in the folder ``$GPQ_DATA``, or None if the variable is not set."""
    folder = os.environ.get("GPQ_DATA")
    return Path(folder, *names) if folder else None


def require_data(value: Value | None, form: str, content: str) -> Value:
    """Return ``value`` if it is not None.

    Raises:
        UsageError: it is None: no data are given.
    """
    if value is None:
        raise UsageError(f"no data: pass --data {form}, or set GPQ_DATA to the folder of {content}")
    return value


def gpq(*arguments: object) -> None:
    """Run ``gpq -q ARGUMENTS`` in a process. Raises DataError: the command fails."""
    call = [str(word) for word in (sys.executable, "-m", "gpq_cli", "-q", *arguments)]
    process = subprocess.run(call, capture_output=True, text=True, check=False)
    if process.returncode:
        raise DataError(f"gpq {arguments[0]}: {process.stderr.strip()[-500:]}")


def run_main(main: Callable[[], None]) -> None:
    """Run a script. An error is printed in one line, and determines the exit code."""
    try:
        main()
    except GpqError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


# Data ---------------------------------------------------------------------------------------------


def save_features(
    folder: Path, x: NDArray[Any], y: NDArray[Any], name: str = "x"
) -> FeatureDataset:
    """Save features [N, W] as ``NAME.npy`` and labels as ``NAME-labels.npy``, and open them."""
    np.save(folder / f"{name}.npy", x)
    np.save(folder / f"{name}-labels.npy", y)
    labels = str(folder / f"{name}-labels.npy")
    dataset = open_data(f"features:{folder / name}.npy", labels=labels)
    assert isinstance(dataset, FeatureDataset)
    return dataset


def clusters(
    items: int, classes: int, width: int, spread: float
) -> tuple[Floats, NDArray[np.int64]]:
    """Simulate features around a centre for each class.

    Args:
        spread: standard deviation of the noise.

    Returns:
        Features float32 [items, width], and class numbers int64 [items].
    """
    rng = np.random.default_rng(0)
    y = np.arange(items) % classes
    x = rng.standard_normal((classes, width))[y] + spread * rng.standard_normal((items, width))
    return x.astype(np.float32), y


# Measuring ----------------------------------------------------------------------------------------


def use_threads(threads: int) -> None:
    """Set the number of threads of torch and Faiss."""
    torch.set_num_threads(threads)
    faiss.omp_set_num_threads(threads)


def timed(call: Callable[[], Value]) -> tuple[Value, float, float]:
    """Return the result of a call, and its wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def vectors(
    training: Training,
    data: Dataset,
    rows: NDArray[np.int64],
    *,
    queries: bool = False,
    device: torch.device | None = None,
) -> Floats:
    """Embed items or queries by the network of a training."""
    device = device or torch.device("cpu")
    with Reader(data, training.reader.image_size) as reader:
        return embed_rows(training.method, reader, rows, device, queries=queries)[0]


def rank_vectors(
    coder: Coder, xq: Floats, xb: Floats, query_labels: Labels, labels: Labels, **options: Any
) -> RankingResult:
    """Rank all items for all queries, by the codes of the items."""
    return rank_codes(
        lambda rows, codes: coder.score(xq[rows], codes),
        coder.encode(xb),
        query_labels.packed,
        labels.packed,
        **options,
    )


# Results ------------------------------------------------------------------------------------------


def command_line() -> str:
    """Return the command line of this script."""
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def read_results(out: Path, fresh: Results) -> Results:
    """Return the results of an earlier run, or ``fresh`` ones.

    Raises:
        DataError: the file is damaged, or does not hold results of this benchmark.
    """
    if not out.exists():
        return fresh
    results = read_json(out, "the results of this benchmark")
    if not isinstance(results, dict) or not fresh.keys() <= results.keys():
        raise DataError(f"{out} does not hold results of this benchmark: name another --out")
    return results


def save(results: Results, out: Path, markdown: Callable[[Results], str]) -> None:
    """Write the JSON and the Markdown generated from it."""
    write_json(out, results)
    write_text(out.with_suffix(".md"), markdown(results))


def publish(results: Results, out: Path, markdown: Callable[[Results], str]) -> None:
    """Save results with machine and command line, which the Markdown gives at its end."""
    machine, command = describe_machine(), command_line()
    end = f"{machine_line(machine)} Command: `{command}`"
    stated = {"machine": machine, "command": command}
    save(results | stated, out, lambda content: f"{markdown(content)}\n\n{end}\n")

"""One process compared with several under torchrun, on one core each: steps per second, and processor time per step.

    OMP_NUM_THREADS=1 python benchmarks/torchrun.py

The paper's VGG on digits of 32 x 32 pixels, and the default's class networks on random features. Numbers of processes are interleaved; the
first two steps are not counted. On a shared machine wall times say little; the processor time of process 0, which has the same share of a
step as the others, shows the gain on machines of their own. Network communication is not included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import describe_machine, machine_line, make_parser, numbers, own_command, run_main, save

from gpq_faiss.config import Config, merge, preset
from gpq_faiss.data.base import Dataset
from gpq_faiss.data.open import open_data
from gpq_faiss.stages.train import train

SETUPS = ("vgg", "class networks")
_WARM = 2
_FIGURES = ("wall_seconds", "cpu_seconds")


def prepare(setup: str, folder: Path, steps: int, batch: int) -> tuple[Dataset, Config]:
    """Items and settings of a training without anything but steps."""
    training = {"steps": steps, "batch_labelled": batch, "batch_unlabelled": batch, "validation": 0.0}
    if setup == "vgg":
        config = merge(
            preset("paper"), {"network": {"backbone": "vgg", "image_size": 32}, "training": training}
        )
        return open_data("digits"), config
    files = folder / "x.npy", folder / "y.npy"
    if not files[0].exists():
        rng = np.random.default_rng(0)
        np.save(files[0], rng.standard_normal((4_000, 512)).astype(np.float32))
        np.save(files[1], rng.integers(0, 10, 4_000))
    quiet = {"network": {"noise": 0.5}, "posterior": {"propagation": 0.0}, "training": training}
    return open_data(f"features:{files[0]}", labels=str(files[1])), merge(preset("recommended"), quiet)


def child(setup: str, folder: Path, steps: int, batch: int) -> None:
    """Train; the first process writes wall and processor seconds per step."""
    dataset, config = prepare(setup, folder, steps, batch)
    times: dict[int, tuple[float, float]] = {}

    def note(step: int, *_: Any) -> None:
        times[step] = time.perf_counter(), time.process_time()

    train(dataset, folder / "model", config=config, overwrite=True, checkpoint_seconds=1e9, progress=note)
    if times:
        wall, cpu = (b - a for a, b in zip(times[_WARM], times[steps], strict=True))
        (folder / "times.json").write_text(json.dumps([wall / (steps - _WARM), cpu / (steps - _WARM)]))


def measure(setup: str, processes: int, folder: Path, args: argparse.Namespace) -> tuple[float, float]:
    """Wall and processor seconds of a step in process 0."""
    launcher = []
    if processes > 1:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    own = [__file__, "--child", setup, "--folder", folder, "--steps", args.steps, "--batch", args.batch]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, *launcher, *map(str, own)], check=True, env=environment, stderr=subprocess.DEVNULL
    )
    wall, cpu = json.loads((folder / "times.json").read_text())
    return wall, cpu


def main() -> None:
    """Measure interleaved, and write JSON and Markdown."""
    parser = make_parser(__doc__, "torchrun.json")
    parser.add_argument("--processes", type=numbers, default=(1, 2))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--batch", type=int, default=64, help="labelled items a step, and as many unlabelled ones"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", choices=SETUPS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args.child, args.folder, args.steps, args.batch)
        return
    loads = [os.getloadavg()[0]]
    found: dict[str, dict[int, list[tuple[float, float]]]] = {
        setup: {n: [] for n in args.processes} for setup in SETUPS
    }
    for _ in range(args.repeats):
        for setup, of in found.items():
            for processes, times in of.items():
                with tempfile.TemporaryDirectory() as folder:
                    times.append(measure(setup, processes, Path(folder), args))
                print(f"{setup}, {processes}: {times[-1][0]:.3f} s, {times[-1][1]:.3f} s of CPU", flush=True)
                loads.append(os.getloadavg()[0])
    rows = []
    for setup, of in found.items():
        first: dict[str, float] = {}
        for processes, times in of.items():
            row = dict(zip(_FIGURES, map(statistics.median, zip(*times, strict=True)), strict=True))
            first = first or row
            rows.append(
                {
                    "setup": setup,
                    "processes": processes,
                    **row,
                    "steps_per_second": 1 / row["wall_seconds"],
                    "faster_by_wall": first["wall_seconds"] / row["wall_seconds"],
                    "faster_by_cpu": first["cpu_seconds"] / row["cpu_seconds"],
                    "runs": [dict(zip(_FIGURES, run, strict=True)) for run in times],
                }
            )
    results = {
        "batch": args.batch,
        "rows": rows,
        "load_average": [min(loads), max(loads)],
        "machine": describe_machine(),
        "command": own_command(),
    }
    save(results, args.out, markdown)


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    low, high = results["load_average"]
    lines = [
        "# Training in several processes",
        "",
        f"Batches of {results['batch']} labelled and {results['batch']} unlabelled items, one thread a process, float32, gloo on one "
        "machine; medians. *faster*: than one process. "
        f"Other jobs used the machine, whose load average was {low:.1f} to {high:.1f}: the processor time of process 0 tells more than "
        "the clock.",
        "",
        "| network | processes | steps/s | faster by the clock | CPU s a step and process | faster by CPU time |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for row in results["rows"]:
        lines.append(
            f"| {row['setup']} | {row['processes']} | {row['steps_per_second']:.2f} | {row['faster_by_wall']:.2f} | "
            f"{row['cpu_seconds']:.3f} | {row['faster_by_cpu']:.2f} |"
        )
    lines += ["", machine_line(results["machine"], results["command"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)

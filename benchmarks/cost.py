"""Cost of a whole training, and memory of encoding.

    OMP_NUM_THREADS=1 python benchmarks/cost.py     # both parts, some minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts memory
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts train --trainings 1000000x1000x10

Times are processor times, because wall time on a shared machine includes other work. With one
thread they equal the time on a free core.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    Results,
    clusters,
    command_line,
    describe_machine,
    machine_line,
    make_parser,
    numbers,
    read_results,
    run_main,
    save,
    save_features,
    use_threads,
)

from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data
from gpq_faiss.evaluation.tables import render
from gpq_faiss.stages.train import train
from gpq_faiss.training.loop import RunOptions

WIDTH, BLOCK = 256, 10_000
# Runs a command, and prints its peak of private and of resident memory. Only the resident memory
# includes pages of mapped files, which the system takes back when it needs them.
ENCODE = """
import re, sys, threading
from gpq_cli.main import cli

private, ended = [0], threading.Event()

def memory(kind):
    return int(re.search(kind + r":\\s+(\\d+)", open("/proc/self/status").read())[1])

def watch():
    while not ended.wait(0.01):
        private.append(memory("RssAnon"))

threading.Thread(target=watch).start()
try:
    cli(sys.argv[1:])
finally:
    ended.set()
    print(max(private), memory("VmHWM"))
"""


def create_rows(path: Path, n: int) -> Any:
    """Create a .npy file of n rows of float16, and return it mapped for writing."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(n, WIDTH))


def train_cost(scratch: Path, text: str) -> Results:
    """Measure a training of the size ITEMSxCLASSESxLABELS, from features to the model folder."""
    items, classes, labelled = map(int, text.split("x"))
    rng = np.random.default_rng(0)
    labels = np.arange(items) % classes
    centres = rng.standard_normal((classes, WIDTH)).astype(np.float32)
    array = create_rows(scratch / "x.npy", items)
    for start in range(0, items, BLOCK):
        block = centres[labels[start : start + BLOCK]]
        array[start : start + BLOCK] = block + 4 * rng.standard_normal(block.shape, np.float32)
    array.flush()
    np.save(scratch / "y.npy", labels)
    data = open_data(f"features:{scratch / 'x.npy'}", labels=str(scratch / "y.npy"))
    first: list[tuple[int, float]] = []

    def progress(step: int, steps: int) -> None:
        if not first:
            first.append((steps, time.process_time()))

    wall, cpu = time.perf_counter(), time.process_time()
    out, config = scratch / f"m{text}", preset("recommended")
    train(
        data,
        out,
        config=config,
        labelled=f"{labelled}-per-class",
        options=RunOptions(progress=progress),
    )
    ((steps, first_step),), end = first, time.process_time()
    return {
        "items": f"{items:,} x {WIDTH}",
        "classes": classes,
        "labels per class": labelled,
        "steps": steps,
        "to the first step CPU s": first_step - cpu,
        "the rest CPU s": end - first_step,
        "whole CPU s": end - cpu,
        "whole wall s": time.perf_counter() - wall,
        # The peak of this process so far: pass large trainings last.
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def encode_memory(scratch: Path, model: Path, n: int) -> Results:
    """Measure the peak memory of ``gpq encode`` for a file of n rows."""
    block = np.random.default_rng(0).standard_normal((BLOCK, WIDTH)).astype(np.float16)
    file = scratch / f"rows-{n}.npy"
    array = create_rows(file, n)
    for start in range(0, n, BLOCK):
        array[start : start + BLOCK] = np.roll(block, start // BLOCK, axis=1)[: n - start]
    array.flush()
    encode = ["encode", model, f"features:{file}", "--out", scratch / f"codes-{n}.h5"]
    call = [sys.executable, "-c", ENCODE, *map(str, encode)]
    *_, private, resident = subprocess.check_output(call, text=True).split()
    return {
        "rows": n,
        "input MiB": round(file.stat().st_size / 2**20),
        "private MiB": round(int(private) / 1024),
        "resident MiB": round(int(resident) / 1024),
    }


def memory_costs(scratch: Path, sizes: tuple[int, ...]) -> list[Results]:
    """Measure the memory of encoding files of different lengths."""
    data = save_features(scratch, *clusters(2000, 10, WIDTH, 1.0))
    changes = {"network": {"backbone": "linear"}, "training": {"steps": 2, "validation": 0.0}}
    model, config = scratch / "linear", preset("paper").with_settings(changes)
    train(data, model, config=config, labelled="all", protocol="none")
    rows = [encode_memory(scratch, model, n) for n in sizes]
    return [row | {"private, ratio": row["private MiB"] / rows[0]["private MiB"]} for row in rows]


PARTS = {
    "train": "## A whole training\n\nThe preset `recommended`, 48 bits, from simulated features on "
    "the disk to the model folder. To the first step belong reading, the noise that the labels "
    "call for, and the propagation of labels; wall time is of a machine shared with other jobs.",
    "memory": "## Memory of encoding\n\nPeak memory of `gpq encode` on 256-d float16 rows (.npy), "
    "each in a process of its own, features.h5 and codes.h5 written. Resident memory includes the "
    "mapped pages of the input and of features.h5, which the system takes back when it needs them; "
    "private memory does not. The ratio is to the first line.",
}


def markdown(results: Results) -> str:
    """Return a table for each part."""
    sections = [
        f"{PARTS[name]}\n\n{render(section['rows'], 'markdown')}\n"
        f"{machine_line(section['machine'])} Command: `{section['command']}`\n"
        for name, section in results["parts"].items()
    ]
    return "\n".join(["# Cost\n", *sections])


def main() -> None:
    """Measure the requested parts. Other parts keep the results of an earlier run."""
    parser = make_parser(__doc__, "cost.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    sizes = "ITEMSxCLASSESxLABELS (per class)"
    parser.add_argument("--trainings", nargs="+", default=["300000x10x290"], help=sizes)
    parser.add_argument("--sizes", type=numbers, default=(10_000, 1_000_000), help="rows to encode")
    options = parser.parse_args()
    use_threads(1)
    results = read_results(options.out, {"parts": {}})
    for part_name in options.parts:
        with tempfile.TemporaryDirectory(prefix="gpq-cost-") as name:
            scratch = Path(name)
            rows = (
                [train_cost(scratch, text) for text in options.trainings]
                if part_name == "train"
                else memory_costs(scratch, options.sizes)
            )
        measured = {"rows": rows, "machine": describe_machine(), "command": command_line()}
        results["parts"][part_name] = measured
        save(results, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)

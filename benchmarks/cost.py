"""Cost of a whole training, and the memory of encoding.

    OMP_NUM_THREADS=1 python benchmarks/cost.py                      # both parts; a few minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts memory
    OMP_NUM_THREADS=1 python benchmarks/cost.py --parts train --trainings 300000x10x290 300000x10x10 1000000x1000x10

Processor times (with one thread equal to the time on a free core), because wall time on a shared machine includes other work.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    clusters,
    describe_machine,
    machine_line,
    make_parser,
    numbers,
    own_command,
    read_results,
    run_main,
    save,
    save_features,
    use_threads,
)

from gpq_faiss.config import preset
from gpq_faiss.data.open import open_data
from gpq_faiss.errors import UsageError
from gpq_faiss.evaluation.tables import render
from gpq_faiss.stages.train import train
from gpq_faiss.training.loop import RunOptions

WIDTH, BLOCK = 256, 10_000
# The command, and its peak of memory. (The kernel's ``ru_maxrss`` counts that of the process that started it, too.)
ENCODE = """
import sys
from gpq_cli.main import cli
try:
    cli(sys.argv[1:])
finally:
    print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""

Row = dict[str, Any]


def rows_file(path: Path, n: int) -> Any:
    """A new .npy file of ``n`` rows of float16, to be written a block at a time."""
    return np.lib.format.open_memmap(path, mode="w+", dtype=np.float16, shape=(n, WIDTH))


def train_cost(scratch: Path, text: str) -> Row:
    """The training ``ITEMSxCLASSESxLABELS`` with the preset ``recommended``, from features on disk to the model folder."""
    try:
        items, classes, each = (int(part) for part in text.split("x"))
    except ValueError:
        raise UsageError(f"--trainings {text}: ITEMSxCLASSESxLABELS is expected, as 300000x10x290") from None
    rng = np.random.default_rng(0)
    labels = np.arange(items) % classes
    centres = rng.standard_normal((classes, WIDTH)).astype(np.float32)
    array = rows_file(scratch / "x.npy", items)
    for start in range(0, items, BLOCK):
        own = labels[start : start + BLOCK]
        noise = rng.standard_normal((len(own), WIDTH), dtype=np.float32)
        array[start : start + BLOCK] = centres[own] + 4 * noise
    array.flush()
    np.save(scratch / "y.npy", labels)
    data = open_data(f"features:{scratch / 'x.npy'}", labels=str(scratch / "y.npy"))
    first: list[tuple[int, float]] = []

    def told(step: int, steps: int, figures: dict[str, float]) -> None:
        if not first:
            first.append((steps, time.process_time()))

    config, out = preset("recommended"), scratch / f"m{text}"
    began = time.perf_counter(), time.process_time()
    train(data, out, config=config, labelled=f"{each}-per-class", options=RunOptions(progress=told))
    ended = time.perf_counter(), time.process_time()
    return {
        "items": f"{items:,} x {WIDTH}",
        "classes": classes,
        "labels per class": each,
        "steps": first[0][0],
        "to the first step CPU s": first[0][1] - began[1],
        "the rest CPU s": ended[1] - first[0][1],
        "whole CPU s": ended[1] - began[1],
        "whole wall s": ended[0] - began[0],
        # Peak of the whole process so far: give large trainings last.
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def memory_cost(scratch: Path, sizes: tuple[int, ...]) -> list[Row]:
    """Peak resident memory of ``gpq encode``, each in a process of its own, for files of different lengths."""
    data = save_features(scratch, *clusters(2000, 10, WIDTH, 1.0))
    changes = {"network": {"backbone": "linear"}, "training": {"steps": 2, "validation": 0.0}}
    model = scratch / "linear"
    train(data, model, config=preset("paper").with_settings(changes), labelled="all", protocol="none")
    block = np.random.default_rng(0).standard_normal((BLOCK, WIDTH)).astype(np.float16)
    rows: list[Row] = []
    for n in sizes:
        file, out = scratch / f"rows-{n}.npy", scratch / f"codes-{n}.h5"
        array = rows_file(file, n)
        for start in range(0, n, BLOCK):
            array[start : start + BLOCK] = np.roll(block, start // BLOCK, axis=1)[: n - start]
        array.flush()
        call = [sys.executable, "-c", ENCODE, "encode", model, f"features:{file}", "--out", out]
        done = subprocess.run(list(map(str, call)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise UsageError(f"gpq encode failed: {done.stderr.strip()[-500:]}")
        peak = int(done.stdout.split()[-1]) / 1024
        rows.append({"rows": n, "peak MiB": peak, "input MiB": file.stat().st_size / 2**20})
        rows[-1]["ratio"] = rows[-1]["peak MiB"] / rows[0]["peak MiB"]
        for made in (file, out, scratch / f"features-{n}.h5"):
            made.unlink(missing_ok=True)
    return rows


PARTS = {
    "train": (
        "A whole training",
        "The preset `recommended`, 48 bits, from simulated features on the disk to the model folder. To the first step belong reading, "
        "the noise that the labels call for, and the propagation of labels; wall time is of a machine shared with other jobs.",
    ),
    "memory": (
        "Memory of encoding",
        "Peak resident memory of `gpq encode` on 256-d float16 rows (.npy), each in a process of its own, features.h5 and codes.h5 "
        "written. The ratio is to the first line. Aim: within 1.10.",
    ),
}


def markdown(results: dict[str, Any]) -> str:
    """A table a part."""
    text = ["# Cost", ""]
    for part, (head, note) in PARTS.items():
        if found := results["parts"].get(part):
            text += [f"## {head}", "", note, "", render(found["rows"], "markdown")]
            text += [machine_line(found["machine"], found["command"]), ""]
    return "\n".join(text)


def main() -> None:
    """Measure the requested parts; others keep the results of an earlier run."""
    parser = make_parser(__doc__, "cost.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--trainings", nargs="+", default=["300000x10x290"], help="ITEMSxCLASSESxLABELS (per class)"
    )
    parser.add_argument("--sizes", type=numbers, default=(10_000, 1_000_000), help="rows, for the memory")
    options = parser.parse_args()
    use_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes of the memory part
    results = read_results(options.out, {"parts": {}})
    for part in options.parts:
        with tempfile.TemporaryDirectory(prefix="gpq-cost-") as name:
            scratch = Path(name)
            trainings = options.trainings if part == "train" else []
            rows = [train_cost(scratch, text) for text in trainings] or memory_cost(scratch, options.sizes)
        results["parts"][part] = {"rows": rows, "machine": describe_machine(), "command": own_command()}
        print(render(rows), flush=True)
        save(results, options.out, markdown)


if __name__ == "__main__":
    run_main(main)

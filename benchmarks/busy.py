"""The command line alone and beside one busy process, on scikit-learn's digits.

    python benchmarks/busy.py

Each command runs alone and beside a process that computes without end, in turn; medians of the clock. Start it on an idle machine: the load
average before each run is noted.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import describe_machine, machine_line, make_parser, own_command, run_main, save

from gpq_faiss.errors import DataError

SETUPS = ("alone", "beside")


def seconds(arguments: list[str]) -> float:
    """Of one command, by the clock.

    Raises:
        DataError: it failed.
    """
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "gpq_cli", "-q", *arguments], capture_output=True, text=True, check=False
    )
    took = time.perf_counter() - start
    if done.returncode:
        raise DataError(f"gpq {arguments[0]} failed: {done.stderr.strip()}")
    return took


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = make_parser(__doc__, "busy.json")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    runs: dict[str, dict[str, list[float]]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as name:
        model, codes, index = (f"{name}/{file}" for file in ("model", "codes.h5", "index.faiss"))
        seconds(["train", "digits", "--labelled", "20-per-class", "--preset", "paper", "--out", model])
        seconds(["encode", model, "digits", "--out", codes])
        seconds(["index", model, codes, "--out", index])
        for repeat in range(args.repeats):
            out = Path(name, str(repeat))
            for setup in SETUPS:
                commands = {
                    "train": [
                        "digits",
                        "--labelled",
                        "20-per-class",
                        "--preset",
                        "paper",
                        "--out",
                        f"{out}-{setup}",
                    ],
                    "encode": [model, "digits", "--out", f"{out}-{setup}.h5"],
                    "evaluate": [model, "digits", "--protocol", "1"],
                    "search": [model, index, "digits", "--rows", "0:100", "--out", f"{out}-{setup}.csv"],
                }
                for command, arguments in commands.items():
                    loads.append(os.getloadavg()[0])
                    busy = None
                    if setup == "beside":
                        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
                    try:
                        took = seconds([command, *arguments])
                    finally:
                        if busy is not None:
                            busy.kill()
                            busy.wait()
                    runs.setdefault(command, {}).setdefault(setup, []).append(took)
    rows = []
    for command, of in runs.items():
        alone, beside = (statistics.median(of[setup]) for setup in SETUPS)
        rows.append(
            {"command": command, "alone": alone, "beside": beside, "ratio": beside / alone, "runs": of}
        )
    results = {
        "repeats": args.repeats,
        "rows": rows,
        "load_average": [min(loads), max(loads)],
        "environment": {
            name: os.environ[name] for name in sorted(os.environ) if name.startswith(("OMP_", "OPENBLAS_"))
        },
        "machine": describe_machine(),
        "command": own_command(),
    }
    save(results, args.out, markdown)


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    low, high = results["load_average"]
    own = ", ".join(f"{name}={value}" for name, value in results["environment"].items()) or "none"
    lines = [
        "# Beside a busy process",
        "",
        f"`gpq train digits --labelled 20-per-class --preset paper`, and encode, evaluate and search of 100 queries with its model: "
        f"seconds by the clock, medians of {results['repeats']}, with the start of Python. "
        "*beside*: one other process computes without end. "
        f"Load average before the runs, with the benchmark's own: {low:.1f} to {high:.1f}. Settings of threads in the environment: {own}.",
        "",
        "| command | alone | beside | ratio |",
        "| --- | --: | --: | --: |",
    ]
    for row in results["rows"]:
        lines.append(f"| {row['command']} | {row['alone']:.1f} | {row['beside']:.1f} | {row['ratio']:.2f} |")
    lines += ["", machine_line(results["machine"], results["command"]), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)

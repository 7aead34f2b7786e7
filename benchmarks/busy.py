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
from typing import Any

from common import gpq, make_parser, publish, run_main, timed

TRAIN = ("digits", "--labelled", "20-per-class", "--preset", "paper")
SETUPS = ("alone", "beside")


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = make_parser(__doc__, "busy.json")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    runs: dict[str, dict[str, list[float]]] = {}
    loads = []
    with tempfile.TemporaryDirectory() as folder:
        model, codes, index = (f"{folder}/{file}" for file in ("model", "codes.h5", "index.faiss"))
        gpq("train", *TRAIN, "--out", model)
        gpq("encode", model, "digits", "--out", codes)
        gpq("index", model, codes, "--out", index)
        for out, setup in ((f"{folder}/{i}-{setup}", setup) for i in range(args.repeats) for setup in SETUPS):
            for call in (
                ("train", *TRAIN, "--out", out),
                ("encode", model, "digits", "--out", f"{out}.h5"),
                ("evaluate", model, "digits", "--protocol", "1"),
                ("search", model, index, "digits", "--rows", "0:100", "--out", f"{out}.csv"),
            ):
                loads.append(os.getloadavg()[0])
                busy = [sys.executable, "-c", "while True: pass"] if setup == "beside" else ["true"]
                with subprocess.Popen(busy) as process:
                    try:
                        took = timed(lambda call=call: gpq(*call))[1]  # type: ignore[misc]
                    finally:
                        process.kill()
                runs.setdefault(call[0], {}).setdefault(setup, []).append(took)
    rows = []
    for command, of in runs.items():
        alone, beside = (statistics.median(of[setup]) for setup in SETUPS)
        rows.append(
            {"command": command, "alone": alone, "beside": beside, "ratio": beside / alone, "runs": of}
        )
    threads = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "OPENBLAS_"))}
    results = {"repeats": args.repeats, "rows": rows, "load_average": [min(loads), max(loads)]}
    publish(results | {"environment": threads}, args.out, markdown)


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    low, high = results["load_average"]
    own = ", ".join(f"{name}={value}" for name, value in results["environment"].items()) or "none"
    lines = [
        "# Beside a busy process",
        "",
        f"`gpq train {' '.join(TRAIN)}`, and encode, evaluate and search of 100 queries with its model: "
        f"seconds by the clock, medians of {results['repeats']}, with the start of Python. "
        "*beside*: one other process computes without end. "
        f"Load average before the runs, with the benchmark's own: {low:.1f} to {high:.1f}. Settings of threads in the environment: {own}.",
        "",
        "| command | alone | beside | ratio |",
        "| --- | --: | --: | --: |",
    ]
    for row in results["rows"]:
        lines.append(f"| {row['command']} | {row['alone']:.1f} | {row['beside']:.1f} | {row['ratio']:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_main(main)

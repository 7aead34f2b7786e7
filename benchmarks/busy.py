"""Time of the commands alone and next to a busy process, on scikit-learn's digits.

    python benchmarks/busy.py

Each command runs alone and next to a process that computes without end, in turn. The results are
medians of wall time. Start it on an idle machine: the load average before each run is recorded.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile

from common import Results, gpq, make_parser, publish, run_main, timed

from gpq_faiss.evaluation.tables import render

TRAIN = ("digits", "--labelled", "20-per-class", "--preset", "paper")
LOADS = {"alone": ["true"], "busy": [sys.executable, "-c", "while True: pass"]}


def main() -> None:
    """Parse the command line, measure, write the results."""
    parser = make_parser(__doc__, "busy.json")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    seconds: dict[tuple[str, str], list[float]] = {}
    averages = []
    with tempfile.TemporaryDirectory() as folder:
        model, codes, index = (f"{folder}/{file}" for file in ("model", "codes.h5", "index.faiss"))
        gpq("train", *TRAIN, "--out", model)
        gpq("encode", model, "digits", "--out", codes)
        gpq("index", model, codes, "--out", index)
        search = (model, index, "digits", "--rows", "0:100")
        for i in range(args.repeats):
            for load, process in LOADS.items():
                out = f"{folder}/{i}-{load}"
                for call in (
                    ("train", *TRAIN, "--out", out),
                    ("encode", model, "digits", "--out", f"{out}.h5"),
                    ("evaluate", model, "digits", "--protocol", "1"),
                    ("search", *search, "--out", f"{out}.csv"),
                ):
                    averages.append(os.getloadavg()[0])
                    with subprocess.Popen(process) as running:
                        _, wall, _ = timed(lambda call=call: gpq(*call))  # type: ignore[misc]
                        running.kill()
                    seconds.setdefault((call[0], load), []).append(wall)
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = [
        {"command": name, "alone": alone, "beside": busy, "ratio": busy / alone}
        for name in dict.fromkeys(command for command, _ in seconds)
        for alone, busy in [(medians[name, "alone"], medians[name, "busy"])]
    ]
    threads = {name: value for name, value in os.environ.items() if name.startswith("OMP_")}
    results = {"repeats": args.repeats, "rows": rows, "environment": threads}
    results["load_average"] = [min(averages), max(averages)]
    publish(results, args.out, markdown)


def markdown(results: Results) -> str:
    """Return the table."""
    low, high = results["load_average"]
    settings = ", ".join(f"{name}={value}" for name, value in results["environment"].items())
    return "\n".join(
        [
            "# Beside a busy process",
            "",
            f"`gpq train {' '.join(TRAIN)}`, and encode, evaluate and search of 100 queries with "
            f"its model: seconds by the clock, medians of {results['repeats']}, with the start of "
            "Python. *beside*: one other process computes without end. Load average before the "
            f"runs, with the benchmark's own: {low:.1f} to {high:.1f}. Settings of threads in the "
            f"environment: {settings or 'none'}.",
            "",
            render(results["rows"], "markdown", digits=2),
        ]
    )


if __name__ == "__main__":
    run_main(main)

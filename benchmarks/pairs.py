"""Speed of exact search in two versions of this package, in alternating processes.

    python benchmarks/pairs.py OLD_CHECKOUT NEW_CHECKOUT --models models --items 100000,1000000

Each checkout has a process of its own, and its ``.venv`` if there is one. Both search the same
codes of ``search.py`` on one thread for the k = 10 best: single queries and batches of 1,024. They
take turns, so that a busy machine slows both down; the ratio is the median of the ratios of turns,
by processor time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from common import Results, make_parser, numbers, publish, run_main
from search import draw_codes

from gpq_faiss.evaluation.tables import render

SINGLE, BATCH, K = 256, 1024, 10
# Answers each line "single" or "batch" by the microseconds of a query.
WORKER = f"""
import itertools, sys, time
import faiss, numpy as np
sys.path.insert(0, sys.argv[1])
import gpq_faiss as gpq
assert gpq.__file__.startswith(sys.argv[1]), gpq.__file__
faiss.omp_set_num_threads(1)
Z, codes, xq = (np.load(f"{{sys.argv[2]}}/{{name}}.npy") for name in ("Z", "codes", "xq"))
index = gpq.Index.build(codes, Z)
for mode in itertools.chain(("single", "batch"), sys.stdin):
    blocks = [xq] if mode.strip() == "batch" else np.split(xq[:{SINGLE}], {SINGLE})
    start = time.process_time()
    for block in blocks:
        index.search(block, {K}, threads=1)
    seconds = time.process_time() - start
    print(1e6 * seconds / sum(map(len, blocks)), flush=True)
"""


def start(checkout: Path, folder: str) -> subprocess.Popen[str]:
    """Start the process of a checkout, and wait until it has searched in both modes."""
    python = checkout.resolve() / ".venv" / "bin" / "python"
    call = [python if python.exists() else sys.executable, "-c", WORKER, checkout.resolve(), folder]
    process = subprocess.Popen(
        [*map(str, call)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    for _ in ("single", "batch"):
        process.stdout.readline()  # type: ignore[union-attr]
    return process


def compare(versions: dict[str, Path], arrays: tuple[Any, ...], turns: int) -> list[Results]:
    """Time both versions on codebooks, codes and queries, and return a row for each mode."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, array in zip(("Z", "codes", "xq"), arrays, strict=True):
            np.save(f"{folder}/{name}.npy", array)
        processes = {name: start(checkout, folder) for name, checkout in versions.items()}
        for mode in ("single", "batch"):
            times: dict[str, list[float]] = {name: [] for name in versions}
            for turn in range(turns):
                for name in sorted(versions, reverse=turn % 2 == 0):
                    process: Any = processes[name]
                    print(mode, file=process.stdin, flush=True)
                    times[name].append(float(process.stdout.readline()))
            ratios = np.array(times["new"]) / np.array(times["old"])
            medians = {f"{name}, µs": float(np.median(times[name])) for name in times}
            rows.append({"queries": mode, **medians, "new / old": float(np.median(ratios))})
        for process in processes.values():
            process.communicate()
    return rows


def markdown(results: Results) -> str:
    """Return the table."""
    table = render(results["rows"], "markdown", digits=3)
    return (
        f"# Exact search in two versions\n\nk = {K}, batches of {BATCH:,}, one thread.\n\n{table}"
    )


def main() -> None:
    """Compare all groups, and write the results after each."""
    parser = make_parser(__doc__, "pairs.json")
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--codes", default="default,paper,random", help="trained codes, or random")
    parser.add_argument("--models", type=Path, default=Path("models"), help="of trained codes")
    parser.add_argument("--items", type=numbers, default=(100_000, 1_000_000, 10_000_000))
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    versions, results = {"old": args.old, "new": args.new}, {"rows": list[Results]()}
    for n in args.items:
        for name in args.codes.split(","):
            rows = compare(versions, draw_codes(name, args.models, n, BATCH), args.turns)
            results["rows"] += [{"codes": name, "items": n, **row} for row in rows]
            publish(results, args.out, markdown)
    print(args.out.with_suffix(".md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    run_main(main)

"""Exact search on one GPU, compared with Faiss on the same GPU and exact search on the CPU.

    python benchmarks/gpu.py --models FOLDER --items 1000000,10000000,100000000

Results must equal those of the CPU. Codes are those of `benchmarks/search.py`: trained codes, drawn
with repetition and changed with probability 0.05, and random codes as the worst case. In the exact
search on the GPU, queries and results are tensors on the GPU; in the other searches they are
arrays. Each group (codes, items) is saved when it is done, and a second run computes the missing
ones. ``--device cpu`` tests the script at small sizes; its figures are meaningless and are marked
as such.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import (
    Floats,
    Results,
    describe_machine,
    machine_line,
    make_parser,
    numbers,
    read_results,
    run_main,
    save,
)
from search import Codes, draw_codes

from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.errors import DataError
from gpq_faiss.evaluation.tables import render
from gpq_faiss.gpu.faiss_form import to_faiss_gpu, zero_lists
from gpq_faiss.gpu.index import DeviceIndex
from gpq_faiss.indexes.index import Index
from gpq_faiss.nn.device import resolve_device

ROUNDS = 3
CHECKED = 64  # queries whose results are compared with the CPU's
LIMIT = 0.5  # approximate maximum of seconds for one search


def clock(call: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of several calls, after a warm-up."""
    seconds = []
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def measure(
    Z: Floats, codes: Codes, xq: Floats, device: torch.device, args: argparse.Namespace
) -> Results:
    """Time all searches over the same codes, in microseconds per query."""
    n, on_gpu = len(codes), device.type == "cuda"
    host = Index.build(codes, Z)
    start = time.perf_counter()
    exact = DeviceIndex(host, device)
    if on_gpu:
        torch.cuda.synchronize()
    building = time.perf_counter() - start
    tensor = torch.from_numpy(xq).to(device)
    searches: dict[str, Callable[[int, int], Any]] = {
        "exact, GPU": lambda q, k: exact.search(tensor[:q], k)
    }
    if n <= args.faiss_up_to:
        plain = to_faiss_gpu(host, int(device.index)) if on_gpu else zero_lists(codes, Z, host.ids)
        padded = pad_vectors(xq, int(plain.d))
        searches["Faiss, GPU"] = lambda q, k: plain.search(padded[:q], k)
    compared = n <= args.cpu_up_to
    if compared:
        searches["exact, CPU"] = lambda q, k: host.search(xq[:q], k)
    rows: list[Results] = []
    for k in args.k:
        results = [index.search(xq[:CHECKED], k) for index in ((host, exact) if compared else ())]
        if compared and not all(map(np.array_equal, *results)):
            raise DataError(f"{n:,} codes, k = {k}: the results differ from the CPU's, report this")
        for name, search in searches.items():
            row: Results = {"k": k, "search": name}
            for batch in args.batches:
                q = min(batch, 256)
                seconds = clock(lambda s=search, q=q, k=k: s(q, k)) / q  # type: ignore[misc]
                q = batch if seconds * batch <= LIMIT else max(q, int(LIMIT / seconds))
                row[f"batch {batch:,}"] = (
                    1e6 * clock(lambda s=search, q=q, k=k: s(q, k)) / q  # type: ignore[misc]
                )
            rows.append(row)
    return {"build_seconds": building, "equals_cpu": compared, "rows": rows}


def markdown(results: Results) -> str:
    """Return the tables of the results."""
    lines = ["# Exact search on a GPU", ""]
    if results["rehearsal"]:
        lines += ["A rehearsal of the script on a CPU: these figures mean nothing.", ""]
    lines += [
        f"{machine_line(results['machine'])} Microseconds a query, the fastest of {ROUNDS} calls "
        "with a batch, from Python; all cores are used on the CPU. `Faiss, GPU` is a "
        "`GpuIndexIVFPQ` of the same codes, all of them scanned (`gpq.to_faiss_gpu`). "
        "Made by `benchmarks/gpu.py`.",
        "",
    ]
    for name, group in results["groups"].items():
        source, bits, n = name.split("/")
        equal = ", results equal to the bit" if group["equals_cpu"] else ""
        lines += [f"## {source} codes, {bits} bits, {int(n):,} items", ""]
        lines += [f"On the GPU in {group['build_seconds']:.1f} s{equal}.", ""]
        lines += [render(group["rows"], "markdown", digits=2)]
    return "\n".join(lines)


def main() -> None:
    """Measure missing groups, and write the results after each."""
    parser = make_parser(__doc__, "gpu.json")
    parser.add_argument("--codes", default="default,paper,random", help="trained codes, or random")
    parser.add_argument("--models", type=Path, default=Path("models"), help="of trained codes")
    parser.add_argument("--items", type=numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("-k", type=numbers, default=(10, 100))
    parser.add_argument("--batches", type=numbers, default=(1, 32, 1024, 10_000))
    parser.add_argument("--faiss-up-to", type=int, default=10_000_000, help="items")
    parser.add_argument("--cpu-up-to", type=int, default=100_000_000, help="items")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    device = resolve_device(args.device)
    results = read_results(args.out, {"groups": {}})
    results |= {"machine": describe_machine(), "rehearsal": device.type == "cpu"}
    faiss.omp_set_num_threads(torch.get_num_threads())
    for n, name in itertools.product(args.items, args.codes.split(",")):
        Z, codes, xq = draw_codes(name, args.models, n, max(CHECKED, *args.batches))
        key = f"{name}/{4 * len(Z)}/{n}"
        if key not in results["groups"]:
            results["groups"][key] = measure(Z, codes, xq, device, args)
            save(results, args.out, markdown)
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)

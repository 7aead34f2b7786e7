"""Exact search on one GPU, beside Faiss on the same GPU and the exact search on the processor's cores; results equal the CPU's.

    python benchmarks/gpu.py --models FOLDER --items 1000000,10000000,100000000

Codes are those of `benchmarks/search.py`: trained ones, drawn with repetition and changed with chance 0.05, here on the GPU, and random
ones, which nobody searches. For the exact search queries and results are tensors on the GPU, for the others arrays. Groups (codes, items)
are written when done; a second run computes missing ones, and with ``--within 480`` no group starts after 480 seconds. Without a GPU this
is an error. ``--device cpu`` tests the script at small sizes; its figures are meaningless and marked so.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from common import describe_machine, make_parser, numbers, read_results, run_main, save
from search import CHANGED, TRAINED, Codes, Floats, random_codes, trained

from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.errors import DataError, UsageError
from gpq_faiss.gpu.faiss_form import to_faiss_gpu, zero_lists
from gpq_faiss.gpu.index import DeviceIndex
from gpq_faiss.indexes.index import Index
from gpq_faiss.nn.device import resolve_device
from gpq_faiss.store.rows import RowReader

ROUNDS = 3
CHECKED = 64  # queries whose results are compared with the CPU's
LIMIT = 0.5  # seconds of one search, at most about this
Cell = dict[str, Any]


def clock(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of some calls, after an uncounted one. What is searched ends with a copy to the host, or is waited for."""
    best = np.inf
    for number in range(ROUNDS + 1):
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if number:
            best = min(best, time.perf_counter() - start)
    return float(best)


def enlarged(codes: Codes, n: int, device: torch.device) -> Codes:
    """``n`` codes of 16 codewords drawn with repetition on the device, each codeword changed with chance 0.05."""
    generator = torch.Generator(device).manual_seed(n)
    source = torch.from_numpy(codes).to(device)
    out = np.empty((n, codes.shape[1]), np.uint8)
    for start in range(0, n, 1 << 24):
        stop = min(n, start + (1 << 24))
        part = source[torch.randint(len(source), (stop - start,), generator=generator, device=device)]
        for shift in (0, 4):
            changed = torch.rand(part.shape, generator=generator, device=device) < CHANGED
            other = torch.randint(16, part.shape, generator=generator, device=device, dtype=torch.uint8)
            word = torch.where(changed, other, part >> shift & 15)
            part = part & 0xF0 >> shift | word << shift
        out[start:stop] = part.cpu().numpy()
    return out


def group(Z: Floats, codes: Codes, xq: Floats, device: torch.device, args: Any) -> dict[str, Any]:
    """Times of all searches over the same codes."""
    n, gpu = len(codes), device.type == "cuda"
    host = Index.build(codes, Z)
    start = time.perf_counter()
    exact = DeviceIndex(host, device)
    if gpu:
        torch.cuda.synchronize()
    building = time.perf_counter() - start
    there = torch.from_numpy(xq).to(device)
    ways: dict[str, Callable[[int, int], Any]] = {"exact, GPU": lambda q, k: exact.search(there[:q], k)}
    if n <= args.faiss_up_to:
        alone = to_faiss_gpu(host, int(device.index)) if gpu else zero_lists(codes, Z, host.ids)
        padded = pad_vectors(xq, int(alone.d))
        ways["Faiss, GPU"] = lambda q, k: alone.search(padded[:q], k)
    if n <= args.cpu_up_to:
        ways["exact, CPU"] = lambda q, k: host.search(xq[:q], k)
    cells, equal = [], None
    for k in args.k:
        if n <= args.cpu_up_to:
            expected, found = (index.search(xq[:CHECKED], k) for index in (host, exact))
            equal = equal is not False and all(map(np.array_equal, expected, found))
            if not equal:
                raise DataError(f"{n:,} codes, k = {k}: the results differ from the CPU's, report this")
        for batch in args.batches:
            for name, search in ways.items():
                few = min(batch, 256)
                each = clock(lambda s=search, q=few, k=k: s(q, k)) / few  # type: ignore[misc]
                asked = batch if each * batch <= LIMIT else max(few, int(LIMIT / each))
                seconds = clock(lambda s=search, q=asked, k=k: s(q, k))  # type: ignore[misc]
                cells.append({"k": k, "batch": batch, "way": name, "us": 1e6 * seconds / asked})
    return {"build_seconds": building, "equals_cpu": equal, "cells": cells}


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    machine = result["machine"]
    lines = ["# Exact search on a GPU", ""]
    if result["rehearsal"]:
        lines += ["A rehearsal of the script on a CPU: these figures mean nothing.", ""]
    lines += [
        f"{machine['gpu'] or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores, all used on the CPU; Faiss "
        f"{machine['versions']['faiss']}, torch {machine['versions']['torch']}. Microseconds a query, the fastest of {ROUNDS} calls with a "
        "batch, from Python. `Faiss, GPU` is a `GpuIndexIVFPQ` of the same codes, all of them scanned (`gpq.to_faiss_gpu`). Made by "
        "`benchmarks/gpu.py`.",
        "",
    ]
    for name, found in result["groups"].items():
        source, bits, n = name.split("/")
        cells = found["cells"]
        batches = sorted({cell["batch"] for cell in cells})
        checked = ", results equal to the bit" if found["equals_cpu"] else ""
        lines += [
            f"## {source} codes, {bits} bits, {int(n):,} items",
            "",
            f"On the GPU in {found['build_seconds']:.1f} s{checked}.",
            "",
            f"| k | search | {' | '.join(f'batch {batch:,}' for batch in batches)} |",
            "|--:|---|" + "--:|" * len(batches),
        ]
        us = {(cell["k"], cell["way"], cell["batch"]): cell["us"] for cell in cells}
        for k, way in dict.fromkeys((cell["k"], cell["way"]) for cell in cells):
            lines.append(f"| {k} | {way} | {' | '.join(f'{us[k, way, batch]:,.2f}' for batch in batches)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Compute missing groups, write results."""
    parser = make_parser(__doc__, "gpu.json")
    parser.add_argument("--codes", default="default,paper,random", help="trained codes, or random ones")
    parser.add_argument("--models", type=Path, default=Path("models"), help="of trained codes")
    parser.add_argument("--items", type=numbers, default=(1_000_000, 10_000_000, 100_000_000))
    parser.add_argument("-k", type=numbers, default=(10, 100))
    parser.add_argument("--batches", type=numbers, default=(1, 32, 1024, 10_000))
    parser.add_argument("--faiss-up-to", type=int, default=10_000_000, help="items")
    parser.add_argument("--cpu-up-to", type=int, default=100_000_000, help="items")
    parser.add_argument("--within", type=float, help="seconds after which no group is begun")
    parser.add_argument("--device", default="cuda:0")
    args = parser.parse_args()
    started = time.perf_counter()
    device = resolve_device(args.device)
    names = [name for name in args.codes.split(",") if name]
    if unknown := sorted(set(names) - {*TRAINED, "random"}):
        raise UsageError(f"--codes {','.join(unknown)}: names of {', '.join(TRAINED)}, random are expected")
    result: dict[str, Any] = read_results(args.out, {"groups": {}})
    result |= {"machine": describe_machine(), "rehearsal": device.type == "cpu"}
    faiss.omp_set_num_threads(torch.get_num_threads())
    for n in args.items:
        for name in names:
            if args.within is not None and time.perf_counter() - started > args.within:
                raise UsageError(f"{name}, {n:,} items and what follows are left: run it again")
            queries = max(CHECKED, *args.batches)
            if name == "random":
                Z, codes, xq = random_codes(48, n, queries)
            else:
                folder = trained(args.models, name)
                with RowReader(folder / "codes.h5") as reader:
                    Z, codes = reader.header.codebooks, enlarged(np.asarray(reader.values), n, device)
                vectors = np.load(folder / "queries.npy", allow_pickle=False).astype(np.float32)
                xq = np.resize(vectors, (queries, vectors.shape[1]))
            assert Z is not None
            key = f"{name}/{4 * len(Z)}/{n}"
            if key in result["groups"]:
                continue
            print(key, file=sys.stderr, flush=True)
            result["groups"][key] = group(Z, codes, xq, device, args)
            save(result, args.out, markdown)
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)

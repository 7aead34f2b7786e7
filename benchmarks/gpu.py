"""Speed on one GPU: exact search by torch, search by Faiss; and equality of the results with the CPU's.

    python benchmarks/gpu.py --out benchmarks/results/gpu.json

Codes are drawn on the GPU (uniform: simulated), queries and results are tensors there. As an upper limit, the rate at which
the GPU copies its own memory is measured in the same run. Groups are written when done; a second run computes missing
ones, and with ``--within 480`` no group starts after 480 seconds. All results are in the JSON; the Markdown is generated
from it. Without a GPU this is an error. ``--device cpu`` tests the script at small sizes; its figures are meaningless and
marked so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common import describe_machine, make_parser, numbers, read_results, run_main, save
from torch import Tensor

from gpq_faiss.codes.checks import Floats
from gpq_faiss.codes.codebooks import pad_vectors
from gpq_faiss.errors import DataError
from gpq_faiss.gpu.faiss_form import to_faiss_gpu, zero_lists
from gpq_faiss.gpu.index import DeviceIndex
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.nn.device import resolve_device

K = 100
SUBDIM = 12
ROUNDS = 3
PARITY_QUERIES = 1024  # Faiss processes several at a time, so a few would not show its effect
Cell = dict[str, Any]


def finish(device: torch.device) -> None:
    """Wait for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clock(run: Callable[[], Any], device: torch.device, rounds: int = ROUNDS) -> float:
    """Seconds of the fastest of some calls, after an uncounted one."""
    run()
    best = np.inf
    for _ in range(rounds):
        finish(device)
        start = time.perf_counter()
        run()
        finish(device)
        best = min(best, time.perf_counter() - start)
    return float(best)


def copy_bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second read and written by a copy of ``size`` bytes within the GPU."""
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock(lambda: target.copy_(source), device, 20)


def draw_codebooks(M: int, seed: int) -> Floats:
    """Unit-norm codebooks float32 [M, 16, 12]."""
    Z = np.random.default_rng([seed, M]).standard_normal((M, 16, SUBDIM))
    unit: Floats = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    return unit


def draw(bits: int, n: int, queries: int, device: torch.device) -> tuple[Floats, Tensor, Tensor]:
    """Codebooks, uniform codes and normal queries, these two on the device."""
    M = bits // 4
    generator = torch.Generator(device).manual_seed(bits)
    codes = torch.empty((n, (M + 1) // 2), dtype=torch.uint8, device=device)
    for start in range(0, n, 1 << 27):  # in parts, to need no more memory than the codes
        part = codes[start : start + (1 << 27)]
        part.random_(0, 256, generator=generator)
    if M % 2:
        codes[:, -1] &= 15
    xq = torch.randn((queries, M * SUBDIM), generator=generator, device=device)
    return draw_codebooks(M, 0), codes, xq


def ways(
    Z: Floats, codes: Tensor, device: torch.device, memory: int, faiss_up_to: int
) -> dict[str, Callable[[Tensor, int], Any]]:
    """All searches: ``exact``, by torch; ``faiss``, which takes and gives arrays on the host."""
    n = len(codes)
    host = MemoryIndex.build(codes.cpu().numpy(), Z)
    found: dict[str, Callable[[Tensor, int], Any]] = {"exact": DeviceIndex(host, device, memory).search}
    if n <= faiss_up_to:
        gpu = device.type == "cuda"
        alone = to_faiss_gpu(host, int(device.index)) if gpu else zero_lists(host.codes, Z, host.ids)
        found["faiss"] = lambda xq, k: alone.search(pad_vectors(xq.cpu().numpy(), int(alone.d)), k)
    return found


def speed(
    bits: int, n: int, batches: tuple[int, ...], args: argparse.Namespace, device: torch.device
) -> Cell:
    """Queries and codes per second of all searches, and the GPU's copy rate."""
    Z, codes, xq = draw(bits, n, max(batches), device)
    size = codes.shape[1]
    bandwidth = copy_bandwidth(device, args.copy_bytes)
    start = time.perf_counter()
    indexes = ways(Z, codes, device, args.memory, args.faiss_up_to)
    finish(device)
    cells = []
    building = time.perf_counter() - start
    k = min(K, n)
    for batch in batches:
        for name, index in indexes.items():
            few = min(batch, 4)
            each = clock(lambda i=index, f=few: i(xq[:f], k), device, 1) / few  # type: ignore[misc]
            asked = batch if each * batch <= args.limit else max(few, int(args.limit / each))
            seconds = clock(lambda i=index, a=asked: i(xq[:a], k), device)  # type: ignore[misc]
            cells.append(
                {
                    "search": name,
                    "batch": batch,
                    "queries_timed": asked,
                    "queries_per_s": asked / seconds,
                    "codes_per_s": asked * n / seconds,
                    "code_bytes_over_copy_bytes": asked * n * size / seconds / bandwidth,
                }
            )
    return {"copy_bytes_per_s": bandwidth, "build_seconds": building, "k": k, "cells": cells}


def agree(found: Any, expected: Any, what: str) -> None:
    """Raises DataError: two arrays are not the same."""
    if not np.array_equal(found, expected):
        wrong = int((np.asarray(found) != np.asarray(expected)).sum())
        raise DataError(f"{what}: {wrong:,} values differ from the CPU's, report this")


def parity(bits: int, n: int, device: torch.device, memory: int) -> Cell:
    """Compare the results of all searches with the CPU's exact search on ``n`` codes."""
    Z, codes, xq = draw(bits, n, PARITY_QUERIES, device)
    held = MemoryIndex.build(codes.cpu().numpy(), Z)
    queries = xq.cpu().numpy()
    largest = 0.0
    for k in (1, min(K, n), min(5000, n)):
        D, found = held.search(queries, k)
        for name, index in ways(Z, codes, device, memory, n).items():
            if name == "faiss" and k > 2048:
                continue
            scores, ids = (torch.as_tensor(part).cpu().numpy() for part in index(xq, k))
            if name == "faiss":
                largest = max(largest, float(np.abs(scores - D).max()))
                if not largest < 1e-4:
                    raise DataError(
                        f"Faiss' scores of {bits} bits, k = {k}, are off by {largest:g}: report this"
                    )
                continue
            agree(scores, D, f"scores by {name}, {bits} bits, k = {k}")
            agree(ids, found, f"ids by {name}, {bits} bits, k = {k}")
    return {
        "items": n,
        "queries": PARITY_QUERIES,
        "exact": "equal to the bit",
        "faiss_largest_difference": largest,
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    machine = result["machine"]
    lines = ["# Search on a GPU", ""]
    if result["rehearsal"]:
        lines += ["A rehearsal of the script on a CPU: these figures mean nothing.", ""]
    lines += [
        f"{machine['gpu'] or 'no GPU'}; {machine['cpu']}, {machine['cores']} cores; Faiss {machine['versions']['faiss']}, "
        f"torch {machine['versions']['torch']}. k = {K}; uniform codes drawn on the card; queries and results are tensors "
        "there, for Faiss arrays on the host. The last column is bytes of codes looked at over bytes that a copy within the card "
        "moves in that time, "
        "measured in the same run; a batch may pass 1, since one read of a code serves many queries.",
        "",
    ]
    for name, group in result["search"].items():
        bits, n = name.split("/")
        lines += [
            f"## {bits} bits, {int(n):,} items (copy {group['copy_bytes_per_s'] / 1e9:,.0f} GB/s)",
            "",
            "| search | batch | queries/s | G codes/s | x copy |",
            "|---|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {c['search']} | {c['batch']:,} | {c['queries_per_s']:,.1f} | {c['codes_per_s'] / 1e9:,.2f} | "
            f"{c['code_bytes_over_copy_bytes']:.2f} |"
            for c in group["cells"]
        ]
        lines.append("")
    lines += [
        "## Parity with the CPU",
        "",
        "| bits | items | exact | Faiss alone, scores off by |",
        "|--:|--:|---|--:|",
    ]
    for bits, cell in result["parity"].items():
        lines.append(
            f"| {bits} | {cell['items']:,} | {cell['exact']} | {cell['faiss_largest_difference']:.1e} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Parse options, compute missing groups, write results."""
    parser = make_parser(__doc__, "gpu.json")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--items", type=numbers, default=(10_000_000, 100_000_000, 1_000_000_000))
    parser.add_argument("--bits", type=numbers, default=(12, 24, 32, 48))
    parser.add_argument("--batches", type=numbers, default=(1, 10, 100, 1000, 10_000))
    parser.add_argument(
        "--faiss-up-to", type=int, default=100_000_000, help="items; their lists are made on the host"
    )
    parser.add_argument("--limit", type=float, default=0.5, help="seconds a timing; longer batches are cut")
    parser.add_argument(
        "--within", type=float, help="seconds after which no group is begun; a second run goes on"
    )
    parser.add_argument("--memory", type=int, default=4 << 30, help="bytes a search may use beyond the codes")
    parser.add_argument("--copy-bytes", type=int, default=1 << 30)
    parser.add_argument("--check-items", type=int, default=100_000)
    args = parser.parse_args()
    started = time.perf_counter()
    device = resolve_device(args.device)
    parts: tuple[str, ...] = ("parity", "search")
    held: dict[str, Any] = read_results(args.out, {})
    result: dict[str, Any] = {"machine": describe_machine(), "rehearsal": device.type == "cpu"} | {
        part: held.get(part, {}) for part in parts
    }
    result["settings"] = {"limit_seconds": args.limit, "memory": args.memory, "rounds": ROUNDS}

    left: list[str] = []

    def keep(part: str, name: str, make: Callable[[], Cell]) -> None:
        if name in result[part]:
            return
        if args.within is not None and time.perf_counter() - started > args.within:
            left.append(f"{part} {name}")
            return
        print(f"{part} {name}", file=sys.stderr, flush=True)
        result[part][name] = make()
        save(result, args.out, markdown)

    for bits in args.bits:
        keep("parity", str(bits), lambda b=bits: parity(b, args.check_items, device, args.memory))  # type: ignore[misc]
    for n in args.items:
        for bits in args.bits:
            keep("search", f"{bits}/{n}", lambda b=bits, n=n: speed(b, n, args.batches, args, device))  # type: ignore[misc]
    if left:
        print(f"left for another run: {', '.join(left)}", file=sys.stderr)
    if args.out.exists():
        print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)

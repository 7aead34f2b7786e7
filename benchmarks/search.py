"""Speed of all searches on the CPU, the rule for grouping, and the cost of building.

    python benchmarks/search.py --items 1000000,10000000 --data features:cifar10-features/features.npy --labels labels.npy
    python benchmarks/search.py --speed-only -k 10 --items 100000,1000000 --bits 12,48 --threads 1 --batches 1 \\
        --out benchmarks/results/search-one.json

Codes are drawn at random, and (with ``--data``) from the distribution of a model trained here. Its items are simulated: their
tempered class probabilities are mixtures of those of two real items of one class. Within a group (source, bits, items) all searches are
interleaved, so that ratios are valid on a busy machine too; compare numbers within a group only. For short searches a round is the median
of several, each with its own queries. Groups are written when done; a second run computes missing ones. All results are in the JSON; the
Markdown is generated from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import faiss
import numpy as np
import torch
from common import describe_machine, make_parser, numbers, read_results, run_main, save, timed
from numpy.typing import NDArray

from gpq_faiss.build.shards import Hdf5Shard
from gpq_faiss.build.stream import build_index
from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.codebooks import inject, inject_fused, pad_vectors
from gpq_faiss.codes.groups import worth_grouping
from gpq_faiss.config import codebooks_for_bits, preset
from gpq_faiss.data.base import FeatureDataset
from gpq_faiss.data.open import open_data
from gpq_faiss.encoder import Encoder
from gpq_faiss.errors import UsageError
from gpq_faiss.faissio.model import read_model
from gpq_faiss.faissio.storage import Storage
from gpq_faiss.indexes.file import open_file
from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.inputs import parse_bytes
from gpq_faiss.nn.posterior import PosteriorNetwork
from gpq_faiss.stages.train import train
from gpq_faiss.store import Header, RowWriter

BATCHES = (1, 32, 1024)
SUBDIM = 12
ROUNDS = 5
LEARNT = (
    64  # queries after which an engine has chosen its number of candidates, or switched to distinct codes
)
SHORT = 0.01  # minimum seconds per round; with shorter searches there are five times as many rounds
KINDS: tuple[str, ...] = ("exact", "grouped")
Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]
Cell = dict[str, Any]


def random_source(bits: int, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
    """Codebooks, uniform codes and normal queries."""
    rng = np.random.default_rng([bits, 0])
    M = bits // 4
    Z = rng.standard_normal((M, 16, SUBDIM))
    Z = (Z / np.linalg.norm(Z, axis=2, keepdims=True)).astype(np.float32)
    codes = rng.integers(0, 256, (n, (M + 1) // 2), dtype=np.uint8)
    if M % 2:
        codes[:, -1] &= 15
    return Z, codes, rng.standard_normal((queries, M * SUBDIM)).astype(np.float32)


class Trained:
    """Models of some code lengths, and items and queries like those they were trained on.

    Args:
        spec: data as ``gpq train`` takes it; ``labels`` as its ``--labels``.
        folder: for the models, which are kept.
        steps: of each training.
    """

    def __init__(self, spec: str, labels: str | None, folder: Path, steps: int) -> None:
        data = open_data(spec, labels=labels)
        if not isinstance(data, FeatureDataset):
            raise UsageError(f"{spec} holds images: this benchmark takes features")
        self.data = data
        self.folder = folder
        self.steps = steps
        dense = data.require_labels().dense(dtype=bool)
        self.classes = [np.flatnonzero(dense[:, c]) for c in range(dense.shape[1])]

    def model(self, bits: int) -> Path:
        """The model folder, trained if missing."""
        config = preset("recommended")
        config = dataclasses.replace(
            config,
            quantizer=dataclasses.replace(config.quantizer, codebooks=codebooks_for_bits(bits, 16)),
            training=dataclasses.replace(config.training, steps=self.steps, seed=0),
        )
        return train(
            self.data, self.folder / f"model-{bits}", config=config, labelled="500-per-class", resume=True
        )

    def __call__(self, bits: int, n: int, queries: int) -> tuple[Floats, Codes, Floats]:
        """Codebooks, codes of ``n`` simulated items, and vectors of real queries."""
        folder = self.model(bits)
        encoder = Encoder.load(folder)
        network = cast(PosteriorNetwork, encoder.model.network)
        Z = read_model(folder).codebooks
        rng = np.random.default_rng([bits, n])
        rows = rng.permutation(len(self.data))
        xq, _ = encoder.embed(self.data.read(np.sort(rows[:queries])), queries=True)
        step = 1 << 14
        with torch.inference_mode():
            blocks = (self.data.read(slice(start, start + step)) for start in range(0, len(self.data), step))
            seen = [network.features(torch.from_numpy(block)) for block in blocks]
            features = torch.cat([part for part, _ in seen])
            posterior = network.posterior(torch.cat([raw for _, raw in seen]))
            codes = np.empty((n, (len(Z) + 1) // 2), np.uint8)
            for start in range(0, n, step):
                size = min(step, n - start)
                class_of = rng.integers(0, len(self.classes), size)
                pair = np.empty((2, size), np.int64)
                for c, members in enumerate(self.classes):
                    here = np.flatnonzero(class_of == c)
                    pair[:, here] = rng.choice(members, (2, len(here)))
                share = torch.from_numpy(rng.random((size, 1), dtype=np.float32))
                mixed = [share * of[pair[0]] + (1 - share) * of[pair[1]] for of in (features, posterior)]
                codes[start : start + size] = pack_codes(network.assign(*mixed).numpy(), Z.shape[1])
        return Z, codes, xq


def ways(
    Z: Floats, codes: Codes, k: int
) -> Iterator[tuple[str, Callable[[Floats, int], Any], MemoryIndex | None]]:
    """Name, search of (queries, threads), and the engine behind it."""

    def plain(index: Any) -> Callable[[Floats, int], Any]:
        def search(xq: Floats, threads: int) -> Any:
            faiss.omp_set_num_threads(threads)
            return index.search(pad_vectors(xq, index.d), k)

        return search

    flat: Any = inject(Z)
    flat.add_sa_codes(codes)
    yield "IndexPQ", plain(flat), None
    fused = inject_fused(Z)
    fused.add_sa_codes(codes)
    yield "fused", plain(fused), None
    yield "FastScan", plain(faiss.IndexPQFastScan(flat)), None
    for kind in KINDS:
        engine = MemoryIndex.build(codes, Z, kind=kind)

        def search(xq: Floats, threads: int, engine: MemoryIndex = engine) -> Any:
            return engine.search(xq, k, threads=threads)

        yield kind, search, engine


def clock(run: Callable[[], Any]) -> float:
    """Seconds of one call."""
    return clock_cores(run)[0]


def clock_cores(run: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call, and how many cores it had on average: below the number of threads where these wait, be it for
    each other or because other work takes the machine."""
    _, seconds, busy = timed(run)
    return seconds, busy / seconds


def speed_group(
    Z: Floats,
    codes: Codes,
    xq: Floats,
    threads: tuple[int, ...],
    batches: tuple[int, ...],
    limit: float,
    k: int,
) -> list[Cell]:
    """All ways, batches and thread counts over the same codes, timed in turns: the best and the median of some rounds."""
    cells: list[Cell] = []
    built = []
    for name, search, engine in ways(Z, codes, k):
        search(xq[:1], 1)  # structures built on first use
        if engine is not None:  # and settings adapted to the first queries
            for at in range(min(LEARNT, len(xq))):
                search(xq[at : at + 1], 1)
        built.append((name, search, engine))
    distinct = built[-1][2].distinct if built[-1][2] is not None else None
    for count in threads:
        for batch in batches:
            asked: dict[str, int] = {}
            calls: dict[str, int] = {}
            for name, search, _ in built:
                few = min(batch, 4)
                each = min(clock(lambda s=search, f=few, c=count: s(xq[:f], c)) for _ in range(3)) / few  # type: ignore[misc]
                asked[name] = batch if each * batch <= limit else max(few, int(limit / each))
                most = len(xq) // asked[name]
                calls[name] = min(most, max(1, int(SHORT / (each * asked[name]))))
            timed: dict[str, list[tuple[float, float]]] = {name: [] for name in asked}
            rounds = ROUNDS * (5 if max(calls.values()) > 1 else 1)
            for number in range(rounds):
                for name, search, _ in built:
                    size, n = asked[name], calls[name]
                    first = number * n % (len(xq) // size - n + 1)
                    parts = [xq[at * size : (at + 1) * size] for at in range(first, first + n)]
                    each_of = [clock_cores(lambda s=search, q=q, c=count: s(q, c)) for q in parts]  # type: ignore[misc]
                    seconds, cores = np.median(np.array(each_of), axis=0).tolist()
                    timed[name].append((seconds / size, cores))
            times = {
                name: np.array([seconds for seconds, _ in rounds_of]) for name, rounds_of in timed.items()
            }
            for name, _, engine in built:
                each, cores = min(timed[name])
                stats = engine.stats() if engine is not None else {}
                cells.append(
                    {
                        "engine": name,
                        "threads": count,
                        "batch": batch,
                        "queries_timed": asked[name] * calls[name],
                        "rounds": rounds,
                        "queries_per_s": 1 / each,
                        "codes_per_s": len(codes) / each,
                        "median_us": float(np.median(times[name])) * 1e6,
                        "times_fastscan": float(np.median(times[name] / times["FastScan"])),
                        "cores": cores,
                        "proven_first": stats.get("proven_first"),
                        "distinct": distinct,
                    }
                )
    return cells


def grouping(n: int = 1_000_000) -> list[Cell]:
    """Exact over items against exact over groups, at falling shares of distinct codes (48 bits, one thread)."""
    cells = []
    Z, codes, xq = random_source(48, n, 64)
    rng = np.random.default_rng(1)
    for share in (1.0, 0.8, 0.65, 0.5, 0.35, 0.2, 0.05):
        some = codes[: int(n * share)]
        repeated = np.concatenate([some, some[rng.integers(0, len(some), n - len(some))]])
        engines = {kind: MemoryIndex.build(repeated, Z, kind=kind) for kind in KINDS}
        best: dict[str, float] = dict.fromkeys(engines, np.inf)
        for _ in range(ROUNDS + 1):
            for kind, engine in engines.items():
                best[kind] = min(best[kind], clock(lambda e=engine: e.search(xq, 100, threads=1)))  # type: ignore[misc]
        cells.append({"share": share, "speed_of_grouped": best["exact"] / best["grouped"]})
    return cells


def peak_bytes() -> int:
    """Peak memory of this process since it was last reset (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    return 0


def build_one(rows: int, memory: str, folder: Path) -> Cell:
    """Write shards of 48-bit codes, build an index of them in a stream, open and search it; to run in its own process."""
    Z, _, xq = random_source(48, 1, 32)
    header = Header("codes", 6, "0" * 16, Z, "1" * 16)
    shards = []
    rng = np.random.default_rng(0)
    for start in range(0, rows, 10_000_000):
        path = folder / f"{start}.h5"
        size = min(10_000_000, rows - start)
        with RowWriter(path, header) as writer:
            for at in range(start, start + size, 1_000_000):
                n = min(1_000_000, start + size - at)
                writer.append(rng.integers(0, 256, (n, 6), dtype=np.uint8), np.arange(at, at + n) * 2, None)
            writer.finish()
        shards.append(Hdf5Shard(path, Z, "0" * 16, "benchmark"))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = peak_bytes()
    start_time = time.perf_counter()
    path = build_index(shards, folder / "i.faiss", Z, Storage("4-bit"), memory=parse_bytes(memory))
    seconds = time.perf_counter() - start_time
    peak = peak_bytes()
    start_time = time.perf_counter()
    engine = open_file(path, memory)
    opening = time.perf_counter() - start_time
    engine.search(xq[:1], 100, threads=1)
    one = clock(lambda: engine.search(xq[:1], 100, threads=1))
    batch = clock(lambda: engine.search(xq, 100, threads=1))
    return {
        "rows": rows,
        "memory": memory,
        "build_seconds": seconds,
        "rows_per_s": rows / seconds,
        "file_bytes": path.stat().st_size,
        "peak_bytes_above_start": max(0, peak - before),
        "peak_bytes": peak,
        "open_seconds": opening,
        "search_1_seconds": one,
        "search_32_seconds": batch,
        "search_peak_bytes": peak_bytes(),
    }


def one_by_one(groups: dict[str, Any]) -> list[str]:
    """The table of batches of one on one thread, of the groups that have medians."""
    rows = []
    for name, group in groups.items():
        source, bits, n = name.split("/")
        rows += [
            f"| {source} | {bits} | {int(n):,} | {cell['engine']} | {1e6 / cell['queries_per_s']:,.0f} | "
            f"{cell['median_us']:,.0f} | {cell['times_fastscan']:.2f} |"
            for cell in group["cells"]
            if (cell["threads"], cell["batch"]) == (1, 1) and "median_us" in cell
        ]
    if not rows:
        return []
    return [
        "## One query at a time, one thread",
        "",
        "Microseconds a query, in the best and in the median round (each the median of its queries); and how many times FastScan's "
        "of the same round that is, in the median. Other work on the machine shows in the medians.",
        "",
        "| codes | bits | items | engine | best | median | times FastScan |",
        "|---|--:|--:|---|--:|--:|--:|",
        *rows,
        "",
    ]


def markdown(result: dict[str, Any]) -> str:
    """The tables of a result."""
    machine = result["machine"]
    lines = [
        "# Search on the CPU",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, Faiss {machine['versions']['faiss']}; k = {result['settings']['k']}. The machine was "
        'shared with other work while this ran, so compare numbers within a group only. "Cores had": processor time over '
        "time, where it was taken; two threads that had one core say nothing of two threads.",
        "",
    ]
    lines += one_by_one(result["groups"])
    for name, group in result["groups"].items():
        source, bits, n = name.split("/")
        distinct = group["cells"][0]["distinct"]
        lines += [
            f"## {source} codes, {bits} bits, {int(n):,} items ({distinct:,} distinct; auto: "
            f"{'grouped' if worth_grouping(int(n), distinct) else 'exact'}; best of {group['rounds']} rounds or more)",
            "",
            "| engine | threads | cores had | batch | queries/s | G codes/s | x IndexPQ | x FastScan | proven at first |",
            "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        for cell in group["cells"]:
            peers = {
                c["engine"]: c["queries_per_s"]
                for c in group["cells"]
                if (c["threads"], c["batch"]) == (cell["threads"], cell["batch"])
            }
            speed = cell["queries_per_s"]
            share = "" if cell["proven_first"] is None else f"{cell['proven_first']:.1%}"
            cores = f"{cell['cores']:.1f}" if "cores" in cell else ""
            lines.append(
                f"| {cell['engine']} | {cell['threads']} | {cores} | {cell['batch']} | {speed:,.0f} | {cell['codes_per_s'] / 1e9:.3f} | "
                f"{speed / peers['IndexPQ']:.1f} | {speed / peers['FastScan']:.2f} | {share} |"
            )
        lines.append("")
    if "grouping" in result:
        lines += ["## Grouping: speed of `grouped` over `exact`, 1,000,000 items, 48 bits, batch of 64", ""]
        lines += ["| share of distinct codes | speed |", "|--:|--:|"]
        lines += [f"| {c['share']:.0%} | {c['speed_of_grouped']:.2f} |" for c in result["grouping"]] + [""]
    if result.get("building"):
        lines += ["## Building in a stream and searching on disk, 48 bits, one thread", ""]
        lines += [
            "| rows | budget | rows/s | file MB | peak MB above start | open ms | one query s | 32 queries s |",
            "|--:|--:|--:|--:|--:|--:|--:|--:|",
        ]
        lines += [
            f"| {c['rows']:,} | {c['memory']} | {c['rows_per_s']:,.0f} | {c['file_bytes'] / 1e6:,.0f} | "
            f"{c['peak_bytes_above_start'] / 1e6:,.0f} | {c['open_seconds'] * 1e3:.1f} | {c['search_1_seconds']:.2f} | "
            f"{c['search_32_seconds']:.2f} |"
            for c in result["building"].values()
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:  # noqa: PLR0915 - options, and groups one after another
    """Parse options, compute missing groups, write results."""
    parser = make_parser(__doc__, "search.json", whole=True)
    parser.add_argument("-k", type=int, default=100, help="results a query")
    parser.add_argument(
        "--speed-only", action="store_true", help="neither the rule of grouping nor the cost of building"
    )
    parser.add_argument("--items", type=numbers, default=(1_000_000,))
    parser.add_argument("--bits", type=numbers, default=(12, 24, 32, 48))
    parser.add_argument("--threads", type=numbers, default=(1, 2))
    parser.add_argument("--batches", type=numbers, default=BATCHES, help="queries at a time")
    parser.add_argument(
        "--data", help="features to train on, as gpq train takes them; without it, random codes only"
    )
    parser.add_argument("--labels")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds a timing; longer batches are cut")
    parser.add_argument("--build-rows", type=numbers, default=(1_000_000, 10_000_000))
    parser.add_argument("--build-memory", default="256MB")
    parser.add_argument(
        "--models", type=Path, help="where trained models are kept (default: a temporary folder)"
    )
    parser.add_argument("--build-one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.build_one is not None:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(build_one(args.build_one, args.build_memory, Path(folder))))
        return
    result: dict[str, Any] = read_results(args.out, {"groups": {}})
    if result["groups"] and result["settings"]["k"] != args.k:
        raise UsageError(
            f"{args.out} is of k = {result['settings']['k']}: give another --out for k = {args.k}"
        )
    result["machine"] = describe_machine()
    result["settings"] = {"k": args.k, "steps": args.steps, "limit_seconds": args.limit}

    def keep() -> None:
        save(result, args.out, markdown)

    with tempfile.TemporaryDirectory() as scratch:
        sources: dict[str, Callable[[int, int, int], tuple[Floats, Codes, Floats]]] = {
            "random": random_source
        }
        if args.data:
            models = args.models or Path(scratch)
            models.mkdir(parents=True, exist_ok=True)
            sources["trained"] = Trained(args.data, args.labels, models, args.steps)
        for n in args.items:
            for source, draw in sources.items():
                for bits in args.bits:
                    name = f"{source}/{bits}/{n}"
                    if name in result["groups"]:
                        continue
                    print(name, file=sys.stderr, flush=True)
                    Z, codes, xq = draw(bits, n, max(*BATCHES, *args.batches))
                    cells = speed_group(Z, codes, xq, args.threads, args.batches, args.limit, args.k)
                    result["groups"][name] = {"rounds": ROUNDS, "cells": cells}
                    keep()
    if args.speed_only:
        print(args.out.with_suffix(".md"))
        return
    if "grouping" not in result:
        result["grouping"] = grouping()
        keep()
    building = result.setdefault("building", {})
    for rows in args.build_rows:
        if str(rows) not in building:
            print(f"building {rows:,}", file=sys.stderr, flush=True)
            command = [
                sys.executable,
                __file__,
                "--build-one",
                str(rows),
                "--build-memory",
                args.build_memory,
            ]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            building[str(rows)] = json.loads(done.stdout)
            keep()
    keep()
    print(args.out.with_suffix(".md"))


if __name__ == "__main__":
    run_main(main)

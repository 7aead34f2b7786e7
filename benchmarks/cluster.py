"""Stages on a Ray cluster of two nodes on this machine, beside the plain commands.

    OMP_NUM_THREADS=1 python benchmarks/cluster.py

Encoding, building and searching in one process, and with 1, 2 and 4 workers; rounds are interleaved, so that other work on the machine
meets all alike. "Overhead" is one worker against one process. The times of single searches against shards on two nodes stand beside
those against one file, and so does what a search takes whose node was just killed.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from common import describe_machine, make_parser, run_main, save, use_threads
from ray_nodes import Nodes, told

from gpq_faiss.cluster.search import ClusterIndex, Holders
from gpq_faiss.config import merge, preset, validate
from gpq_faiss.data.open import open_data
from gpq_faiss.faissio.model import read_model
from gpq_faiss.indexes.best import Best
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.stages.encode import encode_shards
from gpq_faiss.stages.index import index, index_shards
from gpq_faiss.stages.train import train
from gpq_faiss.store import Header, RowWriter

WORKERS = (0, 1, 2, 4)
"""0: one process without Ray."""
WIDTH = 512


class Bench:
    """Data and the calls that are timed; ``items`` are encoded, ``codes`` are built and searched."""

    def __init__(self, folder: Path, items: int, codes: int) -> None:
        self.folder, self.items, self.codes = folder, items, codes
        rng = np.random.default_rng(0)
        np.save(folder / "x.npy", rng.standard_normal((items, WIDTH), dtype=np.float32))
        np.save(folder / "some.npy", rng.standard_normal((2000, WIDTH), dtype=np.float32))
        np.save(folder / "labels.npy", rng.integers(0, 4, 2000))
        config = validate(merge(preset("paper"), {"training": {"steps": 5}, "network": {"hidden": [2048]}}))
        some = open_data(f"features:{folder / 'some.npy'}", labels=str(folder / "labels.npy"))
        self.model = train(some, folder / "model", config=config, labelled="20-per-class")
        self.sources = [self._source(number, rng) for number in range(8)]

    def _source(self, number: int, rng: np.random.Generator) -> Path:
        header = read_model(self.model)
        n = self.codes // 8
        self.codebooks = header.codebooks
        size = (len(header.codebooks) + 1) // 2
        rows = Header(
            kind="codes",
            width=size,
            model_fingerprint=header.model_fingerprint,
            codebooks=header.codebooks,
            data_fingerprint=str(number),
        )
        with RowWriter(self.folder / f"codes-{number}.h5", rows) as writer:
            pool = rng.integers(0, 256, (100_000, size), np.uint8)
            writer.append(pool[rng.integers(0, len(pool), n)], np.arange(n) + number * n, None)
            return writer.finish()

    def encode(self, out: Path, address: str | None, workers: int) -> None:
        """All items, in eight shards."""
        encode_shards(
            self.model,
            f"features:{self.folder / 'x.npy'}",
            out,
            ray=address,
            shard_items=-(-self.items // 8),
            workers=workers or None,
        )

    def build(self, out: Path, address: str | None, workers: int) -> None:
        """All codes, in eight shards of the flat form."""
        out.mkdir()
        index_shards(
            self.model,
            self.sources,
            out / "m.json",
            kind="fastscan",
            ray=address,
            workers=workers or None,
            memory="256MB",
        )


def stages(bench: Bench, address: str, rounds: int) -> dict[str, Any]:
    """Seconds of each stage by workers, a list of rounds each."""
    seconds: dict[str, dict[str, list[float]]] = {}
    for turn in range(rounds + 1):  # the first starts the workers, and does not count
        for name, call in (("encode", bench.encode), ("build", bench.build)):
            for workers in WORKERS:
                out = bench.folder / f"{name}-{workers}"
                began = time.perf_counter()
                call(out, address if workers else None, workers)
                took = time.perf_counter() - began
                shutil.rmtree(out)
                if turn:
                    seconds.setdefault(name, {}).setdefault(str(workers), []).append(round(took, 3))
    return seconds


def searching(bench: Bench, nodes: Nodes, rounds: int, single_queries: int) -> dict[str, Any]:
    """Batches and single queries against one file and against shards on two nodes; and a killed node."""
    folder = bench.folder / "search"
    folder.mkdir()
    manifest = index_shards(bench.model, bench.sources, folder / "m.json", kind="fastscan", memory="256MB")
    single = index(bench.model, bench.sources, folder / "one.faiss", kind="fastscan", memory="256MB")
    found: dict[str, Any] = {"batch_s": {}, "single_ms": {}, "worker_ms": [[], []], "one_ms": []}
    opened: dict[str, Any] = {
        "one file": open_index(single, memory="2GB"),
        "shards, one process": open_index(manifest, memory="2GB"),
    }
    width = opened["one file"].width
    queries = np.random.default_rng(1).standard_normal((256, width)).astype(np.float32)
    held = []
    for workers in WORKERS[1:]:
        holders = Holders(nodes.address, workers)
        held.append(holders)
        opened[f"shards, {workers} workers"] = ClusterIndex(manifest, holders, memory=2 * 10**9)
    for turn in range(rounds + 1):
        for name, one in opened.items():
            began = time.perf_counter()
            one.search(queries, 100, threads=1)
            if turn:
                found["batch_s"].setdefault(name, []).append(round(time.perf_counter() - began, 3))
    for n in range(single_queries):
        for name, one in opened.items():
            began = time.perf_counter()
            one.search(queries[n % 256][None], 100, threads=1)
            found["single_ms"].setdefault(name, []).append(round(1000 * (time.perf_counter() - began), 3))
        found["one_ms"].append(alone(opened["shards, 1 workers"], queries[n % 256][None], 0))
        for place in range(2):
            found["worker_ms"][place].append(
                alone(opened["shards, 2 workers"], queries[n % 256][None], place)
            )
    found["merge_ms"] = merging(queries)
    for one in opened.values():
        one.close()
    for holders in held:
        holders.close()
    found["recovery_s"] = recovery(manifest, nodes, queries)
    return found


def alone(index: ClusterIndex, query: np.ndarray[Any, Any], place: int) -> float:
    """Milliseconds of a query to one worker of an index, with its shards."""
    files = [file for file, places in index.places.items() if places[0] == place]
    began = time.perf_counter()
    ray.get(index.ask_one(place, files, "search", (query, 100), {"threads": 1}))
    return round(1000 * (time.perf_counter() - began), 3)


def merging(queries: np.ndarray[Any, Any]) -> dict[str, float]:
    """Milliseconds a query to merge the best 100 of so many parts, in batches of 256."""
    rng = np.random.default_rng(2)
    took = {}
    for parts in (2, 10, 100):
        D = -np.sort(-rng.standard_normal((parts, len(queries), 100)).astype(np.float32), axis=2)
        ids = rng.integers(0, 1 << 40, D.shape)
        began = time.perf_counter()
        best = Best(len(queries), 100)
        for part in range(parts):
            best.take(slice(None), D[part], ids[part], 0)
        took[str(parts)] = round(1000 * (time.perf_counter() - began) / len(queries), 4)
    return took


def recovery(manifest: Path, nodes: Nodes, queries: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Seconds from the kill of a node that holds shards to the next whole answer, with and without replicas."""
    took: dict[str, list[float]] = {"1": [], "2": []}
    for _ in range(3):
        for replicas in (1, 2):
            nodes.two()
            holders = Holders(nodes.address, 2)
            with ClusterIndex(manifest, holders, memory=2 * 10**9, replicas=replicas) as index:
                index.search(queries[:1], 100)
                nodes.kill_second()
                began = time.perf_counter()
                index.search(queries[:1], 100)
                took[str(replicas)].append(round(time.perf_counter() - began, 3))
            holders.close()
    return took


def percentile(values: list[float], q: float) -> float:
    """Of a list."""
    return float(np.percentile(values, q))


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "# Stages on a Ray cluster",
        "",
        f"{told(results['machine'])}. Two nodes of two workers at most on this one machine, one thread each, which other work used "
        "meanwhile: compare within a row; seconds are medians of interleaved rounds.",
        "",
        f"Encoding: {results['items']:,} vectors of {WIDTH} numbers in 8 shards. Building and searching: {results['codes']:,} codes of 48 "
        "bits in 8 shards of the form fastscan.",
        "",
        "| | one process | 1 worker | 2 workers | 4 workers | overhead, 1 worker |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for name, runs in results["stages"].items():
        typical = [median(runs[str(workers)]) for workers in WORKERS]
        ratios = median(b / a for a, b in zip(runs["0"], runs["1"], strict=True))
        lines.append(
            f"| {name}, s | " + " | ".join(f"{t:.2f}" for t in typical) + f" | {100 * (ratios - 1):+.0f} % |"
        )
    search = results["search"]
    batches = search["batch_s"]
    typical = [median(batches[name]) for name in batches if name != "one file"]
    ratio = median(
        b / a for a, b in zip(batches["shards, one process"], batches["shards, 1 workers"], strict=True)
    )
    lines.append(
        "| search, s a batch of 256 | "
        + " | ".join(f"{t:.2f}" for t in typical)
        + f" | {100 * (ratio - 1):+.0f} % |"
    )
    lines += ["", "| single queries, k = 100 | p50 ms | p95 ms |", "|---|--:|--:|"]
    for name, times in search["single_ms"].items():
        lines.append(f"| {name} | {percentile(times, 50):.1f} | {percentile(times, 95):.1f} |")
    merge = ", ".join(f"{parts} parts {ms} ms" for parts, ms in search["merge_ms"].items())
    recovered = "; ".join(
        f"{'one holder' if replicas == '1' else 'two holders'} of each shard: {', '.join(f'{s:.2f}' for s in took)}"
        for replicas, took in search["recovery_s"].items()
    )
    lines += [
        "",
        f"The batch takes {median(batches['one file']):.2f} s against one file. Merging the best 100 of a query: {merge}.",
        "",
        f"From the kill of a node that holds shards to the next whole answer, s: {recovered}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The script."""
    parser = make_parser(__doc__, "cluster.json", whole=True)
    parser.add_argument("--items", type=int, default=400_000)
    parser.add_argument("--codes", type=int, default=8_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--queries", type=int, default=200, help="single queries")
    args = parser.parse_args()
    use_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="gpq-cluster-"))
    nodes = Nodes(num_cpus=2)
    try:
        bench = Bench(folder, args.items, args.codes)
        results = {
            "machine": describe_machine(),
            "items": args.items,
            "codes": args.codes,
            "stages": stages(bench, nodes.address, args.rounds),
            "search": searching(bench, nodes, args.rounds, args.queries),
        }
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)
    save(results, args.out, markdown)


if __name__ == "__main__":
    run_main(main)

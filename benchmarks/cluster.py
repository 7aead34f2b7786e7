"""Stages on a Ray cluster of two nodes on this machine, beside the plain commands.

    OMP_NUM_THREADS=1 python benchmarks/cluster.py

Encoding, building and searching in one process, and with 1, 2 and 4 workers: jobs of about a minute, in interleaved rounds, so that
other work on the machine affects all alike. "Overhead" compares one worker with one process. Single searches are timed in one file, in
shards on two nodes, and after a node was killed. The parts of single searches are timed too. About twenty minutes on
two free cores; to try it out:

    OMP_NUM_THREADS=1 python benchmarks/cluster.py --items 8000 --codes 80000 --batches 2 --rounds 1 --queries 5 --out /tmp/cluster.json
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
from common import describe_machine, make_parser, read_results, run_main, save, timed, use_threads
from ray_nodes import Nodes, told

from gpq_faiss.cluster import search as cluster_search
from gpq_faiss.cluster.search import ClusterIndex, Holder, Holders
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
NAMES = {0: "shards, one process", **{workers: f"shards, {workers} workers" for workers in WORKERS[1:]}}
WIDTH = 512


LISTS = 1024
"""Lists of the built shards, with given centroids, so that the build is timed without k-means."""


class Bench:
    """Data and timed calls; ``items`` are encoded, ``codes`` are built and searched."""

    def __init__(self, folder: Path, items: int, codes: int) -> None:
        self.folder = folder
        rng = np.random.default_rng(0)
        np.save(folder / "some.npy", rng.standard_normal((2000, WIDTH), dtype=np.float32))
        np.save(folder / "labels.npy", rng.integers(0, 4, 2000))
        x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (items, WIDTH))
        for start in range(0, items, 10_000):
            x[start : start + 10_000] = rng.standard_normal(
                (min(10_000, items - start), WIDTH), dtype=np.float32
            )
        x.flush()
        config = validate(merge(preset("paper"), {"training": {"steps": 5}, "network": {"hidden": [2048]}}))
        some = open_data(f"features:{folder / 'some.npy'}", labels=str(folder / "labels.npy"))
        self.model = train(some, folder / "model", config=config, labelled="20-per-class")
        self.sources = [self._source(f"codes-{number}", codes // 8, rng) for number in range(8)]
        self.few = [self._source(f"few-{number}", 1000, rng) for number in range(8)]

    def _source(self, name: str, n: int, rng: np.random.Generator) -> Path:
        header = read_model(self.model)
        size = (len(header.codebooks) + 1) // 2
        rows = Header(
            kind="codes",
            width=size,
            model_fingerprint=header.model_fingerprint,
            codebooks=header.codebooks,
            data_fingerprint=name,
        )
        with RowWriter(self.folder / f"{name}.h5", rows) as writer:
            pool = rng.integers(0, 256, (100_000, size), np.uint8)
            ids = np.arange(n) + int(name.rpartition("-")[2]) * n
            writer.append(pool[rng.integers(0, len(pool), n)], ids, None)
            return writer.finish()

    def encode(self, out: Path, address: str | None, workers: int, few: bool = False) -> None:
        """All items, in eight shards; or a few, to start the workers."""
        data = self.folder / ("some.npy" if few else "x.npy")
        items = len(np.load(data, mmap_mode="r"))
        encode_shards(
            self.model,
            f"features:{data}",
            out,
            ray=address,
            shard_items=-(-items // 8),
            batch_size=250 if few else 0,
            workers=workers or None,
        )

    def build(self, out: Path, address: str | None, workers: int, few: bool = False) -> None:
        """All codes, or a few, in eight shards with lists."""
        out.mkdir()
        index_shards(
            self.model,
            self.few if few else self.sources,
            out / "m.json",
            kind="ivf",
            ray=address,
            workers=workers or None,
            memory="256MB",
        )


def order(turn: int) -> tuple[int, ...]:
    """Order of the numbers of workers in a round: reversed in every other round, to cancel a drift of the machine's speed."""
    return WORKERS[:: -1 if turn % 2 else 1]


def stages(bench: Bench, address: str, rounds: int) -> dict[str, Any]:
    """Seconds of each stage by number of workers, one entry per round."""
    seconds: dict[str, dict[str, list[float]]] = {}
    calls = (("encode", bench.encode), ("build", bench.build))
    for name, call in calls:
        for workers in WORKERS:
            call(bench.folder / f"few-{name}-{workers}", address if workers else None, workers, few=True)
    for turn in range(rounds):
        for name, call in calls:
            for workers in order(turn):
                out = bench.folder / f"{name}-{workers}"
                began = time.perf_counter()
                call(out, address if workers else None, workers)
                took = time.perf_counter() - began
                shutil.rmtree(out)
                seconds.setdefault(name, {}).setdefault(str(workers), []).append(round(took, 3))
    return seconds


class TimedHolder(Holder):
    """Records start and end of each answer, by the clock shared by all processes of the machine."""

    def __init__(self, folder: str = os.curdir) -> None:
        super().__init__(folder)
        self.spans: list[tuple[float, float]] = []

    def answer(self, *arguments: Any) -> Any:
        """As the other holders."""
        began = time.monotonic()
        found = super().answer(*arguments)
        self.spans.append((began, time.monotonic()))
        return found

    def last(self) -> tuple[float, float]:
        """Start and end of the previous answer."""
        return self.spans[-1]

    def busy(self, seconds: float, *arguments: Any) -> tuple[float, float]:
        """Search repeatedly for some seconds; returns start and end."""
        began = time.monotonic()
        while time.monotonic() < began + seconds:
            super().answer(*arguments)
        return began, time.monotonic()


class TimedIndex(ClusterIndex):
    """Records when each call was sent and when its answer arrived."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.sent: list[tuple[float, float]] = []
        self.got: list[float] = []
        super().__init__(*args, **options)

    def ask_one(self, *args: Any) -> Any:
        """As the other indexes."""
        began = time.monotonic()
        reference = super().ask_one(*args)
        self.sent.append((began, time.monotonic()))
        return reference

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        for answer in super()._answers(method, *args, **options):
            self.got.append(time.monotonic())
            yield answer

    def pieces(self, query: np.ndarray[Any, Any]) -> dict[str, float]:
        """Milliseconds of the successive parts of a search if one worker has all shards:

        ``before`` the call, ``submit`` (sending it), ``out`` (until the worker starts), ``inside`` (the worker), ``home`` (until the
        client has the answer), and ``after`` (until the search returns).
        """
        began = time.monotonic()
        self.search(query, 100, threads=1)
        ended = time.monotonic()
        times = [began, *self.sent[-1], *ray.get(self._actors[0].last.remote()), self.got[-1], ended]
        return dict(zip(PIECES, (milliseconds(b - a) for a, b in itertools.pairwise(times)), strict=True))

    def worker(self, query: np.ndarray[Any, Any], place: int, *, beside: bool) -> float:
        """Milliseconds of a query within a worker, with the others idle, or ``beside`` one that searches continuously."""

        def call(worker: int) -> tuple[Any, ...]:
            files = [file for file, places in self.places.items() if places[0] == worker]
            return self.manifest.only(files), *self._opening, "search", (query, 100), {"threads": 1}

        actor, other = self._actors[place], (place + 1) % len(self._actors)
        seconds = 0.03
        while True:
            working = self._actors[other].busy.remote(seconds, *call(other)) if beside else None
            time.sleep(0.005 if beside else 0)  # it has started by then
            ray.get(actor.answer.remote(*call(place)))
            began, ended = ray.get(actor.last.remote())
            if working is None:
                return milliseconds(ended - began)
            first, last = ray.get(working)
            if first <= began and ended <= last:
                return milliseconds(ended - began)
            seconds *= 1.5


PIECES = ("before", "submit", "out", "inside", "home", "after")


def milliseconds(seconds: float) -> float:
    """Milliseconds rounded to microseconds."""
    return round(1000 * seconds, 3)


def searching(bench: Bench, nodes: Nodes, rounds: int, batches: int, single_queries: int) -> dict[str, Any]:
    """Batches and single queries against one file and against shards on two nodes; and a killed node."""
    folder = bench.folder / "search"
    folder.mkdir()
    manifest = index_shards(bench.model, bench.sources, folder / "m.json", kind="fastscan", memory="256MB")
    single = index(bench.model, bench.sources, folder / "one.faiss", kind="fastscan", memory="256MB")
    found: dict[str, Any] = {"batches": batches, "batch_s": {}, "single_ms": {}}
    one_file = open_index(single, memory="2GB")
    opened: dict[int, Any] = {0: open_index(manifest, memory="2GB")}
    queries = np.random.default_rng(1).standard_normal((256, one_file.width)).astype(np.float32)
    held = []
    cluster_search.Holder = TimedHolder  # type: ignore[misc]
    for workers in WORKERS[1:]:
        holders = Holders(nodes.address, workers)
        held.append(holders)
        opened[workers] = TimedIndex(manifest, holders, memory=2 * 10**9)
    cluster_search.Holder = Holder  # type: ignore[misc]
    for one in opened.values():
        one.search(queries[:8], 100, threads=1)  # the first is not counted
    for turn in range(rounds):
        for workers in order(turn):
            began = time.perf_counter()
            for _ in range(batches):
                opened[workers].search(queries, 100, threads=1)
            took = round(time.perf_counter() - began, 3)
            found["batch_s"].setdefault(NAMES[workers], []).append(took)
    found["pieces_ms"] = {name: [] for name in PIECES}
    found["worker_ms"] = {
        str(workers): {how: [[] for _ in range(workers)] for how in ("alone", "beside")}
        for workers in WORKERS[2:]
    }
    for n in range(single_queries):
        query = queries[n % 256][None]
        for name, one in {"one file": one_file, **{NAMES[w]: opened[w] for w in WORKERS}}.items():
            took = timed(partial(one.search, query, 100, threads=1))[1]
            found["single_ms"].setdefault(name, []).append(milliseconds(took))
        for name, value in opened[1].pieces(query).items():
            found["pieces_ms"][name].append(value)
        for workers in WORKERS[2:]:
            for how, places in found["worker_ms"][str(workers)].items():
                for place, times in enumerate(places):
                    times.append(opened[workers].worker(query, place, beside=how == "beside"))
    found["merge_ms"] = merging(queries)
    for one in (one_file, *opened.values()):
        one.close()
    for holders in held:
        holders.close()
    found["recovery_s"] = recovery(manifest, nodes, queries)
    return found


def merging(queries: np.ndarray[Any, Any]) -> dict[str, float]:
    """Milliseconds per query to merge the best 100 of this many parts, in batches of 256."""
    rng = np.random.default_rng(2)
    took = {}
    for parts in (2, 10, 100):
        D = -np.sort(-rng.standard_normal((parts, len(queries), 100)).astype(np.float32), axis=2)
        ids = rng.integers(0, 1 << 40, D.shape)
        began = time.perf_counter()
        best = Best(len(queries), 100)
        for part in range(parts):
            best.take(slice(None), D[part], ids[part])
        took[str(parts)] = round(1000 * (time.perf_counter() - began) / len(queries), 4)
    return took


def recovery(manifest: Path, nodes: Nodes, queries: np.ndarray[Any, Any]) -> dict[str, list[float]]:
    """Seconds from the kill of a node with shards to the next complete answer, with and without replicas."""
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


def overhead(results: dict[str, Any], job: str) -> float:
    """Relative overhead of one worker over one process, median of the rounds. ``job``: encode, build or search."""
    batches = results["search"]["batch_s"]
    plain, spread = (
        batches[NAMES[workers]] if job == "search" else results["stages"][job][str(workers)]
        for workers in (0, 1)
    )
    return float(median(b / a for a, b in zip(plain, spread, strict=True))) - 1


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "# Stages on a Ray cluster",
        "",
        f"{told(results['machine'])}; load before the run {results['load']}. Two nodes of two workers at most on this one machine, one "
        "thread each: compare within a row; seconds are medians of interleaved rounds.",
        "",
        f"Encoding: {results['items']:,} vectors of {WIDTH} numbers in 8 shards. Building: {results['codes']:,} codes of 48 bits in 8 "
        f"shards with {LISTS:,} lists. Searching: {results['search']['batches']} batches of 256 queries against these codes, in 8 shards "
        "without lists.",
        "",
        "| | one process | 1 worker | 2 workers | 4 workers | overhead, 1 worker |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    search = results["search"]
    jobs = results["stages"] | {"search": {str(w): search["batch_s"][NAMES[w]] for w in WORKERS}}
    for name, runs in jobs.items():
        typical = [median(runs[str(workers)]) for workers in WORKERS]
        lines.append(
            f"| {name}, s | "
            + " | ".join(f"{t:.2f}" for t in typical)
            + f" | {100 * overhead(results, name):+.0f} % |"
        )
    lines += ["", "| single queries, k = 100 | p50 ms | p95 ms |", "|---|--:|--:|"]
    for name, times in search["single_ms"].items():
        lines.append(f"| {name} | {percentile(times, 50):.1f} | {percentile(times, 95):.1f} |")
    parts = ", ".join(f"{name} {percentile(times, 50):.2f} ms" for name, times in search["pieces_ms"].items())
    own = {
        how: percentile([*itertools.chain(*places)], 50) for how, places in search["worker_ms"]["2"].items()
    }
    merge = ", ".join(f"{parts} parts {ms} ms" for parts, ms in search["merge_ms"].items())
    recovered = "; ".join(
        f"{'one holder' if replicas == '1' else 'two holders'} of each shard: {', '.join(f'{s:.2f}' for s in took)}"
        for replicas, took in search["recovery_s"].items()
    )
    lines += [
        "",
        f"Of a query with one worker (p50): {parts}. A worker of two takes {own['alone']:.1f} ms itself while the other is idle, and "
        f"{own['beside']:.1f} ms while it searches too. Merging the best 100 of a query: {merge}.",
        "",
        f"From the kill of a node that holds shards to the next whole answer, s: {recovered}.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """The script."""
    parser = make_parser(__doc__, "cluster.json", whole=True)
    parser.add_argument("--items", type=int, default=1_100_000, help="to encode")
    parser.add_argument("--codes", type=int, default=14_000_000, help="to build and search")
    parser.add_argument("--batches", type=int, default=35, help="of 256 queries, in one job")
    parser.add_argument("--rounds", type=int, default=2, help="of all jobs")
    parser.add_argument("--queries", type=int, default=200, help="single queries")
    parser.add_argument("--only-search", action="store_true", help="keep the stages of an earlier run")
    args = parser.parse_args()
    use_threads(1)
    load = round(os.getloadavg()[0], 1)  # of other work, as this script has only started
    folder = Path(tempfile.mkdtemp(prefix="gpq-cluster-"))
    nodes = Nodes(num_cpus=2)
    try:
        bench = Bench(folder, args.items, args.codes)
        results = read_results(args.out, {}) if args.only_search else {}
        results |= {"machine": describe_machine(), "load": load, "codes": args.codes}
        if not args.only_search:
            results |= {"items": args.items, "stages": stages(bench, nodes.address, args.rounds)}
        results["search"] = searching(bench, nodes, args.rounds, args.batches, args.queries)
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)
    save(results, args.out, markdown)


if __name__ == "__main__":
    run_main(main)

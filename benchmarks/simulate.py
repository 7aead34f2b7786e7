"""Simulation of a cluster of many nodes, from measurements on one machine and two nodes.

    python benchmarks/simulate.py

First, the searches of ``results/cluster.json`` on two and four workers are simulated, without fitting to them: client time and transfer
times are those of searches on one worker, and worker times were measured individually, with another worker searching. Client and workers
share the cores of one machine. Simulated and measured p50 and p95 are compared. Then the same model is applied to more nodes with their
own cores, each with 10^9 codes in lists, whose search time comes from ``results/large.json``: nodes serve queries sequentially, queries
arrive at random, some answers are late as in the measurement, nodes fail and recover.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Generator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from common import RESULTS, make_parser, read_results, run_main, save

from gpq_faiss.errors import DataError

MTBF_H = 1000.0
"""Hours between failures of a node: an assumption; dependent results scale with it."""
BUSY = 0.3
"""Load: share of time that a node is busy."""
LATE = 2.0
"""Seconds above which an answer is late."""
NEAR = 0.2
"""Relative difference of simulated and measured times above which the report says so."""
SLICE = 0.001
"""Time slice of a core in seconds."""


@dataclass(frozen=True)
class Client:
    """Seconds of the client's own work for each query: ``before`` it sends, to ``submit`` one part, and ``after`` the last answer."""

    before: np.ndarray[Any, Any]
    submit: np.ndarray[Any, Any]
    after: np.ndarray[Any, Any]


class Service:
    """Nodes that hold shards; every query needs an answer for each shard.

    Args:
        env: of SimPy.
        nodes: number of nodes, each with its own shard and replicas of others.
        replicas: nodes per shard; queries alternate between them and fail over.
        draw: function from query and node to seconds, the sum of the node's time and the transfers.
        client: other time of each query; the client is sequential.
        cores: cores shared by all on one machine; None: each node and the client have their own.
    """

    def __init__(
        self,
        env: simpy.Environment,
        nodes: int,
        replicas: int,
        draw: Callable[[int, int], float],
        client: Client,
        cores: int | None = None,
    ) -> None:
        self.env, self.nodes, self.replicas, self.draw, self.client = env, nodes, replicas, draw, client
        self.cores = simpy.Resource(env, cores) if cores else None
        self.servers = [simpy.Resource(env) for _ in range(nodes)]
        self.asking = simpy.Resource(env)
        self.up = [env.event().succeed() for _ in range(nodes)]
        self.took: list[float] = []

    def _work(self, seconds: float) -> Generator[Any, Any, Any]:
        """Work of one process on one core."""
        while self.cores is not None and seconds > SLICE:
            with self.cores.request() as core:
                yield core
                yield self.env.timeout(SLICE)
            seconds -= SLICE
        with self.cores.request() if self.cores is not None else nullcontext() as core:
            if core is not None:
                yield core
            yield self.env.timeout(seconds)

    def fail(self, node: int, at: float, repair: float) -> Generator[Any, Any, Any]:
        """A node fails at a time, and its shards are available again after some seconds; queries in progress are still answered."""
        yield self.env.timeout(at)
        self.up[node] = self.env.event()
        yield self.env.timeout(repair)
        self.up[node].succeed()

    def _part(self, query: int, shard: int) -> Generator[Any, Any, Any]:
        """One shard's answer, from a node that is up; if none is, from the first that recovers."""
        holders = [(shard + (query + r) % self.replicas) % self.nodes for r in range(self.replicas)]
        if not any(self.up[node].triggered for node in holders):
            yield self.env.any_of([self.up[node] for node in holders])
        node = next(node for node in holders if self.up[node].triggered)
        with self.servers[node].request() as request:
            yield request
            yield from self._work(self.draw(query, node))

    def query(self, number: int) -> Generator[Any, Any, Any]:
        """One query to all shards."""
        began, parts = self.env.now, []
        with self.asking.request() as turn:
            yield turn
            yield from self._work(float(self.client.before[number]))
            for shard in range(self.nodes):
                yield from self._work(float(self.client.submit[number]))
                parts.append(self.env.process(self._part(number, shard)))
        yield self.env.all_of(parts)
        with self.asking.request() as turn:
            yield turn
            yield from self._work(float(self.client.after[number]))
        self.took.append(self.env.now - began)


def pieces(measured: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """Seconds of the parts of single queries on one worker (``TimedIndex.pieces`` of ``cluster.py``)."""
    return {name: np.array(times) / 1000 for name, times in measured["pieces_ms"].items()}


def one_machine(measured: dict[str, Any], workers: int, cores: int) -> dict[str, Any]:
    """The measured machine: one client, one query after another.

    All times of a query are from the same measurement, so that other work on the machine delays all.
    """
    own = np.array(measured["worker_ms"][str(workers)]["beside"]) / 1000
    part = pieces(measured)
    env = simpy.Environment()
    service = Service(
        env,
        workers,
        1,
        lambda query, node: float(part["out"][query] + own[node, query] + part["home"][query]),
        Client(part["before"], part["submit"], part["after"]),
        cores,
    )

    def asking() -> Generator[Any, Any, Any]:
        for number in range(own.shape[1]):
            yield env.process(service.query(number))

    env.process(asking())
    env.run()
    found = 1000 * np.array(service.took)
    real = np.array(measured["single_ms"][f"shards, {workers} workers"])
    return {
        f"p{q}": {
            "measured_ms": float(np.percentile(real, q)),
            "simulated_ms": round(float(np.percentile(found, q)), 3),
        }
        for q in (50, 95)
    }


def differences(checked: dict[str, dict[str, Any]]) -> str:
    """In a sentence, which simulated times are far from the measured ones. ``checked``: by workers, see :func:`one_machine`."""
    far = [
        f"{name} with {workers} workers {100 * (row['simulated_ms'] / row['measured_ms'] - 1):+.0f} %"
        for workers, rows in checked.items()
        for name, row in rows.items()
        if abs(row["simulated_ms"] / row["measured_ms"] - 1) > NEAR
    ]
    if far:
        return f"The simulation is off by more than {100 * NEAR:.0f} %: {', '.join(far)}."
    return f"The simulation is within {100 * NEAR:.0f} % of the measured times."


def many_nodes(
    nodes: int,
    replicas: int,
    times: np.ndarray[Any, Any],
    part: dict[str, np.ndarray[Any, Any]],
    merge: float,
    repair: float | None,
    queries: int,
) -> dict[str, Any]:
    """Nodes with cores of their own.

    Args:
        nodes, replicas: see :class:`Service`.
        times: measured seconds of a node, from which each query's is drawn.
        part: see :func:`pieces`; each query has the client times of one measured query, and each transfer those of another.
        merge: seconds to merge the answers of the nodes after the first.
        repair: seconds until the shards of one node, which fails half-way, are available again; None: no failure.
        queries: number of queries.
    """
    rng = np.random.default_rng(nodes)  # the same queries for all replicas and failures
    drawn = rng.choice(times, (queries, nodes)) + rng.choice(part["out"] + part["home"], (queries, nodes))
    pause = float(times.mean()) / BUSY
    pauses = rng.exponential(pause, queries)
    one = rng.integers(0, len(part["before"]), queries)
    client = Client(part["before"][one], part["submit"][one], part["after"][one] + merge)
    env = simpy.Environment()
    service = Service(env, nodes, replicas, lambda query, node: float(drawn[query, node]), client)
    if repair is not None:
        env.process(service.fail(0, float(pauses[: queries // 2].sum()), repair))

    def arrivals() -> Generator[Any, Any, Any]:
        asked = []
        for number in range(queries):
            yield env.timeout(pauses[number])
            asked.append(env.process(service.query(number)))
        yield env.all_of(asked)

    env.run(until=env.process(arrivals()))
    took = np.array(service.took)
    return {
        "p50_ms": round(1000 * float(np.percentile(took, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(took, 95)), 1),
        "p99_ms": round(1000 * float(np.percentile(took, 99)), 1),
        "late": int((took > LATE).sum()),
        "queries_s": round(1 / pause, 2),
    }


WIDTH, K = 144, 100
"""Numbers of a query at 48 bits (12 codebooks of 12 dimensions), and results."""


def sizes(large: dict[str, Any], cluster: dict[str, Any], repair: float) -> list[dict[str, Any]]:
    """Estimates for 10^9 codes per node: measured figures multiplied or divided by the number of nodes."""
    search = cluster["search"]
    encode = np.median(cluster["stages"]["encode"]["0"])
    rows = []
    for nodes in (1, 10, 100):
        hours = MTBF_H / nodes
        rows.append(
            {
                "codes": nodes * 10**9,
                "nodes": nodes,
                "files_gb": nodes * large["lists"]["file_bytes"] / 1e9,
                "cached_gb_a_node": large["lists"]["file_bytes"] / 1e9,
                "own_gb_a_node": large["ivf"]["peak_bytes"] / 1e9,
                "network_kb_a_query": nodes * (4 * WIDTH + 8 * 16 + 12 * K) / 1000,
                "merge_ms_a_query": nodes * search["merge_ms"]["100"] / 100,
                "build_minutes": (large["build"]["seconds"] + large["lists"]["seconds"]) / 60,
                "encode_core_hours": nodes * 1e9 * encode / cluster["items"] / 3600,
                "hours_between_failures": hours,
                "down_without_replicas": repair / (3600 * hours),
            }
        )
    return rows


def markdown(results: dict[str, Any]) -> str:
    """The tables."""
    lines = [
        "# A simulated cluster",
        "",
        "Simulated by `benchmarks/simulate.py` from `cluster.json` and `large.json`.",
        "",
        "| one machine | measured ms | simulated ms | difference |",
        "|---|--:|--:|--:|",
    ]
    for workers, rows in results["one_machine"].items():
        for name, row in rows.items():
            lines.append(
                f"| {workers} workers, {name} | {row['measured_ms']:.1f} | {row['simulated_ms']:.1f} | "
                f"{100 * (row['simulated_ms'] / row['measured_ms'] - 1):+.0f} % |"
            )
    given = results["given"]
    lines += [
        "",
        differences(results["one_machine"]),
        "",
        f"More nodes, each with 10^9 codes in lists: {1000 * given['base_s']:.0f} ms a query and node (nprobe 16, large.json), spread "
        f"as the times of a worker in cluster.json whose neighbour is idle (p95 {given['p95_over_p50']:.2f} times p50), nodes busy "
        f"{100 * BUSY:.0f} % of the time; a query takes the client {given['submit_ms']:.2f} ms a node to send. "
        f"Then one node fails, whose shards are held again after {given['repair_s']:.1f} s (measured); late is an answer after "
        f"{LATE:g} s. In the long run a node is assumed to fail once in {MTBF_H:,.0f} hours.",
        "",
        "| codes | nodes | replicas | queries/s | p50 ms | p95 ms | p99 ms | late for a failure | late in the long run |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["many"]:
        lines.append(
            f"| {row['nodes'] * 10**9:.0e} | {row['nodes']} | {row['replicas']} | {row['queries_s']} | {row['p50_ms']} | {row['p95_ms']} | "
            f"{row['p99_ms']} | {row['late_for_a_failure']} | {100 * row['late_share']:.4f} % |"
        )
    lines += [
        "",
        "| | " + " | ".join(f"{row['codes']:.0e} codes" for row in results["sizes"]) + " |",
        "|---|--:|--:|--:|",
    ]
    for name, text in SIZES.items():
        shown = [f"{row[name]:,.4g}" for row in results["sizes"]]
        lines.append(f"| {text} | " + " | ".join(shown) + " |")
    return "\n".join(lines) + "\n"


SIZES = {
    "nodes": "nodes of 10^9 codes",
    "files_gb": "index files, GB (14.0 GB measured)",
    "cached_gb_a_node": "of which on each node, best in its cache, GB",
    "own_gb_a_node": "memory of a worker itself, GB (measured)",
    "network_kb_a_query": "to and from all nodes, kB a query (576 B of vector, 128 B of list numbers, 1,200 B of results)",
    "merge_ms_a_query": "merging, ms a query of a batch (measured for 100 parts)",
    "build_minutes": "building all shards, minutes (measured for one)",
    "encode_core_hours": "encoding, hours of one core (measured rate of cluster.json)",
    "hours_between_failures": "hours between failures of a node (assumed: 1,000 each)",
    "down_without_replicas": "share of the time that some shard waits, without replicas (measured recovery)",
}


def parse() -> argparse.Namespace:
    """The options."""
    parser = make_parser(__doc__, "simulate.json", whole=True)
    parser.add_argument(
        "--cluster", type=Path, default=RESULTS / "cluster.json", help="measured by cluster.py"
    )
    parser.add_argument("--large", type=Path, default=RESULTS / "large.json", help="measured by large.py")
    parser.add_argument("--queries", type=int, default=4000)
    return parser.parse_args()


def main() -> None:
    """The script."""
    args = parse()
    cluster = read_results(args.cluster, {"search": {}, "stages": {}})
    measured = cluster["search"]
    large = read_results(args.large, {"sizes": {}})["sizes"]["1000000000"]
    rows = [row for row in large["ivf"]["searches"] if row["nprobe"] == 16 and row["batch"] == 1]
    if "pieces_ms" not in measured or not rows:
        raise DataError(
            f"{args.cluster} and {args.large} lack what is simulated: run cluster.py and large.py first"
        )
    base = float(rows[0]["seconds_a_batch"])
    times = np.ravel([measured["worker_ms"]["2"]["alone"]])
    spread, part = times / np.median(times), pieces(measured)
    repair = float(np.median(measured["recovery_s"]["1"]))
    many = []
    for nodes, replicas in ((1, 1), (10, 1), (10, 2), (100, 1), (100, 2)):
        merge = (nodes - 1) * measured["merge_ms"]["100"] / 1e5
        well, failing = (
            many_nodes(nodes, replicas, base * spread, part, merge, seconds, args.queries)
            for seconds in (None, repair)
        )
        late = max(0, failing["late"] - well["late"])
        share = late * nodes / (MTBF_H * 3600 * well["queries_s"])
        many.append(
            {"nodes": nodes, "replicas": replicas, **well, "late_for_a_failure": late, "late_share": share}
        )
    results = {
        "given": {
            "base_s": base,
            "p95_over_p50": float(np.percentile(spread, 95)),
            "mtbf_h": MTBF_H,
            "repair_s": repair,
            "submit_ms": float(np.median(measured["pieces_ms"]["submit"])),
        },
        "one_machine": {
            workers: one_machine(measured, int(workers), cluster["machine"]["cores"])
            for workers in measured["worker_ms"]
        },
        "many": many,
        "sizes": sizes(large, cluster, repair),
    }
    save(results, args.out, markdown)


if __name__ == "__main__":
    run_main(main)

"""A cluster of many nodes, simulated from what two nodes and one machine measured.

    python benchmarks/simulate.py

First the two nodes of ``results/cluster.json`` are simulated: each query goes to both workers, whose times are drawn from those that each
took alone, and has its answer when the later one is merged. Its p50 and p95 must be near the measured ones. Then the same model
with more nodes, each with 10^9 codes in lists, whose time comes from ``results/large.json``: nodes serve one query after another,
queries arrive at random, some answers are late as in the measurement, nodes fail and come back.
"""

from __future__ import annotations

import argparse
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import simpy
from common import RESULTS, make_parser, read_results, run_main, save

from gpq_faiss.errors import DataError

MTBF_H = 1000.0
"""Hours between two failures of a node: an assumption, to be replaced by your own. What it enters is proportional to it."""
ARRIVALS = 0.5
"""Share of the time that a node is busy."""


class Service:
    """Nodes that hold shards; every query needs an answer for each shard.

    Args:
        env: of SimPy.
        nodes: how many, each with a shard of its own and with replicas of others.
        replicas: holders of each shard; queries take turns, and go to the next where one is down.
        draw: seconds that a node takes for a query.
        merge: seconds to merge the answers.
        mtbf, repair: seconds between failures of a node, and until its shards are held again.
    """

    def __init__(
        self,
        env: simpy.Environment,
        nodes: int,
        replicas: int,
        draw: Any,
        merge: float,
        mtbf: float | None,
        repair: float,
        rng: np.random.Generator,
    ) -> None:
        self.env, self.nodes, self.replicas, self.draw, self.merge = env, nodes, replicas, draw, merge
        self.servers = [simpy.Resource(env) for _ in range(nodes)]
        self.up = [env.event() for _ in range(nodes)]
        for event in self.up:
            event.succeed()
        self.took: list[float] = []
        self.waited = 0
        self.failures = 0
        self._turn = 0
        if mtbf is not None:
            for node in range(nodes):
                env.process(self._fail(node, mtbf, repair, rng))

    def _fail(
        self, node: int, mtbf: float, repair: float, rng: np.random.Generator
    ) -> Generator[Any, Any, Any]:
        while True:
            yield self.env.timeout(rng.exponential(mtbf))
            self.failures += 1
            self.up[node] = self.env.event()
            yield self.env.timeout(repair)
            self.up[node].succeed()

    def _part(self, shard: int, turn: int) -> Generator[Any, Any, Any]:
        """One shard's answer, from a holder that is up; where none is, from the first that comes back."""
        holders = [(shard + r) % self.nodes for r in range(self.replicas)]
        order = holders[turn % len(holders) :] + holders[: turn % len(holders)]
        up = [node for node in order if self.up[node].triggered]
        if not up:
            self.waited += 1
            yield self.env.any_of([self.up[node] for node in holders])
            up = [node for node in order if self.up[node].triggered]
        with self.servers[up[0]].request() as request:
            yield request
            yield self.env.timeout(self.draw(up[0]))

    def query(self) -> Generator[Any, Any, Any]:
        """One query to all shards."""
        began, turn = self.env.now, self._turn
        self._turn += 1
        yield self.env.all_of([self.env.process(self._part(shard, turn)) for shard in range(self.nodes)])
        yield self.env.timeout(self.merge)
        self.took.append(self.env.now - began)


def two_nodes(measured: dict[str, Any], queries: int, rng: np.random.Generator) -> dict[str, Any]:
    """The measured two nodes: one client, one query after another."""
    own = [np.array(times) / 1000 for times in measured["worker_ms"]]
    env = simpy.Environment()
    service = Service(
        env, 2, 1, lambda node: rng.choice(own[node]), measured["merge_ms"]["2"] / 1000, None, 0.0, rng
    )

    def client() -> Generator[Any, Any, Any]:
        for _ in range(queries):
            yield env.process(service.query())

    env.process(client())
    env.run()
    found = 1000 * np.array(service.took)
    real = np.array(measured["single_ms"]["shards, 2 workers"])
    return {
        f"p{q}": {
            "measured_ms": float(np.percentile(real, q)),
            "simulated_ms": round(float(np.percentile(found, q)), 3),
        }
        for q in (50, 95)
    }


def many_nodes(
    nodes: int, replicas: int, spread: np.ndarray[Any, Any], base: float, merge: float, mtbf: float | None, repair: float, queries: int,
    rng: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    """``spread``: times of a worker, over their median; ``base``: seconds that a node takes typically."""
    env = simpy.Environment()
    # A node answers for one shard of each query, whichever holder it is: replicas take the turns of one another.
    service = Service(env, nodes, replicas, lambda _: base * rng.choice(spread), merge, mtbf, repair, rng)
    pause = base * float(spread.mean()) / ARRIVALS

    def arrivals() -> Generator[Any, Any, Any]:
        asked = []
        for _ in range(queries):
            yield env.timeout(rng.exponential(pause))
            asked.append(env.process(service.query()))
        yield env.all_of(asked)

    env.run(until=env.process(arrivals()))
    took = np.array(service.took)
    return {
        "nodes": nodes,
        "replicas": replicas,
        "failures": mtbf is not None,
        "p50_ms": round(1000 * float(np.percentile(took, 50)), 1),
        "p95_ms": round(1000 * float(np.percentile(took, 95)), 1),
        "p99_ms": round(1000 * float(np.percentile(took, 99)), 1),
        "over_1s": round(float((took > 1).mean()), 5),
        "queries_s": round(1 / pause, 2),
        "node_failures": service.failures,
    }


WIDTH, K = 144, 100
"""Numbers of a query at 48 bits (12 codebooks of 12 dimensions), and results."""


def sizes(large: dict[str, Any], cluster: dict[str, Any], repair: float) -> list[dict[str, Any]]:
    """What 10^9 codes a node come to: each number is a measured one times the nodes, or over them."""
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
        "| two nodes | measured ms | simulated ms |",
        "|---|--:|--:|",
    ]
    for name, row in results["two_nodes"].items():
        lines.append(f"| {name} | {row['measured_ms']:.1f} | {row['simulated_ms']:.1f} |")
    given = results["given"]
    lines += [
        "",
        f"More nodes, each with 10^9 codes in lists: {1000 * given['base_s']:.0f} ms a query and node (nprobe 16, large.json), times "
        f"spread as those of a worker in cluster.json (p95 {given['p95_over_p50']:.2f} times p50), nodes busy half of the time. With "
        f"failures: each node fails once in {given['mtbf_h']:,.0f} hours, an assumption, quickened {given['quickened']:,.0f} times so "
        f"that the run sees some; its shards are held again after {given['repair_s']:.1f} s (measured).",
        "",
        "| codes | nodes | replicas | failures | p50 ms | p95 ms | p99 ms | over 1 s | queries/s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results["many"]:
        lines.append(
            f"| 10^{9 + len(str(row['nodes'])) - 1} | {row['nodes']} | {row['replicas']} | {row['node_failures']} | {row['p50_ms']} | "
            f"{row['p95_ms']} | {row['p99_ms']} | {100 * row['over_1s']:.2f} % | {row['queries_s']} |"
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
    rng = np.random.default_rng(0)
    cluster = read_results(args.cluster, {"search": {}, "stages": {}})
    measured = cluster["search"]
    large = read_results(args.large, {"sizes": {}})["sizes"]["1000000000"]
    rows = [row for row in large["ivf"]["searches"] if row["nprobe"] == 16 and row["batch"] == 1]
    if not measured or not rows:
        raise DataError(
            f"{args.cluster} and {args.large} lack what is simulated: run cluster.py and large.py first"
        )
    base = float(rows[0]["seconds_a_batch"])
    times = np.array(measured["worker_ms"][0] + measured["worker_ms"][1])
    spread = times / np.median(times)
    repair = float(np.median(measured["recovery_s"]["1"]))
    quickened = 2000.0
    many = []
    for nodes in (1, 10, 100):
        merge = nodes * measured["merge_ms"]["100"] / 1e5
        for replicas in (1, 2) if nodes > 1 else (1,):
            for mtbf in (None, 3600 * MTBF_H / quickened):
                many.append(many_nodes(nodes, replicas, spread, base, merge, mtbf, repair, args.queries, rng))
    results = {
        "given": {
            "base_s": base,
            "p95_over_p50": float(np.percentile(spread, 95)),
            "mtbf_h": MTBF_H,
            "quickened": quickened,
            "repair_s": repair,
        },
        "two_nodes": two_nodes(measured, args.queries, rng),
        "many": many,
        "sizes": sizes(large, cluster, repair),
    }
    save(results, args.out, markdown)


if __name__ == "__main__":
    run_main(main)

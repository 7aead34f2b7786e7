"""Kill workers and nodes of a Ray cluster at random moments of every job, and compare the outputs with those of one process.

    OMP_NUM_THREADS=1 python benchmarks/ray_kills.py --kills 30

A kill is SIGKILL to one busy worker, or to all processes of one of the two nodes, at a time drawn uniformly from twice the job's
undisturbed duration (to allow for the start of workers). A job that writes files must leave no other files. For searches the time until
the next answer is recorded; each answer must equal that of one file.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
from common import clusters, make_parser, publish, run_main, save_features

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

from gpq_faiss.cluster.connect import kept_sigterm, messages_to_log
from gpq_faiss.cluster.search import ClusterIndex
from gpq_faiss.config import preset
from gpq_faiss.errors import DataError
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.stages.encode import encode_shards
from gpq_faiss.stages.index import index_shards
from gpq_faiss.stages.train import train

ITEMS, WIDTH, SHARD = 24_000, 32, 2_000
JOBS = ("encode", "build", "search")


NODE = {
    "object_store_memory": 80 << 20,
    "include_dashboard": False,
    "include_log_monitor": False,
    "no_monitor": True,  # of autoscaling
}


class Nodes:
    """A cluster of two nodes, to which this process is connected.

    Args:
        num_cpus: concurrent tasks per node.
        num_gpus: of the first node.
        settings: of Ray itself.
    """

    def __init__(self, num_cpus: int = 1, num_gpus: int = 0, settings: dict[str, Any] | None = None) -> None:
        from ray.cluster_utils import Cluster

        # Paths of sockets must be short, so this is not under pytest's folder.
        self.folder = tempfile.mkdtemp(prefix="gpq-ray-")
        self._node = {**NODE, "num_cpus": num_cpus}
        # Ray writes the address of a cluster into its default folder, whatever `temp_dir` says. That folder may not exist,
        # or belong to a cluster of the user.
        os.mkdir(os.path.join(self.folder, "ray"))
        with mock.patch.dict(os.environ, RAY_TMPDIR=self.folder):
            self.cluster: Any = Cluster(
                initialize_head=True,
                head_node_args={
                    **self._node,
                    "num_gpus": num_gpus,
                    "temp_dir": self.folder,
                    "_system_config": settings,
                },
                shutdown_at_exit=False,
            )
        self.second: Any = self.add()
        self.address: str = self.cluster.address
        with kept_sigterm():
            ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        messages_to_log(ray)

    def add(self) -> Any:
        """One more node."""
        return self.cluster.add_node(**self._node)

    def two(self) -> None:
        """Restart the second node if it was killed."""
        if self.second is None:
            self.second = self.add()

    def family(self, node: Any) -> list[psutil.Process]:
        """All processes of a node."""
        own = [psutil.Process(info.process.pid) for infos in node.all_processes.values() for info in infos]
        return [one for process in own for one in [*process.children(recursive=True), process]]

    def kill_second(self) -> None:
        """SIGKILL to all processes of the second node, at once."""
        for process in self.family(self.second):
            kill(process.pid)
        self.cluster.remove_node(self.second, allow_graceful=False)
        self.second = None

    def workers(self) -> list[psutil.Process]:
        """The workers of all nodes, including idle ones; not the agents, whose end would end their node."""
        family = [process for node in self.cluster.list_all_nodes() for process in self.family(node)]
        return [
            process
            for process in family
            if (name := _name(process)).startswith("ray::")
            and not name.startswith(("ray::Dash", "ray::Runtime"))
        ]

    def busy(self) -> list[psutil.Process]:
        """The workers that are not idle."""
        return [worker for worker in self.workers() if not _name(worker).startswith("ray::IDLE")]

    def end(self) -> list[psutil.Process]:
        """End everything. Returns the processes that existed."""
        family = [process for node in self.cluster.list_all_nodes() for process in self.family(node)]
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        return family


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def kill(pid: int) -> None:
    """SIGKILL, if the process still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Jobs:
    """Small data, a model, and the expected result of each job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data = save_features(folder, *clusters(ITEMS, 4, WIDTH, 0.5))
        self.arguments = {"labels": f"{folder}/x-labels.npy"}
        config = preset("paper").with_settings({"training": {"steps": 20}, "network": {"backbone": "linear"}})
        self.model = train(self.data, folder / "model", config=config, labelled="20-per-class")
        self.codes = self._encode(folder / "plain", None)
        self.manifest = self._build(folder / "plain-index" / "m.json", None)
        index = open_index(self.manifest)
        self.queries = np.random.default_rng(0).standard_normal((64, index.width)).astype(np.float32)
        self.answer = index.search(self.queries, 50)
        index.close()

    def _encode(self, out: Path, address: str | None) -> list[Path]:
        return encode_shards(
            self.model,
            f"features:{self.folder}/x.npy",
            out,
            ray=address,
            data_args=self.arguments,
            shard_items=SHARD,
            batch_size=500,
        )

    def _build(self, out: Path, address: str | None) -> Path:
        return index_shards(self.model, self.codes, out, kind="ivf", ray=address)

    def run(self, job: str, nodes: Nodes, out: Path, ended: threading.Event) -> dict[str, Any]:
        """Run a job on the cluster. Raises DataError: its output differs from that of one process."""
        address = nodes.address
        if job == "encode":
            self._encode(out, address)
            check(job, hashes(out) == hashes(self.folder / "plain"))
        elif job == "build":
            out.mkdir()
            self._build(out / "m.json", address)
            check(job, hashes(out) == hashes(self.folder / "plain-index"))
        else:
            longest = 0.0
            with ClusterIndex(self.manifest, address) as index:
                while True:
                    last = ended.is_set()  # one more search, after the kill
                    began = time.perf_counter()
                    answer: tuple[Any, Any] = index.search(self.queries, 50)
                    longest = max(longest, time.perf_counter() - began)
                    same = [np.array_equal(answer[i], self.answer[i]) for i in range(2)]
                    check(job, all(same))
                    if last:
                        break
            return {"longest_search_s": longest}
        return {}


def check(job: str, same: bool) -> None:
    """Raises DataError: the outputs differ."""
    if not same:
        raise DataError(f"{job}: its product is another than that of one process")


def hashes(folder: Path) -> dict[str, str]:
    """Of all files, hidden ones too."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def one_kill(
    jobs: Jobs, nodes: Nodes, job: str, how: str, delay: float, out: Path, rng: random.Random
) -> dict[str, Any]:
    """Run a job and kill a worker or node after ``delay`` seconds."""
    nodes.two()
    ended = threading.Event()
    hit: list[str] = []

    def strike() -> None:
        time.sleep(delay)
        if how == "node":
            nodes.kill_second()
            hit.append("node")
        elif busy := nodes.busy() or nodes.workers():
            one = rng.choice(busy)
            hit.append(one.name())
            kill(one.pid)
        ended.set()

    striking = threading.Thread(target=strike)
    striking.start()
    began = time.perf_counter()
    found = jobs.run(job, nodes, out, ended)
    seconds = time.perf_counter() - began
    inside = ended.is_set()
    striking.join()
    return {
        "job": job,
        "killed": how,
        "process": hit[0] if hit else None,
        "delay_s": round(delay, 2),
        "seconds": round(seconds, 2),
        "in_the_middle": inside and bool(hit),
        **{key: round(value, 2) for key, value in found.items()},
    }


def markdown(results: dict[str, Any]) -> str:
    """The table."""
    lines = [
        "# Kills of workers and nodes of a Ray cluster",
        "",
        "Two nodes of one core each on one machine, which other work used meanwhile. Every product "
        "was that of one process, byte for byte, and no other file was left. In the middle: the kill hit before the job was done.",
        "",
        "| job | killed | after s | job took s | undisturbed s | in the middle | longest search s |",
        "|---|---|--:|--:|--:|---|--:|",
    ]
    for row in results["kills"]:
        lines.append(
            f"| {row['job']} | {row['killed']} | {row['delay_s']} | {row['seconds']} | {results['undisturbed'][row['job']]:.2f} | "
            f"{'yes' if row['in_the_middle'] else 'no'} | {row.get('longest_search_s', '')} |"
        )
    return "\n".join(lines)


def main() -> None:
    """The script."""
    parser = make_parser(__doc__, "ray-kills.json")
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)  # noqa: S311
    folder = Path(tempfile.mkdtemp(prefix="gpq-kills-"))
    nodes = Nodes()
    results: dict[str, Any] = {"kills": [], "undisturbed": {}}
    try:
        jobs = Jobs(folder)
        over = threading.Event()
        over.set()
        for job in JOBS:
            for turn in range(2):  # the first starts the workers
                began = time.perf_counter()
                jobs.run(job, nodes, folder / f"{job}-{turn}", over)
                results["undisturbed"][job] = time.perf_counter() - began
        for number in range(args.kills):
            job, how = JOBS[number % len(JOBS)], ("worker", "node")[number // len(JOBS) % 2]
            delay = rng.random() * results["undisturbed"][job] * (1 if job == "search" else 2)
            out = folder / f"kill-{number}"
            row = one_kill(jobs, nodes, job, how, delay, out, rng)
            results["kills"].append(row)
            print(row, flush=True)
            shutil.rmtree(out, ignore_errors=True)
    finally:
        nodes.end()
        shutil.rmtree(folder, ignore_errors=True)
    publish(results, args.out, markdown)


if __name__ == "__main__":
    run_main(main)

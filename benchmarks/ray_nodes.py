"""A Ray cluster of two nodes on this machine, for benchmarks and tests."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from typing import Any
from unittest import mock

import psutil

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray

from gpq_faiss.cluster.connect import messages_to_log

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
        settings: of Ray itself.
    """

    def __init__(self, num_cpus: int = 1, settings: dict[str, Any] | None = None) -> None:
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
                head_node_args={**self._node, "temp_dir": self.folder, "_system_config": settings},
                shutdown_at_exit=False,
            )
        self.second: Any = self.add()
        self.address: str = self.cluster.address
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

    def end(self) -> list[psutil.Process]:
        """End everything. Returns the processes that existed."""
        family = [process for node in self.cluster.list_all_nodes() for process in self.family(node)]
        ray.shutdown()
        self.cluster.shutdown()
        shutil.rmtree(self.folder, ignore_errors=True)
        return family


def told(machine: dict[str, Any]) -> str:
    """A machine in a line."""
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Ray {ray.__version__}"


def _name(process: psutil.Process) -> str:
    try:
        return str(process.name())
    except psutil.NoSuchProcess:
        return ""


def kill(pid: int) -> None:
    """SIGKILL, if the process still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)

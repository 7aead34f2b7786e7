"""A real cluster on this machine, with ports and folders of its own; nothing of it is left."""

from collections.abc import Iterator
from typing import Any

import psutil
import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    from ray_kills import Nodes

    # A node that is gone is noticed in a second, which by default takes 15; a process that was just killed is called for 60.
    # Workers wait behind the other tests with Ray's own niceness, 15.
    nodes = Nodes(
        num_gpus=1,  # Ray takes our word for it
        settings={
            "worker_niceness": 0,
            "health_check_initial_delay_ms": 1000,
            "health_check_period_ms": 300,
            "health_check_failure_threshold": 4,
            "raylet_rpc_server_reconnect_timeout_max_s": 2,
            "core_worker_rpc_server_reconnect_timeout_max_s": 2,
        },
    )
    yield nodes
    assert not psutil.wait_procs(nodes.end(), timeout=10)[1]


@pytest.fixture
def nodes(cluster: Any) -> Any:
    cluster.two()
    return cluster

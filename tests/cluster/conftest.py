"""A real cluster on this machine, with ports and folders of its own; nothing of it is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    from ray_nodes import Nodes

    nodes = Nodes()
    yield nodes
    assert not psutil.wait_procs(nodes.end(), timeout=10)[1]


@pytest.fixture
def nodes(cluster: Any) -> Any:
    cluster.two()
    return cluster

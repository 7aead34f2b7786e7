"""The simulated cluster: simple cases whose answer is known, and the committed results, which follow from the measured ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("simpy")
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import simulate

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def test_an_answer_comes_with_the_slower_node_and_the_time_of_the_client() -> None:
    measured: dict[str, Any] = {
        "worker_ms": [[3, 8, 3], [5, 2, 5]],
        "one_ms": [4, 4, 4],
        "single_ms": {"shards, 1 workers": [6, 6, 6], "shards, 2 workers": [7, 7, 10]},
    }
    found = simulate.two_nodes(measured)
    assert found["p50"] == {"measured_ms": 7, "simulated_ms": pytest.approx(7)}  # 5 + 2; 8 + 2; 5 + 2
    assert found["p95"]["simulated_ms"] == pytest.approx(9.7)


@pytest.mark.parametrize(("replicas", "late"), [(1, True), (2, False)])
def test_a_failed_node_delays_only_what_no_other_holds(replicas: int, late: bool) -> None:
    times = np.array([0.01])
    well, failing = (simulate.many_nodes(4, replicas, times, 0.0, repair, 2000) for repair in (None, 10.0))
    assert well["late"] == 0
    assert well["p50_ms"] >= 10
    # A query at t in the ten seconds waits for the rest of them and for the 0.3 t of work before it: more than two seconds whenever it
    # comes. After them 3 s of work wait, and grow less by 0.7 s a second, down to two after 1.43 s.
    assert failing["late"] == (pytest.approx(11.43 * well["queries_s"], rel=0.2) if late else 0)


def test_the_committed_simulation_follows_from_the_committed_measurements() -> None:
    committed = json.loads((RESULTS / "simulate.json").read_text())
    cluster = json.loads((RESULTS / "cluster.json").read_text())
    large = json.loads((RESULTS / "large.json").read_text())["sizes"]["1000000000"]
    assert simulate.two_nodes(cluster["search"]) == committed["two_nodes"]
    assert simulate.sizes(large, cluster, committed["given"]["repair_s"]) == committed["sizes"]
    for row in committed["two_nodes"].values():  # the model is near what it is to stand for
        assert row["simulated_ms"] == pytest.approx(row["measured_ms"], rel=0.4)

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


NOTHING = dict.fromkeys(("before", "submit", "out", "home", "after"), np.zeros(1))


def measured(own: list[list[float]], real: list[float], **pieces: float) -> dict[str, Any]:
    """What ``cluster.py`` records of workers that take ``own`` ms for each query, and of ``real`` ms for all of it."""
    n, workers = len(real), len(own)
    return {
        "pieces_ms": {name: [pieces.get(name, 0.0)] * n for name in NOTHING},
        "worker_ms": {str(workers): {"beside": own}},
        "single_ms": {f"shards, {workers} workers": real},
    }


def test_an_answer_comes_with_the_slower_worker_and_after_the_work_of_the_client() -> None:
    times = measured([[3, 8, 3], [5, 2, 5]], [7, 7, 10], before=0.5, submit=0.25, out=1, home=2, after=0.125)
    found = simulate.one_machine(times, 2, 8)["p50"]
    # 0.5, two calls of 0.25, 1 there, 5 on the second worker, 2 back, 0.125; the query of 8 goes to the first, a call earlier
    assert found == {"measured_ms": 7, "simulated_ms": pytest.approx(9.125)}
    assert simulate.one_machine(times, 2, 8)["p95"]["simulated_ms"] == pytest.approx(9.125 + 0.9 * 2.75)


@pytest.mark.parametrize(("cores", "expected"), [(1, 12), (2, 6), (4, 3), (8, 3)])
def test_workers_on_one_machine_share_its_cores(cores: int, expected: float) -> None:
    found = simulate.one_machine(measured([[3.0]] * 4, [6.0]), 4, cores)
    assert found["p50"]["simulated_ms"] == pytest.approx(expected)


def test_nodes_have_cores_of_their_own_and_the_client_sends_one_call_after_another() -> None:
    part = NOTHING | {"submit": np.array([0.002]), "after": np.array([0.001])}
    rare = simulate.many_nodes(5, 1, np.array([10.0]), part, 0.003, None, 40)
    # Ten seconds each, beside each other; queries wait for each other, the median one not.
    assert rare["p50_ms"] >= 10_000 + 5 * 2 + 1 + 3
    alone = simulate.many_nodes(5, 1, np.array([10.0]), part, 0.003, None, 1)
    assert alone["p50_ms"] == pytest.approx(10_000 + 5 * 2 + 1 + 3)


@pytest.mark.parametrize(("simulated", "far"), [(8.1, False), (11.9, False), (7.9, True), (12.1, True)])
def test_a_simulation_that_is_far_off_says_so(simulated: float, far: bool) -> None:
    near = {"measured_ms": 10.0, "simulated_ms": 10.0}
    text = simulate.differences({"2": {"p50": near, "p95": near | {"simulated_ms": simulated}}})
    assert ("p95 with 2 workers" in text) == ("off by more than 20 %" in text) == far
    assert "p50" not in text


@pytest.mark.parametrize(("replicas", "late"), [(1, True), (2, False)])
def test_a_failed_node_delays_only_what_no_other_holds(replicas: int, late: bool) -> None:
    times = np.array([0.01])
    well, failing = (
        simulate.many_nodes(4, replicas, times, NOTHING, 0.0, repair, 2000) for repair in (None, 10.0)
    )
    assert well["late"] == 0
    assert well["p50_ms"] >= 10
    # A query at t in the ten seconds waits for the rest of them and for the 0.3 t of work before it: more than two seconds whenever it
    # comes. After them 3 s of work wait, and grow less by 0.7 s a second, down to two after 1.43 s.
    assert failing["late"] == (pytest.approx(11.43 * well["queries_s"], rel=0.2) if late else 0)


def test_the_committed_simulation_follows_from_the_committed_measurements() -> None:
    committed = json.loads((RESULTS / "simulate.json").read_text())
    cluster = json.loads((RESULTS / "cluster.json").read_text())
    large = json.loads((RESULTS / "large.json").read_text())["sizes"]["1000000000"]
    cores = cluster["machine"]["cores"]
    assert committed["one_machine"] == {
        workers: simulate.one_machine(cluster["search"], int(workers), cores) for workers in ("2", "4")
    }
    assert simulate.sizes(large, cluster, committed["given"]["repair_s"]) == committed["sizes"]
    assert simulate.differences(committed["one_machine"]) in (RESULTS / "simulate.md").read_text()

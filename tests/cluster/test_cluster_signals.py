"""A signal while Ray starts, or while its tasks are waited for, has the exit code and the line of all commands."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from commands import only_line
from model_factory import make_model

pytest.importorskip("ray", reason="ray is not installed: pip install 'gpq-faiss[ray]'")
import ray

from gpq_faiss import encode
from gpq_faiss.cluster import connect
from gpq_faiss.cluster.connect import connected
from gpq_faiss.errors import DataError

SCRIPT = """
import sys, time
from pathlib import Path
import gpq_faiss.stages.index  # which needs no torch
import ray._private.node
from gpq_cli.main import cli

there = Path(sys.argv.pop())
start = ray._private.node.Node.start_ray_processes

def work(*call):
    there.touch()
    time.sleep(600)

def stopped(self):
    start(self)
    work()

if "local" in sys.argv:
    ray._private.node.Node.start_ray_processes = stopped
gpq_faiss.stages.index._build_shard = work
cli(sys.argv[1:], prog_name="gpq")
"""


def ended(process):
    """Or one of Ray's agents, which end by themselves, but one that has just started calls Ray's first process for a minute before."""
    with contextlib.suppress(psutil.NoSuchProcess):
        gone = not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return gone or process.name() in ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
    return True


def until(holds, seconds):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize("when", ["starting", "waiting"])
def test_sigterm_ends_a_command_on_ray_as_any_other(nodes, tmp_path, when):
    address = "local" if when == "starting" else nodes.address
    make_model(tmp_path / "model")
    np.save(tmp_path / "x.npy", np.ones((8, 20), np.float32))
    there = tmp_path / "there"
    codes = encode(tmp_path / "model", f"features:{tmp_path / 'x.npy'}", tmp_path / "codes.h5")
    call = ["index", tmp_path / "model", codes, "--ray", address]
    child = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "-q", *map(str, call), "--out", str(tmp_path / "m.json"), str(there)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        until(lambda: there.exists() or child.poll() is not None, 120)
        family = psutil.Process(child.pid).children(recursive=True)
        child.send_signal(signal.SIGTERM)
        stderr = child.communicate(timeout=60)[1]
    finally:
        child.kill()
    assert there.exists(), stderr
    line = only_line(stderr)
    assert child.returncode == 128 + signal.SIGTERM, line
    assert "ended by SIGTERM" in line
    if when == "waiting":  # its task does not stay in the cluster
        until(lambda: ray.available_resources().get("CPU", 0) == ray.cluster_resources()["CPU"], 30)
        return
    assert family
    until(lambda: all(map(ended, family)), 30)


OWN = """
import json, os, ray
from gpq_faiss.cluster import connect
from gpq_faiss.cluster.connect import connected

with connected("local"):
    address = ray.get_runtime_context().gcs_address
    own = ray.get(ray.remote(lambda: os.environ["RAY_AUTH_TOKEN"]).remote())
    print(json.dumps([address, own]), flush=True)
    input()
assert "RAY_AUTH_TOKEN" not in os.environ
"""

ASKING = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None)"


def test_a_cluster_of_its_own_lets_nobody_else_in(tmp_path):
    """Ray listens on all interfaces, and runs whatever code a client sends."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    environment["HOME"] = str(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", OWN], env=environment, text=True, **pipes) as owner:
        address, own = json.loads(owner.stdout.readline())
        for token, enters in ((own, True), ("0" * 64, False)):
            client = environment | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            command = [sys.executable, "-c", ASKING, address]
            asked = subprocess.run(command, env=client, capture_output=True, check=False, timeout=60)
            assert (asked.returncode == 0) == enters
        owner.communicate("\n", timeout=60)
    assert owner.returncode == 0
    assert len(own) == 64
    assert not (tmp_path / ".ray").exists()


def test_ray_that_does_not_start_in_time_is_one_line(monkeypatch):
    before = signal.getsignal(signal.SIGTERM)

    def late(*_, **__):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # as Ray does
        raise Exception("The current node timed out during startup.\nThis could happen because ...")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", late)
    # The token is one of the process, which is still connected to the cluster of the other tests.
    monkeypatch.setattr(connect, "_tokens", lambda **_: contextlib.nullcontext())
    with (
        pytest.raises(DataError, match=r"no Ray cluster answers at local \(The current node timed out"),
        connected("local"),
    ):
        pass
    assert signal.getsignal(signal.SIGTERM) == before

"""The service as a real process: signals, kills, requests of any form; and the options of ``gpq serve``."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import serve as benchmark
from commands import refused
from gpq_faiss.indexes.manifest import update_manifest
from gpq_faiss.indexes.memory import MemoryIndex
from model_factory import make_model
from served import BEARER, TOKEN, open_live

from gpq_faiss.indexes.opening import open_in_memory


@contextmanager
def process(index, model, *options, before=()):
    """``gpq serve``, writable, once it answers, and its port."""
    port = benchmark.free_port()
    call = [sys.executable, "-m", "gpq_cli", "serve", index, "--model", model, "--writable", "--port", port]
    environment = {**os.environ, "GPQ_SERVE_TOKEN": TOKEN}
    if before:  # limits, by which coverage's own file would fail
        environment.pop("COVERAGE_PROCESS_CONFIG", None)
    command = [*before, *map(str, [*call, *options])]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as popen:
        try:
            benchmark.wait_for(port, lambda: popen.poll() is None)
            yield popen, port
        finally:
            popen.kill()


def ended(popen, port, item):
    """What it says on SIGTERM, after an item was removed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("DELETE", f"/items/{item}", headers=BEARER)
    assert connection.getresponse().status == 200
    connection.close()
    popen.send_signal(signal.SIGTERM)
    return popen.communicate(timeout=60)[1]


@pytest.mark.slow
def test_requests_of_any_form_get_documented_answers_and_sigterm_leaves_all_changes_in_the_index(
    made, index_file, tmp_path
):
    """Schemathesis makes requests from /openapi.json, right and wrong ones. An image or a vector without a direction is refused for what
    it holds, which no schema says: so accepted is not expected of every right one."""
    pytest.importorskip("schemathesis")
    limits = tmp_path / "serve.toml"
    limits.write_text("rate = 0")
    with process(index_file, made / "model", "--data", "digits", "--config", limits) as (popen, port):
        options = (
            "--max-examples 2 --seed 1 --phases coverage,fuzzing --exclude-checks positive_data_acceptance"
        )
        options += " --continue-on-failure --generation-database none --warnings off"
        call = [str(Path(sys.executable).parent / "st"), "run", f"http://127.0.0.1:{port}/openapi.json"]
        call += ["-H", f"Authorization: Bearer {TOKEN}", *options.split()]
        done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
        said = ended(popen, port, 1234)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "9/9" in done.stdout
    assert popen.returncode == 0, said
    assert f" items at http://127.0.0.1:{port}/" in said
    assert sorted(p.name for p in tmp_path.glob("index.*")) == ["index.faiss", "index.faiss.json"]
    assert 1234 not in open_in_memory(index_file).ids


def test_changes_that_the_disk_does_not_take_at_the_end_stay_beside_the_index(made, tmp_path):
    path = tmp_path / "index.faiss"
    Z = open_in_memory(made / "index.faiss").codebooks
    MemoryIndex.build(np.zeros((20_000, 3), np.uint8), Z).save(path)
    # On a full disk: files of 48 KiB are enough for the changes, not for the index.
    limited = ("sh", "-c", 'ulimit -f $((49152 / 512)); exec "$@"', "sh")
    with process(path, made / "model", before=limited) as (popen, port):
        said = ended(popen, port, 3)
    assert popen.returncode == 1, said
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert line.startswith(f"gpq: cannot write {path}: ")
    assert line.endswith("(all changes are in the file beside the index)")
    assert open_in_memory(path).ntotal == 20_000
    live = open_live(path, writable=True)
    assert live.snapshot.code_of(3) is None
    live.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["index.faiss", "index.faiss.json"]
    assert open_in_memory(path).ids.tolist() == [0, 1, 2, *range(4, 20_000)]


def test_kills_lose_nothing_that_was_acknowledged(tmp_path):
    found = benchmark.campaign(tmp_path, 3, seed=1, items=200)
    assert found["kills"] == 3
    assert found["acknowledged"] > 0


def test_a_wrong_option_is_one_line(made, tmp_path):
    index = shutil.copy(made / "index.faiss", tmp_path)
    serve = ("serve", index, "--port", 0, "--model")
    model, limits = made / "model", tmp_path / "serve.toml"
    for options, code, message in (
        (("--writable",), 2, "--writable lets requests change the index: a token is needed"),
        (("--host", "0.0.0.0"), 2, "can be reached from other machines: a token is needed"),  # noqa: S104
        (("--host", "::"), 2, "can be reached from other machines: a token is needed"),
        (("--host", "example.com", "--token", TOKEN), 2, "an IP address is needed"),
        *((("--token", wrong), 2, "at least 16") for wrong in ("short", "with a space in between", "é" * 20)),
        (("--port", "70000"), 2, "port = 70000"),
        (("--ray", "local"), 2, "is no manifest of shards"),
        (("--data", "nothing"), 2, "unknown data"),
        (("--data", "features:none.npy"), 1, "not found"),
    ):
        assert message in refused(*serve, model, *options, code=code)
    for line, message in (
        ("max_upload = 'much'", "max_upload 'much'"),
        ("max_k = 0", "max_k = 0: Input should be greater than or equal to 1"),
        ("max_q = 1", "'max_q' is unknown: did you mean 'max_k'?"),
        ("max_k = '9'", "serve.toml: max_k = '9': Input should be a valid integer"),
        ("allowed_hosts = [1]", "allowed_hosts = 1: Input should be a valid string"),
        ("port = 1", "serve.toml: port belongs on the command line"),
    ):
        limits.write_text(f"rate = 0.5\n{line}\n")
        assert message in refused(*serve, model, "--config", limits, code=2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "cannot be bound" in refused(*serve, model, "--port", port, code=2)
    other = make_model(tmp_path / "other", "images", image_size=8, backbone="mlp", seed=5)
    assert "has other codebooks" in refused(*serve, other)
    shutil.copy(made / "index.faiss.json", tmp_path)
    update_manifest(tmp_path / "m.json", [index], new=True)
    writable = ("serve", tmp_path / "m.json", "--model", model, "--writable", "--token", TOKEN)
    assert "is a manifest of shards: not --writable" in refused(*writable, code=2)

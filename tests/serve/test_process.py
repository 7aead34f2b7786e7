"""The service as a real process: signals, a replaced index under load, kills, and foreign requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused
from model_factory import make_model
from served import BEARER, TOKEN, open_live

from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve.changes import changes_path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import serve as benchmark


@dataclass
class Process:
    """A service of its own."""

    popen: subprocess.Popen[str]
    port: int
    index: Path

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"content-type": "application/json", **(headers or {})}
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, json.loads(text)


def start(index: Path, model: Path, *options: object, before: tuple[str, ...] = ()) -> Process:
    """``gpq serve``, writable, once it answers."""
    call = [sys.executable, "-m", "gpq_cli", "serve", index, "--model", model, "--writable", "--port", 0]
    popen = subprocess.Popen(
        [*before, *map(str, [*call, *options])],
        env={**os.environ, "GPQ_SERVE_TOKEN": TOKEN},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert popen.stderr is not None
    lines = []
    for line in popen.stderr:
        lines.append(line)
        if " items at http://127.0.0.1:" in line:
            return Process(popen, int(line.split("127.0.0.1:")[1].split("/")[0]), index)
    raise AssertionError("".join(lines))


@pytest.fixture(scope="module")
def process(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """The service of the digits."""
    folder = tmp_path_factory.mktemp("process")
    for name in ("index.faiss", "index.faiss.json"):
        shutil.copy(made / name, folder / name)
    limits = folder / "serve.toml"
    limits.write_text("rate = 0")
    started = start(folder / "index.faiss", made / "model", "--data", "digits", "--config", limits)
    assert started.popen.stderr is not None
    threading.Thread(target=started.popen.stderr.read, daemon=True).start()
    yield started
    started.popen.kill()
    started.popen.wait()


@pytest.mark.slow
def test_requests_of_any_form_get_documented_answers(process: Process, tmp_path: Path) -> None:
    """Schemathesis makes requests from /openapi.json, right and wrong ones. An image or a vector without a direction is refused for what
    it holds, which no schema says: so accepted is not expected of every right one."""
    pytest.importorskip("schemathesis")
    address = f"http://127.0.0.1:{process.port}/openapi.json"
    options = "--max-examples 5 --seed 1 --phases coverage,fuzzing --exclude-checks positive_data_acceptance --continue-on-failure"
    options += " --generation-database none --warnings off"
    call = [str(Path(sys.executable).parent / "st"), "run", address, *options.split()]
    call += ["-H", f"Authorization: Bearer {TOKEN}"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    assert "9/9" in done.stdout
    assert process.ask("GET", "/healthz")[0] == 200


def test_a_replaced_index_is_opened_without_a_dropped_request(process: Process) -> None:
    stop, wrong, counts = threading.Event(), [], set()

    def ask() -> None:
        while not stop.is_set():
            status, answer = process.ask("POST", "/search", {"id": 1000, "k": 5, "deny_ids": []})
            if status != 200 or len(answer["results"]) != 5:
                wrong.append((status, answer))
            counts.add(answer.get("ntotal"))

    before = process.ask("GET", "/info")[1]["ntotal"]
    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    plain = open_in_memory(process.index)
    end = time.monotonic() + 20
    for served, first in ((2, 50), (3, 70)):
        codes, ids = plain.codes[first:], plain.ids[first:]
        less = MemoryIndex.build(codes, plain.codebooks, ids, model_fingerprint=plain.model_fingerprint)
        less.save(process.index, overwrite=True)  # the service looks every second
        while len(counts) < served and time.monotonic() < end:
            time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    found = sorted(counts, reverse=True)
    # Of the items that the new files lack, other tests may have removed some before.
    assert found[0] == before
    assert [before - n for n in found[1:]] == pytest.approx([50, 70], abs=5)


def test_many_clients_get_answers(process: Process) -> None:
    rng = np.random.default_rng(0)
    dimensions = process.ask("GET", "/info")[1]["dimensions"]
    requests = [[benchmark._request(v) for v in rng.standard_normal((5, dimensions))] for _ in range(64)]
    times, errors, memory = asyncio.run(benchmark._clients(process.port, requests, 1.5, process.popen.pid))
    assert errors == []
    assert len(times) > 64
    assert memory[-1] < memory[0] + 100


def test_requests_that_are_no_http_or_end_early_do_no_harm(process: Process) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: x\r\n\r\n",
        b"GET /items/1 HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ):
        with socket.create_connection(("127.0.0.1", process.port), timeout=10) as connection:
            connection.sendall(data)
        assert process.ask("GET", "/healthz")[0] == 200


def test_sigterm_ends_it_with_all_changes_in_the_index_file(process: Process) -> None:
    status, _ = process.ask("DELETE", "/items/1500", headers=BEARER)
    assert status == 200
    assert changes_path(process.index).exists()
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(timeout=60) == 0
    assert sorted(p.name for p in process.index.parent.iterdir()) == [
        "index.faiss",
        "index.faiss.json",
        "serve.toml",
    ]
    assert 1500 not in open_in_memory(process.index).ids


def test_a_full_disk_at_the_end_is_one_line_and_loses_nothing(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "index.faiss"
    Z = open_in_memory(made / "index.faiss").codebooks
    MemoryIndex.build(np.zeros((20_000, 3), np.uint8), Z).save(path)
    # Files of 48 KiB are enough for the changes, not for the index.
    limited = ("sh", "-c", 'ulimit -f $((49152 / 512)); exec "$@"', "sh")
    service = start(path, made / "model", before=limited)
    with service.popen as popen:
        assert popen.stderr is not None
        assert service.ask("DELETE", "/items/3", headers=BEARER)[0] == 200
        popen.send_signal(signal.SIGTERM)
        said = popen.stderr.read()
    assert popen.returncode == 1, said
    assert "Traceback" not in said
    line = said.splitlines()[-1]
    assert line.startswith(f"gpq: cannot write {path}: ")
    assert line.endswith("(all changes are in the file beside the index)")
    assert open_in_memory(path).ntotal == 20_000
    assert open_live(path).snapshot.code_of(3) is None


def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = benchmark.campaign(tmp_path, 3, seed=1, items=200)
    assert found["kills"] == 3
    assert found["acknowledged"] > 0


def test_a_wrong_option_is_one_line(made: Path, tmp_path: Path) -> None:
    serve = ("serve", made / "index.faiss", "--model", made / "model", "--port", 0)
    for options, code, message in (
        (("--writable",), 2, "--writable lets requests change the index: a token is needed"),
        (("--host", "0.0.0.0"), 2, "can be reached from other machines: a token is needed"),  # noqa: S104
        (("--host", "example.com", "--token", TOKEN), 2, "an IP address is needed"),
        (("--token", "short"), 2, "at least 16"),
        (("--port", "70000"), 2, "port = 70000"),
        (("--ray", "local"), 2, "is no manifest of shards"),
        (("--data", "nothing"), 2, "unknown data"),
        (("--data", "features:none.npy"), 1, "not found"),
    ):
        assert message in refused(*serve, *options, code=code)
    limits = tmp_path / "serve.toml"
    for line, message in (
        ("max_upload = 'much'", "max_upload 'much'"),
        ("max_k = 0", "max_k = 0: Input should be greater than or equal to 1"),
        ("max_q = 1", "'max_q' is unknown: did you mean 'max_k'?"),
        ("max_k = '9'", "serve.toml: max_k = '9': Input should be a valid integer"),
        ("allowed_hosts = [1]", "allowed_hosts = 1: Input should be a valid string"),
        ("port = 1", "serve.toml: port belongs on the command line"),
        ("compact_after = 0", "compact_after = 0"),
    ):
        limits.write_text(f"rate = 0.5\n{line}\n")
        assert message in refused(*serve, "--config", limits, code=2)


def test_a_port_that_is_taken_and_an_index_of_another_model_are_one_line(made: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other", "images", image_size=8, backbone="mlp", seed=5)
    serve = ("serve", made / "index.faiss", "--model")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert "cannot be bound" in refused(*serve, made / "model", "--port", port, code=2)
    assert "has other codebooks" in refused(*serve, other, "--port", 0)

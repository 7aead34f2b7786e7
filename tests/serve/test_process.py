"""The service as a real process: signals, a replaced index under load, kills, and foreign requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
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
from click.testing import CliRunner
from gpq_cli.main import cli
from served import BEARER, TOKEN

from gpq_faiss.indexes.memory import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve.changes import changes_path
from gpq_faiss.serve.live import LiveIndex

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


@pytest.fixture(scope="module")
def process(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """``gpq serve`` of the digits, writable."""
    folder = tmp_path_factory.mktemp("process")
    for name in ("index.faiss", "index.faiss.json"):
        (folder / name).write_bytes((made / name).read_bytes())
    call = [
        sys.executable,
        "-m",
        "gpq_cli",
        "serve",
        str(folder / "index.faiss"),
        "--model",
        str(made / "model"),
    ]
    (folder / "serve.toml").write_text("rate = 0")
    call += ["--data", "digits", "--writable", "--port", "0", "--config", str(folder / "serve.toml")]
    popen = subprocess.Popen(
        call, env={**os.environ, "GPQ_SERVE_TOKEN": TOKEN}, stderr=subprocess.PIPE, text=True
    )
    assert popen.stderr is not None
    lines = []
    for line in popen.stderr:
        lines.append(line)
        if "serving 1,797 items at http://127.0.0.1:" in line:
            break
    else:
        raise AssertionError("".join(lines))
    port = int(line.split("127.0.0.1:")[1].split("/")[0])
    threading.Thread(target=popen.stderr.read, daemon=True).start()
    yield Process(popen, port, folder / "index.faiss")
    if popen.poll() is None:
        popen.kill()
    popen.wait()


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
    assert "10/10" in done.stdout
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
    plain.remove(np.arange(50))
    plain.save(process.index, overwrite=True)  # the service looks every second
    end = time.monotonic() + 20
    while len(counts) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    plain.remove(np.arange(50, 70))
    plain.save(process.index, overwrite=True)
    while len(counts) < 3 and time.monotonic() < end:
        time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert len(counts) == 3
    assert before in counts
    assert min(counts) < before


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
    call = [sys.executable, "-m", "gpq_cli", "serve", str(path), "--model", str(made / "model")]
    call += ["--writable", "--port", "0"]
    # Files of 48 KiB are enough for the changes, not for the index.
    limited = ["sh", "-c", 'ulimit -f $((49152 / 512)); exec "$@"', "sh", *call]
    environment = {**os.environ, "GPQ_SERVE_TOKEN": TOKEN}
    with subprocess.Popen(limited, env=environment, stderr=subprocess.PIPE, text=True) as popen:
        assert popen.stderr is not None
        started = next(line for line in popen.stderr if " items at http://127.0.0.1:" in line)
        service = Process(popen, int(started.split("127.0.0.1:")[1].split("/")[0]), path)
        assert service.ask("DELETE", "/items/3", headers=BEARER)[0] == 200
        popen.send_signal(signal.SIGTERM)
        said = popen.stderr.read()
    assert "Traceback" not in said
    assert popen.returncode == 1, said
    line = said.splitlines()[-1]
    assert line.startswith(f"gpq: cannot write {path}: ")
    assert line.endswith("(all changes are in the file beside the index)")
    assert open_in_memory(path).ntotal == 20_000
    assert not LiveIndex(path, Z).snapshot.has(3)


def test_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    found = benchmark.campaign(tmp_path, 3, seed=1, items=200)
    assert found["kills"] == 3
    assert found["acknowledged"] > 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--writable",), 2, "--writable lets requests change the index: a token is needed"),
        (("--host", "0.0.0.0"), 2, "can be reached from other machines: a token is needed"),  # noqa: S104
        (("--host", "example.com", "--token", TOKEN), 2, "an IP address is needed"),
        (("--token", "short"), 2, "at least 16"),
        (("--port", "70000"), 2, "port = 70000"),
        (("max_upload = 'much'",), 2, "max_upload 'much'"),
        (("max_k = 0",), 2, "max_k = 0: Input should be greater than or equal to 1"),
        (("max_q = 1",), 2, "'max_q' is unknown: did you mean 'max_k'?"),
        (("max_k = '9'",), 2, "serve.toml: max_k = '9': Input should be a valid integer"),
        (("allowed_hosts = [1]",), 2, "allowed_hosts = 1: Input should be a valid string"),
        (("port = 1",), 2, "serve.toml: port belongs on the command line"),
        (("--data", "nothing"), 2, "unknown data"),
        (("--data", "features:none.npy"), 1, "not found"),
        (("compact_after = 0", "--writable", "--token", TOKEN), 2, "compact_after = 0"),
    ],
    ids=lambda value: "_".join(value)[:30] if isinstance(value, tuple) else "",
)
def test_a_wrong_option_is_one_line(
    made: Path, tmp_path: Path, options: tuple[str, ...], code: int, message: str
) -> None:
    if "=" in options[0]:
        (tmp_path / "serve.toml").write_text(f"rate = 0.5\n{options[0]}\n")
        options = ("--config", str(tmp_path / "serve.toml"), *options[1:])
    result = CliRunner().invoke(
        cli, ["serve", str(made / "index.faiss"), "--model", str(made / "model"), "--port", "0", *options]
    )
    assert result.exit_code == code
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_port_that_is_taken_and_an_index_of_another_model_are_one_line(made: Path, tmp_path: Path) -> None:
    from model_factory import make_model

    other = make_model(tmp_path / "other", "images", image_size=8, backbone="mlp", seed=5)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        call = ["-q", "serve", str(made / "index.faiss"), "--model"]
        result = CliRunner().invoke(cli, [*call, str(made / "model"), "--port", port])
        assert result.exit_code == 2
        assert "cannot be bound" in result.stderr
    result = CliRunner().invoke(cli, [*call, str(other), "--port", "0"])
    assert result.exit_code == 1
    assert "has other codebooks" in result.stderr
    assert result.stderr.count("\n") == 1

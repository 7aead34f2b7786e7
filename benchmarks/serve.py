"""The service under load; and killed while clients write, for ``kills.py``.

    OMP_NUM_THREADS=1 python benchmarks/serve.py --seconds 600

An index of a million items with simulated codes, and 64 clients on the same machine, each of which
sends a query as soon as the last one is answered. The exit code is 1 if a request fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from common import clusters, make_parser, publish, save_features
from numpy.typing import NDArray

from gpq_faiss.codes.bits import pack_codes
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.config import preset
from gpq_faiss.evaluation.tables import render
from gpq_faiss.faissio.files import write_index
from gpq_faiss.faissio.model import read_model
from gpq_faiss.indexes.index import Index
from gpq_faiss.indexes.opening import open_index
from gpq_faiss.serve.run import serve
from gpq_faiss.serve.schemas import Settings
from gpq_faiss.stages.train import train

TOKEN = "0123456789abcdef"  # noqa: S105  (of services that live for seconds, on a loopback address)


def make_model(folder: Path, bits: int) -> Path:
    """Train a small model; only its codebooks matter here."""
    changes = {
        "quantizer": {"codebooks": bits // 4},
        "network": {"backbone": "linear"},
        "training": {"steps": 20, "batch_labelled": 30, "batch_unlabelled": 30},
    }
    data = save_features(folder, *clusters(300, 3, 16, 0.4), "training")
    config = preset("paper").with_settings(changes)
    return train(data, folder / "model", config=config, labelled="20-per-class")


def make_index(model: Path, path: Path, n: int) -> dict[int, bytes]:
    """Write an index of ``n`` items around up to 10,000 codes, and return its codes by id."""
    Z = read_model(model).codebooks
    M, K, _ = Z.shape
    rng = np.random.default_rng(0)
    indices = rng.integers(0, K, (min(n, 10_000), M))[rng.integers(0, min(n, 10_000), n)]
    mutated = rng.random((n, M)) < 0.3
    indices[mutated] = rng.integers(0, K, int(mutated.sum()))
    codes = pack_codes(indices, K)
    write_index(Index.build(codes, Z).to_faiss(), path)
    return dict(enumerate(map(bytes, codes)))


def free_port() -> int:
    """Return a random free port, below the range that the system gives to outgoing connections."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(port: int, alive: Callable[[], bool]) -> None:
    """Wait until a service answers. Raises AssertionError: it ended, or does not answer."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        assert alive(), "the service ended by itself"
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                return
        time.sleep(0.02)
    raise AssertionError("the service does not answer")


# Load ---------------------------------------------------------------------------------------------


async def _client(
    port: int, bodies: list[bytes], end: float, times: list[float], errors: list[str]
) -> None:
    """Send searches one after another until ``end``; collect latencies and wrong answers."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.perf_counter() < end:
        start = time.perf_counter()
        writer.write(bodies[len(times) % len(bodies)])
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        times.append(time.perf_counter() - start)
        if b" 200 " not in head.split(b"\r\n")[0] or body.count(b'"id"') != 10:
            errors.append(f"{head.decode()} {body[:200].decode()}")
    writer.close()


async def _clients(
    port: int, bodies: list[bytes], clients: int, seconds: float
) -> tuple[list[float], list[str]]:
    """Return latencies and errors of concurrent clients."""
    times, errors, end = list[float](), list[str](), time.perf_counter() + seconds
    await asyncio.gather(*(_client(port, bodies, end, times, errors) for _ in range(clients)))
    return times, errors


def usage(pid: int) -> tuple[float, float]:
    """Return the processor seconds of a process so far, and its resident memory in MiB."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds, int(fields[21]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def load(
    index: Path, model: Path, *, seconds: float, clients: int, warm: float = 3.0
) -> dict[str, Any]:
    """Run a service under load, and return latencies in ms, errors, and memory in MiB."""
    port = free_port()
    call = ["serve", index, "--model", model, "--port", port]
    process = subprocess.Popen([sys.executable, "-m", "gpq_cli", "-q", *map(str, call)])
    try:
        wait_for(port, lambda: process.poll() is None)
        Z, rng = read_model(model).codebooks, np.random.default_rng(1)
        codes = pack_codes(rng.integers(0, Z.shape[1], (clients * 50, len(Z))), Z.shape[1])
        vectors = decode(codes, Z)
        vectors = vectors + 0.1 * rng.standard_normal(vectors.shape).astype(np.float32)
        bodies = [_request(vector) for vector in vectors]
        asyncio.run(_clients(port, bodies, clients, warm))
        before, first = usage(process.pid)
        times, errors = asyncio.run(_clients(port, bodies, clients, seconds))
        after, last = usage(process.pid)
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    ms = 1e3 * np.array(times)
    return {
        "s": seconds,
        "load average": os.getloadavg()[1],
        "requests/s": len(ms) / seconds,
        "processor ms a request": 1e3 * (after - before) / len(ms),
        **{f"p{p} ms": float(np.percentile(ms, p)) for p in (50, 95, 99)},
        "errors": len(errors) + (code != 0),
        "MiB first": first,
        "last": last,
    }


def _request(vector: NDArray[np.float32]) -> bytes:
    body = json.dumps({"vector": [round(float(x), 5) for x in vector], "k": 10}).encode()
    head = "POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


# Kills --------------------------------------------------------------------------------------------


class Writer(threading.Thread):
    """A client that adds and removes items of its own range of ids until the service is killed.

    Attributes:
        acknowledged: the code of each changed item; None: removed.
        pending: the change that was sent but not yet acknowledged.
        error: the response, if it was an error.
    """

    def __init__(
        self, port: int, items: dict[int, bytes | None], codes: dict[bytes, list[float]]
    ) -> None:
        super().__init__()
        self.port, self.items, self.codes = port, items, codes
        self.acknowledged: dict[int, bytes | None] = {}
        self.pending: tuple[int, bytes | None] | None = None
        self.error: str | None = None

    def run(self) -> None:
        """Send changes until the connection breaks."""
        rng = np.random.default_rng()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        with contextlib.suppress(OSError, http.client.HTTPException):
            while self.error is None:
                id_ = int(rng.choice([*self.items]))
                code = None if self.items[id_] else [*self.codes][rng.integers(len(self.codes))]
                self.pending = id_, code
                if code is None:
                    connection.request("DELETE", f"/items/{id_}", headers=headers)
                else:
                    body = json.dumps({"id": id_, "vector": self.codes[code]})
                    connection.request("POST", "/items", body, headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status in (200, 201):
                    self.items[id_] = self.acknowledged[id_] = code
                    self.pending = None
                else:
                    self.error = f"{answer.status} {text[:200]!r}"


def campaign(root: Path, kills: int, *, items: int = 2000, writers: int = 8) -> dict[str, int]:
    """Kill a service again and again while clients write and indexes replace the served one.

    Returns:
        The numbers of kills and of acknowledged changes.

    Raises:
        AssertionError: an acknowledged change is lost, or an item appears that no client wrote.
    """
    model, index = make_model(root, 24), root / "index.faiss"
    Z, rng = read_model(model).codebooks, np.random.default_rng()
    vectors = rng.standard_normal((50, Z.shape[0] * Z.shape[2])).astype(np.float32)
    codes = dict(zip(map(bytes, encode(vectors, Z)), vectors.tolist(), strict=True))
    built, changed, acknowledged = make_index(model, index, items), dict[int, bytes | None](), 0
    for number in range(kills):
        port, current = free_port(), {**dict.fromkeys(range(2 * items)), **built, **changed}
        pid = _fork_service(index, model, port)
        try:
            wait_for(port, lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0] == 0)  # type: ignore[misc]
            ranges = [range(n, 2 * items, writers) for n in range(writers)]
            threads = [Writer(port, {id_: current[id_] for id_ in ids}, codes) for ids in ranges]
            for thread in threads:
                thread.start()
            time.sleep(float(rng.uniform(0.02, 1.0)))
            if number % 3 == 0:
                # Of the same items: the writers know which ids are in use.
                built = make_index(model, index, items)
                time.sleep(float(rng.uniform(0.0, 1.5)))
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        reopened = open_index(index)
        for thread in threads:
            thread.join()
            assert thread.error is None, thread.error
            acknowledged += len(thread.acknowledged)
            changed |= thread.acknowledged
            if thread.pending is not None:
                id_, code = thread.pending
                stored = reopened.code_of(id_)
                if (None if stored is None else bytes(stored)) == code:  # made before the kill
                    changed[id_] = code
        stored_codes, ids = reopened.items_by_id()
        expected = {id_: code for id_, code in {**built, **changed}.items() if code is not None}
        assert dict(zip(ids.tolist(), map(bytes, stored_codes), strict=True)) == expected
    return {"kills": kills, "acknowledged": acknowledged}


def _fork_service(index: Path, model: Path, port: int) -> int:
    """Start the service in a fork of this process, which has imported all modules."""
    pid = os.fork()
    if pid == 0:
        try:
            serve(index, model, settings=Settings(port=port, token=TOKEN), writable=True)
        finally:
            os._exit(1)
    return pid


# Report -------------------------------------------------------------------------------------------


def markdown(results: dict[str, Any]) -> str:
    """Return the table."""
    return (
        "# The service under load\n\n"
        f"{results['items']:,} items of {results['bits']} bits, simulated; {results['clients']} "
        "clients on the same machine, each with one query at a time, k = 10, vectors in JSON. One "
        "process serves, with one thread for searches. Latencies include the wait for processors."
        f"\n\n{render(results['load'], 'markdown', digits=2)}"
    )


def main() -> None:
    """Run the load, and write the results."""
    parser = make_parser(__doc__, "serve.json")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        model, index = make_model(Path(folder), options.bits), Path(folder, "index.faiss")
        make_index(model, index, options.items)
        row = load(index, model, seconds=options.seconds, clients=options.clients)
    results = {name: getattr(options, name) for name in ("items", "bits", "clients")}
    publish(results | {"load": [row]}, options.out, markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))
    sys.exit(row["errors"] > 0)


if __name__ == "__main__":
    main()

"""The service under load, and killed during writes.

    OMP_NUM_THREADS=1 python benchmarks/serve.py --seconds 600 --kills 100

Load: a million items with simulated codes, 64 clients that each send a query as soon as the last one is answered, on one machine with the
service. Kills: writers add and remove items, the service gets SIGKILL, and after a restart all acknowledged changes must be present, and no
others except pending ones, each completely or not at all.

The exit code is 1 if a request fails or a change is lost.
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
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from common import clusters, make_parser, publish, save_features
from numpy.typing import NDArray

from gpq_faiss.codes.bits import code_size, pack_codes
from gpq_faiss.codes.codebooks import inject
from gpq_faiss.codes.encode import decode, encode
from gpq_faiss.config import preset
from gpq_faiss.faissio.io import save_index
from gpq_faiss.faissio.model import read_model
from gpq_faiss.serve import service
from gpq_faiss.serve.guard import Settings
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.run import serve
from gpq_faiss.stages.train import train
from gpq_faiss.store.header import codebooks_fingerprint

TOKEN = "0123456789abcdef"  # noqa: S105  (of services that live for seconds, on a loopback address)
_STARTED = 120.0  # seconds that a service may take to answer


# Data -------------------------------------------------------------------------------------------------------------------


def make_model(folder: Path, bits: int) -> Path:
    """A small model; only its codebooks matter here."""
    changes = {
        "quantizer": {"codebooks": bits // 4},
        "network": {"backbone": "linear"},
        "training": {"steps": 20, "batch_labelled": 30, "batch_unlabelled": 30},
    }
    config = preset("paper").with_settings(changes)
    data = save_features(folder, *clusters(300, 3, 16, 0.4))
    return train(data, folder / "model", config=config, labelled="20-per-class")


def make_index(model: Path, out: Path, n: int, seed: int = 0) -> Path:
    """``n`` items around 10,000 codes, with each codeword another one in three of ten."""
    header = read_model(model)
    M, K, _ = header.codebooks.shape
    rng = np.random.default_rng(seed)
    indices = rng.integers(0, K, (min(n, 10_000), M))[rng.integers(0, min(n, 10_000), n)]
    other = rng.random((n, M)) < 0.3
    indices[other] = rng.integers(0, K, int(other.sum()))
    index = faiss.IndexIDMap2(inject(header.codebooks))
    index.add_sa_codes(pack_codes(indices, K), np.arange(n, dtype=np.int64))
    return save_index(index, out, model_fingerprint=header.model_fingerprint, overwrite=True)


# Services ---------------------------------------------------------------------------------------------------------------


def free_port() -> int:
    """A free port below those that the system gives to connections, one of which could take it before it is used."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def wait_for(port: int, alive: Any) -> None:
    """Wait until the service responds. Raises AssertionError: it does not, or it ended (``alive()``)."""
    end = time.monotonic() + _STARTED
    while time.monotonic() < end:
        assert alive(), "the service ended by itself"
        with contextlib.suppress(OSError, http.client.HTTPException):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/healthz")
            if connection.getresponse().status == 200:
                connection.close()
                return
        time.sleep(0.02)
    raise AssertionError("the service does not answer")


# Load -------------------------------------------------------------------------------------------------------------------


async def _client(port: int, bodies: list[bytes], end: float, times: list[float], errors: list[str]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    n = 0
    while time.perf_counter() < end:
        began = time.perf_counter()
        writer.write(bodies[n % len(bodies)])
        n += 1
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = await reader.readexactly(length)
        times.append(time.perf_counter() - began)
        if b" 200 " not in head.split(b"\r\n")[0] or body.count(b'"id"') != 10:
            errors.append(head.split(b"\r\n")[0].decode() + " " + body[:200].decode())
    writer.close()


async def _clients(
    port: int, requests: list[list[bytes]], seconds: float, pid: int
) -> tuple[list[float], list[str], list[float]]:
    times: list[float] = []
    errors: list[str] = []
    memory: list[float] = []
    end = time.perf_counter() + seconds
    clients = [asyncio.create_task(_client(port, bodies, end, times, errors)) for bodies in requests]
    while time.perf_counter() < end:
        memory.append(resident(pid))
        await asyncio.sleep(min(5.0, seconds / 4))
    for failed in await asyncio.gather(*clients, return_exceptions=True):
        if failed is not None:
            errors.append(repr(failed))
    memory.append(resident(pid))
    return times, errors, memory


def resident(pid: int) -> float:
    """Resident memory of a process in MiB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def processor_seconds(pid: int) -> float:
    """That a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def load(index: Path, model: Path, *, seconds: float, clients: int, warm: float = 3.0) -> dict[str, Any]:
    """Latencies in ms, errors, and memory in MiB of a service under load."""
    port = free_port()
    limits = index.with_name("serve.toml")
    limits.write_text(f"rate = 0\nmax_connections = {clients + 1}\n")
    call = ["serve", index, "--model", model, "--config", limits, "--port", port]
    process = subprocess.Popen([sys.executable, "-m", "gpq_cli", "-q", *map(str, call)])
    try:
        wait_for(port, lambda: process.poll() is None)
        header = read_model(model)
        M, K, _ = header.codebooks.shape
        rng = np.random.default_rng(1)
        vectors = decode(pack_codes(rng.integers(0, K, (clients * 50, M)), K), header.codebooks)
        vectors = vectors + 0.1 * rng.standard_normal(vectors.shape).astype(np.float32)
        requests = [[_request(v) for v in part] for part in vectors.reshape(clients, 50, -1)]
        asyncio.run(_clients(port, requests, warm, process.pid))
        before = processor_seconds(process.pid)
        times, errors, memory = asyncio.run(_clients(port, requests, seconds, process.pid))
        used = processor_seconds(process.pid) - before
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    ms = 1e3 * np.array(times)
    minutes = max(1, round(12 * seconds / 60) // 12)
    steps = np.array_split(np.array(memory), min(len(memory), minutes))
    return {
        "seconds": seconds,
        "clients": clients,
        "requests": len(ms),
        "per_second": len(ms) / seconds,
        "processor_ms": 1e3 * used / len(ms),
        "load_average": os.getloadavg()[1],
        "errors": len(errors),
        "first_errors": errors[:5],
        "exit_code": code,
        **{f"p{p}_ms": float(np.percentile(ms, p)) for p in (50, 95, 99)},
        "rss_mib": {"first": memory[0], "last": memory[-1], "by_minute": [float(s.mean()) for s in steps]},
    }


def _request(vector: NDArray[np.float32]) -> bytes:
    body = json.dumps({"vector": [round(float(x), 5) for x in vector], "k": 10}).encode()
    head = "POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


# Kills ------------------------------------------------------------------------------------------------------------------


class Writer(threading.Thread):
    """Adds and removes items with its own ids, one at a time, until the service is killed.

    Attributes:
        acknowledged: id -> code, or None if removed; must be present.
        under_way: the change sent but not acknowledged; may be present.
    """

    def __init__(
        self, port: int, ids: range, vectors: NDArray[np.float32], codes: NDArray[np.uint8], seed: int
    ) -> None:
        super().__init__()
        self.port, self.ids, self.vectors, self.codes = port, ids, vectors, codes
        self.rng = np.random.default_rng(seed)
        self.acknowledged: dict[int, bytes | None] = {}
        self.under_way: tuple[int, bytes | None] | None = None
        self.failed: str | None = None
        self.changes = 0

    def run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        with contextlib.suppress(OSError, http.client.HTTPException):
            while self.failed is None:
                number = int(self.rng.integers(self.ids.start, self.ids.stop))
                there = self.acknowledged.get(number) is not None
                which = int(self.rng.integers(0, len(self.vectors)))
                self.under_way = number, None if there else self.codes[which].tobytes()
                if there:
                    connection.request("DELETE", f"/items/{number}", headers=headers)
                else:
                    body = json.dumps({"id": number, "vector": self.vectors[which].tolist()})
                    connection.request("POST", "/items", body, headers)
                answer = connection.getresponse()
                text = answer.read()
                if answer.status not in (200, 201):
                    self.failed = f"{answer.status} {text[:200]!r}"
                    return
                self.acknowledged[number] = self.under_way[1]
                self.under_way = None
                self.changes += 1


def _fork_service(index: Path, model: Path, port: int, compact_after: int) -> int:
    """The service in a fork of this process, which has imported everything."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        try:
            service.WATCH = 0.02  # also of compactions
            settings = Settings(port=port, token=TOKEN, rate=0, compact_after=compact_after)
            serve(index, model, settings=settings, writable=True)
        finally:
            os._exit(1)
    return pid


def campaign(root: Path, kills: int, *, seed: int = 0, items: int = 2000, writers: int = 8) -> dict[str, int]:
    """SIGKILL at random times while ``writers`` write and the index is compacted every 40 changes, repeatedly on the same files.

    Raises:
        AssertionError: an acknowledged change is lost, or there is an item that was never written.
    """
    model = make_model(root, 24)
    index = make_index(model, root / "index.faiss", items)
    Z = read_model(model).codebooks
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((50, Z.shape[0] * Z.shape[2])).astype(np.float32)
    codes = encode(vectors, Z)
    held = _items(index, Z)
    spans = [range(n * 4 * items // writers, (n + 1) * 4 * items // writers) for n in range(writers)]
    total = applied = compacted = 0
    for _ in range(kills):
        port, inode = free_port(), index.stat().st_ino
        pid = _fork_service(index, model, port, compact_after=40)
        try:
            wait_for(port, lambda pid=pid: os.waitpid(pid, os.WNOHANG)[0] == 0)
            threads = [Writer(port, span, vectors, codes, int(rng.integers(1 << 30))) for span in spans]
            for thread, span in zip(threads, spans, strict=True):
                thread.acknowledged = {n: held.get(n) for n in span}
                thread.start()
            time.sleep(float(rng.uniform(0.02, 1.0)))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        for thread in threads:
            thread.join()
            assert thread.failed is None, thread.failed
        found = _items(index, Z)
        for thread in threads:
            total += thread.changes
            for number, code in thread.acknowledged.items():
                there = found.get(number)
                if thread.under_way is not None and thread.under_way[0] == number:
                    assert there in (code, thread.under_way[1]), f"id {number} is neither old nor new"
                    applied += there == thread.under_way[1]
                else:
                    assert there == code, f"id {number} lost an acknowledged change"
        assert all(any(number in span for span in spans) for number in found), "an id that nobody wrote"
        compacted += index.stat().st_ino != inode
        held = found
    return {
        "kills": kills,
        "acknowledged": total,
        "under_way_kept": applied,
        "compacted": compacted,
        "writers": writers,
    }


def _items(index: Path, Z: NDArray[np.float32]) -> dict[int, bytes]:
    live = LiveIndex(index, code_size(*Z.shape[:2]), codebooks_fingerprint(Z))
    codes, ids = live.snapshot.items()
    live.close()
    return {number: code.tobytes() for number, code in zip(ids.tolist(), codes, strict=True)}


# Report -----------------------------------------------------------------------------------------------------------------


def _markdown(found: dict[str, Any]) -> str:
    lines = [
        "# The service under load, and killed",
        "",
        f"{found['items']:,} items of {found['bits']} bits, simulated; {found['clients']} clients on the same machine, each with one query "
        "at a time, k = 10, vectors in JSON. One process serves. Latencies include the wait for processors.",
        "",
        "| s | load average | requests/s | processor ms a request | p50 ms | p95 ms | p99 ms | errors | MiB first | last |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in found["load"]:
        minutes = row["rss_mib"]["by_minute"]
        lines.append(
            f"| {row['seconds']:g} | {row['load_average']:.1f} | {row['per_second']:.0f} | "
            f"{row['processor_ms']:.2f} | {row['p50_ms']:.1f} | {row['p95_ms']:.1f} | "
            f"{row['p99_ms']:.1f} | {row['errors']} | {minutes[0]:.0f} | {minutes[-1]:.0f} |"
        )
    kills = found.get("kills")
    if kills:
        lines += [
            "",
            f"Kills: {kills['kills']} times SIGKILL while {kills['writers']} clients wrote, {kills['acknowledged']:,} changes "
            f"acknowledged in all, none lost; of changes under way {kills['under_way_kept']} were there afterwards, whole, the others "
            f"not at all. The index file was written anew every 40 changes meanwhile, in {kills['compacted']} of these rounds.",
        ]
    return "\n".join(lines)


def main() -> None:
    """Kill, load, and write the results."""
    parser = make_parser(__doc__, "serve.json")
    parser.add_argument("--items", type=int, default=1_000_000)
    parser.add_argument("--bits", type=int, default=48)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=600, help="of load")
    parser.add_argument("--kills", type=int, default=100)
    options = parser.parse_args()
    found: dict[str, Any] = {"load": []}
    found |= {name: getattr(options, name) for name in ("items", "bits", "clients")}
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        root = Path(folder)
        if options.kills:
            (root / "kills").mkdir()
            found["kills"] = campaign(root / "kills", options.kills)
        if options.seconds:
            model = make_model(root, options.bits)
            index = make_index(model, root / "index.faiss", options.items)
            found["load"] = [load(index, model, seconds=options.seconds, clients=options.clients)]
    publish(found, options.out, _markdown)
    print(options.out.with_suffix(".md").read_text(encoding="utf-8"))
    if any(row["errors"] or row["exit_code"] for row in found["load"]):
        sys.exit(1)


if __name__ == "__main__":
    main()

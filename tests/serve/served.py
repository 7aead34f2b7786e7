"""What the tests of the service share."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.testclient import TestClient

from gpq_faiss.codes.bits import code_size
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve.guard import Settings
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.run import Server, _bound
from gpq_faiss.serve.service import Service
from gpq_faiss.store.header import codebooks_fingerprint

TOKEN = "a-token-of-these-tests"  # noqa: S105
BEARER = {"authorization": f"Bearer {TOKEN}"}


def open_live(path: Path, Z: Any = None, **options: Any) -> LiveIndex:
    """The index at a path, for a model with the codebooks ``Z`` (default: those of the index)."""
    Z = open_in_memory(path).codebooks if Z is None else Z
    return LiveIndex(path, code_size(*Z.shape[:2]), codebooks_fingerprint(Z), **options)


@dataclass
class Served:
    """A running application and what it serves."""

    client: TestClient
    service: Service
    index_file: Path

    def search(self, **body: Any) -> dict[str, Any]:
        """The answer to a search that is right."""
        answer = self.client.post("/search", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found

    def add(self, **body: Any) -> int:
        """The id of an item that could be added."""
        answer = self.client.post("/items", json=body, headers=BEARER)
        assert answer.status_code == 201, answer.text
        return int(answer.json()["id"])

    def remove(self, number: int) -> None:
        """Remove an item that is there."""
        answer = self.client.delete(f"/items/{number}", headers=BEARER)
        assert answer.status_code == 200, answer.text


@contextmanager
def listening(service: Service, settings: Settings) -> Iterator[tuple[str, int]]:
    """The server of ``gpq serve`` in a thread, at this address and port."""
    with _bound("127.0.0.1", 0) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)  # so that it soon waits for clients
        server = Server(service, settings)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([bound])))
        thread.start()
        while not server.started:
            assert thread.is_alive()
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            thread.join()

"""Helpers of the tests of the service."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.testclient import TestClient

from gpq_faiss.indexes.opening import open_index
from gpq_faiss.serve.app import create_app
from gpq_faiss.serve.live import LiveIndex
from gpq_faiss.serve.run import bind
from gpq_faiss.serve.service import Service

TOKEN = "a-token-of-these-tests"  # noqa: S105
BEARER = {"authorization": f"Bearer {TOKEN}"}


def open_live(path: Path, **options: Any) -> LiveIndex:
    """Open an index for the model that it belongs to."""
    return LiveIndex(path, open_index(path, changes=False).fingerprint, **options)


def client_of(service: Service) -> TestClient:
    """Return a client of the application of a service."""
    return TestClient(create_app(service), base_url="http://127.0.0.1")


@dataclass
class Served:
    """A client of a service, and its index file."""

    client: TestClient
    index_file: Path

    def call(self, method: str, path: str, status: int = 200, **options: Any) -> Any:
        """Return the answer to a request, made with the token."""
        answer = self.client.request(method, path, headers=BEARER, **options)
        assert answer.status_code == status, answer.text
        return answer.json()

    def search(self, **body: Any) -> list[dict[str, Any]]:
        """Return the results of a search."""
        results: list[dict[str, Any]] = self.call("POST", "/search", json=body)["results"]
        return results

    def ids(self, **body: Any) -> list[int]:
        """Return the ids of the results of a search."""
        return [result["id"] for result in self.search(**body)]

    def items(self, **parameters: Any) -> list[dict[str, Any]]:
        """Return the items of a list."""
        items: list[dict[str, Any]] = self.call("GET", "/items", params=parameters)["items"]
        return items

    def add(self, **body: Any) -> int:
        """Add an item, and return its id."""
        return int(self.call("POST", "/items", 201, json=body)["id"])

    def remove(self, id_: int) -> None:
        """Remove an item."""
        self.call("DELETE", f"/items/{id_}")


@contextmanager
def listening(service: Service) -> Iterator[str]:
    """Serve in a thread, at the address that is yielded."""
    config = uvicorn.Config(create_app(service), log_level="warning", lifespan="off")
    with bind("127.0.0.1", 0) as bound:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([bound],))
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()

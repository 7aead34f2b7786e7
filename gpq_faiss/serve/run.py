"""Run the service as a process: open everything, bind, and stop on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ..codes.bits import code_size
from ..data.base import Dataset
from ..encoder import Encoder, open_encoder
from ..errors import DataError, UsageError
from ..indexes.manifest import is_manifest
from ..progress import stage
from .app import create_app
from .guard import Settings, client_of
from .live import LiveIndex
from .service import Service

log = logging.getLogger(__name__)

_GRACE = 10  # seconds for pending requests at shutdown
_CONNECTIONS = 2048
_TOO_MANY = b'{"error": "too many connections from this address"}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nconnection: close\r\nretry-after: 1\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_TOO_MANY), _TOO_MANY)
)


def serve(
    index: str | Path,
    model: str | Path,
    *,
    data: Dataset | None = None,
    settings: Settings | None = None,
    writable: bool = False,
    device: str = "cpu",
    ray: str | None = None,
    workers: int | None = None,
) -> None:
    """Serve an index over HTTP until SIGINT or SIGTERM.

    Args:
        index: file written by ``gpq index``, or a manifest of shards, which is read-only.
        model: model folder, or its network in ONNX (``gpq export-encoder``), which needs no torch but cannot add items.
        data: data set of the items, for names, labels and pictures, with the ids of the index.
        settings: address, token and limits.
        writable: allow adding and removing items; needs a token.
        device: device of the network.
        ray, workers: cluster for the shards of a manifest (:class:`.live.LiveIndex`).

    Raises:
        UsageError: the port cannot be bound, or options do not fit together.
        DataError, MismatchError, DeviceError: index, model or device are missing, damaged, or do not fit together.
    """
    settings, shards = settings or Settings(), is_manifest(index)
    if writable and settings.token is None:
        raise UsageError("--writable lets requests change the index: a token is needed (--token)")
    if writable and shards:
        raise UsageError(f"{index} is a manifest of shards: not --writable, but changed by gpq index --add")
    if ray is not None and not shards:
        raise UsageError(f"{index} is no manifest of shards, as gpq index --out NAME.json writes for --ray")
    with _bound(settings.host, settings.port) as bound:
        with stage("loading the model"):
            encoder = open_encoder(model, device)
        if writable and not isinstance(encoder, Encoder):
            raise UsageError(f"{model} makes vectors of queries only: --writable needs the model folder")
        of = code_size(*encoder.shape[:2]), encoder.codebooks_fingerprint
        compact_after = settings.compact_after
        live = LiveIndex(index, *of, writable=writable, compact_after=compact_after, ray=ray, workers=workers)
        try:
            service = Service(encoder, live, data, threads=settings.threads)
            asyncio.run(_run(service, settings, bound))
        finally:
            live.close(compact=False)  # if it never started


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket, bound before anything slow. Raises UsageError: it cannot be bound."""
    try:
        address = "127.0.0.1" if host == "localhost" else host
        family = socket.AF_INET6 if ipaddress.ip_address(address).version == 6 else socket.AF_INET
    except ValueError:
        raise UsageError(f"host {host!r}: an IP address is needed, such as 127.0.0.1 or 0.0.0.0") from None
    # asyncio sends at once only where the protocol is named: else every second part of an answer waits 40 ms for the client's word.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((address, port))
        except OSError as error:
            raise UsageError(
                f"{host} port {port} cannot be bound ({error.strerror}): choose another --port"
            ) from None
        yield bound


def _limited(settings: Settings) -> type[H11Protocol]:
    """Uvicorn's HTTP protocol with at most so many connections per client, and ``timeout`` seconds for the head of each request.

    A connection is cut off when a request takes twice as long: :class:`.guard.Guard` has answered by then, but the client does not read.
    """
    numbers: Counter[str] = Counter()

    class Limited(H11Protocol):
        _end: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._from = client_of(self.client[0] if self.client else "")
            numbers[self._from] += 1
            if numbers[self._from] > settings.max_connections:
                transport.write(_REFUSAL)
                transport.close()
            self._end_after(settings.timeout)

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._end_after(None)
            numbers[self._from] -= 1
            if not numbers[self._from]:
                del numbers[self._from]

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:  # the head is complete
                self._end_after(2 * settings.timeout)

        def on_response_complete(self) -> None:
            self._end_after(settings.timeout)
            super().on_response_complete()  # which may begin the next request

        def _end_after(self, seconds: float | None) -> None:
            if self._end is not None:
                self._end.cancel()
            if seconds is not None:
                self._end = self.loop.call_later(seconds, self.transport.abort)

    return Limited


class Server(uvicorn.Server):
    """The HTTP server of a service. It leaves signals to :func:`_run`."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, app, http = service, create_app(service, settings), _limited(settings)
        quiet: dict[str, Any] = {"log_config": None, "log_level": "warning", "access_log": False}
        limits: dict[str, Any] = {"limit_concurrency": _CONNECTIONS, "timeout_graceful_shutdown": _GRACE}
        options = {"http": http, "ws": "none", "server_header": False, "lifespan": "on", **quiet, **limits}
        super().__init__(uvicorn.Config(app, **options))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for bound in sockets or [] if self.started else []:
            name, port = bound.getsockname()[:2]
            shown, items = f"[{name}]" if ":" in name else name, self._service.live.snapshot.ntotal
            log.info("serving %s items at http://%s:%d/ (ctrl-C ends)", f"{items:,}", shown, port)


async def _run(service: Service, settings: Settings, bound: socket.socket) -> None:
    server = Server(service, settings)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, setattr, server, "should_exit", True)
    await server.serve([bound])
    if service.failed is not None:
        raise DataError(
            f"{service.failed} (all changes are in the file beside the index)"
        ) from service.failed

"""The service as a process."""

import logging
import signal
import socket
import threading
from pathlib import Path

import uvicorn

from ..data.base import Dataset
from ..encoder import Encoder, open_encoder
from ..errors import UsageError
from ..progress import stage
from .app import create_app
from .live import LiveIndex
from .schemas import Settings
from .service import Service

log = logging.getLogger(__name__)


def serve(
    index: str | Path,
    model: str | Path,
    *,
    data: Dataset | None = None,
    settings: Settings | None = None,
    writable: bool = False,
    device: str = "cpu",
) -> None:
    """Serve an index over HTTP until SIGINT or SIGTERM.

    Args:
        index: file made by ``gpq index`` or ``gpq encode``.
        model: model folder, or its network in ONNX (``gpq export-encoder``), which needs no torch
            but cannot add items.
        data: data set with pictures of the items, found by name; or the one that was indexed.
        settings: address, token and limits.
        writable: let requests add and remove items; needs a token.
        device: device of the network.

    Raises:
        UsageError: the port cannot be bound, or options do not fit together.
        DataError, MismatchError, DeviceError: the index, the model or the device is missing or
            damaged, or they do not fit together.
    """
    settings = settings or Settings()
    if writable and settings.token is None:
        raise UsageError("--writable lets requests change the index: a token is needed (--token)")
    with bind(settings.host, settings.port) as bound:
        with stage("loading the model"):
            encoder = open_encoder(model, device)
        if writable and not isinstance(encoder, Encoder):
            raise UsageError(
                f"{model} makes vectors of queries only: --writable needs the model folder"
            )
        with LiveIndex(index, encoder.codebooks_fingerprint, writable=writable) as live:
            threading.Thread(target=live.follow, daemon=True).start()
            config = uvicorn.Config(
                create_app(Service(encoder, live, data, settings)),
                ws="none",
                server_header=False,
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=10,
            )
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            port = bound.getsockname()[1]
            count = f"{live.index.ntotal:,}"
            log.info("serving %s items at http://%s:%d/ (ctrl-C ends)", count, host, port)
            # On these signals uvicorn shuts down gracefully, and then raises them again, which must
            # not count as an error.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda *_: None)
            uvicorn.Server(config).run([bound])


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket, so that a used port shows before the model is loaded.

    Raises:
        UsageError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        bound = socket.create_server((host, port), family=family)
    except OSError as error:
        raise UsageError(
            f"{host} port {port} cannot be bound ({error.strerror}): "
            "choose another --host or --port"
        ) from None
    # asyncio sets TCP_NODELAY only if the socket names its protocol, as this copy does.
    return socket.socket(fileno=bound.detach())

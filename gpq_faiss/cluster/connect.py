"""The connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DataError, one_line, optional
from ..evaluation.ranking import usable_cores

log = logging.getLogger(__name__)

LOCAL = "local"
"""Address of a temporary cluster on this machine."""


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """Context with the module ``ray`` connected to a cluster. An existing connection is reused, whatever the address.

    Args:
        address: ``local``, ``auto`` (the cluster running on this machine), or ``HOST:PORT``; None: no connection.

    Raises:
        UsageError: Ray is not installed.
        DataError: no cluster responds.
    """
    if address is None:
        yield None
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage statistics; Ray reads it on import
    ray = optional("ray", "the package ray is missing: pip install 'gpq-faiss[ray]'")
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    local = {"num_cpus": usable_cores(), "include_dashboard": False} if address == LOCAL else {}
    try:
        with kept_sigterm(), _tokens(own=address == LOCAL):
            ray.init(address, **local, **quiet)
    except MemoryError:
        raise
    except Exception as error:  # Ray raises a bare Exception if its processes do not start in time
        raise DataError(
            f"no Ray cluster answers at {address} ({one_line(error)}): start one, or leave out --ray"
        ) from None
    except SystemExit:  # raised by Ray's SIGTERM handler, in the main thread
        signal.raise_signal(signal.SIGTERM)
        raise
    messages_to_log(ray)
    try:
        yield ray
    finally:
        ray.shutdown()


@contextlib.contextmanager
def kept_sigterm() -> Iterator[None]:
    """Context for ``ray.init``, which installs a handler of its own for SIGTERM, in the main thread, and leaves it if it fails."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _tokens(*, own: bool) -> Iterator[None]:
    """Context in which Ray reads its token from the environment, or with ``own`` has a random one, unless the environment names one.

    The ports of a cluster are open to the network: so only this process and its workers can use a cluster that it starts.
    """
    from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]  # compiled

    names = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
    chosen = {}
    if own and not any(name in os.environ for name in names):
        chosen = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    def read() -> None:  # Ray does it once for a process, perhaps for another cluster
        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()

    os.environ.update(chosen)
    read()
    started = False
    try:
        yield
        started = True
    finally:
        for name in chosen:
            os.environ.pop(name, None)
        if not started:
            read()  # Ray ends a process that is to use a token but finds none


def messages_to_log(ray: Any) -> None:
    """Send Ray's messages about workers and dead nodes to the log, as stdout is for results."""

    def tell(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            log.debug("%s", line)

    ray._private.worker.print_to_stdstream = tell


def work_in(folder: str) -> None:
    """Set the working folder of a cluster process to the caller's, for relative paths. Raises DataError: it is not on this node."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise DataError(
            f"a node of the cluster has no {folder} ({error.strerror}): all nodes must see the same files under the same paths"
        ) from None

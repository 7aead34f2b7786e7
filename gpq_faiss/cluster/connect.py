"""The connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DataError, UsageError
from ..evaluation.ranking import usable_cores

log = logging.getLogger(__name__)

LOCAL = "local"
"""The address of a cluster of this machine alone, which ends with the work."""


def require_ray() -> Any:
    """The module. Raises UsageError: it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere; Ray reads it once
    try:
        import ray
    except ImportError:
        raise UsageError("the package ray is missing: pip install 'gpq-faiss[ray]'") from None
    return ray


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[Any]:
    """The module ``ray``, connected to a cluster. A program that is connected already stays with its own.

    Args:
        address: ``local``, ``auto`` (the cluster that runs on this machine), or ``HOST:PORT``; None: nothing is connected to.

    Raises:
        UsageError: Ray is not installed.
        DataError: no cluster answers.
    """
    if address is None:
        yield None
        return
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    main = threading.current_thread() is threading.main_thread()
    ending = signal.getsignal(signal.SIGTERM)
    try:
        if address == LOCAL:
            ray.init("local", num_cpus=usable_cores(), include_dashboard=False, **quiet)
        else:
            ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        why = " ".join(str(error).split())[:120]
        raise DataError(
            f"no Ray cluster answers at {address} ({why}): start one, or take --ray local"
        ) from None
    except SystemExit:  # what Ray's own handler makes of a SIGTERM meanwhile
        if main:
            signal.signal(signal.SIGTERM, ending)
            signal.raise_signal(signal.SIGTERM)
        raise
    if main:
        signal.signal(signal.SIGTERM, ending)  # Ray puts its own in place
    messages_to_log(ray)
    try:
        yield ray
    finally:
        ray.shutdown()


def messages_to_log(ray: Any) -> None:
    """What Ray would print on stdout of workers and nodes that died goes to the log: results go to stdout."""

    def tell(data: dict[str, Any], **_: Any) -> None:
        for line in data["lines"]:
            log.debug("%s", line)

    ray._private.worker.print_to_stdstream = tell


def work_in(folder: str) -> None:
    """Have a process of a cluster take relative paths from the folder of the program that it works for.

    Raises:
        DataError: this node does not have it.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise DataError(
            f"a node of the cluster has no {folder} ({error.strerror}): all nodes must see the same files under the same paths"
        ) from None


def nodes(ray: Any) -> list[str]:
    """Ids of the living nodes that take work, in a stable order."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))

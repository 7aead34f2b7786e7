"""The connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

from ..errors import DataError, one_line, optional
from ..evaluation.ranking import usable_cores

LOCAL = "local"
"""Address of a temporary cluster on this machine, which nobody can reach from another one."""


@contextlib.contextmanager
def connected(address: str) -> Iterator[Any]:
    """Connect to a Ray cluster for a block, and yield the module ``ray``.

    An existing connection is used, whatever the address.

    Args:
        address: ``local``, ``auto`` (the cluster running on this machine), or ``HOST:PORT``.

    Raises:
        UsageError: Ray is not installed.
        DataError: no cluster responds.
    """
    for name, value in {"RAY_USAGE_STATS_ENABLED": "0", "RAY_BACKEND_LOG_LEVEL": "fatal"}.items():
        os.environ.setdefault(name, value)  # Ray reads them on import
    ray = optional("ray", "the package ray is missing: pip install 'gpq-faiss[ray]'")
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    # By default Ray listens on all interfaces, also where its cluster is this machine.
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = address != LOCAL
    if address == LOCAL:
        options |= {"include_dashboard": False, "num_cpus": usable_cores()}
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, **options)
    except Exception as error:  # Ray raises a bare Exception if its processes do not start in time
        raise DataError(
            f"no Ray cluster answers at {address} ({one_line(error)}): start one, or leave out "
            "--ray"
        ) from None
    finally:
        # Ray replaces the handler, and keeps its own if it fails.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    try:
        yield ray
    finally:
        ray.shutdown()

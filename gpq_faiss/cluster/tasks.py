"""Function calls as tasks of a Ray cluster.

Each call writes one file whose name is determined by its inputs, so a retried call, even beside one that is still running, finds that file
or writes the same one. Tasks of a dead node run on another one.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from ..errors import BusyError, DataError, one_line
from .connect import connected, work_in

Result = TypeVar("Result")

_RETRIES = 20
"""Retries of a call whose worker or node died; after more, the call itself is taken as the cause."""
_WAIT = 0.5
_NEARLY_DONE = 1.0
"""Seconds that running calls have to end by themselves before they are cancelled."""


def run_all(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    address: str | None,
    *,
    gpus: int = 0,
    workers: int | None = None,
) -> Iterator[tuple[int, Result]]:
    """Run ``function(*call)`` for each of ``calls``, as tasks of one core each, spread over the nodes.

    Args:
        function: from a module installed on all nodes; may run more than once per call.
        address: of the cluster; None: run sequentially in this process.
        gpus: GPUs per task.
        workers: maximum number of concurrent tasks (default: limited by the cluster only).

    Yields the place in ``calls``, and the result, of each call when it has ended.

    Raises:
        GpqError: the first error of a call; the remaining calls are cancelled.
        DataError: the worker of a call died repeatedly, or no node has the resources.
    """
    if address is None:
        for place, call in enumerate(calls):
            yield place, _patient(os.curdir, function, *call)
        return
    with connected(address) as ray:
        # max_calls=0: by default Ray ends a process after a task with a GPU, and its loaded model with it.
        task = ray.remote(max_calls=0)(_patient).options(
            num_cpus=1, num_gpus=gpus, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        waiting = list(enumerate(calls))[::-1]
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < (workers or len(calls)):
                    place, call = waiting.pop()
                    running[task.remote(os.getcwd(), function, *call)] = place
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    yield running.pop(reference), ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None
        except ray.exceptions.RayError as error:
            raise DataError(
                f"a worker of the cluster at {address} died repeatedly ({one_line(error)})"
            ) from None
        finally:
            if running:
                # Ray may abort this process if a task ends at the moment it is cancelled: those that are nearly done end first.
                rest = ray.wait(list(running), num_returns=len(running), timeout=_NEARLY_DONE)[1]
                for reference in rest:
                    ray.cancel(reference, force=True)


def _patient(folder: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """Run the call in the caller's folder; wait while another process (perhaps an earlier attempt) writes the file."""
    work_in(folder)
    while True:
        try:
            return function(*arguments)
        except BusyError:
            time.sleep(_WAIT)

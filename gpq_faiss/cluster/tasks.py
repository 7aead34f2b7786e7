"""Calls of ordinary functions as tasks of a Ray cluster.

These are plain tasks and not Ray Data: each call writes one file whose name follows from what goes into it, so a call that is run
again, after its worker or node died or beside one that only seems dead, finds the file or writes the same one. Blocks of Ray Data
have no name that outlives a retry. A task that finds no worker left on one node is run on another, where a pool of actors would wait
for its node.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ..errors import BusyError, DataError
from .connect import connected, work_in

Result = TypeVar("Result")

_RETRIES = 20
"""How often a call is run again whose worker or node died: more than that is the call's own fault."""
_WAIT = 0.5


def run_all(
    function: Callable[..., Result],
    calls: Sequence[tuple[Any, ...]],
    address: str | None,
    *,
    shared: Iterable[Any] = (),
    gpus: int = 0,
    workers: int | None = None,
    done: Callable[[int], None] | None = None,
) -> list[Result]:
    """``function(*shared, *call)`` for each of ``calls``, as tasks of one core each, spread over the nodes.

    Args:
        function: of a module that the nodes have too. It may be run more than once for a call.
        calls: arguments.
        address: of the cluster (:func:`.connect.connected`); None: one after another, in this process.
        shared: first arguments of all calls, sent to each node once.
        gpus: of a task.
        workers: tasks at a time, at most (default: as many as the cluster has room for).
        done: called with the place of each call that is done.

    Returns:
        The results, in the order of ``calls``.

    Raises:
        GpqError: of the first call that raises one; the others are given up.
        DataError: a call's worker died again and again, or what it needs is nowhere.
    """
    if address is None:
        found = []
        for place, call in enumerate(calls):
            found.append(_patient(os.curdir, function, *shared, *call))
            if done is not None:
                done(place)
        return found
    with connected(address) as ray:
        # Without a limit of calls: after a task with a GPU Ray would by default end the process, and the model in it.
        task = ray.remote(max_calls=0)(_patient).options(
            num_cpus=1, num_gpus=gpus, max_retries=_RETRIES, scheduling_strategy="SPREAD"
        )
        held = [ray.put(value) for value in shared]
        results: list[Any] = [None] * len(calls)
        waiting = list(enumerate(calls))[::-1]
        running: dict[Any, int] = {}
        try:
            while waiting or running:
                while waiting and len(running) < (workers or len(calls)):
                    place, call = waiting.pop()
                    running[task.remote(os.getcwd(), function, *held, *call)] = place
                for reference in ray.wait(list(running), num_returns=1)[0]:
                    place = running.pop(reference)
                    results[place] = ray.get(reference)
                    if done is not None:
                        done(place)
        except ray.exceptions.RayTaskError as error:
            raise (error.cause or error) from None
        except ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:120]
            raise DataError(f"a worker of the cluster at {address} died again and again ({why})") from None
        finally:
            for reference in running:
                ray.cancel(reference, force=True)
        return results


def split(tasks: Sequence[int], address: str) -> list[list[int]]:
    """``tasks`` in as many parts as the cluster has cores, or fewer."""
    with connected(address) as ray:
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
    parts = [list(tasks[place::cores]) for place in range(cores)]
    return [part for part in parts if part]


def has_gpus(address: str, device: str) -> bool:
    """Whether a node of the cluster has one, where the device is ``auto``."""
    if device != "auto":
        return False
    with connected(address) as ray:
        return bool(ray.cluster_resources().get("GPU", 0) >= 1)


def _patient(folder: str, function: Callable[..., Result], *arguments: Any) -> Result:
    """The call, in the folder of the caller. Where another process writes the file, which may be an earlier run of this very call, it
    waits."""
    work_in(folder)
    while True:
        try:
            return function(*arguments)
        except BusyError:
            time.sleep(_WAIT)

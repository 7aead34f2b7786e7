"""Search of index shards in actors on the nodes of a Ray cluster. Results equal those of a single file.

Actors open shards on demand, so one that Ray restarted, on any node, answers as before.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from ..indexes.manifest import Manifest, read_manifest
from ..indexes.opening import open_shards
from ..indexes.sharded import MergedIndex
from .connect import connected, work_in

TIMEOUT = 60.0
"""Seconds that a search waits for the shards of a dead node to be opened on another."""


class Holder:
    """The actor class: keeps shards open and searches them, one call at a time. Raises as :func:`..indexes.opening.open_shards`."""

    def __init__(self, folder: str, shards: Manifest, memory: int | None, total: int) -> None:
        work_in(folder)
        self._open = functools.cache(functools.partial(open_shards, shards, memory, total=total))

    def answer(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method of the index of these shards, or get its codebooks."""
        found = getattr(self._open(), method)
        return found(*arguments, **options) if callable(found) else found


def live_nodes(ray: Any) -> list[str]:
    """Sorted ids of the live nodes that have CPUs."""
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU"))


class ClusterIndex(MergedIndex):
    """The shards of a manifest, opened in actors. Thread-safe for searches. What nobody uses any more ends its actors.

    Args:
        path: ``manifest.json``; raises as :func:`..indexes.opening.open_shards`.
        address: of the cluster; raises as :func:`.connect.connected`.
        memory: budget of each actor in bytes.
        workers: number of actors, spread evenly over the nodes; default: one per node.
        timeout: seconds that a search waits for actors to be restarted; then it raises DataError.
    """

    def __init__(
        self,
        path: str | Path,
        address: str,
        memory: int | None = None,
        *,
        workers: int | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"{workers} workers: at least one is needed")
        self.manifest = manifest = read_manifest(path)
        self._timeout = TIMEOUT  # to start the actors
        with contextlib.ExitStack() as stack:
            self._ray = ray = stack.enter_context(connected(address))
            living = live_nodes(ray)
            if not living:
                raise DataError(f"no node of the cluster at {address} takes work: start one")
            files: list[list[str]] = [[] for _ in range(workers or len(living))]
            load = [0] * len(files)
            # Largest first, to the actor with the least data.
            for shard in sorted(manifest.shards, key=lambda s: -s.bytes):
                place = min(range(len(load)), key=load.__getitem__)
                files[place].append(shard.file)
                load[place] += shard.bytes
            strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
            # Ray restarts the actors of a dead node on another, and repeats their calls.
            made = ray.remote(max_restarts=-1, max_task_retries=-1)(Holder)
            self._parts: list[tuple[Any, Manifest]] = []
            for place, held in enumerate(filter(None, files)):
                part, on = manifest.only(held), strategy(living[place % len(living)], soft=True)
                actor = made.options(scheduling_strategy=on)
                self._parts.append((actor.remote(os.getcwd(), part, memory, max(load)), part))
            stack.callback(self._parts.clear)
            codebooks = [*self._answers("codebooks")]
            self._timeout, self._stack = timeout, stack.pop_all()
        super().__init__(manifest, codebooks[0])

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{super().describe()}, {len(self._parts)} workers of a cluster"

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        exceptions, end = self._ray.exceptions, time.monotonic() + self._timeout
        references = []
        for actor, part in self._parts:
            given = (args[0], min(args[1], part.ntotal)) if method in ("search", "bound") else args
            references.append((part, actor.answer.remote(method, given, options)))
        for part, reference in references:
            try:
                yield self._ray.get(reference, timeout=max(0.001, end - time.monotonic()))
            except exceptions.RayTaskError as error:
                raise (error.cause or error) from None
            except exceptions.RayError:
                self._ray.cancel(reference)
                names = ", ".join(shard.file for shard in part.shards)
                raise DataError(
                    f"{self.manifest.path}: no node answers for the shards {names} in {self._timeout:g} s: start nodes"
                ) from None

    def close(self) -> None:
        """End the actors, and disconnect from the cluster."""
        self._stack.close()

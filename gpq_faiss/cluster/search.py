"""Search of index shards in actors on the nodes of a Ray cluster. Results equal those of a single file.

Actors open shards on demand, so one that Ray restarted, on any node, answers as before, and a new manifest can be opened in the same
actors while the old one is still searched.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from ..indexes.manifest import Manifest, read_manifest
from ..indexes.opening import open_shards
from ..indexes.sharded import MergedIndex, ShardedIndex
from ..progress import count
from .connect import connected, work_in

TIMEOUT = 60.0
"""Seconds that a search waits for the shards of a dead node to be opened on another."""

Part = tuple[str, Manifest, int | None, int]
"""Name of an index, its shards in one actor, the memory budget, and the bytes of shards that share it."""


class Holder:
    """The actor class: keeps shards open and searches them, one call at a time."""

    def __init__(self, folder: str = os.curdir) -> None:
        work_in(folder)
        self._held: dict[str, ShardedIndex] = {}

    def answer(self, part: Part, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Call a method on the index of a part, or get its codebooks. Raises as :func:`..indexes.opening.open_shards`."""
        name, manifest, memory, total = part
        if name not in self._held:
            self._held[name] = open_shards(manifest, memory, total=total)
        found = getattr(self._held[name], method)
        return found(*arguments, **options) if callable(found) else found

    def forget(self, name: str) -> None:
        """Close the shards of an index."""
        if name in self._held:
            self._held.pop(name).close()


class Holders:
    """The actors, spread evenly over the nodes of the cluster at ``address``: ``workers``, or one per node. Raises as :func:`connected`."""

    def __init__(self, address: str, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"{workers} workers: at least one is needed")
        self._stack = contextlib.ExitStack()
        self.address, self._workers = address, workers
        self.ray = self._stack.enter_context(connected(address))
        self._actors: dict[tuple[str, int], Any] = {}

    def nodes(self) -> list[str]:
        """Sorted ids of the live nodes that have CPUs."""
        known = self.ray.nodes()
        return sorted(node["NodeID"] for node in known if node["Alive"] and node["Resources"].get("CPU"))

    def actors(self) -> list[Any]:
        """The actors for the nodes that are live now; consecutive ones are on different nodes.

        Ray restarts those of a dead node on another, and repeats their calls. One no longer listed here ends when no index uses it.
        """
        living = self.nodes()
        if not living:
            raise DataError(f"no node of the cluster at {self.address} takes work: start one")
        places = [(living[i % len(living)], i // len(living)) for i in range(self._workers or len(living))]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        made = self.ray.remote(Holder)
        again = {"max_restarts": -1, "max_task_retries": -1}
        self._actors = {
            place: self._actors.get(place)
            or made.options(**again, scheduling_strategy=strategy(place[0], soft=True)).remote(os.getcwd())
            for place in places
        }
        return list(self._actors.values())

    def close(self) -> None:
        """End the actors and disconnect from the cluster."""
        self._actors.clear()
        self._stack.close()


class ClusterIndex(MergedIndex):
    """The shards of a manifest, opened in actors. Thread-safe for searches.

    Args:
        path: ``manifest.json``; raises as :func:`..indexes.opening.open_shards`.
        holders: the actors.
        memory: budget of each actor in bytes.
        timeout: seconds that a search waits for actors to be restarted; then it raises DataError.
    """

    def __init__(
        self, path: str | Path, holders: Holders, memory: int | None = None, *, timeout: float = TIMEOUT
    ) -> None:
        self.manifest = manifest = read_manifest(path)
        self._ray, self._timeout = holders.ray, timeout
        actors = holders.actors()
        files: list[list[str]] = [[] for _ in actors]
        load = [0] * len(actors)
        # Largest first, to the actor with the least data.
        for shard in sorted(manifest.shards, key=lambda s: -s.bytes):
            place = min(range(len(actors)), key=load.__getitem__)
            files[place].append(shard.file)
            load[place] += shard.bytes
        name = secrets.token_hex(8)
        self._parts: list[tuple[Any, Part]] = [
            (actor, (name, manifest.only(held), memory, max(load)))
            for actor, held in zip(actors, files, strict=True)
            if held
        ]
        # What replaces this index may be opened in the same actors, while the last searches of this one end.
        self._forget = weakref.finalize(self, _forget, holders.ray, self._parts)
        self._forget.atexit = False
        try:
            codebooks = [*self._answers("codebooks")]
        except BaseException:
            self.close()
            raise
        super().__init__(manifest, codebooks[0])

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{super().describe()}, {count(len(self._parts), 'worker')} of a cluster"

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        exceptions, end = self._ray.exceptions, time.monotonic() + self._timeout
        references = []
        for actor, part in self._parts:
            given = (args[0], min(args[1], part[1].ntotal)) if method in ("search", "bound") else args
            references.append((part, actor.answer.remote(part, method, given, options)))
        for part, reference in references:
            try:
                yield self._ray.get(reference, timeout=max(0.001, end - time.monotonic()))
            except exceptions.RayTaskError as error:
                raise (error.cause or error) from None
            except exceptions.RayError:
                self._ray.cancel(reference)
                names = ", ".join(shard.file for shard in part[1].shards)
                raise DataError(
                    f"{self.manifest.path}: no node answers for the shards {names} in {self._timeout:g} s: start nodes"
                ) from None

    def close(self) -> None:
        """Close the shards."""
        self._forget()


def _forget(ray: Any, parts: list[tuple[Any, Part]]) -> None:
    if ray.is_initialized():  # else the actors have ended
        for actor, (name, *_) in parts:
            actor.forget.remote(name)
    parts.clear()

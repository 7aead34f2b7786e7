"""Search of index shards in actors on the nodes of a Ray cluster. Results equal those of a single file.

:class:`Holders` manages the actors; :class:`ClusterIndex` distributes the shards of one manifest among them. Actors open shards on
demand, so an actor that Ray restarted, on any node, answers as before, and a new manifest can be opened in the same actors while the old
one is still searched.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..errors import DataError, GpqError, UsageError
from ..indexes.manifest import Manifest, Shard, read_manifest
from ..indexes.opening import open_shards
from ..indexes.sharded import MergedIndex, ShardedIndex
from ..progress import count
from .connect import connected, nodes, work_in

log = logging.getLogger(__name__)

TIMEOUT = 60.0
"""Seconds that a search waits for the shards of a dead node to be opened on another."""
_PAUSE = 0.1


class Holder:
    """The actor class: keeps shards open and searches them, one call at a time."""

    def __init__(self, folder: str = os.curdir) -> None:
        """``folder``: the caller's working folder, for relative paths. Raises DataError: it does not exist on this node."""
        work_in(folder)
        self._held: dict[tuple[Any, ...], ShardedIndex] = {}

    def answer(
        self,
        manifest: Manifest,
        memory: int | None,
        total: int,
        method: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
    ) -> tuple[Any, dict[str, GpqError]]:
        """Call a method on the shards of ``manifest`` combined.

        Args:
            memory, total: as :func:`..indexes.opening.open_shards`.

        Returns:
            The result, or None if no shard could be opened; and the errors of those that could not, by file.
        """
        opened: list[Shard] = []
        indexes, problems = [], {}
        for shard in manifest.shards:
            key = (manifest.path, shard, memory, total)
            try:
                if key not in self._held:
                    self._held[key] = open_shards(manifest.only([shard.file]), memory, total=total)
            except GpqError as error:
                problems[shard.file] = error
                continue
            opened.append(shard)
            indexes += self._held[key].opened
        if not opened:
            return None, problems
        together = ShardedIndex(manifest.only([shard.file for shard in opened]), indexes)
        if method == "codebooks":
            return together.codebooks, problems
        if method in ("search", "bound"):
            queries, k = arguments
            arguments = (queries, min(k, together.ntotal))
        return getattr(together, method)(*arguments, **options), problems

    def keep(self, shards: Sequence[Shard], memory: int | None, total: int) -> None:
        """Close all shards except ``shards``, opened with these arguments of :meth:`answer`."""
        wanted = {(shard, memory, total) for shard in shards}
        for key in [key for key in self._held if key[1:] not in wanted]:
            self._held.pop(key).close()


class Holders:
    """The actors, spread evenly over the nodes.

    Args:
        address: of the cluster (:func:`.connect.connected`).
        workers: number of actors (default: one per node).

    Raises:
        UsageError: ``workers`` below 1, or see :func:`.connect.connected`.
        DataError: see :func:`.connect.connected`.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        if workers is not None and workers < 1:
            raise UsageError(f"{workers} workers: at least one is needed")
        self._stack = contextlib.ExitStack()
        self.address, self._workers = address, workers
        self.ray = self._stack.enter_context(connected(address))
        self._actors: dict[tuple[str, int], Any] = {}

    def nodes(self) -> list[str]:
        """Ids of the live nodes."""
        return nodes(self.ray)

    def actors(self) -> list[Any]:
        """The actors for the nodes that are live now; consecutive ones are on different nodes.

        Ray restarts the actors of a dead node on another node. An actor no longer listed here ends when no index uses it.
        """
        living = self.nodes()
        if not living:
            raise DataError(f"no node of the cluster at {self.address} takes work: start one")
        places = [(living[i % len(living)], i // len(living)) for i in range(self._workers or len(living))]
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        made = self.ray.remote(Holder)
        self._actors = {
            place: self._actors.get(place)
            or made.options(
                max_restarts=-1, max_task_retries=0, scheduling_strategy=strategy(place[0], soft=True)
            ).remote(os.getcwd())
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
        path: ``manifest.json``.
        holders: the actors.
        memory: budget of each actor in bytes.
        replicas: number of actors per shard; searches alternate between them and fail over.
        allow_partial: search without shards that are unavailable, log their names, and add them to ``missing``; otherwise this is an
            error.
        timeout: seconds that a search waits for actors to be restarted.

    Attributes:
        missing: files of the shards that were left out of any search.
        places: shard file -> numbers of its actors, in order of preference.

    Raises:
        DataError: a shard is missing or damaged, or no node responds; names the shard.
        MismatchError: a shard is of another model.
        UsageError: see :func:`..indexes.opening.open_shards`; fewer than one replica.
    """

    def __init__(
        self,
        path: str | Path,
        holders: Holders,
        memory: int | None = None,
        *,
        replicas: int = 1,
        allow_partial: bool = False,
        timeout: float = TIMEOUT,
    ) -> None:
        if replicas < 1:
            raise UsageError(f"{replicas} replicas: at least one is needed")
        self.manifest = manifest = read_manifest(path)
        self._ray, self._allow_partial, self._timeout = holders.ray, allow_partial, timeout
        self.missing: set[str] = set()
        self._turns = itertools.count()
        actors = holders.actors()
        replicas = min(replicas, len(actors))
        load = [0] * len(actors)
        self.places: dict[str, list[int]] = {}
        # Largest first, to the actor with the least data.
        for shard in sorted(manifest.shards, key=lambda s: -s.bytes):
            place = min(range(len(actors)), key=load.__getitem__)
            self.places[shard.file] = [(place + r) % len(actors) for r in range(replicas)]
            for one in self.places[shard.file]:
                load[one] += shard.bytes
        self._actors = actors
        self._opening = memory, max(load)
        for turn in range(replicas):
            parts = list(self._ask("codebooks", (), {}, turn))
            if not parts:
                raise DataError(
                    f"{manifest.path}: no shard can be searched: {', '.join(sorted(self.missing))}"
                )
        super().__init__(manifest, parts[0])
        for place, actor in enumerate(actors):
            actor.keep.remote([s for s in manifest.shards if place in self.places[s.file]], *self._opening)

    def describe(self) -> str:
        """One-line description of the search."""
        return f"{super().describe()}, {count(len(self._actors), 'worker')} of a cluster"

    def _answers(self, method: str, *args: Any, **options: Any) -> Iterator[Any]:
        return self._ask(method, args, options, next(self._turns))

    def _ask(self, method: str, args: tuple[Any, ...], options: dict[str, Any], turn: int) -> Iterator[Any]:
        """Yield the answers of all actors. Calls that fail are retried, on the next replica if there is one, until the timeout."""
        exceptions, end = self._ray.exceptions, time.monotonic() + self._timeout
        waiting = [shard.file for shard in self.manifest.shards]
        gone: dict[str, GpqError] = {}
        while waiting:
            asked: dict[int, list[str]] = {}
            for file in waiting:
                places = self.places[file]
                asked.setdefault(places[turn % len(places)], []).append(file)
            references = [
                (files, self.ask_one(place, files, method, args, options)) for place, files in asked.items()
            ]
            waiting = []
            for files, reference in references:
                try:
                    answer, problems = self._ray.get(reference, timeout=max(0.001, end - time.monotonic()))
                except exceptions.RayTaskError as error:
                    raise (error.cause or error) from None
                except exceptions.GetTimeoutError:
                    self._ray.cancel(reference)
                    gone |= dict.fromkeys(files, self._no_answer(files))
                except exceptions.RayError:  # its process or node died
                    waiting += files
                else:
                    gone |= problems
                    if answer is not None:
                        yield answer
            if waiting and time.monotonic() > end:
                gone |= dict.fromkeys(waiting, self._no_answer(waiting))
                break
            if waiting:
                turn += 1
                time.sleep(_PAUSE)
        if gone and not self._allow_partial:
            raise next(iter(gone.values()))
        if gone:
            log.warning("%s: answered without the shards %s", self.manifest.path, ", ".join(sorted(gone)))
            self.missing |= set(gone)

    def ask_one(
        self, place: int, files: Sequence[str], method: str, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Reference to the result of :meth:`Holder.answer` for these shards on one actor."""
        return self._actors[place].answer.remote(
            self.manifest.only(files), *self._opening, method, args, options
        )

    def _no_answer(self, files: Sequence[str]) -> DataError:
        return DataError(
            f"{self.manifest.path}: no node answers for the shards {', '.join(files)} in {self._timeout:g} s: start nodes, or take "
            "allow_partial"
        )

    def close(self) -> None:
        """Release the actors; they end if no other index uses them."""
        self._actors = []

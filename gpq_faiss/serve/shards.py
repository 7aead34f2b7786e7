"""Read-only live index over the shards of a manifest, in this process or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..build.item_files import ShardItems
from ..cluster.search import ClusterIndex, Holders
from ..codes.checks import Codes, Floats, Ids
from ..indexes.manifest import read_manifest
from ..indexes.opening import open_shards
from ..indexes.sharded import MergedIndex
from ..progress import stage
from ..store import Item
from .changes import Changes
from .live import EVERYTHING, LiveIndex, View, Where


@dataclass(frozen=True, eq=False)
class ShardSnapshot(View):
    """The items of a manifest at some moment, as :class:`.live.Snapshot`.

    Attributes:
        index: of the shards.
        changes: none.
        named: names and labels beside the shards.
    """

    index: MergedIndex
    changes: Changes
    named: ShardItems
    filed: None = None  # their ids are not in memory

    @property
    def ntotal(self) -> int:
        """Items."""
        return self.index.ntotal

    def search(
        self, xq: Floats, k: int, where: Where = EVERYTHING, threads: int | None = None
    ) -> tuple[Floats, Ids]:
        """See :meth:`.live.Snapshot.search`. Raises DataError: shards are unavailable."""
        return self.index.search(
            xq, min(k, self.ntotal), where=where.without(self.changes.ids), threads=threads
        )

    def about(self, ids: Ids) -> list[Item | None]:
        """Names and labels of each id [n]; None if unknown. Raises DataError: a damaged file."""
        return self.named.lookup(ids)

    def code_of(self, number: int) -> Codes | None:
        return self.index.code_of(number)


class LiveShards(LiveIndex):
    """The manifest at a path. Shards are redistributed when it is replaced or a node joins or leaves the cluster; searches continue.

    Args:
        path, codebooks: as for :class:`.live.LiveIndex`.
        ray: address of a cluster for the shards; None: this process.
        workers, replicas: see :class:`..cluster.search.ClusterIndex`.

    Raises:
        DataError: the manifest or a shard is missing or damaged; names it.
        MismatchError: of another model.
        UsageError: Ray is not installed.
    """

    def __init__(
        self,
        path: str | Path,
        codebooks: Floats,
        *,
        ray: str | None = None,
        workers: int | None = None,
        replicas: int = 1,
    ) -> None:
        self._holders = None if ray is None else Holders(ray, workers)
        self._replicas = replicas
        super().__init__(path, codebooks)

    def _stored(self) -> Changes:
        return Changes.of((), self._size)

    def _open(self, changes: Changes) -> ShardSnapshot:
        with stage("opening the shards"):
            manifest, holders = read_manifest(self.path), self._holders
            index: MergedIndex = (
                open_shards(manifest)
                if holders is None
                else ClusterIndex(self.path, holders, replicas=self._replicas)
            )
            self._check(index.fingerprint)
            return ShardSnapshot(index, changes, ShardItems(manifest))

    def _state(self) -> object:
        state = super()._state()
        return state and (state, None if self._holders is None else tuple(self._holders.nodes()))

    def close(self, *, compact: bool = True) -> None:
        """Close the shards."""
        super().close(compact=compact)
        if self._holders is not None:
            self._holders.close()
            self._holders = None

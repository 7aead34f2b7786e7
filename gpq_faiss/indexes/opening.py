"""Open index files and Faiss indexes: in memory, or in place if the memory budget is too small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import INDEX_FILE, contents_of
from ..faissio.io import load_index
from ..inputs import check_file, parse_bytes
from .file import MEMORY, FileIndex, open_file
from .items import Items
from .manifest import Manifest, is_manifest, read_manifest
from .memory import MemoryIndex
from .sharded import ShardedIndex


def open_in_memory(source: Any) -> MemoryIndex:
    """An index in memory from an index file, or from a Faiss index (any form supported by :mod:`..faissio.storage`): a snapshot.

    Raises:
        DataError, MismatchError: empty, or see :func:`..faissio.io.load_index`.
    """
    held, sidecar = load_index(source) if isinstance(source, str | Path) else (contents_of(source), {})
    if held.header.n == 0:
        raise DataError(f"{held.header.source.path} is empty: add codes first (gpq index)")
    items = Items.ordered(held.codes, held.own_ids)
    return MemoryIndex(items, held.header.codebooks, model_fingerprint=sidecar.get("model_fingerprint"))


_COPIES = 8
"""Maximum memory of opening and searching an index, in multiples of its file size."""


def open_index(
    index: Any, memory: str | int | None = None, *, in_place: bool = False
) -> MemoryIndex | FileIndex | ShardedIndex:
    """Open an index file in memory, or in place if it exceeds the memory budget; or the shards of a manifest as one index.

    Args:
        index: the path of an index file or of a ``manifest.json``, or a Faiss index, whose codes are copied into memory.
        memory: budget of the search; without one, the index is read into memory.
        in_place: search the file in place even if it fits in the budget (default budget: 1 GB). Only the header is read; the
            file stays open until the index is closed.

    Raises:
        UsageError: a budget that is too small or cannot be read.
        DataError, MismatchError: as :func:`open_in_memory`.

    Examples:
        >>> import faiss, numpy as np, tempfile
        >>> from gpq_faiss.codes.codebooks import inject
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> filled = inject(Z)  # a plain Faiss index
        >>> filled.add_sa_codes(np.array([[0x00], [0x21]], np.uint8))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     faiss.write_index(filled, f"{folder}/i.faiss")
        ...     for in_place in (False, True):
        ...         index = open_index(f"{folder}/i.faiss", in_place=in_place)
        ...         scores, ids = index.search(np.arange(32.0)[None], 2)
        ...         print(index.ntotal, scores.tolist(), ids.tolist())
        ...         index.close()
        2 [[19.0, 16.0]] [[1, 0]]
        2 [[19.0, 16.0]] [[1, 0]]
    """
    if not isinstance(index, str | Path):
        if memory is not None or in_place:
            raise UsageError("a Faiss index is in memory: memory and in_place are for index files")
        return open_in_memory(index)
    if is_manifest(Path(index)):
        return open_shards(read_manifest(index), memory, in_place=in_place)
    path = Path(index)
    size = check_file(path, INDEX_FILE)
    if in_place or (memory is not None and _COPIES * size > parse_bytes(memory)):
        return open_file(path, MEMORY if memory is None else memory)
    return open_in_memory(path)


def open_shards(
    manifest: Manifest, memory: str | int | None = None, *, in_place: bool = False, total: int | None = None
) -> ShardedIndex:
    """Open the shards of a manifest as one index.

    Args:
        memory: budget of all shards; if they do not fit, they are searched in place, one at a time.
        in_place: search the files in place.
        total: bytes of all shards that share the budget (default: of these).

    Raises:
        DataError: a missing or damaged shard (named).
        MismatchError: a shard of another model or a modified one.
    """
    budget = None if memory is None else parse_bytes(memory)
    total = total or sum(shard.bytes for shard in manifest.shards)
    in_place = in_place or (budget is not None and _COPIES * total > budget)
    opened: list[MemoryIndex | FileIndex] = []
    try:
        for shard in manifest.shards:
            manifest.check(shard)
            path = manifest.file(shard)
            try:
                index = open_file(path, budget or MEMORY) if in_place else open_in_memory(path)
            except DataError as error:
                raise type(error)(f"{manifest.path}: shard {shard.file}: {error}") from error
            opened.append(index)
            if isinstance(index, MemoryIndex) and index.id_range != (shard.first_id, shard.last_id):
                raise MismatchError(
                    f"{manifest.path}: shard {shard.file} has ids outside {shard.first_id} to {shard.last_id}, which the "
                    "manifest states: write the manifest again (gpq index)"
                )
    except BaseException:
        for index in opened:
            index.close()
        raise
    return ShardedIndex(manifest, opened)


def verify_manifest(manifest: Manifest) -> None:
    """Check all of every shard, one at a time. Raises as :func:`open_shards`."""
    for shard in manifest.shards:
        open_shards(manifest.only([shard.file])).close()

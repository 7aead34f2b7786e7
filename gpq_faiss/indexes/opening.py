"""Open index files and Faiss indexes: in memory, or in place if the memory budget is too small."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ..errors import DataError, MismatchError, UsageError
from ..faissio.header import has_lists
from ..faissio.io import load_index, read_sidecar
from ..faissio.layout import layout_of
from ..faissio.storage import Packing
from ..inputs import check_file, parse_bytes
from .file import MEMORY, FileIndex, open_file
from .items import Items
from .lists import IvfSettings
from .manifest import Manifest, is_manifest, read_manifest, wrong_ids
from .memory import MemoryIndex
from .plan import KINDS, Plan
from .sharded import ShardedIndex


def of_faiss(
    index: Any,
    *,
    kind: str | Plan = "auto",
    what: str = "index",
    ivf: IvfSettings | None = None,
    model_fingerprint: str | None = None,
) -> MemoryIndex:
    """An index in memory from a Faiss index (any form supported by :func:`..faissio.layout.layout_of`); a snapshot.

    Raises:
        DataError: an empty or invalid index.
        UsageError: see :meth:`MemoryIndex.build`.
    """
    layout = layout_of(index, what=what, deep=True)
    if layout.ntotal == 0:
        raise DataError(f"{what} is empty: add codes first (gpq index)")
    plan = Plan.of(kind)
    plan.check(int(layout.codebooks.shape[1]))
    codes, ids, list_of = layout.ordered()
    codes, ids = codes.copy(), None if ids is None else ids.copy()  # so that the index can be freed
    if plan.search == "ivf" and ivf is None and list_of is not None:
        packed: Packing = "fastscan" if layout.storage.packing == "fastscan" else "bytes"
        plan = dataclasses.replace(plan, packing=packed)
        ivf = IvfSettings(centroids=layout.centroids, nprobe=int(layout.flat.nprobe), list_of=list_of)
    items = Items.ordered(codes, ids)
    return MemoryIndex(items, layout.codebooks, plan, ivf=ivf, model_fingerprint=model_fingerprint)


def open_in_memory(source: Any, kind: str | Plan | None = None) -> MemoryIndex:
    """An index in memory from an index file or a Faiss index.

    Args:
        source: a path, or a Faiss index.
        kind: a name in :data:`.plan.KINDS`, or a plan; default: that of the file, else ``ivf`` if it has lists,
            else ``auto``.

    Raises:
        DataError, MismatchError: see :func:`..faissio.io.load_index`.
        UsageError: see :meth:`MemoryIndex.build`.
    """
    if not isinstance(source, str | Path):
        return of_faiss(source, kind=kind or "auto")
    index, sidecar = load_index(source)
    extra = sidecar["extra"]
    if kind is None:
        # earlier versions wrote other names of exact searches
        kind = KINDS.get(extra.get("engine", "ivf" if has_lists(source) else "auto"), KINDS["auto"])
    return of_faiss(index, kind=kind, what=str(source), model_fingerprint=sidecar["model_fingerprint"])


_COPIES = 8
"""Maximum memory of opening and searching an index, in multiples of its file size."""


def open_index(
    index: Any,
    kind: str = "auto",
    memory: str | int | None = None,
    nprobe: int | None = None,
    *,
    in_place: bool = False,
) -> MemoryIndex | FileIndex | ShardedIndex:
    """Open an index file in memory, or in place if it exceeds the memory budget; or the shards of a manifest as one index.

    Args:
        index: the path of an index file or of a ``manifest.json``, or a Faiss index, whose codes are copied into memory.
        kind: see :data:`.plan.KINDS`. ``auto``: lists if the file has lists, else exact.
        memory: budget of the search; without one, the index is read into memory.
        nprobe: lists to probe.
        in_place: search the file in place even if it fits in the budget (default budget: 1 GB). Only the header is read; the
            file stays open until the index is closed.

    Raises:
        UsageError: an unknown kind, one not available in place, or ``nprobe`` without lists.
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
        ...         index = open_index(f"{folder}/i.faiss", "exact", in_place=in_place)
        ...         scores, ids = index.search(np.arange(32.0)[None], 2)
        ...         print(index.ntotal, scores.tolist(), ids.tolist())
        ...         index.close()
        2 [[19.0, 16.0]] [[1, 0]]
        2 [[19.0, 16.0]] [[1, 0]]
    """
    Plan.of(kind)
    opened: MemoryIndex | FileIndex
    if not isinstance(index, str | Path):
        if memory is not None or in_place:
            raise UsageError("a Faiss index is in memory: memory and in_place are for index files")
        opened = open_in_memory(index, kind)
    elif is_manifest(Path(index)):
        return open_shards(read_manifest(index), kind, memory, nprobe, in_place=in_place)
    else:
        opened = _open_path(Path(index), kind, memory, in_place)
    if nprobe is not None:
        if not opened.lists or kind == "exact":
            raise UsageError(f"nprobe needs lists, which this search of {index} does not use: use kind 'ivf'")
        opened.set_nprobe(nprobe)
    return opened


def _open_path(path: Path, kind: str, memory: str | int | None, in_place: bool) -> MemoryIndex | FileIndex:
    """:func:`open_index` of a path, without setting ``nprobe``."""
    check_file(path, "an index file (gpq index, or faiss.write_index)")
    copies = 0.0 if memory is None or not path.is_file() else path.stat().st_size / parse_bytes(memory)
    if in_place or _COPIES * copies > 1:
        budget = MEMORY if memory is None else memory
        opened = open_file(path, budget)
        if kind not in ("auto", "exact", "ivf") or (kind == "ivf" and not opened.lists):
            raise UsageError(
                f"{path} must be searched in place with {budget}, which kind {kind!r} does not support: use 'exact', raise --memory, "
                "or build the index with that kind"
            )
        if opened.lists and kind == "exact":
            opened.set_nprobe(opened.lists)
        return opened
    sidecar = read_sidecar(path)
    if kind == "auto" and sidecar is not None and has_lists(path):
        kind = "ivf"
    return open_in_memory(path, kind=None if kind == "auto" and sidecar is None else kind)


def open_shards(
    manifest: Manifest,
    kind: str = "auto",
    memory: str | int | None = None,
    nprobe: int | None = None,
    *,
    in_place: bool = False,
    total: int | None = None,
) -> ShardedIndex:
    """Open the shards of a manifest as one index; shards with lists are searched in place, unless kind ``exact`` is requested.

    Args:
        kind, nprobe: as :func:`open_index`, but not ``fastscan``, whose results would differ from those of one file.
        memory: budget of all shards; if they do not fit, they are searched in place, one at a time.
        in_place: search the files in place.
        total: bytes of all shards that share the budget (default: of these).

    Raises:
        DataError: a missing or damaged shard (named).
        MismatchError: a shard of another model or a modified one, or different lists.
        UsageError: a kind that these shards do not support, or ``nprobe`` without lists.
    """
    Plan.of(kind)
    budget = None if memory is None else parse_bytes(memory)
    total = total or sum(shard.bytes for shard in manifest.shards)
    in_place = in_place or (budget is not None and _COPIES * total > budget)
    opened: list[MemoryIndex | FileIndex] = []
    try:
        for shard in manifest.shards:
            manifest.check(shard)
            path = manifest.file(shard)
            try:
                lists = kind in ("auto", "ivf") and has_lists(path)
                if kind == "ivf" and not lists:
                    raise UsageError(f"{manifest.path}: shard {shard.file} has no lists: take kind 'auto'")
                if in_place or lists:
                    index: Any = open_file(path, budget or MEMORY)
                    if kind == "exact" and index.lists:
                        index.set_nprobe(index.lists)
                else:
                    index = _open_path(path, kind, budget and max(1, budget * shard.bytes // total), False)
            except DataError as error:
                raise type(error)(f"{manifest.path}: shard {shard.file}: {error}") from error
            opened.append(index)
            if isinstance(index, MemoryIndex) and index.id_range != (shard.first_id, shard.last_id):
                raise wrong_ids(manifest, shard)
            if index.fingerprint != manifest.codebooks_fingerprint:
                raise MismatchError(
                    f"{manifest.path}: shard {shard.file} is of another model ({index.fingerprint}, not "
                    f"{manifest.codebooks_fingerprint}): put a shard of this model in its place"
                )
        made = ShardedIndex(manifest, opened)
        if nprobe is not None:
            if not made.lists or kind == "exact":
                raise UsageError(
                    f"nprobe needs lists, which this search of {manifest.path} does not use: use kind 'ivf'"
                )
            made.set_nprobe(nprobe)
    except BaseException:
        for index in opened:
            index.close()
        raise
    return made

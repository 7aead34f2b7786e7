"""From codes (or features, which are encoded) to a searchable index."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..build.item_files import has_items, items_key, write_names
from ..build.shards import open_shard
from ..build.stream import MEMORY as STREAM_MEMORY
from ..build.stream import build_index
from ..cluster.tasks import run_all
from ..data.paths import replaces
from ..errors import OutputExistsError, UsageError
from ..faissio.io import Beside, file_sha256
from ..faissio.model import read_model
from ..faissio.storage import check_form
from ..files import check_output, fingerprint, recover
from ..indexes.manifest import read_manifest, update_manifest
from ..inputs import parse_bytes
from ..progress import stage
from ..store.items import items_path


def index(
    model_dir: str | Path,
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    kind: str = "flat",
    memory: str | int | None = None,
    names: bool = True,
    overwrite: bool = False,
) -> Path:
    """Build a searchable index from codes (or features, which are encoded), with the items' ids.

    Rows stream through files (:func:`..build.stream.build_index`): the build can be resumed by source and keeps to the memory budget. An
    index of kind ``flat`` of one codes or features file is an ``IndexIDMap2``; with ``memory``, several sources or another kind the
    id map is an ``IndexIDMap`` (none for ids 0, 1, 2, ...), which needs no table of ids in memory.

    Args:
        model_dir: the model of the rows.
        source: ``codes.h5``, ``features.h5``, or an index file of any form (to convert it); several are combined into one index.
        out: the index file; its sidecar is ``out + ".json"``.
        kind: a form in :data:`..faissio.storage.FORMS`.
        memory: budget of the build: bytes, or ``"2GB"``.
        names: write names, labels and kept columns of the items to ``out + ".items.sqlite"``, for search results.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        DataError: a damaged model or source, features of queries, or a repeated id.
        MismatchError: rows of another model.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
        UsageError: an unknown kind, one that these codebooks do not allow, or too small a budget.
    """
    sources = [source] if isinstance(source, str | Path) else list(source)
    if not sources:
        raise UsageError("nothing to index: name at least one file of codes or features")
    if any(replaces(out, str(path)) for path in sources):
        raise UsageError(f"{out} is the source itself: choose another output")
    model = read_model(model_dir)
    shards = [open_shard(path, model) for path in sources]
    key = items_key(shards) if names else None
    recover(items_path(out))
    known = {} if key is None else {"items": key}
    beside: Beside = {items_path(out): None if key is None else partial(write_names, shards=shards, key=key)}
    form = check_form(kind, *model.codebooks.shape[:2])
    plain = form == "flat" and memory is None and len(shards) == 1 and shards[0].kind != "index"
    origin, data = shards[0].kind, shards[0].data_fingerprint
    extra = {"source": origin, **({"data_fingerprint": data} if data else {}), **known}
    return build_index(
        shards,
        out,
        form,
        memory=STREAM_MEMORY if memory is None else parse_bytes(memory),
        overwrite=overwrite,
        by_id=plain,
        extra=extra if plain else {**extra, "shards": len(shards)},
        beside=beside,
    )


def index_shards(
    model_dir: str | Path,
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    kind: str = "flat",
    memory: str | int | None = None,
    names: bool = True,
    add: bool = False,
    remove: Sequence[str] = (),
    overwrite: bool = False,
    ray: str | None = None,
    workers: int | None = None,
) -> Path:
    """Build one shard per source and a manifest, which :func:`..indexes.opening.open_index` opens as one index.

    Shards are in ``NAME.shards/`` beside the manifest ``NAME.json``. Their names depend on sources, model and settings; existing shards
    are not rebuilt.

    Args:
        model_dir, sources, kind, names: as for :func:`index`.
        out: ``NAME.json``.
        memory: budget per build.
        add: add the shards to the existing manifest.
        remove: files of shards to remove from it in the same step. The files are kept.
        overwrite: replace an existing manifest.
        ray: address of a cluster for the builds (:func:`..cluster.connect.connected`); default: sequentially in this process.
        workers: maximum concurrent tasks.

    Returns:
        ``out``

    Raises:
        DataError, MismatchError, UsageError: as :func:`index`, :func:`..indexes.manifest.update_manifest`.
        OutputExistsError: the manifest exists, and neither ``add``, ``remove`` nor ``overwrite`` is given.
    """
    out, change = Path(out), add or bool(remove)
    if change == overwrite and change:
        raise UsageError(
            "--add and --remove-shard change the manifest, --overwrite replaces it: give one of them"
        )
    check_output(out, overwrite=change or overwrite)
    if not sources and not remove:
        raise UsageError("nothing to index: name at least one file of codes or features")
    model = read_model(model_dir)
    check_form(kind, *model.codebooks.shape[:2])
    if change:
        read_manifest(out)
    for path in sources:  # before any work
        open_shard(path, model)
    budget = STREAM_MEMORY if memory is None else parse_bytes(memory)
    folder = out.with_name(f"{out.stem}.shards")
    check_output(folder / "shard", overwrite=True)
    settings = kind, budget, names
    calls = [(str(path), str(model_dir), str(folder), settings) for path in sources]
    built = []
    with stage("building shards", len(calls), "shard") as building:
        for _, path in run_all(_build_shard, calls, ray, workers=workers):
            built.append(path)
            building.advance()
    for path in built:
        # What tasks left whose workers were killed: the one that was run again may have come too early, or found all done.
        recover(path)
        recover(items_path(path))
    update_manifest(out, built, remove, new=not change)
    return out


def _build_shard(source: str, model_dir: str, folder: str, settings: tuple[Any, ...]) -> str:
    """Build the shard of a source unless it exists; returns its path."""
    kind, memory, names = settings
    model = read_model(model_dir)
    items = items_key([open_shard(source, model)]) if names else None
    of = model.model_fingerprint, model.codebooks_fingerprint
    key = fingerprint("shard", file_sha256(source), *of, kind, items or "")
    path = Path(folder) / f"shard-{key}.faiss"
    recover(path)
    # Twice: another run of this very call may be quicker, or a part of the shard was deleted.
    for overwrite in (False, True):
        if path.exists() and (items is None or has_items(path, items)):
            break
        with contextlib.suppress(OutputExistsError):
            index(model_dir, source, path, kind=kind, memory=memory, names=names, overwrite=overwrite)
    return str(path)

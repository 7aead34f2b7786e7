"""Encoding: images or embeddings ─► features.h5 ─► codes.h5, streaming and resumable.

``features.h5`` contains the network's vectors (intra-normalised), ``codes.h5`` their codes, packed as in Faiss, with codebooks, ids and
labels. Memory does not grow with the data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..codes.checks import check_unique
from ..cluster.connect import connected
from ..cluster.tasks import run_all
from ..data.base import Dataset, ImageDataset
from ..data.open import open_data
from ..data.paths import replaces
from ..encoder import Encoder
from ..errors import DataError, MismatchError, OutputExistsError, UsageError
from ..faissio.model import encode_items
from ..files import check_output, fingerprint, unfinished
from ..progress import stage
from ..store.rows import Header, RowReader, RowWriter, row_blocks

log = logging.getLogger(__name__)

_BLOCK_BYTES = 4 << 20


def _header(kind: Literal["features", "codes"], encoder: Encoder, dataset: Dataset) -> Header:
    labels = dataset.labels
    return Header(
        kind=kind,
        model_fingerprint=encoder.fingerprint,
        codebooks=encoder.model.codebooks,
        data_fingerprint=dataset.fingerprint,
        class_names=labels.class_names if labels else (),
        multi_label=labels is not None and labels.multi_label,
        extra={"amp": encoder.amp, **({"texts": sorted(dataset.texts)} if dataset.texts else {})},
    )


def encode(
    model: str | Path,
    data: object,
    out: str | Path,
    *,
    keep_features: bool = True,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    overwrite: bool = False,
) -> Path:
    """Encode ``data`` with a model: write ``features.h5``, then ``codes.h5`` from it. An interrupted run is continued.

    Args:
        model: model folder.
        data: anything that :func:`gpq_faiss.open_data` accepts.
        out: the codes file.
        keep_features: write the features file, beside ``out``; an existing one of the same model and data is used without running
            the network, unless ``overwrite``. If false, codes are computed directly from the network.
        device: device of the network.
        batch_size: items per batch; 0: automatic. The same size gives the same bits.
        amp: run the backbone in bf16.
        overwrite: run the network, and replace ``out`` and the features file.

    Returns:
        ``out``.

    Raises:
        DataError: unreadable items beyond the limit, items without a direction, an output that cannot be written.
        MismatchError: data of another kind or width than the model's.
        OutputExistsError: an output exists.
        BusyError: (a DataError) another process is writing ``out``.
    """
    if batch_size < 0:
        raise UsageError(f"--batch-size {batch_size}: it must not be negative")
    out = check_output(out, overwrite=overwrite)
    encoder = Encoder.load(model, device, amp=amp)
    dataset = open_data(data)
    encoder.check(dataset)
    check_unique(dataset.ids, dataset.name)
    own = "codes" in out.name
    path = out.with_name(out.name.replace("codes", "features") if own else f"{out.stem}.features{out.suffix}")
    if any(replaces(one, dataset.name) for one in (out, path)):
        raise UsageError(f"{dataset.name} would be replaced: choose another output than {out}")
    # Opened first: it keeps other processes from this output while the network runs.
    with RowWriter(out, _header("codes", encoder, dataset), overwrite=overwrite) as writer:
        if not keep_features:
            return _from_network(encoder, dataset, writer, batch_size)
        header = _header("features", encoder, dataset)
        there = None
        if path.exists() and not overwrite:
            with RowReader(path, kind="features") as reader:
                there = reader.header.fingerprint()
        if there == header.fingerprint():
            log.info("%s is of this model and data: the network does not run again", path)
        else:
            check_output(path, overwrite=overwrite)
            with RowWriter(path, header, overwrite=overwrite) as vectors:
                _from_network(encoder, dataset, vectors, batch_size)
        return _from_features(encoder, dataset, path, writer)


def _from_features(encoder: Encoder, dataset: Dataset, path: Path, writer: RowWriter) -> Path:
    """Write the codes of a features file."""
    model = encoder.model.codebooks, encoder.model.description
    with RowReader(path) as reader, stage("features to codes", reader.ntotal, done=writer.rows) as coding:
        size = max(1, _BLOCK_BYTES // (4 * reader.header.width))
        for rows in row_blocks(reader.ntotal, size, start=writer.rows):
            vectors = np.asarray(reader.values[rows])
            codes = encode_items(vectors, *model, what=str(path), first_row=rows.start)
            labels = None if reader.labels is None else reader.labels[rows]
            writer.append(codes, reader.ids[rows], labels)
            coding.advance(len(codes))
    return writer.finish(dataset.ids, dataset.texts)


def _from_network(
    encoder: Encoder, dataset: Dataset, writer: RowWriter, batch_size: int, span: range | None = None
) -> Path:
    """Write the network's vectors, or codes, of the items at ``span`` (default: all)."""
    size = batch_size or encoder.batch_size(dataset)
    span = range(len(dataset)) if span is None else span
    if writer.rows and "position" not in writer.state:
        # Which items its rows are is not known where broken ones were left out: encoding from the first would double them.
        raise DataError(
            f"the unfinished {writer.path} was begun from a features file: leave out --no-features to go on, "
            f"or remove {writer.folder} to start again"
        )
    position = int(writer.state.get("position", 0))
    if position:
        log.info("resumed at item %d of %d", position, len(span))
        # The limit of unreadable images holds for a run and its resumption together.
        for bad in map(int, writer.state.get("bad", [])):
            path = dataset.image_path(bad) if isinstance(dataset, ImageDataset) else None
            dataset.add_bad(bad, path or f"item {dataset.ids[bad]}", "broken when it was read before")
    made: Any = encoder.code_batches if writer.header.kind == "codes" else encoder.batches
    rows = np.arange(span.start, span.stop)
    with stage("encoding", len(span), done=position) as encoding:
        for there, values in made(dataset, rows, start=position, batch_size=size):
            labels = None if dataset.labels is None else dataset.labels.packed[there]
            encoding.done = min(encoding.done + size, len(span))
            state = {"position": encoding.done, "bad": sorted(dataset.bad)}
            writer.append(values, dataset.ids[there], labels, state=state)
    if dataset.bad:
        log.warning("%s", dataset.bad_summary())
    return writer.finish(dataset.ids, dataset.texts)


# On a cluster --------------------------------------------------------------------------------------------------------------


def encode_shards(
    model: str | Path,
    data: str,
    out: str | Path,
    *,
    ray: str | None = None,
    data_args: Mapping[str, Any] | None = None,
    shard_items: int = 100_000,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
) -> list[Path]:
    """Encode ``data`` in shards, optionally on a Ray cluster; together they contain the rows that :func:`encode` writes.

    Names of shards depend on their contents. Existing ones are kept, so an interrupted run is resumed, and a repeated task writes once.
    All nodes must see model, data and ``out`` under the same paths.

    Args:
        model, device, batch_size, amp: as for :func:`encode`.
        data: the DATA name, opened by each node.
        out: folder of the shards.
        ray: address of the cluster (:func:`..cluster.connect.connected`); default: sequentially in this process.
        data_args: further arguments of :func:`..data.open.open_data`.
        shard_items: items per shard, rounded up to whole batches.
        workers: maximum concurrent tasks (default: one per core, or per GPU).
        overwrite: remove the shards in ``out``, of whatever model and data, and start again.

    Returns:
        The shards, in the order of the items.

    Raises:
        DataError: unreadable items beyond the limit, or as :func:`encode`.
        MismatchError: data that do not fit the model, or other data on a node.
        OutputExistsError: ``out`` has shards of another run.
        UsageError: options out of range; Ray is not installed.
    """
    if batch_size < 0 or shard_items < 1:
        raise UsageError(f"--batch-size {batch_size}, shard_items {shard_items}: they must be positive")
    data_args = dict(data_args or {})
    # On the CPU: this process looks at the data alone, and may have no GPU.
    encoder, dataset = Encoder.load(model, "cpu", amp=amp), open_data(data, **data_args)
    encoder.check(dataset)
    size = batch_size or encoder.batch_size(dataset)
    step = -(-shard_items // size) * size
    folder = check_output(Path(out) / "codes.h5", overwrite=True).parent
    with connected(ray) as cluster, unfinished(folder / ".encode.partial", folder, keep=()):
        place = device if cluster is None else _device_of(cluster, device)
        known = encoder.fingerprint, dataset.fingerprint
        common = str(model), place, amp, data, json.dumps(data_args, sort_keys=True), known, size
        calls = []
        for start in range(0, len(dataset), step):
            stop = min(start + step, len(dataset))
            key = fingerprint("codes", *known, str(amp), str(size), place, str(start), str(stop))
            calls.append((common, folder / f"codes-{start:012}-{key}.h5", start, stop))
        paths = [call[1] for call in calls]
        there = sorted(folder.glob("codes-*.h5"))
        foreign = [path for path in there if path not in paths]
        if foreign and not overwrite:
            raise OutputExistsError(
                f"{folder} has shards of another run ({foreign[0].name}): pass --overwrite, or another --out"
            )
        for path in there if overwrite else ():
            path.unlink()
        bad = len(dataset)
        with stage("encoding", len(dataset)) as encoding:
            for at, rows in run_all(_encode_shard, calls, ray, gpus=int(place != "cpu"), workers=workers):
                encoding.advance(calls[at][3] - calls[at][2])
                bad -= rows
    said = f"{bad:,} of {len(dataset):,} images cannot be read"
    if above := dataset.above_limit(bad):
        raise DataError(f"{said}; {above}")
    if bad:
        log.warning("%s, and were left out", said)
    return paths


def _device_of(cluster: Any, device: str) -> str:
    """Where the tasks of a Ray cluster run their network."""
    found = device == "auto" and cluster.cluster_resources().get("GPU", 0) >= 1
    return "cuda" if found or device.startswith("cuda") else "cpu"


@lru_cache(maxsize=1)
def _opened(
    model: str, device: str, amp: bool, data: str, arguments: str, known: tuple[str, str]
) -> tuple[Encoder, Dataset]:
    """The model and data of these fingerprints, kept by a worker for its next shard.

    Raises:
        MismatchError: there are others under the names.
    """
    encoder, dataset = Encoder.load(model, device, amp=amp), open_data(data, **json.loads(arguments))
    for name, there, wanted in zip(
        (model, data), (encoder.fingerprint, dataset.fingerprint), known, strict=True
    ):
        if there != wanted:
            raise MismatchError(f"{name} is not the same on all nodes: every node must see the same files")
    return encoder, dataset


def _encode_shard(common: tuple[Any, ...], path: Path, start: int, stop: int) -> int:
    """Write a shard unless it exists; returns its number of rows."""
    *opening, size = common
    if not path.exists():
        encoder, dataset = _opened(*opening)
        part = fingerprint("shard", dataset.fingerprint, str(start), str(stop))
        header = replace(_header("codes", encoder, dataset), data_fingerprint=part)
        with RowWriter(path, header, overwrite=True) as writer:
            _from_network(encoder, dataset, writer, size, range(start, stop))
    with RowReader(path) as reader:
        return reader.ntotal

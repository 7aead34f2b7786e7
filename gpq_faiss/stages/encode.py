"""Encoding: images or embeddings ─► features.h5 ─► codes.h5, streaming and resumable.

``features.h5`` contains the network's vectors (intra-normalised), ``codes.h5`` their codes, packed as in Faiss, with codebooks, ids and
labels. Memory does not grow with the data.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..cluster.connect import LOCAL, connected
from ..codes.checks import check_unique
from ..data.base import Dataset, ImageDataset
from ..data.open import open_data
from ..data.paths import replaces
from ..encoder import Encoder
from ..errors import (
    DataError,
    DeviceError,
    GpqError,
    MismatchError,
    OutputExistsError,
    UsageError,
)
from ..faissio.model import encode_items
from ..files import check_output, fingerprint
from ..progress import levels, stage
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
    is_named_codes = "codes" in out.name
    path = out.with_name(
        out.name.replace("codes", "features")
        if is_named_codes
        else f"{out.stem}.features{out.suffix}"
    )
    if any(replaces(output, dataset.name) for output in (out, path)):
        raise UsageError(f"{dataset.name} would be replaced: choose another output than {out}")
    # Opened first: it keeps other processes from this output while the network runs.
    with RowWriter(out, _header("codes", encoder, dataset), overwrite=overwrite) as writer:
        if not keep_features:
            return _from_network(encoder, dataset, writer, batch_size)
        header = _header("features", encoder, dataset)
        existing = None
        if path.exists() and not overwrite:
            with RowReader(path, kind="features") as reader:
                existing = reader.header.fingerprint()
        if existing == header.fingerprint():
            log.info("%s is of this model and data: the network does not run again", path)
        else:
            check_output(path, overwrite=overwrite)
            with RowWriter(path, header, overwrite=overwrite) as vectors:
                _from_network(encoder, dataset, vectors, batch_size)
        return _from_features(encoder, dataset, path, writer)


def _from_features(encoder: Encoder, dataset: Dataset, path: Path, writer: RowWriter) -> Path:
    """Write the codes of a features file."""
    model = encoder.model.codebooks, encoder.model.description
    with (
        RowReader(path) as reader,
        stage("features to codes", reader.ntotal, done=writer.rows) as coding,
    ):
        size = max(1, _BLOCK_BYTES // (4 * reader.header.width))
        for rows in row_blocks(reader.ntotal, size, start=writer.rows):
            vectors = np.asarray(reader.values[rows])
            codes = encode_items(vectors, *model, what=str(path), first_row=rows.start)
            labels = None if reader.labels is None else reader.labels[rows]
            writer.append(codes, reader.ids[rows], labels)
            coding.advance(len(codes))
    return writer.finish(dataset.ids, dataset.texts)


def _from_network(
    encoder: Encoder,
    dataset: Dataset,
    writer: RowWriter,
    batch_size: int,
    span: range | None = None,
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
            dataset.add_bad(
                bad, path or f"item {dataset.ids[bad]}", "broken when it was read before"
            )
    batches: Any = encoder.code_batches if writer.header.kind == "codes" else encoder.batches
    rows = np.arange(span.start, span.stop)
    with stage("encoding", len(span), done=position) as encoding:
        for readable, values in batches(dataset, rows, start=position, batch_size=size):
            labels = None if dataset.labels is None else dataset.labels.packed[readable]
            encoding.advance(min(size, len(span) - encoding.done))
            state = {"position": encoding.done, "bad": sorted(dataset.bad)}
            writer.append(values, dataset.ids[readable], labels, state=state)
    if dataset.bad:
        log.warning("%s", dataset.bad_summary())
    return writer.finish(dataset.ids, dataset.texts)


# On a cluster


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster for :func:`encode_on_ray`.

    Attributes:
        address: ``local`` (this machine), ``auto`` (the cluster running here), or ``HOST:PORT``.
        workers: maximum number of workers; 0: one per GPU, or without GPUs one per core.
        shard_items: items in a file of codes, rounded up to whole batches.
    """

    address: str = LOCAL
    workers: int = 0
    shard_items: int = 100_000


def encode_on_ray(
    model: str | Path,
    data: str | Callable[[], Dataset],
    out: str | Path,
    cluster: RayCluster,
    *,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    overwrite: bool = False,
) -> list[Path]:
    """Encode ``data`` on a Ray cluster, whose nodes see the same files under the same paths.

    The codes are those of :func:`encode`. Shards of the same model and data are kept, so an interrupted run
    is continued.

    Args:
        model, device, batch_size, amp: as for :func:`encode`.
        data: the DATA name, or a function that opens the data on a node, such as a ``functools.partial`` of
            :func:`gpq_faiss.open_data`.
        out: folder for the shards, ``codes-*.h5``.
        cluster: where to run.
        overwrite: encode all shards again.

    Returns:
        The shards, in the order of the items.

    Raises:
        DataError: unreadable items beyond the limit, no cluster, or as :func:`encode`.
        MismatchError: data that do not fit the model, or other data on a node.
        OutputExistsError: ``out`` has shards of another run.
        UsageError: options out of range; Ray is not installed.
    """
    if min(batch_size, cluster.workers) < 0 or cluster.shard_items < 1:
        raise UsageError("--batch-size, workers and shard_items must be positive")
    opening = data if callable(data) else partial(open_data, data)
    # On the CPU: this process looks at the data only, and may have no GPU.
    encoder, dataset = Encoder.load(model, "cpu", amp=amp), opening()
    encoder.check(dataset)
    check_unique(dataset.ids, dataset.name)
    size, n = batch_size or encoder.batch_size(dataset), len(dataset)
    step = -(-cluster.shard_items // size) * size
    folder = check_output(Path(out).resolve() / "codes.h5", overwrite=True).parent
    for path in folder.glob("codes-*.h5") if overwrite else ():
        path.unlink()
    starts = range(0, n, step)
    paths = [folder / f"codes-{start:012}.h5" for start in starts]
    shards = [
        {"path": str(path), "start": start, "stop": min(start + step, n)}
        for path, start in zip(paths, starts, strict=True)
    ]
    with connected(cluster.address) as ray, contextlib.ExitStack() as stack:
        ray.data.DataContext.get_current().enable_progress_bars = False
        stack.enter_context(levels(logging.ERROR, "ray", "ray.data"))
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0)) if device != "cpu" else 0
        if not gpus and device.startswith("cuda"):
            raise DeviceError(f"the cluster at {cluster.address} has no GPU: use --device cpu")
        workers = min(cluster.workers or gpus or int(resources["CPU"]), len(shards))
        options = {
            "folder": os.getcwd(),
            "model": (model, "cuda" if gpus else "cpu", amp),
            "opening": opening,
            "fingerprints": (encoder.fingerprint, dataset.fingerprint),
            "batch_size": size,
        }
        rows = ray.data.from_items(shards, override_num_blocks=len(shards)).map_batches(
            _ShardEncoder,
            fn_constructor_kwargs=options,
            batch_size=1,
            compute=ray.data.ActorPoolStrategy(min_size=1, max_size=workers),
            num_cpus=1,
            num_gpus=int(gpus > 0),
        )
        unreadable = n
        with stage("encoding", n) as encoding:
            for row in rows.iter_rows():
                if row["error"]:
                    raise DataError(row["error"])
                encoding.advance(row["stop"] - row["start"])
                unreadable -= row["rows"]
    message = f"{unreadable:,} of {n:,} images cannot be read"
    if above := dataset.above_limit(unreadable):
        raise DataError(f"{message}; {above}")
    if unreadable:
        log.warning("%s, and were left out", message)
    return paths


class _ShardEncoder:
    """Encodes shards in an actor of a Ray cluster, which keeps its model and data."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    @cached_property
    def opened(self) -> tuple[Encoder, Dataset]:
        """The model and the data.

        Raises:
            MismatchError: this node has others.
        """
        options = self.options
        os.chdir(options["folder"])
        model, device, amp = options["model"]
        encoder, dataset = Encoder.load(model, device, amp=amp), options["opening"]()
        if (encoder.fingerprint, dataset.fingerprint) != options["fingerprints"]:
            raise MismatchError(
                f"{model} or {dataset.name} is not the same on all nodes: "
                "every node must see the same files"
            )
        return encoder, dataset

    def encode(self, path: Path, start: int, stop: int) -> int:
        """Write the shard of the items from ``start`` to ``stop`` unless it exists; returns its rows."""
        encoder, dataset = self.opened
        part = fingerprint("shard", dataset.fingerprint, str(start), str(stop))
        header = replace(_header("codes", encoder, dataset), data_fingerprint=part)
        if path.exists():
            with RowReader(path, kind="codes") as reader:
                if reader.header.fingerprint() == header.fingerprint():
                    return reader.ntotal
            raise OutputExistsError(
                f"{path} is a shard of another run: pass --overwrite, or another --out"
            )
        with RowWriter(path, header) as writer:
            _from_network(encoder, dataset, writer, self.options["batch_size"], range(start, stop))
            return writer.rows

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Encode the only shard of a batch of Ray Data; adds its number of rows, or an error message."""
        rows, error = 0, ""
        try:
            rows = self.encode(
                Path(batch["path"][0]), int(batch["start"][0]), int(batch["stop"][0])
            )
        except (GpqError, OSError) as caught:
            error = str(caught)
        return {**batch, "rows": [rows], "error": [error]}

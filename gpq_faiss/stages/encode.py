"""Encoding: images or embeddings ─► features.h5 ─► codes.h5, streaming and resumable.

``features.h5`` contains the network's vectors (intra-normalised), ``codes.h5`` their codes, packed
as in Faiss, with codebooks, ids and labels. Memory does not grow with the data.
"""

from __future__ import annotations

import glob
import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..codes.checks import check_unique
from ..data.base import Dataset, FeatureDataset
from ..data.open import open_data
from ..encoder import Encoder
from ..errors import DataError, UsageError
from ..faissio.model import encode_items
from ..files import check_output
from ..progress import stage
from ..store.hdf5 import open_hdf5
from ..store.rows import Header, RowReader, RowWriter, discard_unfinished, row_blocks

log = logging.getLogger(__name__)

_BLOCK_BYTES = 4 << 20
_ADVICE = "choose another output, or leave the features out (--no-features)"


def make_header(kind: Literal["features", "codes"], encoder: Encoder, dataset: Dataset) -> Header:
    """Return the header of a file of features or codes of a data set."""
    labels = dataset.labels
    extra: dict[str, Any] = {"amp": encoder.amp}
    if dataset.texts:
        extra["texts"] = sorted(dataset.texts)
    return Header(
        kind=kind,
        model_fingerprint=encoder.fingerprint,
        codebooks=encoder.model.codebooks,
        data_fingerprint=dataset.fingerprint,
        class_names=labels.class_names if labels else (),
        multi_label=labels is not None and labels.multi_label,
        extra=extra,
    )


def encode(
    model: str | Path | Encoder,
    data: object,
    out: str | Path,
    *,
    keep_features: bool = True,
    device: str = "cpu",
    batch_size: int = 0,
    amp: bool = False,
    overwrite: bool = False,
) -> Path:
    """Encode ``data`` with a model: write ``features.h5``, then ``codes.h5`` from it. An
    interrupted run is continued.

    Args:
        model: model folder, or a loaded encoder, with its own ``device`` and ``amp``.
        data: anything that :func:`gpq_faiss.open_data` accepts.
        out: the codes file.
        keep_features: write the features file, beside ``out``; an existing one of the same model
            and data is used without running the network, unless ``overwrite``. If false, codes are
            computed directly from the network.
        device: device of the network.
        batch_size: items per batch; 0: automatic. The same size gives the same bits.
        amp: run the backbone in bf16.
        overwrite: run the network, and replace ``out`` and the features file.

    Returns:
        ``out``.

    Raises:
        DataError: unreadable items beyond the limit, items without a direction, an output that
            cannot be written or that another process is writing, or a file in place of the features
            that another program has made.
        MismatchError: data of another kind or width than the model's.
        OutputExistsError: an output exists.
        DeviceError: the device does not exist or has too little memory.
        UsageError: an output would replace the data, or the batch size is negative.
    """
    out = check_output(out, overwrite=overwrite)
    encoder = model if isinstance(model, Encoder) else Encoder.load(model, device, amp=amp)
    dataset = open_data(data)
    encoder.check(dataset)  # first: rows of other data would take the place of unfinished ones
    check_unique(dataset.ids, dataset.name)
    name = out.name.replace("codes", "features")
    path = out.with_name(f"{out.stem}.features{out.suffix}" if name == out.name else name)
    _, colon, text = dataset.name.partition(":")  # no path of an object in memory
    source = Path(text).expanduser().resolve()
    inputs = {source, *map(Path, glob.glob(str(source)))}
    if isinstance(dataset, FeatureDataset):  # possibly of a folder
        inputs |= {*source.glob("*.*")}
    if colon and not inputs.isdisjoint((out.resolve(), path.resolve())):
        raise UsageError(f"{dataset.name} would be replaced: choose another output than {out}")
    if keep_features and path.exists():
        with open_hdf5(path, f"a file of gpq encode ({_ADVICE})") as h5:
            if "model_fingerprint" not in h5.attrs:
                raise DataError(f"not a file of gpq encode, and is not replaced: {_ADVICE}")
    # Opened first: it keeps other processes from this output while the network runs.
    with RowWriter(out, make_header("codes", encoder, dataset), overwrite=overwrite) as writer:
        if not keep_features:
            return _encode_rows(encoder, dataset, writer, batch_size)
        existing = None
        header = make_header("features", encoder, dataset)
        if path.exists() and not overwrite:
            with RowReader(path, kind="features") as reader:
                existing = reader.header.fingerprint()
        if existing == header.fingerprint():
            log.info("%s is of this model and data: the network does not run again", path)
            discard_unfinished(path)
        else:
            with RowWriter(path, header, overwrite=overwrite) as vectors:
                _encode_rows(encoder, dataset, vectors, batch_size)
        return _from_features(encoder, dataset, path, writer)


def _from_features(encoder: Encoder, dataset: Dataset, path: Path, writer: RowWriter) -> Path:
    """Write the codes of a features file."""
    model = encoder.model
    writer.state = {}  # a position in the data would not be that of the rows that are appended here
    with RowReader(path) as reader, stage("features to codes"):
        size = max(1, _BLOCK_BYTES // (4 * reader.header.width))
        for rows in row_blocks(reader.ntotal, size, start=writer.rows):
            vectors = np.asarray(reader.values[rows])
            codes = encode_items(
                vectors, model.codebooks, model.description, name=str(path), first_row=rows.start
            )
            labels = None if reader.labels is None else reader.labels[rows]
            writer.append(codes, reader.ids[rows], labels)
    return writer.finish(dataset.ids, dataset.texts)


def _encode_rows(encoder: Encoder, dataset: Dataset, writer: RowWriter, batch_size: int) -> Path:
    """Write the network's vectors, or codes, of all items."""
    size = batch_size or encoder.batch_size
    if size < 1:
        raise UsageError(f"--batch-size {batch_size}: it must not be negative")
    if writer.rows and "position" not in writer.state:
        # A features file leaves out broken items, so the number of rows does not say at which item
        # to continue.
        raise DataError(
            f"the unfinished {writer.path} was begun from a features file: leave out "
            f"--no-features or --ray to continue, or remove {writer.folder} to start again"
        )
    rows = np.arange(len(dataset))
    position = writer.state.get("position", 0)
    # The limit of unreadable images holds for a run and its resumption together.
    for bad in writer.state.get("bad", ()):
        dataset.add_bad(bad, f"item {dataset.ids[bad]}", "broken when it was read before")
    batches: Any = encoder.code_batches if writer.header.kind == "codes" else encoder.batches
    for readable, values in batches(dataset, rows, start=position, batch_size=size):
        labels = None if dataset.labels is None else dataset.labels.packed[readable]
        position = min(position + size, len(rows))
        state = {"position": position, "bad": sorted(dataset.bad)}
        writer.append(values, dataset.ids[readable], labels, state=state)
    if dataset.bad:
        log.warning("%s", dataset.bad_summary())
    return writer.finish(dataset.ids, dataset.texts)

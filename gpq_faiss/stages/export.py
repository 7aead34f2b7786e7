"""Export for other tools: codebooks as an empty Faiss index or as arrays, codes as a Parquet table.

The tools need not be installed. Scores are inner products in all of them, larger is better.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..codes.bits import code_size
from ..codes.codebooks import fuse
from ..errors import DataError, UsageError, optional
from ..faissio.convert import check_kind, to_faiss
from ..faissio.files import write_index
from ..faissio.model import read_model
from ..files import atomic_path, check_output, versions
from ..store.rows import RowReader, row_blocks

_ROW_GROUP = 1 << 16


def export_faiss(
    model_dir: str | Path, out: str | Path, *, kind: str = "flat", overwrite: bool = False
) -> Path:
    """Write a model's codebooks as an empty, trained Faiss index (inner product).

    The index is ready for ``add``, and Faiss can use it without this package. Add only item vectors
    of the model (intra-normalised); query vectors may have any scale. If query and item vectors
    differ, the log says so.

    Args:
        model_dir: model folder.
        out: the index file.
        kind: ``flat`` (``IndexPQ``), ``fused``, ``fastscan`` or ``ivf``
            (:data:`gpq_faiss.faissio.convert.KINDS`).
        overwrite: replace an existing file.

    Raises:
        DataError, MismatchError: the model is damaged.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
        UsageError: an unknown kind, or one that does not fit the codebooks.
    """
    out = check_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    M, K, _ = model.codebooks.shape
    checked_kind = check_kind(kind, M, K)
    model.query_note()
    no_codes = np.empty((0, code_size(M, K)), np.uint8)
    return write_index(to_faiss(no_codes, None, model.codebooks, checked_kind), out)


def export(source: str | Path, out: str | Path, *, to: str, overwrite: bool = False) -> Path:
    """Write a model's codebooks, or codes, for another tool.

    ``numpy`` is a ``.npz`` file of a model: ``codebooks`` float32 [M, K, d]; with 16 codewords
    ``fused`` float32 [ceil(M/2), 256, 2d], one codebook per byte of a code; and ``meta``, a JSON
    text with the model, the shape and the layout of code bytes.

    ``parquet`` is a table of a codes file: ``id`` int64, ``codes`` list of uint8 [code_size],
    packed as in Faiss, texts of the items, and ``labels`` list of text; its metadata
    (``gpq_faiss``, JSON) identify the model. Texts with the name of another column are left out.

    Args:
        source: a model folder, or a codes file for ``parquet``.
        out: the file.
        to: ``numpy`` or ``parquet``.
        overwrite: replace an existing file.

    Returns:
        ``out``

    Raises:
        UsageError: an unknown form.
        DataError, MismatchError: a damaged source, or one that does not fit the form.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if to not in ("numpy", "parquet"):
        raise UsageError(f"--to {to}: choose from numpy, parquet")
    out = check_output(out, overwrite=overwrite)
    if to == "parquet":
        return _export_codes(source, out)
    model = read_model(source)
    M, K, d = (int(size) for size in model.codebooks.shape)
    meta = {
        "format_version": 1,
        **{"codebooks": M, "codewords": K, "subdim": d, "width": M * d},
        "metric": "inner_product",
        "code_bytes": code_size(M, K),
        "code_bits": "least significant first: with 16 codewords the low half of byte p is "
        "codebook 2p, the high half 2p + 1",
        "codebooks_fingerprint": model.codebooks_fingerprint,
        "model_fingerprint": model.model_fingerprint,
        **model.query_note(),
        "versions": versions("numpy"),
    }
    arrays = {"codebooks": model.codebooks, "meta": np.array(json.dumps(meta))}
    if K == 16:
        arrays["fused"] = fuse(model.codebooks)
    with atomic_path(out) as temporary, temporary.open("wb") as file:
        # An open file, as numpy would append .npz to a name. No object arrays, so nothing is
        # pickled.
        np.savez(file, allow_pickle=False, **arrays)
    return out


def _export_codes(codes: str | Path, out: Path) -> Path:
    remedy = "Parquet needs pyarrow: pip install 'gpq-faiss[train]'"
    pa = optional("pyarrow", remedy, DataError)
    pq = optional("pyarrow.parquet", remedy, DataError)
    with (
        RowReader(codes, kind="codes") as reader,
        atomic_path(out) as temporary,
        ExitStack() as stack,
    ):
        header = reader.header
        writer = None
        metadata = {"gpq_faiss": json.dumps(header.attributes())}
        class_names = np.array(header.class_names, dtype=object)
        for rows in row_blocks(reader.ntotal, _ROW_GROUP):
            block = np.asarray(reader.values[rows])
            offsets = pa.array(np.arange(0, block.size + 1, block.shape[1], dtype=np.int32))
            texts = reader.texts(rows.start, rows.stop)
            columns = {
                "id": np.asarray(reader.ids[rows]),
                "codes": pa.ListArray.from_arrays(offsets, pa.array(block.ravel())),
                **{
                    name: pa.array(column.tolist(), pa.string())
                    for name, column in texts.items()
                    if name not in ("id", "codes")
                },
            }
            if reader.labels is not None:
                flags = np.unpackbits(reader.labels[rows], axis=1, count=len(class_names))
                names = [class_names[row].tolist() for row in flags.astype(bool)]
                columns["labels"] = pa.array(names, pa.list_(pa.string()))
            table = pa.table(columns, metadata=metadata)
            if writer is None:
                writer = stack.enter_context(pq.ParquetWriter(str(temporary), table.schema))
            writer.write_table(table)
    return out

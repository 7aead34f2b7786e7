"""Codes as a Parquet table, for DuckDB, Polars, pandas or Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..files import atomic_path, check_output
from ..progress import stage
from ..store import RowReader

_ROWS = 1 << 16
"""Of a row group."""
_OWN = ("id", "codes", "labels")


def export_codes(codes: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a codes file as Parquet: ``id`` int64, ``codes`` list of uint8 [code_size], texts of the items, ``labels`` list of text.

    Codes are packed as in Faiss. The file's metadata (``gpq_faiss``, JSON) identify model and codebooks.

    Args:
        codes: codes.h5.
        out: the Parquet file.
        overwrite: replace an existing file.

    Returns:
        ``out``

    Raises:
        DataError: not a codes file, a damaged one, or pyarrow is not installed.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise DataError("Parquet needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    out = check_output(out, overwrite=overwrite)
    with RowReader(codes, kind="codes") as reader:
        header = reader.header
        texts = [name for name in reader.text_columns if name not in _OWN]
        names = np.array(header.class_names, dtype=object)
        M, K, d = (int(n) for n in header.codebooks.shape)
        about = {
            "model_fingerprint": header.model_fingerprint,
            "codebooks_fingerprint": header.codebooks_fingerprint,
            "codebooks": M,
            "codewords": K,
            "subdim": d,
        }
        schema = pa.schema(
            [
                ("id", pa.int64()),
                ("codes", pa.list_(pa.uint8())),
                *((name, pa.string()) for name in texts),
                *([("labels", pa.list_(pa.string()))] if len(names) else []),
            ],
            metadata={"gpq_faiss": json.dumps(about)},
        )
        with (
            atomic_path(out) as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
            stage("writing Parquet", reader.ntotal, "row") as writing,
        ):
            for start, block, ids, packed in reader.blocks(_ROWS):
                size = block.shape[1]
                offsets = pa.array(np.arange(0, block.size + 1, size, dtype=np.int32))
                columns: list[Any] = [
                    pa.array(ids),
                    pa.ListArray.from_arrays(offsets, pa.array(block.ravel())),
                ]
                held = reader.texts(start, start + len(ids))
                columns += [pa.array(held[name].tolist(), pa.string()) for name in texts]
                if len(names) and packed is not None:
                    on = np.unpackbits(packed, axis=1, count=len(names)).astype(bool)
                    columns.append(pa.array([names[row].tolist() for row in on], pa.list_(pa.string())))
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))
                writing.advance(len(ids))
    return out

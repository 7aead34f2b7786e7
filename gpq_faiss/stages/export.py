"""Export for other tools: codebooks as an empty Faiss index or arrays, codes as a Parquet table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from ..codes.codebooks import inject
from ..errors import DataError, UsageError, optional
from ..faissio.export import export_codebooks
from ..faissio.io import check_index_output, save_index
from ..faissio.model import read_model
from ..files import atomic_path, check_output
from ..progress import stage
from ..store.reader import RowReader

Target = Literal["factory", "numpy", "nanopq", "lancedb", "parquet"]
_ROW_GROUP = 1 << 16


def export_faiss(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model's codebooks as an empty, trained ``faiss.IndexPQ`` (inner product), ready for ``add``.

    Faiss can use it without this package. Add only item vectors of the model (intra-normalised); query vectors may have any scale. If query
    and item vectors differ, the log and the sidecar (``out + ".json"``, ``asymmetric`` in ``extra``) tell.

    Raises:
        DataError, MismatchError: a damaged model.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    out = check_index_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    empty, name = inject(model.codebooks), model.model_fingerprint
    return save_index(empty, out, model_fingerprint=name, overwrite=True, extra=model.query_note())


def export(
    source: str | Path, out: str | Path, *, to: Target, factory: str | None = None, overwrite: bool = False
) -> Path:
    """Write a model's codebooks, or codes, for another tool.

    Args:
        source: a model folder; for ``parquet`` a codes file.
        out: the file.
        to: ``factory`` is the empty index of a ``faiss.index_factory`` string, with a sidecar; ``numpy``, ``nanopq`` and ``lancedb`` are
            ``.npz`` files of codebooks (:mod:`gpq_faiss.faissio.export`); ``parquet`` is a table of ``id`` int64, ``codes`` list of
            uint8 [code_size], packed as in Faiss, texts of the items, and ``labels`` list of text. Its metadata (``gpq_faiss``, JSON)
            identify model and codebooks.
        factory: the string, such as ``IDMap2,PQ12x4`` or ``PQ12x4fs``.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        UsageError: an unknown form, or an unsupported factory string.
        DataError, MismatchError: a damaged source, or one that does not fit the form; pyarrow is not installed.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if to not in get_args(Target):
        raise UsageError(f"--to {to}: choose from {', '.join(get_args(Target))}")
    if factory is not None and to != "factory":
        raise UsageError(f"--factory {factory}: it belongs to --to factory, not to {to}")
    if to == "parquet":
        return _export_codes(source, check_output(out, overwrite=overwrite))
    return export_codebooks(source, out, to=to, factory=factory, overwrite=overwrite)


def _export_codes(codes: str | Path, out: Path) -> Path:
    remedy = "Parquet needs pyarrow: pip install 'gpq-faiss[parquet]'"
    pa, pq = optional("pyarrow", remedy, DataError), optional("pyarrow.parquet", remedy, DataError)
    with RowReader(codes, kind="codes") as reader:
        header = reader.header
        texts = [name for name in reader.text_columns if name not in ("id", "codes", "labels")]
        names = np.array(header.class_names, dtype=object)
        about = {key: getattr(header, key) for key in ("model_fingerprint", "codebooks_fingerprint")}
        about |= zip(("codebooks", "codewords", "subdim"), header.codebooks.shape, strict=True)
        kinds = {"id": pa.int64(), "codes": pa.list_(pa.uint8()), **dict.fromkeys(texts, pa.string())}
        if len(names):
            kinds["labels"] = pa.list_(pa.string())
        schema = pa.schema(kinds, metadata={"gpq_faiss": json.dumps(about)})
        with (
            atomic_path(out) as temporary,
            pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
            stage("writing Parquet", reader.ntotal, "row") as writing,
        ):
            for start, block, ids, packed in reader.blocks(_ROW_GROUP):
                offsets = pa.array(np.arange(0, block.size + 1, block.shape[1], dtype=np.int32))
                codes_of = pa.ListArray.from_arrays(offsets, pa.array(block.ravel()))
                held = reader.texts(start, start + len(ids))
                columns = {"id": ids, "codes": codes_of, **{name: held[name].tolist() for name in texts}}
                if packed is not None:
                    on = np.unpackbits(packed, axis=1, count=len(names)).astype(bool)
                    columns["labels"] = [names[row].tolist() for row in on]
                writer.write_table(pa.table(columns, schema=schema))
                writing.advance(len(ids))
    return out

"""Export for other tools: codebooks as an empty Faiss index or arrays, codes as a Parquet table.

The tools need not be installed. Scores are inner products in all of them, larger is better.

===========  =======================================================================================
form         contents
===========  =======================================================================================
``numpy``    ``.npz``: ``codebooks`` [M, K, d], ``fused`` [ceil(M/2), 256, 2d] (K = 16 only),
             ``meta``
``nanopq``   ``.npz``: ``codewords`` [M, K, d] for ``nanopq.PQ(M, K, metric="dot")``, ``meta``
``lancedb``  ``.npz``: ``pq_codebook`` [bytes, 256, width], ``ivf_centroids`` [1, D] of zeros,
             ``meta``
``factory``  the empty, trained index of a Faiss factory string
``parquet``  ``id`` int64, ``codes`` list of uint8 [code_size], packed as in Faiss, texts of the
             items, and ``labels`` list of text; its metadata (``gpq_faiss``, JSON) identify the
             model
===========  =======================================================================================

Arrays are float32; ``meta`` is a JSON text with the model, the shape and the layout of code bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import faiss
import numpy as np
from numpy.typing import NDArray

from ..codes.bits import bits_per_code, code_size
from ..codes.checks import Floats
from ..codes.codebooks import fuse, inject
from ..errors import DataError, UsageError, optional
from ..faissio.convert import Kind, to_faiss
from ..faissio.files import write_index
from ..faissio.model import read_model
from ..files import atomic_path, check_output, versions
from ..progress import stage
from ..store.rows import RowReader, row_blocks

Target = Literal["factory", "numpy", "nanopq", "lancedb", "parquet"]
FORMAT_VERSION = 1
_ROW_GROUP = 1 << 16

# Supported indexes. No OPQ or PCA: a transform before the codes would undo the model's sub-spaces.
_FACTORY = re.compile(
    r"(?:(?P<map>IDMap2?),)?PQ(?P<M>[1-9]\d{0,3})(?:x(?P<bits>[1-9]\d?))?(?:(?P<fast>fs)|np)?"
)


def export_faiss(model_dir: str | Path, out: str | Path, *, overwrite: bool = False) -> Path:
    """Write a model's codebooks as an empty, trained ``faiss.IndexPQ`` (inner product).

    The index is ready for ``add``, and Faiss can use it without this package. Add only item vectors
    of the model (intra-normalised); query vectors may have any scale. If query and item vectors
    differ, the log says so.

    Raises:
        DataError, MismatchError: the model is damaged.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    out = check_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    model.query_note()
    return write_index(inject(model.codebooks), out)


def export(
    source: str | Path,
    out: str | Path,
    *,
    to: Target,
    factory: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model's codebooks, or codes, for another tool.

    If query and item vectors differ, the log and ``meta`` say so.

    Args:
        source: a model folder; for ``parquet`` a codes file.
        out: the file.
        to: see the table above.
        factory: for ``factory``: the string, such as ``IDMap2,PQ12x4``, ``PQ12x4fs`` or ``PQ6``
            (byte-fused: half as many codebooks of 8 bits with the same code bytes; for even M).
            Default: ``IDMap2,PQ`` with the model's own M and bits.
        overwrite: replace an existing file.

    Returns:
        ``out``

    Raises:
        UsageError: an unknown form; a factory string of an unsupported index or of other codebooks;
            8-bit codes with codebooks of neither 16 nor 256 codewords.
        DataError, MismatchError: a damaged source, or one that does not fit the form.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if to not in get_args(Target):
        raise UsageError(f"--to {to}: choose from {', '.join(get_args(Target))}")
    if factory is not None and to != "factory":
        raise UsageError(f"--factory {factory}: it belongs to --to factory, not to {to}")
    out = check_output(out, overwrite=overwrite)
    if to == "parquet":
        return _export_codes(source, out)
    model = read_model(source)
    Z, note = model.codebooks, model.query_note()
    if to == "factory":
        return write_index(_factory_index(Z, factory), out)
    M, K, d = (int(size) for size in Z.shape)
    meta = {
        "format_version": FORMAT_VERSION,
        "to": to,
        "codebooks": M,
        "codewords": K,
        "subdim": d,
        "width": M * d,
        "metric": "inner_product",
        "code_bytes": code_size(M, K),
        "code_bits": "least significant first: with 16 codewords the low half of byte p is "
        "codebook 2p, the high half 2p + 1",
        "codebooks_fingerprint": model.codebooks_fingerprint,
        "model_fingerprint": model.model_fingerprint,
        **note,
        "versions": versions("numpy"),
    }
    arrays = _ARRAYS[to](Z) | {"meta": np.array(json.dumps(meta))}
    with atomic_path(out) as temporary, temporary.open("wb") as file:
        # An open file, as numpy would append .npz to a name. No object arrays, so nothing is
        # pickled.
        np.savez(file, allow_pickle=False, **arrays)
    return out


def _factory_index(Z: Floats, factory: str | None) -> Any:
    """Return the empty, trained Faiss index of a factory string."""
    M, K, _ = (int(size) for size in Z.shape)
    bits = bits_per_code(K)
    plain = f"PQ{M}x{bits}"
    kinds: dict[Any, Kind] = {(M, bits, None): "flat"}
    choices = plain
    if bits == 4:
        kinds[M, 4, "fs"] = "fastscan"
        choices += f", {plain}fs"
        # Else Faiss would fill the unused half byte at random, and no other form reads such codes.
        if M % 2 == 0:
            kinds[M // 2, 8, None] = "fused"
            choices += f", PQ{M // 2} (two share a byte)"
    match = _FACTORY.fullmatch(f"IDMap2,{plain}" if factory is None else factory)
    kind = kinds.get((int(match["M"]), int(match["bits"] or 8), match["fast"])) if match else None
    if not match or not kind:
        raise UsageError(
            f"--factory {factory}: the model's codebooks go into {choices}, with IDMap2 "
            "before it or not; a transform such as OPQ would undo its sub-spaces"
        )
    index = to_faiss(np.empty((0, code_size(M, K)), np.uint8), None, Z, kind)
    return getattr(faiss, f"Index{match['map']}")(index) if match["map"] else index


def _lancedb_arrays(Z: Floats) -> dict[str, NDArray[Any]]:
    K = int(Z.shape[1])
    if K not in (16, 256):
        raise UsageError(
            f"codebooks of {K} codewords do not fill whole bytes: 8-bit codes need 16 (two share "
            "a byte) or 256"
        )
    books = fuse(Z) if K == 16 else Z
    # One centroid of zeros: LanceDB quantises the difference from the centroid, here the vector
    # itself.
    width = books.shape[0] * books.shape[2]
    return {"pq_codebook": books, "ivf_centroids": np.zeros((1, width), np.float32)}


_ARRAYS: dict[str, Callable[[Floats], dict[str, Any]]] = {
    "numpy": lambda Z: {"codebooks": Z, **({"fused": fuse(Z)} if Z.shape[1] == 16 else {})},
    "nanopq": lambda Z: {"codewords": Z},
    "lancedb": _lancedb_arrays,
}


def _export_codes(codes: str | Path, out: Path) -> Path:
    remedy = "Parquet needs pyarrow: pip install 'gpq-faiss[train]'"
    pa = optional("pyarrow", remedy, DataError)
    pq = optional("pyarrow.parquet", remedy, DataError)
    with RowReader(codes, kind="codes") as reader:
        header = reader.header
        text_columns = [
            name for name in reader.text_columns if name not in ("id", "codes", "labels")
        ]
        class_names = np.array(header.class_names, dtype=object)
        keys = "model_fingerprint", "codebooks_fingerprint"
        metadata = {key: value for key, value in header.attributes().items() if key in keys}
        metadata |= zip(("codebooks", "codewords", "subdim"), header.codebooks.shape, strict=True)
        types = {
            "id": pa.int64(),
            "codes": pa.list_(pa.uint8()),
            **dict.fromkeys(text_columns, pa.string()),
        }
        if reader.labels is not None:
            types["labels"] = pa.list_(pa.string())
        schema = pa.schema(types, metadata={"gpq_faiss": json.dumps(metadata)})
        with (
            atomic_path(out) as temporary,
            temporary.open("wb") as file,  # pyarrow takes no path that is no text
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
            stage("writing Parquet", reader.ntotal, "row") as writing,
        ):
            for rows in row_blocks(reader.ntotal, _ROW_GROUP):
                block = np.asarray(reader.values[rows])
                offsets = pa.array(np.arange(0, block.size + 1, block.shape[1], dtype=np.int32))
                texts = reader.texts(rows.start, rows.stop)
                columns = {
                    "id": np.asarray(reader.ids[rows]),
                    "codes": pa.ListArray.from_arrays(offsets, pa.array(block.ravel())),
                    **{name: texts[name].tolist() for name in text_columns},
                }
                if reader.labels is not None:
                    flags = np.unpackbits(reader.labels[rows], axis=1, count=len(class_names))
                    columns["labels"] = [class_names[row].tolist() for row in flags.astype(bool)]
                writer.write_table(pa.table(columns, schema=schema))
                writing.advance(len(block))
    return out

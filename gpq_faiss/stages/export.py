"""Export for other tools: codebooks as an empty Faiss index or arrays, codes as a Parquet table.

The tools need not be installed. Scores are inner products in all of them, larger is better.

=================  ==============================================================================================
form               contents
=================  ==============================================================================================
``numpy``          ``.npz``: ``codebooks`` [M, K, d], ``fused`` [ceil(M/2), 256, 2d] (K = 16 only), ``meta``
``nanopq``         ``.npz``: ``codewords`` [M, K, d] for ``nanopq.PQ(M, K, metric="dot")``, ``meta``
``lancedb``        ``.npz``: ``pq_codebook`` [bytes, 256, width], ``ivf_centroids`` [1, D] of zeros, ``meta``
``factory``        the empty, trained index of a Faiss factory string, and its sidecar
``parquet``        ``id`` int64, ``codes`` list of uint8 [code_size], packed as in Faiss, texts of the items, and
                   ``labels`` list of text; its metadata (``gpq_faiss``, JSON) identify model and codebooks
=================  ==============================================================================================

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
from ..faissio.io import check_index_output, save_index
from ..faissio.model import read_model
from ..faissio.storage import Form, faiss_index
from ..files import atomic_path, check_output, versions
from ..progress import stage
from ..store.reader import RowReader

Target = Literal["factory", "numpy", "nanopq", "lancedb", "parquet"]
FORMAT_VERSION = 1
_ROW_GROUP = 1 << 16

# Supported indexes. No OPQ or PCA: a transform before the codes would undo the model's sub-spaces.
_FACTORY = re.compile(
    r"(?:(?P<map>IDMap2?),)?PQ(?P<M>[1-9]\d{0,3})(?:x(?P<bits>[1-9]\d?))?(?:(?P<fast>fs)|np)?"
)


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
    """Write a model's codebooks (z'), or codes, for another tool. If query and item vectors differ, the log and the file say so.

    Args:
        source: a model folder; for ``parquet`` a codes file.
        out: the file; for ``factory`` with a sidecar ``out + ".json"``.
        to: see the table above.
        factory: for ``factory``: the string, such as ``IDMap2,PQ12x4``, ``PQ12x4fs`` or ``PQ6`` (byte-fused: half as
            many codebooks of 8 bits with the same code bytes; for even M). Default: ``IDMap2,PQ`` with the model's own M and bits.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        UsageError: an unknown form; a factory string of an unsupported index or of other codebooks; 8-bit codes with
            codebooks of neither 16 nor 256 codewords.
        DataError, MismatchError: a damaged source, or one that does not fit the form; pyarrow is not installed.
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
        index, name = _factory_index(Z, factory), model.model_fingerprint
        return save_index(index, out, model_fingerprint=name, overwrite=overwrite, extra=note)
    M, K, d = (int(n) for n in Z.shape)
    meta = {
        "format_version": FORMAT_VERSION,
        "to": to,
        "codebooks": M,
        "codewords": K,
        "subdim": d,
        "width": M * d,
        "metric": "inner_product",
        "code_bytes": code_size(M, K),
        "code_bits": "least significant first: with 16 codewords the low half of byte p is codebook 2p, the high half 2p + 1",
        "codebooks_fingerprint": model.codebooks_fingerprint,
        "model_fingerprint": model.model_fingerprint,
        **note,
        "versions": versions("numpy"),
    }
    arrays = _ARRAYS[to](Z) | {"meta": np.array(json.dumps(meta))}
    with atomic_path(out) as temporary, temporary.open("wb") as file:
        # An open file, as numpy would append .npz to a name. No object arrays, so nothing is pickled.
        np.savez(file, allow_pickle=False, **arrays)
    return out


def _factory_index(Z: Floats, factory: str | None) -> Any:
    """The empty, trained Faiss index of a factory string."""
    M, K, _ = (int(n) for n in Z.shape)
    bits = bits_per_code(K)
    own = f"PQ{M}x{bits}"
    forms: dict[Any, Form] = {(M, bits, None): "flat"}
    named = own
    if bits == 4:
        forms[M, 4, "fs"] = "fastscan"
        named += f", {own}fs"
        # Else Faiss would fill the unused half byte at random, and no other form reads such codes.
        if M % 2 == 0:
            forms[M // 2, 8, None] = "fused"
            named += f", PQ{M // 2} (two share a byte)"
    found = _FACTORY.fullmatch(f"IDMap2,{own}" if factory is None else factory)
    form = forms.get((int(found["M"]), int(found["bits"] or 8), found["fast"])) if found else None
    if not found or not form:
        raise UsageError(
            f"--factory {factory}: the model's codebooks go into {named}, with IDMap2 before it or not; a transform "
            "such as OPQ would undo its sub-spaces"
        )
    index = faiss_index(np.empty((0, code_size(M, K)), np.uint8), None, Z, form)
    return getattr(faiss, f"Index{found['map']}")(index) if found["map"] else index


def _lancedb_arrays(Z: Floats) -> dict[str, NDArray[Any]]:
    K = int(Z.shape[1])
    if K not in (16, 256):
        raise UsageError(
            f"codebooks of {K} codewords do not fill whole bytes: 8-bit codes need 16 (two share a byte) or 256"
        )
    books = fuse(Z) if K == 16 else Z
    # One centroid of zeros: LanceDB quantises the difference from the centroid, here the vector itself.
    return {"pq_codebook": books, "ivf_centroids": np.zeros((1, books.shape[0] * books.shape[2]), np.float32)}


_ARRAYS: dict[str, Callable[[Floats], dict[str, Any]]] = {
    "numpy": lambda Z: {"codebooks": Z, **({"fused": fuse(Z)} if Z.shape[1] == 16 else {})},
    "nanopq": lambda Z: {"codewords": Z},
    "lancedb": _lancedb_arrays,
}


def _export_codes(codes: str | Path, out: Path) -> Path:
    remedy = "Parquet needs pyarrow: pip install 'gpq-faiss[train]'"
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
            temporary.open("wb") as file,  # pyarrow takes no path that is no text
            pq.ParquetWriter(file, schema, compression="zstd") as writer,
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

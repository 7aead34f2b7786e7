"""Export of codebooks for other tools: numpy, nanopq, LanceDB, and Faiss factory strings.

The tools need not be installed. Scores are inner products in all of them, larger is better.

=================  ==============================================================================================
form               contents
=================  ==============================================================================================
``numpy``          ``.npz``: ``codebooks`` [M, K, d], ``fused`` [ceil(M/2), 256, 2d] (K = 16 only), ``meta``
``nanopq``         ``.npz``: ``codewords`` [M, K, d] for ``nanopq.PQ(M, K, metric="dot")``, ``meta``
``lancedb``        ``.npz``: ``pq_codebook`` [bytes, 256, width], ``ivf_centroids`` [1, D] of zeros, ``meta``
``factory``        the empty, trained index of a Faiss factory string, and its sidecar
=================  ==============================================================================================

Arrays are float32; ``meta`` is a JSON text with the model, the shape and the layout of code bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import faiss
import numpy as np
from numpy.typing import NDArray

from .. import __version__
from ..codes.bits import bits_per_code, code_size
from ..codes.checks import Floats
from ..codes.codebooks import fuse
from ..errors import UsageError
from ..files import atomic_path, check_output
from .io import check_index_output, save_index
from .model import ModelHeader, read_model

Target = Literal["numpy", "nanopq", "factory", "lancedb"]
FORMAT_VERSION = 1

# Supported indexes. No OPQ or PCA: a transform before the codes would undo the model's sub-spaces.
_FACTORY = re.compile(r"(?:IDMap2?,)?PQ([1-9]\d{0,3})(?:x([1-9]\d?))?(?:(fs)|np)?")


def export_codebooks(
    model_dir: str | Path,
    out: str | Path,
    *,
    to: Target,
    factory: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model's codebooks (z') for another tool. If query and item vectors differ, the log and the file say so.

    Args:
        model_dir: a model folder.
        out: the file; for ``factory`` with a sidecar ``out + ".json"``.
        to: see the table above.
        factory: for ``factory``: the string, such as ``IDMap2,PQ12x4``, ``PQ12x4fs`` or ``PQ6`` (byte-fused: half as
            many codebooks of 8 bits with the same code bytes; for even M). Default: ``IDMap2,PQ`` with the model's own M and bits.
        overwrite: replace existing files.

    Returns:
        ``out``

    Raises:
        UsageError: a factory string of an unsupported index or of other codebooks; 8-bit codes with
            codebooks of neither 16 nor 256 codewords.
        DataError, MismatchError: the model is damaged.
        OutputExistsError: ``out`` exists and ``overwrite`` is false.
    """
    if to == "factory":
        out = check_index_output(out, overwrite=overwrite)
        model = read_model(model_dir)
        index = factory_index(model, factory)
        name = model.model_fingerprint
        return save_index(index, out, model_fingerprint=name, overwrite=True, extra=model.query_note())
    out = check_output(out, overwrite=overwrite)
    model = read_model(model_dir)
    arrays = _ARRAYS[to](model.codebooks) | {"meta": np.array(json.dumps(_meta(model, to)))}
    with atomic_path(out) as temporary, temporary.open("wb") as file:
        # An open file, as numpy would append .npz to a name. No object arrays, so nothing is pickled.
        np.savez(file, allow_pickle=False, **arrays)
    return out


def byte_codebooks(Z: Floats) -> Floats:
    """Codebooks for tools with 8-bit codes only, float32 [bytes, 256, width]: fused, or unchanged if K = 256.

    Raises:
        UsageError: K is neither.
    """
    K = int(Z.shape[1])
    if K not in (16, 256):
        raise UsageError(
            f"codebooks of {K} codewords do not fill whole bytes: 8-bit codes need 16 (two share a byte) or 256"
        )
    return fuse(Z) if K == 16 else Z


def factory_index(model: ModelHeader, factory: str | None = None) -> Any:
    """The empty, trained Faiss index of a factory string. See :func:`export_codebooks` for the strings and errors."""
    Z = model.codebooks
    M, K, _ = (int(n) for n in Z.shape)
    own = f"PQ{M}x{bits_per_code(K)}"
    if factory is None:
        factory = f"IDMap2,{own}"
    found = _FACTORY.fullmatch(factory)
    if found is None:
        raise UsageError(
            f"--factory {factory}: codebooks go into {own} or {own}fs, with IDMap2 before it; a "
            "transform such as OPQ would undo the model's sub-spaces"
        )
    shape = (int(found[1]), int(found[2] or 8))
    if shape == (M, bits_per_code(K)):
        books = Z
    elif K == 16 and M % 2 == 0 and shape == (M // 2, 8):
        # Not for odd M: Faiss would fill the unused half byte at random, and no other form reads such codes.
        books = fuse(Z)
    else:
        fused = f" or PQ{M // 2} (two share a byte)" if K == 16 and M % 2 == 0 else ""
        raise UsageError(f"--factory {factory}: the model has {M} codebooks of {K}, which is {own}{fused}")
    if found[3] and shape[1] != 4:
        raise UsageError(f"--factory {factory}: FastScan (fs) takes 4-bit codes only: write {own} without fs")
    D = int(books.shape[0] * books.shape[2])
    outer: Any = faiss.index_factory(D, factory, faiss.METRIC_INNER_PRODUCT)
    inner: Any = faiss.downcast_index(outer.index) if isinstance(outer, faiss.IndexIDMap) else outer
    faiss.copy_array_to_vector(np.ascontiguousarray(books).ravel(), inner.pq.centroids)
    inner.is_trained = True
    outer.is_trained = True
    # Serialised and read, as by readers of the file (the factory's coarse quantiser has a more general class).
    return faiss.deserialize_index(faiss.serialize_index(outer))


def _lancedb_arrays(Z: Floats) -> dict[str, NDArray[Any]]:
    books = byte_codebooks(Z)
    # One centroid of zeros: LanceDB quantises the difference from the centroid, here the vector itself.
    return {"pq_codebook": books, "ivf_centroids": np.zeros((1, books.shape[0] * books.shape[2]), np.float32)}


_ARRAYS: dict[str, Callable[[Floats], dict[str, Any]]] = {
    "numpy": lambda Z: {"codebooks": Z, **({"fused": fuse(Z)} if Z.shape[1] == 16 else {})},
    "nanopq": lambda Z: {"codewords": Z},
    "lancedb": _lancedb_arrays,
}


def _meta(model: ModelHeader, to: str) -> dict[str, Any]:
    M, K, d = (int(n) for n in model.codebooks.shape)
    return {
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
        **model.query_note(),
        "versions": {"gpq_faiss": __version__, "numpy": np.__version__},
    }

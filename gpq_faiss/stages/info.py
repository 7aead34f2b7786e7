"""Description of the files and folders that this package writes, and of Faiss indexes.

Files are read as the stages read them, so that ``info`` also detects damage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ..codes.bits import bits_per_code, code_size
from ..encoder import read_encoder_metadata
from ..errors import DataError
from ..faissio.convert import METRICS
from ..faissio.files import read_index
from ..faissio.model import read_model, read_weights
from ..indexes.opening import file_kind, open_index
from ..store.changes import changes_path, read_changes
from ..store.items import items_path
from ..store.rows import RowReader

_SUPPORTED = (
    "a model folder, features.h5, codes.h5, an index and an exported encoder (.onnx, .pt2) can be "
    "described"
)


def info(path: str | Path) -> dict[str, Any]:
    """Describe and verify a file or folder.

    Args:
        path: the file or folder.

    Returns:
        JSON values. Always ``kind``, ``path`` and ``bytes`` (of a folder those of all its files).
        ``kind`` is ``model`` (its network is not loaded), ``features``, ``codes``,
        ``index`` or ``encoder`` (:class:`gpq_faiss.encoder.Metadata`).

    Raises:
        DataError: the file is missing, empty, truncated, damaged, or of another kind.
        MismatchError: parts do not fit together (an index and its changes).
        UsageError: it is an ONNX file, but onnxruntime is not installed.
    """
    path = Path(path)
    description = _model(path) if path.is_dir() else _file(path)
    size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
    return {"kind": description["kind"], "path": str(path), "bytes": size, **description}


def _file(path: Path) -> dict[str, Any]:
    """Describe a file of any kind."""
    kind = file_kind(path)
    if kind == "rows":
        return _rows(path)
    if kind in ("faiss", "lists"):
        return (_foreign_index if kind == "faiss" else _index)(path)
    if path.suffix.lower() in (".onnx", ".pt2"):
        return _encoder(path)
    raise DataError(f"{path}: content of the form {kind}: {_SUPPORTED}")


def _code_sizes(shape: tuple[int, ...]) -> dict[str, int]:
    """Return the sizes of codebooks [M, K, d], and the bits of their codes."""
    M, K, d = shape
    return {"codebooks": M, "codewords": K, "subdim": d, "bits": M * bits_per_code(K)}


def _rows(path: Path) -> dict[str, Any]:
    """Describe a features or codes file."""
    with RowReader(path) as reader:
        header = reader.header
        labelled = 0 if reader.labels is None else int(np.count_nonzero(reader.labels.any(axis=1)))
        return {
            "kind": header.kind,
            "shape": [reader.ntotal, header.width],
            "ntotal": reader.ntotal,
            **_code_sizes(header.codebooks.shape),
            "labelled": labelled,
            "texts": list(reader.text_columns),
            **header.attributes(),
            "extra": header.extra,
            "versions": reader.versions,
            "classes": len(header.class_names),
            "class_names": list(header.class_names),
        }


def _model(path: Path) -> dict[str, Any]:
    """Describe a model folder by its ``config.json``."""
    header = read_model(path)
    read_weights(header)  # refuses those of another model
    keys = (
        "method",
        "input",
        "model_fingerprint",
        "codebooks_fingerprint",
        "class_names",
        "data",
        "split",
        "training",
        "versions",
    )
    return {
        "kind": "model",
        **_code_sizes(header.codebooks.shape),
        **{key: header.description.get(key) for key in keys},
        "classes": len(header.description["class_names"]),
    }


def _encoder(path: Path) -> dict[str, Any]:
    metadata = read_encoder_metadata(path)
    shape = _code_sizes((metadata.codebooks, metadata.codewords, metadata.subdim))
    sizes = {
        "side": metadata.side,
        "input_shape": ["batch", *metadata.input_shape],
        "classes": len(metadata.class_names),
    }
    return {**metadata.model_dump(exclude_defaults=True), **sizes, **shape, "kind": "encoder"}


def _foreign_index(path: Path) -> dict[str, Any]:
    """Describe an index of Faiss, at length if :func:`open_index` searches it."""
    opened = read_index(path)  # which owns the index within
    index = faiss.downcast_index(opened)
    if isinstance(index, faiss.IndexIDMap):
        index = faiss.downcast_index(index.index)
    if type(index) is faiss.IndexPQ and index.pq.nbits <= 8 and index.ntotal:
        return _index(path)
    return {
        "kind": "index",
        "form": f"{type(index).__name__}, {'searched by Faiss alone' if index.ntotal else 'empty'}",
        "ntotal": index.ntotal,
        "dimension": index.d,
        "metric": METRICS.get(index.metric_type, str(index.metric_type)),
    }


def _index(path: Path) -> dict[str, Any]:
    """Describe an index, its names, and the changes that a service has made."""
    with open_index(path) as index:
        size = code_size(index.M, index.K)
        changes = read_changes(path, size, index.fingerprint)
        return {
            "kind": "index",
            "form": file_kind(path),
            "ntotal": index.ntotal,
            "dimension": index.d,
            "metric": METRICS[index.metric_type],
            **_code_sizes(index.codebooks.shape),
            "code_size": size,
            "codebooks_fingerprint": index.fingerprint,
            "names": str(items_path(path)) if index.items is not None else None,
            "changes": str(changes_path(path)) if changes is not None else None,
            "changed_items": 0 if changes is None else len(changes.by_id),
        }

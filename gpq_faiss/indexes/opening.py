"""Opening an index: ``index.faiss``, ``index.lists``, ``codes.h5``, or a Faiss index in memory.

If a service has changed the index, its file of changes is applied. Names and labels come from the
items file next to the index, if that belongs to it.
"""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from ..codes.bits import code_size
from ..codes.codebooks import unfuse
from ..errors import DataError
from ..faissio.convert import METRICS
from ..faissio.files import read_index
from ..inputs import file_form, reading
from ..store.changes import read_changes
from ..store.items import Items, RowItems, items_path
from ..store.rows import RowReader
from .index import Index
from .list_file import open_lists

_log = logging.getLogger(__name__)

_EXPECTED = "an index (gpq index, gpq encode, or faiss.write_index)"


def open_index(source: Any, *, changes: bool = True) -> Index:
    """Open an index for exact search.

    Args:
        source: the path of an ``index.faiss``, ``index.lists`` (mapped, not read) or ``codes.h5``,
            or of any Faiss file with an ``IndexPQ`` of 2 to 8 bits, inner product or L2; or such a
            Faiss index, whose codes are copied.
        changes: apply the changes that a service has made since the file was written.

    Raises:
        DataError: the file is missing, damaged, empty, or of another kind.
        MismatchError: the file of changes belongs to other codebooks.

    Examples:
        >>> import faiss, numpy as np
        >>> from gpq_faiss.codes.codebooks import inject
        >>> Z = np.eye(16, dtype=np.float32)[None].repeat(2, axis=0)
        >>> filled = inject(Z)  # a plain Faiss index
        >>> filled.add_sa_codes(np.array([[0x00], [0x21]], np.uint8))
        >>> scores, ids = open_index(filled).search(np.arange(32.0)[None], 2)
        >>> scores.tolist(), ids.tolist()
        ([[19.0, 16.0]], [[1, 0]])
    """
    if not isinstance(source, str | Path):
        return _from_faiss(source, "the index")
    path = Path(source)
    kind = file_kind(path)
    with reading(path, _EXPECTED):
        if kind == "faiss":
            index = _with_items(_from_faiss(read_index(path), str(path)), path)
        elif kind == "rows":
            index = _from_codes(path)
        elif kind == "lists":
            lists, crc = open_lists(path)
            index = _with_items(Index((lists,), lists.codebooks), path, crc)
        else:
            raise DataError(f"{path} is not {_EXPECTED}; its content: {kind}")
    return _with_changes(index, path) if changes else index


def file_kind(path: Path) -> str:
    """Return the kind of a file by its first bytes: ``faiss``, ``lists`` or ``rows`` (any HDF5).

    For a file of another kind the result describes its content, for errors.

    Raises:
        DataError: the path is missing, or is not a file.
    """
    form, _ = file_form(path, _EXPECTED)
    kinds = {"a Faiss index": "faiss", "a safetensors file": "lists", "hdf5": "rows"}
    return kinds.get(form, form)


def _from_faiss(source: Any, name: str) -> Index:
    """Build an index from an ``IndexPQ``, possibly in an ``IndexIDMap`` or ``IndexIDMap2``.

    Byte-fused codebooks become 4-bit ones.

    Args:
        name: how errors name the source.

    Raises:
        DataError: the source is of another kind, not trained, or invalid.
    """
    pq_index = faiss.downcast_index(source)
    ids = np.arange(pq_index.ntotal)
    if isinstance(pq_index, faiss.IndexIDMap):  # or its subclass IndexIDMap2
        ids = faiss.vector_to_array(pq_index.id_map)
        pq_index = faiss.downcast_index(pq_index.index)
    if type(pq_index) is not faiss.IndexPQ or not 2 <= pq_index.pq.nbits <= 8:
        raise DataError(
            f"{name} is {type(pq_index).__name__}, not codes of a product quantiser "
            "(IndexPQ of 2 to 8 bits): search it by Faiss itself, or index codes.h5 (gpq index)"
        )
    metric = pq_index.metric_type
    if metric not in METRICS or not pq_index.is_trained:
        raise DataError(f"{name} is not trained, or its metric is neither inner product nor L2")
    M, K, d = pq_index.pq.M, pq_index.pq.ksub, pq_index.pq.dsub
    codebooks = faiss.vector_to_array(pq_index.pq.centroids).reshape(M, K, d)
    codes = faiss.vector_to_array(pq_index.codes).reshape(-1, code_size(M, K))
    if K == 256 and metric == faiss.METRIC_INNER_PRODUCT:
        with contextlib.suppress(DataError):  # codebooks of 8 bits that are not byte-fused
            codebooks = unfuse(codebooks)
    return Index.build(codes, codebooks, ids, metric_type=metric)


def _from_codes(path: Path) -> Index:
    """Build an index from the rows of a codes file, which also has the names and labels."""
    reader = RowReader(path, kind="codes")
    index = Index.build(reader.values, reader.header.codebooks, reader.ids)
    if reader.header.class_names or reader.text_columns:
        index.items = RowItems(reader)
    return index


def _with_items(index: Index, path: Path, crc: int | None = None) -> Index:
    """Attach the items file to an index, unless it is missing or belongs to another index.

    Args:
        crc: CRC of the codes and ids, if it is known (:meth:`.lists.InvertedLists.crc`).
    """
    if not items_path(path).exists():
        return index
    items = Items(items_path(path))
    description = items.description
    lists = index.segments[0]
    if (description.ntotal, description.crc) != (lists.n, lists.crc() if crc is None else crc):
        _log.warning(
            "%s belongs to another index: results of %s come without names; index the codes again",
            items.path,
            path,
        )
        items.close()
        return index
    index.items = items
    index.contained = (description.changes, description.number) if description.changes else None
    return index


def _with_changes(index: Index, path: Path) -> Index:
    """Apply the changes of an index that its file does not contain."""
    changes = read_changes(path, code_size(index.M, index.K), index.fingerprint)
    if changes is None:
        return index
    index = index.apply(changes.since(index.contained))
    if not index.ntotal:
        raise DataError(f"{path}: all items were removed: index the codes again")
    index.contained = changes.identity, changes.number
    return index

"""Opening an index: ``index.faiss``, ``index.lists``, ``codes.h5``, or a Faiss index in memory.

If a service has changed the index, its file of changes is applied. Names and labels come from the
items file next to the index, if that belongs to it.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ..codes.bits import code_size
from ..codes.checks import check_unique
from ..errors import DataError
from ..faissio.convert import from_faiss
from ..faissio.files import read_index
from ..inputs import file_form
from ..store.changes import changes_path, read_changes
from ..store.items import Items, RowItems, items_path
from ..store.rows import RowReader
from .index import Index, search_codebooks
from .list_file import open_lists
from .lists import InvertedLists

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
    if kind == "faiss":
        index = _with_items(_from_faiss(read_index(path), str(path)), path)
    elif kind == "codes":
        index = _from_codes(path)
    elif kind == "lists":
        lists, crc = open_lists(path)
        index = _with_items(Index((lists,), lists.codebooks, form="lists"), path, crc)
    else:
        raise DataError(f"{path} is not {_EXPECTED}; its content: {kind}")
    return _with_changes(index, path) if changes else index


def file_kind(path: Path) -> str:
    """Return the kind of a file by its content: ``faiss``, ``lists`` or ``codes``.

    For a file of another kind the result describes its content, for errors.

    Raises:
        DataError: the path is missing, or is not a file.
    """
    form, _ = file_form(path, _EXPECTED)
    kinds = {"a Faiss index": "faiss", "a safetensors file": "lists", "hdf5": "codes"}
    return kinds.get(form, form)


def _from_faiss(index: Any, name: str) -> Index:
    """Build an index from the codes of a Faiss index; ``name`` is its name in errors."""
    contents = from_faiss(index, name)
    if not len(contents.codes):
        raise DataError(
            f"{name} is empty: add vectors or codes by Faiss, or write one by gpq index"
        )
    Z = search_codebooks(contents.codebooks, contents.metric)
    lists = InvertedLists.build(contents.codes, contents.ids, Z)
    return Index((lists,), contents.codebooks, metric_type=contents.metric, form=contents.kind)


def _from_codes(path: Path) -> Index:
    """Build an index from the rows of a codes file, which also has the names and labels."""
    reader = RowReader(path, kind="codes")
    check_unique(reader.ids, str(path))
    lists = InvertedLists.build(reader.values, reader.ids, reader.header.codebooks)
    items = RowItems(reader) if reader.header.class_names or reader.text_columns else None
    return Index((lists,), reader.header.codebooks, items=items, form="codes")


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
    newest = changes.since(index.contained)
    if newest:
        _log.info("%s: %s changes are applied", changes_path(path), f"{len(newest):,}")
    index = index.apply(newest)
    if not index.ntotal:
        raise DataError(f"{path}: all items were removed: index the codes again")
    index.contained = changes.identity, changes.number
    return index

"""Tables in memory (pyarrow, pandas, polars ...) and arrays, as data sets of vectors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..store import Texts, as_texts
from .arrays import without_gradient
from .embeddings import FEATURES, IDS, LABELS, NAMES, FileFeatures, texts_for_ids
from .id_files import as_int64
from .label_files import label_cell, labels_from_array, labels_from_cells
from .labels import Labels
from .parquet import is_list, is_text, matrix_of
from .vectors import ArrayVectors, first_of


def as_table(source: Any) -> Any:
    """Convert an Arrow-compatible table (pandas, polars, pyarrow, DuckDB) to a ``pyarrow.Table``.

    Raises:
        DataError: pyarrow is not installed, or a column cannot be converted.
    """
    try:
        import pyarrow
    except ImportError:
        raise DataError("reading a table needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    if isinstance(source, pyarrow.Table):
        return source
    try:
        return pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"the {type(source).__name__} has a column that cannot be converted ({why}): leave out those of mixed types"
        ) from None


class Columns:
    """The columns of a table, read lazily.

    Args:
        schema: ``pyarrow.Schema``.
        read: name -> ``pyarrow.ChunkedArray``.
        where: name of the table in errors.
    """

    def __init__(self, schema: Any, read: Callable[[str], Any], where: str) -> None:
        self.names: list[str] = list(schema.names)
        self.types: dict[str, Any] = {field.name: field.type for field in schema}
        self._read, self.where = read, where

    def check(self, name: str) -> None:
        """Raises DataError: no such column, or two."""
        if self.names.count(name) != 1:
            there = ", ".join(repr(known[:40]) for known in self.names[:20])
            what = f"has the column {name!r} twice" if name in self.names else f"has no column {name!r}"
            raise DataError(f"{self.where} {what} (it has {there})")

    def column(self, name: str) -> Any:
        """A ``pyarrow.ChunkedArray``. Raises DataError: see :meth:`check`."""
        self.check(name)
        return self._read(name)

    def is_numeric(self, name: str) -> bool:
        """Whether a column has a number in each row. Raises DataError: see :meth:`check`."""
        import pyarrow

        self.check(name)
        kind = self.types[name]
        return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))

    def labels(self, name: str, class_names: Sequence[str] | None = None) -> Labels | None:
        """Labels from class numbers (-1 or empty: none), names, or lists of these; None if no item has any."""
        cells = [label_cell(value) for value in self.column(name).to_pylist()]
        if not any(cells):
            return None
        where = f"{self.where}: {name!r}"
        if class_names is None:
            return labels_from_cells(cells, where)
        known = {str(i): text for i, text in enumerate(class_names)}
        unknown = next((text for cell in cells for text in cell if text not in known), None)
        if unknown is not None:
            raise DataError(
                f"{where}: class {unknown} of {len(known)}: the labels do not fit their class names"
            )
        return Labels.from_names([tuple(known[text] for text in cell) for cell in cells], list(class_names))

    def ids(self, name: str) -> NDArray[np.int64]:
        """Raises DataError: not whole numbers of 64 bits, or one is missing."""
        import pyarrow

        column = self.column(name)
        where = f"{self.where}: {name!r}"
        if not pyarrow.types.is_integer(column.type):
            raise DataError(
                f"{where} is {column.type}: ids are whole numbers; texts may be names (names=...)"
            )
        if column.null_count:
            raise DataError(f"{where} has {column.null_count:,} empty cells: every row needs its id")
        return as_int64(column.to_numpy(), where)

    def guess_ids(self) -> str | None:
        """The column of ids by its name."""
        import pyarrow

        found = first_of(IDS, self.names)
        return found if found is not None and pyarrow.types.is_integer(self.types[found]) else None

    def guess_names(self) -> str | None:
        """The column of item names: one of the usual names, or ``id`` if it is text."""
        return next((n for n in (*NAMES, *IDS) if n in self.types and is_text(self.types[n])), None)

    def notes(self, ids: str | None, names: str | None) -> list[str]:
        """On a column of ids that holds texts."""
        found = first_of(IDS, self.names) if ids is None else None
        return [texts_for_ids(found, names)] if found is not None and is_text(self.types[found]) else []

    def text(self, name: str) -> Texts:
        """A column as texts; empty cells become empty texts."""
        return as_texts("" if value is None else str(value) for value in self.column(name).to_pylist())


def open_frame(
    source: Any,
    *,
    labels: str | None = None,
    ids: str | None = None,
    names: str | None = None,
    vectors: str | Sequence[str] | None = None,
    keep: Sequence[str] = (),
) -> FileFeatures:
    """Vectors in a table, with columns of labels, ids and names.

    Args:
        source: see :func:`as_table`.
        labels, ids, names: columns; default: the usual names (:data:`.embeddings.LABELS` ...).
        vectors: a column of lists, or columns of numbers, one per dimension; default: the only column of lists, or one called
            ``features``, ``embedding`` ...; else all remaining columns of numbers.
        keep: further text columns to store with the items.

    Raises:
        DataError: no such column, or unusable contents.
    """
    table = as_table(source)
    where = f"the {type(source).__name__}"
    columns = Columns(table.schema, table.column, where)
    labels = labels or first_of(LABELS, columns.names)
    ids = ids or columns.guess_ids()
    names = names or columns.guess_names()
    others = {labels, ids, names, *keep, *_index_of(table)}
    matrix = _matrix(columns, vectors, [name for name in columns.names if name not in others])
    content = hashlib.sha256(np.ascontiguousarray(matrix).tobytes()).hexdigest()
    texts = {name: columns.text(name) for name in keep}
    if names is not None:
        texts["name"] = columns.text(names)
    found = features_in_memory(
        type(source).__name__,
        matrix,
        content,
        labels=None if labels is None else columns.labels(labels),
        ids=None if ids is None else columns.ids(ids),
        texts=texts,
    )
    found.notes += columns.notes(ids, names)
    return found


def features_in_memory(
    name: str,
    matrix: NDArray[Any],
    content: str,
    *,
    labels: Labels | None = None,
    ids: NDArray[np.int64] | None = None,
    texts: dict[str, Texts] | None = None,
) -> FileFeatures:
    """A data set of the rows of ``matrix``.

    Args:
        content: hash of the matrix.

    Raises:
        DataError: not numbers [N, width].
    """
    found = ArrayVectors(matrix, name)
    own = np.arange(found.n, dtype=np.int64) if ids is None else ids
    mark = "" if labels is None else labels.fingerprint()
    bare = 0 if labels is None else int((~labels.has()).sum())
    notes = ["no labels"] if labels is None else []
    return FileFeatures(
        name=name,
        ids=own,
        fingerprint=fingerprint("features", content, str((found.n, found.width)), mark, own.tobytes()),
        labels=labels,
        texts=texts or {},
        notes=[f"{bare:,} of {found.n:,} items are unlabelled"] if bare else notes,
        width=found.width,
        vectors=found,
    )


def _index_of(table: Any) -> list[str]:
    """Columns that were the index of a pandas frame."""
    about = table.schema.pandas_metadata or {}
    return [name for name in about.get("index_columns", []) if isinstance(name, str)]


def _matrix(columns: Columns, vectors: str | Sequence[str] | None, free: Sequence[str]) -> NDArray[Any]:
    if vectors is None:
        lists = [name for name in free if is_list(columns.types[name])]
        vectors = first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
        if vectors is None and lists:
            raise DataError(
                f"{columns.where}: which column holds the vectors, {', '.join(lists[:20])}? Name it: vectors=..."
            )
        vectors = vectors or [name for name in free if columns.is_numeric(name)]
    if isinstance(vectors, str):
        columns.check(vectors)
        if is_list(columns.types[vectors]):
            return matrix_of(columns.column(vectors), f"{columns.where}: {vectors!r}")
    names = [vectors] if isinstance(vectors, str) else list(vectors)
    wrong = next((name for name in names if not columns.is_numeric(name)), None)
    if wrong is not None:
        raise DataError(
            f"{columns.where}: {wrong!r} is {columns.types[wrong]}: a column of lists, or columns of numbers, are needed"
        )
    if not names:
        raise DataError(f"{columns.where} has no column of vectors: lists of numbers, or numbers, are needed")
    return np.column_stack([columns.column(name).to_numpy() for name in names])


def labels_of(values: Any, n: int) -> Labels:
    """Labels from an array or tensor of class numbers [N] (-1: none) or 0/1 [N, C], or from a list of names or numbers.

    Raises:
        DataError: not labels, or not for ``n`` items.
    """
    values = without_gradient(values)
    if isinstance(values, Labels):
        found = values
    elif isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim:
        array = values.astype(np.uint8) if values.dtype.kind == "b" else values
        found = labels_from_array(array.shape, array.__getitem__, "labels")
    else:
        try:
            cells = [label_cell(v.tolist() if hasattr(v, "tolist") else v) for v in values]
        except (TypeError, RecursionError):
            raise UsageError(
                f"labels: {type(values).__name__} is not a list of labels: give one per item"
            ) from None
        found = labels_from_cells(cells, "labels")
    if len(found) != n:
        raise DataError(f"{len(found):,} labels are given, the data has {n:,} items: one each is needed")
    return found

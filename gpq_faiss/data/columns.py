"""Labels, ids and names in the columns of a table: of Parquet files, of tables in memory, of Hugging Face data sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import check_memory
from ..store import Texts, as_texts
from .base import About
from .id_files import as_int64
from .label_files import label_cell, labels_from_cells
from .labels import Labels
from .parquet import is_list, is_text, open_parquet, read_column

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb")
LABELS = ("labels", "label", "y")
IDS = ("ids", "id")
CLASS_NAMES = ("class_names", "classes")
NAMES = ("name", "names", "path", "paths", "key", "keys")
"""Column names of item names, which results show."""
_CELL = 64  # approximate bytes of a Python object and its list entry


def first_of(names: Sequence[str], there: Sequence[str]) -> str | None:
    """The first of ``names`` in ``there``."""
    return next((name for name in names if name in there), None)


def texts_for_ids(ids: str, names: str | None) -> str:
    """The note on a column of ids that holds texts; ``names``: the column of names."""
    what = "they are the names" if names == ids else f"names are {names!r}, --read keep={ids} shows them too"
    return f"{ids!r} holds texts: {what}; ids are row numbers (--read id_from=path: ids from the names)"


class Columns:
    """The columns of a table, by a ``pyarrow.Schema`` and ``read`` (name -> ``pyarrow.ChunkedArray``), called when they are needed.

    ``where`` names the table in errors; ``memory`` is the budget in bytes for the cells of a column (default: free memory)."""

    def __init__(
        self, schema: Any, read: Callable[[str], Any], where: str, memory: int | None = None
    ) -> None:
        self.names: list[str] = list(schema.names)
        self.types: dict[str, Any] = {one.name: one.type for one in schema}
        self._read, self.where, self.memory = read, where, memory

    def column(self, name: str) -> Any:
        """A ``pyarrow.ChunkedArray``. Raises DataError: no such column, or two."""
        self.check(name)
        return self._read(name)

    def check(self, name: str, remedy: str = "") -> None:
        """Raises DataError: no such column, or two."""
        if self.names.count(name) != 1:
            there = ", ".join(repr(known[:40]) for known in self.names[:20])
            what = f"the column {name!r} twice" if name in self.names else f"no column {name!r}"
            raise DataError(f"{self.where} has {what} (it has {there}){remedy}")

    def cells(self, name: str) -> list[Any]:
        """A column as Python values, one per row; equal texts are one object. Raises DataError: see :meth:`check`; too large."""
        column = self.column(name)
        values = sum(len(chunk.flatten()) if is_list(chunk.type) else 0 for chunk in column.chunks)
        check_memory((len(column) + values) * _CELL, f"{self.where}: {name!r}", self.memory)
        return [cell for chunk in column.chunks for cell in _cells(chunk)]

    def is_numeric(self, name: str) -> bool:
        """Whether a column has a number in each row. Raises DataError: see :meth:`check`."""
        import pyarrow

        self.check(name)
        kind = self.types[name]
        return bool(pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind))

    def labels(self, name: str, class_names: Sequence[str] | None = None) -> Labels | None:
        """Labels from class numbers (-1 or empty: none), names, or lists of these; None if no item has any."""
        cells = [label_cell(value) for value in self.cells(name)]
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

    def text(self, name: str) -> Texts:
        """A column as texts; empty cells become empty texts."""
        return as_texts("" if value is None else str(value) for value in self.cells(name))

    def describe(
        self,
        label: str | None,
        *,
        ids: str | None = None,
        names: str | None = None,
        keep: Sequence[str] = (),
        class_names: Sequence[str] | None = None,
    ) -> About:
        """Labels, ids and texts of the rows; columns of ids and names that are not given are found by :data:`IDS` and :data:`NAMES`."""
        guess = first_of(IDS, self.names) if ids is None else None
        texts = guess if guess is not None and is_text(self.types[guess]) else None
        ids = ids if guess is None or texts is not None else guess
        names = names or first_of(NAMES, [n for n in self.names if not is_list(self.types[n])]) or texts
        for name in keep:
            self.check(name, ": name it with --read keep")
        columns = {name: self.text(name) for name in keep} | (
            {} if names is None else {"name": self.text(names)}
        )
        return About(
            None if label is None else self.labels(label, class_names),
            None if ids is None else self.ids(ids),
            columns,
            notes=[texts_for_ids(texts, names)] if texts is not None else [],
            used={label, ids, names, *keep},
        )

    def vectors(self, wanted: str | None, free: Sequence[str], remedy: str) -> str | None:
        """The column of vectors: ``wanted``, one of :data:`FEATURES`, or the only list of ``free``; None: there is no list."""
        lists = [name for name in free if is_list(self.types[name])]
        found = wanted or first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
        if (found is None and lists) or (found is not None and found not in lists):
            what = f"{found!r} is not a column of lists" if found else "which column holds the vectors?"
            there = ", ".join(lists[:20] if found is None else self.names[:20])
            raise DataError(f"{self.where}: {what} (there are: {there}): {remedy}")
        return found


def parquet_columns(path: Path, what: str, memory: int | None = None) -> Columns:
    """The columns of a Parquet file. Raises DataError: see :func:`.parquet.open_parquet`."""
    with open_parquet(path, what) as file:
        schema = file.schema_arrow
    return Columns(schema, lambda name: read_column(path, name, what, memory), str(path), memory)


def _cells(array: Any) -> list[Any]:
    """Python values of an array; dictionary values are shared."""
    import pyarrow

    if pyarrow.types.is_dictionary(array.type):
        words = array.dictionary.to_pylist()
        return [None if i is None else words[i] for i in array.indices.to_pylist()]
    if is_list(array.type) and pyarrow.types.is_dictionary(array.type.value_type):
        values, offsets = _cells(array.values), array.offsets.to_pylist()
        there = array.is_valid().to_pylist()
        return [values[offsets[i] : offsets[i + 1]] if there[i] else None for i in range(len(array))]
    cells: list[Any] = array.to_pylist()
    return cells

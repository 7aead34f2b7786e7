"""Tables by the names of their columns: labels, ids and names of the rows of CSV, Parquet, and Arrow's tables in memory."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, one_line
from ..inputs import check_memory, read_text
from ..store import as_texts
from .base import About
from .ids import as_int64
from .labels import Labels, label_cell, labels_from_cells
from .parquet import cells_of, is_list, is_number, is_text, open_parquet, read_column

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb")
LABELS = ("labels", "label", "y", "class", "classes", "category", "fine_label", "target")
IDS = ("ids", "id")
NAMES = ("name", "names", "path", "paths", "key", "keys")
ITEMS = (*IDS, *NAMES, "item", "file", "filename", "image")
"""Usual names of columns: of vectors, labels, ids, and names of items."""
_CELL = 64  # approximate bytes of a Python object and its list entry
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")


def first_of(names: Sequence[str], there: Sequence[str]) -> str | None:
    """The first of ``names`` in ``there``."""
    return next((name for name in names if name in there), None)


class Table:
    """Columns by name. ``read`` gives one as a list of texts, or as a ``pyarrow.ChunkedArray``, when it is needed.

    ``types`` are those of Arrow (empty: texts). ``where`` names the table in errors; ``memory`` is the budget in bytes for the cells of a
    column (default: free memory).
    """

    def __init__(
        self,
        where: str,
        names: Sequence[str],
        read: Callable[[str], Any],
        types: Sequence[Any] = (),
        memory: int | None = None,
    ) -> None:
        self.where, self.names, self._read, self.memory = where, list(names), read, memory
        self.types = dict(zip(names, types, strict=False))

    def check(self, *names: str, remedy: str = "") -> None:
        """Raises DataError: there is no such column, or two."""
        for name in names:
            if self.names.count(name) != 1:
                there = ", ".join(repr(known[:40]) for known in self.names[:20])
                what = f"the column {name!r} twice" if name in self.names else f"no column {name!r}"
                raise DataError(f"{self.where} has {what} (it has {there}){remedy}")

    def column(self, name: str) -> Any:
        """A list of texts or a ``pyarrow.ChunkedArray``. Raises DataError: see :meth:`check`."""
        self.check(name)
        return self._read(name)

    def cells(self, name: str) -> list[Any]:
        """A column as Python values, one per row; equal texts are one object. Raises DataError: see :meth:`check`; too large."""
        column = self.column(name)
        if isinstance(column, list):
            return column
        values = sum(len(chunk.flatten()) if is_list(chunk.type) else 0 for chunk in column.chunks)
        check_memory((len(column) + values) * _CELL, f"{self.where}: {name!r}", self.memory)
        return [cell for chunk in column.chunks for cell in cells_of(chunk)]

    def holds_lists(self, name: str) -> bool:
        """Whether a column has a list in each row."""
        return name in self.types and is_list(self.types[name])

    def holds_texts(self, name: str) -> bool:
        """Whether a column has texts, and not all of them are whole numbers in a text file."""
        if self.types:
            return is_text(self.types[name])
        return not all(map(_INTEGER.fullmatch, self.cells(name)))

    def labels_in(self, name: str, class_names: Sequence[str] | None = None) -> Labels | None:
        """Labels from numbers (-1 or empty: none), names, or lists of these; None if no item has any. ``class_names`` of numbers."""
        cells = [label_cell(value) for value in self.cells(name)]
        if not any(cells):
            return None
        where = f"{self.where}: {name!r}"
        if class_names is None:
            return labels_from_cells(cells, where)
        known = {str(i): text for i, text in enumerate(class_names)}
        unknown = next((text for cell in cells for text in cell if text not in known), None)
        if unknown is not None:
            raise DataError(f"{where}: class {unknown} of {len(known)}: labels do not fit their class names")
        return Labels.from_names([tuple(known[text] for text in cell) for cell in cells], class_names)

    def ids(self, name: str) -> NDArray[np.int64]:
        """Raises DataError: not whole numbers of 64 bits, or one is missing."""
        column, where = self.column(name), f"{self.where}: {name!r}"
        if isinstance(column, list):
            try:
                return np.array([int(text) for text in column], dtype=np.int64)
            except (ValueError, OverflowError) as error:
                raise DataError(f"{where}: ids are whole numbers of 64 bits ({one_line(error)})") from None
        if column.null_count or not is_number(column.type) or "int" not in str(column.type):
            found = f"{column.type}, {column.null_count:,} cells are empty"
            raise DataError(
                f"{where} is {found}: ids are whole numbers, one in each row; texts may be names (names=...)"
            )
        return as_int64(column.to_numpy(), where)

    def describe(
        self,
        label: str | None = None,
        *,
        labels: bool = True,
        ids: str | None = None,
        names: str | None = None,
        keep: Sequence[str] = (),
        class_names: Sequence[str] | None = None,
    ) -> tuple[About, set[str | None]]:
        """Labels, ids and texts of the rows, and the columns they are from. What is not named is found by its usual name.

        Args:
            labels: whether labels are wanted.
            class_names: names of class numbers.
        """
        self.check(*keep, remedy=": name it with --read keep")
        if label is not None:
            self.check(label, remedy=": name it with --read label_column")
        label = (label or first_of(LABELS, self.names)) if labels else None
        notes = []
        if ids is None and (guess := first_of(IDS, self.names)) is not None:
            if not self.holds_texts(guess):
                ids = guess
            elif names is None:
                names = guess
                notes.append(f"{guess!r} holds texts: they are the names; ids are row numbers")
        names = names or first_of(NAMES, [name for name in self.names if not self.holds_lists(name)])
        found = None if label is None else self.labels_in(label, class_names)
        columns = {name: name for name in keep} | ({} if names is None else {"name": names})
        texts = {
            name: as_texts("" if value is None else str(value) for value in self.cells(column))
            for name, column in columns.items()
        }
        if labels:
            notes.append("no labels" if found is None else f"labels from column {label!r}")
        about = About(found, None if ids is None else self.ids(ids), texts, notes)
        return about, {label, ids, names, *keep}

    def vectors(self, wanted: str | None, used: set[str | None], remedy: str) -> str | None:
        """The column of vectors: ``wanted``, one of :data:`FEATURES`, or the only unused column of lists; None: there is no list."""
        lists = [name for name in self.names if name not in used and self.holds_lists(name)]
        found = wanted or first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
        if (found is None and lists) or (found is not None and found not in lists):
            what = f"{found!r} is not a column of lists" if found else "which column holds the vectors?"
            there = ", ".join(lists[:20] if found is None else self.names[:20])
            raise DataError(f"{self.where}: {what} (there are: {there}): {remedy}")
        return found


def parquet_table(path: Path, what: str, memory: int | None = None) -> Table:
    """The columns of a Parquet file, decoded when they are needed."""
    with open_parquet(path, what) as file:
        schema = file.schema_arrow
    return Table(
        str(path), schema.names, lambda name: read_column(path, name, what, memory), schema.types, memory
    )


def csv_header(text: str) -> tuple[list[str], str]:
    """The columns that the first line names, and what separates them: what is most in it of commas, semicolons and tabs."""
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    return [name.strip() for name in next(csv.reader([first], delimiter=separator), [])], separator


def csv_table(path: Path, what: str) -> Table:
    """A text with a header line (:func:`csv_header`). Blank lines are skipped. Raises DataError: not a text, empty, or a line of another
    length."""
    text = read_text(path, what)
    header, separator = csv_header(text)
    if not any(header):
        raise DataError(f"{path} is empty, or its first line is: {what} with a header line is needed")
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    columns: list[list[Any]] = [[] for _ in header]
    try:
        next(reader)
        for row in reader:
            if not any(cell.strip() for cell in row):
                continue
            if len(row) != len(header):
                raise csv.Error(f"{len(row)} fields, the header has {len(header)}")
            for column, cell in zip(columns, row, strict=True):
                column.append(cell.strip())
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num} is not CSV: {error}") from None
    return Table(str(path), header, lambda name: columns[header.index(name)])


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its ending."""
    return path.suffix.lower() in (".parquet", ".pq")

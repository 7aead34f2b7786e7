"""Tables by the names of their columns, in any form: CSV, Parquet, ``.npz``, HDF5, and Arrow's in memory.

Run lengths and dictionaries of Parquet can expand a few bytes to any size. So the decoded size of a column is computed from the file's
counts before it is read, and repeated texts are kept once.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, one_line
from ..inputs import check_file, check_memory, read_text
from ..store import Hdf5Array, Texts, as_texts, read_hdf5_array
from .arrays import HeldArray, Matrix, npz_array, open_npz, whole_numbers
from .labels import Labels, errors_of, label_cell, labels_of

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr_0")
LABELS = ("labels", "label", "y", "class", "classes", "category", "fine_label", "target")
IDS = ("ids", "id")
NAMES = ("name", "names", "path", "paths", "key", "keys")
ITEMS = (*IDS, *NAMES, "item", "file", "filename", "image")
"""Usual names of columns: of vectors, labels, ids, and names of items."""
_CELL = 64  # approximate bytes of a Python object and its list entry
_INTEGER = re.compile(r"[+-]?[0-9]{1,30}")
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12, "BYTE_ARRAY": 8}
_LEVELS = 4  # bytes per value for nesting while decoding
NUMBERS = ("integer", "number")
_KINDS = {
    "list": r"(large_|fixed_size_)?list<.*",
    "text": r"(dictionary<values=)?(large_)?string.*",
    "integer": r"u?int\d+",
    "number": r"halffloat|float|double",
}


def first_of(names: Sequence[str], there: Sequence[str]) -> str | None:
    """The first of ``names`` in ``there``."""
    return next((name for name in names if name in there), None)


def kind_of(arrow_type: Any) -> str:
    """What values of an Arrow type are: ``list``, ``text``, ``integer``, ``number`` (with a point), or ``other``."""
    return next((k for k, form in _KINDS.items() if re.fullmatch(form, str(arrow_type), re.DOTALL)), "other")


@dataclass(frozen=True)
class Options:
    """What :func:`.open.open_data`, where it is documented, passes to the opener of a source."""

    label_column: str | None = None
    label_file: str | None = None
    want_labels: bool = True
    ids: str | None = None
    id_file: str | None = None
    names: str | None = None
    vectors: Any = None
    keep: Sequence[str] = ()
    root: str | None = None
    image_column: str | None = None
    concepts: int | None = None
    max_bad: float = 0.01
    download: bool = True
    memory: int | None = None


PLAIN = Options()


@dataclass
class About:
    """What is known of items besides their contents, as the attributes of a data set."""

    labels: Labels | None = None
    ids: NDArray[np.int64] | None = None
    texts: dict[str, Texts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ids_of(self, n: int, name: str) -> NDArray[np.int64]:
        """The ids of ``n`` items; default: the row numbers."""
        ids = np.arange(n, dtype=np.int64) if self.ids is None else self.ids
        if len(ids) != n:
            raise DataError(f"{name} has {n:,} items but {len(ids):,} ids: one each is needed")
        return ids

    def mark(self) -> str:
        """The labels in a fingerprint."""
        return "" if self.labels is None else self.labels.fingerprint()


@dataclass
class Table:
    """Columns by name.

    Attributes:
        where: the table, in errors.
        read: name -> a list of texts, an array, an :class:`.store.Hdf5Array`, or a ``pyarrow.ChunkedArray``, read when it is needed.
        kind: name -> the kind of its values (:func:`kind_of`); those of a text file are ``text``.
        memory: budget in bytes for a column (default: free memory).
        class_names: name of a column of labels -> names of the class numbers.
    """

    where: str
    names: list[str]
    read: Callable[[str], Any]
    kind: Callable[[str], str] = lambda name: "text"
    memory: int | None = None
    class_names: Callable[[str], Sequence[str] | None] = lambda name: None

    def check(self, name: str, remedy: str = "") -> None:
        """Raises DataError: there is no such column, or two."""
        if self.names.count(name) != 1:
            there = ", ".join(repr(known[:40]) for known in self.names[:20])
            what = f"the column {name!r} twice" if name in self.names else f"no column {name!r}"
            raise DataError(f"{self.where} has {what} (it has {there}){remedy}")

    def column(self, name: str, remedy: str = "") -> Any:
        """See :attr:`read`. Raises DataError: see :meth:`check`."""
        self.check(name, remedy)
        return self.read(name)

    def array(self, name: str, remedy: str = "") -> Any:
        """:meth:`column`, one of a file read into memory."""
        column = self.column(name, remedy)
        if isinstance(column, Hdf5Array):
            size = 2 * math.prod(column.shape) * column.dtype.itemsize
            check_memory(size, f"{self.where}: {name!r}", self.memory)
            return column.read(slice(None))
        return column

    def cells(self, name: str, remedy: str = "") -> list[Any]:
        """A column as Python values, one per row; equal texts are one object. Raises DataError: see :meth:`column`; too large."""
        column = self.array(name, remedy)
        if isinstance(column, list):
            return column
        if isinstance(column, np.ndarray):
            return list(column.tolist())
        values = sum(len(chunk.flatten()) if kind_of(chunk.type) == "list" else 0 for chunk in column.chunks)
        check_memory((len(column) + values) * _CELL, f"{self.where}: {name!r}", self.memory)
        return [cell for chunk in column.chunks for cell in _cells(chunk)]

    def holds_texts(self, name: str) -> bool:
        """Whether a column has texts, and not all of them are whole numbers in a text file."""
        if self.kind(name) != "text":
            return False
        column = self.read(name)
        return not (isinstance(column, list) and all(map(_INTEGER.fullmatch, column)))

    def labels(self, name: str) -> Labels | None:
        """Labels from numbers (-1 or empty: none), names, or lists of these; None if no item has any."""
        values, where = self.array(name, ": name it with --read label_column"), f"{self.where}: {name!r}"
        if not isinstance(values, np.ndarray):
            with errors_of(where):
                values = [label_cell(value) for value in self.cells(name)]
            if not any(values):
                return None
        return labels_of(values, where, class_names=self.class_names(name))

    def ids(self, name: str) -> NDArray[np.int64]:
        """Raises DataError: not whole numbers of 64 bits, or one is missing."""
        column = self.array(name)
        if isinstance(column, list):
            texts = np.array(column)
            with contextlib.suppress(ValueError, OverflowError):
                texts = np.array([int(text) for text in column], dtype=np.int64)
            column = texts
        column = column if isinstance(column, np.ndarray) else column.to_numpy()  # float64 if cells are empty
        return whole_numbers(column, f"{self.where}: {name!r}")

    def texts(self, name: str, remedy: str = "") -> Texts:
        """A column as texts; empty where there is no value."""
        return as_texts("" if value is None else str(value) for value in self.cells(name, remedy))

    def describe(self, o: Options) -> tuple[About, set[str | None]]:
        """Labels (if they are wanted), ids and texts of the rows, and the columns they are from: by their usual names if none is given."""
        about, ids, names = About(), o.ids, o.names
        label = o.label_column or (first_of(LABELS, self.names) if o.want_labels else None)
        if ids is None and (guess := first_of(IDS, self.names)) is not None:
            if not self.holds_texts(guess):
                ids = guess
            elif names is None:
                names = guess
                about.notes.append(f"{guess!r} holds texts: they are the names; ids are row numbers")
        names = names or first_of(NAMES, [name for name in self.names if self.kind(name) != "list"])
        about.texts = {name: self.texts(name, ": name it with --read keep") for name in o.keep}
        if names is not None:
            about.texts["name"] = self.texts(names)
        if o.want_labels:
            about.labels = None if label is None else self.labels(label)
            about.notes.append("no labels" if about.labels is None else f"labels from column {label!r}")
        about.ids = None if ids is None else self.ids(ids)
        return about, {label, ids, names, *o.keep}

    def vectors(self, used: set[str | None], wanted: str | None = None) -> str | None:
        """The column of vectors: ``wanted``, one of :data:`FEATURES`, or the only unused list; None: there is no list."""
        lists = [name for name in self.names if name not in used and self.kind(name) == "list"]
        found = wanted or first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
        if found is not None:
            self.check(found)
        if found in lists or not (found or lists):
            return found
        what = f"{found!r} is not a column of lists" if found else "which column holds the vectors?"
        there = ", ".join(lists[:20]) or "none"
        raise DataError(f"{self.where}: {what} (there are: {there}): name it with --read vectors")

    def matrix(self, name: str) -> Matrix:
        """A column of vectors. Raises DataError: not numbers, or of unlike widths."""
        column = self.column(name)
        if isinstance(column, Hdf5Array):
            return column
        if not isinstance(column, np.ndarray):
            column = matrix_of(column, f"{self.where}: {name!r}")
        return HeldArray(column)


# Forms ------------------------------------------------------------------------------------------------------------------


def csv_header(text: str) -> tuple[list[str], str]:
    """The columns that the first line names, and what separates them: what is most in it of commas, semicolons and tabs."""
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    return [name.strip() for name in next(csv.reader([first], delimiter=separator), [])], separator


def csv_table(path: Path, what: str) -> Table:
    """A text with a header line. Blank lines are skipped. Raises DataError: not a text, empty, or a line of another length."""
    text = read_text(path, what)
    header, separator = csv_header(text)
    if not any(header):
        raise DataError(f"{path} is empty, or its first line is: {what} with a header line is needed")
    reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
    rows: list[list[str]] = []
    try:
        next(reader)
        for row in reader:
            cells = [cell.strip() for cell in row]
            if any(cells):
                rows.append(cells)
            if any(cells) and len(row) != len(header):
                raise csv.Error(f"{len(row)} fields, the header has {len(header)}")
    except csv.Error as error:
        raise DataError(f"{path} line {reader.line_num} is not CSV: {error}") from None
    return Table(str(path), header, lambda name: [row[header.index(name)] for row in rows])


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet by its ending."""
    return path.suffix.lower() in (".parquet", ".pq")


def arrow_table(where: str, schema: Any, read: Callable[[str], Any], memory: int | None = None) -> Table:
    """A table of Arrow's types."""
    types = dict(zip(schema.names, schema.types, strict=True))
    return Table(where, schema.names, read, lambda name: kind_of(types[name]), memory)


def parquet_table(path: Path, what: str, memory: int | None = None) -> Table:
    """The columns of a Parquet file, decoded when they are needed."""

    def read(name: str) -> Any:
        with open_parquet(path, what) as file:
            stored = [file.schema.column(i) for i in leaves(file, name)]
            remedy = "make it smaller; vectors in .npy are streamed"
            check_memory(_decoded_bytes(file, name), f"{path}: {name!r}", memory, remedy)
        texts = [leaf.path for leaf in stored if leaf.physical_type == "BYTE_ARRAY"]
        with open_parquet(path, what, texts) as file:
            return file.read(columns=[name])[name]

    with open_parquet(path, what) as file:
        return arrow_table(str(path), file.schema_arrow, read, memory)


def array_table(path: Path, o: Options) -> Table:
    """The arrays of an ``.npz``; of an HDF5 file those with usual names of vectors, ids and (if wanted) labels."""
    arrays: dict[str, Any] = {}
    if path.suffix.lower() == ".npz":
        with open_npz(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    else:
        for group in ((o.vectors or "", *FEATURES), IDS, LABELS if o.want_labels else (), ("codebooks",)):
            if (found := read_hdf5_array(path, group)) is not None:
                arrays[found.name] = found
        names = list(arrays)

    def read(name: str) -> Any:
        if name not in arrays:
            arrays[name] = npz_array(path, name, o.memory)
        return arrays[name]

    def kind(name: str) -> str:
        if name in FEATURES or len(read(name).shape) != 1:
            return "list"
        return {"U": "text", "i": "integer", "u": "integer"}.get(read(name).dtype.kind, "other")

    def classes(name: str) -> Any:
        return read("class_names").tolist() if "class_names" in names else None

    return Table(str(path), names, read, kind, o.memory, classes)


# Parquet and Arrow ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_parquet(path: Path, what: str, texts: Sequence[str] = ()) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile`` of ``what``, its checksums verified; the columns ``texts`` are read as dictionaries."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    check_file(path, what)
    try:
        with pyarrow.parquet.ParquetFile(
            path, read_dictionary=list(texts), page_checksum_verification=True
        ) as file:
            yield file
    except MemoryError:  # pyarrow's is also an ArrowException
        raise DataError(f"{path} does not fit in memory: write it with smaller row groups") from None
    except (pyarrow.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
        why = one_line(error, 120)
        raise DataError(f"{path} is not a Parquet file, or empty, truncated or damaged ({why})") from None


def leaves(file: Any, column: str) -> list[int]:
    """Indices of the stored columns of the schema's ``column``."""
    names = [file.schema.column(i).path for i in range(len(file.schema))]
    return [i for i, name in enumerate(names) if name == column or name.startswith(f"{column}.")]


def _decoded_bytes(file: Any, column: str) -> int:
    """Decoded size of ``column`` in bytes, by the file's counts."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    total = 0
    for leaf in leaves(file, column):
        kind = file.schema.column(leaf)
        width = kind.length if kind.physical_type == "FIXED_LEN_BYTE_ARRAY" else _WIDTHS[kind.physical_type]
        for chunk in (group.column(leaf) for group in groups):
            total += chunk.num_values * (width + _LEVELS)
            total += chunk.total_uncompressed_size * (kind.physical_type == "BYTE_ARRAY")
    return int(total)


def _cells(array: Any) -> list[Any]:
    """Python values of an Arrow array; dictionary values are shared."""
    kind = str(array.type)
    if kind.startswith("dictionary"):
        words = array.dictionary.to_pylist()
        return [None if i is None else words[i] for i in array.indices.to_pylist()]
    if kind_of(array.type) == "list" and "dictionary<" in kind:
        values, ends, there = _cells(array.values), array.offsets.to_pylist(), array.is_valid().to_pylist()
        return [values[ends[i] : ends[i + 1]] if there[i] else None for i in range(len(array))]
    return list(array.to_pylist())


def matrix_of(column: Any, where: str, *, start: int = 0, width: int = 0) -> NDArray[Any]:
    """An Arrow ``ChunkedArray`` of lists of numbers as one array [n, width], from row ``start``; width 0: that of the first row. Raises
    DataError: rows of different lengths, missing rows or missing numbers."""
    column = column.combine_chunks()
    nulls = np.flatnonzero(np.asarray(column.is_null()))
    if nulls.size:
        raise DataError(f"{where} has no vector at {named_rows(nulls + start)}: leave these rows out")
    flat = column.flatten()
    if kind_of(flat.type) not in NUMBERS or flat.null_count:
        found = "missing numbers" if flat.null_count else f"lists of {flat.type}"
        raise DataError(f"{where} holds {found} (from row {start:,}): vectors of numbers are needed")
    fixed = getattr(column.type, "list_size", None)
    lengths = np.diff(np.asarray(column.offsets)) if fixed is None else np.full(len(column), fixed)
    width = width or (int(lengths[0]) if len(lengths) else 0)
    wrong = np.flatnonzero(lengths != width)
    if wrong.size:
        found = f"{int(lengths[wrong[0]])} numbers at {named_rows(wrong + start)}"
        raise DataError(f"{where} has {found}, {width} elsewhere: one width is needed")
    return np.asarray(flat.to_numpy(zero_copy_only=False).reshape(len(column), width))


class ArrowMatrix:
    """A column of lists in Arrow's form, in memory or mapped from a file. Raises DataError: not lists of numbers of one width."""

    def __init__(self, column: Any, where: str) -> None:
        self.column, self.where, self._width = column, where, 0
        first = self.read(slice(0, 1))
        self._width, self.dtype = first.shape[1], first.dtype
        self.shape = (len(column), self._width)

    def read(self, rows: slice | NDArray[np.int64]) -> NDArray[Any]:
        """See :class:`.arrays.Matrix`."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self.column))
            part = self.column.slice(start, max(0, stop - start))
        else:
            start, part = int(rows[0]) if len(rows) else 0, self.column.take(rows)
        return matrix_of(part, self.where, start=start, width=self._width)

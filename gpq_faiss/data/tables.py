"""Tables by the names of their columns, in any form: CSV, Parquet, ``.npz``, HDF5, and Arrow's in memory.

Run lengths and dictionaries of Parquet can expand a few bytes to any size. So the decoded size of a column is computed from the file's
counts before it is read, and repeated texts are kept once.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import io
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, optional
from ..inputs import check_memory, read_text, reading
from ..store.hdf5 import Hdf5Array, Texts, as_texts, read_hdf5_array
from .arrays import Matrix, NpyArray, npz_array, read_npy, whole_numbers
from .labels import Labels, Rows, errors_of, label_cell, labels_of, row_numbers
from .paths import local_path

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr_0")
LABELS = ("labels", "label", "y", "class", "classes", "category", "fine_label", "target")
IDS = ("ids", "id")
NAMES = ("name", "names", "path", "paths", "key", "keys")
ITEMS = (*IDS, *NAMES, "item", "file", "filename", "image")
"""Usual names of columns: of vectors, labels, ids, and names of items."""
_TABLE = "a table with a column of ids or names (id, name ...) and one of labels (label, or --read label_column), with a header line"
_CELL = 64  # approximate bytes of a Python object and its list entry
_ZEROS_AND_ONES = re.compile(r"[01](?:[,;\s]+[01])+")
_COLUMNS = re.compile(r".*[,;\t].*|\d+(?:\s+\d+)+")
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
    """What is known of N items besides their contents.

    Attributes:
        labels: None if the source has none.
        ids: int64 [N], returned by searches; None: the row numbers.
        texts: text columns, StringDType [N]; ``name`` is the path or key of an item.
        notes: remarks on loading, for the user.
    """

    labels: Labels | None = field(default=None, repr=False)
    ids: NDArray[np.int64] | None = field(default=None, repr=False)
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=list)

    def mark(self) -> str:
        """The labels in a fingerprint."""
        return "" if self.labels is None else self.labels.fingerprint()


@dataclass
class Table:
    """Columns by name.

    Attributes:
        where: the table, in errors.
        read: name -> a list of texts, an array, a :class:`.arrays.Matrix`, or a ``pyarrow.ChunkedArray``, read when it is needed.
        kind: name -> the kind of its values (:func:`kind_of`).
        memory: budget in bytes for a column (default: free memory).
        class_names: name of a column of labels -> names of the class numbers.
    """

    where: str
    names: list[str]
    read: Callable[[str], Any]
    kind: Callable[[str], str] = lambda name: "text"
    memory: int | None = None
    class_names: Callable[[str], Sequence[str] | None] = lambda name: None

    def column(self, name: str, remedy: str = "") -> Any:
        """See :attr:`read`. Raises DataError: there is no such column, or two."""
        if self.names.count(name) != 1:
            there = ", ".join(repr(known[:40]) for known in self.names[:20])
            what = f"the column {name!r} twice" if name in self.names else f"no column {name!r}"
            raise DataError(f"{self.where} has {what} (it has {there}){remedy}")
        return self.read(name)

    def cells(self, name: str, remedy: str = "") -> list[Any]:
        """A column as Python values, one per row; equal texts are one object. Raises DataError: see :meth:`column`; too large."""
        column = self.column(name, remedy)
        if isinstance(column, list | np.ndarray):
            return list(column if isinstance(column, list) else column.tolist())
        values = sum(len(chunk.flatten()) if kind_of(chunk.type) == "list" else 0 for chunk in column.chunks)
        check_memory((len(column) + values) * _CELL, f"{self.where}: {name!r}", self.memory)
        return [cell for chunk in column.chunks for cell in _cells(chunk)]

    def labels(self, name: str) -> Labels | None:
        """Labels from numbers (-1 or empty: none), names, or lists of these; None if no item has any."""
        values, where = self.column(name, ": name it with --read label_column"), f"{self.where}: {name!r}"
        if not isinstance(values, np.ndarray):
            with errors_of(where):
                values = [label_cell(value) for value in self.cells(name)]
            if not any(values):
                return None
        return labels_of(values, where, class_names=self.class_names(name))

    def ids(self, name: str) -> NDArray[np.int64]:
        """Raises DataError: not whole numbers of 64 bits, or one is missing."""
        column = self.column(name)
        if isinstance(column, list):
            with contextlib.suppress(ValueError, OverflowError):
                column = np.array([int(text) for text in column], dtype=np.int64)
        # Arrow's is float64 if cells are empty.
        column = column.to_numpy() if hasattr(column, "chunks") else np.asarray(column)
        return whole_numbers(column, f"{self.where}: {name!r}")

    def texts(self, name: str, remedy: str = "") -> Texts:
        """A column as texts; empty where there is no value."""
        return as_texts("" if value is None else str(value) for value in self.cells(name, remedy))

    def describe(self, o: Options, paths: str | None = None) -> tuple[About, set[str | None]]:
        """Labels (if they are wanted), ids and texts of the rows, and the columns they are from: by their usual names if none is given.
        ``paths``: a column for names."""
        about, ids, names = About(), o.ids, o.names
        label = o.label_column or (first_of(LABELS, self.names) if o.want_labels else None)
        if ids is None and (guess := first_of(IDS, self.names)) is not None:
            if self.kind(guess) != "text":
                ids = guess
            elif names is None:
                names = guess
                about.notes.append(f"{guess!r} holds texts: they are the names; ids are row numbers")
        names = names or paths or first_of(NAMES, [name for name in self.names if self.kind(name) != "list"])
        about.texts = {name: self.texts(name, ": name it with --read keep") for name in o.keep}
        if names is not None:
            about.texts["name"] = self.texts(names)
        if o.want_labels:
            about.labels = None if label is None else self.labels(label)
            about.notes.append("no labels" if about.labels is None else f"labels from column {label!r}")
        about.ids = None if ids is None else self.ids(ids)
        return about, {label, ids, names, *o.keep}

    def vectors(self, used: set[str | None], wanted: Any, numbers: bool = False) -> Matrix:
        """The column of lists ``wanted``, one of :data:`FEATURES`, or the only unused one; with ``numbers`` also several columns of
        numbers, one per dimension (default: all unused ones). Raises DataError: not numbers, of unlike widths, or unclear."""
        unused = [name for name in self.names if name not in used]
        lists = [name for name in unused if self.kind(name) == "list"]
        usual = first_of(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
        one = wanted or usual
        chosen: list[str] = [one] if isinstance(one, str) else list(one or ())
        columns = [self.column(name) for name in chosen]
        if len(chosen) == 1 and chosen[0] in lists:
            where = f"{self.where}: {chosen[0]!r}"
            return ArrowMatrix(columns[0], where) if hasattr(columns[0], "chunks") else columns[0]
        if (numbers and not isinstance(wanted, str) and not lists) or len(chosen) > 1:
            chosen = chosen or [name for name in unused if self.kind(name) in NUMBERS]
            if chosen and all(self.kind(name) in NUMBERS for name in chosen):
                return np.column_stack([self.column(name).to_numpy() for name in chosen])
        what = ", ".join(map(repr, chosen))
        what = f"{what}: not lists of numbers" if chosen else "which column holds the vectors?"
        there = ", ".join((lists or self.names)[:20]) or "none"
        there = f"there are: {there}" if lists else f"it has {there}"
        raise DataError(f"{self.where}: {what} ({there}): name it 'features', or with --read vectors")


# Forms ------------------------------------------------------------------------------------------------------------------


def open_table(path: Path, what: str, o: Options = PLAIN, form: str = "") -> Table:
    """The columns of a file of any of the forms (by its ending, if none is named); text is CSV, of ``what``."""
    form = form or path.suffix.lower()[1:]
    if form in ("parquet", "pq"):
        return parquet_table(path, o.memory)
    return array_table(path, o) if form in ("npy", "npz", "h5", "hdf5") else csv_table(path, what)


def csv_table(path: Path, what: str) -> Table:
    """A text with a header line, separated by what is most in that: commas, semicolons or tabs. Blank lines are skipped. Raises DataError:
    not a text, empty, or (at the first column that is read) a line of another length."""
    text = read_text(path, what)
    first = text.partition("\n")[0]
    separator = max(",;\t", key=first.count)
    header = [name.strip() for name in next(csv.reader([first], delimiter=separator), [])]
    if not any(header):
        raise DataError(f"{path} is empty, or its first line is: {what} with a header line is needed")

    @functools.cache
    def rows() -> list[list[str]]:
        reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
        found: list[list[str]] = []
        try:
            for row in reader:
                cells = [cell.strip() for cell in row]
                found += [cells] * any(cells)
                if any(cells) and len(row) != len(header):
                    raise csv.Error(f"{len(row)} fields, the header has {len(header)}")
        except csv.Error as error:
            raise DataError(f"{path} line {reader.line_num} is not CSV: {error}") from None
        return found[1:]

    def read(name: str) -> list[str]:
        return [row[header.index(name)] for row in rows()]

    def kind(name: str) -> str:
        return "integer" if all(map(_INTEGER.fullmatch, read(name))) else "text"

    return Table(str(path), header, read, kind)


def arrow_table(where: str, schema: Any, read: Callable[[str], Any], memory: int | None = None) -> Table:
    """A table of Arrow's types."""
    types = dict(zip(schema.names, schema.types, strict=True))
    return Table(where, schema.names, read, lambda name: kind_of(types[name]), memory)


def parquet_table(path: Path, memory: int | None = None) -> Table:
    """The columns of a Parquet file, decoded when they are needed."""

    def read(name: str) -> Any:
        with _parquet(path) as file:
            names = [file.schema.column(i).path for i in range(len(file.schema))]
            leaves = [i for i, leaf in enumerate(names) if leaf == name or leaf.startswith(f"{name}.")]
            texts = [names[i] for i in leaves if file.schema.column(i).physical_type == "BYTE_ARRAY"]
            for i in range(file.num_row_groups):  # where reading a row raises, metadata end the process
                next(file.iter_batches(1, row_groups=[i], columns=[name]), None)
            remedy = "make it smaller; vectors in .npy are streamed"
            check_memory(_decoded_bytes(file, leaves), f"{path}: {name!r}", memory, remedy)
        with _parquet(path, texts) as file:
            return file.read(columns=[name])[name]

    with _parquet(path) as file:
        return arrow_table(str(path), file.schema_arrow, read, memory)


def array_table(path: Path, o: Options = PLAIN) -> Table:
    """The array of a ``.npy``, the arrays of an ``.npz``; of HDF5 those with usual names of vectors, ids and (if wanted) labels."""
    arrays: dict[str, Any] = {}
    suffix = path.suffix.lower()
    if suffix == ".npy":
        arrays["arr_0"] = NpyArray(path)
    elif suffix == ".npz":
        with reading(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
            names = [name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")]
    else:
        for group in ((o.vectors or "", *FEATURES), IDS, LABELS if o.want_labels else (), ("codebooks",)):
            if (found := read_hdf5_array(path, group)) is not None:
                arrays[found.name] = found
    names = names if suffix == ".npz" else list(arrays)

    def read(name: str) -> Any:
        if name not in arrays:
            arrays[name] = npz_array(path, name, o.memory)
        found = arrays[name]
        if name in (*IDS, *LABELS) and isinstance(found, Hdf5Array):
            check_memory(2 * math.prod(found.shape) * found.dtype.itemsize, f"{path}: {name!r}", o.memory)
            arrays[name] = found[:]
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
def _parquet(path: Path, texts: Sequence[str] = ()) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``, its checksums verified; the columns ``texts`` are read as dictionaries."""
    remedy = f"reading {path} needs pyarrow: pip install 'gpq-faiss[parquet]'"
    parquet = optional("pyarrow.parquet", remedy, DataError)
    with (
        reading(path, "a Parquet file"),
        parquet.ParquetFile(path, read_dictionary=list(texts), page_checksum_verification=True) as file,
    ):
        yield file


def _decoded_bytes(file: Any, leaves: Sequence[int]) -> int:
    """Decoded size in bytes of the stored columns ``leaves``, by the file's counts."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    total = 0
    for leaf in leaves:
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


class ArrowMatrix:
    """A column of lists in Arrow's form, in memory or mapped from a file. Raises DataError, also where it is read: not lists of numbers
    of one width, missing rows or missing numbers."""

    def __init__(self, column: Any, where: str) -> None:
        self.column, self.where, self.shape = column, where, (len(column), 0)
        first = self[:1]
        self.shape, self.dtype = (len(column), first.shape[1]), first.dtype

    def __getitem__(self, rows: Rows) -> NDArray[Any]:
        at, where = row_numbers(rows, len(self.column)), self.where
        part = (
            self.column.slice(at[0], len(at)) if isinstance(rows, slice) and len(at) else self.column.take(at)
        )
        part = part.combine_chunks()
        nulls = np.flatnonzero(np.asarray(part.is_null()))
        if nulls.size:
            raise DataError(f"{where} has no vector at {named_rows(at[nulls])}: leave these rows out")
        flat = part.flatten()
        if kind_of(flat.type) not in NUMBERS or flat.null_count:
            found = "missing numbers" if flat.null_count else f"lists of {flat.type}"
            raise DataError(f"{where} holds {found} (from row {at[0]:,}): vectors of numbers are needed")
        fixed = getattr(part.type, "list_size", None)
        lengths = np.diff(np.asarray(part.offsets)) if fixed is None else np.full(len(part), fixed)
        width = self.shape[1] or int(lengths[0] if len(lengths) else 0)
        wrong = np.flatnonzero(lengths != width)
        if wrong.size:
            found = f"{int(lengths[wrong[0]])} numbers at {named_rows(at[wrong])}"
            raise DataError(f"{where} has {found}, {width} elsewhere: one width is needed")
        return np.asarray(flat.to_numpy(zero_copy_only=False).reshape(len(part), width))


# Lists of labels -------------------------------------------------------------------------------------------------------


def read_labels(path: str, n: int) -> Labels:
    """The labels of ``n`` items from ``.npy`` (class numbers [N], -1 for none, or 0/1 [N, C]), or from text with one item per line
    (an empty line is unlabelled): a class number, a name, several separated by ``|``, or 0/1 per class; a header line is skipped.
    """
    file = local_path(path)
    if file.suffix == ".npy":
        return labels_of(read_npy(file), str(file), n)
    lines = [line.strip() for line in read_text(file, "labels, one item per line,").split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    lines = lines[1:] if len(lines) == n + 1 else lines
    rows = [re.findall("[01]", line) for line in lines if _ZEROS_AND_ONES.fullmatch(line)]
    if len(rows) == len(lines) == n and len({len(row) for row in rows}) == 1:
        return labels_of(np.array(rows) == "1", str(file), n)
    wrong = next((line for line in lines if _COLUMNS.fullmatch(line)), None)
    what = f"lines of several columns, not all of them 0 or 1 of every class ({str(wrong)[:60]!r})"
    # Trailing unlabelled items may have lost their empty lines, but guessing would be worse.
    what = what if len(lines) == n else f"{len(lines):,} lines of labels, the data has {n:,} items"
    if len(lines) != n or wrong is not None:
        raise DataError(f"{file} has {what}: give one label per line, or {_TABLE}")
    return labels_of(lines, str(file))


def told(path: str, labels: Labels, how: str = "in their order") -> str:
    """A note on labels of a file."""
    share = f"{int(labels.has().sum()):,} of {len(labels):,} items are labelled"
    return f"{Path(path).name}: {share}, {how}; {labels.n_classes:,} classes"

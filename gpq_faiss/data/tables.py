"""Tables: named columns of a file or an object, and which of them are labels, ids, names and vectors.

Parquet, Arrow, ORC and CSV are read by pyarrow, arrays by numpy, h5py, SciPy and safetensors.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, one_line, optional
from ..inputs import parse_json, read_text, reading
from ..store.hdf5 import Hdf5Array, Texts, as_texts
from .arrays import (
    BINS,
    VECS,
    JoinedMatrix,
    LazyArray,
    Matrix,
    NpyArray,
    npz_member,
    open_vecs,
    whole_numbers,
)
from .images import is_image_name, without_gradient
from .labels import Labels, errors_of, labels_note, labels_of, plain_text

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr0")
LABELS = ("labels", "label", "y", "class", "classes", "category", "finelabel", "target", "targets")
LABELS += (
    "categories",
    "classname",
    "labelname",
    "labelid",
    "classid",
    "categoryid",
    "tag",
    "tags",
)
IDS = ("ids", "id", "imageid", "itemid", "imgid", "uid")
IMAGES = ("image", "imagepath", "path", "filepath", "filename", "file", "img", "images")
NAMES = ("name", "names", "path", "paths", "key", "keys", *IMAGES)
ITEMS = (*IDS, *NAMES, "item", "index", "unnamed0", "")
"""Usual names of columns in lower case without spaces and punctuation: of vectors, labels, ids,
paths of images, names, and of what a table of labels names its items by."""

FORMS = {".npy": "npy", ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".parquet": "parquet"}
FORMS |= {".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".orc": "orc", ".mat": "mat"}
FORMS |= {".safetensors": "safetensors", ".csv": "csv", ".tsv": "csv", ".jsonl": "jsonl"}
FORMS |= {".ndjson": "jsonl", ".json": "json", **dict.fromkeys((*VECS, *BINS), "vecs")}
"""Form of a table by the ending of its file."""
_UNPACK, _IMAGE = "unpack it", "images are read by folder:DIR, or listed in a table of their paths"
_PICKLE = "it can run code, so it is not loaded: save arrays as .npy, tables as .parquet"
_INDEX = "save the vectors that it was built from as .npy"
_MAGIC: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"\x93NUMPY", "npy", ""),
    (0, b"\x89HDF", "hdf5", ""),
    (0, b"PAR1", "parquet", ""),
    (0, b"ARROW1", "arrow", ""),
    (0, b"ORC", "orc", ""),
    (0, b"MATLAB 5", "mat", ""),
    (257, b"ustar", "tar", ""),
    (0, b"\x1f\x8b", "gzip", ""),
    (0, b"MATLAB 7", "a MATLAB file of version 7.3", "save it with -v7"),
    (0, b"SQLite format 3", "an SQLite database", "export the table as CSV"),
    (0, b"Rar!", "a RAR archive", _UNPACK),
    (0, b"7z\xbc\xaf", "a 7z archive", _UNPACK),
    (0, b"BZh", "compressed by bzip2", _UNPACK),
    (0, b"\xfd7zXZ", "compressed by xz", _UNPACK),
    (0, b"(\xb5/\xfd", "compressed by zstd", _UNPACK),
    *((0, bytes((0x80, version)), "a pickle", _PICKLE) for version in (2, 3, 4, 5)),
    *((0, start, "an image", _IMAGE) for start in (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF")),
    (0, b"%PDF", "a PDF", "export its table as CSV"),
    (0, b"\xd0\xcf\x11\xe0", "an Excel sheet", "save it as CSV"),
    *((0, start, "a Faiss index", _INDEX) for start in (b"Ix", b"IB", b"IM", b"Iw", b"Ii")),
)
"""Offset and first bytes of forms of files; forms that are not read have a remedy."""
_MEMBERS = {"xl/": ("an Excel sheet", "save it as CSV"), "data.pkl": ("a PyTorch file", _PICKLE)}


def file_form(path: Path) -> str:
    """Return the form of a file by its content, else by its ending; ``text`` for other texts.

    Raises DataError: no such file, or a form that is not read; the message says what it is.
    """
    with reading(path, "a file of data"), path.open("rb") as file:
        head = file.read(512)
    by_ending = FORMS.get(path.suffix.lower())
    for offset, start, form, remedy in _MAGIC:
        if head[offset:].startswith(start) and by_ending != "vecs":
            if remedy:
                raise DataError(f"{path} is {form}: {remedy}")
            return form
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
        for part, (form, remedy) in _MEMBERS.items():
            if any(part in member for member in members):
                raise DataError(f"{path} is {form}: {remedy}")
        if not any(member.endswith(".npy") for member in members):
            raise DataError(f"{path} is a zip archive: {_UNPACK}")
        return "npz"
    if by_ending is None and b"\0" in head and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is of no known form: {', '.join(FORMS)} and .txt are read")
    return by_ending or "text"


# What is known of items -------------------------------------------------------------------------


@dataclass(frozen=True)
class Options:
    """How a source is read; :func:`.open.open_data` documents the fields.

    ``with_labels`` is false where labels beside the data replace those of the source.
    """

    with_labels: bool = True
    label_column: str | None = None
    id_column: str | None = None
    name_column: str | None = None
    vectors: str | Sequence[str] | None = None
    keep: Sequence[str] = ()
    root: str | None = None
    image_column: str | None = None
    concepts: int | None = None
    max_bad: float = 0.01
    download: bool = True


PLAIN = Options()


@dataclass
class Annotations:
    """What is known of N items besides their contents.

    Attributes:
        labels: None if the source has none.
        ids: int64 [N], returned by searches; None: the row numbers.
        texts: text columns, StringDType [N]; ``name`` is the path or key of an item.
        notes: lines of the log on what was understood, first that on labels.
    """

    labels: Labels | None = field(default=None, repr=False)
    ids: NDArray[np.int64] | None = field(default=None, repr=False)
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)
    notes: list[str] = field(default_factory=lambda: ["no labels"])

    def mark(self) -> str:
        """Return the labels' part of a fingerprint."""
        return "" if self.labels is None else self.labels.fingerprint()


# Tables -----------------------------------------------------------------------------------------


def usual(candidates: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the name that is, but for case and punctuation, the first possible candidate."""
    plain = {re.sub(r"[\W_]", "", name.lower()): name for name in reversed(list(names))}
    return next((plain[name] for name in candidates if name in plain), None)


@dataclass
class Table:
    """Named columns.

    Attributes:
        source: file or object, for errors.
        rows: number of rows.
        kinds: name -> ``list``, ``text``, ``integer``, ``number`` (with a point), ``image`` or
            ``other``.
        load: name -> an array, or a list of Python values.
        matrix: names of a column of lists or of columns of numbers -> their rows.
        class_names: name of a column of class numbers -> their names.
    """

    source: str
    rows: int
    kinds: Mapping[str, str]
    load: Callable[[str], Any]
    matrix: Callable[[Sequence[str]], Matrix]
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self, name: str, option: str) -> str:
        """Return the name of a column. Raises DataError: there is none; ``option`` names it."""
        if name not in self.kinds:
            columns = ", ".join(repr(known[:40]) for known in list(self.kinds)[:20])
            remedy = f"name one with {option}" if columns else "give another file"
            raise DataError(f"{self.source} has no column {name!r} (it has {columns}): {remedy}")
        return name

    def values(self, name: str) -> Any:
        """Return a column as an array or a list. Raises DataError: it cannot be read."""
        with errors_of(f"{self.source}: {name!r}"):
            return self.load(name)

    def texts(self, name: str) -> Texts:
        """Return a column as texts; empty where there is no value."""
        values = self.values(name)
        values = values.tolist() if hasattr(values, "tolist") else values
        return as_texts("" if value is None else plain_text(value) for value in values)

    def annotations(self, o: Options, paths: str | None = None) -> tuple[Annotations, set[str]]:
        """Return labels, ids and texts of the rows, and the columns that they are from.

        Columns have their usual names if the options name none; ``paths`` is one of names.
        """
        notes, ids, names = ["no labels"], o.id_column, o.name_column
        label = o.label_column or (usual(LABELS, self.kinds) if o.with_labels else None)
        if ids is None and (guess := usual(IDS, self.kinds)) is not None:
            if self.kinds[guess] == "text":
                names = names or guess
                notes.append(f"{guess!r} holds texts: they are the names; ids are row numbers")
            else:
                ids = guess
        others = [name for name, kind in self.kinds.items() if kind not in ("list", "image")]
        names = (
            names or paths or usual(NAMES, [name for name in others if name not in (ids, label)])
        )
        for name, option in ((label, "label_column"), (ids, "ids"), (names, "names")):
            self.check(name, f"--read {option}") if name is not None else None
        found = Annotations(notes=notes)
        if label is not None:
            with errors_of(f"{self.source}: {label!r}"):
                found.labels = column_labels(self.load(label), self.class_names.get(label))
            notes[0] = labels_note(Path(self.source).name, found.labels, f"in column {label!r}")
        found.texts = {name: self.texts(self.check(name, "--read keep")) for name in o.keep}
        if names is not None:
            found.texts["name"] = self.texts(names)
        if ids is not None:
            found.ids = whole_numbers(self.values(ids), f"{self.source}: {ids!r}")
        return found, {name for name in (label, ids, names, *o.keep) if name is not None}

    def vectors(
        self, used: Iterable[str], wanted: str | Sequence[str] | None
    ) -> tuple[Matrix, str]:
        """Return the vectors, and a note on their columns.

        They are the ``wanted`` columns (patterns such as ``f*`` match), a column of lists, or
        columns of numbers that are numbered (``f0``, ``f1`` ...) or the only ones.

        Raises DataError: it is unclear which columns they are, or they do not hold numbers.
        """
        unused = [name for name in self.kinds if name not in {*used}]
        lists = [name for name in unused if self.kinds[name] == "list"]
        numbers = [name for name in unused if self.kinds[name] in ("integer", "number")]
        if wanted is not None:
            parts = wanted.split(",") if isinstance(wanted, str) else wanted
            matches = {part: fnmatch.filter(self.kinds, part) or [part] for part in parts}
            chosen = [
                self.check(name, "--read vectors") for part in parts for name in matches[part]
            ]
        elif lists:
            one = usual(FEATURES, lists) or (lists[0] if len(lists) == 1 else None)
            chosen = [] if one is None else [one]
        else:
            groups: dict[str, list[tuple[int, str]]] = {}
            for name in numbers:
                if match := re.fullmatch(r"(.*?)(\d+)", name):
                    groups.setdefault(match[1], []).append((int(match[2]), name))
            numbered = [sorted(group) for group in groups.values() if len(group) > 1]
            chosen = [name for _, name in numbered[0]] if len(numbered) == 1 else []
            chosen = numbers if not numbered and len(numbers) > 1 else chosen
        of_lists = [name for name in chosen if self.kinds[name] == "list"]
        of_numbers = [name for name in chosen if self.kinds[name] in ("integer", "number")]
        if not chosen or chosen not in (of_lists[:1], of_numbers):
            columns = ", ".join((lists or list(self.kinds))[:20]) or "none"
            what = f"{', '.join(map(repr, chosen[:5]))}: not vectors of numbers"
            what = what if chosen else "which column holds the vectors?"
            remedy = "name them with --read vectors=NAME or a pattern, 'f*'"
            raise DataError(f"{self.source}: {what} (it has {columns}): {remedy}")
        note = f"vectors are in column {chosen[0]!r}"
        if len(chosen) > 1:
            others = [repr(name) for name in numbers if name not in chosen]
            rest = f"; {', '.join(others[:5])} left out" if others else ""
            note = f"vectors are the {len(chosen):,} columns {chosen[0]!r} to {chosen[-1]!r}{rest}"
        return self.matrix(chosen), note

    def image_column(self, wanted: str | None) -> str | None:
        """Return the column of paths of images, if there is one: ``wanted``, or by usual names."""
        if wanted is not None:
            return self.check(wanted, "--read image_column")
        texts = [name for name, kind in self.kinds.items() if kind == "text"]
        while (name := usual(IMAGES, texts)) is not None:
            values = self.values(name)[:100]
            if any(is_image_name(plain_text(value)) for value in values):
                return name
            texts.remove(name)
        return None


def column_labels(values: Any, class_names: Sequence[str] | None = None) -> Labels | None:
    """Return the labels of a column, None if it is empty."""
    empty = not isinstance(values, np.ndarray) and not any(
        value is not None and value != "" and value != [] for value in values
    )
    return None if empty else labels_of(values, "", class_names=class_names)


def join_tables(tables: Sequence[Table]) -> Table:
    """Concatenate the rows of tables. Raises DataError: their columns differ."""
    first = tables[0]
    for table in tables[1:]:
        if set(table.kinds) != set(first.kinds):
            names = ", ".join(sorted(set(table.kinds) ^ set(first.kinds))[:5])
            raise DataError(f"{first.source} and {table.source} do not fit: one lacks {names}")
        if table.class_names != first.class_names:
            raise DataError(f"{first.source} and {table.source} name their classes differently")

    def load(name: str) -> Any:
        parts = [table.values(name) for table in tables]
        if all(isinstance(part, np.ndarray) for part in parts):
            return np.concatenate(parts)
        return [value for part in parts for value in part]

    def matrix(names: Sequence[str]) -> Matrix:
        parts = [table.matrix(names) for table in tables]
        for part, table in zip(parts, tables, strict=True):
            if part.shape[1:] != parts[0].shape[1:] or len(part.shape) != 2:
                shapes = (
                    f"{first.source} is {list(parts[0].shape)}, {table.source} {list(part.shape)}"
                )
                raise DataError(f"{shapes}: rows of one width are needed")
        return JoinedMatrix(parts)

    if len(tables) == 1:
        return first
    rows = sum(table.rows for table in tables)
    return Table(first.source, rows, first.kinds, load, matrix, first.class_names)


def open_table(path: Path, form: str | None = None) -> Table:
    """Return the columns of a file of any form (:func:`file_form`); of others than :data:`FORMS`
    as CSV. Raises DataError: damaged, or not a table."""
    form = form or file_form(path)
    if form in ("parquet", "arrow", "orc"):
        return _arrow_file(path, form)
    if form == "npz":
        with reading(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
            names = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
        return array_table(str(path), {name: npz_member(path, name) for name in names})
    if form == "npy":
        return array_table(str(path), {"arr_0": NpyArray(path)})
    with reading(path, {"hdf5": "an HDF5 file"}.get(form, f"a file of the form {form}")):
        if form == "hdf5":
            return array_table(str(path), _hdf5_arrays(path))
        if form == "vecs":
            return array_table(str(path), {"vectors": open_vecs(path)})
        if form == "mat":
            scipy_io = optional(
                "scipy.io", f"reading {path} needs SciPy: pip install scipy", DataError
            )
            arrays = scipy_io.loadmat(path, squeeze_me=True)
            return array_table(str(path), {k: v for k, v in arrays.items() if k[0] != "_"})
        if form == "safetensors":
            from safetensors.numpy import load_file

            return array_table(str(path), load_file(path))
        if form in ("json", "jsonl"):
            text = read_text(path, "JSON")
            records = parse_json(text) if form == "json" else [*map(parse_json, text.splitlines())]
            return records_table(str(path), records)
    return _csv_table(path)


def records_table(source: str, records: Any) -> Table:
    """Return a table of JSON's records, or of a dict of columns."""
    pyarrow = import_pyarrow(source)
    try:
        if not isinstance(records, dict):
            names = dict.fromkeys(name for record in records for name in record)
            records = {name: [record.get(name) for record in records] for name in names}
        data = pyarrow.table(records)
    except Exception as error:  # any of Python's or pyarrow's
        why = one_line(error, 80)
        raise DataError(f"{source} is not a list of records with equal fields ({why})") from None
    return arrow_table(source, data)


def _hdf5_arrays(path: Path) -> dict[str, Any]:
    """Return the arrays at the top of an HDF5 file: numbers by rows, texts in memory."""
    arrays: dict[str, Any] = {}
    with h5py.File(path, "r", locking=False) as h5:
        for name, node in h5.items():
            if isinstance(node, h5py.Dataset) and h5py.check_string_dtype(node.dtype) and node.ndim:
                arrays[name] = np.array(node.asstr(errors="replace")[:], dtype=np.str_)
            elif isinstance(node, h5py.Dataset) and node.dtype.kind in "iufb" and node.ndim:
                arrays[name] = Hdf5Array(path, name)
    return arrays


def array_table(source: str, arrays: Mapping[str, Any]) -> Table:
    """Return a table of arrays of N rows; ``class_names`` names the class numbers."""
    kinds: dict[str, str] = {}
    for name, array in arrays.items():
        kind = {"i": "integer", "u": "integer", "f": "number"}.get(array.dtype.kind, "other")
        kinds[name] = (
            "list" if len(array.shape) > 1 else "text" if array.dtype.kind in "US" else kind
        )
        if not array.shape:
            kinds[name] = "other"
    names = {}
    if "class_names" in arrays:
        names = dict.fromkeys(
            arrays, [plain_text(name) for name in arrays["class_names"][:].tolist()]
        )
        kinds.pop("class_names")

    def matrix(chosen: Sequence[str]) -> Matrix:
        if len(chosen) == 1:
            return arrays[chosen[0]]  # type: ignore[no-any-return]
        return np.column_stack([arrays[name][:] for name in chosen])

    rows = max((array.shape[0] for array in arrays.values() if array.shape), default=0)
    return Table(source, rows, kinds, lambda name: arrays[name][:], matrix, names)


# Arrow ------------------------------------------------------------------------------------------


def import_pyarrow(source: str, module: str = "pyarrow") -> Any:
    """Import pyarrow or a part of it. Raises DataError: it is not installed."""
    return optional(
        module, f"reading {source} needs pyarrow: pip install 'gpq-faiss[train]'", DataError
    )


def _kind(arrow_type: Any) -> str:
    """Return the kind of values of an Arrow type, see :class:`Table`."""
    text = str(arrow_type)
    kinds = {
        "list": r"(large_|fixed_size_)?list<.*",
        "text": r"(dictionary<values=)?(large_)?string.*",
        "integer": r"u?int\d+",
        "number": r"halffloat|float|double",
        "image": r"(large_)?binary|struct<.*bytes: (large_)?binary.*",
    }
    return next((kind for kind, form in kinds.items() if re.match(form, text)), "other")


def _rows_of(table: Any, names: Sequence[str], where: str, first: int) -> NDArray[Any]:
    """Return a column of lists, or columns of numbers, of an Arrow table as an array [n, width].

    Raises DataError: missing rows or numbers (counted from row ``first``), or unlike widths.
    """
    columns = [table[name].combine_chunks() for name in names]
    if _kind(columns[0].type) != "list":
        return np.column_stack([column.to_numpy(zero_copy_only=False) for column in columns])
    column, flat = columns[0], columns[0].flatten()
    if _kind(flat.type) not in ("integer", "number") or flat.null_count:
        what = "missing numbers" if flat.null_count else f"lists of {flat.type}"
        raise DataError(f"{where} holds {what} (from row {first:,}): vectors of numbers are needed")
    compute = import_pyarrow(where, "pyarrow.compute")
    lengths = np.asarray(compute.fill_null(compute.list_value_length(column), -1))
    width = int(max(lengths[0], 0)) if len(lengths) else 0
    wrong = np.flatnonzero(lengths != width)
    if wrong.size:
        length = int(lengths[wrong[0]])
        what = "no vector" if length < 0 else f"{length} numbers"
        where_ = f"{what} at {named_rows(first + wrong)}"
        raise DataError(f"{where} has {where_}, {width} numbers elsewhere: leave such rows out")
    return np.asarray(flat.to_numpy(zero_copy_only=False).reshape(len(column), width))


def _matrix(
    source: str, names: Sequence[str], sizes: Sequence[int], read: Callable[..., Any]
) -> Matrix:
    """Return rows of groups of ``sizes``, of which the last two that were read stay in memory.

    ``read`` returns a group by its number, or its first rows, as an Arrow table.
    """
    where = f"{source}: {', '.join(map(repr, names[:3]))}"
    groups = [i for i, size in enumerate(sizes) if size]
    if not groups:
        raise DataError(f"{source} has no rows")
    starts = np.cumsum([0, *sizes])
    sample = _rows_of(read(groups[0], 1), names, where, int(starts[groups[0]]))
    width = sample.shape[1]

    @functools.lru_cache(maxsize=2)
    def load(i: int) -> NDArray[Any]:
        rows = _rows_of(read(i), names, where, int(starts[i]))
        if rows.shape != (sizes[i], width):
            message = f"{rows.shape[1]} numbers at row {starts[i]}, {width} elsewhere"
            raise DataError(f"{where} has {message}: one width is needed")
        return rows

    shapes = [(i, (sizes[i], width)) for i in groups]
    parts = [LazyArray(shape, sample.dtype, functools.partial(load, i)) for i, shape in shapes]
    return parts[0] if len(parts) == 1 else JoinedMatrix(parts)


def arrow_table(
    source: str, data: Any, class_names: Mapping[str, Sequence[str]] | None = None
) -> Table:
    """Return the columns of a ``pyarrow.Table``."""
    names = data.schema.names
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{source} has the column {repeated[0]!r} twice: rename one")
    sizes = [batch.num_rows for batch in data.to_batches()]
    starts = np.cumsum([0, *sizes]).tolist()

    def matrix(chosen: Sequence[str]) -> Matrix:
        def read(i: int, most: int | None = None) -> Any:
            return data.select(list(chosen)).slice(starts[i], most or sizes[i])

        return _matrix(source, chosen, sizes, read)

    kinds = {name: _kind(kind) for name, kind in zip(names, data.schema.types, strict=True)}
    load = lambda name: data[name].to_pylist()  # noqa: E731
    return Table(source, data.num_rows, kinds, load, matrix, class_names or {})


def _arrow_file(path: Path, form: str) -> Table:
    """Return the columns of a Parquet, Arrow or ORC file, read by row groups when needed."""
    files = import_pyarrow(str(path), "pyarrow.dataset")
    what = f"a file of the form {form}"
    checked = {"parquet": files.ParquetFileFormat(page_checksum_verification=True)}
    with reading(path, what):
        data = files.dataset(path, format=checked.get(form, form))
        (fragment,) = data.get_fragments()
        groups = fragment.split_by_row_group() if form == "parquet" else [fragment]
        sizes = [group.count_rows() for group in groups]
        empty = arrow_table(str(path), data.schema.empty_table())

    def load(name: str) -> Any:
        with reading(path, what):
            return data.to_table(columns=[name])[name].to_pylist()

    def matrix(chosen: Sequence[str]) -> Matrix:
        def read(i: int, most: int | None = None) -> Any:
            with reading(path, what):
                columns = list(chosen)
                if most is not None:
                    return groups[i].head(most, columns=columns, batch_size=most)
                return groups[i].to_table(columns=columns)

        return _matrix(str(path), chosen, sizes, read)

    return Table(str(path), sum(sizes), empty.kinds, load, matrix)


def _csv_table(path: Path) -> Table:
    """Return the columns of a text with a header line, separated by what is most in that.

    Numbers in the first line are a row: columns are then named by their numbers. All cells are
    texts, except of columns that are numbered (f0, f1 ...).
    """
    what = "a table with a header line"
    reader = import_pyarrow(str(path), "pyarrow.csv")
    text = read_text(path, what)
    separator = max(",;\t|", key=text.partition("\n")[0].count)
    lines = [line for line in text.split("\n") if line.strip(f"{separator} \t")]
    if not lines:
        raise DataError(f"{path} is empty: {what} is needed")
    header = [name.strip() for name in next(csv.reader(lines[:1], delimiter=separator))]
    numeric = all(
        re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", name, re.IGNORECASE) for name in header
    )
    if numeric:
        header = [str(i) for i in range(len(header))]
    try:
        data = reader.read_csv(
            io.BytesIO("\n".join(lines[not numeric :]).encode()),
            reader.ReadOptions(use_threads=False, column_names=header),
            reader.ParseOptions(delimiter=separator, newlines_in_values=True),
            reader.ConvertOptions(
                column_types={n: "string" for n in header if not re.fullmatch(r"\D*\d+", n)}
            ),
        )
    except Exception as error:  # any of pyarrow's
        raise DataError(
            f"{path} is not CSV with {len(header)} columns: {one_line(error)}"
        ) from None
    table = arrow_table(str(path), data)
    kinds = {
        name: _text_kind(data[name]) if kind == "text" else kind
        for name, kind in table.kinds.items()
    }

    def load(name: str) -> list[Any]:
        values = data[name].to_pylist()
        return [value.strip() if isinstance(value, str) else value for value in values]

    def matrix(chosen: Sequence[str]) -> Matrix:
        return np.column_stack([np.array(load(name), dtype=np.float64) for name in chosen])

    return Table(str(path), data.num_rows, kinds, load, matrix)


def _text_kind(column: Any) -> str:
    """Return ``integer`` or ``number`` if all texts of a column are such, else ``text``."""
    column = import_pyarrow("a table", "pyarrow.compute").utf8_trim_whitespace(column)
    for kind in ("integer", "number"):
        try:
            column.cast("int64" if kind == "integer" else "float64")
        except ValueError:  # of pyarrow
            continue
        return kind
    return "text"


def frame_table(source: Any) -> Table:
    """Return the columns of a table in memory: of pandas, polars, DuckDB, pyarrow and others."""
    where = f"the {type(source).__name__}"
    pyarrow = import_pyarrow("a table")
    try:
        data = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        what = f"{where} has a column that cannot be converted ({one_line(error)})"
        raise DataError(f"{what}: leave out those of mixed types") from None
    table, index = (
        arrow_table(where, data),
        (data.schema.pandas_metadata or {}).get("index_columns", []),
    )
    table.kinds = {
        n: "other" if n in index else kind for n, kind in table.kinds.items()
    }  # no vector
    return table


def plain_values(values: Any) -> Any:
    """Return arrays, tensors, and columns of pandas, polars and pyarrow as arrays or lists."""
    for method in ("to_pylist", "to_list"):
        if hasattr(values, method):
            return getattr(values, method)()
    return without_gradient(values)

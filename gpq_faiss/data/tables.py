"""Tables: named columns of a file or an object, and which of them are labels, ids, names and
vectors.

Parquet, Arrow, ORC and CSV are read by pyarrow, arrays by numpy, h5py, SciPy and safetensors.
"""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import functools
import io
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, one_line, optional
from ..inputs import parse_json, read_text, reading
from ..store.hdf5 import Hdf5Array, Texts, as_texts, open_hdf5
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
from .images import is_image_name
from .labels import Labels, errors_of, labels_note, labels_of, plain_text

FEATURES = ("features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr0")
LABELS: tuple[str, ...] = (
    "labels",
    "label",
    "y",
    "class",
    "classes",
    "category",
    "finelabel",
    "target",
    "targets",
)
LABELS = (
    *LABELS,
    "categories",
    "classname",
    "labelname",
    "labelid",
    "classid",
    "categoryid",
    "tags",
)
IDS = ("ids", "id", "imageid", "itemid", "imgid", "uid")
IMAGES = ("image", "imagepath", "path", "filepath", "filename", "file", "img", "images")
NAMES = ("name", "names", "path", "paths", "key", "keys", *IMAGES)
ITEMS = (*IDS, *NAMES, "item", "index", "indexlevel0", "unnamed0", "")
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
        for chunk, (form, remedy) in _MEMBERS.items():
            if any(chunk in member for member in members):
                raise DataError(f"{path} is {form}: {remedy}")
        if not any(member.endswith(".npy") for member in members):
            raise DataError(f"{path} is a zip archive: {_UNPACK}")
        return "npz"
    if by_ending is None and b"\0" in head and head[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is of no known form: {', '.join(FORMS)} and .txt are read")
    return by_ending or "text"


# What is known of items ---------------------------------------------------------------------------


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


# Tables -------------------------------------------------------------------------------------------


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
    matrix: Callable[[Sequence[str]], Matrix] | None = None
    class_names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self, name: str, option: str) -> str:
        """Return the name of a column. Raises DataError: there is none; ``option`` names it."""
        if name not in self.kinds:
            requested = repr(name) if name else "of a usual name"
            columns = ", ".join(repr(kind_names[:40]) for kind_names in list(self.kinds)[:20])
            remedy = f"name one with {option}" if columns else "give another file"
            raise DataError(f"{self.source} has no column {requested} (it has {columns}): {remedy}")
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
        leftover = [name for name, kind in self.kinds.items() if kind not in ("list", "image")]
        names = (
            names or paths or usual(NAMES, [name for name in leftover if name not in (ids, label)])
        )
        for name, option in ((label, "label_column"), (ids, "ids"), (names, "names")):
            self.check(name, f"--read {option}") if name is not None else None
        annotated = Annotations(notes=notes)
        if label is not None:
            with errors_of(f"{self.source}: {label!r}"):
                annotated.labels = column_labels(self.load(label), self.class_names.get(label))
            notes[0] = labels_note(Path(self.source).name, annotated.labels, f"in column {label!r}")
        annotated.texts = {name: self.texts(self.check(name, "--read keep")) for name in o.keep}
        if names is not None:
            annotated.texts["name"] = self.texts(names)
        if ids is not None:
            annotated.ids = whole_numbers(self.values(ids), f"{self.source}: {ids!r}")
        return annotated, {name for name in (label, ids, names, *o.keep) if name is not None}

    def vectors(
        self, used: Iterable[str], requested: str | Sequence[str] | None
    ) -> tuple[Matrix, list[str]]:
        """Return the vectors, and notes on their columns.

        They are the ``requested`` columns (patterns such as ``f*`` match), a column of lists, or
        columns of numbers that are numbered (``f0``, ``f1`` ...) or the only ones.

        Raises DataError: it is unclear which columns they are, or they do not hold numbers.
        """
        unused = [n for n in self.kinds if n not in {*used, usual(LABELS, self.kinds)}]
        lists = [name for name in unused if self.kinds[name] == "list"]
        numbers = [name for name in unused if self.kinds[name] in ("integer", "number")]
        if requested is not None:
            parts = requested.split(",") if isinstance(requested, str) else requested
            matches = {chunk: fnmatch.filter(self.kinds, chunk) or [chunk] for chunk in parts}
            chosen = [
                self.check(name, "--read vectors") for chunk in parts for name in matches[chunk]
            ]
        elif lists or usual(FEATURES, numbers):
            column_name = usual(FEATURES, lists or numbers) or (
                lists[0] if len(lists) == 1 else None
            )
            chosen = [] if column_name is None else [column_name]
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
            message = f"{', '.join(map(repr, chosen[:5]))}: not vectors of numbers"
            message = message if chosen else "which column holds the vectors?"
            raise DataError(
                f"{self.source}: {message} (it has {columns}): "
                "name them with --read vectors=NAME or a pattern, 'f*'"
            )
        note = f"vectors are in column {chosen[0]!r}"
        if len(chosen) > 1:
            leftover = [repr(name) for name in numbers if name not in chosen]
            elsewhere = f"; {', '.join(leftover[:5])} left out" if leftover else ""
            note = f"vectors are the {len(chosen):,} columns {chosen[0]!r} to {chosen[-1]!r}{elsewhere}"
        assert self.matrix is not None
        return self.matrix(chosen), [note] if len(self.kinds) > 1 else []

    def image_column(self, requested: str | None) -> str | None:
        """Return the column of paths of images, if any: ``requested``, or by usual names."""
        if requested is not None:
            return self.check(requested, "--read image_column")
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
        not (value is None or value in ("", [])) for value in values
    )
    return None if empty else labels_of(values, "", class_names=class_names)


def open_tables(paths: Sequence[Path]) -> Table:
    """Return the columns of files of one form (:func:`file_form`), one below the other.

    Texts of other forms than :data:`FORMS` are CSV. Raises DataError: damaged, not a table, or
    files with different columns.
    """
    form, source = file_form(paths[0]), str(paths[0])
    if form in ("tar", "gzip"):
        raise DataError(f"{source} is an archive: unpack it, and give the files in it")
    if form in ("parquet", "arrow", "orc"):
        dataset = import_pyarrow(source, "pyarrow.dataset")
        checked = dataset.ParquetFileFormat(page_checksum_verification=True)
        with reading(paths[0], f"a file of the form {form}"):
            data = dataset.dataset(
                list(map(str, paths)), format=checked if form == "parquet" else form
            )
            return arrow_table(source, data)
    if form in ("csv", "json", "jsonl", "text"):
        tables = [_csv(path) if form in ("csv", "text") else _json(path, form) for path in paths]
        table = in_memory(source, *tables)
        ids = usual(IDS, table.kinds) if form in ("csv", "text") else None
        if ids is not None and all(
            re.fullmatch(r"\s*-?\d+(\.0*)?\s*", text) for text in table.load(ids)
        ):
            table.kinds = {**table.kinds, ids: "integer"}
        return table
    parts = []
    for path in paths:
        with reading(path, f"a file of the form {form}"):
            parts.append(_arrays(path, form))
    if names := next(
        (chunk.keys() ^ parts[0].keys() for chunk in parts if chunk.keys() != parts[0].keys()), None
    ):
        raise DataError(
            f"{source} and another file do not fit: one lacks {', '.join(sorted(names)[:5])}"
        )
    if len(parts) == 1:
        return array_table(source, parts[0])
    joined = {name: [chunk[name] for chunk in parts] for name in parts[0]}
    classes = joined.pop("class_names", [None])
    if any(not np.array_equal(chunk[:], classes[0][:]) for chunk in classes[1:]):
        raise DataError(f"{source} and another file name their classes differently")
    arrays = {
        name: JoinedMatrix(chunks, paths)
        if len(chunks[0].shape) > 1
        else np.concatenate([a[:] for a in chunks])
        for name, chunks in joined.items()
        if chunks[0].shape
    }
    return array_table(source, arrays | ({} if classes[0] is None else {"class_names": classes[0]}))


def _arrays(path: Path, form: str) -> Mapping[str, Any]:
    """Return the arrays of a file by name, read by rows where it can be."""
    if form == "npy":
        return {"arr_0": NpyArray(path)}
    if form == "npz":
        with zipfile.ZipFile(path) as archive:
            names = [name[:-4] for name in archive.namelist() if name.endswith(".npy")]
        return {name: npz_member(path, name) for name in names}
    if form == "vecs":
        return {"vectors": open_vecs(path)}
    if form == "mat":
        scipy_io = optional("scipy.io", f"reading {path} needs SciPy: pip install scipy", DataError)
        return {k: v for k, v in scipy_io.loadmat(path, squeeze_me=True).items() if k[0] != "_"}
    if form == "safetensors":
        from safetensors.numpy import load_file

        return load_file(path)
    arrays: dict[str, Any] = {}
    with open_hdf5(path) as h5:
        for name, node in h5.items():
            kind = node.dtype.kind if getattr(node, "shape", ()) else ""
            if kind and kind in "OS":
                arrays[name] = np.array(node.asstr(errors="replace")[:], dtype=np.str_)
            elif kind and kind in "iufb":
                arrays[name] = Hdf5Array(path, name)
    return arrays


def array_table(source: str, arrays: Mapping[str, Any]) -> Table:
    """Return a table of arrays of N rows; one called ``class_names`` names the class numbers."""
    kind_names = {"i": "integer", "u": "integer", "f": "number", "U": "text", "S": "text"}
    kinds = {
        name: kind_names.get(array.dtype.kind, "other")
        for name, array in arrays.items()
        if array.shape
    }
    kinds |= {name: "list" for name in kinds if len(arrays[name].shape) > 1}
    names = {}
    if kinds.pop("class_names", None) is not None:
        classes = [plain_text(name) for name in arrays["class_names"][:].tolist()]
        names = dict.fromkeys(kinds, classes)

    def matrix(chosen: Sequence[str]) -> Matrix:
        if len(chosen) > 1:
            return np.column_stack([arrays[name][:] for name in chosen])
        return arrays[chosen[0]]  # type: ignore[no-any-return]

    rows = max((arrays[name].shape[0] for name in kinds), default=0)
    return Table(source, rows, kinds, lambda name: arrays[name][:], matrix, names)


# Arrow --------------------------------------------------------------------------------------------


def import_pyarrow(source: str, module: str = "pyarrow") -> Any:
    """Import pyarrow or a part of it. Raises DataError: it is not installed."""
    return optional(
        module, f"reading {source} needs pyarrow: pip install 'gpq-faiss[train]'", DataError
    )


def _kind(arrow_type: Any) -> str:
    """Return the kind of values of an Arrow type, see :class:`Table`."""
    kinds = {
        "list": r"(large_|fixed_size_)?list<.*",
        "text": r"(dictionary<values=)?(large_)?string.*",
        "integer": r"u?int\d+",
        "number": r"halffloat|float|double",
        "image": r"(large_)?binary|struct<.*bytes: (large_)?binary.*",
    }
    return next((kind for kind, form in kinds.items() if re.match(form, str(arrow_type))), "other")


def arrow_table(
    source: str, data: Any, class_names: Mapping[str, Sequence[str]] | None = None
) -> Table:
    """Return the columns of a ``pyarrow.dataset.Dataset``, read when they are needed.

    Of vectors the last two row groups that were read stay in memory.
    """
    columns, fragments = data.schema.names, list(data.get_fragments())
    for fragment in fragments:
        names = fragment.physical_schema.names
        if len(set(names)) < len(names) or set(names) != set(columns):
            message = ", ".join(sorted(set(names) ^ set(columns))) or "one name of a column twice"
            raise DataError(
                f"{source}: its columns differ between files ({message}), or have equal names"
            )
    counted = [(fragment, fragment.count_rows()) for fragment in fragments]
    if fragments and hasattr(fragments[0], "split_by_row_group"):  # whose count_rows is the file's
        parts = [group for fragment in fragments for group in fragment.split_by_row_group()]
        counted = [(group, group.row_groups[0].num_rows) for group in parts]
    groups, sizes = [group for group, n in counted if n], [n for _, n in counted if n]
    starts = np.cumsum([0, *sizes]).tolist()
    file = functools.partial(reading, Path(source), "the table that was opened")
    errors = file if os.path.isfile(source) else contextlib.nullcontext

    def load(name: str) -> Any:
        with errors():
            return data.to_table(columns=[name])[name].to_pylist()

    def matrix(chosen: Sequence[str]) -> Matrix:
        names = list(chosen)
        location = f"{source}: {', '.join(map(repr, names[:3]))}"

        if not groups:
            raise DataError(f"{source} has no rows")
        with errors():
            first = _rows_of(groups[0].head(1, columns=names, batch_size=1), location, 0)

        @functools.lru_cache(maxsize=2)
        def rows(i: int) -> NDArray[Any]:
            with errors():
                chunk = _rows_of(groups[i].to_table(columns=names), location, starts[i])
            if chunk.shape[1] != first.shape[1]:
                raise DataError(
                    f"{location} has "
                    f"{chunk.shape[1]} numbers at row {starts[i]}, {first.shape[1]} elsewhere"
                    f": one width is needed"
                )
            return chunk

        shapes = [(size, first.shape[1]) for size in sizes]
        parts = [
            LazyArray(shape, first.dtype, functools.partial(rows, i))
            for i, shape in enumerate(shapes)
        ]
        return parts[0] if len(parts) == 1 else JoinedMatrix(parts)

    kinds = {name: _kind(kind) for name, kind in zip(columns, data.schema.types, strict=True)}
    return Table(source, starts[-1], kinds, load, matrix, class_names or {})


def _rows_of(table: Any, location: str, first: int) -> NDArray[Any]:
    """Return a column of lists, or columns of numbers, of an Arrow table as an array [n, width].

    Raises DataError: missing rows or numbers (counted from row ``first``), or unlike widths.
    """
    columns = [column.combine_chunks() for column in table.columns]
    if _kind(columns[0].type) != "list":
        return np.column_stack([column.to_numpy(zero_copy_only=False) for column in columns])
    column, flat = columns[0], columns[0].flatten()
    if _kind(flat.type) not in ("integer", "number") or flat.null_count:
        message = "missing numbers" if flat.null_count else f"lists of {flat.type}"
        raise DataError(
            f"{location} holds {message} (from row {first:,}): vectors of numbers are needed"
        )
    compute = import_pyarrow(location, "pyarrow.compute")
    lengths = np.asarray(compute.list_value_length(column).fill_null(0))
    width = int(lengths[0])
    wrong = np.flatnonzero(lengths != width) if width else np.array([0])
    if wrong.size:
        elsewhere = f"{width} elsewhere" if width else "which is no vector"
        raise DataError(
            f"{location} has "
            f"{lengths[wrong[0]]} numbers at {named_rows(first + wrong)}, {elsewhere}"
            f": leave such rows out"
        )
    return np.asarray(flat.to_numpy(zero_copy_only=False).reshape(len(column), width))


def in_memory(source: str, *tables: Any) -> Table:
    """Return the columns of tables of pyarrow, one below the other. Raises DataError: they
    differ.
    """
    dataset = import_pyarrow(source, "pyarrow.dataset")
    batches = [batch for table in tables for batch in table.to_batches()]
    try:
        return arrow_table(source, dataset.dataset(batches or tables[0]))
    except (TypeError, ValueError) as error:  # of pyarrow
        raise DataError(f"the tables of {source} do not fit together ({one_line(error)})") from None


def _csv(path: Path) -> Any:
    """Return a text with a header line, separated by what is most in that, as an Arrow table.

    Numbers in the first line are a row: columns are then named by their numbers. Columns with usual
    names of labels, ids and names are texts.
    """
    message = "a table with a header line"
    reader = import_pyarrow(str(path), "pyarrow.csv")
    text = read_text(path, message)
    separator = max(",;\t|", key=text.partition("\n")[0].count)
    lines = [line for line in text.split("\n") if line.strip(f"{separator} \t")]
    if len(lines) < 2:
        raise DataError(f"{path} is empty, or has one line: {message} is needed")
    header = [name.strip() for name in next(csv.reader(lines[:1], delimiter=separator))]
    numeric = all(
        re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", name, re.IGNORECASE) for name in header
    )
    names = [str(i) for i in range(len(header))] if numeric else header
    if repeated := [name for name in names if names.count(name) > 1]:
        raise DataError(f"{path} has the column {repeated[0]!r} twice: rename one")
    texts = {name: "string" for name in names if usual((*LABELS, *ITEMS), [name])}
    try:
        return reader.read_csv(
            io.BytesIO("\n".join(lines[not numeric :]).encode()),
            reader.ReadOptions(use_threads=False, column_names=names),
            reader.ParseOptions(delimiter=separator, newlines_in_values=True),
            reader.ConvertOptions(column_types=texts, true_values=[], false_values=[]),
        )
    except Exception as error:  # any of pyarrow's
        raise DataError(f"{path} is not CSV with {len(names)} columns: {one_line(error)}") from None


def _json(path: Path, form: str) -> Any:
    """Return a list of records, records by line, or a dict of columns as an Arrow table."""
    text = read_text(path, "JSON")
    try:
        records = parse_json(text) if form == "json" else [*map(parse_json, text.splitlines())]
        if not isinstance(records, dict):
            names = dict.fromkeys(name for record in records for name in record)
            records = {name: [record.get(name) for record in records] for name in names}
        return import_pyarrow(str(path)).table(records)
    except Exception as error:  # any of Python's or pyarrow's
        reason = one_line(error, 80)
        raise DataError(f"{path} is not a list of records with equal fields ({reason})") from None


def frame_table(source: Any) -> Table:
    """Return the columns of a table in memory: of pandas, polars, DuckDB, pyarrow and others."""
    location = f"the {type(source).__name__}"
    pyarrow = import_pyarrow(location)
    try:
        data = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        raise DataError(
            f"{location} has a column that cannot be converted ({one_line(error)})"
            f": leave out those of mixed types"
        ) from None
    table = in_memory(location, data)
    index = (data.schema.pandas_metadata or {}).get("index_columns", [])
    table.kinds = {
        n: "other" if n in index else kind for n, kind in table.kinds.items()
    }  # no vector
    return table

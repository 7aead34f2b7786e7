"""Tables: named columns of a file or an object, and which of them are labels, ids, names, images
and vectors.

Parquet, Arrow and CSV are read by pyarrow, arrays by numpy and h5py.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import fnmatch
import functools
import io
import re
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, one_line, optional
from ..inputs import read_text, reading
from ..store.hdf5 import Hdf5Array, Texts, as_texts, open_hdf5
from .arrays import (
    VECS,
    JoinedMatrix,
    LazyArray,
    Matrix,
    npy_array,
    npz_arrays,
    open_vecs,
    whole_numbers,
)
from .images import is_image_name
from .labels import WHOLE, Labels, labels_note, labels_of, plain_text
from .paths import natural_order

FEATURES = ["features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr0"]
LABELS = [
    "labels",
    "label",
    "y",
    "class",
    "classes",
    "category",
    "finelabel",
    "target",
    "targets",
    "categories",
    "classname",
    "labelname",
    "labelid",
    "classid",
    "categoryid",
    "tags",
    "cls",
]
IDS = ["ids", "id", "imageid", "itemid", "imgid", "uid"]
IMAGES = ["image", "imagepath", "path", "filepath", "filename", "file", "img", "images"]
NAMES = ["name", "names", "path", "paths", "key", "keys", *IMAGES]
ITEMS = [*IDS, *NAMES, "item", "index", "indexlevel0", "unnamed0", ""]
"""Usual names of columns in lower case without spaces and punctuation: of vectors, labels, ids,
paths of images, names, and of what a table of labels names its items by."""

FORMS = {".npy": "npy", ".npz": "npz", ".h5": "hdf5", ".hdf5": "hdf5", ".parquet": "parquet"}
FORMS |= {".pq": "parquet", ".arrow": "arrow", ".feather": "arrow", ".csv": "csv", ".tsv": "csv"}
FORMS |= {".jsonl": "json", ".ndjson": "json", ".json": "json"}
FORMS |= dict.fromkeys(VECS, "vecs")
"""Form of a table by the ending of its file."""
_PICKLE = "it can run code, so it is not loaded: save arrays as .npy, tables as .parquet"
_MATLAB, _UNPACK = "save its arrays as .npy or .npz", "extract it, and give what is in it"
_MAGIC: dict[bytes, tuple[str, str]] = {
    **dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), ("csv", "")),
    b"\x93NUMPY": ("npy", ""),
    b"\x89HDF": ("hdf5", ""),
    b"PAR1": ("parquet", ""),
    b"ARROW1": ("arrow", ""),
    b"MATLAB": ("a MATLAB file", _MATLAB),
    b"SQLite format 3": ("an SQLite database", "export the table as CSV"),
    b"%PDF": ("a PDF", "export its table as CSV"),
    b"\xd0\xcf\x11\xe0": ("an Excel sheet", "save it as CSV"),
    **dict.fromkeys((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"(\xb5/\xfd"), ("compressed", _UNPACK)),
    **dict.fromkeys((b"Rar!", b"7z\xbc\xaf"), ("an archive", _UNPACK)),
    **dict.fromkeys([bytes((0x80, version)) for version in range(2, 6)], ("a pickle", _PICKLE)),
    **dict.fromkeys(
        (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"RIFF"),
        ("an image", "images are read by folder:DIR, or listed in a table of their paths"),
    ),
    **dict.fromkeys(
        (b"Ix", b"IB", b"IM", b"Iw", b"Ii"),
        ("a Faiss index", "save the vectors that it was built from as .npy"),
    ),
}
"""First bytes of files -> their form; forms that are not read have a remedy."""
_MEMBERS = {"xl/": ("an Excel sheet", "save it as CSV"), "data.pkl": ("a PyTorch file", _PICKLE)}
_MEMBERS[".npy"] = ("npz", "")
_UNREAD = (".safetensors", ".pkl", ".pickle", ".pt", ".pth", ".mat", ".xls", ".xlsx", ".orc")


def file_form(path: Path) -> str:
    """Return the form of a file by its content, else by its ending; ``text`` for other texts.

    Raises DataError: no such file, or a form that is not read; the message says what it is.
    """
    with reading(path, "a file of data"), path.open("rb") as file:
        head = file.read(512)
    ending = path.suffix.lower()
    form, remedy = FORMS.get(ending, "text"), ""
    if ending not in VECS:
        form, remedy = next((_MAGIC[m] for m in _MAGIC if head.startswith(m)), (form, remedy))
    if head[257:].startswith(b"ustar"):
        form, remedy = "a tar archive", f"{_UNPACK}, or give webdataset:FILES"
    if zipfile.is_zipfile(path):
        with reading(path, "a zip archive"), zipfile.ZipFile(path) as archive:
            members = " ".join(archive.namelist())
        form, remedy = next(
            (_MEMBERS[m] for m in _MEMBERS if m in members), ("a zip archive", _UNPACK)
        )
    if not remedy and (ending in _UNREAD or (form == "text" and b"\0" in head)):
        form, remedy = f"a {ending or 'binary'} file", f"save it as one of {', '.join(FORMS)}"
    if remedy:
        raise DataError(f"{path} is {form}: {remedy}")
    return form


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


def usual(candidates: Iterable[str], names: Iterable[str]) -> str | None:
    """Return the name that is, but for case and punctuation, the first possible candidate."""
    plain = {re.sub(r"[\W_]", "", name.lower()): name for name in reversed(list(names))}
    return next((plain[name] for name in candidates if name in plain), None)


class Table:
    """Named columns: arrays, or what reads like them, of N rows."""

    def __init__(self, source: str, columns: Mapping[str, Matrix]) -> None:
        self.source = source
        self.columns = {name: column for name, column in columns.items() if column.shape}
        self.class_names = self.columns.pop("class_names", None)
        self.images: Any = ()
        """A table of pyarrow with the columns of images."""

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the columns of these ``kinds``: ``list`` (rows of numbers), or by their dtype
        ``i``, ``u`` and ``f`` (numbers), ``U`` (texts), ``V`` (images) or ``O``."""
        kind_of = {name: str(column.dtype.kind) for name, column in self.columns.items()}
        kind_of |= {name: "list" for name, column in self.columns.items() if len(column.shape) > 1}
        return [name for name, kind in kind_of.items() if kind in kinds]

    def column(self, name: str | None, option: str, candidates: Iterable[str] = ()) -> str:
        """Return the name of a column: ``name``, or the usual one of ``candidates``.

        Raises DataError: there is none; ``option`` is the remedy.
        """
        chosen = name or usual(candidates, self.columns)
        if chosen is None or chosen not in self.columns:
            columns = ", ".join(repr(column[:40]) for column in list(self.columns)[:20])
            raise DataError(
                f"{self.source} has no column {repr(name) if name else 'of a usual name'}"
                f" (it has {columns}): name one with --read {option}"
            )
        return chosen

    def values(self, name: str) -> NDArray[Any]:
        """Return the values of a column: an array of numbers, or of Python's objects."""
        column = self.columns[name]
        return column.values() if isinstance(column, ListColumn) else np.asarray(column[:])

    def texts(self, name: str) -> Texts:
        """Return a column as texts; empty where there is no value."""
        return as_texts(map(plain_text, self.values(name).tolist()))

    def attributes(self, o: Options, images: str | None = None) -> dict[str, Any]:
        """Return labels, ids, texts and notes of the rows, as attributes of a data set.

        Columns have their usual names if the options name none; ``images`` is a column of paths.
        """
        label = o.label_column or (usual(LABELS, self.columns) if o.with_labels else None)
        ids, names, notes = o.id_column or usual(IDS, self.columns), o.name_column, ["no labels"]
        attributes: dict[str, Any] = {"notes": notes}
        if label is not None:
            values: Any = self.values(self.column(label, "label_column"))
            if self.class_names is not None:
                values = Labels.from_ids(values, [*map(plain_text, self.class_names[:].tolist())])
            attributes["labels"] = labels_of(values, f"{self.source}: {label!r}")
            source = Path(self.source).name
            notes[0] = labels_note(source, attributes["labels"], f"in column {label!r}")
        if ids is not None:
            values = self.values(self.column(ids, "ids"))
            is_text = o.id_column is None and ids in self.of_kind("U")
            if is_text and not all(WHOLE.fullmatch(plain_text(value)) for value in values):
                notes.append(f"{ids!r} holds texts: they are the names; ids are row numbers")
                names = names or ids
            else:
                attributes["ids"] = whole_numbers(values, f"{self.source}: {ids!r}")
        unused = [name for name in self.of_kind("U", "O", "i") if name not in (ids, label)]
        names = names or images or usual(NAMES, unused)
        columns = {name: name for name in o.keep} | ({"name": names} if names else {})
        texts = {text: self.texts(self.column(name, "keep")) for text, name in columns.items()}
        return attributes | {"texts": texts}

    def vectors(self, o: Options) -> tuple[Matrix, str]:
        """Return the vectors, and a note on their columns.

        They are the requested columns (patterns such as ``f*`` match), a column of lists, or
        columns of numbers that are numbered (``f0``, ``f1`` ...) or the only ones.

        Raises DataError: it is unclear which columns they are, or they do not hold numbers.
        """
        used = {o.label_column, o.id_column, o.name_column, *o.keep, usual(LABELS, self.columns)}
        unused = [n for n in self.columns if n not in used and usual(ITEMS, [n]) is None]
        lists = [name for name in self.of_kind("list") if name in unused]
        numbers = [name for name in self.of_kind("i", "u", "f") if name in unused]
        prefixes = {name: re.sub(r"\d+$", "", name) for name in sorted(numbers, key=natural_order)}
        numbered = [p for p, count in Counter(prefixes.values()).items() if count > 1]
        chosen = [name for name in numbers if not numbered]
        if o.vectors is not None:
            patterns = o.vectors.split(",") if isinstance(o.vectors, str) else o.vectors
            matches = [fnmatch.filter(self.columns, name) or [name] for name in patterns]
            chosen = [self.column(name, "vectors") for names in matches for name in names]
        elif lists:
            chosen = [name] if (name := usual(FEATURES, lists)) else lists
        elif len(numbered) == 1:
            chosen = [name for name, prefix in prefixes.items() if prefix == numbered[0]]
        kinds = {"list" if name in self.of_kind("list") else "number" for name in chosen}
        if kinds != {"number"} and not (kinds == {"list"} and len(chosen) == 1):
            columns = ", ".join((lists or list(self.columns))[:20])
            raise DataError(
                f"{self.source}: which column holds the vectors? (it has {columns})"
                f": name them with --read vectors=NAME or a pattern, 'f*'"
            )
        if len(chosen) == 1:
            return self.columns[chosen[0]], f"vectors are in column {chosen[0]!r}"
        stacked = functools.cache(lambda: np.column_stack([*map(self.values, chosen)]))
        note = f"vectors are the {len(chosen):,} columns {chosen[0]!r} to {chosen[-1]!r}"
        shape = self.columns[chosen[0]].shape[0], len(chosen)
        return LazyArray(shape, stacked, np.dtype("f4")), note

    def image_column(self, requested: str | None) -> str | None:
        """Return the column of images or of their paths, if any: the requested, or a usual one."""
        if requested is not None:
            return self.column(requested, "image_column")
        images = self.of_kind("V")
        for name in [name for name in self.of_kind("U") if not images and usual(IMAGES, [name])]:
            paths = map(plain_text, self.values(name)[:100])
            images += [name] * any(map(is_image_name, paths))
        preferred = usual(IMAGES, images)
        if len(images) > 1 and preferred is None:
            raise DataError(
                f"{self.source} has several columns of images ({', '.join(images)})"
                f": name one with --read image_column"
            )
        return preferred or (images[0] if images else None)


def open_tables(paths: Sequence[Path]) -> Table:
    """Return the columns of files of one form (:func:`file_form`), one below the other.

    Texts of other forms than :data:`FORMS` are CSV. Raises DataError: damaged, not a table, or
    files with different columns.
    """
    form, source, tables = file_form(paths[0]), str(paths[0]), []
    if form in ("parquet", "arrow"):
        dataset = _library(source, "pyarrow.dataset")
        with reading(paths[0], f"a file of the form {form}"):
            data = dataset.dataset(list(map(str, paths)), format=form)
            return Table(source, arrow_columns(source, data))
    readers = {"npz": npz_arrays, "vecs": open_vecs, "hdf5": _hdf5, "json": _json}
    readers["npy"] = lambda path: {"arr_0": npy_array(path)}
    for path in paths:
        with reading(path, f"a file of the form {form}"):
            tables.append(readers.get(form, _csv)(path))
    if any(columns.keys() != tables[0].keys() for columns in tables):
        names = ", ".join(sorted({*tables[0]}.symmetric_difference(*tables[1:])))
        raise DataError(f"{source} and another file do not fit: one lacks {names}")
    joined = tables[0]
    for name, column in tables[0].items() if len(tables) > 1 else ():
        parts = [columns[name] for columns in tables]
        is_list = len(column.shape) > 1
        joined[name] = (
            JoinedMatrix(parts, paths) if is_list else np.concatenate([p[:] for p in parts])
        )
    return Table(source, joined)


def _hdf5(path: Path) -> dict[str, Matrix]:
    columns: dict[str, Matrix] = {}
    with open_hdf5(path) as h5:
        for name, node in h5.items():
            kind = node.dtype.kind if getattr(node, "shape", ()) else "V"
            if kind in "OS":
                columns[name] = np.array(node.asstr(errors="replace")[:], dtype=np.str_)
            elif kind in "iufb":
                columns[name] = Hdf5Array(path, name)
    return columns


# Arrow --------------------------------------------------------------------------------------------

_TYPES = {
    "list": r"(large_|fixed_size_)?list<\w+: (u?int|half|float|double).*",
    "U": r"(dictionary<values=)?(large_)?string.*",
    "i": r"u?int\d+",
    "f": r"halffloat|float|double",
    "V": r"(large_)?binary|struct<.*bytes: (large_)?binary.*",
    "O": "",
}
"""Kinds of columns (:meth:`Table.of_kind`) by the names of Arrow's types."""


@dataclass(frozen=True)
class ListColumn(LazyArray):
    """A column of lists of numbers; ``values`` returns them with any lengths."""

    values: Callable[[], NDArray[Any]]


def _library(source: object, module: str) -> Any:
    """Import a module of pyarrow or pandas. Raises DataError: it is not installed."""
    remedy = f"reading {source} needs {module}: pip install 'gpq-faiss[train]'"
    return optional(module, remedy, DataError)


def arrow_columns(source: str, data: Any) -> dict[str, Matrix]:
    """Return the columns of a ``pyarrow.dataset.Dataset``, read when they are needed.

    Lists of numbers are then copied to a temporary file, which is mapped. Raises DataError: the
    columns of its files differ.
    """
    schema = data.schema
    if any({*part.physical_schema.names} != {*schema.names} for part in data.get_fragments()):
        raise DataError(f"{source} and another file do not fit: their columns differ")
    n, head = data.count_rows(), next(_scan(data, schema.names, 1), None)
    columns: dict[str, Matrix] = {}
    for name, arrow_type in zip(schema.names, schema.types, strict=True):
        kind = next(kind for kind, form in _TYPES.items() if re.match(form, str(arrow_type)))
        values = functools.partial(_values, source, data, name)
        if kind == "list":
            shape = n, 0 if head is None else len(head[name][0].as_py() or ())
            rows = functools.cache(functools.partial(_rows, source, data, name, shape))
            columns[name] = ListColumn(shape, rows, np.dtype("f4"), values)
        else:
            columns[name] = LazyArray((n,), values, np.dtype(kind))
    return columns


def _scan(data: Any, names: list[str], size: int) -> Iterator[Any]:
    """Yield batches of up to ``size`` rows; a scanner of pyarrow would decode whole row groups."""
    parquet = _library("columns", "pyarrow.parquet")
    for part in data.get_fragments():
        if type(part).__name__ == "ParquetFileFragment":
            yield from parquet.ParquetFile(part.path).iter_batches(size, columns=names)
        else:
            yield from part.to_batches(columns=names, batch_size=size)


@contextlib.contextmanager
def _scanning(source: str, name: str) -> Iterator[None]:
    """Turn an error of pyarrow into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{source}: {name!r} cannot be read ({one_line(error)})") from None


def _values(source: str, data: Any, name: str) -> NDArray[Any]:
    with _scanning(source, name):
        return np.asarray(data.to_table(columns=[name])[name].to_pandas())


def _rows(source: str, data: Any, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Return a column of lists as an array. Raises DataError: another width, or no numbers."""
    length_of = _library(source, "pyarrow.compute").list_value_length
    start = 0
    with tempfile.TemporaryFile() as file:
        out = np.memmap(file, np.float32, "w+", shape=shape)
    with _scanning(source, name):
        for batch in _scan(data, [name], 8192):
            lists = batch.column(0)
            numbers = lists.flatten().to_numpy(zero_copy_only=False)
            wrong = np.flatnonzero(np.asarray(length_of(lists).fill_null(0)) != shape[1])
            if wrong.size:
                raise DataError(
                    f"{source}: {name!r} has {shape[1]} numbers in row 0, but not in "
                    f"{named_rows(start + wrong)}: leave such rows out"
                )
            out[start : start + len(lists)] = numbers.reshape(-1, shape[1])
            start += len(lists)
    return out


def table_columns(source: str, table: Any) -> dict[str, Matrix]:
    """Return the columns of a table of pyarrow."""
    return arrow_columns(source, _library(source, "pyarrow.dataset").dataset(table))


def _csv(path: Path) -> dict[str, Matrix]:
    """Return a text with a header line, separated by what is most in that.

    Numbers in the first line are a row: columns are then named by their numbers. Columns with usual
    names of labels, ids and names are texts.
    """
    reader = _library(path, "pyarrow.csv")
    text = read_text(path, "a table with a header line")
    separator = max(",;\t|", key=text.partition("\n")[0].count)
    lines = [line for line in text.split("\n") if line.strip(f"{separator} \t")]
    names = [name.strip() for name in next(csv.reader(lines[:1], delimiter=separator), [])]
    has_header = not all(re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", n, re.I) for n in names)
    if len(lines) <= has_header or len(set(names)) < len(names) * has_header:
        raise DataError(
            f"{path} "
            "is empty, has a header line alone, or names a column twice"
            f": a table with a header line is needed"
        )
    names = names if has_header else [str(i) for i in range(len(names))]
    texts = [name for name in names if usual([*LABELS, *ITEMS], [name]) is not None]
    table = reader.read_csv(
        io.BytesIO("\n".join(lines[has_header:]).encode()),
        reader.ReadOptions(use_threads=False, column_names=names),
        reader.ParseOptions(delimiter=separator, newlines_in_values=True),
        reader.ConvertOptions(
            column_types=dict.fromkeys(texts, "string"), true_values=[], false_values=[]
        ),
    )
    return table_columns(str(path), table)


def _json(path: Path) -> dict[str, Matrix]:
    """Return the columns of a list of records, of records by line, or of a dict of columns."""
    is_lines = path.suffix.lower() != ".json"
    text = io.StringIO(read_text(path, "JSON"))
    frame = _library(path, "pandas").read_json(
        text, lines=is_lines, dtype=False, convert_dates=False
    )
    return frame_table(frame).columns


def frame_table(source: Any) -> Table:
    """Return the columns of a table in memory: of pandas, polars, DuckDB, pyarrow and others."""
    location = f"the {type(source).__name__}"
    try:
        data = _library(location, "pyarrow").table(source)
    except Exception as error:  # from pyarrow, or the table's library
        raise DataError(
            f"{location} has a column that cannot be converted ({one_line(error)})"
            f": leave out those of mixed types"
        ) from None
    index = (data.schema.pandas_metadata or {}).get("index_columns", [])
    unused = [name for name in data.schema.names if name in index and usual(ITEMS, [name]) is None]
    return Table(location, table_columns(location, data.drop_columns(unused)))

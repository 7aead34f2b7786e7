"""Tables: named columns of a file or an object, and which of them are labels, ids, names, images
and vectors; matrices that are read by rows without holding the file in memory.

Parquet, Arrow and CSV are read by pyarrow, arrays by numpy, h5py, SciPy and Faiss.
"""

from __future__ import annotations

import contextlib
import csv
import fnmatch
import functools
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from ..codes.checks import named_rows, to_numpy
from ..errors import DataError, one_line, optional
from ..ids import whole_numbers
from ..inputs import file_form, natural_order, read_text, reading
from ..store.hdf5 import Hdf5Array, Texts, as_texts, open_hdf5
from .images import is_image_name
from .labels import NO, WHOLE, YES, Labels, Rows, labels_of, plain_text

# Matrices -----------------------------------------------------------------------------------------


class LazyArray:
    """An array of known shape, which ``load`` returns when it is first read."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, load: Callable[[], NDArray[Any]]):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._load = functools.cache(load)

    def __getitem__(self, rows: Any) -> NDArray[Any]:
        return np.asarray(self._load()[rows])


class JoinedMatrix:
    """Concatenated rows of several matrices, read as float32.

    Raises DataError: they are not matrices of one width; ``names`` are theirs.
    """

    def __init__(self, matrices: Sequence[Any], names: Sequence[object]) -> None:
        for matrix, name in zip(matrices, names, strict=True):
            if len(matrix.shape) != 2 or matrix.shape[1] != matrices[0].shape[1]:
                raise DataError(
                    f"{names[0]} is {list(matrices[0].shape)}, {name} {list(matrix.shape)}"
                    f": rows of one width are needed"
                )
        self._matrices, self.dtype = matrices, np.dtype(np.float32)
        self._starts = np.cumsum([0, *(matrix.shape[0] for matrix in matrices)])
        self.shape = (int(self._starts[-1]), matrices[0].shape[1])

    def __getitem__(self, rows: Rows) -> NDArray[np.float32]:
        numbers = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows
        matrix_of = np.searchsorted(self._starts, numbers, side="right") - 1
        out = np.empty((len(numbers), self.shape[1]), np.float32)
        for i in np.unique(matrix_of).tolist():
            out[matrix_of == i] = self._matrices[i][numbers[matrix_of == i] - self._starts[i]]
        return out


Matrix = NDArray[Any] | LazyArray | Hdf5Array | JoinedMatrix
"""Rows of numbers: indexed by a slice with step 1 or by an array of positions, in any order."""


_NPY_HEADERS = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def npz_arrays(path: Path) -> dict[str, Matrix]:
    """Return the arrays of an ``.npz`` by name, each decompressed when it is first read."""

    def load(name: str) -> NDArray[Any]:
        with (
            reading(path, "an .npz archive without Python objects (.astype(str) of texts)"),
            np.load(path) as archive,
        ):
            return np.asarray(archive[name])

    arrays: dict[str, Matrix] = {}
    with np.load(path) as archive:
        for name in archive.files:
            with archive.zip.open(f"{name}.npy") as file:
                shape, _, dtype = _NPY_HEADERS[npy.read_magic(file)](file)
            arrays[name] = LazyArray(shape, dtype, functools.partial(load, name))
    return arrays


# Names of columns, and forms of files -------------------------------------------------------------

_IDS = ["ids", "imageid", "itemid", "imgid", "id", "uid"]
_IMAGES = [
    *["image", "imagepath", "path", "filepath", "filename", "file", "img", "images"],
    *["imagename", "imagefile", "imagefilename", "imgpath", "imgname", "fname", "imageindex"],
    *["pixelvalues"],
    *["imagepaths", "imagenames", "imagefiles", "filepaths", "filenames", "files", "imgpaths"],
]
_COUNTERS = ["index", "indexlevel0", "level0", "unnamed0", "unnamed01", ""]
_NAMES = ["name", "names", "path", "paths", "key", "keys", *_IMAGES]
USUAL = {
    "vectors": [
        *["features", "x", "data", "embeddings", "embedding", "vectors", "vector", "emb", "arr0"],
        *["feature", "feats", "feat", "imageembedding", "imageembeddings", "imgemb", "embed"],
    ],
    "labels": [
        *["labels", "label", "class", "category", "finelabel", "target", "targets"],
        *["classes", "categories", "classname", "labelname", "labelid", "classid", "categoryid"],
        *["tags", "tag", "cls", "y"],
    ],
    "ids": _IDS,
    "images": _IMAGES,
    "names": [*_NAMES, "url", "urls"],
    "items": [*_IDS, *_NAMES, "item"],
    "counters": _COUNTERS,
    "keys": [*_IDS, *_NAMES, "item", *_COUNTERS],
}
"""Usual names of columns in lower case without spaces and punctuation; ``items`` are those by which
a table of labels names its items, ``counters`` those that pandas writes, ``keys`` both."""


@dataclass(frozen=True)
class Options:
    """How a source is read; :func:`.open.open_data` documents the fields.

    ``source_labels`` is false where labels beside the data replace those of the source; then
    ``id_column`` is of their table, and of the source if that has it. ``ids_column`` is the column
    of the source that was given as ``ids``.
    """

    source_labels: bool = True
    label_column: str | None = None
    id_column: str | None = None
    ids_column: str | None = None
    name_column: str | None = None
    vectors: Sequence[str] | None = None
    keep: Sequence[str] = ()
    root: str | None = None
    image_column: str | None = None
    max_bad: float = 0.01


def usual(role: str, names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is usual for a role (:data:`USUAL`), if any."""
    plain = {re.sub(r"[\W_]", "", str(name).lower()): name for name in reversed(list(names))}
    return next((plain[name] for name in USUAL[role] if name in plain), None)


NUMBER = re.compile(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", re.IGNORECASE)
_KINDS = {
    "list": r"(large_|fixed_size_)?list<\w*: (u?int|half|float|double).*",
    "text": r"(dictionary<values=)?(large_)?string.*",
    "number": r"u?int\d+|halffloat|float|double",
    "bytes": r"(large_|fixed_size_)?binary.*",
    "image": r"struct<.*bytes: (large_)?binary.*",
    "other": "",
}
"""Kinds of columns by the names of Arrow's types."""


def _library(module: str, source: object) -> Any:
    """Import pyarrow, pandas or a module of them. Raises DataError: it is not installed."""
    return optional(
        module, f"reading {source} needs {module}: pip install 'gpq-faiss[train]'", DataError
    )


class Table:
    """Named columns of N rows: arrays, and columns of Arrow that are read when they are needed.

    Attributes:
        source: for messages.
        arrays: numbers or texts [N], and matrices, by name.
        data: a table or a ``Dataset`` of pyarrow, if any; ``arrays`` go before its columns.
        kinds: name -> ``list`` (rows of numbers), ``number``, ``text``, ``image`` (also arrays of
            more dimensions), ``bytes`` or ``other``.
    """

    def __init__(self, source: str, arrays: Mapping[str, Matrix], data: Any = None) -> None:
        self.source, self.arrays, self.data = source, dict(arrays), data
        self.kinds = {
            field.name: next(
                kind for kind, form in _KINDS.items() if re.match(form, str(field.type))
            )
            for field in (() if data is None else data.schema)
        }
        for name, array in self.arrays.items():
            kind = "number" if array.dtype.kind in "iufb" else "text"
            self.kinds[name] = {0: kind, 1: kind, 2: "list"}.get(len(array.shape), "image")

    def of_kind(self, *kinds: str) -> list[str]:
        """Return the names of the columns of these kinds."""
        return [name for name, kind in self.kinds.items() if kind in kinds]

    def column(self, name: str | None, option: str) -> str:
        """Return the name of a column. Raises DataError: there is none; ``option`` names it."""
        if name is None or name not in self.kinds:
            raise DataError(
                f"{self.source} has no column {repr(name) if name else 'of a usual name'} (it has "
                f"{', '.join(repr(column[:40]) for column in list(self.kinds)[:20])})"
                f": name one with --read {option}"
                + ", or write a header, if the first line is a row"
                * self.source.endswith(".csv")
            )
        return name

    def values(self, name: str) -> NDArray[Any]:
        """Return the values of a column: an array of numbers, or of Python's objects."""
        if name in self.arrays:
            return np.asarray(self.arrays[name][:])
        if hasattr(self.data, "column"):  # in memory, where a scan takes long over many columns
            return np.asarray(self.data.column(name).to_pandas())
        kind = self.data.schema.field(name).type
        chunks = [chunk.cast(kind) for chunk in self._batches(name, 1 << 16)]
        return np.asarray(_library("pyarrow", self.source).chunked_array(chunks, kind).to_pandas())

    def texts(self, name: str) -> Texts:
        """Return a column as texts; empty where there is no value."""
        return as_texts(map(plain_text, self.values(name).tolist()))

    def matrix(self, name: str) -> Matrix:
        """Return a column of lists of numbers, also of such texts as ``"[0.1, 0.2]"``, as a matrix
        [N, width], another one as an array [N].

        Lists of Arrow are copied to a temporary file, which is mapped, when they are first read.
        """
        if self.kinds[name] == "text":
            with contextlib.suppress(ValueError):  # other texts
                return np.array(
                    [
                        # Also as the texts of numpy's and torch's numbers and arrays.
                        re.sub(r"np\.\w+|array|tensor|[\[\](),;]", " ", text).split()
                        for text in self.texts(name)
                    ],
                    np.float32,
                )
        if name in self.arrays or self.kinds[name] != "list":
            return self.arrays[name] if name in self.arrays else self.values(name)
        shape = (
            _library("pyarrow.dataset", self.source).dataset([self.data]).count_rows(),
            next((len(lists[0].as_py() or ()) for lists in self._batches(name, 1)), 0),
        )
        return LazyArray(shape, np.float32, functools.partial(self._rows, name, shape))

    def _batches(self, name: str, size: int) -> Iterator[Any]:
        """Yield up to ``size`` rows of a column (a scanner of Arrow decodes whole row groups).

        Raises DataError: they are damaged.
        """
        try:
            for part in (
                _library("pyarrow.dataset", self.source).dataset([self.data]).get_fragments()
            ):
                reader = (
                    _library("pyarrow.parquet", self.source).ParquetFile(part.path).iter_batches
                    if type(part).__name__ == "ParquetFileFragment"
                    else part.to_batches
                )
                yield from (
                    batch.column(0)
                    for batch in reader(columns=[name], batch_size=size)
                    if len(batch)
                )
        except Exception as error:  # from pyarrow
            raise DataError(f"{self.source}: {name!r} cannot be read ({one_line(error)})") from None

    def _rows(self, name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
        """Return a column of lists as an array. Raises DataError: a row of another width."""
        start = 0
        with tempfile.TemporaryFile() as file:
            out = np.memmap(file, np.float32, "w+", shape=shape)
        for lists in self._batches(name, 8192):
            wrong = np.flatnonzero(np.asarray(lists.value_lengths().fill_null(0)) != shape[1])
            if wrong.size:
                raise DataError(
                    f"{self.source}: {name!r} has {shape[1]} numbers in row 0, but not in "
                    f"{named_rows(start + wrong)}: leave such rows out"
                )
            out[start : start + len(lists)] = (
                lists.flatten().to_numpy(zero_copy_only=False).reshape(-1, shape[1])
            )
            start += len(lists)
        return out

    def labels(self, o: Options) -> Labels:
        """Return the labels of the requested or usual column, or of columns of 1, and 0 or -1.

        Raises DataError: there is no such column, or its values are no labels.
        """
        only = next(iter(self.kinds)) if len(self.kinds) == 1 else None
        label = o.label_column or usual("labels", self.kinds) or only
        # "y" may also be a class beside x and z.
        if label in (None, "y") and o.label_column is None:
            columns = {n: self.texts(n) for n in self.of_kind("text", "number") if n != o.id_column}
            classes = [
                n for n in columns if usual("keys", [n]) is None or {*columns[n]} <= {*YES, *NO}
            ]
            other_values = {text for name in classes for text in columns[name]} - {*YES, ""}
            if len(classes) > 1 and (other_values <= {*NO} or other_values <= {"-1", "-1.0"}):
                return Labels.from_multihot(
                    np.column_stack([np.isin(columns[name], YES) for name in classes]), classes
                )
        label = self.column(
            label, "label_column, or that of ids or names beside columns of 0 and 1 with id_column"
        )
        return labels_of(self.values(label), f"{self.source}: {label!r}")

    def attributes(self, o: Options, images: str | None = None) -> dict[str, Any]:
        """Return labels, ids, texts and notes of the rows, as attributes of a data set.

        Columns have their usual names if the options name none; ``images`` is that of images, or of
        their paths, which are the names.
        """
        label = o.label_column or (usual("labels", self.kinds) if o.source_labels else None)
        ids = (
            o.ids_column
            or (o.id_column if o.source_labels or o.id_column in self.kinds else None)
            or usual("ids", self.kinds.keys() - {label})
        )
        name = o.name_column
        attributes: dict[str, Any] = {
            "notes": [f"images are in column {images!r}"] * (images is not None),
            "table": self,
        }
        if label is not None:
            attributes |= {
                "labels": self.labels(replace(o, label_column=label)),
                "label_source": (Path(self.source).name, f"in column {label!r}"),
            }
        if ids is not None:
            values = self.values(self.column(ids, "ids"))
            if (
                self.kinds[ids] == "text"
                and not (o.ids_column or (o.id_column and o.source_labels))
                and not all(WHOLE.fullmatch(plain_text(value)) for value in values)
            ):
                name = name or (images if self.kinds.get(images or "") == "text" else ids)
                attributes["notes"] += [
                    f"{ids!r} holds texts{': they are the names' * (name == ids)}; ids are row "
                    "numbers"
                ]
            else:
                attributes["ids"] = whole_numbers(values, f"{self.source}: {ids!r}")
        unused = [
            column
            for column in self.of_kind("text", "number", "bytes")
            if column not in (ids, label)
            and (
                self.kinds[column] != "bytes" or not (column == images or usual("images", [column]))
            )
        ]
        name = name or (images if images in unused else usual("names", unused))
        columns = {text: text for text in o.keep} | ({"name": name} if name else {})
        return attributes | {
            "texts": {
                text: self.texts(self.column(column, "keep")) for text, column in columns.items()
            }
        }

    def vectors(self, o: Options) -> tuple[Matrix, list[str]]:
        """Return the vectors, and notes on their columns.

        They are the requested columns (patterns such as ``f*`` match), a column of lists, or
        columns of numbers that are numbered (``f0``, ``f1`` ...) or the only ones.

        Raises DataError: it is unclear which columns they are, or they do not hold numbers, or are
        columns of 0 and 1 alone that are not numbered.
        """
        used = {
            o.label_column,
            o.id_column,
            o.ids_column,
            o.name_column,
            *o.keep,
            usual("labels", self.kinds),
        }
        # Also lists in texts, as pandas writes them to CSV.
        lists = [
            name
            for name in self.of_kind("list", "text")
            if name not in used
            and (
                self.kinds[name] == "list"
                or (usual("vectors", [name]) and len(self.matrix(name).shape) == 2)
            )
        ]
        prefixes = {
            name: re.sub(r"\d+$", "", name)
            for name in self.kinds
            if name not in used and usual("keys", [name]) is None
        }
        numbers = [name for name in prefixes if self.kinds[name] == "number"]
        numbered = [p for p, n in Counter(prefixes[name] for name in numbers).items() if n > 1]
        # Two groups of numbered columns are ambiguous.
        chosen = (
            sorted((name for name in prefixes if [prefixes[name]] == numbered), key=natural_order)
            if numbered
            else numbers
        )
        if o.vectors is not None:
            chosen = [
                self.column(name, "vectors")
                for pattern in o.vectors
                for name in fnmatch.filter(self.of_kind("number", "list"), pattern) or [pattern]
            ]
        elif lists:
            name = usual("vectors", lists)
            chosen = [name] if name else [*lists, *(chosen if numbered else [])]
        if len(chosen) == 1:
            return self.matrix(chosen[0]), [f"vectors are in column {chosen[0]!r}"]
        lengths = {self.arrays[name].shape[0] for name in chosen if name in self.arrays}
        # Arrays that are not named may be one vector for each name.
        if (
            {*map(self.kinds.get, chosen)} != {"number"}
            or len(lengths) > 1
            or (lengths and o.vectors is None)
            or any(map(is_image_name, chosen))
            # Columns of 0 and 1 are classes.
            or (
                not (o.vectors or numbered)
                and all({*self.values(name).tolist()} <= {0, 1} for name in chosen)
            )
        ):
            raise DataError(
                f"{self.source}: which column holds the vectors? (it has "
                f"{', '.join((lists or list(self.kinds))[:20])}): name them with --read"
                " vectors=NAME or a pattern, 'f*', or a column of images with image_column=NAME"
            )
        matrix = LazyArray(
            (len(self.values(chosen[0])), len(chosen)),
            np.float64,
            lambda: np.column_stack([self.values(name) for name in chosen]),
        )
        left_out = [repr(name[:40]) for name in self.kinds if name not in chosen][:20]
        return matrix, [
            f"vectors are the {len(chosen):,} columns {chosen[0]!r} to {chosen[-1]!r}",
            *[f"columns that are not in the vectors: {', '.join(left_out)}"] * bool(left_out),
        ]

    def image_column(self, requested: str | None) -> str | None:
        """Return the column of images or of their paths, if any: the requested, or a usual one."""
        images = self.of_kind("image", "bytes") or [
            name
            for name in self.of_kind("text")
            if usual("images", [name]) and any(map(is_image_name, self.texts(name)[:100]))
        ]
        if len(images) > 1 and requested is None and usual("images", images) is None:
            raise DataError(
                f"{self.source} has several columns of images ({', '.join(images[:20])}): name one "
                "with --read image_column, or rename the files: keys of tars have no dots"
            )
        name = requested or usual("images", images) or next(iter(images), None)
        return name and self.column(name, "image_column")


# Files of tables ----------------------------------------------------------------------------------


def open_tables(paths: Sequence[Path]) -> Table:
    """Return the columns of files of one form (:func:`..inputs.file_form`), one below the other.

    Texts of other forms than :data:`ENDINGS` are CSV. Raises DataError: damaged, not a table, or
    files with different columns.
    """
    source, opened, names = str(paths[0]), list[Any](), list[set[str]]()
    form, remedy = file_form(paths[0], "a file of data")
    if remedy:
        raise DataError(f"{source} is {form}: {remedy}")
    readers: dict[str, Any] = {
        "npy": _npy,
        "npz": npz_arrays,
        "hdf5": _hdf5,
        "a stream of Arrow": lambda path: (
            _library("pyarrow", path).ipc.open_stream(path).read_all()
        ),
        "json": lambda path: _library("pyarrow.json", path).read_json(str(path)),
        "JSON of records": lambda path: frame_table(read_records(path)).data,
        "mat": lambda path: {
            # Matrices may be sparse, and that of one row is squeezed.
            name: np.atleast_2d(to_numpy(array)) if usual("vectors", [name]) else to_numpy(array)
            for name, array in _library("scipy.io", path).loadmat(path, squeeze_me=True).items()
            if getattr(array, "shape", ())
        },
        "vecs": lambda path: {
            "arr_0": getattr(
                _library("faiss.contrib.vecs_io", path), f"{path.suffix[1:].lower()}_mmap"
            )(path)
        },
        **dict.fromkeys(
            ("parquet", "arrow"),
            lambda path: _library("pyarrow.dataset", path).dataset(str(path), format=form),
        ),
    }
    for path in paths:
        with reading(path, f"a file of the form {form} (no Python objects: .astype(str) of texts)"):
            opened.append(readers.get(form, _csv)(path))
            names.append({*getattr(getattr(opened[-1], "schema", None), "names", opened[-1])})
    if lacking := sorted(set().union(*names) - names[0].intersection(*names)):
        raise DataError(f"{source} and another file do not fit: one lacks {', '.join(lacking)}")
    if not isinstance(opened[0], dict):
        with reading(paths[0], f"a file of the form {form}"):
            return Table(
                source,
                {},
                opened[0]
                if len(opened) == 1
                else _library("pyarrow.dataset", source).dataset(opened),
            )
    parts = {
        name: [arrays[name] for arrays in opened]
        for name, array in opened[0].items()
        if array.shape
    }
    joined = {
        name: JoinedMatrix(arrays, paths)
        if max(len(array.shape) for array in arrays) > 1
        else np.concatenate([array[:] for array in arrays])
        for name, arrays in parts.items()
        if len(arrays) > 1
    }
    return Table(source, {name: arrays[0] for name, arrays in parts.items()} | joined)


def _npy(path: Path) -> dict[str, Matrix]:
    """Return the array of an ``.npy`` file, or the fields of a structured one."""
    array = npy.open_memmap(path, "r")
    return {name: array[name] for name in array.dtype.names or ()} or {"arr_0": array}


def read_records(path: Path) -> Any:
    """Return what is in a JSON file, a dict or rows, also one in each line. Raises DataError: it is
    that of COCO, or no JSON.
    """
    text = read_text(path, "JSON of records").strip()
    with reading(path, "JSON of records"):
        value: Any = (
            [json.loads(line) for line in text.split("\n") if line]
            if text[:1] == "{" and "\n{" in text
            else json.loads(text)
        )
        if isinstance(value, dict) and {"images", "annotations"} <= {*value}:
            raise DataError(
                f"{path} is JSON of COCO, with annotations of parts of images: save a table with "
                "a file_name and a category in each line as CSV"
            )
    return value


def _hdf5(path: Path) -> dict[str, Matrix]:
    """Return the arrays of numbers and of texts of an HDF5 file and its groups; others are left
    out."""
    with open_hdf5(path) as h5:
        nodes = dict(h5.items())
        h5.visititems(lambda name, node: nodes.update({name: node}))
        groups = {name.rpartition("/")[0] for name, node in nodes.items() if hasattr(node, "shape")}
        return {
            name.rpartition("/")[2] if len(groups) == 1 else name: (
                Hdf5Array(path, name)
                if node.dtype.kind in "iufb"
                else np.array(node.asstr(errors="replace")[:], dtype=np.str_)
            )
            for name, node in nodes.items()
            if getattr(node, "shape", ())
            and (
                node.dtype.kind in "iufbS"
                or (node.dtype.metadata or {}).get("vlen") in (str, bytes)  # no references, images
            )
        }


def _csv(path: Path) -> Any:
    """Return a text with a header line, separated by what is most in that.

    Numbers may be separated by blanks. A first line of numbers, or with a fraction or the name of
    an image, is a row, and columns are named by their numbers, unless it counts the columns: 0, 1,
    2 and so on. Columns with usual names of labels, ids and names are texts. Numbers between
    semicolons may have decimal commas.
    """
    reader = _library("pyarrow.csv", path)
    text = read_text(path, "a table with a header line").lstrip("\n# ")
    if all(map(NUMBER.fullmatch, text.partition("\n")[0].split())):  # as numpy and MATLAB write
        text = re.sub(" +", "\t", re.sub("(?m)^ +| +$", "", text))
    first = text.partition("\n")[0]
    # Commas before a semicolon are decimal.
    separator = max(",;\t|", key=re.sub(r"(?<=\d),(?=\d+(;|$))", "", first).count)
    names = [
        name.strip() or f"Unnamed: {i}" + ".1" * (f"Unnamed: {i}" in first)  # as in pandas
        for i, name in enumerate(next(csv.reader([first], delimiter=separator), []))
    ]
    counted = [str(i) for i in range(len(names))]
    is_row = all(NUMBER.fullmatch(name.replace(",", ".")) for name in names) or any(
        is_image_name(name) or (NUMBER.fullmatch(name) and "." in name) for name in names
    )
    # Also "0, 0.1, 0.2", as pandas writes equal names.
    has_header = not is_row or (
        len(names) > 2 and (names == counted or names[1:3] == [f"{names[0]}.{i}" for i in (1, 2)])
    )
    names = names if has_header else counted
    if len(set(names)) < len(names) or not text[len(first) * has_header :].strip():
        raise DataError(
            f"{path} is empty, has a header line alone, or names a column twice"
            f": a table with a header line is needed"
        )
    return reader.read_csv(
        _library("pyarrow", path).BufferReader(text.encode()),
        reader.ReadOptions(use_threads=False, column_names=names, skip_rows=int(has_header)),
        reader.ParseOptions(delimiter=separator, newlines_in_values=True),
        reader.ConvertOptions(
            column_types={
                name: "string"
                for name in names
                if usual("labels", [name]) or usual("keys", [name]) is not None
            },
            true_values=[],
            false_values=[],
            decimal_point="." if separator != ";" or re.search(r"\d\.\d", text) else ",",
        ),
    )


def frame_table(source: Any) -> Table:
    """Return the columns of a table in memory: one of pandas, polars, DuckDB, pyarrow and others, a
    dict of columns, a list of rows, or a structured array."""
    location = f"the {type(source).__name__}"
    pyarrow, pandas = (_library(module, location) for module in ("pyarrow", "pandas"))
    try:
        if isinstance(source, dict | list | np.ndarray):
            source = pandas.DataFrame(source)
        data = pyarrow.table(source)
        if hasattr(source, "iloc") and source.index.tolist() != [*range(len(source))]:
            # Also a range, for example of a reversed frame.
            data = pyarrow.Table.from_pandas(source, preserve_index=True)
    except Exception as error:  # from pyarrow, or the table's library
        raise DataError(
            f"{location} has a column that cannot be converted ({one_line(error)})"
            f": leave out those of mixed types"
        ) from None
    return Table(
        location,
        {},
        data.rename_columns(
            [
                "index"
                if name in (data.schema.pandas_metadata or {}).get("index_columns", ())[:1]
                and usual("keys", [name]) is None
                else name
                for name in data.schema.names
            ]
        ),
    )

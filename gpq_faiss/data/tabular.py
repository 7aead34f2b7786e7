"""Vectors and images of tables: ``features:FILES``, ``csv:``, ``parquet:`` and ``list:FILE``, ``hf:FOLDER``, and tables in memory."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError, one_line
from ..files import fingerprint
from ..inputs import check_file, check_memory, read_text
from ..store import RowReader
from .arrays import JoinedMatrix, Matrix, NpyArray, read_ids
from .base import FeatureDataset, ImageDataset, features, held_features, images
from .given import read_labels
from .images import BrokenImageError
from .labels import Labels, class_order, labels_of
from .paths import file_fingerprint, files_of, is_url, local_path, without_secrets
from .tables import (
    IDS,
    LABELS,
    NUMBERS,
    PLAIN,
    About,
    ArrowMatrix,
    Options,
    array_table,
    arrow_table,
    csv_table,
    first_of,
    parquet_table,
)

SUFFIXES = (".npy", ".npz", ".h5", ".hdf5", ".parquet", ".pq")
"""Endings of files of vectors."""

# Files of vectors -------------------------------------------------------------------------------------------------------


def _open(path: Path, o: Options) -> tuple[Matrix, About]:
    """The contents of one file. Raises as :func:`open_features`."""
    suffix, what = path.suffix.lower(), "a Parquet file of vectors"
    if check_file(path, "a file of features") == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    if suffix not in SUFFIXES:
        raise DataError(f"{path}: features are read from {', '.join(SUFFIXES)}, not from {suffix or 'this'}")
    if suffix == ".npy" and o.keep:
        raise UsageError(f"--read keep: {path} has no columns to keep: use Parquet or .npz")
    if suffix == ".npy":
        return NpyArray(path, "vectors"), About()
    table = parquet_table(path, what, o.memory) if suffix in (".parquet", ".pq") else array_table(path, o)
    if "codebooks" in table.names:  # our features.h5 has packed labels
        with RowReader(path, kind="features") as reader:
            stored = reader.labels() if o.want_labels else None
            labels = None if stored is None else Labels(stored, reader.header.class_names)
            return table.matrix("features"), About(labels, reader.ids(), reader.texts())
    found, used = table.describe(o)
    name = table.vectors({*used, *LABELS}, o.vectors)
    if name is None:
        there = ", ".join(table.names[:20]) or "no array of a usual name"
        raise DataError(f"{path} has no column of vectors (it has {there}): name it 'features'")
    return table.matrix(name), found


def _joined(files: Sequence[Path], parts: Sequence[tuple[Matrix, About]]) -> tuple[Matrix, About]:
    """Concatenated rows of several files. Raises DataError: they do not fit."""
    found = [part for _, part in parts]
    held = [(part.labels is not None, part.ids is not None, *sorted(part.texts)) for part in found]
    other = next((i for i, what in enumerate(held) if what != held[0]), None)
    if other is not None:
        what = "one has labels, ids or names that the other has not: either all files or none may have them"
        raise DataError(f"{files[0]} and {files[other]} do not fit: {what}")
    joined = About(notes=list(dict.fromkeys(note for part in found for note in part.notes)))
    labels = [part.labels for part in found if part.labels is not None]
    if labels:
        names = class_order(name for part in labels for name in part.class_names)
        joined.labels = Labels(np.concatenate([part.over(names).packed for part in labels]), tuple(names))
    if found[0].ids is not None:
        joined.ids = np.concatenate([part.ids for part in found if part.ids is not None])
    for name in found[0].texts:
        joined.texts[name] = np.concatenate([part.texts[name] for part in found])
    return JoinedMatrix([matrix for matrix, _ in parts], files), joined


def open_features(path: str, o: Options = PLAIN) -> FeatureDataset:
    """Files of vectors, one or several concatenated (:func:`.paths.files_of`); rows are checked when read.

    Labels are class numbers with -1 for none, 0/1 rows, or (Parquet) names. Files of labels and ids replace those inside.
    """
    files = files_of(path)
    try:
        parts = [_open(file, o) for file in files]
        marks = [file_fingerprint(file) for file in files]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    several = len(files) > 1
    matrix, found = _joined(files, parts) if several else parts[0]
    n = matrix.shape[0] if matrix.shape else 0
    name = f"features:{without_secrets(path)}"
    check_memory(8 * n, f"{name}: the ids of its {n:,} rows", o.memory)
    if o.label_file is not None:
        found.labels = read_labels(o.label_file, n)
    if o.id_file is not None:
        found.ids = read_ids(o.id_file, "--ids")
    return features(name, matrix, found, fingerprint("several", *marks) if several else marks[0])


# Tables in memory -------------------------------------------------------------------------------------------------------


def open_frame(source: Any, o: Options = PLAIN) -> FeatureDataset:
    """Vectors in an Arrow-compatible table, with columns of labels, ids and names (default: by the usual names).

    They are in a column of lists, or columns of numbers, one per dimension; default: the only column of lists, or one called
    ``features``, ``embedding`` ...; else all remaining columns of numbers.
    """
    name, where = type(source).__name__, f"the {type(source).__name__}"
    try:
        import pyarrow

        data = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except ImportError:
        raise DataError("reading a table needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    except Exception as error:  # from pyarrow, or the table's library
        what = f"{where} has a column that cannot be converted ({one_line(error)})"
        raise DataError(f"{what}: leave out those of mixed types") from None
    table = arrow_table(where, data.schema, data.column)
    found, used = table.describe(o)
    index = (data.schema.pandas_metadata or {}).get("index_columns", [])
    used.update(one for one in index if isinstance(one, str))
    column = table.vectors(used, o.vectors) if isinstance(o.vectors, str | None) else None
    if column is not None:
        return held_features(name, table.matrix(column).read(slice(None)), found)
    chosen = o.vectors or [n for n in table.names if n not in used and table.kind(n) in NUMBERS]
    columns = [table.column(n) for n in chosen]
    wrong = next((f"{n!r} is not of numbers" for n in chosen if table.kind(n) not in NUMBERS), None)
    if wrong or not columns:
        what = wrong or "no column of vectors"
        raise DataError(f"{where}: {what}: a column of lists, or columns of numbers, are needed")
    return held_features(name, np.column_stack([column.to_numpy() for column in columns]), found)


def _hub_rows(source: Any, name: str) -> tuple[Any, list[str]]:
    """A ``datasets.Dataset`` of all parts, test parts last, and notes. Raises DataError: it cannot be read by position."""
    notes = []
    try:
        import datasets

        found = datasets.load_from_disk(str(Path(source).expanduser())) if isinstance(source, str) else source
        if isinstance(found, datasets.DatasetDict) and found:
            parts = sorted(found, key=lambda part: (part.lower() == "test", part))
            notes.append(f"parts: {', '.join(parts)}")
            found = datasets.concatenate_datasets([found[part] for part in parts])
    except ImportError:
        raise DataError(f"reading {name} needs the package datasets: pip install 'gpq-faiss[hf]'") from None
    except Exception as error:  # from pyarrow, json, or datasets
        what = f"is not a data set that save_to_disk wrote, or it is damaged ({one_line(error)})"
        raise DataError(f"{name} {what}") from None
    if not isinstance(found, datasets.Dataset):
        what = f"{type(found).__name__} cannot be read by position"
        raise DataError(f"{name}: {what}: give a Dataset, not a stream")
    return found, notes


def open_hf(source: Any, o: Options = PLAIN) -> ImageDataset | FeatureDataset:
    """Images or vectors of a folder of ``save_to_disk``, a ``Dataset`` or a ``DatasetDict``.

    Images are in the column that is named, ``image``, or the only one of images; without images, vectors in the one that is named or the
    only one of lists of numbers. Labels are ``ClassLabel``, numbers, names, or lists of these.
    """
    folder = isinstance(source, str)
    name = f"hf:{source}" if folder else type(source).__name__
    rows, notes = _hub_rows(source, name)
    data = rows.data.table if rows._indices is None else rows.with_format("arrow")[:]

    def read(column: str) -> Any:
        try:  # Arrow checks neither offsets nor UTF-8
            data.column(column).validate(full=True)
        except (ValueError, OSError) as error:  # ArrowInvalid is a ValueError
            why = one_line(error, 120)
            raise DataError(f"{name}: column {column!r} is damaged ({why}): write it again") from None
        return data.column(column)

    def classes(column: str) -> Any:
        kind = rows.features[column]
        found = getattr(getattr(kind, "feature", kind), "names", None)
        if found is not None and not all(isinstance(one, str) for one in found):
            raise DataError(f"{name}: the class names of the labels are not texts: save the data set again")
        return found

    table = arrow_table(name, data.schema, read)
    table.class_names = classes
    kinds = [] if o.vectors else [n for n, kind in rows.features.items() if type(kind).__name__ == "Image"]
    image = o.image_column or first_of(("image",), kinds) or (kinds[0] if len(kinds) == 1 else None)
    if image is not None and image not in kinds:
        there = ", ".join(kinds) or "none"
        raise DataError(f"--read image_column={image}: no column of images (there are: {there})")
    about, used = table.describe(o)
    about.notes, texts = notes + about.notes, dict(about.texts)
    made: ImageDataset | FeatureDataset
    if image is None:
        chosen = table.vectors(used, o.vectors)
        if chosen is None:
            there = ", ".join(table.names) or "none"
            raise DataError(f"{name}: which column holds the images or vectors? (there are: {there})")
        made = features(name, ArrowMatrix(table.column(chosen), f"{name}: {chosen!r}"), about)
    else:
        column = table.column(image)

        def fetch(i: int) -> bytes | str:
            value = column[i].as_py() or {}
            if value.get("bytes") is not None:
                return bytes(value["bytes"])
            if value.get("path") and not folder:  # a path in a folder from elsewhere is not opened
                return str(value["path"])
            raise BrokenImageError(f"row {i}", "there is no image in this row")

        own = texts["name"].tolist() if "name" in texts else [f"row {i}" for i in range(len(rows))]
        made = images(name, "hf", own, [f"{name}!{text}" for text in own], about, o.max_bad, fetch=fetch)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    made.fingerprint = fingerprint("hf", *marks, rows._fingerprint, about.mark(), made.ids.tobytes())
    made.texts = texts
    return made


# Tables and lists of paths of images ------------------------------------------------------------------------------------


def _list_of(path: str, o: Options) -> tuple[Path, Path]:
    """A list as a local file, and the base folder of its paths."""
    if is_url(path) and o.root is None:
        raise UsageError(f"{without_secrets(path)}: where are its images? Give their folder: --read root=DIR")
    file = local_path(path)
    return file, file.parent if o.root is None else Path(o.root).expanduser()


def _listed(name: str, listed: Sequence[str], base: Path, about: About, o: Options) -> ImageDataset:
    """The files of a list, relative ones below ``base``, with back-slashes converted."""
    plain = [one if os.sep == "\\" else one.replace("\\", "/") for one in listed]
    paths = [os.path.join(base, one) for one in plain]
    return images(name, "image files", listed, paths, about, o.max_bad)


def open_table(path: str, o: Options = PLAIN, *, form: str) -> ImageDataset:
    """Images of a table (``form`` ``csv`` or ``parquet``) with a column of paths; without a column of ids they are row numbers."""
    file, base = _list_of(path, o)
    table = (parquet_table if form == "parquet" else csv_table)(file, "a table of images")
    image = o.image_column or "image"
    listed = table.cells(image, ": name it with --read image_column")
    wrong = next((i for i, one in enumerate(listed) if not one or not isinstance(one, str)), None)
    if wrong is not None or not listed:
        at = "no rows" if wrong is None else f"{listed[wrong]!r} in row {wrong} of column {image!r}"
        raise DataError(f"{file} has {at}: paths of images are needed")
    ids = first_of(IDS, table.names)
    texts = ids is not None and table.holds_texts(ids)
    about, _ = table.describe(replace(o, names=None if texts else image))
    return _listed(f"{form}:{without_secrets(path)}", listed, base, about, o)


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The non-blank lines of a text with their numbers from 1; ``what`` names its content. Raises DataError: missing, empty or not text."""
    lines = [(i, line.strip()) for i, line in enumerate(read_text(path, what).split("\n"), 1) if line.strip()]
    if not lines or any("\0" in line for _, line in lines):
        raise DataError(f"{path} is empty or not a text: {what} was expected")
    return lines


def _labels_in(line: str) -> list[str]:
    """The labels at the end of ``line``: 0/1 values, or one class number."""
    tokens = line.split()[1:]
    ones = list(itertools.takewhile({"0", "1"}.__contains__, reversed(tokens)))
    return ones[::-1] or [token for token in tokens[-1:] if token.removeprefix("-").isdecimal()]


def open_list(path: str, o: Options = PLAIN) -> ImageDataset:
    """Images of a text list. Each line is a path and 0/1 labels (``images/a.jpg 0 1 0``; all 0 is unlabelled), or a path and one class
    number (-1 is unlabelled), or a path alone. Paths may contain blanks. Class names are those of ``classes.txt`` beside the list.
    """
    file, base = _list_of(path, o)
    lines = read_lines(file, "a list of images")
    columns = len(_labels_in(lines[0][1]))
    values: list[list[int]] = []
    for number, line in lines if columns else ():
        found = _labels_in(line) if columns > 1 else _labels_in(line)[-1:]
        if len(found) != columns or len(found[0]) > 18:
            what = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            first = f"expected as in line {lines[0][0]}"
            raise DataError(f"{file} line {number}: {what} {first}, found {line[-60:]!r}")
        values.append([int(text) for text in found])
    names = [line.rsplit(maxsplit=columns)[0] if columns else line for _, line in lines]
    beside = file.parent / "classes.txt"
    classes = (
        [name for _, name in read_lines(beside, "class names")] if columns and beside.is_file() else None
    )
    labels = labels_of(np.array(values), str(file), class_names=classes) if columns else None
    if labels is not None and not labels.has().any():
        labels = None
    about = About(labels, notes=["no labels"] if labels is None else [])
    return _listed(f"list:{without_secrets(path)}", names, base, about, o)

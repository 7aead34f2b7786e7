"""Tables in memory (pyarrow, pandas, polars, DuckDB), and ``hf:FOLDER``: Hugging Face data sets, on disk or in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from .base import DEFAULT_LABEL_COLUMN, Options
from .columns import LABELS, Columns, first_of
from .folder import is_test_split
from .images import BrokenImageError, FileImages, file_images
from .parquet import is_list, matrix_of
from .paths import file_fingerprint
from .vectors import FileFeatures, Vectors, check_array, features_in_memory, file_features

_IMAGES = ("image", "img")
_MORE_LABELS = ("fine_label", "class", "category", "target")


def open_frame(source: Any, o: Options) -> FileFeatures:
    """Vectors in an Arrow-compatible table, with columns of labels, ids and names (default: by the usual names).

    ``vectors`` is a column of lists, or columns of numbers, one per dimension; default: the only column of lists, or one called
    ``features``, ``embedding`` ...; else all remaining columns of numbers.
    """
    name = type(source).__name__
    try:
        import pyarrow
    except ImportError:
        raise DataError("reading a table needs pyarrow: pip install 'gpq-faiss[parquet]'") from None
    try:
        table = source if isinstance(source, pyarrow.Table) else pyarrow.table(source)
    except Exception as error:  # from pyarrow, or the table's library
        why = " ".join(str(error).split())[:160]
        remedy = "leave out those of mixed types"
        raise DataError(f"the {name} has a column that cannot be converted ({why}): {remedy}") from None
    columns = Columns(table.schema, table.column, f"the {name}")
    label = first_of(LABELS, columns.names) if o.label_column == DEFAULT_LABEL_COLUMN else o.label_column
    found = columns.describe(label, ids=o.ids, names=o.names, keep=o.keep)
    index = (table.schema.pandas_metadata or {}).get("index_columns", [])  # of pandas
    free = [one for one in columns.names if one not in found.used and one not in index]
    matrix = _matrix(columns, o.vectors, free)
    return features_in_memory(name, matrix, found)


def _matrix(columns: Columns, vectors: str | Sequence[str] | None, free: Sequence[str]) -> NDArray[Any]:
    if vectors is None:
        vectors = columns.vectors(None, free, "name it, vectors=...")
        vectors = vectors or [name for name in free if columns.is_numeric(name)]
    names = [vectors] if isinstance(vectors, str) else list(vectors)
    for name in names:
        columns.check(name)
    if len(names) == 1 and is_list(columns.types[names[0]]):
        return matrix_of(columns.column(names[0]), f"{columns.where}: {names[0]!r}")
    wrong = next((name for name in names if not columns.is_numeric(name)), None)
    if wrong is not None:
        what = "a column of lists, or columns of numbers, are needed"
        raise DataError(f"{columns.where}: {wrong!r} is {columns.types[wrong]}: {what}")
    if not names:
        raise DataError(f"{columns.where} has no column of vectors: lists of numbers, or numbers, are needed")
    return np.column_stack([columns.column(name).to_numpy() for name in names])


class HubVectors(Vectors):
    """Vectors of a column of a Hugging Face data set. Raises DataError: not lists of numbers of one width."""

    def __init__(self, column: Any, name: str, where: str) -> None:
        self.name, self.where = name, f"{where}: {name!r}"
        self.column = _only(column, name, where).with_format("arrow")
        self.n, self.width = len(column), 0
        if not self.n:
            raise DataError(f"{where} has no rows")
        first = self._run(0, 1)
        check_array((self.n, first.shape[1]), first.dtype, self.where)
        self.width = first.shape[1]

    def _rows(self, chosen: slice | list[int], start: int) -> NDArray[Any]:
        return matrix_of(self.column[chosen].column(self.name), self.where, start=start, width=self.width)

    def _run(self, start: int, stop: int) -> NDArray[Any]:
        return self._rows(slice(start, stop), start)

    def _at(self, positions: NDArray[np.int64]) -> NDArray[Any]:
        return self._rows(positions.tolist(), int(positions[0]))


def _image(column: Any, may_open: bool, i: int) -> bytes | str:
    """Image of a row: bytes, or a path that may be opened (not in a folder from elsewhere)."""
    value = next(iter(column[i].values()), None)  # a damaged row has none
    if value is not None and value["bytes"] is not None:
        return bytes(value["bytes"])
    if value is not None and value["path"] and may_open:
        return str(value["path"])
    raise BrokenImageError(f"row {i}", "there is no image in this row")


def _only(rows: Any, name: str, where: str) -> Any:
    """One column as a data set. Raises DataError: offsets out of range, which Arrow does not check, or a text that is not UTF-8."""
    import pyarrow

    try:
        rows.data.table.column(name).validate(full=True)
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())[:120]
        raise DataError(f"{where}: column {name!r} is damaged ({why}): write it again") from None
    return rows.select_columns([name])


def _load(folder: Path) -> Any:
    """Raises DataError: ``datasets`` is not installed, or not such a folder."""
    try:
        import datasets
    except ImportError:
        raise DataError(f"reading {folder} needs the package datasets: pip install 'gpq-faiss[hf]'") from None
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: one that save_to_disk wrote is needed")
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # from pyarrow, json, or datasets
        why = " ".join(str(error).split())[:160]
        raise DataError(
            f"{folder} is not a data set that save_to_disk wrote, or it is damaged ({why})"
        ) from None


def _joined(found: Any, where: str) -> tuple[Any, NDArray[np.uint8] | None, list[str]]:
    """All rows, marks (0 train, 1 test) if there are both parts, and notes."""
    import datasets

    if isinstance(found, datasets.Dataset):
        return found, None, []
    if not isinstance(found, datasets.DatasetDict) or not found:
        what = type(found).__name__
        raise DataError(f"{where}: {what} cannot be read by position: give a Dataset, not a stream")
    names = sorted(found, key=lambda name: (is_test_split(name, found), name))
    tests = np.array([is_test_split(name, found) for name in names], dtype=np.uint8)
    marks = np.repeat(tests, [len(found[name]) for name in names])
    try:
        rows = datasets.concatenate_datasets([found[name] for name in names])
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise DataError(f"{where}: its parts {', '.join(names)} do not fit together ({why})") from None
    return rows, marks if marks.any() and not marks.all() else None, [f"parts: {', '.join(names)}"]


def _image_column(rows: Any, wanted: str) -> str | None:
    import datasets

    images = [name for name, kind in rows.features.items() if isinstance(kind, datasets.Image)]
    if wanted != "image" and wanted not in images:
        there = ", ".join(images) or "none"
        raise DataError(f"--read image_column={wanted}: no column of images (there are: {there})")
    return first_of((wanted, *_IMAGES), images) or (images[0] if len(images) == 1 else None)


def open_hf(source: Any, o: Options) -> FileImages | FileFeatures:
    """Images or vectors of a folder of ``save_to_disk``, a ``Dataset`` or a ``DatasetDict``. Parts ``train`` and ``test`` are its
    official split.

    Images are in ``image_column`` (default ``image``, ``img`` or the only one), vectors in ``vectors`` or, without images, in the
    only column of
    lists of numbers. Labels are ``ClassLabel``, numbers, names, or lists of these.
    """
    wanted = o.vectors
    if wanted is not None and not isinstance(wanted, str):
        raise UsageError(f"vectors {wanted}: one column of vectors is needed")
    folder = isinstance(source, str)
    name = f"hf:{source}" if folder else type(source).__name__
    rows, official, notes = _joined(_load(Path(source).expanduser()) if folder else source, name)
    image = None if o.vectors is not None else _image_column(rows, o.image_column)
    columns = Columns(
        rows.features.arrow_schema, lambda n: _only(rows, n, name).with_format("arrow")[:].column(n), name
    )
    given = o.label_column != DEFAULT_LABEL_COLUMN
    label = o.label_column if given else first_of((*LABELS, *_MORE_LABELS), columns.names)
    kind = rows.features.get(label)
    classes = getattr(getattr(kind, "feature", kind), "names", None)
    if isinstance(classes, list) and not all(isinstance(one, str) for one in classes):
        raise DataError(f"{name}: the class names of column {label!r} are not texts: save the data set again")
    found = columns.describe(
        label,
        ids=None if folder else o.ids,
        names=o.names,
        keep=o.keep,
        class_names=classes if isinstance(classes, list) else None,
    )
    notes.append("no labels" if found.labels is None else f"labels from column {label!r}")
    found.official, found.notes = official, [*notes, *found.notes]
    made: FileImages | FileFeatures
    if image is None:
        free = [one for one in columns.names if one not in found.used]
        column = columns.vectors(wanted, free, "name it with --read vectors")
        if column is None:
            there = ", ".join(columns.names) or "none"
            raise DataError(f"{name}: which column holds the images or vectors? (there are: {there})")
        made = file_features(name, HubVectors(rows, column, name), "", found)
    else:
        import datasets

        numbered = [f"row {i}" for i in range(len(rows))]
        own = found.texts["name"].tolist() if "name" in found.texts else numbered
        images = _only(rows, image, name).cast_column(image, datasets.Image(decode=False))
        paths, sizes = [f"{name}!{text}" for text in own], np.zeros(len(rows), np.int64)
        fetch = partial(_image, images, not folder)
        made = file_images(name, "hf", own, sizes, "", found, paths, o.max_bad, fetch)
    marks = [file_fingerprint(Path(file["filename"])) for file in rows.cache_files]
    mark = found.labels.fingerprint() if found.labels else ""
    made.fingerprint = fingerprint("hf", *marks, rows._fingerprint, mark, made.ids.tobytes())
    made.texts = found.texts
    return made

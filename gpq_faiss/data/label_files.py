"""Labels from arrays, columns and files with one or several labels per item."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint
from ..inputs import read_text
from .arrays import read_npy, without_gradient
from .base import Dataset
from .labels import MAX_CLASSES, Labels, composed, named_rows
from .paths import local_path
from .table_files import Table

ITEM_COLUMNS = ("id", "ids", "item", "key", "name", "path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "category", "y", "target")
SEPARATOR = "|"
"""Separator of several labels of one item in text."""

_BLOCK = 65_536
_NUMBER = r"[+-]?\d{1,18}"
_INTEGER = re.compile(_NUMBER)
_SEVERAL = re.compile(rf"{_NUMBER}(?:[\s;]+{_NUMBER})+")
_TABLE = (
    "a table with a column of ids or names (id, name, path) and one of labels (label, or --read label_column)"
)


def labels_from_array(
    shape: tuple[int, ...],
    read: Callable[[slice], NDArray[Any]],
    where: str,
    class_names: Sequence[str] | None = None,
) -> Labels:
    """Labels from an array read in blocks (``read``: slice -> rows): class numbers [N] or [N, 1] with -1 for none, or 0/1 [N, C]."""
    try:
        if len(shape) == 1 or (len(shape) == 2 and shape[1] == 1):
            return Labels.from_ids(_whole(read(slice(0, shape[0])).reshape(-1)), class_names)
        if len(shape) != 2:
            raise DataError(f"{list(shape)} numbers: class numbers [N] or 0/1 [N, C] are needed")
        if shape[1] > MAX_CLASSES:
            raise DataError(f"{shape[1]:,} columns: at most {MAX_CLASSES:,} classes are possible")
        # Packed in blocks: the multi-hot matrix of many classes may be larger than the features.
        parts = [
            Labels.from_multihot(read(slice(start, min(start + _BLOCK, shape[0]))), class_names)
            for start in range(0, max(1, shape[0]), _BLOCK)
        ]
        return Labels(np.concatenate([part.packed for part in parts]), parts[0].class_names)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    """Integral floats as integers (np.loadtxt and pandas convert labels to float)."""
    if array.dtype.kind != "f":
        return array
    wrong = np.flatnonzero(~(np.isfinite(array) & (array == np.floor(array)) & (np.abs(array) < 2**53)))
    if wrong.size:
        raise DataError(f"labels at {named_rows(wrong)} are not whole numbers")
    return array.astype(np.int64)


def labels_from_cells(cells: Sequence[tuple[str, ...]], where: str) -> Labels:
    """Labels from texts: class numbers if all of them are (-1 is none), else class names in sorted order."""
    flat = [text for cell in cells for text in cell]
    if flat and all(_INTEGER.fullmatch(text) for text in flat):
        if all(len(cell) <= 1 for cell in cells):
            ids = np.array([int(cell[0]) if cell else -1 for cell in cells], dtype=np.int64)
            return labels_from_array(ids.shape, ids.__getitem__, where)
        numbers = sorted({int(text) for text in flat})
        if numbers[0] < 0 or numbers[-1] >= MAX_CLASSES:
            raise DataError(f"{where}: label {numbers[0] if numbers[0] < 0 else numbers[-1]} is out of range")
        texts = [tuple(str(int(text)) for text in cell) for cell in cells]
        return Labels.from_names(texts, [str(c) for c in range(numbers[-1] + 1)])
    names = sorted(set(flat))
    several = next((name for name in names if _SEVERAL.fullmatch(name)), None)
    if several is not None:
        apart = SEPARATOR.join(re.findall(_NUMBER, several))
        what = f"separate several labels of an item with {SEPARATOR}, as {apart}"
        raise DataError(f"{where}: '{several}' would be the name of one class: {what}")
    if not names:
        raise DataError(f"{where}: no item has a label")
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{where}: {len(names):,} different labels, at most {MAX_CLASSES:,} classes are possible"
        )
    return Labels.from_names(cells, names)


def label_cell(value: Any) -> tuple[str, ...]:
    """Labels of a cell: empty, a number, a text (``"sky|sea"``; empty or -1: none), or a list of these."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ()
    if isinstance(value, str):
        parts = (part.strip() for part in composed(value).split(SEPARATOR))
        return tuple(dict.fromkeys(part for part in parts if part not in ("", "-1")))
    if isinstance(value, list):
        return tuple(dict.fromkeys(name for item in value for name in label_cell(item)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas converts integer columns with gaps to float
    return () if value == -1 else (str(value),)


def labels_of(values: Any, n: int) -> Labels:
    """Labels from an array or tensor of class numbers [N] (-1: none) or 0/1 [N, C], or from a list of names or numbers."""
    values = without_gradient(values)
    if isinstance(values, Labels):
        found = values
    elif isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim:
        array = values.astype(np.uint8) if values.dtype.kind == "b" else values
        found = labels_from_array(array.shape, array.__getitem__, "labels")
    else:
        try:
            cells = [label_cell(v.tolist() if hasattr(v, "tolist") else v) for v in values]
        except (TypeError, RecursionError):
            what = type(values).__name__
            raise UsageError(f"labels: {what} is not a list of labels: give one per item") from None
        found = labels_from_cells(cells, "labels")
    if len(found) != n:
        raise DataError(f"{len(found):,} labels are given, the data has {n:,} items: one each is needed")
    return found


# Files ------------------------------------------------------------------------------------------------------------------


def _from_text(path: Path, n: int) -> Labels:
    lines = read_text(path, "labels, one item per line,").splitlines()
    several = {line.count(";") for line in lines if line.strip()}
    semicolons = len(several) == 1 and several != {0}
    delimiter = "\t" if any("\t" in line for line in lines[:10]) else ";" if semicolons else ","
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, strict=True)) if lines else []
    except csv.Error as error:
        raise DataError(f"{path} is not a list of labels, one item per line ({error})") from None
    if len(rows) == n + 1:
        rows = rows[1:]  # a header line
    # Trailing unlabelled items may have lost their empty lines, but guessing would be worse.
    if len(rows) != n:
        what = f"{len(rows):,} lines of labels, the data has {n:,} items"
        raise DataError(f"{path} has {what}: give one line per item, or {_TABLE}")
    widths = {len(row) for row in rows if row}
    if widths <= {1}:
        return labels_from_cells([label_cell(row[0]) if row else () for row in rows], str(path))
    if len(widths) > 1 or any(not row for row in rows):
        raise DataError(
            f"{path} has lines of different lengths: one label per line, or 0/1 of every class, is needed"
        )
    if any(cell.strip() not in ("0", "1") for row in rows for cell in row):
        what = "several columns that are not all 0 or 1"
        raise DataError(
            f"{path} has {what}: give one label per line, or {_TABLE}, with a header line that names them"
        )
    multihot = np.array([[cell.strip() == "1" for cell in row] for row in rows], dtype=np.uint8)
    return labels_from_array(multihot.shape, multihot.__getitem__, str(path))


def read_labels(path: str, n: int) -> Labels:
    """The labels of ``n`` items from ``.npy`` (class numbers [N], -1 for none, or 0/1 [N, C]), or from text with one item per line
    (an empty
    line is unlabelled): a class number, a name, several separated by ``|``, or 0/1 per class separated by commas; a header line is skipped.
    """
    file = local_path(path)
    try:
        if file.suffix == ".npy":
            array = read_npy(file, "an array of labels")
            labels = labels_from_array(array.shape, array.__getitem__, str(file)) if array.ndim else None
        else:
            labels = _from_text(file, n)
    except DataError as error:
        raise DataError(f"--labels {error}") from None
    if labels is None or len(labels) != n:
        count = 0 if labels is None else len(labels)
        raise DataError(f"{file} has labels of {count:,} items, the data has {n:,}: one each is needed")
    return labels


def _table(file: Path) -> Table:
    return Table(file, "a table of labels", parquet=file.suffix.lower() in (".parquet", ".pq"))


def _guess(names: Sequence[str], there: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(there)}
    return next((lower[name] for name in names if name in lower), None)


def is_label_table(path: str, label_column: str) -> bool:
    """Whether a file of labels names its items: Parquet, or CSV with a header that contains one of :data:`ITEM_COLUMNS`, and
    ``label_column`` or one of :data:`LABEL_COLUMNS`. Other files have one label per line, in the order of the items."""
    file = local_path(path)
    if file.suffix.lower() in (".parquet", ".pq", ".npy"):
        return file.suffix.lower() != ".npy"
    try:
        header = _table(file).header
    except DataError:
        return False  # the reader of plain lists reports the error
    labels = label_column if label_column in header else _guess(LABEL_COLUMNS, header)
    return len(header) > 1 and _guess(ITEM_COLUMNS, header) is not None and labels is not None


def with_label_table(dataset: Dataset, path: str, label_column: str | None = None) -> Dataset:
    """``dataset`` with the labels of a CSV or Parquet table, whose rows name items by id or by name as in the data set.

    Items missing in it, or with an empty cell, are unlabelled. ``label_column``: default the first existing one of :data:`LABEL_COLUMNS`.
    """
    try:
        return _with_table(dataset, local_path(path), label_column)
    except DataError as error:
        raise DataError(f"--labels {error}") from None


def _with_table(dataset: Dataset, file: Path, label_column: str | None) -> Dataset:
    table = _table(file)
    item_column = _guess(ITEM_COLUMNS, table.header) or " or ".join(ITEM_COLUMNS)
    label_column = label_column or _guess(LABEL_COLUMNS, table.header) or " or ".join(LABEL_COLUMNS)
    table.check(item_column, "one of these names")
    table.check(label_column, "--read label_column")
    (items, values), _ = table.columns([item_column, label_column])
    keys = ["" if item is None else composed(str(item)) for item in items]
    names = [composed(name) for name in dataset.texts["name"].tolist()] if "name" in dataset.texts else []
    by_name = bool(set(keys) & set(names))
    own = names if by_name else [str(i) for i in dataset.ids.tolist()]
    given: dict[str, tuple[str, ...]] = {}
    for key, value in zip(keys, values, strict=True):
        if key in given:
            raise DataError(f"{file}: {item_column} {key!r} occurs more than once: give each item one line")
        given[key] = label_cell(value)
    matched = [given.get(key, ()) for key in own]
    labelled = sum(bool(cell) for cell in matched)
    if not keys or not own:
        raise DataError(f"{file} has no rows")
    if not labelled:
        what = f"no value of the column {item_column!r} with a label is an id or name of the data"
        raise DataError(f"{file}: {what} (the table has {keys[0]!r}, the data {own[0]!r})")
    labels = labels_from_cells(matched, f"{file}")
    others = len(given.keys() - set(own))
    note = (
        f"{file.name}: {labelled:,} of {len(own):,} items are labelled, matched by {'name' if by_name else 'id'} in {item_column!r}; "
        f"{labels.n_classes:,} classes in {label_column!r}{table.separated}"
    )
    return with_labels(dataset, labels, note + (f"; {others:,} rows are of other items" if others else ""))


def with_labels(dataset: Dataset, labels: Labels, note: str = "") -> Dataset:
    """``dataset`` with other labels, and a note on their source."""
    notes = [n for n in dataset.notes if n != "no labels"]
    return replace(
        dataset,
        labels=labels,
        notes=[*notes, note] if note else notes,
        fingerprint=fingerprint(dataset.fingerprint, "labels", labels.fingerprint()),
    )

"""Labels from arrays, columns and files with one or several labels per item."""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import read_text
from .arrays import read_npy
from .labels import MAX_CLASSES, Labels, composed, named_rows
from .paths import local_path

_BLOCK = 65_536
_NUMBER = r"[+-]?\d{1,18}"
_INTEGER = re.compile(_NUMBER)
_SEVERAL = re.compile(rf"{_NUMBER}(?:[\s;]+{_NUMBER})+")
SEPARATOR = "|"
"""Separator of several labels of one item in text."""


def labels_from_array(
    shape: tuple[int, ...],
    read: Callable[[slice], NDArray[Any]],
    where: str,
    class_names: Sequence[str] | None = None,
) -> Labels:
    """Labels from an array read in blocks: class numbers [N] or [N, 1] with -1 for none, or 0/1 [N, C].

    Args:
        shape: of the array.
        read: slice -> rows.
        where: name of the array in errors.
        class_names: C names (default: the class numbers).

    Raises:
        DataError: another form.
    """
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
    """Labels from texts: class numbers if all of them are (-1 is none), else class names in sorted order.

    Raises:
        DataError: no item has a label, or numbers are out of range.
    """
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
        raise DataError(
            f"{where}: '{several}' would be the name of one class: separate several labels of an item with {SEPARATOR}, as "
            f"{SEPARATOR.join(re.findall(_NUMBER, several))}"
        )
    if not names:
        raise DataError(f"{where}: no item has a label")
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{where}: {len(names):,} different labels, at most {MAX_CLASSES:,} classes are possible"
        )
    return Labels.from_names(cells, names)


def split_cell(text: str) -> tuple[str, ...]:
    """Split ``"sky|sea"``; empty text and -1 have no parts."""
    parts = (part.strip() for part in composed(text).split(SEPARATOR))
    return tuple(dict.fromkeys(part for part in parts if part not in ("", "-1")))


def label_cell(value: Any) -> tuple[str, ...]:
    """Labels of a cell: empty, a number, a text, or a list of these."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ()
    if isinstance(value, str):
        return split_cell(value)
    if isinstance(value, list):
        return tuple(dict.fromkeys(name for item in value for name in label_cell(item)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas converts integer columns with gaps to float
    return () if value == -1 else (str(value),)


def _from_text(path: Path, n: int) -> Labels:
    lines = read_text(path, "labels, one item per line,").splitlines()
    several = {line.count(";") for line in lines if line.strip()}
    delimiter = (
        "\t"
        if any("\t" in line for line in lines[:10])
        else ";"
        if several not in ({0}, set()) and len(several) == 1
        else ","
    )
    try:
        rows = list(csv.reader(lines, delimiter=delimiter, strict=True)) if lines else []
    except csv.Error as error:
        raise DataError(f"{path} is not a list of labels, one item per line ({error})") from None
    if len(rows) == n + 1:
        rows = rows[1:]  # a header line
    # Trailing unlabelled items may have lost their empty lines, but guessing would be worse.
    if len(rows) != n:
        raise DataError(
            f"{path} has {len(rows):,} lines of labels, the data has {n:,} items: give one line per item, or a "
            "table with a column of ids or names (id, name, path) and one of labels (label, or --label-column)"
        )
    widths = {len(row) for row in rows if row}
    if widths <= {1}:
        return labels_from_cells([split_cell(row[0]) if row else () for row in rows], str(path))
    if len(widths) > 1 or any(not row for row in rows):
        raise DataError(
            f"{path} has lines of different lengths: one label per line, or 0/1 of every class, is needed"
        )
    if any(cell.strip() not in ("0", "1") for row in rows for cell in row):
        raise DataError(
            f"{path} has several columns that are not all 0 or 1: give one label per line, or a table with a header line that names "
            "a column of ids or names (id, name, path) and one of labels (label, or --label-column)"
        )
    multihot = np.array([[cell.strip() == "1" for cell in row] for row in rows], dtype=np.uint8)
    return labels_from_array(multihot.shape, multihot.__getitem__, str(path))


def read_labels(path: str | os.PathLike[str], n: int) -> Labels:
    """The labels of ``n`` items from a file.

    ``.npy``: class numbers [N], -1 for none, or 0/1 [N, C]. Anything else is text with one item per line (an empty line
    is unlabelled): a class number, a name, several separated by ``|``, or 0/1 per class separated by commas; a
    header line is skipped.

    Raises:
        DataError: missing, unreadable, not for ``n`` items, or values that are not labels.
    """
    path = local_path(path)
    try:
        if path.suffix == ".npy":
            array = read_npy(path, "an array of labels")
            labels = labels_from_array(array.shape, array.__getitem__, str(path)) if array.ndim else None
        else:
            labels = _from_text(path, n)
    except DataError as error:
        raise DataError(f"--labels {error}") from None
    if labels is None or len(labels) != n:
        count = 0 if labels is None else len(labels)
        raise DataError(f"{path} has labels of {count:,} items, the data has {n:,}: one each is needed")
    return labels

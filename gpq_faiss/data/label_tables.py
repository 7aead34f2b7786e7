"""Labels from a table with a column of item names or ids and a column of labels, matched to a data set."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DataError
from ..files import fingerprint
from ..inputs import check_file, check_memory
from .base import Dataset
from .embeddings import label_cell
from .label_files import labels_from_cells, split_cell
from .labels import Labels
from .parquet import open_parquet, read_cells
from .paths import local_path
from .tables import missing_column

ITEM_COLUMNS = ("id", "ids", "item", "key", "name", "path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "category", "y", "target")
_WHAT = "a table of labels"


def _header(path: Path) -> list[str]:
    """Names of the columns; empty if it is not a table."""
    if path.suffix.lower() in (".parquet", ".pq"):
        with open_parquet(path, _WHAT) as file:
            return list(file.schema_arrow.names)
    if path.suffix.lower() not in (".csv", ".tsv"):
        return []
    check_file(path, _WHAT)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            return [name.strip() for name in next(csv.reader(stream, delimiter=_delimiter(path)), [])]
    except (UnicodeDecodeError, csv.Error):
        return []  # the reader of plain lists reports the error
    except OSError as error:
        raise DataError(f"--labels {path} cannot be read: {error.strerror}") from None


def _delimiter(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


def _guess(names: Sequence[str], there: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(there)}
    return next((lower[name] for name in names if name in lower), None)


def is_label_table(path: str, label_column: str) -> bool:
    """Whether a file of labels names its items: Parquet, or CSV with a header that contains one of :data:`ITEM_COLUMNS`, and
    ``label_column`` or one of :data:`LABEL_COLUMNS`. Other files have one label per line, in the order of the items."""
    file = local_path(path)
    if file.suffix.lower() in (".parquet", ".pq"):
        return True
    header = _header(file)
    return (
        len(header) > 1
        and _guess(ITEM_COLUMNS, header) is not None
        and (label_column in header or _guess(LABEL_COLUMNS, header) is not None)
    )


def with_label_table(dataset: Dataset, path: str, label_column: str | None = None) -> Dataset:
    """``dataset`` with the labels of a table. Items missing in it, or with an empty cell, are unlabelled.

    The column of items contains ids, or names as in the data set; the notes tell which columns were used.

    Args:
        dataset: its labels are replaced.
        path: CSV with a header line, or Parquet.
        label_column: default: the first existing one of :data:`LABEL_COLUMNS`. A cell is a class name or number, or several separated
            by ``|`` (in Parquet also a list); empty: no label.

    Raises:
        DataError: missing columns, a repeated item, or no label for any item of the data set.
    """
    file = local_path(path)
    there = _header(file)
    item_column = _guess(ITEM_COLUMNS, there)
    label_column = label_column or _guess(LABEL_COLUMNS, there)
    if item_column is None:
        raise missing_column(file, " or ".join(ITEM_COLUMNS), there, "one of these names")
    if label_column is None or label_column not in there:
        raise missing_column(file, label_column or " or ".join(LABEL_COLUMNS), there, "--label-column")
    keys, cells = _columns(file, there, item_column, label_column)
    names = dataset.texts.get("name")
    by_name = names is not None and set(keys) & set(names.tolist())
    own = names.tolist() if by_name and names is not None else [str(i) for i in dataset.ids.tolist()]
    given: dict[str, tuple[str, ...]] = {}
    for key, cell in zip(keys, cells, strict=True):
        if key in given:
            raise DataError(
                f"--labels {file}: {item_column} {key!r} occurs more than once: give each item one line"
            )
        given[key] = cell
    matched = [given.get(key, ()) for key in own]
    labelled = sum(bool(cell) for cell in matched)
    if not labelled:
        raise DataError(
            f"--labels {file}: no value of the column {item_column!r} with a label is an id or name of the data (the table has "
            f"{keys[0]!r}, the data {own[0]!r})"
            if own and keys
            else f"--labels {file} has no rows"
        )
    labels = labels_from_cells(matched, f"--labels {file}")
    others = len(given.keys() - set(own))
    note = f"labels from {file.name}: column {label_column!r}, items by {item_column!r}: {labelled:,} of {len(own):,} items are labelled"
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


def _columns(
    path: Path, there: Sequence[str], items: str, labels: str
) -> tuple[list[str], list[tuple[str, ...]]]:
    if path.suffix.lower() in (".parquet", ".pq"):
        keys = ["" if v is None else str(v) for v in read_cells(path, items, _WHAT)]
        return keys, [label_cell(value) for value in read_cells(path, labels, _WHAT)]
    check_memory(4 * check_file(path, _WHAT), str(path))
    at, label_at = there.index(items), there.index(labels)
    keys, cells = [], []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, delimiter=_delimiter(path), strict=True)
            next(reader)
            for row in reader:
                if not row:
                    continue
                if len(row) != len(there):
                    raise DataError(
                        f"--labels {path} line {reader.line_num}: {len(row)} fields, the header has {len(there)}"
                    )
                keys.append(row[at].strip())
                cells.append(split_cell(row[label_at]))
    except UnicodeDecodeError:
        raise DataError(f"--labels {path} is not UTF-8 text") from None
    except csv.Error as error:
        raise DataError(f"--labels {path} line {reader.line_num} is not CSV: {error}") from None
    # -1 is no label, as in arrays of class numbers.
    return keys, [tuple(label for label in cell if label != "-1") for cell in cells]

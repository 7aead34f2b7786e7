"""Labels from a table with a column of item names or ids and a column of labels, matched to a data set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..errors import DataError
from ..files import fingerprint
from .base import Dataset
from .label_files import label_cell, labels_from_cells
from .labels import Labels, composed
from .paths import local_path
from .table_files import Table, column_at, missing_column

ITEM_COLUMNS = ("id", "ids", "item", "key", "name", "path", "file", "filename", "image")
LABEL_COLUMNS = ("label", "labels", "class", "classes", "category", "y", "target")
_WHAT = "a table of labels"


def _is_parquet(path: Path) -> bool:
    return path.suffix.lower() in (".parquet", ".pq")


def _guess(names: Sequence[str], there: Sequence[str]) -> str | None:
    lower = {name.lower(): name for name in reversed(there)}
    return next((lower[name] for name in names if name in lower), None)


def is_label_table(path: str, label_column: str) -> bool:
    """Whether a file of labels names its items: Parquet, or CSV with a header that contains one of :data:`ITEM_COLUMNS`, and
    ``label_column`` or one of :data:`LABEL_COLUMNS`. Other files have one label per line, in the order of the items."""
    file = local_path(path)
    if _is_parquet(file) or file.suffix.lower() == ".npy":
        return _is_parquet(file)
    try:
        header = Table(file, _WHAT, parquet=False).header
    except DataError:
        return False  # the reader of plain lists reports the error
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
    try:
        return _with_table(dataset, local_path(path), label_column)
    except DataError as error:
        raise DataError(f"--labels {error}") from None


def _with_table(dataset: Dataset, file: Path, label_column: str | None) -> Dataset:
    table = Table(file, _WHAT, parquet=_is_parquet(file))
    there = table.header
    item_column = _guess(ITEM_COLUMNS, there)
    label_column = label_column or _guess(LABEL_COLUMNS, there)
    if item_column is None:
        raise missing_column(file, " or ".join(ITEM_COLUMNS), there, "one of these names")
    if label_column is None:
        raise missing_column(file, " or ".join(LABEL_COLUMNS), there, "--label-column")
    column_at(file, item_column, there)
    column_at(file, label_column, there, "--label-column")
    (keys, given_labels), _ = table.columns([item_column, label_column])
    keys = ["" if key is None else composed(str(key)) for key in keys]
    cells = map(label_cell, given_labels)
    column = dataset.texts.get("name")
    names = None if column is None else [composed(name) for name in column.tolist()]
    by_name = names is not None and set(keys) & set(names)
    own = names if by_name and names is not None else [str(i) for i in dataset.ids.tolist()]
    given: dict[str, tuple[str, ...]] = {}
    for key, cell in zip(keys, cells, strict=True):
        if key in given:
            raise DataError(f"{file}: {item_column} {key!r} occurs more than once: give each item one line")
        given[key] = cell
    matched = [given.get(key, ()) for key in own]
    labelled = sum(bool(cell) for cell in matched)
    if not labelled:
        raise DataError(
            f"{file}: no value of the column {item_column!r} with a label is an id or name of the data (the table has "
            f"{keys[0]!r}, the data {own[0]!r})"
            if own and keys
            else f"{file} has no rows"
        )
    labels = labels_from_cells(matched, f"{file}")
    others = len(given.keys() - set(own))
    note = (
        f"{file.name}: {labelled:,} of {len(own):,} items are labelled, matched by {'name' if by_name else 'id'} in {item_column!r}; "
        f"{labels.n_classes:,} classes in {label_column!r}"
    ) + table.separated
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

"""What is given beside the data: ids, names and labels, as values or as files; tables of labels name the items."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..inputs import read_text
from ..store.texts import as_texts
from .arrays import read_ids, read_npy, stable_id, whole_numbers
from .base import Dataset
from .images import without_gradient
from .labels import Labels, composed, label_cell, labels_of
from .paths import local_path
from .tables import ITEMS, LABELS, Table, open_table

IdFrom = Literal["position", "path"]
_ZEROS_AND_ONES = re.compile(r"[01](?:[,;\s]+[01])+")
_COLUMNS = re.compile(r".*[,;\t].*|\d+(?:\s+\d+)+")
_TABLE = (
    "a table with a column of ids or names (id, name ...) and one of labels (label, or --read label_column)"
)


def with_ids(dataset: Dataset, ids: Any = None, id_from: IdFrom = "position") -> Dataset:
    """``dataset`` with other ids: a file of them (:func:`.arrays.read_ids`) or the ids themselves, one per item; or (``id_from`` ``path``)
    hashes of the names of the items, which do not depend on their order."""
    new: NDArray[np.int64]
    if id_from not in get_args(IdFrom):
        raise UsageError(f"--read id_from={id_from}: choose from {', '.join(get_args(IdFrom))}")
    if isinstance(ids, str):
        new = read_ids(ids, "--ids")
    elif ids is not None:
        new = whole_numbers(np.asarray(without_gradient(ids)), "ids")
    elif id_from == "position":
        return dataset
    elif "name" not in dataset.texts:
        raise UsageError(f"--read id_from=path: items of {dataset.name} have no paths: give --ids")
    else:
        new = np.array([stable_id(name.encode()) for name in dataset.texts["name"].tolist()], dtype=np.int64)
    _check_number(dataset, new, "ids", ids)
    return dataset.having("ids", new.tobytes(), ids=new)


def _check_number(dataset: Dataset, values: Sequence[Any] | NDArray[Any], what: str, given: Any) -> None:
    """Raises DataError: there is not one value for each item."""
    if len(values) != len(dataset):
        source = f" of {given}" if isinstance(given, str) else ""
        raise DataError(f"{what}{source}: {len(values):,} {what}, {dataset.name} has {len(dataset):,} items")


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """``dataset`` with names from a list or a text file, one per item."""
    if isinstance(names, str):
        column = as_texts(read_text(local_path(names), "text with a name per line").splitlines())
    else:
        column = as_texts(map(str, names))
    _check_number(dataset, column, "names", names)
    return dataset.having("names", "\0".join(column.tolist()), texts=dataset.texts | {"name": column})


def with_labels(dataset: Dataset, labels: Any, table: Table | None, label_column: str | None) -> Dataset:
    """``dataset`` with other labels: of a ``table`` that names items, of a file (:func:`read_labels`), or the labels themselves."""
    notes = [note for note in dataset.notes if note != "no labels"]
    if table is not None:
        found, note = _from_table(dataset, table, label_column)
        notes.append(note)
    elif isinstance(labels, str):
        found = read_labels(labels, len(dataset))
        notes.append(told(labels, found))
    else:
        found = labels_of(labels, "labels", len(dataset))
    return dataset.having("labels", found.fingerprint(), labels=found, notes=notes)


def read_labels(path: str, n: int) -> Labels:
    """The labels of ``n`` items from ``.npy`` (class numbers [N], -1 for none, or 0/1 [N, C]), or from text with one item per line
    (an empty line is unlabelled): a class number, a name, several separated by ``|``, or 0/1 per class; a header line is skipped.
    """
    file = local_path(path)
    if file.suffix == ".npy":
        return labels_of(read_npy(file), str(file), n)
    lines = [line.strip() for line in read_text(file, "labels, one item per line,").split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    lines = lines[1:] if len(lines) == n + 1 else lines
    rows = [re.findall("[01]", line) for line in lines if _ZEROS_AND_ONES.fullmatch(line)]
    if len(rows) == len(lines) == n and len({len(row) for row in rows}) == 1:
        return labels_of(np.array(rows) == "1", str(file), n)
    wrong = next((line for line in lines if _COLUMNS.fullmatch(line)), None)
    what = f"lines of several columns, not all of them 0 or 1 of every class ({str(wrong)[:60]!r})"
    # Trailing unlabelled items may have lost their empty lines, but guessing would be worse.
    what = what if len(lines) == n else f"{len(lines):,} lines of labels, the data has {n:,} items"
    if len(lines) != n or wrong is not None:
        raise DataError(f"{file} has {what}: give one label per line, or {_TABLE}, with a header line")
    return labels_of(lines, str(file))


def told(path: str, labels: Labels, how: str = "in their order") -> str:
    """A note on labels of a file."""
    share = f"{int(labels.has().sum()):,} of {len(labels):,} items are labelled"
    return f"{Path(path).name}: {share}, {how}; {labels.n_classes:,} classes"


def _usual(names: Sequence[str], table: Table) -> str | None:
    lower = {name.lower(): name for name in reversed(table.names)}
    return next((lower[name] for name in names if name in lower), None)


def label_table(path: str, label_column: str | None) -> Table | None:
    """A file of labels that names its items: Parquet, or CSV with a header that contains one of :data:`.tables.ITEMS`, and
    ``label_column`` or one of :data:`.tables.LABELS`. Other files have one label per line, in the order of the items: None."""
    file, what = local_path(path), "a table of labels"
    if file.suffix.lower() in (".parquet", ".pq", ".npy"):
        return None if file.suffix.lower() == ".npy" else open_table(file, what)
    with contextlib.suppress(DataError):  # the reader of plain lists reports it
        table = open_table(file, what, form="csv")
        if _usual(ITEMS, table) and (label_column in table.names or _usual(LABELS, table)):
            return table
    return None


def _from_table(dataset: Dataset, table: Table, label_column: str | None) -> tuple[Labels, str]:
    """Labels of a table, whose rows name items by id or by name as in the data set, and a note. Items that it lacks are unlabelled."""
    item_column = _usual(ITEMS, table) or " or ".join(ITEMS)
    label_column = label_column or _usual(LABELS, table) or " or ".join(LABELS)
    keys = ["" if item is None else composed(str(item).strip()) for item in table.cells(item_column)]
    cells = map(label_cell, table.cells(label_column, ": name it with --read label_column"))
    given = dict(zip(keys, cells, strict=True))
    if len(given) < len(keys):
        twice = Counter(keys).most_common(1)[0][0]
        raise DataError(
            f"{table.where}: {item_column} {twice!r} occurs more than once: give each item one line"
        )
    names = [composed(name) for name in dataset.texts["name"].tolist()] if "name" in dataset.texts else []
    by_name = not given.keys().isdisjoint(names)
    own = names if by_name else [str(i) for i in dataset.ids.tolist()]
    matched = [given.get(key, ()) for key in own]
    if not any(matched):
        what = f"no value of the column {item_column!r} with a label is an id or name of the data"
        raise DataError(f"{table.where}: {what} (the table has {keys[:1]}, the data {own[:1]})")
    labels, key = labels_of(matched, table.where), "name" if by_name else "id"
    how = f"matched by {key} in {item_column!r} ({len(given.keys() - set(own)):,} rows are of other items)"
    return labels, told(table.where, labels, how)

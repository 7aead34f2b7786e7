"""Labels, ids and names beside the data: in files, tables and dicts, matched by id, name or
order.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import DataError, UsageError
from ..inputs import parse_json, read_text, reading
from ..store.hdf5 import as_texts
from .arrays import read_ids, whole_numbers
from .base import Dataset
from .images import without_gradient
from .labels import ROW, WHOLE, composed, labels_note, labels_of, plain_text
from .paths import files_of
from .tables import (
    IDS,
    ITEMS,
    LABELS,
    NAMES,
    Options,
    Table,
    file_form,
    frame_table,
    open_tables,
    usual,
)


def with_labels(dataset: Dataset, labels: Any, o: Options) -> Dataset:
    """Return a data set with other labels.

    Args:
        labels: files of a table or of labels in the order of the items; a table, a dict or a Series
            by id or name; or values in the order of the items (:func:`.labels.labels_of`).

    Raises:
        DataError: labels that match no item, are of another number, or cannot be read.
    """
    source, column, keys, method = "labels", "its keys", None, "in their order"
    if isinstance(labels, str):
        files = files_of(labels)
        source, labels = files[0].name, _read_labels(files)
    elif hasattr(labels, "__arrow_c_stream__") and hasattr(labels, "columns"):
        labels = frame_table(labels)
    elif hasattr(labels, "index") and hasattr(labels, "items"):  # a Series of pandas
        is_ordered = labels.index.tolist() == [*range(len(dataset))]
        labels = labels.tolist() if is_ordered else dict(labels.items())
    if isinstance(labels, Mapping):
        keys, labels = list(labels), list(labels.values())
    elif isinstance(labels, Table):
        table, columns = labels, list(labels.columns)
        items = o.id_column or (usual(ITEMS, columns) if len(columns) > 1 else None)
        candidates = [name for name in columns if name != items]
        only = columns[0] if len(columns) == 1 else usual(LABELS, candidates)
        labels = table.values(table.column(o.label_column or only, "label_column"))
        if items is None and len(labels) != len(dataset):
            table.column("id", "id_column")
        if items is not None:
            keys, column = table.values(table.column(items, "id_column")).tolist(), repr(items)
        is_named = keys and o.id_column is None and not WHOLE.fullmatch(_key(keys[0]))
        if is_named and "name" not in dataset.texts and len(labels) == len(dataset):
            dataset, keys = with_names(dataset, keys), None
    elif o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns")
    if keys is not None:
        rows, method = _matched(dataset, keys, source, column)
        labels = [labels[row] if row >= 0 else None for row in rows]
    attached = labels_of(labels, source)
    notes = [labels_note(source, attached, method), *dataset.notes[1:]]
    return replace(dataset, labels=attached, notes=notes)


def _read_labels(files: Sequence[Path]) -> Any:
    """Read labels as a table, a dict by id or name, or values in the order of the items.

    In a text of one per line, a first line with a usual name, or of text above numbers, is a
    header.
    """
    form = file_form(files[0])
    if files[0].suffix == ".json":
        with reading(files[0], "JSON of labels"):
            values = parse_json(read_text(files[0], "JSON of labels"))
            if isinstance(values, dict) or not any(isinstance(value, dict) for value in values):
                return values
    lines = read_text(files[0], "labels").split("\n") if form in ("text", "csv") else [","]
    first, *following = [line.strip() for line in (lines if lines[-1] else lines[:-1])] or [""]
    if re.search("[,;\t]", first) and not ROW.fullmatch(first):
        return open_tables(files)
    numbers = [bool(ROW.fullmatch(x) or WHOLE.fullmatch(x) or x == "") for x in (first, *following)]
    is_name = usual(LABELS, [first]) is not None and first not in following
    has_header = following and (is_name or (all(numbers[1:]) and not numbers[0]))
    return following if has_header else [first, *following]


def _key(value: Any) -> str:
    """Return an id or a name as text; whole floats are whole numbers."""
    text = composed(plain_text(value).strip()) if value is not None else ""
    return text.partition(".")[0] if WHOLE.fullmatch(text) else text


_WAYS = {
    "name": _key,
    "id": _key,
    "file name": lambda key: _key(os.path.basename(key)),
    "name without ending": lambda key: _key(os.path.splitext(os.path.basename(key))[0]),
}
"""Ways in which the key of a label may name an item."""


def _matched(
    dataset: Dataset, keys: Sequence[Any], source: str, column: str
) -> tuple[list[int], str]:
    """Return the position of the key of each item, -1 if it has none, and how they match."""
    texts = [_key(key) for key in keys]
    if repeated := [text for text, count in Counter(texts).items() if count > 1 and text]:
        problem = f"{source}: {column} {repeated[0]!r} occurs more than once"
        raise DataError(f"{problem}: give each item one line")
    names = dataset.texts["name"].tolist() if "name" in dataset.texts else []
    ids = dataset.ids.tolist()
    for way, shorten in _WAYS.items():
        items = list(map(shorten, ids if way == "id" else names))
        positions = {shorten(text): i for i, text in enumerate(texts) if text}
        is_unique = way == "id" or len(set(items)) == len(items)
        if is_unique and not positions.keys().isdisjoint(items):
            break
    else:
        example = f"it has {texts[:1]}, the data {(names or ids)[:1]}"
        problem = f"{source}: no key of a label in {column} is an id or name of the data"
        raise DataError(f"{problem} ({example})")
    unmatched = sorted(positions.keys() - {*items})
    if way == "id" and unmatched and ids == [*range(len(ids))]:
        problem = f"{source} has the id {unmatched[0]} in {column}, but the data has no ids"
        remedy = "its items are numbered from 0: give their ids with --read ids=FILE"
        raise DataError(f"{problem}; {remedy}")
    count = f" ({len(unmatched):,} rows are of other items)" if unmatched else ""
    return [positions.get(item, -1) for item in items], f"matched by {way} in {column}{count}"


def _column(files: Sequence[Path], candidates: Sequence[str], option: str) -> Any:
    """Return the column of a table with one of the usual names, or the only one."""
    table = open_tables(files)
    only = next(iter(table.columns)) if len(table.columns) == 1 else None
    return table.values(table.column(only, f"{option}=FILE of one", candidates))


def with_ids(dataset: Dataset, ids: Any) -> Dataset:
    """Return a data set with other ids: the ids, or a list or table of them in a file."""
    if isinstance(ids, str):
        files = files_of(ids)
        is_list = file_form(files[0]) in ("npy", "text")
        ids = read_ids(files[0]) if is_list else _column(files, IDS, "ids")
    return replace(dataset, ids=whole_numbers(without_gradient(ids), "ids"))


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """Return a data set with other names: the names, or a text (one per line) or table of them."""
    if isinstance(names, str):
        files = files_of(names)
        is_list = file_form(files[0]) == "text"
        names = (
            read_text(files[0], "names").splitlines() if is_list else _column(files, NAMES, "names")
        )
    return replace(dataset, texts=dataset.texts | {"name": as_texts(map(plain_text, names))})

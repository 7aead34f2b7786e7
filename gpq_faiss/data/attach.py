"""Labels, ids and names beside the data: in files, tables and dicts, matched by id or name or order."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError
from ..inputs import parse_json, read_text
from ..store.hdf5 import as_texts
from .arrays import read_ids, whole_numbers
from .base import Dataset
from .images import without_gradient
from .labels import MISSING, Labels, composed, label_texts, labels_note, labels_of, plain_text
from .paths import files_of, local_path
from .tables import (
    IDS,
    ITEMS,
    LABELS,
    NAMES,
    Options,
    Table,
    file_form,
    frame_table,
    join_tables,
    open_table,
    usual,
)

_ROW = re.compile(r"[01](?:[,;\s]+[01])+")
_COLUMNS = re.compile(r".*[,;\t].*|\d+(?:\s+\d+)+")
_NUMBER = re.compile(r"-?\d+(\.0*)?")


@dataclass
class _Keyed:
    """Labels of items by a key, the id or the name of an item; ``column`` and ``source`` name them."""

    labels: Mapping[Any, Any]
    column: str
    source: str


def with_labels(dataset: Dataset, labels: Any, o: Options) -> Dataset:
    """Return a data set with other labels.

    Args:
        labels: files of a table or of labels in the order of the items; a table, a dict or a Series
            by id or name; or values in the order of the items (:func:`.labels.labels_of`).

    Raises:
        DataError: labels that match no item, are of another number, or cannot be read.
    """
    source = "labels"
    if isinstance(labels, str):
        files = files_of(labels)
        source = files[0].name if len(files) == 1 else os.path.basename(labels)
        labels = _read_labels(files, len(dataset), o)
    elif hasattr(labels, "__arrow_c_stream__") and hasattr(labels, "columns"):
        labels = frame_table(labels)
    elif hasattr(labels, "index") and hasattr(labels, "items"):  # a Series of pandas
        keys = labels.index.tolist()
        if keys != list(range(len(dataset))):
            labels = dict(zip(keys, labels.tolist(), strict=True))
    how = "in their order"
    if isinstance(labels, Table):
        dataset, labels, how = _from_table(dataset, labels, source, o)
    elif isinstance(labels, Mapping):
        labels, how = _matched(dataset, _Keyed(labels, "its keys", source))
    found = labels_of(labels, source, len(dataset))
    notes = [labels_note(source, found, how), *dataset.notes[1:]]
    return dataset.having("labels", found.fingerprint(), labels=found, notes=notes)


def _read_labels(files: Sequence[Path], n: int, o: Options) -> Any:
    """Read labels as a table, a dict by id or name, or values in the order of ``n`` items."""
    form = file_form(files[0])
    if form == "json":
        values = parse_json(read_text(files[0], "JSON of labels"))
        if isinstance(values, dict) or not any(isinstance(value, dict) for value in values):
            return values
    if form in ("tar", "gzip"):
        raise DataError(f"{files[0]} is an archive: unpack it, and give the file of labels in it")
    if form in ("text", "csv") and len(files) == 1:
        return _read_lines(files[0], n, o)
    table = join_tables([open_table(file, "csv" if form == "text" else form) for file in files])
    if len(table.kinds) == 1 and not o.label_column:
        return table.values(next(iter(table.kinds)))
    return table


def _read_lines(file: Path, n: int, o: Options) -> Any:
    """Read a text of labels: a table whose header names labels or items, else one item per line.

    Such a line is empty, a class number, a name, several separated by ``|``, or 0/1 per class.
    """
    text = read_text(file, "labels, one item per line,")
    lines = [line.strip() for line in text.split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    header = [name.strip(' "') for name in re.split("[,;\t|]", lines[0])] if lines else []
    rest = lines[1:]
    rows = [line for line in rest if _ROW.fullmatch(line)]
    if len(header) > 1 and len(rows) < len(rest):
        if usual(LABELS, header) or usual(IDS, header) or o.label_column in header:
            return open_table(file, "csv")
    one_label = bool(rest) and usual(LABELS, lines[:1]) is not None and lines[0] not in rest
    numbers = all(_NUMBER.fullmatch(line) or line.lower() in MISSING or not line for line in rest)
    first = lines[0] if lines else ""
    plain = (
        _NUMBER.fullmatch(first) or _ROW.fullmatch(first) or first.lower() in MISSING or not first
    )
    has_header = one_label or (bool(rest) and not plain and (numbers or len(rows) == len(rest)))
    if has_header and len(lines) == n:
        raise DataError(
            f"{file} has a header ({first[:40]!r}) and {n - 1:,} labels for {n:,} items"
        )
    labels = rest if has_header else lines
    if len(labels) != n:
        many = f"{len(labels):,} lines of labels, the data has {n:,} items"
        raise DataError(f"{file} has {many}: give one per item, or a table with ids or names")
    classes = len((_ROW.fullmatch(labels[-1]) and re.findall("[01]", labels[-1])) or ())
    if has_header and len(rows) == n and len(header) == classes:
        hot = np.array([re.findall("[01]", line) for line in labels]) == "1"
        return Labels.from_multihot(hot, header)
    wrong = next((x for x in labels if _COLUMNS.fullmatch(x) and not _ROW.fullmatch(x)), None)
    if wrong is not None:
        table = "a table with a column of ids or names and one of labels, with a header line"
        what = f"lines of several columns ({wrong[:60]!r}) and the first names none of labels"
        raise DataError(
            f"{file} has {what}: give one label per line, or {table} ({lines[0][:60]!r})"
        )
    return labels


def _from_table(
    dataset: Dataset, table: Table, source: str, o: Options
) -> tuple[Dataset, Any, str]:
    """Return the data set (with the table's names, if it has none), labels, and how they match."""
    columns = list(table.kinds)
    items = o.id_column or usual(ITEMS, columns)
    label = o.label_column or usual(LABELS, [name for name in columns if name != items])
    if label is None:
        known = ", ".join(map(repr, columns[:20]))
        raise DataError(
            f"{table.source}: which column holds labels? It has {known}: --read label_column="
        )
    values = table.values(table.check(label, "--read label_column"))
    names = table.class_names.get(label)
    if items is not None:
        keys = table.values(table.check(items, "--read id_column"))
        of_names = table.kinds[items] == "text" and "name" not in dataset.texts
        if not (of_names and table.rows == len(dataset)) or o.id_column:
            if names is not None:
                values = [None if v < 0 else names[v] for v in np.asarray(values).tolist()]
            pairs = list(zip(keys, values, strict=True))
            if len(dict(pairs)) < len(pairs):
                twice = Counter(map(str, keys)).most_common(1)[0][0]
                what = f"{items} {twice!r} occurs more than once: give each item one line"
                raise DataError(f"{table.source}: {what}")
            return dataset, *_matched(dataset, _Keyed(dict(pairs), repr(items), table.source))
        texts = dataset.texts | {"name": as_texts(map(plain_text, keys))}
        dataset = dataset.having("names", "\0".join(texts["name"].tolist()), texts=texts)
    elif table.rows != len(dataset):
        known = ", ".join(map(repr, columns[:20]))
        what = (
            f"{table.rows:,} rows without a column of ids or names, the data {len(dataset):,} items"
        )
        raise DataError(
            f"{table.source} has {what} (columns: {known}): name it with --read id_column="
        )
    return dataset, labels_of(values, table.source, class_names=names), "in their order"


def _key(value: Any) -> str:
    """Return an id or a name as text; whole floats are whole numbers."""
    text = composed(plain_text(value).strip()) if value is not None else ""
    return text.partition(".")[0] if re.fullmatch(r"-?\d+\.0*", text) else text


_WAYS: dict[str, Callable[[str], str]] = {
    "name": str,
    "file name": os.path.basename,
    "name without ending": lambda key: os.path.splitext(os.path.basename(key))[0],
}
"""Ways in which the key of a label may name an item."""


def _matched(dataset: Dataset, keyed: _Keyed) -> tuple[list[Any], str]:
    """Return the label of each item by its name or id, None for others, and how they match."""
    given = {_key(key): label for key, label in keyed.labels.items()}
    given.pop("", None)
    names = (
        [composed(name) for name in dataset.texts["name"].tolist()]
        if "name" in dataset.texts
        else []
    )
    ids = [str(i) for i in dataset.ids.tolist()]
    candidates = [
        (f"by {way}", list(map(shorten, names)), shorten) for way, shorten in _WAYS.items()
    ]
    for how, items, shorten in [candidates[0], ("by id", ids, str), *candidates[1:]]:
        labels = {shorten(key): label for key, label in given.items()}
        if (
            how == "by name"
            or how == "by id"
            or (len(labels) == len(given)
            and len({*items}) == len(items))
        ):
            matches = [labels.get(item) for item in items]
            if any(label is not None and label_texts(label) for label in matches):
                break
    else:
        what = f"no key of a label in {keyed.column} is an id or name of the data"
        example = f"it has {list(given)[:1]}, the data {(names or ids)[:1]}"
        raise DataError(f"{keyed.source}: {what} ({example})")
    if how == "by id" and np.array_equal(dataset.ids, np.arange(len(ids))) and "0" not in labels:
        numbers = [int(key) for key in labels if re.fullmatch(r"\d{1,18}", key)]
        if max(numbers) == len(ids):
            what = (
                f"{keyed.column} runs from {min(numbers)} to {len(ids):,}, but row numbers from 0"
            )
            raise DataError(
                f"{keyed.source}: {what}: give the ids of the data with --read ids=FILE"
            )
        how = f"{how} (row numbers from 0)"
    others = len(labels.keys() - {*items})
    rest = f" ({others:,} rows are of other items)" if others else ""
    return matches, f"matched {how} in {keyed.column}{rest}"


def with_ids(dataset: Dataset, ids: Any) -> Dataset:
    """Return a data set with other ids: a file of them (:func:`.arrays.read_ids`) or the ids."""
    if isinstance(ids, str):
        path = local_path(ids)
        is_table = file_form(path) not in ("npy", "text")
        table = open_table(path) if is_table else None
        column = usual((*IDS, "arr0"), table.kinds) if table is not None else None
        new = read_ids(path) if table is None else whole_numbers(table.values(column or "id"), ids)
    else:
        new = whole_numbers(without_gradient(ids), "ids")
    return dataset.having("ids", new.tobytes(), ids=new)


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """Return a data set with names of a list, a text with one per line, or a table."""
    lines: Any = names
    if isinstance(names, str):
        files = files_of(names)
        if file_form(files[0]) == "text":
            lines = read_text(files[0], "text with a name per line").splitlines()
        else:
            table = join_tables([open_table(file) for file in files])
            lines = table.values(usual(NAMES, table.kinds) or next(iter(table.kinds)))
    column = as_texts(map(plain_text, lines))
    texts = dataset.texts | {"name": column}
    return dataset.having("names", "\0".join(column.tolist()), texts=texts)

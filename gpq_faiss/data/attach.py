"""Labels, ids and names beside the data: in files, tables and dicts, matched by id, name or
order.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError
from ..inputs import parse_json, read_text
from ..store.hdf5 import as_texts
from .arrays import read_ids, whole_numbers
from .base import Dataset, FeatureDataset
from .images import without_gradient
from .labels import (
    MISSING,
    ROW,
    WHOLE,
    Labels,
    composed,
    label_texts,
    labels_note,
    labels_of,
    plain_text,
)
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
    source, n = "labels", len(dataset)
    if isinstance(labels, str):
        files = files_of(labels)
        source = files[0].name if len(files) == 1 else labels
        labels = _read_labels(files, n, o)
    elif hasattr(labels, "__arrow_c_stream__") and hasattr(labels, "columns"):
        labels = frame_table(labels)
    elif hasattr(labels, "index") and hasattr(labels, "items"):  # a Series of pandas
        keys, items = labels.index.tolist(), {*map(str, dataset.ids.tolist())}
        if keys == list(range(n)):
            labels = labels.tolist()
        elif (
            len(keys) == n and "name" not in dataset.texts and not items.issuperset(map(_key, keys))
        ):
            raise DataError(
                "labels: the index of the Series is not that of the items: "
                "give labels.to_numpy() for the order of the items"
            )
        else:
            labels = dict(zip(keys, labels.tolist(), strict=True))
    method, keyed = "in their order", isinstance(labels, Table | Mapping)
    if isinstance(labels, Table):
        dataset, labels, method = _from_table(dataset, labels, o)
    elif isinstance(labels, Mapping):
        labels, method = _matched(dataset, labels, source, "its keys")
    elif column := o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns, as {column!r}")
    attached = labels_of(labels, source, n)
    notes = [labels_note(source, attached, method), *dataset.notes[1:]]
    if source != "labels" and not keyed and isinstance(dataset, FeatureDataset) and dataset.content:
        return dataset.with_files(labels=attached, notes=notes)
    return dataset.having("labels", attached.fingerprint(), labels=attached, notes=notes)


def _read_labels(files: Sequence[Path], n: int, o: Options) -> Any:
    """Read labels as a table, a dict by id or name, or values in the order of ``n`` items."""
    form = file_form(files[0])
    if form == "json":
        values = parse_json(read_text(files[0], "JSON of labels"))
        if isinstance(values, dict) or not any(isinstance(value, dict) for value in values):
            return values
    if form in ("text", "csv") and (lines := _lines(files[0], n)) is not None:
        return lines
    table = open_tables(files)
    column = next(iter(table.kinds)) if len(table.kinds) == 1 else o.label_column
    return table.values(column) if len(table.kinds) == 1 and column else table


def _lines(file: Path, n: int) -> Any:
    """Read a text of a label per line; None if it is a table, of several columns with a header.

    A line is empty, a class number, a name, several separated by ``|``, or 0/1 per class. A first
    line with a usual name, or of text above numbers, is a header; above 0/1 it names the classes.
    """
    lines = [line.strip() for line in read_text(file, "labels, one item per line,").split("\n")]
    lines = lines[:-1] if lines[-1] == "" else lines
    first, following = (lines or [""])[0], lines[1:]
    hot = bool(following) and all(map(ROW.fullmatch, following))
    if re.search("[,;\t]", first) and not hot:
        return None
    numbers = all(
        WHOLE.fullmatch(line) or line.lower() in MISSING or not line for line in following
    )
    plain = WHOLE.fullmatch(first) or ROW.fullmatch(first) or first.lower() in MISSING or not first
    named = usual(LABELS, [first]) is not None and first not in following
    header = bool(following) and (named or (not plain and (numbers or hot)))
    if header and len(lines) == n:
        raise DataError(
            f"{file} has a header ({first[:40]!r}) and {n - 1:,} labels for {n:,} items"
        )
    labels = following if header else lines
    if len(labels) != n:
        raise DataError(
            f"{file} has "
            f"{len(labels):,} lines of labels, the data has {n:,} items"
            f": give one per item, or a table with ids or names"
        )
    classes = [name.strip(' "') for name in re.split("[,;\t]", first)]
    rows = [re.findall("[01]", line) for line in labels] if header and hot else [[]]
    if {len(row) for row in rows} == {len(classes)}:
        return Labels.from_multihot(np.array(rows) == "1", classes)
    return labels


def _from_table(dataset: Dataset, table: Table, o: Options) -> tuple[Dataset, Any, str]:
    """Return the data set (with the table's names, if it has none), labels, and how they match."""
    columns = list(table.kinds)
    items = o.id_column or usual(ITEMS, columns)
    label = o.label_column or usual(LABELS, [name for name in columns if name != items]) or ""
    values = table.values(table.check(label, "--read label_column"))
    names = table.class_names.get(label)
    in_order = table.rows == len(dataset)
    if items is None and not in_order:
        table.check("id", "--read id_column")
    if items is not None:
        keys = table.values(table.check(items, "--read id_column"))
        if not in_order or table.kinds[items] != "text" or "name" in dataset.texts or o.id_column:
            values = values if names is None else [names[i] if i >= 0 else None for i in values]
            repeated, count = Counter(map(_key, keys)).most_common(1)[0] if len(keys) else ("", 0)
            if count > 1 and repeated:
                raise DataError(
                    f"{table.source}: "
                    f"{items} {repeated!r} occurs more than once: give each item one line"
                )
            labels_by_key = dict(zip(keys, values, strict=True))
            return dataset, *_matched(dataset, labels_by_key, table.source, repr(items))
        dataset = with_names(dataset, keys)
    return dataset, labels_of(values, table.source, class_names=names), "in their order"


def _key(value: Any) -> str:
    """Return an id or a name as text; whole floats are whole numbers."""
    text = composed(plain_text(value).strip()) if value is not None else ""
    return text.partition(".")[0] if WHOLE.fullmatch(text) else text


_WAYS: dict[str, Callable[[str], str]] = {
    "name": str,
    "id": str,
    "file name": os.path.basename,
    "name without ending": lambda key: os.path.splitext(os.path.basename(key))[0],
}
"""Ways in which the key of a label may name an item."""


def _matched(
    dataset: Dataset, labels_by_key: Mapping[Any, Any], source: str, column: str
) -> tuple[list[Any], str]:
    """Return the label of each item by its name or id, None for others, and how they match."""
    labels_by_key = {_key(key): label for key, label in labels_by_key.items()}
    labels_by_key.pop("", None)
    names = (
        [composed(name) for name in dataset.texts["name"].tolist()]
        if "name" in dataset.texts
        else []
    )
    ids = [str(i) for i in dataset.ids.tolist()]
    for way, shorten in _WAYS.items():
        items = ids if way == "id" else list(map(shorten, names))
        labels = {shorten(key): label for key, label in labels_by_key.items()}
        unique = shorten is str or (
            len(labels) == len(labels_by_key) and len({*items}) == len(items)
        )
        if unique and any(label_texts(labels.get(item)) for item in items):
            break
    else:
        raise DataError(
            f"{source}: "
            f"no key of a label in {column} is an id or name of the data"
            f" (it has {list(labels_by_key)[:1]}, the data {(names or ids)[:1]})"
        )
    unmatched = len(labels.keys() - {*items})
    method = f"matched by {way} in {column}" + (
        f" ({unmatched:,} rows are of other items)" if unmatched else ""
    )
    if way == "id" and "0" not in labels and np.array_equal(dataset.ids, np.arange(len(ids))):
        largest = max(int(key) for key in labels if re.fullmatch(r"\d{1,18}", key))
        if largest == len(ids):
            raise DataError(
                f"{source} has "
                f"ids from 1 to {largest:,} in {column}, but the items are numbered from 0"
                f": give the ids of the data with --read ids=FILE"
            )
        method += "; the data has no ids: items are numbered from 0"
    return [labels.get(item) for item in items], method


def _column(files: Sequence[Path], candidates: Sequence[str], message: str) -> Any:
    """Return the column of a table with one of the usual names, or the only one."""
    table = open_tables(files)
    only = next(iter(table.kinds)) if len(table.kinds) == 1 else ""
    return table.values(
        table.check(usual(candidates, table.kinds) or only, f"--read {message}=FILE of one")
    )


def with_ids(dataset: Dataset, ids: Any) -> Dataset:
    """Return a data set with other ids: the ids, or a list or table of them in a file."""
    if isinstance(ids, str):
        files = files_of(ids)
        listed = file_form(files[0]) in ("npy", "text") and len(files) == 1
        ids = read_ids(files[0]) if listed else _column(files, IDS, "ids")
        if isinstance(dataset, FeatureDataset) and dataset.content:
            return dataset.with_files(ids=whole_numbers(ids, "ids"))
    new = whole_numbers(without_gradient(ids), "ids")
    return dataset.having("ids", new.tobytes(), ids=new)


def with_names(dataset: Dataset, names: str | Sequence[str]) -> Dataset:
    """Return a data set with other names: the names, or a text (one per line) or table of them."""
    if isinstance(names, str):
        files = files_of(names)
        listed = file_form(files[0]) == "text"
        text = read_text(files[0], "text with a name per line") if listed else ""
        names = text.splitlines() if listed else _column(files, NAMES, "names")
    if np.ndim(names) != 1:
        raise DataError(f"names are an array {list(np.shape(names))}: one text per item is needed")
    column = as_texts(map(plain_text, names))
    texts = dataset.texts | {"name": column}
    return dataset.having("names", "\0".join(column.tolist()), texts=texts)

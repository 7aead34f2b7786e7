"""Labels and names that stand beside the data, and which of the items they belong to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, UsageError
from ..inputs import file_form, files_of, read_text
from ..store.hdf5 import as_texts
from .base import Dataset
from .images import is_image_name
from .labels import ROW, WHOLE, Labels, composed, labels_of, plain_text
from .standard import part_of
from .tables import NUMBER, Options, Table, frame_table, open_tables, read_records, usual


def aligned(values: Any, index: Any, *, whole: bool = True) -> Any:
    """Return a Series or a frame of pandas in the order of ``index``, that of the items' frame, if
    it has this index, or a part of it where it need not be ``whole``; other values unchanged."""
    is_part = (
        hasattr(values, "iloc")
        and index is not None
        and index.is_unique
        and values.index.is_unique
        and {*values.index} <= {*index}
        and (len(values) == len(index) or not whole)
    )
    return values.reindex(index).reset_index(drop=True) if is_part else values


def with_names(dataset: Dataset, names: Any) -> Dataset:
    """Return a data set with other names: the names, or a file with a name in each line, or with a
    table that has a column of names.

    Raises DataError: the table has another number of names, or the ids of the data in another
    order.
    """
    if isinstance(names, str | os.PathLike):
        names = _read_column(files_of(names), "names")
    if isinstance(names, Mapping):
        raise UsageError("names in a dict have no order: give a list, one for each item")
    if isinstance(names, Table):
        columns = names.of_kind("text", "number", "bytes")
        name = names.column(
            usual("names", columns) or (columns[0] if len(columns) == 1 else None),
            "names=FILE of one column",
        )
        id_column = usual("ids", names.kinds.keys() - {name})
        listed = [] if id_column is None else list(map(_key, names.values(id_column)))
        ids = list(map(str, dataset.ids.tolist()))
        if (
            listed not in ([], ids)
            and all(map(WHOLE.fullmatch, listed))
            and (dataset.has_ids or {*listed} == {*ids})
        ):
            raise DataError(
                f"{names.source}: the ids in {id_column!r} are not those of the data in their "
                "order: sort the table, leave the column out, or give the data these ids"
            )
        names = names.texts(name)
    return replace(dataset, texts=dataset.texts | {"name": as_texts(map(plain_text, names))})


def with_labels(dataset: Dataset, labels: Any, o: Options, index: Any = None) -> Dataset:
    """Return a data set with other labels.

    Args:
        labels: files of a table or of labels in the order of the items; a table, a dict, pairs or a
            Series by id or name; or values in the order of the items (:func:`.labels.labels_of`).
        index: that of the frame of pandas with the items, if any. Labels in pandas are aligned with
            it, unless the data has ids of its own.

    Raises:
        DataError: labels that match no item, are of another number, or cannot be read.
    """
    source = "labels"
    if isinstance(labels, str | os.PathLike):
        files = files_of(labels)
        source, labels = files[0].name, _read_column(files, "labels")
    elif isinstance(labels, tuple | Iterator | ItemsView):
        labels = list(labels)
    labels = labels if dataset.has_ids else aligned(labels, index, whole=False)
    if _are_pairs(labels):
        labels = _pairs_table("labels", labels)
    elif _is_table(labels, o):
        labels = frame_table(labels)
    elif isinstance(labels, Mapping):
        labels = _pairs_table("labels", [*labels.items()])
    elif hasattr(labels, "iloc") and labels.index.tolist() != [*range(len(dataset))]:
        key = usual("items", [labels.index.name]) or ("id" if dataset.has_ids else "index")
        labels = _pairs_table("labels", [*labels.items()], key)
    if isinstance(labels, Table):
        return _matched(dataset, labels, o, source)
    if o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns")
    return replace(
        dataset, labels=labels_of(labels, source), label_source=(source, "in their order")
    )


# Files of labels and names ------------------------------------------------------------------------


def _read_column(files: Sequence[Path], role: str) -> Any:
    """Read labels or names (``role``) as a table, or as lines in the order of the items; labels
    also as what is in JSON.

    In a text of one per line, a first line with a usual name, or of text above numbers, is a
    header.
    """
    form, _ = file_form(files[0], role)
    if form == "JSON of records" and len(files) == 1 and role == "labels":
        return read_records(files[0])
    if form not in ("text", "csv"):
        return open_tables(files)
    lines = [
        line.strip(" ").strip('"')
        for file in files
        for line in read_text(file, role).removesuffix("\n").split("\n")
    ]
    first, *following = lines
    separated = ({*first} & {*",;\t"} & {*line} for line in lines if line)
    # Names may have commas.
    is_table = any(separated) if form == "csv" else role == "labels" and all(separated)
    if is_table and not all(map(ROW.fullmatch, lines)):
        return open_tables(files)
    words = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    if role == "labels" and _are_pairs(words):
        return _pairs_table(files[0].name, words)
    is_name = usual(role, [first]) is not None and first not in following
    is_number = [bool(ROW.fullmatch(x) or not re.search(r"[^\W\d_]", x)) for x in lines]
    is_above_numbers = all(is_number[1:]) and not is_number[0]
    return following if following and (is_name or is_above_numbers) else lines


def _are_pairs(rows: Any) -> bool:
    """Return whether rows are an id or name and a label: more than three pairs, no key twice."""
    is_array = isinstance(rows, np.ndarray) and rows.ndim == 2 and rows.dtype.kind in "OUS"
    is_list = isinstance(rows, list) and all(isinstance(row, list | tuple) for row in rows)
    keys = {_key(row[0]) for row in rows if len(row) == 2} if is_array or is_list else set()
    return len(keys) > 3 and len(keys) == len(rows)


def _pairs_table(source: str, pairs: Sequence[Sequence[Any]], key: str = "id") -> Table:
    """Return the table of pairs of an id or name, in column ``key``, and a label."""
    return Table(
        source,
        {
            name: np.fromiter((pair[i] for pair in pairs), object)
            for i, name in enumerate((key, "label"))
        },
    )


def _is_table(labels: Any, o: Options) -> bool:
    """Return whether labels have columns: a frame, a structured array, a dict with a column of
    labels, or dicts that are rows."""
    if isinstance(labels, Mapping):
        column: Any = labels.get(o.label_column or usual("labels", labels))
        return isinstance(column, Mapping | list) or np.ndim(column) > 0
    return (
        (isinstance(labels, list) and {isinstance(row, Mapping) for row in labels} == {True})
        or hasattr(labels, "columns")
        or (isinstance(labels, np.ndarray) and labels.dtype.names is not None)
    )


# Rows of a table, and items -----------------------------------------------------------------------


def _key(value: Any) -> str:
    """Return an id or a name as text; whole floats are whole numbers."""
    text = composed(plain_text(value).strip(' \t\r\n"')).replace("\\", "/").removeprefix("./")
    return text.partition(".")[0] if "." in text and WHOLE.fullmatch(text) else text


def _number(key: str) -> str:
    """Return a key without leading zeros."""
    return key.lstrip("0") or "0"


_ENDING = re.compile(r"(?<=.)\.[a-z]\w{0,4}$", re.IGNORECASE)
"""The ending of a file name; ``v1.2`` has none."""
_WAYS: dict[str, Callable[[str], str]] = {
    "name": str,
    "file name": os.path.basename,
    "name without ending": lambda key: _ENDING.sub("", os.path.basename(key)),
    "name without zeros": lambda key: _number(_ENDING.sub("", os.path.basename(key))),
}
"""Ways in which a column of a table may give the names of items; of two, the first one counts. Ids
and row numbers are compared without leading zeros."""


def _are_counts(keys: Iterable[str]) -> bool:
    """Return whether keys are numbers up to their count, of row numbers or ranks."""
    numbers = {*map(_number, keys)}
    return numbers <= {*map(str, range(len(numbers) + 1))}


@dataclass(frozen=True)
class _KeyColumn:
    """A column of a table that may identify items.

    Attributes:
        name: its name in the table.
        keys: its values as texts, empty where there is none.
        rank: 1 if it was requested or has a usual name, -1 if it has a name that pandas gives to
            row numbers, else 0.
    """

    name: str
    keys: list[str]
    rank: int

    @cached_property
    def different_keys(self) -> list[str]:
        """The keys, each once, without the empty one."""
        return [*dict.fromkeys(filter(None, self.keys))]

    @cached_property
    def are_texts(self) -> bool:
        """Whether any of the keys is not a plain number; ``0012`` counts as a text."""
        return any(
            not NUMBER.fullmatch(key) or re.match("0[0-9]", key) for key in self.different_keys
        )


def _key_columns(table: Table, o: Options) -> list[_KeyColumn]:
    """Return the requested column of a table, or all that may identify items."""
    names = (
        [o.id_column]
        if o.id_column
        else [
            name
            for name in table.of_kind("text", "number", "bytes", "other")
            if name != (o.label_column or usual("labels", table.kinds)) and len(table.kinds) > 1
        ]
    )
    preferred = usual("items", names)
    return [
        _KeyColumn(
            name,
            list(map(_key, table.values(table.column(name, "id_column")))),
            rank=int(name in (o.id_column, preferred))
            or -int(usual("counters", [name]) is not None),
        )
        for name in names
    ]


def _item_keys(dataset: Dataset) -> dict[str, dict[str, int]]:
    """Return way -> key -> row of an item; a way may give several items one key."""
    names = list(map(_key, dataset.texts.get("name", ())))
    keys = {way: map(shorten, names) for way, shorten in _WAYS.items()}
    if dataset.has_ids:
        keys["id"] = map(str, dataset.ids.tolist())
    return {way: {key: row for row, key in enumerate(way_keys)} for way, way_keys in keys.items()}


@dataclass(frozen=True)
class _Match:
    """A column that identifies items.

    Attributes:
        way: one of :data:`_WAYS`, ``id`` or ``row number``.
        item_of: key in the column -> row of the item, -1 for none.
        quality: the best one of several matches has the largest.
    """

    column: _KeyColumn
    way: str
    item_of: dict[str, int]
    quality: tuple[Any, ...]


def _matches(
    columns: Iterable[_KeyColumn], item_keys: Mapping[str, Mapping[str, int]]
) -> Iterator[_Match]:
    """Yield how columns identify items: the preferred column if it has any of their keys, and
    others with half of the keys that they could have, if these are texts, or numbers beyond the
    counts of rows and items.

    Texts are better than numbers, which match by chance (the row numbers that pandas writes,
    counts); then the preferred column is best, and counters are worst; then ids in a column of ids
    are better, then more matches.
    """
    for column in columns:
        for way, rows in item_keys.items():
            item_of = {
                key: rows.get(_WAYS.get(way, _number)(key), -1) for key in column.different_keys
            }
            items = [item for item in item_of.values() if item >= 0]
            is_likely = 2 * len(items) >= min(len(item_of), len(rows))
            may_match = (
                column.rank > 0
                or (way == "row number" and len(item_of) == len(column.keys))
                or (
                    is_likely
                    and (column.are_texts or not (_are_counts(item_of) or _are_counts(rows)))
                )
            )
            if items and len({*items}) == len(items) and may_match:
                are_ids = way == "id" and usual("ids", [column.name]) is not None
                yield _Match(
                    column,
                    way,
                    item_of,
                    quality=(is_likely, column.are_texts, column.rank, are_ids, len(items)),
                )


def _check_numbering(
    match: _Match, other_keys: Set[str], item_keys: Mapping[str, int], source: str
) -> None:
    """Check that the numbers in a column and those of the items have one origin.

    Args:
        other_keys: the keys in the column that belong to no item.
        item_keys: key -> row of the item.

    Raises:
        DataError: one counts from 0 and the other from 1, or a row number is beyond the items.
    """
    column, n = match.column, len(item_keys)
    if match.way == "row number":
        numbers = {*map(_number, column.different_keys)}
        from_one = {str(i + 1) for i in range(len(numbers))}
        if other_keys or (numbers == from_one and len(numbers) > 2 and column.rank >= 0):
            raise DataError(
                f"{source} has the id {min(other_keys or numbers)} in {column.name!r}, but the "
                "data has no ids; its items are numbered from 0: give their ids with --read "
                f"ids=FILE{'' if other_keys else ', or a row for 0, too, without a label'}"
            )
    if len(other_keys) == 1 and _are_counts(item_keys):
        number = _number(_WAYS.get(match.way, str)(min(other_keys)))
        labelled = {*match.item_of.values()}
        unlabelled = {_number(key) for key, row in item_keys.items() if row not in labelled}
        if (number == str(n) and "0" in unlabelled) or (number == "0" and str(n) in unlabelled):
            raise DataError(
                f"{source}: of {column.name!r} and the data, one counts from 0 and the other from "
                "1: use the same numbering in both"
            )


def _check_parts(match: _Match, names: Sequence[str], source: str) -> None:
    """Check that no label of a test image is given to a training image with the same file name.

    Args:
        names: those of the items.

    Raises:
        DataError: the folders of a key and of its item are of different parts of the data.
    """
    for folders in {
        (os.path.dirname(key), os.path.dirname(names[item]))
        for key, item in match.item_of.items()
        if item >= 0
    }:
        parts = [{*map(part_of, folder.split("/"))} - {""} for folder in folders]
        if all(parts) and parts[0].isdisjoint(parts[1]):
            raise DataError(
                f"{source} has labels of {folders[0]} in {match.column.name!r}, the data has files "
                f"of the same names in {folders[1]}: give the names of the data, with folders"
            )


def _in_order(
    dataset: Dataset, labels: Labels, source: str, table: Table, columns: Sequence[_KeyColumn]
) -> Dataset:
    """Return the data set with the labels of a table whose columns identify none of the items.

    A table without ids or names has one row for each item, in order. Data without ids and names
    take the names of a table of as many rows (not of a dict, which has no order).

    Args:
        columns: those that may identify items, the likeliest one first.

    Raises:
        DataError: the table is of other items, or it is unclear what identifies them.
    """
    column, n = next(iter(columns), None), len(dataset)
    if column is None and len(table.kinds) > 1 and len(labels) != n:
        table.column(None, "id_column")  # the error lists the columns
    if column is None or (column.rank < 0 and column.keys == [*map(str, range(n))]):
        method = "in their order" + ", as no column names ids" * (len(table.kinds) > 1)
    elif (
        dataset.has_ids
        or dataset.kind == "images"
        or "name" in dataset.texts
        or column.rank < 0
        or table.source == "labels"
        or len(column.keys) != n
    ):
        raise DataError(
            f"{source}: no key of a label in {column.name!r} is an id or name of one item (it has "
            f"{column.keys[:1]}, the data {dataset.texts.get('name', dataset.ids)[:1].tolist()}): "
            "give those of the data with --read names=FILE or ids=FILE, another column with --read "
            "id_column=NAME, or labels in the order of the items (labels.to_numpy() of pandas)"
        )
    else:
        dataset = with_names(dataset, column.keys)
        method = f"in their order, with the names in {column.name!r}"
    return replace(dataset, labels=labels, label_source=(source, method))


def _matched(dataset: Dataset, table: Table, o: Options, source: str) -> Dataset:
    """Return the data set with the labels of a table.

    Its items are identified by their names or ids. Row numbers count for data without ids, if the
    table has no other names. Several rows of an item are several labels.

    Raises:
        DataError: it is unclear which rows are of which items.
    """
    labels, columns, n = table.labels(o), _key_columns(table, o), len(dataset)
    other_names = [
        column
        for column in columns
        if "name" in dataset.texts
        and column.are_texts
        and (
            usual("items", [column.name])
            or len({*column.keys}) == n
            or any(map(is_image_name, column.keys))
        )
    ]
    by_name = sorted((c for c in columns if c.rank), key=lambda column: -column.rank)
    keys_of_ways = _item_keys(dataset)
    item_keys = {way: rows for way, rows in keys_of_ways.items() if len(rows) == n}
    matches = [*_matches(columns, item_keys)]
    # File numbers that several items have are no row numbers.
    if not (matches or dataset.has_ids or other_names) and all(
        rows.keys().isdisjoint(map(_number, column.keys))
        for column in by_name
        for rows in keys_of_ways.values()
    ):
        item_keys = {"row number": {str(row): row for row in range(n)}}
        matches = [*_matches(by_name, item_keys)]
    match = max(matches, key=lambda match: match.quality, default=None)
    shuffled = [
        column.name
        for column in columns
        if column.rank <= 0
        and "" not in column.keys
        and len(column.different_keys) == n
        and _are_counts(column.keys)
        and column.keys != sorted(column.keys, key=int)
    ]
    if shuffled and (match is None or (match.way == "row number" and match.column.rank <= 0)):
        raise DataError(
            f"{source}: {shuffled[0]!r} may number the items, but does not count them in their "
            f"order: name it with --read id_column={shuffled[0]}, or leave it out "
            "(labels.to_numpy() of pandas has no index)"
        )
    shared = [
        column.name
        for column in columns
        if match is None
        and column.name in {*getattr(dataset.table, "kinds", ())} - {*labels.class_names}
        and usual("labels", [column.name]) is None
        and (column.are_texts or all(map(WHOLE.fullmatch, column.keys)))
        and column.keys != list(map(_key, dataset.table.values(column.name).tolist()))
    ]
    if shared:
        raise DataError(
            f"{source}: the data has {shared[0]!r}, too, with other values or in another order: "
            f"join them by --read names={shared[0]} and id_column={shared[0]}, or leave the column "
            "out"
        )
    if match is None:
        return _in_order(dataset, labels, source, table, [*other_names, *by_name])
    column, way = match.column, match.way
    other_keys = {key for key, item in match.item_of.items() if item < 0}
    _check_numbering(match, other_keys, item_keys[way], source)
    if way in _WAYS:
        _check_parts(match, dataset.texts["name"].tolist(), source)
    if repeated := sum(map(bool, column.keys)) - len(column.different_keys):
        dataset.notes.append(
            f"{source} names items again in {repeated:,} rows: they have the labels of all"
        )
    if way == "row number":
        dataset.notes.append("ids are row numbers, from 0")
    remainder = f" ({len(other_keys):,} rows are of other items)" * bool(other_keys)
    method = f"matched by {'id' if way == 'row number' else way} in {column.name!r}{remainder}"
    items = np.array([match.item_of.get(key, -1) for key in column.keys])
    return replace(dataset, labels=labels.of_items(items, n), label_source=(source, method))

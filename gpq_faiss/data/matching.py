"""Labels and names that stand beside the data, and which of the items they belong to."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..inputs import file_form, files_of, read_text
from ..store.hdf5 import as_texts
from .base import Dataset
from .labels import ROW, WHOLE, Labels, composed, labels_of, plain_text
from .tables import NUMBER, Options, Table, frame_table, open_tables, read_records, usual


def with_names(dataset: Dataset, names: Any) -> Dataset:
    """Return a data set with other names: the names, or a file with a name in each line, or with a
    table that has a column of names."""
    if isinstance(names, str | os.PathLike):
        names = _read_column(files_of(names), "names")
    if isinstance(names, Mapping):
        raise UsageError("names in a dict have no order: give a list, one for each item")
    if isinstance(names, Table):
        columns = names.of_kind("text", "number", "bytes")
        only = columns[0] if len(columns) == 1 else None
        names = names.texts(
            names.column(usual("names", columns) or only, "names=FILE of one column")
        )
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
    source, method = "labels", "in their order"
    if isinstance(labels, str | os.PathLike):
        files = files_of(labels)
        source, labels = files[0].name, _read_column(files, "labels")
    is_pandas, has_ids = hasattr(labels, "iloc"), (dataset.ids != np.arange(len(dataset))).any()
    is_unique = is_pandas and index is not None and labels.index.is_unique and index.is_unique
    if is_unique and not has_ids and {*labels.index} <= {*index}:
        labels = labels.reindex(index).reset_index(drop=True)
    rows = list(labels) if isinstance(labels, tuple | Iterator | ItemsView) else labels
    labels = _pairs_table("labels", rows) if _are_pairs(rows) else rows
    if _is_table(labels, o):
        labels = frame_table(labels)
    elif hasattr(labels, "items"):  # a dict, or a Series of pandas
        key = usual("items", [labels.index.name] if is_pandas else []) or (
            "index" if is_pandas and not has_ids else "id"
        )
        labels = (
            labels.tolist()
            if is_pandas and labels.index.tolist() == [*range(len(dataset))]
            else _pairs_table("labels", [*labels.items()], key)
        )
    if isinstance(labels, Table):
        dataset, attached, method = _matched(dataset, labels, o, source)
    elif o.label_column or o.id_column:
        raise UsageError(f"--read label_column, id_column: {source} has no columns")
    else:
        attached = labels_of(labels, source)
    return replace(dataset, labels=attached, label_source=(source, method))


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
    text = composed(plain_text(value).strip()).replace("\\", "/").removeprefix("./")
    return text.partition(".")[0] if "." in text and WHOLE.fullmatch(text) else text


def _number(key: str) -> str:
    """Return a key without leading zeros."""
    return key.lstrip("0") or "0"


_WAYS: dict[str, Callable[[str], str]] = {
    "name": str,
    "file name": os.path.basename,
    "name without ending": lambda key: os.path.splitext(os.path.basename(key))[0],
    "name without zeros": lambda key: _number(os.path.splitext(os.path.basename(key))[0]),
}
"""Ways in which a column of a table may give the names of items; of two, the first one counts. Ids
and row numbers are compared without leading zeros."""


def _have_equal_folders(first: str, second: str) -> bool:
    """Return whether two names have the same last folders, as far as both have any."""
    folders = [f"/{name[: name.rfind('/') + 1]}".lower() for name in (first, second)]
    return folders[0].endswith(folders[1]) or folders[1].endswith(folders[0])


def _are_texts(keys: Iterable[str]) -> bool:
    """Return whether any of the keys is no number, as ``0012`` is none."""
    return any(not NUMBER.fullmatch(key) or re.match("0[0-9]", key) for key in keys if key)


def _are_counts(keys: Set[str]) -> bool:
    """Return whether keys are numbers up to their count, of row numbers or ranks."""
    return {_number(key) for key in keys} <= {*map(str, range(len(keys) + 1))}


def _matches(
    keys_of: Mapping[str, list[str]],
    item_keys: Mapping[str, list[str]],
    preferred: str | None,
    counters: Sequence[str],
) -> Iterator[tuple[Any, str, str, NDArray[np.int64]]]:
    """Yield how columns of a table name items: the preferred column if it has any of their keys,
    and others with half of the keys that they could have, if these are texts, or numbers beyond the
    counts of rows and items.

    Args:
        keys_of: column -> its values.
        item_keys: way -> the key of each item.
        preferred: the column that was requested or has a usual name.
        counters: columns with names of :data:`.tables.USUAL` counters, which may be row numbers.

    Yields:
        The quality, a tuple: texts go before numbers, which match by chance (the row numbers that
        pandas writes, counts), then the preferred column, counters last, then ids in a column of
        ids, then the most matches; the column; the way; and the row of the table for each item,
        int64 [N], -1 for none.
    """
    for column, keys in keys_of.items():
        filled, are_texts = {*keys} - {""}, _are_texts(keys)
        rank = 1 if column == preferred else -(column in counters)
        for way, names in item_keys.items():
            positions = {_WAYS.get(way, _number)(key): i for i, key in enumerate(keys) if key}
            candidates = [positions.get(name, -1) for name in names]
            rows = np.array(
                [
                    row if row >= 0 and _have_equal_folders(name, keys[row]) else -1
                    for name, row in zip(item_keys.get("name", names), candidates, strict=True)
                ]
            )
            count = int(np.count_nonzero(rows >= 0))
            is_likely = 2 * count >= min(len(filled), len(names))
            may_name = rank > 0 or (
                (way == "row number" and len(filled) == len(keys))
                or (is_likely and (are_texts or not (_are_counts(filled) or _are_counts({*names}))))
            )
            if count and len(positions) == len(filled) and may_name:
                are_ids = way == "id" and usual("ids", [column]) is not None
                yield (is_likely, are_texts, rank, are_ids, count), column, way, rows


def _other_keys(
    source: str,
    column: str,
    way: str,
    keys: Sequence[str],
    names: Sequence[str],
    rows: NDArray[np.int64],
) -> set[str]:
    """Return the keys of a column that belong to no item, for its match of :func:`_matches`.

    Args:
        keys: those of the column.
        names: those of the items.

    Raises:
        DataError: the numbers of the table and of the items have different origins, or a row number
            is beyond the items.
    """
    other_keys = {*keys} - {"", *(keys[row] for row in rows.tolist() if row >= 0)}
    numbers = {_number(key) for key in keys if key} if way == "row number" else set()
    counts_from_one = (
        usual("counters", [column]) is None
        and len(numbers) > 2
        and numbers == {*map(str, range(1, len(numbers) + 1))}
    )
    if way == "row number" and (other_keys or counts_from_one):
        raise DataError(
            f"{source} has the id {min(other_keys or numbers)} in {column!r}, but the data has no "
            "ids; its items are numbered from 0: give their ids with --read ids=FILE"
            f"{'' if other_keys else ', or a row for 0, too, without a label'}"
        )
    if len(other_keys) == 1 and _are_counts({*names}):
        opposite = {"0": str(len(names)), str(len(names)): "0"}
        if opposite.get(_number(_WAYS.get(way, str)(min(other_keys)))) in {
            _number(names[i]) for i in np.flatnonzero(rows < 0).tolist()
        }:
            raise DataError(
                f"{source}: of {column!r} and the data, one counts from 0 and the other from 1: "
                "use the same numbering in both"
            )
    return other_keys


def _matched(
    dataset: Dataset, table: Table, o: Options, source: str
) -> tuple[Dataset, Labels, str]:
    """Return the data set, the labels of its items by a table, and how they match.

    Items are found by their names or ids. Row numbers count for data without ids, if the table has
    no other names. A table without ids or names has one row for each item, in order. Data without
    ids and names take the names of a table of as many rows, in its order (not of a dict, which has
    none). Several rows of an item are several labels.
    """
    labels, n = table.labels(o), len(dataset)
    ids = list(map(str, dataset.ids.tolist()))
    names = list(map(_key, dataset.texts.get("name", ())))
    has_ids = ids != list(map(str, range(n)))
    item_keys = {way: list(map(shorten, names)) for way, shorten in _WAYS.items()}
    item_keys = {way: keys for way, keys in item_keys.items() if len({*keys}) == n}
    item_keys |= {"id": ids} if has_ids else {}
    columns = (
        [o.id_column]
        if o.id_column
        else [
            name
            for name in table.of_kind("text", "number", "bytes", "other")
            if name != (o.label_column or usual("labels", table.kinds)) and len(table.kinds) > 1
        ]
    )
    preferred = o.id_column or usual("items", columns)
    counters = [name for name in columns if usual("counters", [name]) is not None]
    keys_of = {
        column: list(map(_key, table.values(table.column(column, "id_column"))))
        for column in columns
    }
    unknown = [
        column
        for column, keys in keys_of.items()
        if names and _are_texts(keys) and (usual("items", [column]) or len({*keys}) == n)
    ]
    matches = [*_matches(keys_of, item_keys, preferred, counters)]
    if not matches and not has_ids and not unknown:
        numbers = {name: keys_of[name] for name in columns if name in (preferred, *counters)}
        matches = [*_matches(numbers, {"row number": ids}, preferred, counters)]
    _, column, way, rows = max(
        matches,
        key=lambda match: match[0],
        default=(None, next(filter(None, [*unknown, preferred, *counters]), ""), "", np.arange(0)),
    )
    shuffled = [
        name
        for name, keys in keys_of.items()
        if name != preferred
        and "" not in keys
        and _are_counts({*keys})
        and len({*keys}) == n
        and keys != sorted(keys, key=int)
    ]
    if shuffled and (not way or (way == "row number" and column != preferred)):
        raise DataError(
            f"{source}: {shuffled[0]!r} may number the items, but does not count them in their "
            f"order: name it with --read id_column={shuffled[0]}, or leave it out "
            "(labels.to_numpy() of pandas has no index)"
        )
    if not way:
        is_counter = column in counters and column != o.id_column
        if (is_counter and keys_of[column] == list(map(str, range(n)))) or (
            not column and (not columns or len(labels) == n)
        ):
            return dataset, labels, "in their order" + ", as no column names ids" * bool(columns)
        keys = keys_of[table.column(column, "id_column")]
        if not (has_ids or names or is_counter or table.source == "labels") and len(keys) == n:
            dataset = with_names(dataset, keys)
            return dataset, labels, f"in their order, with the names in {column!r}"
        raise DataError(
            f"{source}: no key of a label in {column!r} is an id or name of the data "
            f"(it has {keys[:1]}, the data {(names or ids)[:1]}): leave out folders that differ, "
            "give those of the data with --read names=FILE or ids=FILE, another column with --read "
            "id_column=NAME, or labels in the order of the items (labels.to_numpy() of pandas)"
        )
    keys = keys_of[column]
    other_keys = _other_keys(
        source, column, way, keys, ids if way == "row number" else item_keys[way], rows
    )
    if repeated := sum(map(bool, keys)) - len({*keys} - {""}):
        last_rows = {key: row for row, key in enumerate(keys)}
        labels = labels.united(np.array([last_rows[key] for key in keys]))
    dataset.notes += [
        *[f"{source} names items again in {repeated:,} rows: they have the labels of all"]
        * bool(repeated),
        *["ids are row numbers, from 0"] * (way == "row number"),
    ]
    note = f" ({len(other_keys):,} rows are of other items)" if other_keys else ""
    return (
        dataset,
        labels.at(rows),
        f"matched by {'id' if way == 'row number' else way} in {column!r}{note}",
    )

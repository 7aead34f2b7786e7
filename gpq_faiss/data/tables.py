"""``csv:FILE`` and ``parquet:FILE``: tables with a column of image paths and a column of labels."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .embeddings import texts_for_ids
from .images import FileImages, listed_images
from .label_files import label_cell, split_cell
from .labels import Labels
from .lists import repeated_note, resolve
from .parquet import open_parquet, read_cells
from .text_tables import TextTable, column_at

DEFAULT_LABEL_COLUMN = "label"
ID_COLUMN = "id"
_NUMBER = re.compile(r"[+-]?[0-9_.]+")


@dataclass(frozen=True)
class Columns:
    """Contents of a table: N paths, N labels (None is unlabelled) or None, N ids or None, locations of rows for errors, and kept text
    columns."""

    images: list[str]
    labels: list[tuple[str, ...]] | None
    ids: list[Any] | None
    where: list[str]
    kept: dict[str, list[str]]


def _check_columns(path: Path, there: Sequence[str], image_column: str, label_column: str) -> bool:
    """Whether the label column exists. Only the default one may be missing (unlabelled queries)."""
    column_at(path, image_column, there, "--image-column")
    labelled = label_column in there or label_column != DEFAULT_LABEL_COLUMN
    if labelled:
        column_at(path, label_column, there, "--label-column")
    if ID_COLUMN in there:
        column_at(path, ID_COLUMN, there)
    return labelled


def _read_csv(path: Path, image_column: str, label_column: str, keep: Sequence[str]) -> Columns:
    table = TextTable(path, "a CSV table of images")
    header = table.header
    if not header:
        raise DataError(
            f"{path} is empty, or its first line is: a header line with a column {image_column!r} is expected"
        )
    labelled = _check_columns(path, header, image_column, label_column)
    image_at = header.index(image_column)
    label_at = header.index(label_column) if labelled else -1
    id_at = header.index(ID_COLUMN) if ID_COLUMN in header else -1
    kept_at = {name: column_at(path, name, header) for name in keep}
    out = Columns([], [] if labelled else None, [] if id_at >= 0 else None, [], {name: [] for name in keep})
    for line, row in table.rows():
        out.images.append(row[image_at].strip())
        out.where.append(f"line {line}")
        if out.labels is not None:
            out.labels.append(split_cell(row[label_at]))
        if out.ids is not None:
            out.ids.append(row[id_at].strip())
        for name, at in kept_at.items():
            out.kept[name].append(row[at])
    return out


def _read_parquet(path: Path, image_column: str, label_column: str, keep: Sequence[str]) -> Columns:
    what = "a Parquet table of images"
    with open_parquet(path, what) as file:
        there = list(file.schema_arrow.names)
    labelled = _check_columns(path, there, image_column, label_column)
    images = read_cells(path, image_column, what)
    labels = [label_cell(value) for value in read_cells(path, label_column, what)] if labelled else None
    ids = read_cells(path, ID_COLUMN, what) if ID_COLUMN in there else None
    for i, image in enumerate(images):
        if image is not None and not isinstance(image, str):
            raise DataError(
                f"{path} row {i}: column {image_column!r} holds {type(image).__name__}, a path is expected"
            )
    kept = {}
    for name in keep:
        column_at(path, name, there)
        kept[name] = ["" if value is None else str(value) for value in read_cells(path, name, what)]
    where = [f"row {i}" for i in range(len(images))]
    return Columns([image or "" for image in images], labels, ids, where, kept)


def parse_ids(path: Path, values: Sequence[Any], where: Sequence[str]) -> NDArray[np.int64]:
    """The ``id`` column as unique int64 [N].

    Raises:
        DataError: not an integer, out of the 64-bit range, -1 ("no result" in a search) or repeated.
    """
    out = np.empty(len(values), dtype=np.int64)
    for i, value in enumerate(values):
        try:
            number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None or not -(2**63) <= number < 2**63:
            raise DataError(
                f"{path} {where[i]}: id {value!r} is not a 64-bit integer (for texts, call it name, and --keep name)"
            )
        if number == -1:
            raise DataError(f"{path} {where[i]}: id -1 stands for 'no result' in a search: give another")
        out[i] = number
    order = np.argsort(out, kind="stable")
    twice = np.flatnonzero(out[order][1:] == out[order][:-1])
    if twice.size:
        i, j = int(order[twice[0]]), int(order[twice[0] + 1])
        raise DataError(f"{path} {where[j]}: id {out[j]} is already that of {where[i]}")
    return out


def _labels(items: Sequence[tuple[str, ...]]) -> Labels | None:
    names = {name for item in items for name in item}
    if not names:
        return None
    # Class numbers in numeric order, not 1, 10, 2.
    numeric = all(name.isascii() and name.isdigit() for name in names)
    ordered = sorted(names, key=lambda name: (int(name), name)) if numeric else sorted(names)
    return Labels.from_names(items, ordered)


def open_table(
    path: str | os.PathLike[str],
    *,
    form: str = "csv",
    root: str | None = None,
    image_column: str = "image",
    label_column: str = DEFAULT_LABEL_COLUMN,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> FileImages:
    """Images of a table.

    The label column holds class names or numbers, or several separated by ``|`` (in Parquet also a list);
    empty: unlabelled. Classes are sorted. An optional column ``id`` has int64 ids, or texts, which are then the names; else ids are row
    numbers from 0, including missing images.

    Args:
        path: the table; CSV has a header line; ``.tsv`` files have tabs.
        form: ``csv`` or ``parquet``.
        root: base folder of relative paths (default: the table's).
        image_column, label_column: names of the columns. If the default ``label`` is missing, all items are
            unlabelled.
        keep: further text columns to store with the items.
        max_bad: allowed fraction of missing images, and of broken ones among the others.

    Raises:
        DataError: missing, damaged, without these columns, a row without a path, bad ids, too many images
            missing.
        UsageError: ``max_bad`` out of range.
    """
    file = Path(path).expanduser()
    columns = (_read_parquet if form == "parquet" else _read_csv)(file, image_column, label_column, keep)
    if not columns.images:
        raise DataError(f"{file} has no rows: a table of images was expected")
    for i, image in enumerate(columns.images):
        if not image:
            raise DataError(f"{file} {columns.where[i]}: no path in column {image_column!r}")
    notes = repeated_note(columns.images)
    labels = None if columns.labels is None else _labels(columns.labels)
    if labels is None:
        notes.append(
            f"no column {label_column!r}: all images are unlabelled"
            if columns.labels is None
            else f"column {label_column!r} is empty: all images are unlabelled"
        )
    ids, texts = np.arange(len(columns.images), dtype=np.int64), columns.kept
    if columns.ids and all(
        isinstance(one, str) and one and not _NUMBER.fullmatch(one) for one in columns.ids
    ):
        texts = {**texts, "name": columns.ids}
        notes.append(texts_for_ids(ID_COLUMN, ID_COLUMN))
    elif columns.ids is not None:
        ids = parse_ids(file, columns.ids, columns.where)
    return listed_images(
        f"{form}:{path}",
        columns.images,
        resolve(columns.images, Path(root).expanduser() if root is not None else file.parent),
        labels=labels,
        ids=ids,
        notes=notes,
        texts=texts,
        max_bad=max_bad,
    )

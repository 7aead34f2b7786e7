"""``csv:FILE`` and ``parquet:FILE``: tables with a column of image paths and a column of labels."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .embeddings import texts_for_ids
from .images import FileImages, listed_images
from .label_files import label_cell
from .labels import Labels
from .lists import repeated_note, resolve
from .table_files import Table, column_at

DEFAULT_LABEL_COLUMN = "label"
ID_COLUMN = "id"
_NUMBER = re.compile(r"[+-]?[0-9_.]+")


def _read(
    path: Path, form: str, image_column: str, label_column: str, keep: Sequence[str]
) -> tuple[dict[str, list[Any]], list[str]]:
    """The columns of a table by name, as far as they are there, and where each row is. Only the default label column may be missing
    (unlabelled queries)."""
    table = Table(path, "a table of images", parquet=form == "parquet")
    there = table.header
    if not there:
        raise DataError(
            f"{path} is empty, or its first line is: a header line with a column {image_column!r} is expected"
        )
    wanted = dict.fromkeys(keep, "--keep") | {image_column: "--image-column"}
    if label_column in there or label_column != DEFAULT_LABEL_COLUMN:
        wanted[label_column] = "--label-column"
    if ID_COLUMN in there:
        wanted.setdefault(ID_COLUMN, "")
    for name, option in wanted.items():
        column_at(path, name, there, option)
    cells, where = table.columns(list(wanted))
    return dict(zip(wanted, cells, strict=True)), where


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
    columns, where = _read(file, form, image_column, label_column, keep)
    images = columns[image_column]
    if not images:
        raise DataError(f"{file} has no rows: a table of images was expected")
    for i, image in enumerate(images):
        if not image:
            raise DataError(f"{file} {where[i]}: no path in column {image_column!r}")
        if not isinstance(image, str):
            raise DataError(
                f"{file} {where[i]}: column {image_column!r} holds {type(image).__name__}, a path is expected"
            )
    notes = repeated_note(images)
    labels = (
        _labels([label_cell(value) for value in columns[label_column]]) if label_column in columns else None
    )
    if labels is None:
        notes.append(
            f"column {label_column!r} is empty: all images are unlabelled"
            if label_column in columns
            else f"no column {label_column!r}: all images are unlabelled"
        )
    ids, given = np.arange(len(images), dtype=np.int64), columns.get(ID_COLUMN)
    texts = {name: ["" if value is None else str(value) for value in columns[name]] for name in keep}
    if given is not None and all(
        isinstance(one, str) and one and not _NUMBER.fullmatch(one) for one in given
    ):
        texts["name"] = given
        notes.append(texts_for_ids(ID_COLUMN, ID_COLUMN))
    elif given is not None:
        ids = parse_ids(file, given, where)
    return listed_images(
        f"{form}:{path}",
        images,
        resolve(images, Path(root).expanduser() if root is not None else file.parent),
        labels=labels,
        ids=ids,
        notes=notes,
        texts=texts,
        max_bad=max_bad,
    )

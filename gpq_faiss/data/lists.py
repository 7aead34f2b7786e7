"""Lists of images: ``list:FILE``, text lines of hashing papers; ``csv:FILE`` and ``parquet:FILE``, tables with a column of paths."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError, UsageError
from ..inputs import read_text
from .base import About
from .images import FileImages, listed_images
from .labels import Labels
from .paths import is_url, local_path, without_secrets
from .tables import IDS, csv_table, first_of, parquet_table


def _file(path: str, root: str | None) -> tuple[Path, str | Path]:
    """A list as a local file, and the base folder of its paths."""
    if is_url(path) and root is None:
        raise UsageError(f"{without_secrets(path)}: where are its images? Give their folder: --read root=DIR")
    file = local_path(path)
    return file, file.parent if root is None else Path(root).expanduser()


def _below(root: str | Path, names: Sequence[str]) -> list[str]:
    """Paths of listed names, relative ones below ``root``, with back-slashes converted."""
    return [os.path.join(root, name if os.sep == "\\" else name.replace("\\", "/")) for name in names]


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The non-blank lines of a text with their numbers from 1; ``what`` names its content. Raises DataError: missing, empty or not text."""
    lines = [(i, line.strip()) for i, line in enumerate(read_text(path, what).split("\n"), 1) if line.strip()]
    if not lines or any("\0" in line for _, line in lines):
        raise DataError(f"{path} is empty or not a text: {what} was expected")
    return lines


def _label_columns(line: str) -> int:
    """Number of label columns at the end of ``line``: 0/1 values, or one class number."""
    tokens = line.split()[1:]
    count = 0
    while count < len(tokens) and tokens[-1 - count] in {"0", "1"}:
        count += 1
    return count or int(bool(tokens) and tokens[-1].removeprefix("-").isdecimal())


def _parse(path: Path, lines: Sequence[tuple[int, str]]) -> tuple[list[str], Labels | None]:
    """Paths, and labels in as many columns as the first line has."""
    columns = _label_columns(lines[0][1])
    if not columns:
        return [line for _, line in lines], None
    names, values = [], np.empty((len(lines), columns), np.int64)
    for row, (number, line) in enumerate(lines):
        name, *numbers = line.rsplit(maxsplit=columns)
        try:
            values[row] = [int(text) for text in numbers]
            if columns > 1 and (_label_columns(line) != columns or not set(numbers) <= {"0", "1"}):
                raise ValueError
        except (ValueError, OverflowError):
            what = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            first = f"expected as in line {lines[0][0]}"
            raise DataError(f"{path} line {number}: {what} {first}, found {line[-60:]!r}") from None
        names.append(name)
    beside = path.parent / "classes.txt"
    classes = [line for _, line in read_lines(beside, "class names")] if beside.is_file() else None
    try:
        if columns > 1:
            return names, Labels.from_multihot(values, classes)
        return names, Labels.from_ids(values[:, 0], classes)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def open_list(path: str, *, root: str | None = None, max_bad: float = 0.01) -> FileImages:
    """Images of a text list. Each line is a path and 0/1 labels (``images/a.jpg 0 1 0``; all 0 is unlabelled), or a path and one class
    number (-1 is unlabelled), or a path alone. Paths may contain blanks. Class names are those of ``classes.txt`` beside the list.
    """
    file, base = _file(path, root)
    names, found = _parse(file, read_lines(file, "a list of images"))
    labels = found if found is not None and found.has().any() else None
    about = About(labels, notes=["no labels"] if labels is None else [])
    return listed_images(f"list:{without_secrets(path)}", names, _below(base, names), about, max_bad)


def open_table(
    path: str,
    *,
    form: str,
    root: str | None = None,
    image_column: str = "image",
    label_column: str | None = None,
    keep: Sequence[str] = (),
    max_bad: float = 0.01,
) -> FileImages:
    """Images of a table (``form`` ``csv`` or ``parquet``) with a column of paths; without a column of ids they are row numbers."""
    file, base = _file(path, root)
    table = (parquet_table if form == "parquet" else csv_table)(file, "a table of images")
    table.check(image_column, remedy=": name it with --read image_column")
    images = table.cells(image_column)
    wrong = next((i for i, image in enumerate(images) if not image or not isinstance(image, str)), None)
    if wrong is not None or not images:
        at = "no rows" if wrong is None else f"{images[wrong]!r} in row {wrong} of column {image_column!r}"
        raise DataError(f"{file} has {at}: paths of images are needed")
    ids = first_of(IDS, table.names)
    names = None if ids is not None and table.holds_texts(ids) else image_column
    about, _ = table.describe(label_column, names=names, keep=keep)
    return listed_images(f"{form}:{without_secrets(path)}", images, _below(base, images), about, max_bad)

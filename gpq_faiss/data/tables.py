"""Lists of images: ``list:FILE``, text lines of hashing papers; ``csv:FILE`` and ``parquet:FILE``, tables with a column of paths."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..inputs import read_text
from .arrays import read_npy
from .base import DEFAULT_LABEL_COLUMN, About, Options
from .columns import texts_for_ids
from .images import FileImages, listed_images, shown
from .label_files import label_cell
from .labels import Labels, class_order
from .table_files import Table

ID_COLUMN = "id"
_NUMBER = re.compile(r"[+-]?[0-9_.]+")
_NAME_FILES = ("classes.txt", "class_names.txt", "classes_names.txt", "concepts.txt")


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The non-blank lines of a text with their numbers from 1; ``what`` names its content. Raises DataError: missing, empty or not text."""
    text = read_text(path, what)
    if "\0" in text:
        raise DataError(f"{path} is not a text: {what} was expected")
    lines = [(i, line.strip()) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty: {what} was expected")
    return lines


def _is_int(token: str) -> bool:
    return token.removeprefix("-").isascii() and token.removeprefix("-").isdigit()


def _label_columns(line: str, *, with_path: bool) -> int:
    """Number of label columns at the end of ``line``: 0/1 values, or one class number."""
    tokens = line.split()[with_path:]
    count = 0
    while count < len(tokens) and tokens[-1 - count] in {"0", "1"}:
        count += 1
    return count or int(bool(tokens) and _is_int(tokens[-1]))


def _class_names(path: Path, n_classes: int, *, exact: bool) -> tuple[str, ...] | None:
    """Class names from ``classes.txt`` (or similar) in the folder of ``path``, if it exists and fits."""
    for name in _NAME_FILES:
        file = path.parent / name
        if file.is_file():
            names = tuple(line for _, line in read_lines(file, "class names, one per line"))
            fits = len(names) == n_classes if exact else len(names) >= n_classes
            if fits and len(set(names)) == len(names):
                return names
    return None


def _parse(
    path: Path, lines: Sequence[tuple[int, str]], *, with_path: bool
) -> tuple[list[str], Labels | None]:
    """Paths, and labels in as many columns as the first line has."""
    columns = _label_columns(lines[0][1], with_path=with_path)
    if not columns:
        return [line for _, line in lines], None
    names: list[str] = []
    values: list[list[str]] = []
    for number, line in lines:
        fields = line.rsplit(maxsplit=columns) if with_path else ["", *line.split()]
        extra = columns > 1 and with_path and fields[0].rsplit(maxsplit=1)[-1] in {"0", "1"}
        fits = _is_int if columns == 1 else {"0", "1"}.__contains__
        if len(fields) != columns + 1 or extra or not all(map(fits, fields[1:])):
            what = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            first = lines[0][0]
            raise DataError(f"{path} line {number}: {what} expected as in line {first}, found {line[-60:]!r}")
        names.append(fields[0])
        values.append(fields[1:])
    if columns > 1:
        return names, Labels.from_multihot(np.array(values) == "1", _class_names(path, columns, exact=True))
    numbers = [int(value) for (value,) in values]
    top = max(numbers)
    if top > np.iinfo(np.int64).max or min(numbers) < -1:
        found = f"{min(numbers)} .. {top}"
        raise DataError(f"{path}: class numbers from 0, or -1 for none, are expected, found {found}")
    return names, Labels.from_ids(np.array(numbers, np.int64), _class_names(path, top + 1, exact=False))


def _labels_file(path: Path, n_items: int) -> Labels:
    """Labels from a separate file: text (0/1 columns or one class number per line) or ``.npy`` (ids or multi-hot)."""
    if path.suffix.lower() == ".npy":
        array = read_npy(path, "labels, a row for each image,")
        found: Labels | None = Labels.from_ids(array) if array.ndim == 1 else Labels.from_multihot(array)
        assert found is not None
        names = _class_names(path, found.n_classes, exact=True)
        found = Labels(found.packed, names) if names else found
    else:
        found = _parse(path, read_lines(path, "labels, a row for each image"), with_path=False)[1]
    if found is None:
        raise DataError(f"{path} holds no labels: 0/1 columns or one class number per line are expected")
    if len(found) != n_items:
        raise DataError(f"{path} has labels of {len(found):,} items, but {n_items:,} images are listed")
    return found


def _found(names: Sequence[str], root: str | None, file: Path) -> tuple[list[str], list[str]]:
    """Paths of listed names, relative ones below ``root``, with back-slashes converted; and a note if a path is listed twice: queries
    that are also in the database improve all results."""
    base = file.parent if root is None else Path(root).expanduser()
    paths = [os.path.join(base, name if os.sep == "\\" else name.replace("\\", "/")) for name in names]
    twice = [name for name, count in Counter(names).items() if count > 1]
    return paths, [f"{len(twice):,} paths are listed more than once ({shown(twice[0])})"] if twice else []


def open_list(path: str, o: Options) -> FileImages:
    """Images of a text list.

    Each line is a path and 0/1 labels (``images/a.jpg 0 1 0``; all 0 is unlabelled), or a path and one class
    number (-1 is unlabelled), or a path alone (labels from a file, one row per line, or none). Paths may contain blanks. Class names are
    taken from ``classes.txt`` beside the list if its length fits. ids are line indices from 0, including missing images.
    """
    file = Path(path).expanduser()
    lines = read_lines(file, "a list of images")
    if o.labels is None:
        names, found = _parse(file, lines, with_path=True)
    else:
        names = [line for _, line in lines]
        found = _labels_file(Path(o.labels).expanduser(), len(names))
    paths, notes = _found(names, o.root, file)
    labels = found if found is not None and found.has().any() else None
    return listed_images(f"list:{path}", names, paths, About(labels, notes=notes), o.max_bad)


def _ids(path: Path, values: Sequence[Any], where: Sequence[str]) -> NDArray[np.int64]:
    """The ``id`` column as unique int64 [N]; -1 is "no result" in a search."""
    out = np.empty(len(values), dtype=np.int64)
    seen: dict[int, str] = {}
    for i, value in enumerate(values):
        try:
            number = int(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        at = f"{path} {where[i]}: id"
        if number is None or not -(2**63) <= number < 2**63:
            raise DataError(
                f"{at} {value!r} is not a 64-bit integer (for texts, call it name, and --read keep=name)"
            )
        if number == -1:
            raise DataError(f"{at} -1 stands for 'no result' in a search: give another")
        if number in seen:
            raise DataError(f"{at} {number} is already that of {seen[number]}")
        seen[number], out[i] = where[i], number
    return out


def open_table(path: str, form: str, o: Options) -> FileImages:
    """Images of a table.

    The label column holds class names or numbers, or several separated by ``|`` (in Parquet also a list);
    empty: unlabelled. Classes are sorted. An optional column ``id`` has int64 ids, or texts, which are then the names; else ids are row
    numbers from 0, including missing images.
    """
    file = Path(path).expanduser()
    table = Table(file, "a table of images", parquet=form == "parquet")
    if not table.header:
        what = f"a header line with a column {o.image_column!r} is expected"
        raise DataError(f"{file} is empty, or its first line is: {what}")
    wanted = dict.fromkeys(o.keep, "--read keep") | {o.image_column: "--read image_column"}
    if o.label_column in table.header or o.label_column != DEFAULT_LABEL_COLUMN:
        wanted[o.label_column] = "--read label_column"
    if ID_COLUMN in table.header:
        wanted.setdefault(ID_COLUMN, "")
    for name, option in wanted.items():
        table.check(name, option)
    cells, where = table.columns(list(wanted))
    columns = dict(zip(wanted, cells, strict=True))
    images = columns[o.image_column]
    if not images:
        raise DataError(f"{file} has no rows: a table of images was expected")
    for i, image in enumerate(images):
        if not image:
            raise DataError(f"{file} {where[i]}: no path in column {o.image_column!r}")
        if not isinstance(image, str):
            what = type(image).__name__
            raise DataError(f"{file} {where[i]}: column {o.image_column!r} holds {what}, a path is expected")
    paths, notes = _found(images, o.root, file)
    items = [label_cell(value) for value in columns.get(o.label_column, ())]
    labels = Labels.from_names(items, class_order(n for item in items for n in item)) if any(items) else None
    if labels is None:
        what = f"column {o.label_column!r} is empty" if items else f"no column {o.label_column!r}"
        notes.append(f"{what}: all images are unlabelled")
    ids, given = None, columns.get(ID_COLUMN)
    texts = {name: ["" if value is None else str(value) for value in columns[name]] for name in o.keep}
    if given is not None and all(isinstance(v, str) and v and not _NUMBER.fullmatch(v) for v in given):
        texts["name"] = given
        notes.append(texts_for_ids(ID_COLUMN, ID_COLUMN))
    elif given is not None:
        ids = _ids(file, given, where)
    about = About(labels, ids, texts, notes=notes)
    return listed_images(f"{form}:{path}", images, paths, about, o.max_bad)

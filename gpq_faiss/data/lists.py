"""``list:FILE``: text lists as used by hashing papers, one image per line followed by its labels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..inputs import check_file
from .arrays import read_npy
from .images import FileImages, listed_images, shown
from .labels import Labels

_NAME_FILES = ("classes.txt", "class_names.txt", "classes_names.txt", "concepts.txt")


def read_lines(path: Path, what: str) -> list[tuple[int, str]]:
    """The non-blank lines of a UTF-8 text with their numbers from 1; ``what`` names its content in errors.

    Raises:
        DataError: missing, empty or not text.
    """
    lines: list[tuple[int, str]] = []
    check_file(path, what)
    try:
        with path.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if "\0" in line:
                    raise DataError(f"{path} is not a text: {what} was expected")
                text = line.strip()
                if text:
                    lines.append((number, text))
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text: {what} was expected") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    if not lines:
        raise DataError(f"{path} is empty: {what} was expected")
    return lines


def _is_int(token: str) -> bool:
    return token.removeprefix("-").isascii() and token.removeprefix("-").isdigit()


def _label_columns(line: str, *, with_path: bool) -> int:
    """Number of label columns at the end of ``line``: 0/1 values, or one class number."""
    tokens = line.split()
    most = len(tokens) - with_path
    count = 0
    while count < most and tokens[-1 - count] in {"0", "1"}:
        count += 1
    return count if count or most < 1 else int(_is_int(tokens[-1]))


def class_names_beside(path: Path, n_classes: int, *, exact: bool) -> tuple[str, ...] | None:
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
    columns = _label_columns(lines[0][1], with_path=with_path)
    names: list[str] = []
    rows: list[str] = []
    numbers: list[int] = []
    for number, line in lines:
        fields = line.rsplit(maxsplit=columns) if columns else [line]
        if not with_path:
            fields = ["", *line.split()]
        values = fields[1:]
        extra = columns >= 2 and with_path and fields[0].rsplit(maxsplit=1)[-1] in {"0", "1"}
        wrong = len(values) != columns or extra
        if columns == 1 and not wrong:
            wrong = not _is_int(values[0])
            numbers.append(0 if wrong else int(values[0]))
        elif columns and not wrong:
            row = "".join(values)
            wrong = len(row) != columns or bool(row.strip("01"))
            rows.append(row)
        if wrong:
            what = f"{columns} labels of 0 or 1" if columns > 1 else "one class number"
            raise DataError(
                f"{path} line {number}: {what} expected as in line {lines[0][0]}, found {line[-60:]!r}"
            )
        names.append(fields[0])
    if not columns:
        return names, None
    if columns == 1:
        top = max(numbers)
        if top > np.iinfo(np.int64).max or min(numbers) < -1:
            raise DataError(
                f"{path}: class numbers from 0, or -1 for none, are expected, found {min(numbers)} .. {top}"
            )
        return names, Labels.from_ids(
            np.array(numbers, dtype=np.int64), class_names_beside(path, top + 1, exact=False)
        )
    matrix = np.frombuffer("".join(rows).encode(), dtype=np.uint8).reshape(len(rows), columns) - ord("0")
    return names, Labels.from_multihot(matrix, class_names_beside(path, columns, exact=True))


def labels_file(path: Path, n_items: int) -> Labels:
    """Labels from a separate file: text (0/1 columns or one class number per line) or ``.npy`` (ids or
    multi-hot).

    Raises:
        DataError: missing, damaged, or not one row for each of the ``n_items``.
    """
    if path.suffix.lower() == ".npy":
        array = read_npy(path, "labels, a row for each image,")
        labels = Labels.from_ids(array) if array.ndim == 1 else Labels.from_multihot(array)
        names = class_names_beside(path, labels.n_classes, exact=True)
        labels = Labels(labels.packed, names) if names else labels
    else:
        parsed = _parse(path, read_lines(path, "labels, a row for each image"), with_path=False)[1]
        if parsed is None:
            raise DataError(f"{path} holds no labels: 0/1 columns or one class number per line are expected")
        labels = parsed
    if len(labels) != n_items:
        raise DataError(f"{path} has labels of {len(labels):,} items, but {n_items:,} images are listed")
    return labels


def resolve(names: Sequence[str], root: Path) -> list[str]:
    """Paths of listed names: relative ones below ``root``; back-slashes are converted."""
    turned = names if os.sep == "\\" else [name.replace("\\", "/") for name in names]
    return [os.path.join(root, name) for name in turned]


def repeated_note(names: Sequence[str]) -> list[str]:
    """A note if a path is listed twice: queries that are also in the database improve all results."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    return [f"{len(twice):,} paths are listed more than once ({shown(twice[0])})"] if twice else []


def open_list(
    path: str | os.PathLike[str], *, root: str | None = None, labels: str | None = None, max_bad: float = 0.01
) -> FileImages:
    """Images of a text list.

    Each line is a path and 0/1 labels (``images/a.jpg 0 1 0``; all 0 is unlabelled), or a path and one class
    number (-1 is unlabelled), or a path alone (no labels). Paths may contain blanks. Class names are
    taken from ``classes.txt`` beside the list if its length fits, else they are numbers. ids are line indices from
    0, including missing images.

    Args:
        path: the list.
        root: base folder of relative paths (default: the list's).
        labels: a file of labels, one row per line, for a list of bare paths.
        max_bad: allowed fraction of missing images, and of broken ones among the others.

    Raises:
        DataError: missing, not text, lines of different forms, or too many images missing.
        UsageError: ``max_bad`` out of range.
    """
    file = Path(path).expanduser()
    lines = read_lines(file, "a list of images")
    if labels is None:
        names, parsed = _parse(file, lines, with_path=True)
    else:
        names = [line for _, line in lines]
        parsed = labels_file(Path(labels).expanduser(), len(names))
    paths = resolve(names, Path(root).expanduser() if root is not None else file.parent)
    return listed_images(
        f"list:{path}",
        names,
        paths,
        labels=parsed if parsed is not None and parsed.has().any() else None,
        ids=np.arange(len(names), dtype=np.int64),
        notes=repeated_note(names),
        max_bad=max_bad,
    )

"""Labels of a data set as packed multi-hot rows: one form for single-label, multi-label and
unlabelled items; and where they come from.

One bit per class (``np.packbits`` order: class 0 is the highest bit of byte 0) keeps the 195,834 x
81 labels of NUS-WIDE in 2 MB, and "shares at least one label", the relevance of every protocol, is
a byte-wise AND.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, UsageError
from ..files import fingerprint
from .images import without_gradient

MAX_CLASSES = 65_535
"""Maximum number of classes; more are probably ids given as labels."""
SEPARATOR = "|"
"""Separator of several labels of one item in text."""
_NUMBER = re.compile(r"-?[0-9]{1,18}")
WHOLE = re.compile(r"-?[0-9]{1,18}(\.0*)?")
ROW = re.compile(r"\[?\s*[01](\.0*)?([\s,;]+[01](\.0*)?)+\s*\]?")

Rows = slice | NDArray[Any]


def composed(text: str) -> str:
    """Return a name in Unicode's composed form: macOS and others write one name in two forms."""
    return unicodedata.normalize("NFC", text)


def plain_text(value: Any) -> str:
    """Return the text of a value; bytes are UTF-8. Raises DataError: they are not."""
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise DataError(f"{value[:40]!r} is not UTF-8: save texts as UTF-8") from None


@contextlib.contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Put ``source``, if it is not empty, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}: {error}" if source else str(error)) from error


def row_numbers(rows: Rows, n: int) -> NDArray[np.int64]:
    """``rows`` (a slice, integers or a mask) as numbers in 0 .. n-1. Raises IndexError: out of
    range.
    """
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n))
    array = np.asarray(rows)
    array = np.flatnonzero(array) if array.dtype == np.bool_ else array.astype(np.int64)
    if array.size and not -n <= array.min() <= array.max() < n:
        raise IndexError(f"rows {array.min()} to {array.max()} of {n}")
    return array % n if array.size else array


def class_order(names: Iterable[str]) -> list[str]:
    """Different names in sorted order; numbers, if all are, by size: not 1, 10, 2."""
    unique_names = set(names)
    numbers = all(_NUMBER.fullmatch(name) for name in unique_names)
    return sorted(unique_names, key=lambda name: (int(name), name) if numbers else (0, name))


def rows_that(rows: NDArray[Any], verb: str) -> str:
    """The first of ``rows`` with a matching verb form: ``"row 7 holds"``, ``"rows 3, 8 hold"`` (of
    ``"hold"``).
    """
    of_one = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{named_rows(rows)} {verb if len(rows) > 1 else of_one}"


def _names(class_names: Sequence[str] | None, n_classes: int) -> tuple[str, ...]:
    """Class names as a tuple; default: the class numbers. Raises DataError: too many, or one
    twice.
    """
    names = tuple(
        composed(str(n)) for n in (range(n_classes) if class_names is None else class_names)
    )
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{len(names):,} different labels: at most {MAX_CLASSES:,} classes are possible"
        )
    if wrong := next((name for name in names if not name.isprintable()), None):
        raise DataError(f"the class {wrong[:60]!a} is not a printable name: rename it")
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise DataError(f"class name {name!r} is given twice: every class needs its own name")
    return names


@dataclass(frozen=True, eq=False)
class Labels:
    """Packed multi-hot labels of N items over C classes: uint8 [N, ceil(C/8)], ``np.packbits``
    order (a zero row is unlabelled), and C names."""

    packed: NDArray[np.uint8]
    class_names: tuple[str, ...]

    def names_of(self, row: int) -> tuple[str, ...]:
        """Class names of an item."""
        return self.names(np.flatnonzero(self.dense(np.array([row]), np.uint8)))

    @classmethod
    def _of_pairs(cls, n: int, rows: Any, classes: Any, names: tuple[str, ...]) -> Labels:
        """Labels of ``n`` items that have class ``classes[i]`` at ``rows[i]``."""
        packed = np.zeros((n, (len(names) + 7) // 8), dtype=np.uint8)
        rows, classes = np.asarray(rows, np.int64), np.asarray(classes, np.int64)
        np.bitwise_or.at(packed, (rows, classes >> 3), (128 >> (classes & 7)).astype(np.uint8))
        return cls(packed, names)

    @classmethod
    def from_ids(
        cls, ids: NDArray[Any] | Sequence[int], class_names: Sequence[str] | None = None
    ) -> Labels:
        """Labels from one class number per item; -1 is unlabelled. Names default to the class
        numbers.

        Raises:
            DataError: not whole numbers in one dimension, below -1, or at or beyond C; the rows are
                named.

        Examples:
            >>> Labels.from_ids([0, 2, -1], ["cat", "dog", "fox"]).dense().tolist()
            [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        """
        array = np.asarray(ids)
        array = array if array.size else array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise DataError(
                f"labels are {array.dtype} {list(array.shape)}: whole numbers [N] are needed"
            )
        limit = MAX_CLASSES if class_names is None else len(class_names)
        wrong = np.flatnonzero((array < -1) | (array >= limit))
        if wrong.size:
            raise DataError(
                f"label {int(array[wrong[0]]):,} at {named_rows(wrong)} is out of range"
                f": class numbers are from 0 (-1: none), at most {limit:,} classes"
            )
        array = array.astype(np.int64)
        rows = np.flatnonzero(array >= 0)
        names = _names(class_names, max(1, int(array.max(initial=-1)) + 1))
        return cls._of_pairs(len(array), rows, array[rows], names)

    @classmethod
    def from_multihot(cls, array: NDArray[Any], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from a 0/1 matrix [N, C] of any number type; a zero row is unlabelled. Raises
        DataError: anything else.
        """
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "iubf" or array.shape[1] == 0:
            raise DataError(
                f"multi-hot labels are {array.dtype} {list(array.shape)}: 0/1 [N, C] is needed"
            )
        names = _names(class_names, array.shape[1])
        if len(names) != array.shape[1]:
            raise DataError(
                f"labels have {array.shape[1]} columns but {len(names)} class names are given"
            )
        wrong = np.flatnonzero(((array != 0) & (array != 1)).any(axis=1))
        if wrong.size:
            raise DataError(f"multi-hot labels other than 0 and 1 at {named_rows(wrong)}")
        return cls(np.packbits(array == 1, axis=1), names)

    @classmethod
    def from_names(
        cls, items: Iterable[Sequence[str]], class_names: Sequence[str] | None = None
    ) -> Labels:
        """Labels from the class names of each item (empty: unlabelled), which are among
        ``class_names`` (default: all, in :func:`class_order`). Raises DataError: negative numbers,
        no label, or too many classes.
        """
        rows = [tuple(map(composed, item)) for item in items]
        unique_names = class_names or class_order(name for row in rows for name in row)
        if not unique_names:
            raise DataError("no item has a label, so the classes are unknown: label some items")
        if (
            class_names is None
            and unique_names[0].startswith("-")
            and _NUMBER.fullmatch(unique_names[0])
        ):
            raise DataError(f"label {unique_names[0]}: class numbers are from 0, or -1 for none")
        names = _names(unique_names, 1)
        positions = {name: c for c, name in enumerate(names)}
        pairs = [(i, positions[name]) for i, row in enumerate(rows) for name in row]
        item_rows, classes = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls._of_pairs(len(rows), item_rows, classes, names)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and class of every label, in the order of the rows."""
        row, byte = np.nonzero(self.packed)
        byte_index, bit = np.nonzero(np.unpackbits(self.packed[row, byte][:, None], axis=1))
        return row[byte_index], 8 * byte[byte_index] + bit

    @property
    def multi_label(self) -> bool:
        """Whether any item has more than one label."""
        return bool((np.diff(self._pairs[0]) == 0).any())

    def has(self, rows: Rows | None = None) -> NDArray[np.bool_]:
        """Whether each item (of ``rows``) has any label: bool [n]."""
        return np.asarray(
            (self.packed if rows is None else self.packed[rows]).any(axis=1), dtype=np.bool_
        )

    def dense(
        self, rows: Rows | None = None, dtype: type[np.number[Any]] | type[bool] = np.float32
    ) -> NDArray[Any]:
        """Multi-hot matrix [n, C] of 0 and 1 in ``dtype``."""
        packed = self.packed if rows is None else self.packed[rows]
        return np.unpackbits(packed, axis=1, count=self.n_classes).astype(dtype)

    def column(self, c: int) -> NDArray[np.bool_]:
        """Whether each item has class ``c``: bool [N], without unpacking the rest."""
        return np.asarray(self.packed[:, c >> 3] & np.uint8(128 >> (c & 7)), dtype=np.bool_)

    def class_ids(self) -> NDArray[np.int64]:
        """The single class of each item, -1 if unlabelled: int64 [N]."""
        rows, classes = self._pairs
        if self.multi_label:
            several = np.unique(rows[1:][np.diff(rows) == 0])
            raise DataError(
                f"one label per item is needed, but {rows_that(several, 'have')} several"
            )
        ids = np.full(len(self), -1, np.int64)
        ids[rows] = classes
        return ids

    def over(self, class_names: Iterable[str]) -> Labels:
        """The same N items over these classes, in this order; labels of other classes are
        dropped.
        """
        positions = {name: c for c, name in enumerate(class_names)}
        number = np.array([positions.get(name, -1) for name in self.class_names])
        rows, classes = self._pairs[0], number[self._pairs[1]]
        return self._of_pairs(
            len(self), rows[classes >= 0], classes[classes >= 0], tuple(positions)
        )

    def names(self, classes: Iterable[int]) -> tuple[str, ...]:
        """Names of class numbers."""
        return tuple(self.class_names[c] for c in classes)

    def take(self, rows: Rows) -> Labels:
        """The labels of ``rows`` (a slice, positions or a mask), over the same classes."""
        return Labels(np.ascontiguousarray(self.packed[rows]), self.class_names)

    def masked(self, rows: NDArray[Any]) -> Labels:
        """The same N items with labels at ``rows`` only; others become unlabelled."""
        packed = np.zeros_like(self.packed)
        packed[rows] = self.packed[rows]
        return Labels(packed, self.class_names)

    def counts(self) -> NDArray[np.int64]:
        """Items of each class, int64 [C]."""
        return np.bincount(self._pairs[1], minlength=self.n_classes)

    def fingerprint(self) -> str:
        """Hash over the labels and the class names."""
        return fingerprint(np.ascontiguousarray(self.packed).tobytes(), *self.class_names)


# From values in any form --------------------------------------------------------------------------


MISSING = frozenset(["nan", "na", "n/a", "#n/a", "null", "none", "nat", "<na>", "?", "-", "--"])
"""Texts, in lower case, that mean "no label" where all other labels are numbers."""


@functools.lru_cache(maxsize=MAX_CLASSES)
def _split(value: str) -> tuple[str, ...]:
    """Return the labels in a text (:func:`label_texts`); most texts occur many times."""
    text = composed(value).strip()
    if ROW.fullmatch(text):
        return tuple(re.findall(r"([01])(?:\.0*)?(?=[\s,;\]]|$)", text))
    if text[:1] in ("[", "{", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return tuple(label_texts(tuple(ast.literal_eval(text))))
    return tuple(part.strip() for part in text.split(SEPARATOR))


def label_texts(value: Any) -> list[str]:
    """Return the labels of one value as texts: none, one of a name or number, several of a list.

    Texts are split at ``|``; lists in text (``"[0, 1]"``, ``"['cat', 'dog']"``, ``"0 1 0"``) are
    lists. Raises DataError: a list in a list, a dict, or bytes that are not UTF-8.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    missing = value is None or type(value).__name__ in ("NAType", "NaTType")
    if missing or (isinstance(value, float) and np.isnan(value)):
        return []
    if isinstance(value, bytes):
        value = plain_text(value)
    if isinstance(value, str):
        return list(_split(value))
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        value = [item.tolist() if hasattr(item, "tolist") else item for item in value]
        if not any(isinstance(item, list | dict | tuple | set) for item in value):
            return [text for item in value for text in label_texts(item)]
    if isinstance(value, list | tuple | dict):
        raise DataError("a label is a dict or a list in a list: names or numbers are needed")
    is_whole = isinstance(value, bool) or (isinstance(value, float) and value.is_integer())
    return [str(int(value) if is_whole else value)]


def labels_of(
    values: Any, source: str, n: int | None = None, class_names: Sequence[str] | None = None
) -> Labels:
    """Return the labels of ``n`` items (None: any number) from values in any form, in their order.

    Args:
        values: :class:`Labels`; class numbers [N] (-1 or NaN: none) or 0/1 [N, C] as an array or a
            tensor; or a sequence of one value per item: a name, a number, a list, set or tuple of
            these, or None. Rows of 0 and 1, all of one length, are 0/1 of each class.
        source: name of the values in errors.
        class_names: names of the class numbers.

    Raises:
        DataError: another number of items, no label at all, or values of another form.
        UsageError: not a sequence.
    """
    with errors_of(source):
        labels = values if isinstance(values, Labels) else _labels(values, class_names)
        if n not in (None, len(labels)):
            raise DataError(
                f"{len(labels):,} labels, the data has {n:,} items"
                f": one each is needed, or a table with ids or names"
            )
    return labels


def _labels(values: Any, class_names: Sequence[str] | None) -> Labels:
    class_names = None if class_names is None else [plain_text(name) for name in class_names]
    values = values.to_pylist() if hasattr(values, "to_pylist") else without_gradient(values)
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim:
        if values.ndim == 2 and values.shape[1] != 1:
            empty = np.isnan(values).all(axis=1, keepdims=True)
            return Labels.from_multihot(np.where(empty, 0, values), class_names)
        if values.dtype.kind == "f":  # np.loadtxt and pandas convert labels to float
            values = np.where(np.isnan(values), -1, values)
            wrong = np.flatnonzero((values != np.floor(values)) | (np.abs(values) >= 2**53))
            if wrong.size:
                raise DataError(f"labels at {named_rows(wrong)} are not whole numbers")
            values = values.astype(np.int64)
        return Labels.from_ids(values.reshape(-1), class_names)
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        kind = type(values).__name__
        raise UsageError(f"{kind} is not a list of labels: give one label per item")
    rows = [label_texts(without_gradient(value)) for value in values]
    lengths, texts = {len(row) for row in rows if row}, {text for row in rows for text in row}
    if len(lengths) == 1 and texts <= {"0", "1"} and (length := lengths.pop()) > 1:
        hot = np.array([row or ["0"] * length for row in rows]) == "1"
        return Labels.from_multihot(hot, class_names)
    texts -= {"", "-1", *(text for text in texts if text.lower() in MISSING)}
    if all(map(WHOLE.fullmatch, texts)):  # an integer column with gaps becomes float in pandas
        rows = [[text.partition(".")[0] for text in row if text in texts] for row in rows]
    rows = [[text for text in row if text not in ("", "-1")] for row in rows]
    if class_names is None:
        return Labels.from_names(rows)
    numbers = [str(i) for i in range(len(class_names))]
    if unknown := {text for row in rows for text in row}.difference(numbers):
        message = f"class {min(unknown)} of {len(numbers)}"
        raise DataError(f"{message}: labels do not fit their class names")
    return Labels(Labels.from_names(rows, numbers).packed, _names(class_names, 1))


def labels_note(source: str, labels: Labels | None, method: str) -> str:
    """Return the line of the log on the labels of a source, matched by ``method``."""
    if labels is None:
        return "no labels"
    return (
        f"{source}: "
        f"{int(labels.has().sum()):,} of {len(labels):,} items labelled"
        f", {labels.n_classes:,} classes, {method}"
    )


def class_notes(labels: Labels) -> list[str]:
    """Return lines of the log on the classes: their sizes, and what looks like a mistake."""
    counts = labels.counts()
    order = np.argsort(-counts, kind="stable").tolist()
    sizes = [f"{labels.class_names[c]} {counts[c]:,}" for c in order]
    if len(sizes) > 12:
        sizes = [*sizes[:5], f"... ({len(sizes) - 10:,} more)", *sizes[-5:]]
    notes = [f"items of each class: {', '.join(sizes)}"]
    if missing := [repr(name) for name in labels.class_names if name.lower() in MISSING]:
        notes.append(
            f"{', '.join(missing)} count as classes: leave such labels empty if they mean none"
        )
    single = int((counts == 1).sum())
    if single > 2 and 2 * single > labels.n_classes:
        notes.append(
            f"{single:,} of {labels.n_classes:,} classes have one item: are they ids or captions?"
        )
    return notes

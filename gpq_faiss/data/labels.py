"""Labels of a data set as packed multi-hot rows: one form for single-label, multi-label and
unlabelled items; and where they come from.

One bit per class (``np.packbits`` order: class 0 is the highest bit of byte 0) keeps the 195,834 x
81 labels of NUS-WIDE in 2 MB, and "shares at least one label", the relevance of every protocol, is
a byte-wise AND.
"""

from __future__ import annotations

import ast
import contextlib
import re
import unicodedata
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
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
WHOLE = re.compile(r"-?[0-9]{1,20}(\.0*)?")
ROW = re.compile(r"\[?\s*[01](\.0*)?([\s,;]+[01](\.0*)?)+\s*\]?")

Rows = slice | NDArray[Any]


def composed(text: str) -> str:
    """Return a name in Unicode's composed form: macOS and others write one name in two forms."""
    return unicodedata.normalize("NFC", text)


def plain_text(value: Any) -> str:
    """Return the text of a value, empty for None and NaN; bytes are UTF-8. Raises DataError: they
    are not.
    """
    try:
        text = value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError:
        raise DataError(f"{value[:40]!r} is not UTF-8: save texts as UTF-8") from None
    is_text = isinstance(value, str | bytes)
    return text if is_text or text not in ("None", "nan", "NaT", "<NA>") else ""


@contextlib.contextmanager
def errors_of(source: str) -> Iterator[None]:
    """Put ``source``, if it is not empty, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{source}: {error}" if source else str(error)) from error


def row_numbers(rows: Rows, n: int) -> NDArray[np.int64]:
    """Return ``rows`` (a slice, integers or a mask) as numbers."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n))
    array = np.asarray(rows)
    return np.flatnonzero(array) if array.dtype == np.bool_ else array.astype(np.int64)


def rows_that(rows: NDArray[Any], verb: str) -> str:
    """Return the first of ``rows`` with a matching verb form: ``"row 7 holds"``, ``"rows 3, 8
    hold"`` (of ``"hold"``).
    """
    singular = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{named_rows(rows)} {verb if len(rows) > 1 else singular}"


def _names(class_names: Iterable[object]) -> tuple[str, ...]:
    """Return class names as a tuple. Raises DataError: too many, or a name that cannot be used."""
    names = tuple(composed(str(name)) for name in class_names)
    for name, count in Counter(names).items():
        if count > 1 or not name.isprintable():
            raise DataError(f"the class {name[:60]!a} is named twice, or not printable: rename it")
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{len(names):,} different labels: at most {MAX_CLASSES:,} classes are possible"
        )
    return names


@dataclass(frozen=True, eq=False)
class Labels:
    """Packed multi-hot labels of N items over C classes: uint8 [N, ceil(C/8)], ``np.packbits``
    order (a zero row is unlabelled), and C names."""

    packed: NDArray[np.uint8]
    class_names: tuple[str, ...]

    def names_of(self, row: int) -> tuple[str, ...]:
        """Return the class names of an item."""
        return self.names(np.flatnonzero(self.dense(np.array([row]), np.uint8)))

    @classmethod
    def _of_pairs(cls, n: int, rows: Any, classes: Any, names: tuple[str, ...]) -> Labels:
        """Return the labels of ``n`` items that have class ``classes[i]`` at ``rows[i]``."""
        packed = np.zeros((n, (len(names) + 7) // 8), dtype=np.uint8)
        np.bitwise_or.at(packed, (rows, classes >> 3), (128 >> (classes & 7)).astype(np.uint8))
        return cls(packed, names)

    @classmethod
    def from_ids(
        cls, ids: NDArray[Any] | Sequence[int], class_names: Sequence[str] | None = None
    ) -> Labels:
        """Return labels of one class number per item; -1 is unlabelled. Names default to the class
        numbers.

        Raises:
            DataError: not whole numbers in one dimension, below -1, or at or beyond C; the rows are
                named.

        Examples:
            >>> Labels.from_ids([0, 2, -1], ["cat", "dog", "fox"]).dense().tolist()
            [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        """
        array = np.nan_to_num(ids, nan=-1)  # np.loadtxt and pandas convert labels to float
        if array.ndim != 1:
            raise DataError(f"labels are {array.dtype} {list(array.shape)}: [N] is needed")
        limit = MAX_CLASSES if class_names is None else len(class_names)
        wrong = np.flatnonzero((array < -1) | (array >= limit) | (array != np.floor(array)))
        if wrong.size:
            raise DataError(
                f"label {array[wrong[0]]} at {named_rows(wrong)} is out of range"
                f": class numbers are whole, from 0 (-1: none), at most {limit:,} classes"
            )
        array = array.astype(np.int64)
        rows = np.flatnonzero(array >= 0)
        numbers = range(max(1, int(array.max(initial=-1)) + 1))
        names = _names(numbers if class_names is None else class_names)
        return cls._of_pairs(len(array), rows, array[rows], names)

    @classmethod
    def from_multihot(cls, array: NDArray[Any], class_names: Sequence[str] | None = None) -> Labels:
        """Return labels of a 0/1 matrix [N, C] of any number type; a zero row is unlabelled. Raises
        DataError: anything else.
        """
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "iubf" or array.shape[1] == 0:
            raise DataError(
                f"multi-hot labels are {array.dtype} {list(array.shape)}: 0/1 [N, C] is needed"
            )
        names = _names(range(array.shape[1]) if class_names is None else class_names)
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
        """Return labels of the class names of each item (empty: unlabelled), which are among
        ``class_names`` (default: all, sorted; numbers by size). Raises DataError: negative numbers,
        or too many classes.
        """
        rows = [tuple(map(composed, item)) for item in items]
        unique_names = class_names or sorted({name for row in rows for name in row})
        if class_names is None and all(map(WHOLE.fullmatch, unique_names)):
            unique_names = sorted(unique_names, key=lambda name: (int(float(name)), name))
            if unique_names and unique_names[0].startswith("-"):
                raise DataError(
                    f"label {unique_names[0]}: class numbers are from 0, or -1 for none"
                )
        names = _names(unique_names)
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
        """Return whether each item (of ``rows``) has any label: bool [n]."""
        return np.asarray(
            (self.packed if rows is None else self.packed[rows]).any(axis=1), dtype=np.bool_
        )

    def dense(
        self, rows: Rows | None = None, dtype: type[np.number[Any]] | type[bool] = np.float32
    ) -> NDArray[Any]:
        """Return the multi-hot matrix [n, C] of 0 and 1 in ``dtype``."""
        packed = self.packed if rows is None else self.packed[rows]
        return np.unpackbits(packed, axis=1, count=self.n_classes).astype(dtype)

    def column(self, c: int) -> NDArray[np.bool_]:
        """Return whether each item has class ``c``: bool [N], without unpacking the rest."""
        return np.asarray(self.packed[:, c >> 3] & np.uint8(128 >> (c & 7)), dtype=np.bool_)

    def class_ids(self) -> NDArray[np.int64]:
        """Return the single class of each item, -1 if unlabelled: int64 [N]."""
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
        """Return the same N items over these classes, in this order; labels of other classes are
        dropped.
        """
        positions = {name: c for c, name in enumerate(class_names)}
        number = np.array([positions.get(name, -1) for name in self.class_names])
        rows, classes = self._pairs[0], number[self._pairs[1]]
        return self._of_pairs(
            len(self), rows[classes >= 0], classes[classes >= 0], tuple(positions)
        )

    def names(self, classes: Iterable[int]) -> tuple[str, ...]:
        """Return the names of class numbers."""
        return tuple(self.class_names[c] for c in classes)

    def take(self, rows: Rows) -> Labels:
        """Return the labels of ``rows`` (a slice, positions or a mask), over the same classes."""
        return Labels(np.ascontiguousarray(self.packed[rows]), self.class_names)

    def at(self, rows: NDArray[np.int64]) -> Labels:
        """Return the labels of the items at ``rows``, -1 for none, over their classes."""
        packed = np.where(rows[:, None] < 0, np.uint8(0), self.packed[rows])
        labels = Labels(packed, self.class_names)
        return labels.over(labels.names(np.flatnonzero(labels.counts())))

    def masked(self, rows: NDArray[Any]) -> Labels:
        """Return the same N items with labels at ``rows`` only; others become unlabelled."""
        packed = np.zeros_like(self.packed)
        packed[rows] = self.packed[rows]
        return Labels(packed, self.class_names)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of items of each class, int64 [C]."""
        return np.bincount(self._pairs[1], minlength=self.n_classes)

    def fingerprint(self) -> str:
        """Return a hash over the labels and the class names."""
        return fingerprint(np.ascontiguousarray(self.packed).tobytes(), *self.class_names)


# From values in any form --------------------------------------------------------------------------


MISSING = frozenset(["nan", "na", "n/a", "#n/a", "null", "none", "nat", "<na>", "?", "-", "--"])
"""Texts, in lower case, that mean "no label" where all other labels are numbers."""


def labels_of(values: Any, source: str) -> Labels:
    """Return the labels of items from values in any form, in their order.

    Args:
        values: :class:`Labels`; class numbers [N] (-1 or NaN: none) or 0/1 [N, C] as an array or a
            tensor; or a sequence of one value per item: a name, a number, a list, set or tuple of
            these, or None. Rows of 0 and 1, all of one length, are 0/1 of each class. Texts are
            split at ``|``; lists in text (``"['cat', 'dog']"``, ``"0 1 0"``) are lists.
        source: name of the values in errors.

    Raises:
        DataError: values of another form.
        UsageError: not a sequence.
    """
    values = values.to_pylist() if hasattr(values, "to_pylist") else without_gradient(values)
    if isinstance(values, Labels):
        return values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise UsageError(f"{type(values).__name__} is not a list of labels: give one per item")
    with errors_of(source):
        if isinstance(values, np.ndarray) and values.dtype.kind in "biuf":
            if values.ndim < 2 or values.shape[1] == 1:
                return Labels.from_ids(values.reshape(-1))
            unlabelled = np.isnan(values).all(axis=1, keepdims=True)
            return Labels.from_multihot(np.where(unlabelled, 0, values))
        numbers: dict[Hashable, int] = {}  # most values occur many times: each is parsed once
        rows = [numbers.setdefault(_hashable(value), len(numbers)) for value in values]
        return _of_texts([_texts(value) for value in numbers]).take(np.array(rows, np.int64))


def named(value: Any, class_names: Sequence[str]) -> Any:
    """Return the name of a class number, or the names of a list of them; None is unlabelled."""
    if np.ndim(value):
        return [named(number, class_names) for number in value]
    return None if value is None or not value >= 0 else class_names[int(value)]


def _hashable(value: Any) -> Hashable:
    """Return a label as a text, a number or None, and several ones as a tuple of these."""
    if isinstance(value, str | int):
        return value
    value = without_gradient(value)
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, Mapping):
        raise DataError("a label is a dict: names or numbers are needed")
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _texts(value: Any) -> list[str]:
    """Return the labels of a value of :func:`_hashable` as texts: none, one or several."""
    if isinstance(value, tuple):
        if any(isinstance(item, tuple) for item in value):
            raise DataError("a label is a list in a list: names or numbers are needed")
        return [text for item in value for text in _texts(item)]
    if isinstance(value, bool | float) and float(value).is_integer():
        value = int(value)
    text = composed(plain_text(value)).strip()
    if not isinstance(value, str | bytes):
        return [text] if text else []
    if ROW.fullmatch(text):
        return re.findall(r"([01])(?:\.0*)?(?=[\s,;\]]|$)", text)
    if text[:1] in ("[", "{", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            return _texts(_hashable(tuple(ast.literal_eval(text))))
    return [word.strip() for word in text.split(SEPARATOR)]


def _of_texts(rows: list[list[str]]) -> Labels:
    """Return the labels of texts: 0/1 of each class, class numbers, or names."""
    lengths, texts = {len(row) for row in rows if row}, {text for row in rows for text in row}
    if len(lengths) == 1 and texts <= {"0", "1"} and (length := lengths.pop()) > 1:
        return Labels.from_multihot(np.array([row or ["0"] * length for row in rows]) == "1")
    unlabelled = {"", "-1"}
    missing = {text for text in texts if text.lower() in MISSING}
    if all(map(WHOLE.fullmatch, texts - unlabelled - missing)):
        # An integer column with gaps becomes float in pandas.
        rows = [[text.partition(".")[0] for text in row if text not in missing] for row in rows]
    return Labels.from_names([[text for text in row if text not in unlabelled] for row in rows])


def labels_note(source: str, labels: Labels, method: str) -> str:
    """Return the line of the log on the labels of a source, matched by ``method``."""
    count = f"{int(labels.has().sum()):,} of {len(labels):,} items labelled"
    return f"{source}: {count}, {labels.n_classes:,} classes, {method}"


def class_notes(labels: Labels) -> list[str]:
    """Return lines of the log on the classes: their sizes, and what looks like a mistake."""
    counts = labels.counts()
    order = np.argsort(-counts, kind="stable").tolist()
    sizes = [f"{labels.class_names[c]} {counts[c]:,}" for c in order]
    if len(sizes) > 12:
        sizes = [*sizes[:5], f"... ({len(sizes) - 10:,} more)", *sizes[-5:]]
    notes = [f"items of each class: {', '.join(sizes)}"]
    if missing := [repr(name) for name in labels.class_names if name.lower() in MISSING]:
        advice = "leave such labels empty if they mean none"
        notes.append(f"{', '.join(missing)} count as classes: {advice}")
    single = int((counts == 1).sum())
    if single > 2 and 2 * single > labels.n_classes:
        count = f"{single:,} of {labels.n_classes:,} classes"
        notes.append(f"{count} have one item: are they ids or captions?")
    return notes

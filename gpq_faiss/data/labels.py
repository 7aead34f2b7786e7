"""Labels of a data set as packed multi-hot rows: one form for single-label, multi-label and unlabelled items; and where they come from.

One bit per class (``np.packbits`` order: class 0 is the highest bit of byte 0) keeps the 195,834 x 81 labels of
NUS-WIDE in 2 MB, and "shares at least one label", the relevance of every protocol, is a byte-wise AND.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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

Rows = slice | NDArray[Any]


def composed(text: str) -> str:
    """A name in Unicode's composed form: macOS and others write one name in two forms, which look the same."""
    return unicodedata.normalize("NFC", text)


@contextlib.contextmanager
def errors_of(where: str) -> Iterator[None]:
    """Put ``where``, if it is not empty, before the message of a DataError."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}: {error}" if where else str(error)) from error


def row_numbers(rows: Rows, n: int) -> NDArray[np.int64]:
    """``rows`` (a slice, integers or a mask) as numbers in 0 .. n-1. Raises IndexError: out of range."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n))
    array = np.asarray(rows)
    array = np.flatnonzero(array) if array.dtype == np.bool_ else array.astype(np.int64)
    if array.size and not -n <= array.min() <= array.max() < n:
        raise IndexError(f"rows {array.min()} to {array.max()} of {n}")
    return array % n if array.size else array


def class_order(names: Iterable[str]) -> list[str]:
    """Different names in sorted order; numbers, if all are, by size: not 1, 10, 2."""
    every = set(names)
    numbers = all(_NUMBER.fullmatch(name) for name in every)
    return sorted(every, key=lambda name: (int(name), name) if numbers else (0, name))


def rows_that(rows: NDArray[Any], verb: str) -> str:
    """The first of ``rows`` with a matching verb form: ``"row 7 holds"``, ``"rows 3, 8 hold"`` (of ``"hold"``)."""
    of_one = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{named_rows(rows)} {verb if len(rows) > 1 else of_one}"


def _names(class_names: Sequence[str] | None, n_classes: int) -> tuple[str, ...]:
    """Class names as a tuple; default: the class numbers. Raises DataError: too many, or one twice."""
    names = tuple(composed(str(n)) for n in (range(n_classes) if class_names is None else class_names))
    if len(names) > MAX_CLASSES:
        raise DataError(f"{len(names):,} different labels: at most {MAX_CLASSES:,} classes are possible")
    name, count = Counter(names).most_common(1)[0] if names else ("", 0)
    if count > 1:
        raise DataError(f"class name {name!r} is given twice: every class needs its own name")
    return names


@dataclass(frozen=True, eq=False)
class Labels:
    """Packed multi-hot labels of N items over C classes: uint8 [N, ceil(C/8)], ``np.packbits`` order (a zero row is unlabelled),
    and C names."""

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
    def from_ids(cls, ids: NDArray[Any] | Sequence[int], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from one class number per item; -1 is unlabelled. Names default to the class numbers.

        Raises:
            DataError: not whole numbers in one dimension, below -1, or at or beyond C; the rows are named.

        Examples:
            >>> Labels.from_ids([0, 2, -1], ["cat", "dog", "fox"]).dense().tolist()
            [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        """
        array = np.asarray(ids)
        array = array if array.size else array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iub":
            raise DataError(f"labels are {array.dtype} {list(array.shape)}: whole numbers [N] are needed")
        limit = MAX_CLASSES if class_names is None else len(class_names)
        wrong = np.flatnonzero((array < -1) | (array >= limit))
        if wrong.size:
            what = f"label {int(array[wrong[0]]):,} at {named_rows(wrong)} is out of range"
            raise DataError(f"{what}: class numbers are from 0 (-1: none), at most {limit:,} classes")
        array = array.astype(np.int64)
        rows = np.flatnonzero(array >= 0)
        names = _names(class_names, max(1, int(array.max(initial=-1)) + 1))
        return cls._of_pairs(len(array), rows, array[rows], names)

    @classmethod
    def from_multihot(cls, array: NDArray[Any], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from a 0/1 matrix [N, C] of any number type; a zero row is unlabelled. Raises DataError: anything else."""
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "iubf" or array.shape[1] == 0:
            raise DataError(f"multi-hot labels are {array.dtype} {list(array.shape)}: 0/1 [N, C] is needed")
        names = _names(class_names, array.shape[1])
        if len(names) != array.shape[1]:
            raise DataError(f"labels have {array.shape[1]} columns but {len(names)} class names are given")
        wrong = np.flatnonzero(((array != 0) & (array != 1)).any(axis=1))
        if wrong.size:
            raise DataError(f"multi-hot labels other than 0 and 1 at {named_rows(wrong)}")
        return cls(np.packbits(array == 1, axis=1), names)

    @classmethod
    def from_names(cls, items: Iterable[Sequence[str]], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from the class names of each item (empty: unlabelled), which are among ``class_names`` (default: all, in
        :func:`class_order`). Raises DataError: negative numbers, no label, or too many classes."""
        rows = [tuple(map(composed, item)) for item in items]
        every = class_names or class_order(name for row in rows for name in row)
        if not every:
            raise DataError("no item has a label, so the classes are unknown: label some items")
        if class_names is None and every[0].startswith("-") and _NUMBER.fullmatch(every[0]):
            raise DataError(f"label {every[0]}: class numbers are from 0, or -1 for none")
        names = _names(every, 1)
        place = {name: c for c, name in enumerate(names)}
        pairs = [(i, place[name]) for i, row in enumerate(rows) for name in row]
        at, classes = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls._of_pairs(len(rows), at, classes, names)

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
        at, bit = np.nonzero(np.unpackbits(self.packed[row, byte][:, None], axis=1))
        return row[at], 8 * byte[at] + bit

    @property
    def multi_label(self) -> bool:
        """Whether any item has more than one label."""
        return bool((np.diff(self._pairs[0]) == 0).any())

    def has(self, rows: Rows | None = None) -> NDArray[np.bool_]:
        """Whether each item (of ``rows``) has any label: bool [n]."""
        return np.asarray((self.packed if rows is None else self.packed[rows]).any(axis=1), dtype=np.bool_)

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
            raise DataError(f"one label per item is needed, but {rows_that(several, 'have')} several")
        ids = np.full(len(self), -1, np.int64)
        ids[rows] = classes
        return ids

    def over(self, class_names: Iterable[str]) -> Labels:
        """The same N items over these classes, in this order; labels of other classes are dropped."""
        place = {name: c for c, name in enumerate(class_names)}
        number = np.array([place.get(name, -1) for name in self.class_names])
        rows, classes = self._pairs[0], number[self._pairs[1]]
        return self._of_pairs(len(self), rows[classes >= 0], classes[classes >= 0], tuple(place))

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


# From arrays, and from the cells of tables ------------------------------------------------------------------------------


def label_cell(value: Any) -> tuple[str, ...]:
    """Labels of a cell: empty, a number, a text (``"sky|sea"``; empty or -1: none), or a list of these."""
    if isinstance(value, tuple):
        return value  # done already
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ()
    if isinstance(value, str):
        parts = (part.strip() for part in composed(value).split(SEPARATOR))
        return tuple(dict.fromkeys(part for part in parts if part not in ("", "-1")))
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return tuple(dict.fromkeys(name for item in value for name in label_cell(item)))
    if isinstance(value, list | dict):
        raise DataError("a label is a list in a list: a name, a number, or a list of these is needed")
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas converts integer columns with gaps to float
    return () if value == -1 else (str(value),)


def labels_of(
    values: Any, where: str, n: int | None = None, class_names: Sequence[str] | None = None
) -> Labels:
    """Labels of ``n`` items (None: any number) from an array or tensor of class numbers [N] or [N, 1] (-1: none) or 0/1 [N, C], or a
    list of cells (:func:`label_cell`). ``class_names``: names of the class numbers."""
    class_names = None if class_names is None else [str(name) for name in class_names]
    with errors_of(where):
        found = (
            values if isinstance(values, Labels) else _labels(without_gradient(values), where, class_names)
        )
    if n not in (None, len(found)):
        raise DataError(f"{where}: {len(found):,} labels, the data has {n:,} items: one each is needed")
    return found


def _labels(values: Any, where: str, class_names: Sequence[str] | None) -> Labels:
    if isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim:
        if values.ndim == 2 and values.shape[1] != 1:
            return Labels.from_multihot(values, class_names)
        numbers = values.reshape(-1) if values.ndim == 2 else values
        if numbers.dtype.kind == "f":  # np.loadtxt and pandas convert labels to float
            whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)
            if not whole.all():
                raise DataError(f"labels at {named_rows(np.flatnonzero(~whole))} are not whole numbers")
            numbers = numbers.astype(np.int64)
        return Labels.from_ids(numbers, class_names)
    try:
        cells = [label_cell(v.tolist() if hasattr(v, "tolist") else v) for v in values]
    except TypeError:
        what = type(values).__name__
        raise UsageError(f"{where}: {what} is not a list of labels: give one per item") from None
    if class_names is not None:
        known = {str(i): name for i, name in enumerate(class_names)}
        unknown = next((text for cell in cells for text in cell if text not in known), None)
        if unknown is not None:
            raise DataError(f"class {unknown} of {len(known)}: labels do not fit their class names")
        cells = [tuple(known[text] for text in cell) for cell in cells]
    return Labels.from_names(cells, class_names)

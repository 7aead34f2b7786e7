"""Labels of a data set as packed multi-hot rows: one form for single-label, multi-label and unlabelled items; and where they come from.

One bit per class (``np.packbits`` order: class 0 is the highest bit of byte 0) keeps the 195,834 x 81 labels of
NUS-WIDE in 2 MB, and "shares at least one label", the relevance of every protocol, is a byte-wise AND.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, UsageError
from ..files import fingerprint

MAX_CLASSES = 65_535
"""Maximum number of classes; more are probably ids given as labels."""

SEPARATOR = "|"
"""Separator of several labels of one item in text."""
_BLOCK = 65_536  # rows unpacked per block
_NAMED = 5  # rows named in an error
_NUMBER = re.compile(r"-?[0-9]{1,18}")

Rows = slice | NDArray[Any]


def composed(text: str) -> str:
    """A name in Unicode's composed form: macOS and others write one name in two forms, which look the same."""
    return unicodedata.normalize("NFC", text)


def row_numbers(rows: Rows, n: int) -> NDArray[np.int64]:
    """``rows`` (a slice, integers or a mask) as numbers in 0 .. n-1. Raises IndexError: out of range."""
    if isinstance(rows, slice):
        return np.arange(*rows.indices(n))
    array = np.asarray(rows)
    if array.dtype == np.bool_:
        return np.flatnonzero(array)
    if array.size and not -n <= array.min() <= array.max() < n:
        raise IndexError(f"rows {array.min()} to {array.max()} of {n}")
    return np.where(array < 0, array + n, array).astype(np.int64)


def class_order(names: Iterable[str]) -> list[str]:
    """Different names in sorted order; numbers, if all are, by size: not 1, 10, 2."""
    every = set(names)
    numbers = all(_NUMBER.fullmatch(name) for name in every)
    return sorted(every, key=lambda name: (int(name), name) if numbers else (0, name))


def named_rows(rows: NDArray[Any] | Sequence[int]) -> str:
    """``"rows 3, 8, 9, 12, 40 and 7 more"``: the first few of ``rows`` and the number of others."""
    first = ", ".join(str(int(row)) for row in rows[:_NAMED])
    more = len(rows) - _NAMED
    return f"row{'s' if len(rows) > 1 else ''} {first}" + (f" and {more:,} more" if more > 0 else "")


def rows_that(rows: NDArray[Any] | Sequence[int], verb: str) -> str:
    """:func:`named_rows` with a matching verb form: ``"row 7 holds"``, ``"rows 3, 8 hold"`` (of ``"hold"``)."""
    of_one = {"are": "is", "have": "has"}.get(verb, f"{verb}s")
    return f"{named_rows(rows)} {verb if len(rows) > 1 else of_one}"


def _names(class_names: Sequence[str] | None, n_classes: int) -> tuple[str, ...]:
    """Class names as a tuple; default: the class numbers."""
    if class_names is None:
        return tuple(str(c) for c in range(n_classes))
    names = tuple(composed(str(name)) for name in class_names)
    if len(names) < n_classes:
        raise DataError(f"labels use {n_classes:,} classes but only {len(names):,} class names are given")
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise DataError(f"class name {twice!r} is given twice: every class needs its own name")
    return names


@dataclass(frozen=True, eq=False)
class Labels:
    """Packed multi-hot labels of N items over C classes: uint8 [N, ceil(C/8)], ``np.packbits`` order (a zero row is unlabelled),
    and C names."""

    packed: NDArray[np.uint8]
    class_names: tuple[str, ...]

    def __post_init__(self) -> None:
        width, packed = (self.n_classes + 7) // 8, self.packed
        if packed.ndim != 2 or packed.dtype != np.uint8 or packed.shape[1] != width:
            what = f"packed labels are {packed.dtype} {list(packed.shape)}"
            raise DataError(f"{what}: {self.n_classes} classes need uint8 [N, {width}]")
        if not 1 <= self.n_classes <= MAX_CLASSES:
            raise DataError(f"labels have {self.n_classes:,} classes: 1 to {MAX_CLASSES:,} are possible")
        padding = (1 << (8 * width - self.n_classes)) - 1
        if (packed[:, -1] & padding).any():
            raise DataError(
                f"packed labels have bits set beyond their {self.n_classes} classes: damaged or foreign"
            )

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
            raise DataError(
                f"{what}: class numbers are from 0 (-1: none), at most {limit:,} classes are possible"
            )
        array = array.astype(np.int64)
        names = _names(class_names, max(1, int(array.max(initial=-1)) + 1))
        packed = np.zeros((len(array), (len(names) + 7) // 8), dtype=np.uint8)
        rows = np.flatnonzero(array >= 0)
        packed[rows, array[rows] >> 3] = (128 >> (array[rows] & 7)).astype(np.uint8)
        return cls(packed, names)

    @classmethod
    def from_multihot(cls, array: NDArray[Any], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from a 0/1 matrix [N, C] of any number type; a zero row is unlabelled. Raises DataError: anything else."""
        array = np.asarray(array)
        if array.ndim != 2 or array.dtype.kind not in "iubf" or array.shape[1] == 0:
            raise DataError(f"multi-hot labels are {array.dtype} {list(array.shape)}: 0/1 [N, C] is needed")
        n_classes = array.shape[1]
        if n_classes > MAX_CLASSES:
            raise DataError(
                f"labels have {n_classes:,} columns: at most {MAX_CLASSES:,} classes are possible"
            )
        names = _names(class_names, n_classes)
        if len(names) != n_classes:
            raise DataError(f"labels have {n_classes} columns but {len(names)} class names are given")
        packed = np.empty((len(array), (n_classes + 7) // 8), dtype=np.uint8)
        for start in range(0, len(array), _BLOCK):
            block = array[start : start + _BLOCK]
            ones = block == 1
            wrong = np.flatnonzero(~(ones | (block == 0)).all(axis=1))
            if wrong.size:
                raise DataError(f"multi-hot labels other than 0 and 1 at {named_rows(wrong + start)}")
            packed[start : start + _BLOCK] = np.packbits(ones, axis=1)
        return cls(packed, names)

    @classmethod
    def from_names(cls, items: Iterable[Sequence[str]], class_names: Sequence[str] | None = None) -> Labels:
        """Labels from the class names of each item (empty: unlabelled); classes in :func:`class_order`. Raises DataError: unknown name."""
        rows = [tuple(map(composed, item)) for item in items]
        class_names = class_names or class_order(name for row in rows for name in row)
        if not class_names:
            raise DataError("no item has a label, so the classes are unknown: label some items")
        names = _names(class_names, 1)
        packed = np.zeros((len(rows), (len(names) + 7) // 8), dtype=np.uint8)
        position = {name: c for c, name in enumerate(names)}
        for i, row in enumerate(rows):
            for name in row:
                if name not in position:
                    raise DataError(f"row {i} has the label {name!r}: none of the {len(position)} classes")
                c = position[name]
                packed[i, c >> 3] |= np.uint8(128 >> (c & 7))
        return cls(packed, names)

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @cached_property
    def per_item(self) -> NDArray[np.int64]:
        """Number of labels of each item, int64 [N]."""
        count: NDArray[np.int64] = np.bitwise_count(self.packed).sum(axis=1, dtype=np.int64)
        return count

    @cached_property
    def multi_label(self) -> bool:
        """Whether any item has more than one label."""
        return bool((self.per_item > 1).any())

    def has(self, rows: Rows | None = None) -> NDArray[np.bool_]:
        """Whether each item (of ``rows``) has any label: bool [n]."""
        packed = self.packed if rows is None else self.packed[rows]
        return np.asarray(packed.any(axis=1), dtype=np.bool_)

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
        if self.multi_label:
            several = np.flatnonzero(self.per_item > 1)
            raise DataError(f"one label per item is needed, but {rows_that(several, 'have')} several")
        out = np.full(len(self), -1, dtype=np.int64)
        for start, block in self._blocks():
            labelled = block.any(axis=1)
            out[start : start + len(block)][labelled] = block[labelled].argmax(axis=1)
        return out

    def over(self, class_names: Sequence[str]) -> Labels:
        """The same labels over ``class_names``, a superset of their names."""
        place = {name: c for c, name in enumerate(class_names)}
        wide = np.zeros((len(self), len(class_names)), np.uint8)
        wide[:, [place[name] for name in self.class_names]] = self.dense(dtype=np.uint8)
        return Labels(np.packbits(wide, axis=1), tuple(class_names))

    def take(self, rows: Rows) -> Labels:
        """The labels of ``rows`` (a slice, positions or a mask), over the same classes."""
        return Labels(np.ascontiguousarray(self.packed[rows]), self.class_names)

    def masked(self, rows: NDArray[Any]) -> Labels:
        """The same N items with labels at ``rows`` only; others become unlabelled."""
        packed = np.zeros_like(self.packed)
        packed[rows] = self.packed[rows]
        return Labels(packed, self.class_names)

    def select_classes(self, classes: NDArray[Any]) -> Labels:
        """The same N items over these classes only (class numbers, in this order); other labels are dropped."""
        names = tuple(self.class_names[int(c)] for c in classes)
        packed = np.zeros((len(self), (len(names) + 7) // 8), dtype=np.uint8)
        for start, block in self._blocks():
            packed[start : start + len(block)] = np.packbits(block[:, classes], axis=1)
        return Labels(packed, names)

    def counts(self) -> NDArray[np.int64]:
        """Items of each class, int64 [C]."""
        total = np.zeros(self.n_classes, dtype=np.int64)
        for _, block in self._blocks():
            total += block.sum(axis=0, dtype=np.int64)
        return total

    def fingerprint(self) -> str:
        """Hash over the labels and the class names."""
        return fingerprint(np.ascontiguousarray(self.packed).tobytes(), *self.class_names)

    def _blocks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for start in range(0, len(self), _BLOCK):
            yield start, np.unpackbits(self.packed[start : start + _BLOCK], axis=1, count=self.n_classes)


# From arrays, and from the cells of tables ------------------------------------------------------------------------------


def label_cell(value: Any) -> tuple[str, ...]:
    """Labels of a cell: empty, a number, a text (``"sky|sea"``; empty or -1: none), or a list of these."""
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return ()
    if isinstance(value, str):
        parts = (part.strip() for part in composed(value).split(SEPARATOR))
        return tuple(dict.fromkeys(part for part in parts if part not in ("", "-1")))
    if isinstance(value, list):
        return tuple(dict.fromkeys(name for item in value for name in label_cell(item)))
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # pandas converts integer columns with gaps to float
    return () if value == -1 else (str(value),)


def labels_from_cells(cells: Sequence[tuple[str, ...]], where: str) -> Labels:
    """Labels from the class names of each item (:func:`label_cell`). Raises DataError: none, too many, or negative numbers."""
    names = class_order(name for cell in cells for name in cell)
    wrong = next((name for name in names[:1] if name.startswith("-") and _NUMBER.fullmatch(name)), None)
    if not names or wrong:
        what = f"label {wrong}: class numbers are from 0, or -1 for none" if wrong else "no item has a label"
        raise DataError(f"{where}: {what}")
    if len(names) > MAX_CLASSES:
        raise DataError(
            f"{where}: {len(names):,} different labels, at most {MAX_CLASSES:,} classes are possible"
        )
    return Labels.from_names(cells, names)


def labels_from_array(array: NDArray[Any], where: str, class_names: Sequence[str] | None = None) -> Labels:
    """Labels from class numbers [N] or [N, 1] with -1 for none, or 0/1 [N, C]."""
    try:
        if array.ndim == 2 and array.shape[1] != 1:
            return Labels.from_multihot(array, class_names)
        numbers = array.reshape(-1) if array.ndim == 2 else array
        if numbers.dtype.kind == "f":  # np.loadtxt and pandas convert labels to float
            whole = np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers) < 2**53)
            if not whole.all():
                raise DataError(f"labels at {named_rows(np.flatnonzero(~whole))} are not whole numbers")
            numbers = numbers.astype(np.int64)
        return Labels.from_ids(numbers, class_names)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error


def labels_of(values: Any, n: int, where: str = "labels") -> Labels:
    """Labels of ``n`` items from an array or tensor of class numbers [N] (-1: none) or 0/1 [N, C], or from a list of names or numbers."""
    values = values.detach().cpu().numpy() if hasattr(values, "detach") else values
    if isinstance(values, Labels):
        found = values
    elif isinstance(values, np.ndarray) and values.dtype.kind in "biuf" and values.ndim:
        found = labels_from_array(values, where)
    else:
        try:
            cells = [label_cell(v.tolist() if hasattr(v, "tolist") else v) for v in values]
        except (TypeError, RecursionError):
            what = type(values).__name__
            raise UsageError(f"{where}: {what} is not a list of labels: give one per item") from None
        found = labels_from_cells(cells, where)
    if len(found) != n:
        raise DataError(f"{where}: {len(found):,} labels, the data has {n:,} items: one each is needed")
    return found

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
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows, to_numpy
from ..errors import DataError, UsageError, errors_of

MAX_CLASSES = 65_535
"""Maximum number of classes; more are probably ids given as labels."""
WHOLE = re.compile(r"-?[0-9]{1,20}(\.0*)?")
_CELL = r"([01](\.0*)?(e[+-]00)?|true|false)"
ROW = re.compile(rf"\[?\s*{_CELL}([\s,;]+{_CELL})+\s*\]?", re.IGNORECASE)
"""0 and 1 of each class, as spreadsheets, numpy and pandas write them."""

MISSING = frozenset(
    [
        *("", "nan", "na", "n/a", "#n/a", "null", "none", "nat", "<na>", "?", "-", "--", "\\n"),
        *("unknown", "missing", "undefined", "unlabeled", "unlabelled"),
    ]
)
"""Texts, in lower case, that mean "no label" where all other labels are numbers."""

YES, NO = ["1", "1.0", "True", "true"], ["0", "0.0", "False", "false"]
Rows = slice | NDArray[Any]


def composed(text: str) -> str:
    """Return a name in Unicode's composed form: macOS and others write one name in two forms."""
    return unicodedata.normalize("NFC", text)


def plain_text(value: Any) -> str:
    """Return the text of a value, empty for None and NaN; bytes are UTF-8, others are escaped."""
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    is_missing = text in ("None", "nan", "NaT", "<NA>") and not isinstance(value, str | bytes)
    return "" if is_missing else text


def _names(class_names: Iterable[object]) -> tuple[str, ...]:
    """Return class names as a tuple. Raises DataError: too many, or a name that cannot be used."""
    names = tuple(composed(str(name)) for name in class_names)
    wrong = [name for name, n in Counter(names).items() if n > 1 or not name.isprintable()]
    if wrong:
        raise DataError(f"the class {wrong[0][:60]!a} is named twice, or not printable: rename it")
    if len(names) > MAX_CLASSES:
        raise DataError(f"{len(names):,} classes, at most {MAX_CLASSES:,} are possible")
    return names


@dataclass(frozen=True, eq=False)
class Labels:
    """Packed multi-hot labels of N items over C classes: uint8 [N, ceil(C/8)], ``np.packbits``
    order (a zero row is unlabelled), and C names."""

    packed: NDArray[np.uint8]
    class_names: tuple[str, ...]

    @classmethod
    def _of_pairs(cls, n: int, rows: Any, classes: Any, names: tuple[str, ...]) -> Labels:
        """Return the labels of ``n`` items that have class ``classes[i]`` at ``rows[i]``; there is
        no label where one of the two is -1."""
        rows, classes = np.stack([rows, classes])[:, (rows >= 0) & (classes >= 0)]
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
            DataError: not whole numbers, below -1, or at or beyond C; the rows are named.

        Examples:
            >>> Labels.from_ids([0, 2, -1], ["cat", "dog", "fox"]).dense().tolist()
            [[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
        """
        array = np.nan_to_num(ids, nan=-1).reshape(-1)  # np.loadtxt and pandas convert to float
        limit = len(class_names or range(MAX_CLASSES))
        wrong = np.flatnonzero(
            (array < -1)
            | (array >= np.float64(limit))  # float16 ends below the limit
            | (array != np.floor(array))
        )
        if wrong.size:
            raise DataError(
                f"label {array[wrong[0]]} at {named_rows(wrong)} is out of range"
                f": class numbers are whole, from 0 (-1: none), at most {limit:,} classes"
            )
        names = _names(class_names or range(int(array.max(initial=0)) + 1))
        return cls._of_pairs(len(array), np.arange(len(array)), array.astype(np.int64), names)

    @classmethod
    def from_multihot(cls, array: NDArray[Any], class_names: Sequence[str] | None = None) -> Labels:
        """Return labels of a 0/1 matrix [N, C] of any number type; a zero row is unlabelled. Raises
        DataError: anything else.
        """
        names = _names(class_names or range(array.shape[-1]))
        if array.dtype.kind not in "iubf" or array.shape[1:] != (len(names),) or not names:
            raise DataError(
                f"multi-hot labels are {array.dtype} {list(array.shape)}: 0/1 of {len(names)} "
                "classes for each item, [N, C], are needed"
            )
        wrong = np.flatnonzero(((array != 0) & (array != 1)).any(axis=1))
        if wrong.size:
            raise DataError(f"multi-hot labels other than 0 and 1 at {named_rows(wrong)}")
        return cls(np.packbits(array == 1, axis=1), names)

    @classmethod
    def from_names(cls, items: Sequence[Sequence[str]]) -> Labels:
        """Return labels of the texts of each item, none, one or several: 0/1 of each class, class
        numbers, or names, sorted. Empty texts, -1 and, among numbers, :data:`MISSING` are none.

        Raises DataError: negative numbers, -1 beside other labels of an item, too many classes, or
        rows of numbers that look like 0 and 1 of each class, but are not.
        """
        texts = {text for row in items for text in row if text.lower() not in MISSING}
        is_numbers = all(map(WHOLE.fullmatch, texts))
        if is_numbers:
            # An integer column with gaps becomes float in pandas.
            items = [[text.partition(".")[0] for text in row if text in texts] for row in items]
        if any("-1" in row and {*row} != {"-1"} for row in items):
            raise DataError("-1 stands beside other labels of an item, but it means none")
        items = [[text for text in row if text not in ("", "-1")] for row in items]
        texts = {text for row in items for text in row}
        widths = {len(row) for row in items if row}
        are_bits = texts <= {*YES, *NO} and max(widths, default=0) > 1
        if are_bits and len(widths) == 1:
            return cls.from_multihot(np.isin([row or ["0"] * max(widths) for row in items], YES))
        if (are_bits or (is_numbers and len(widths) == 1)) and any(
            len({*row}) < len(row) for row in items
        ):
            raise DataError(
                "an item has a number twice: class numbers, or 0 and 1 of each class for every "
                "item, are needed"
            )
        names = sorted(texts, key=lambda name: (int(name) if is_numbers else 0, name))
        if is_numbers and names and names[0].startswith("-"):
            raise DataError(f"label {names[0]}: class numbers are from 0, or -1 for none")
        positions = {name: c for c, name in enumerate(_names(names))}
        pairs = [(i, positions[name]) for i, row in enumerate(items) for name in row]
        rows, classes = np.array(pairs, np.int64).reshape(-1, 2).T
        return cls._of_pairs(len(items), rows, classes, tuple(positions))

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def n_classes(self) -> int:
        """C."""
        return len(self.class_names)

    @cached_property
    def _pairs(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row and class of every label, in the order of the rows."""
        rows, columns = np.nonzero(self.packed != 0)  # faster than of bytes
        index, bits = np.nonzero(np.unpackbits(self.packed[rows, columns, None], axis=1))
        return rows[index], 8 * columns[index] + bits

    @property
    def multi_label(self) -> bool:
        """Whether any item has more than one label."""
        return bool((np.diff(self._pairs[0]) == 0).any())

    def has(self, rows: Rows = slice(None)) -> NDArray[np.bool_]:
        """Return whether each item of ``rows`` (default: all) has any label: bool [n]."""
        return np.asarray(self.packed[rows].any(axis=1), dtype=np.bool_)

    def dense(
        self,
        rows: Rows = slice(None),
        dtype: type[np.number[Any]] | type[bool] = np.float32,
    ) -> NDArray[Any]:
        """Return the multi-hot matrix [n, C] of 0 and 1 in ``dtype``."""
        return np.unpackbits(self.packed[rows], axis=1, count=self.n_classes).astype(dtype)

    def rows_with(self, c: int) -> NDArray[np.int64]:
        """Return the rows of the items of class ``c``: int64 [n], ascending."""
        return np.flatnonzero(self.packed[:, c >> 3] & np.uint8(128 >> (c & 7)))

    def over(self, class_names: Iterable[str]) -> Labels:
        """Return the same N items over these classes, in this order; labels of other classes are
        dropped.
        """
        positions = {name: c for c, name in enumerate(class_names)}
        numbers = np.array([positions.get(name, -1) for name in self.class_names], np.int64)
        rows, classes = self._pairs
        return self._of_pairs(len(self), rows, numbers[classes], tuple(positions))

    def take(self, rows: Rows) -> Labels:
        """Return the labels of ``rows`` (a slice, positions or a mask), over the same classes."""
        return Labels(np.ascontiguousarray(self.packed[rows]), self.class_names)

    def of_items(self, items: NDArray[np.int64], n: int) -> Labels:
        """Return the labels of ``n`` items, over the classes that occur: those at i belong to item
        ``items[i]``, -1 for none; an item may have those of several rows.
        """
        rows, classes = self._pairs
        labels = self._of_pairs(n, items[rows], classes, self.class_names)
        return labels.over(np.array(self.class_names, object)[labels.counts() > 0])

    def masked(self, rows: NDArray[Any]) -> Labels:
        """Return the same N items with labels at ``rows`` only; others become unlabelled."""
        packed = np.zeros_like(self.packed)
        packed[rows] = self.packed[rows]
        return Labels(packed, self.class_names)

    def counts(self) -> NDArray[np.int64]:
        """Return the number of items of each class, int64 [C]."""
        return np.bincount(self._pairs[1], minlength=self.n_classes)


# From values in any form --------------------------------------------------------------------------


def labels_of(values: Any, source: str) -> Labels:
    """Return the labels of items from values in any form, in their order.

    Args:
        values: :class:`Labels`; class numbers [N] (-1 or NaN: none), or 0/1 or -1/1 [N, C], as an
            array or a tensor; or a sequence of one value per item: a name, a number, a list, set or
            tuple of these, or None. Rows of 0 and 1, all of one length, are 0/1 of each class.
            Texts are split at ``|``; lists in text (``"['cat', 'dog']"``, ``"0 1 0"``) are lists.
        source: name of the values in errors.

    Raises:
        DataError: values of another form.
        UsageError: not a sequence.
    """
    values = values.to_pylist() if hasattr(values, "to_pylist") else to_numpy(values)
    if isinstance(values, Labels):
        return values
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise UsageError(f"{type(values).__name__} is not a list of labels: give one per item")
    with errors_of(source):
        if (
            isinstance(values, np.ndarray)
            and values.dtype.kind in "biuf"
            and not (
                values >= np.float64(MAX_CLASSES)
            ).any()  # larger numbers are names, as in lists
        ):
            if values.ndim < 2 or 1 in values.shape:
                # Over the classes that occur.
                return Labels.from_ids(values.reshape(-1)).of_items(
                    np.arange(values.size), values.size
                )
            return Labels.from_multihot(
                np.where(
                    np.isnan(values).all(axis=1, keepdims=True)
                    | ((values == -1) & (values != 0).all()),  # of -1 and 1 alone
                    0,
                    values,
                )
            )
        numbers: dict[tuple[str, ...], int] = {}
        items = values.tolist() if hasattr(values, "tolist") else values
        rows = np.array([numbers.setdefault(_texts(item), len(numbers)) for item in items], int)
        return Labels.from_names(list(numbers)).take(rows)


def named(value: Any, class_names: Sequence[str]) -> Any:
    """Return the name of a class number, or the names of a list of them; None is unlabelled."""
    if np.ndim(value):
        return [named(number, class_names) for number in value]
    return None if value is None or not value >= 0 else class_names[int(value)]


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a label: none, one, or those of the items of a list, a set or a text.

    Raises DataError: a dict, a list in a list, or another object.
    """
    value = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(value, Iterable) and not isinstance(
        value, str | bytes | bytearray | Mapping
    )
    items = [x.tolist() if hasattr(x, "tolist") else x for x in (value if is_list else [value])]
    for item in items:
        if not isinstance(item, Hashable) or isinstance(item, tuple | frozenset):
            raise DataError(
                f"a label is a {type(item).__name__}: names or numbers are needed, or a table with "
                "a row for each item"
            )
    items = sorted(items, key=str) if isinstance(value, Set) else items
    return tuple([text for item in items for text in _texts_of(item)])


@lru_cache(maxsize=1 << 16, typed=True)  # values occur many times
def _texts_of(value: Any) -> tuple[str, ...]:
    """Return the texts of a value that is not a list. Raises DataError: a fraction."""
    text = composed(plain_text(int(value) if isinstance(value, bool) else value)).strip()
    if ROW.fullmatch(text):
        return tuple(str(int(cell[0][0] in "1tT")) for cell in re.finditer(_CELL, text, re.I))
    # Such as 1.0 and 0.5.
    if re.fullmatch(r"-?\d*\.\d+(e[+-]?\d+)?", text, re.I) or (text and isinstance(value, float)):
        if float(text) % 1 != 0:
            raise DataError(f"label {text}: class numbers are whole")
        return (str(int(float(text))),)
    # Also "[np.int64(3)]" and "tensor(3)".
    text = re.sub(
        r"^(?:frozen)?set\((.*)\)$|^\{\}$|\b(?:np\.\w+|array|tensor)\(([^()]*)\)",
        r"\1\2",
        text,
    )
    if text[:1] in ("[", "{", "(") or text[:2] in ("b'", 'b"'):
        with contextlib.suppress(ValueError, SyntaxError):  # arrays in text have no commas
            return _texts(ast.literal_eval(re.sub(r"(?<=['\"])\s+(?=['\"])", ", ", text)))
    if re.fullmatch(r"[\[{][^]\[{}]*[\]}]|-?\d+([\s,;]+-?\d+)+", text):
        text = re.sub(r"[,;]|(?<=[\d.])\s+(?=[-\d])", "|", text.strip("[]{}")).replace('"', "")
    return tuple(word.strip() for word in text.split("|"))


def label_notes(labels: Labels, source: tuple[str, str]) -> list[str]:
    """Return lines of the log on labels: their number, the sizes of the classes, and what looks
    like a mistake. ``source`` says where they are from, and how they belong to the items.
    """
    counts = labels.counts()
    largest = np.argsort(-counts, kind="stable")
    sizes = [
        *(f"{labels.class_names[c]} {counts[c]:,}" for c in largest[:10]),
        *[f"... ({len(counts) - 10:,} more)"] * (len(counts) > 10),
    ]
    doubtful = ", ".join(
        repr(name)
        for name in labels.class_names
        if name.lower() in {*MISSING, "train", "training", "test", "testing", "val", "validation"}
    )
    single = int((counts == 1).sum())
    alone = labels.take(slice(0, 1)).counts() * (counts == 1)
    doubts = [
        (
            counts[largest[0]] == len(labels) > 1,
            f"every item has {labels.class_names[largest[0]]!r}: no result can be wrong",
        ),
        (
            doubtful,
            f"{doubtful} count as classes: if they mean none, leave such labels empty, or move "
            "such folders away",
        ),
        (
            single == 1 and alone.any(),
            f"the first item alone has {labels.class_names[int(alone.argmax())]!r}"
            ": is it a header?",
        ),
        (
            len(counts) == 1 and not labels.has().all(),
            f"{labels.class_names[0]!r} is the only class; -1 and empty labels mean none",
        ),
        (
            single > 2 and 2 * single > len(counts),
            f"{single:,} of {len(counts):,} classes have one item: are they ids or captions?",
        ),
    ]
    return [
        f"{source[0]}: {int(labels.has().sum()):,} of {len(labels):,} items labelled, "
        f"{labels.n_classes:,} classes, {source[1]}",
        f"items of each class: {', '.join(sizes)}",
        *(text for is_likely, text in doubts if is_likely),
    ]

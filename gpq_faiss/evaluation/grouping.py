"""Equal rows as one: distinct codes, distinct label sets, and the number of items with both."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from .ties import Ints

Bytes = NDArray[np.uint8]


@runtime_checkable
class PackedLabels(Protocol):
    """Anything with packed multi-hot rows, such as :class:`gpq_faiss.data.labels.Labels`."""

    @property
    def packed(self) -> Bytes:
        """uint8 [N, ceil(C / 8)] in the order of ``np.packbits``; a zero row is unlabelled."""


LabelsLike = PackedLabels | NDArray[Any]


def distinct_rows(rows: Bytes) -> tuple[Bytes, Ints]:
    """The distinct rows of uint8 [N, W] in ascending order, and the index of each row among them.

    Compares eight bytes as one integer: an order of magnitude faster than ``np.unique(axis=0)``.
    """
    n, width = rows.shape
    inverse = np.zeros(n, dtype=np.int64)
    groups = min(n, 1)
    for start in range(0, width if n else 0, 8):
        piece = np.zeros((n, 8), dtype=np.uint8)
        piece[:, : min(8, width - start)] = rows[:, start : start + 8]
        words = piece.view(">u8").ravel().astype(np.uint64)
        values, part = np.unique(words, return_inverse=True)
        # a pair (group so far, word) is below n^2, so it fits 63 bits for any n that fits in memory
        pairs, inverse = (
            (values, part) if groups == 1 else np.unique(inverse * len(values) + part, return_inverse=True)
        )
        groups = len(pairs)
    first = np.full(groups, n, dtype=np.int64)
    np.minimum.at(first, inverse, np.arange(n))
    return rows[first], inverse.astype(np.int64)


def label_rows(labels: LabelsLike, what: str, length: int) -> Bytes:
    """Labels in any form as packed rows [N, W]; items with a common bit are relevant; zero rows are unlabelled.

    Args:
        labels: packed multi-hot (an object with ``packed``, or uint8 [N, W]), bool multi-hot [N, C], or class
            numbers [N] with -1 for unlabelled.
        what: name of the labels in errors.
        length: required number of rows.

    Raises:
        DataError: another shape or type, or a negative class number other than -1.
    """
    array = np.asarray(labels.packed if isinstance(labels, PackedLabels) else labels)
    if array.ndim not in (1, 2) or array.shape[0] != length:
        raise DataError(f"{what}: shape {array.shape} does not fit {length:,} items: give one row per item")
    if array.ndim == 2:
        if array.dtype == bool:
            return np.packbits(array, axis=1)
        if array.dtype != np.uint8:
            raise DataError(
                f"{what}: 2-D labels must be bool (multi-hot) or uint8 (packed), not {array.dtype}"
            )
        return np.ascontiguousarray(array)
    if array.dtype.kind not in "iu":
        raise DataError(f"{what}: 1-D labels must be class numbers, not {array.dtype}")
    if length and array.min() < -1:
        raise DataError(f"{what}: class {array.min()} is negative: only -1 (unlabelled) is allowed")
    classes = array.astype(np.int64)
    width = int(classes.max(initial=0)) // 8 + 1
    if length * width > 1 << 32:
        raise DataError(
            f"{classes.max() + 1:,} classes are too many to pack: renumber them from 0 without gaps"
        )
    rows = np.zeros((length, width), dtype=np.uint8)
    known = np.flatnonzero(classes >= 0)
    rows[known, classes[known] // 8] = 128 >> (classes[known] % 8)
    return rows


def same_width(a: Bytes, b: Bytes) -> tuple[Bytes, Bytes]:
    """Zero-pad the narrower packed rows."""
    width = max(a.shape[1], b.shape[1])
    return tuple(np.pad(x, ((0, 0), (0, width - x.shape[1]))) if x.shape[1] < width else x for x in (a, b))  # type: ignore[return-value]


class Relevance:
    """Number of relevant items per code, for any label set of a query.

    Items are counted by (label set, code) in a sparse matrix. Entries of all sets that share a label with the query are
    summed: with single labels a contiguous run of entries in the order of sets, otherwise all entries in the order of
    codes.
    """

    def __init__(self, labels: Bytes, code_of: Ints, n_codes: int) -> None:
        """Count the items of a database: ``labels`` [N, W] packed rows, ``code_of`` [N] the code of each."""
        sets, set_of = distinct_rows(labels)
        pairs, counts = np.unique(set_of * max(n_codes, 1) + code_of, return_counts=True)
        owner, self._codes = np.divmod(pairs, max(n_codes, 1))
        self._sets = _words(sets)
        self._starts = np.searchsorted(owner, np.arange(len(sets) + 1))
        self._counts = counts.astype(np.int64)
        by_code = np.argsort(self._codes, kind="stable")
        self._code_starts = np.searchsorted(self._codes[by_code], np.arange(n_codes + 1))
        self._code_sets, self._code_counts = owner[by_code], self._counts[by_code]

    def hits(self, query: Bytes) -> Ints:
        """[U] items of each code that share a label with ``query`` (packed [W])."""
        meets = np.zeros(self._sets.shape[1], dtype=bool)
        for words, word in zip(self._sets, _words(query[None])[:, 0], strict=True):
            meets |= (words & word) != 0
        some = np.flatnonzero(meets)
        n_codes = len(self._code_starts) - 1
        result = np.zeros(n_codes, dtype=np.int64)
        if len(some) == 1:
            entries = slice(self._starts[some[0]], self._starts[some[0] + 1])
            result[self._codes[entries]] = self._counts[entries]  # at most one entry per code and set
        elif len(some):
            found: Ints = self._code_counts * meets.take(self._code_sets)
            if len(found) == n_codes:  # one entry for every code, as every code has an item
                return found
            np.add.reduceat(found, self._code_starts[:-1], out=result)
        return result


def _words(rows: Bytes) -> NDArray[np.uint64]:
    """Rows of bytes [N, W] as columns of 64-bit words [ceil(W / 8), N]."""
    n, width = rows.shape
    padded = np.zeros((n, -(-width // 8) * 8), dtype=np.uint8)
    padded[:, :width] = rows
    return np.ascontiguousarray(padded.view(np.uint64).T)

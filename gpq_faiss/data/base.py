"""Interface of all data sources: items with ids and optional labels, read in blocks by row."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..store import Texts
from .labels import Labels, Rows, rows_that


class BadItems:
    """Counts unreadable images among ``total``, each once, and raises if more than the fraction ``limit`` are bad. Thread-safe."""

    def __init__(self, total: int, limit: float = 0.01) -> None:
        self.total, self.limit = total, limit
        self.first: list[str] = []
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Number of bad images so far."""
        return len(self._seen)

    @property
    def positions(self) -> list[int]:
        """Their rows, sorted."""
        return sorted(self._seen)

    def add(self, position: int, name: str, why: str) -> None:
        """Record a bad image. Raises DataError: more than ``limit`` of the images are bad; names the first few."""
        with self._lock:
            if position in self._seen:
                return
            self._seen.add(position)
            if len(self.first) < 5:
                self.first.append(f"{name}: {why}")
            over = len(self._seen) > self.limit * self.total
        if over and self.total == 1:
            raise DataError(f"{name}: {why}")
        if over:
            what = f"above the limit of {100 * self.limit:g} %: repair them, or raise --read max_bad"
            raise DataError(f"{self.summary()}; that is {what}")

    def summary(self) -> str:
        """``"3 of 1,000 images cannot be read (a.jpg: not found; ...)"``; empty when none is bad."""
        if not self._seen:
            return ""
        more = "; ..." if len(self._seen) > len(self.first) else ""
        return f"{self.count:,} of {self.total:,} images cannot be read ({'; '.join(self.first)}{more})"


@dataclass
class About:
    """What is known of items besides their contents, as the attributes of a data set."""

    labels: Labels | None = None
    ids: NDArray[np.int64] | None = None
    texts: dict[str, Texts] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Dataset(ABC):
    """N items of a source.

    Attributes:
        name: as given by the user, for messages and reports.
        ids: int64 [N], returned by searches.
        fingerprint: hash over content (of large files, over samples of it), labels and ids.
        labels: None if the source has none.
        notes: remarks on loading, for the user.
        kind: ``images`` or ``features``.
        texts: text columns, StringDType [N]; ``name`` is the path or key of an item.
    """

    name: str
    ids: NDArray[np.int64] = field(repr=False)
    fingerprint: str
    labels: Labels | None = field(default=None, repr=False)
    notes: list[str] = field(default_factory=list)
    kind: Literal["images", "features"]
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise DataError(f"{self.name}: ids are {self.ids.dtype} {list(self.ids.shape)}, not int64 [N]")
        for what, column in (("labels", self.labels), *self.texts.items()):
            if column is not None and len(column) != len(self.ids):
                raise DataError(f"{self.name} has {len(self.ids):,} items but {len(column):,} {what}")

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """The items at ``rows`` (a slice or an array of row numbers), in that order."""

    def texts_of_ids(self) -> dict[str, Callable[[NDArray[np.int64]], Texts]]:
        """Column name -> function from ids [n] to texts; of repeated ids the first item counts."""
        order = np.argsort(self.ids, kind="stable")
        known = self.ids[order]

        def taker(column: Texts) -> Callable[[NDArray[np.int64]], Texts]:
            return lambda ids: column[order[np.searchsorted(known, ids)]]

        return {name: taker(column) for name, column in self.texts.items()}

    def require_labels(self) -> Labels:
        """The labels."""
        if self.labels is None or not self.labels.has().any():
            raise DataError(f"{self.name}: no item has a label: give labels with --labels FILE")
        return self.labels

    def spans(self, size: int, start: int = 0) -> Iterator[slice]:
        """Consecutive slices of at most ``size`` items from ``start`` to the end."""
        for first in range(start, len(self), size):
            yield slice(first, min(first + size, len(self)))


@dataclass(kw_only=True)
class FeatureDataset(Dataset):
    """Feature vectors of ``width`` numbers; sub-classes implement :meth:`_read`."""

    width: int
    kind: Literal["images", "features"] = "features"

    @abstractmethod
    def _read(self, rows: Rows) -> NDArray[np.float32]:
        """float32 [n, width], unchecked."""

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """float32 [n, width], C-contiguous, every row finite and not all zero."""
        x = np.ascontiguousarray(self._read(rows), dtype=np.float32)
        # The sum of squares is 0 for a zero row and not finite for NaN and infinity; float64 avoids overflow and
        # underflow.
        square = np.einsum("nd,nd->n", x, x, dtype=np.float64)
        infinite = ~np.isfinite(square)
        for mask, verb, why in (
            (infinite, "hold", "NaN or infinity"),
            (square == 0.0, "are", "all zero (no direction)"),
        ):
            if mask.any():
                rows_ = rows_that(np.arange(len(self))[rows][mask], verb)
                raise DataError(f"{self.name}: {rows_} {why}: repair such rows or leave them out")
        return x


@dataclass(kw_only=True)
class ImageDataset(Dataset):
    """Images as uint8 RGB arrays.

    Attributes:
        mirrors: whether mirrored images keep their meaning (not for digits).
        native_size: side in pixels if all images are squares of one size (32 for CIFAR-10), else None.
        bad: counter of unreadable images, with its limit.
    """

    native_size: int | None = None
    mirrors: bool = True
    bad: BadItems = field(default_factory=lambda: BadItems(0))
    kind: Literal["images", "features"] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad.total == 0:
            self.bad = BadItems(len(self), self.bad.limit)

    @abstractmethod
    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None for broken or missing ones, which :attr:`bad` counts."""

    def image_path(self, i: int) -> str | None:
        """File path of image ``i``, if it is a file."""
        del i
        return None

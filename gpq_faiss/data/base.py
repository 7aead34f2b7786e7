"""What every data source gives: items with ids and perhaps labels, read by position, a block at a time."""

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
    """Counts items that cannot be read and gives up beyond a limit.

    An item counts once however often it is read (an epoch reads it again). Safe to call from several threads.

    Args:
        total: N, the number of items that the limit is a fraction of.
        limit: fraction of bad items allowed (0.01 = 1 %); one more raises.
        what: plural noun for the messages.
    """

    def __init__(self, total: int, limit: float = 0.01, what: str = "images") -> None:
        self.total = total
        self.limit = limit
        self.what = what
        self.first: list[str] = []
        self._seen: set[int] = set()
        self._lock = threading.Lock()

    @property
    def count(self) -> int:
        """Bad items met so far."""
        return len(self._seen)

    @property
    def positions(self) -> list[int]:
        """Their positions, sorted."""
        return sorted(self._seen)

    def add(self, position: int, name: str, why: str) -> None:
        """Note a bad item.

        Raises:
            DataError: more than ``limit`` of the items are bad now; names the first few.
        """
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
            raise DataError(
                f"{self.summary()}; that is above the limit of {100 * self.limit:g} %: "
                "repair them, or raise --max-unreadable"
            )

    def summary(self) -> str:
        """``"3 of 1,000 images cannot be read (a.jpg: not found; ...)"``; empty when none is bad."""
        if not self._seen:
            return ""
        more = "; ..." if len(self._seen) > len(self.first) else ""
        return f"{self.count:,} of {self.total:,} {self.what} cannot be read ({'; '.join(self.first)}{more})"


@dataclass(kw_only=True)
class Dataset(ABC):
    """N items of a source.

    Attributes:
        name: as given by the user, for messages and reports.
        ids: int64 [N], what a search returns for each item.
        fingerprint: hash over the content (or what stands for it: paths, sizes), the labels and the ids.
        labels: None where the source has none at all.
        notes: what happened while loading, for people ("3 of 1,000 images missing, left out").
        official: uint8 [N], 0 train and 1 test, where the source comes with such a split.
        kind: ``images`` or ``features``.
        texts: by name, texts StringDType [N] of the items; ``name`` is the path or key of an item.
    """

    name: str
    ids: NDArray[np.int64]
    fingerprint: str
    labels: Labels | None = None
    notes: list[str] = field(default_factory=list)
    official: NDArray[np.uint8] | None = None
    kind: Literal["images", "features"]
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.int64:
            raise DataError(f"{self.name}: ids are {self.ids.dtype} {list(self.ids.shape)}, not int64 [N]")
        for what, column in (
            ("labels", self.labels),
            ("train/test marks", self.official),
            *self.texts.items(),
        ):
            if column is not None and len(column) != len(self.ids):
                raise DataError(f"{self.name} has {len(self.ids):,} items but {len(column):,} {what}")

    def __len__(self) -> int:
        return len(self.ids)

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """The items at ``rows`` (a slice, or an array of positions), in that order."""

    def texts_of_ids(self) -> dict[str, Callable[[NDArray[np.int64]], Texts]]:
        """By name, what gives the texts of ids [n]; where an id occurs more than once, of the first such item."""
        if not self.texts:
            return {}
        order = np.argsort(self.ids, kind="stable")
        known = self.ids[order]

        def taker(column: Texts) -> Callable[[NDArray[np.int64]], Texts]:
            return lambda ids: column[order[np.searchsorted(known, ids)]]

        return {name: taker(column) for name, column in self.texts.items()}

    def require_labels(self) -> Labels:
        """The labels.

        Raises:
            DataError: the source has none.
        """
        if self.labels is None or not self.labels.has().any():
            raise DataError(f"{self.name}: no item has a label: give labels with --labels FILE")
        return self.labels

    def spans(self, size: int, start: int = 0) -> Iterator[slice]:
        """Consecutive slices of at most ``size`` items from ``start`` to the end."""
        for first in range(start, len(self), size):
            yield slice(first, min(first + size, len(self)))


@dataclass(kw_only=True)
class FeatureDataset(Dataset):
    """Ready-made vectors of ``width`` numbers; sub-classes implement :meth:`_read`."""

    width: int
    kind: Literal["images", "features"] = "features"

    @abstractmethod
    def _read(self, rows: Rows) -> NDArray[np.float32]:
        """float32 [n, width], unchecked."""

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """float32 [n, width], C-contiguous, every row finite and not all zero.

        Raises:
            DataError: names the rows that hold NaN or infinity, or are all zero (no direction, so no code);
                or the file is damaged.
        """
        x = np.ascontiguousarray(self._read(rows), dtype=np.float32)
        # One pass finds both: the sum of squares is 0 for a zero row and not finite for NaN and infinity;
        # float64, so that neither large finite values overflow nor small ones vanish.
        square = np.einsum("nd,nd->n", x, x, dtype=np.float64)
        bad = np.flatnonzero(~np.isfinite(square) | (square == 0.0))
        if bad.size:
            positions = np.arange(len(self))[rows][bad]
            infinite = ~np.isfinite(square[bad])
            for mask, verb, why in (
                (infinite, "hold", "NaN or infinity"),
                (~infinite, "are", "all zero (no direction)"),
            ):
                if mask.any():
                    raise DataError(
                        f"{self.name}: {rows_that(positions[mask], verb)} {why}: repair such rows or leave them out"
                    )
        return x


@dataclass(kw_only=True)
class ImageDataset(Dataset):
    """Images as uint8 RGB arrays.

    Attributes:
        mirrors: whether a mirrored image still means the same (not so for digits).
        native_size: the side in pixels where all images are squares of one size (32 for CIFAR-10), else None.
        bad: count of the images that could not be read, with its limit.
    """

    native_size: int | None = None
    mirrors: bool = True
    bad: BadItems = field(default_factory=lambda: BadItems(0))
    kind: Literal["images", "features"] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bad.total == 0:
            self.bad = BadItems(len(self), self.bad.limit, self.bad.what)

    @abstractmethod
    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Images [H, W, 3]; None for one that is broken or missing, which :attr:`bad` has then counted.

        Raises:
            DataError: too many are bad.
        """

    def image_path(self, i: int) -> str | None:
        """Where image ``i`` lies as a file, if it does."""
        del i
        return None

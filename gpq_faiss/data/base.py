"""Data sets: items with ids, optional labels, names and other texts, read by rows or in batches."""

from __future__ import annotations

import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..codes.checks import named_rows
from ..errors import DataError, one_line, shown
from ..files import content_of, fingerprint
from ..progress import stage
from ..store.hdf5 import Texts, as_texts
from .images import resize_square, to_pixels
from .labels import Labels, Rows
from .tables import Matrix


@dataclass(kw_only=True)
class Dataset(ABC):
    """N items of a source.

    Attributes:
        name: as given by the user, for messages and reports.
        fingerprint: hash over content (of large files, over samples of it), labels, ids and texts.
        kind: ``images`` or ``features``.
        ids: int64 [N], returned by searches; default: the row numbers.
        labels: None if no item has one.
        texts: text columns, StringDType [N]; ``name`` is the path or key of an item,
            ``file_hash`` a hash of its file.
        label_source: where the labels are from, and how they belong to the items, for the log.
        notes: lines of the log on what was understood.
        table: the :class:`.tables.Table` that the items are rows of, while the data set is opened.
        max_bad: fraction of unreadable images that is no error.
        bad: row of an unreadable image -> its name, and why. Thread-safe.
    """

    name: str
    fingerprint: str
    kind: Literal["images", "features"]
    ids: NDArray[np.int64] = field(default=None, repr=False)  # type: ignore[arg-type]  # never None
    labels: Labels | None = field(default=None, repr=False)
    texts: dict[str, Texts] = field(default_factory=dict, repr=False)
    label_source: tuple[str, str] = ("labels", "in the order of the items")
    notes: list[str] = field(default_factory=list)
    table: Any = field(default=None, repr=False)
    max_bad: float = 0.01
    bad: dict[int, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.ids = np.arange(len(self), dtype=np.int64) if self.ids is None else self.ids
        for subject, column in (("ids", self.ids), ("labels", self.labels), *self.texts.items()):
            if column is not None and len(column) != len(self):
                raise DataError(
                    f"{len(column):,} {subject}, {self.name} has {len(self):,} items: one for each "
                    "is needed, in order (without a header line) or by id or name"
                )

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def read(self, rows: Rows) -> Any:
        """Return the items at ``rows`` (a slice or an array of row numbers), in that order."""

    @property
    def has_ids(self) -> bool:
        """Whether the ids are others than the row numbers."""
        return bool((self.ids != np.arange(len(self))).any())

    def require_labels(self) -> Labels:
        """Return the labels. Raises DataError: no item has one."""
        if self.labels is None or not self.labels.has().any():
            raise DataError(
                f"{self.name}: no item has a label: give labels with --labels FILE (this file, if "
                "its table has a column of 0 and 1 for each class), or their column with --read "
                "label_column=NAME"
            )
        return self.labels

    def add_bad(self, i: int, name: str, reason: str) -> None:
        """Record a bad image, once. Raises DataError: there are more than :attr:`max_bad`
        allows.
        """
        self.bad.setdefault(i, f"{name}: {reason}")
        if len(self.bad) > self.max_bad * len(self):
            raise DataError(
                f"{self.bad_summary()}; above the limit of {100 * self.max_bad:g} %: repair them"
                + ", or raise --read max_bad" * (self.max_bad > 0)
            )

    def bad_summary(self) -> str:
        """Return ``"9 of 1,000 images cannot be read (a.jpg: not found; ...)"``, with five names at
        most."""
        return (
            f"{len(self.bad):,} of {len(self):,} images cannot be read "
            f"({'; '.join(list(self.bad.values())[:5])})"
        )


@dataclass(kw_only=True)
class FeatureDataset(Dataset):
    """Feature vectors of ``width`` numbers, streamed where it can be.

    Raises DataError: not a non-empty matrix of numbers.
    """

    matrix: Matrix = field(repr=False)
    kind: Literal["images", "features"] = "features"

    def __post_init__(self) -> None:
        if (
            len(self.matrix.shape) != 2
            or 0 in self.matrix.shape
            or self.matrix.dtype.kind not in "fiu"
        ):
            raise DataError(
                f"{self.name} is {self.matrix.dtype} {list(self.matrix.shape)}"
                f": numbers [N, width] are needed, one row per item"
            )
        super().__post_init__()

    def __len__(self) -> int:
        return self.matrix.shape[0]

    def read(self, rows: Rows) -> NDArray[np.float32]:
        """Return float32 [n, width], C-contiguous. Raises DataError: NaN, infinity or a zero
        row.
        """
        with np.errstate(over="ignore"):  # float64 beyond the range of float32 becomes infinity
            x = np.ascontiguousarray(self.matrix[rows], dtype=np.float32)
        # 0 for a zero row, not finite for NaN and infinity; float64 avoids overflow and underflow.
        square = np.einsum("nd,nd->n", x, x, dtype=np.float64)
        wrong = np.flatnonzero(~np.isfinite(square) | (square == 0.0))
        if len(wrong):
            raise DataError(
                f"{self.name}: NaN, infinity or only zeros (no direction) in "
                f"{named_rows(np.arange(len(self))[rows][wrong])}"
                ": repair such rows or leave them out"
            )
        return x


@dataclass(kw_only=True)
class ImageDataset(Dataset):
    """Images as uint8 RGB arrays, decoded at each read.

    Attributes:
        fingerprint: if it is empty at first, a hash over :meth:`sample`.
        paths: N paths, or names in messages.
        fetch: row -> an image in any form that :func:`.images.to_pixels` takes.
        mirrors: whether mirrored images keep their meaning (not for digits).
    """

    paths: Sequence[str] = field(repr=False)
    fetch: Callable[[int], Any] = field(repr=False)
    mirrors: bool = True
    kind: Literal["images", "features"] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.fingerprint:
            images = (b"" if image is None else image.tobytes() for image in self.sample())
            self.fingerprint = fingerprint("items", str(len(self)), *images)

    def __len__(self) -> int:
        return len(self.paths)

    @functools.cached_property
    def native_size(self) -> int | None:
        """Side in pixels if 64 evenly spaced images are squares of one size, else None."""
        sides = {side for image in self.sample() if image is not None for side in image.shape[:2]}
        return sides.pop() if len(sides) == 1 else None

    def sample(self) -> list[NDArray[np.uint8] | None]:
        """Return 64 evenly spaced images, or all if there are fewer, as :meth:`read` does."""
        return self.read(np.unique(np.linspace(0, len(self) - 1, num=64).astype(np.int64)))

    def read(self, rows: Rows) -> list[NDArray[np.uint8] | None]:
        """Return images [H, W, 3]; None for broken or missing ones, which :attr:`bad` counts."""
        return [self.image(i) for i in np.arange(len(self))[rows].tolist()]

    def image(self, i: int, size: int | None = None) -> NDArray[np.uint8] | None:
        """Return the image of row ``i``, [H, W, 3] or resized to [size, size, 3]; None if it cannot
        be read."""
        name = shown(self.paths[i])
        try:
            pixels = to_pixels(self.fetch(i), name)
            return pixels if size is None else resize_square(pixels, size)
        except Exception as error:  # of a decoder, or of the source
            self.add_bad(i, name, one_line(error, 500).removeprefix(f"{name}: "))
            return None


def image_files(
    name: str,
    paths: Sequence[str],
    names: Sequence[str],
    *,
    texts: dict[str, Texts] | None = None,
    **attributes: Any,
) -> ImageDataset:
    """Make a data set of image files; missing ones are counted at once.

    The fingerprint covers names and contents (:func:`..files.content_of`), not times: a copy
    elsewhere has the same.
    """
    contents = [content_of([path], 16 << 10)[:16] for path in paths]
    dataset = ImageDataset(
        name=name,
        fingerprint=fingerprint("images", *names, *contents),
        paths=paths,
        fetch=paths.__getitem__,
        texts={"name": as_texts(names), "file_hash": as_texts(contents)} | (texts or {}),
        **attributes,
    )
    for i in [i for i, path in enumerate(paths) if not os.path.isfile(path)]:
        dataset.add_bad(i, shown(paths[i]), "not found")
    return dataset


def images_in_memory(name: str, pixels: NDArray[Any], **attributes: Any) -> ImageDataset:
    """Make a data set of an array of images that :func:`.images.to_pixels` takes."""
    return ImageDataset(
        name=name,
        fingerprint=fingerprint(
            "pixels", str(pixels.shape), np.ascontiguousarray(pixels).tobytes()
        ),
        paths=[f"item {i}" for i in range(len(pixels))],
        fetch=pixels.__getitem__,
        **attributes,
    )


# Batches for a network ----------------------------------------------------------------------------

Batch = tuple[NDArray[Any], NDArray[np.bool_]]


class Reader(ExitStack):
    """Reads batches by position: features float32 [n, width] or images uint8 [n, 3, image_size,
    image_size].

    Broken images are left out; a mask tells which rows are included. :meth:`preload` keeps all
    items in memory.
    """

    def __init__(self, dataset: Dataset, image_size: int) -> None:
        super().__init__()
        self.dataset, self.image_size = dataset, image_size
        self.array: NDArray[Any] | None = None
        self._decoders = self.enter_context(ThreadPoolExecutor(min(16, os.cpu_count() or 1)))
        self._ahead = self.enter_context(ThreadPoolExecutor(1))

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask. The data set counts the others."""
        if isinstance(self.dataset, FeatureDataset):
            return self.dataset.read(rows), np.ones(len(rows), bool)
        # Threads help, because Pillow releases the interpreter lock.
        images = list(
            self._decoders.map(
                cast(ImageDataset, self.dataset).image, rows.tolist(), repeat(self.image_size)
            )
        )
        mask = np.array([image is not None for image in images], bool)
        pixels = [image.transpose(2, 0, 1) for image in images if image is not None]
        return np.array(pixels, np.uint8).reshape(-1, 3, self.image_size, self.image_size), mask

    def preload(self) -> None:
        """Read everything into memory if it fits in 4 GiB."""
        n = len(self.dataset)
        sample, _ = self._load(np.arange(1))
        size = n * sample.itemsize * int(np.prod(sample.shape[1:]))
        if size <= 4 << 30:
            self.array = np.zeros((n, *sample.shape[1:]), sample.dtype)
            with stage("reading", n) as progress:
                for rows in np.array_split(np.arange(n), max(1, size // (32 << 20))):
                    values, mask = self._load(rows)
                    self.array[rows[mask]] = values
                    progress.update(len(rows))

    def fetch(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask bool [len(rows)]."""
        mask = ~np.isin(rows, list(self.dataset.bad))
        return self._load(rows) if self.array is None else (self.array[rows[mask]], mask)

    def stream(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Batch]:
        """Yield what :meth:`fetch` returns for each of ``batches`` of rows, and read one ahead."""
        futures = (self._ahead.submit(self.fetch, rows) for rows in batches)
        # Each pair starts the next batch before this one is awaited.
        for future, _ in pairwise(chain(futures, [Future[Batch]()])):
            yield future.result()

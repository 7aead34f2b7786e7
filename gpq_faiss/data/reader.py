"""Read items of a data set as arrays for a network, from memory if they fit, else from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..progress import stage
from .base import Dataset, FeatureDataset
from .images import resize_square

Batch = tuple[NDArray[Any], NDArray[np.bool_]]


class Reader:
    """Reads batches by position: features float32 [n, width] or images uint8 [n, 3, image_size,
    image_size].

    Broken images are left out; a mask tells which rows are included. :meth:`preload` keeps all
    items in memory.
    """

    def __init__(self, dataset: Dataset, image_size: int) -> None:
        self.dataset, self.image_size = dataset, image_size
        self.array: NDArray[Any] | None = None
        self._readable = np.ones(len(dataset), bool)
        self._decoders = ThreadPoolExecutor(min(16, os.cpu_count() or 1), "gpq-decode")
        self._ahead = ThreadPoolExecutor(1, "gpq-prefetch")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for executor in (self._ahead, self._decoders):  # after Ctrl-C, batches are not waited for
            executor.shutdown(wait=kind is None, cancel_futures=True)

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask. The data set counts the others."""
        if isinstance(self.dataset, FeatureDataset):
            return self.dataset.read(rows), np.ones(len(rows), bool)
        # Threads pay, as Pillow releases the interpreter lock.
        planes = list(self._decoders.map(self._plane, rows.tolist(), chunksize=8))
        readable = [plane for plane in planes if plane is not None]
        empty = np.empty((0, 3, self.image_size, self.image_size), np.uint8)
        mask = np.array([plane is not None for plane in planes], bool)
        return np.stack(readable) if readable else empty, mask

    def _plane(self, row: int) -> NDArray[np.uint8] | None:
        (image,) = self.dataset.read(np.array([row]))
        if image is None:
            return None
        return np.ascontiguousarray(resize_square(image, self.image_size).transpose(2, 0, 1))

    def preload(self) -> bool:
        """Read everything into memory if it fits in 4 GiB; returns whether it did."""
        n, dataset = len(self.dataset), self.dataset
        size = 3 * self.image_size**2
        if isinstance(dataset, FeatureDataset):
            size = 4 * dataset.width
        if n * size > 4 << 30:
            return False
        blocks = np.array_split(np.arange(n), max(1, n * size // (32 << 20)))
        with stage("reading", n) as progress:
            for rows in blocks:
                values, self._readable[rows] = self._load(rows)
                if self.array is None:
                    self.array = np.zeros((n, *values.shape[1:]), values.dtype)
                self.array[rows[self._readable[rows]]] = values
                progress.advance(len(rows))
        return True

    def fetch(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask bool [len(rows)]. Raises DataError:
        there is none.
        """
        mask = self._readable[rows]
        values, mask = self._load(rows) if self.array is None else (self.array[rows[mask]], mask)
        if len(rows) and not mask.any():
            raise DataError(
                f"{self.dataset.name}: none of the {len(rows)} items of a batch could be read"
                f": repair the images"
            )
        return values, mask

    def stream(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Batch]:
        """:meth:`fetch` each of ``batches`` of rows, two of them ahead."""
        futures = (self._ahead.submit(self.fetch, rows) for rows in batches)
        queue = list(islice(futures, 2))
        while queue:
            batch = queue.pop(0).result()
            queue += islice(futures, 1)
            yield batch

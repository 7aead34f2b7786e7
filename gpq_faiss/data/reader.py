"""Read items of a data set as arrays for a network, from memory if they fit, else from disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import tee
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ..progress import stage
from .base import Dataset, FeatureDataset, ImageDataset
from .images import resize_square

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
        self._readable = np.ones(len(dataset), bool)
        self._decoders = self.enter_context(ThreadPoolExecutor(min(16, os.cpu_count() or 1)))
        self._ahead = self.enter_context(ThreadPoolExecutor(1))

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask. The data set counts the others."""
        if isinstance(self.dataset, FeatureDataset):
            return self.dataset.read(rows), np.ones(len(rows), bool)
        # Threads pay, as Pillow releases the interpreter lock.
        images = list(self._decoders.map(self._image, rows.tolist()))
        mask = np.array([image is not None for image in images], bool)
        values = [image.transpose(2, 0, 1) for image in images if image is not None]
        return np.array(values, np.uint8).reshape(-1, 3, self.image_size, self.image_size), mask

    def _image(self, row: int) -> NDArray[np.uint8] | None:
        image = cast(ImageDataset, self.dataset).image(row)
        return None if image is None else resize_square(image, self.image_size)

    def preload(self) -> None:
        """Read everything into memory if it fits in 4 GiB."""
        n = len(self.dataset)
        sample, _ = self._load(np.arange(1))
        size = n * sample.itemsize * int(np.prod(sample.shape[1:]))
        if size > 4 << 30:
            return
        array = np.zeros((n, *sample.shape[1:]), sample.dtype)
        with stage("reading", n) as progress:
            for rows in np.array_split(np.arange(n), max(1, size // (32 << 20))):
                values, mask = self._load(rows)
                array[rows[mask]], self._readable[rows] = values, mask
                progress.advance(len(rows))
        self.array = array

    def fetch(self, rows: NDArray[np.int64]) -> Batch:
        """Return the readable items at ``rows`` and a mask bool [len(rows)]."""
        mask = self._readable[rows]
        return self._load(rows) if self.array is None else (self.array[rows[mask]], mask)

    def stream(self, batches: Iterable[NDArray[np.int64]]) -> Iterator[Batch]:
        """Yield what :meth:`fetch` returns for each of ``batches`` of rows, and read one ahead."""
        futures, ahead = tee(self._ahead.submit(self.fetch, rows) for rows in batches)
        next(ahead, None)
        for future in futures:
            next(ahead, None)  # starts the next batch
            yield future.result()

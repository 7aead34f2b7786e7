"""Read items of a data set as arrays for a network, from memory if they fit, else from disk."""

from __future__ import annotations

import math
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


_CHUNK = 8  # images per thread and step: small enough to balance a batch


class Reader:
    """Reads batches by position: features float32 [n, width] or images uint8 [n, 3, image_size,
    image_size].

    Broken images are left out; a mask tells which rows are included. :meth:`preload` keeps all
    items in memory.
    """

    def __init__(self, dataset: Dataset, image_size: int) -> None:
        self.dataset = dataset
        self.image_size = image_size
        self.array: NDArray[Any] | None = None
        self._ok: NDArray[np.bool_] | None = None
        self._decoders = ThreadPoolExecutor(min(16, os.cpu_count() or 1), "gpq-decode")
        self._ahead = ThreadPoolExecutor(1, "gpq-prefetch")

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # After Ctrl-C, do not wait for a batch in progress.
        self._ahead.shutdown(wait=kind is None, cancel_futures=True)
        self._decoders.shutdown(wait=kind is None, cancel_futures=True)

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        """The readable items at ``rows`` and a mask. The data set counts the others."""
        dataset, size = self.dataset, self.image_size
        if isinstance(dataset, FeatureDataset):
            return dataset.read(rows), np.ones(len(rows), dtype=bool)
        out = np.empty((len(rows), 3, size, size), dtype=np.uint8)
        ok = np.zeros(len(rows), dtype=bool)

        def work(start: int) -> None:
            for j, image in enumerate(dataset.read(rows[start : start + _CHUNK]), start):
                if image is not None:
                    out[j] = resize_square(image, size).transpose(2, 0, 1)
                    ok[j] = True

        # Threads pay, as Pillow releases the interpreter lock; the result does not depend on their
        # number.
        list(self._decoders.map(work, range(0, len(rows), _CHUNK)))
        return (out if ok.all() else out[ok]), ok

    def preload(self) -> bool:
        """Read everything into memory if it fits in 4 GiB; returns whether it did."""
        n = len(self.dataset)
        shape: tuple[int, ...] = (3, self.image_size, self.image_size)
        dtype: np.dtype[Any] = np.dtype(np.uint8)
        if isinstance(self.dataset, FeatureDataset):
            shape, dtype = (self.dataset.width,), np.dtype(np.float32)
        item_bytes = math.prod(shape) * dtype.itemsize
        if n * item_bytes > 4 << 30:
            return False
        array, readable = np.zeros((n, *shape), dtype), np.zeros(n, bool)
        block = max(64, (32 << 20) // item_bytes)
        with stage("reading", n) as reading:
            for start in range(0, n, block):
                rows = np.arange(start, min(start + block, n))
                values, ok = self._load(rows)
                array[rows[ok]] = values
                readable[rows] = ok
                reading.advance(len(rows))
        self.array, self._ok = array, readable
        return True

    def fetch(self, rows: NDArray[np.int64], *, empty: bool = False) -> Batch:
        """The readable items at ``rows`` and a mask bool [len(rows)]. Raises DataError: there is
        none, unless it may be ``empty``.
        """
        if self.array is None or self._ok is None:
            values, ok = self._load(rows)
        else:
            ok = self._ok[rows]
            values = self.array[rows[ok]]
        if len(rows) and not (empty or ok.any()):
            raise DataError(
                f"{self.dataset.name}: none of the {len(rows)} items of a batch could be read"
            )
        return values, ok

    def count_broken(self, rows: NDArray[np.int64]) -> None:
        """Count broken images found by another process."""
        new = np.setdiff1d(rows, list(self.dataset.bad))
        if len(new):
            self.dataset.read(new)

    def stream(
        self, batches: Iterable[NDArray[np.int64]], *, empty: bool = False
    ) -> Iterator[Batch]:
        """:meth:`fetch` each of ``batches`` of rows, two of them ahead; with ``empty`` all items of
        a batch may be broken.
        """
        coming = (self._ahead.submit(self.fetch, rows, empty=empty) for rows in batches)
        queue = list(islice(coming, 2))
        while queue:
            batch = queue.pop(0).result()
            queue += islice(coming, 1)
            yield batch

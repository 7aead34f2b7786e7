"""Items of a data set as arrays that a network takes, from memory where they fit and from disk where they do not."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError
from ..progress import stage
from .base import Dataset, FeatureDataset, ImageDataset
from .images import load_batch

Batch = tuple[NDArray[Any], NDArray[np.bool_]]


class Reader:
    """Reads batches by position: features float32 [n, width] or images uint8 [n, 3, size, size].

    Broken images are not in the array; a mask tells which of the rows asked for are.

    Args:
        dataset: what to read.
        image_size: side in pixels that images are brought to; ignored for features.
        cache_bytes: :meth:`preload` keeps all items in memory if they need no more than this.
    """

    def __init__(self, dataset: Dataset, image_size: int, *, cache_bytes: int = 4 << 30) -> None:
        self.dataset = dataset
        self.image_size = image_size
        self.cache_bytes = cache_bytes
        self.array: NDArray[Any] | None = None
        self._ok: NDArray[np.bool_] | None = None
        self._decoders = ThreadPoolExecutor(max(1, min(16, os.cpu_count() or 1)), "gpq-decode")
        self._ahead = ThreadPoolExecutor(1, "gpq-prefetch")

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After ctrl-C, do not wait for a batch in progress.
        self._ahead.shutdown(wait=kind is None, cancel_futures=True)
        self._decoders.shutdown(wait=kind is None, cancel_futures=True)

    @property
    def item_shape(self) -> tuple[int, ...]:
        """Shape of one item."""
        if isinstance(self.dataset, FeatureDataset):
            return (self.dataset.width,)
        return (3, self.image_size, self.image_size)

    @property
    def item_bytes(self) -> int:
        """Bytes of one item in memory."""
        return int(np.prod(self.item_shape)) * (4 if isinstance(self.dataset, FeatureDataset) else 1)

    def _load(self, rows: NDArray[np.int64]) -> Batch:
        if isinstance(self.dataset, FeatureDataset):
            return self.dataset.read(rows), np.ones(len(rows), dtype=bool)
        assert isinstance(self.dataset, ImageDataset)
        return load_batch(self.dataset, rows, self.image_size, self._decoders)

    def preload(self) -> bool:
        """Read everything into memory if it fits in ``cache_bytes``; return whether it did."""
        n = len(self.dataset)
        if n * self.item_bytes > self.cache_bytes:
            return False
        dtype = np.float32 if isinstance(self.dataset, FeatureDataset) else np.uint8
        array = np.zeros((n, *self.item_shape), dtype=dtype)
        there = np.zeros(n, dtype=bool)
        block = max(64, (32 << 20) // self.item_bytes)
        with stage("reading", n) as reading:
            for start in range(0, n, block):
                rows = np.arange(start, min(start + block, n))
                values, ok = self._load(rows)
                array[rows[ok]] = values
                there[rows] = ok
                reading.advance(len(rows))
        self.array, self._ok = array, there
        return True

    def fetch(self, rows: NDArray[np.int64]) -> Batch:
        """The items at ``rows`` and a mask bool [len(rows)] of those that could be read.

        Raises:
            DataError: too many are broken, or none of these could be read.
        """
        if self.array is not None and self._ok is not None:
            ok = self._ok[rows]
            values = self.array[rows[ok]]
        else:
            values, ok = self._load(rows)
        if len(rows) and not ok.any():
            raise DataError(f"{self.dataset.name}: none of the {len(rows)} items of a batch could be read")
        return values, ok

    def stream(self, batches: Iterable[NDArray[np.int64]], depth: int = 2) -> Iterator[Batch]:
        """:meth:`fetch` for each of ``batches``, reading up to ``depth`` ahead so that the network does not wait."""
        source = iter(batches)
        queue: list[Future[Batch]] = [self._ahead.submit(self.fetch, rows) for rows in islice(source, depth)]
        while queue:
            batch = queue.pop(0).result()
            for rows in islice(source, 1):
                queue.append(self._ahead.submit(self.fetch, rows))
            yield batch

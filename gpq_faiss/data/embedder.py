"""Base class of encoders: from items in any form to vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import DataError, MismatchError
from ..progress import stage
from .base import Dataset, FeatureDataset
from .images import to_images, to_vectors
from .labels import rows_that
from .reader import Reader

Vectors = tuple[NDArray[np.float32], NDArray[np.bool_]]


@dataclass(frozen=True)
class Embedder(ABC):
    """Turns items into vectors float32 [n, M·d].

    Attributes:
        source: file or folder it was loaded from.
        input_kind: ``features`` or ``images``.
        input_width: width of input features (0 for images).
        image_size: side of input images in pixels (0 for features).
        shape: M, K and d of the codebooks.
        fingerprint: hash of weights and codebooks, stored in features, codes and indexes.
        codebooks_fingerprint: hash of the codebooks; an index must have the same.
    """

    source: Path
    input_kind: str
    input_width: int
    image_size: int
    shape: tuple[int, int, int]
    fingerprint: str
    codebooks_fingerprint: str

    @property
    def bits(self) -> int:
        """Length of a code."""
        return self.shape[0] * (self.shape[1].bit_length() - 1)

    @abstractmethod
    def batch_size(self, dataset: Dataset) -> int:
        """Default number of items per batch."""

    @abstractmethod
    def _vectors(self, values: NDArray[Any], queries: bool) -> Vectors: ...

    def embed(self, values: Any, *, queries: bool = False) -> Vectors:
        """Vectors float32 [n, M·d] of items in memory.

        Args:
            values: vectors [n, width] (array, list or tensor), or one or several images in the forms of :func:`.images.to_images`.
            queries: compute query vectors instead of item vectors. They differ for models with class networks (``recommended``).

        Returns:
            The vectors, and bool [n]: whether each has a non-zero finite sub-vector in every sub-space (else it has no code).
        """
        images = self.input_kind == "images"
        items = to_images(values, self.image_size) if images else to_vectors(values, self.input_width)
        return self._vectors(items, queries)

    def check(self, dataset: Dataset) -> None:
        """Check that data fit the model."""
        if dataset.kind != self.input_kind:
            what = f"takes {self.input_kind}, but {dataset.name} holds {dataset.kind}"
            raise MismatchError(f"{self.source} {what}: give the kind of data that the model was trained on")
        if isinstance(dataset, FeatureDataset) and dataset.width != self.input_width:
            what = f"takes features of width {self.input_width}, but {dataset.name} has width {dataset.width}"
            raise MismatchError(f"{self.source} {what}: give features from the same extractor")

    def batches(
        self,
        dataset: Dataset,
        rows: NDArray[np.int64] | None = None,
        *,
        start: int = 0,
        batch_size: int = 0,
        queries: bool = False,
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float32]]]:
        """Yield rows and vectors of the items at ``rows`` (default: all) in batches, without broken images.
        ``queries`` as in :meth:`embed`.
        """
        self.check(dataset)
        positions = np.arange(len(dataset)) if rows is None else rows
        size = batch_size or self.batch_size(dataset)
        with Reader(dataset, self.image_size) as reader:
            parts = [positions[i : i + size] for i in range(start, len(positions), size)]
            for part, (values, ok) in zip(parts, reader.stream(parts), strict=True):
                vectors, fine = self._vectors(values, queries)
                if not fine.all():
                    what = "a zero or infinite sub-vector after the network, which has no direction and so no code"
                    bad = rows_that(part[ok][~fine], "have")
                    raise DataError(f"{dataset.name}: {bad} {what}: leave such rows out")
                yield part[ok], vectors

    def embed_rows(
        self, dataset: Dataset, rows: NDArray[np.int64], *, queries: bool = False
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """:meth:`batches` concatenated: rows int64 [n] and vectors float32 [n, M·d]."""
        M, _, d = self.shape
        there, parts = [np.empty(0, np.int64)], [np.empty((0, M * d), np.float32)]
        with stage("encoding queries" if queries else "encoding", len(rows)) as encoding:
            for positions, vectors in self.batches(dataset, rows, queries=queries):
                there.append(positions)
                parts.append(vectors)
                encoding.advance(len(positions))
        return np.concatenate(there), np.concatenate(parts)

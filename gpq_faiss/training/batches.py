"""The items of each training step, a function of seed and step only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..data.labels import Labels
from ..data.reader import Reader
from ..errors import DataError
from ..nn.joint import Share
from .parallel import Group

# Independent random streams.
LABELLED, UNLABELLED, STEP, HOLD_OUT, SAMPLE = range(5)


class EpochSampler:
    """Rows in shuffled passes over ``rows``; the batch of a step depends on seed and step only."""

    def __init__(self, rows: NDArray[np.int64], batch: int, seed: int, stream: int) -> None:
        self.rows = rows
        self.batch = min(batch, len(rows))
        self._seed = (seed, stream)
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def at(self, step: int) -> NDArray[np.int64]:
        """Rows of step ``step`` (from 0): int64 [batch]."""
        n, parts = len(self.rows), []
        start, stop = step * self.batch, (step + 1) * self.batch
        for epoch in range(start // n, (stop - 1) // n + 1):
            if epoch != self._epoch:
                rng = np.random.default_rng([*self._seed, epoch])
                self._epoch, self._order = epoch, self.rows[rng.permutation(n)]
            parts.append(self._order[max(start - epoch * n, 0) : stop - epoch * n])
        return np.concatenate(parts)


def hold_out(labels: Labels, labelled: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    """A share of the labelled rows for validation, balanced over the classes; empty if below two per class."""
    count = round(share * len(labelled))
    if count < 2 * labels.n_classes:
        return np.empty(0, np.int64)
    rng = np.random.default_rng([seed, HOLD_OUT])
    shuffled = labelled[rng.permutation(len(labelled))]
    # Round-robin over classes keeps rare ones: sort by each item's rank within its (first) class.
    first = labels.dense(shuffled, dtype=bool).argmax(axis=1)
    rank = np.empty(len(shuffled), np.int64)
    for c in np.unique(first):
        of_class = np.flatnonzero(first == c)
        rank[of_class] = np.arange(len(of_class)) * (len(shuffled) / len(of_class))
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])


def training_batches(
    reader: Reader,
    labelled: EpochSampler,
    unlabelled: EpochSampler | None,
    steps: range,
    group: Group | None = None,
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64], Share | None]]:
    """Yield the readable items of each step: the values of labelled, then of unlabelled items; the rows int64 of either kind; and the share
    of this process, whose values these are (the rows are those of all), or None for a single process.

    Raises:
        DataError: no labelled item of a step is readable, or too many items are not.
    """
    group = group or Group()

    def rows_of(step: int) -> NDArray[np.int64]:
        return np.concatenate([sampler.at(step) for sampler in (labelled, unlabelled) if sampler])

    stream = reader.stream((group.share(rows_of(step)) for step in steps), empty=group.size > 1)
    for step, (values, ok) in zip(steps, stream, strict=True):
        rows, parts = rows_of(step), group.gather(torch.from_numpy(ok))
        there = torch.cat(parts).numpy()
        n = int(there[: labelled.batch].sum())
        if not n:
            raise DataError(
                f"{reader.dataset.name}: none of the {labelled.batch} labelled items of step {step} could be read"
            )
        kept, share = rows[there], None
        if group.size > 1:
            if group.main:
                reader.count_broken(rows[~there])
            start = sum(int(part.sum()) for part in parts[: group.rank])
            share = Share(start, start + len(values), len(kept))
        yield values, kept[:n], kept[n:], share

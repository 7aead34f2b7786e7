"""Which items a training sees at which step: a function of the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.labels import Labels
from ..data.reader import Reader
from ..errors import DataError

# Streams of random numbers that must not share their seeds.
LABELLED, UNLABELLED, STEP, HOLD_OUT, SAMPLE = range(5)


class EpochSampler:
    """Rows in shuffled passes over ``rows``; the batch of a step depends on the seed and the step alone."""

    def __init__(self, rows: NDArray[np.int64], batch: int, seed: int, stream: int) -> None:
        self.rows = rows
        self.batch = min(batch, len(rows))
        self._seed = (seed, stream)
        self._epoch = -1
        self._order: NDArray[np.int64] = np.empty(0, np.int64)

    def _pass(self, epoch: int) -> NDArray[np.int64]:
        if epoch != self._epoch:
            rng = np.random.default_rng([*self._seed, epoch])
            self._epoch, self._order = epoch, self.rows[rng.permutation(len(self.rows))]
        return self._order

    def at(self, step: int) -> NDArray[np.int64]:
        """Rows of step ``step`` (from 0): int64 [batch]."""
        n = len(self.rows)
        start, stop = step * self.batch, (step + 1) * self.batch
        return np.concatenate(
            [
                self._pass(epoch)[max(start - epoch * n, 0) : stop - epoch * n]
                for epoch in range(start // n, (stop - 1) // n + 1)
            ]
        )


def hold_out(labels: Labels, labelled: NDArray[np.int64], share: float, seed: int) -> NDArray[np.int64]:
    """A share of the labelled rows for validation, evenly over the classes; empty if it would be under two per class."""
    count = round(share * len(labelled))
    if count < 2 * labels.n_classes:
        return np.empty(0, np.int64)
    rng = np.random.default_rng([seed, HOLD_OUT])
    shuffled = labelled[rng.permutation(len(labelled))]
    # Taking turns between the classes keeps rare ones in: sort by each item's rank within its (first) class.
    first = labels.dense(shuffled, dtype=bool).argmax(axis=1)
    rank = np.empty(len(shuffled), np.int64)
    for c in np.unique(first):
        of_class = np.flatnonzero(first == c)
        rank[of_class] = np.arange(len(of_class)) * (len(shuffled) / len(of_class))
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])


def training_batches(
    reader: Reader, labelled: EpochSampler, unlabelled: EpochSampler | None, steps: range
) -> Iterator[tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]]:
    """For each step the items of both kinds in one array, the labelled first, and the rows of both kinds."""

    def rows() -> Iterator[NDArray[np.int64]]:
        for step in steps:
            yield np.concatenate([labelled.at(step), *([unlabelled.at(step)] if unlabelled else [])])

    for step, (values, ok) in zip(steps, reader.stream(rows()), strict=True):
        l_rows, l_ok = labelled.at(step), ok[: labelled.batch]
        if not l_ok.any():
            raise DataError(
                f"{reader.dataset.name}: none of the {len(l_rows)} labelled items of step {step} could be read"
            )
        u_rows = unlabelled.at(step)[ok[labelled.batch :]] if unlabelled else l_rows[:0]
        yield values, l_rows[l_ok], u_rows

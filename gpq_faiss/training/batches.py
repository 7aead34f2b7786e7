"""The items of each training step, a function of seed and step only."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from ..data.labels import Labels

# Independent random streams.
LABELLED, UNLABELLED, STEP, HOLD_OUT, SAMPLE = range(5)


class EpochSampler:
    """Batches from shuffled passes over ``rows``, which depend on seed and step only.

    Of several processes each gets its own share of a global batch, as with torch's
    ``DistributedSampler``.

    Args:
        rows: int64 [n].
        batch: items of a process and step; fewer if there are not enough rows.
        seed: of the random numbers ``[*seed, epoch]``.
        rank, size: this process, and the number of processes.
    """

    def __init__(
        self,
        rows: NDArray[np.int64],
        batch: int,
        seed: tuple[int, ...],
        rank: int = 0,
        size: int = 1,
    ) -> None:
        self.rows, self.seed, self.rank, self.size = rows, seed, rank, size
        self.global_batch = min(batch * size, len(rows))
        self.batch = -(-self.global_batch // size)

    def rows_of_step(self, step: int) -> NDArray[np.int64]:
        """Return the rows of this process in step ``step`` (from 0), int64 [batch]."""
        n = len(self.rows)
        positions = np.arange(step * self.global_batch, (step + 1) * self.global_batch)
        epochs = np.unique(positions // n)
        orders = [_shuffled(n, (*self.seed, int(epoch))) for epoch in epochs]
        drawn = self.rows[np.concatenate(orders)[positions - epochs[0] * n]]
        # Repeat some rows if the number of processes does not divide the global batch.
        return np.resize(drawn, self.batch * self.size)[self.rank :: self.size]


@functools.lru_cache(maxsize=4)
def _shuffled(n: int, seed: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the numbers below n in random order."""
    return np.random.default_rng(seed).permutation(n)


def hold_out(
    labels: Labels, labelled: NDArray[np.int64], share: float, seed: int
) -> NDArray[np.int64]:
    """Choose a share of the labelled rows for validation, int64, ascending, stratified by class.

    An item with several labels counts for the first of them. The result is empty if there would be
    fewer than two rows per class.
    """
    count = round(share * len(labelled))
    if count < 2 * labels.n_classes:
        return np.empty(0, np.int64)
    shuffled = np.random.default_rng([seed, HOLD_OUT]).permutation(labelled)
    # Spread the items of each class evenly, and take those with the smallest ranks: every class has
    # its share of them, and the only item of a class stays in the training (up to a share of half).
    classes = labels.dense(shuffled, dtype=bool).argmax(axis=1)
    rank = np.empty(len(shuffled), np.int64)
    for c in np.unique(classes):
        of_class = np.flatnonzero(classes == c)
        rank[of_class] = (np.arange(len(of_class)) + 0.5) * (len(shuffled) / len(of_class))
    return np.sort(shuffled[np.argsort(rank, kind="stable")[:count]])

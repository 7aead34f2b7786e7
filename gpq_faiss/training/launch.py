"""Detect a launcher such as ``torchrun``, without importing torch."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import UsageError


@dataclass(frozen=True)
class Launch:
    """This process among the processes of a run.

    Attributes:
        rank, size: number of this process, from 0, and number of processes.
        local_rank, local_size: the same on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launch | None:
    """Read the environment variables of a launcher; None for a single process.

    Raises:
        UsageError: the variables contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if not all(name in os.environ for name in names):
        return None
    try:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    except ValueError:
        raise UsageError(
            "RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers: start with torchrun"
        ) from None
    if not 0 <= rank < size or not 0 <= local_rank < local_size <= size:
        raise UsageError(
            f"RANK={rank}, WORLD_SIZE={size}, LOCAL_RANK={local_rank}, LOCAL_WORLD_SIZE={local_size} contradict each other: "
            "start with torchrun"
        )
    return Launch(rank, size, local_rank, local_size) if size > 1 else None


def is_first() -> bool:
    """Whether this process reports for all: the first, or the only one."""
    try:
        launch = launched()
    except UsageError:
        return True
    return launch is None or launch.rank == 0

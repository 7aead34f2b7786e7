"""Detect a launcher such as ``torchrun``, without importing torch."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import UsageError


class Launch(NamedTuple):
    """This process among those of a run: its number, from 0, and their number; the same on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launch | None:
    """Read the environment variables of a launcher; None for a single process.

    Raises:
        UsageError: the variables contradict each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    said = [os.environ.get(name, "") for name in names]
    if not all((*said[:2], "MASTER_ADDR" in os.environ, "MASTER_PORT" in os.environ)):
        return None
    try:
        found = Launch(*map(int, (*said[:2], said[2] or said[0], said[3] or said[1])))
        if not 0 <= found.rank < found.size or not 0 <= found.local_rank < found.local_size <= found.size:
            raise ValueError
    except ValueError:
        given = ", ".join(f"{name}={value}" for name, value in zip(names, said, strict=True))
        raise UsageError(
            f"{given} contradict each other or are no whole numbers: start with torchrun"
        ) from None
    return found if found.size > 1 else None


def is_first() -> bool:
    """Whether this process reports for all: the first, or the only one."""
    try:
        launch = launched()
    except UsageError:
        return True
    return launch is None or launch.rank == 0

"""Detect ``torchrun``, without importing torch."""

from __future__ import annotations

import os
from typing import NamedTuple


class Launch(NamedTuple):
    """This process among those of a run: its number, from 0, and their number; the same on this machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def launched() -> Launch | None:
    """What torchrun says in environment variables; None for a single process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = Launch(*(int(os.environ[name]) for name in names))
    return found if found.size > 1 else None


def is_first() -> bool:
    """Whether this process reports for all: the first, or the only one."""
    launch = launched()
    return launch is None or launch.rank == 0

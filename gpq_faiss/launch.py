"""Detect ``torchrun``, without importing torch."""

from __future__ import annotations

import os
from typing import NamedTuple


class Launch(NamedTuple):
    """Rank and number of the processes of a training, and the rank on this machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0


def launched() -> Launch:
    """Return what ``torchrun`` says in environment variables; without it, a single process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return Launch()
    return Launch(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))

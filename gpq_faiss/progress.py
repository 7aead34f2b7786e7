"""Progress of work that may take seconds: ``tqdm`` bars on a terminal, else lines of the log."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

MIN_DURATION = 2.0
"""Minimum duration in seconds of a stage that is logged when it ends."""
MIN_INTERVAL = 10.0
"""Minimum time in seconds between two log lines of a stage; it grows with the duration."""


class Stage:
    """A stage of the work: ``bar`` counts its units."""

    def __init__(self, name: str, total: int, unit: str, done: int) -> None:
        self.terminal = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
        self.began = self.logged = time.monotonic()
        self.bar = tqdm(
            desc=name,
            total=total or None,
            unit=unit,
            initial=done,
            leave=False,
            dynamic_ncols=True,
            mininterval=0.1 if self.terminal else MIN_INTERVAL,
            bar_format=None if total else "{desc} ...",
            file=sys.stderr if self.terminal else io.StringIO(),
        )

    def __str__(self) -> str:
        """Return a line such as ``training:  38% 300/800 [00:12<00:20, 25.00step/s]``."""
        figures = self.bar.format_dict | {"ncols": 0}
        if not self.bar.total:
            figures |= {"bar_format": "{desc}: {elapsed}"}
        return str(tqdm.format_meter(**figures))

    def advance(self, n: int = 1) -> None:
        """Count n more units."""
        self.bar.update(n)
        clock = time.monotonic()
        wait = max(MIN_INTERVAL, (self.logged - self.began) / 4)
        if not self.terminal and clock >= self.logged + wait:
            self.logged = clock
            log.info("%s", self)


@contextmanager
def stage(name: str, total: int = 0, unit: str = "item", *, done: int = 0) -> Iterator[Stage]:
    """Open a stage for the duration of a ``with`` block; ``done``: units done before."""
    current = Stage(name, total, unit, done)
    try:
        yield current
    finally:
        current.bar.close()
    if time.monotonic() - current.began >= MIN_DURATION:
        log.info("%s", current)


@contextmanager
def levels(level: int, *names: str) -> Iterator[None]:
    """Set these loggers to a level for the duration of a ``with`` block."""
    previous = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in previous:
            logger.setLevel(level)
        yield
    finally:
        for logger, previous_level in previous.items():
            logger.setLevel(previous_level)

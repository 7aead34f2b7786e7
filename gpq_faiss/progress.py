"""Progress of work that may take seconds: ``tqdm`` bars on a terminal, else lines of the log."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

log = logging.getLogger(__name__)

LONG = 2.0
"""Minimum duration in seconds of a stage that is logged when it ends."""
INTERVAL = 10.0
"""Seconds between two lines of a stage, which become more."""


class Stage:
    """A stage of the work.

    Attributes:
        name: name of the stage.
        total: number of units; 0 if unknown.
        unit: the unit, a singular noun.
        done: units done so far.
    """

    def __init__(self, name: str, total: int, unit: str, done: int) -> None:
        self.name, self.total, self.unit, self.done, self.first = name, total, unit, done, done
        self.began = time.monotonic()
        self.due = self.began + INTERVAL
        self.terminal = sys.stderr.isatty() and log.isEnabledFor(logging.INFO)
        text = None if total else "{desc} ..."
        self.bar = tqdm(
            desc=name,
            total=total,
            unit=unit,
            initial=done,
            leave=False,
            dynamic_ncols=True,
            bar_format=text,
            disable=not self.terminal,
        )

    def __str__(self) -> str:
        """Return a line such as ``training:  38% 300/800 [00:12<00:20, 25.00step/s]``."""
        seconds = time.monotonic() - self.began
        if not self.total:
            return f"{self.name}: {tqdm.format_interval(seconds)}"
        counted = {"prefix": self.name, "unit": self.unit, "initial": self.first}
        return str(tqdm.format_meter(self.done, self.total, seconds, ncols=0, **counted))

    def advance(self, n: int = 1) -> None:
        """Count n more units."""
        self.done += n
        self.bar.update(n)
        clock = time.monotonic()
        if not self.terminal and clock >= self.due:
            log.info("%s", self)
            self.due = clock + max(INTERVAL, (clock - self.began) / 4)


@contextmanager
def stage(name: str, total: int = 0, unit: str = "item", *, done: int = 0) -> Iterator[Stage]:
    """Open a stage for the duration of a ``with`` block; ``done``: units done before."""
    current = Stage(name, total, unit, done)
    try:
        yield current
    finally:
        current.bar.close()
    if time.monotonic() - current.began >= LONG:
        log.info("%s", current)


@contextmanager
def levels(level: int, *names: str) -> Iterator[None]:
    """Set these loggers to a level for the duration of a ``with`` block."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in before:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in before.items():
            logger.setLevel(old)

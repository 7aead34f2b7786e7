"""Progress of work that may take seconds: ``tqdm`` bars on a terminal, else lines of the log."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

log = logging.getLogger(__name__)

MIN_DURATION = 2.0
"""Minimum duration in seconds of a stage that is logged when it ends."""
MIN_INTERVAL = 30.0
"""Minimum time in seconds between two log lines of a stage."""


class _LoggedBar(tqdm):  # type: ignore[misc]
    """A bar that is logged as a line wherever another one would be drawn."""

    def update(self, n: float | None = 1) -> bool | None:
        is_drawn: bool | None = super().update(n)
        if is_drawn:
            log.info("%s", self)
        return is_drawn


@contextmanager
def stage(name: str, total: int = 0, unit: str = "item", *, done: int = 0) -> Iterator[Any]:
    """Open a stage of the work for the duration of a ``with`` block, and yield its ``tqdm`` bar.

    Args:
        total: number of units of work; 0: only the duration is shown.
        unit: name of a unit.
        done: number of units that were done before.
    """
    options = {
        "desc": name,
        "total": total or None,
        "unit": unit,
        "initial": done,
        "leave": False,
        "bar_format": None if total else "{desc} ...",
    }
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        bar = tqdm(file=sys.stderr, dynamic_ncols=True, **options)
    else:
        interval = {"mininterval": MIN_INTERVAL, "delay": MIN_INTERVAL}
        bar = _LoggedBar(file=io.StringIO(), ncols=0, **interval, **options)
    with bar:
        yield bar
    figures = bar.format_dict | {"ncols": 0}
    if not total:
        figures["bar_format"] = "{desc}: {elapsed}"
    if figures["elapsed"] >= MIN_DURATION:
        log.info("%s", tqdm.format_meter(**figures))


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

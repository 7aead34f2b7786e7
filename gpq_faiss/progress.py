"""Progress: work that may take seconds opens a stage, which can be observed.

The work only sets counters; observers (the progress bar of the command line) read them from another thread. Stages of two seconds or more
are logged when they end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

LONG = 2.0
"""Minimum duration of a logged stage in seconds."""
_lock = threading.Lock()
_open: list[Stage] = []
"""The stages under way, outermost first."""


@dataclass(eq=False)
class Stage:
    """One part of the work, counted in units of this singular noun: ``done`` of ``total`` (0: unknown), ``first`` before it began."""

    name: str
    total: int = 0
    unit: str = "item"
    done: int = 0
    first: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        here = self.done - self.first
        if here <= 0 or self.total <= 0:
            return None
        return self.seconds * max(self.total - self.done, 0) / here

    def advance(self, n: int = 1) -> None:
        self.done += n


@contextmanager
def stage(name: str, total: int = 0, unit: str = "item", *, done: int = 0) -> Iterator[Stage]:
    """Open a stage for the duration of a ``with`` block; ``done``: units done before."""
    made = Stage(name, total, unit, done, done)
    with _lock:
        inner = any(one.total for one in _open)
        _open.append(made)
    try:
        yield made
    finally:
        with _lock:
            _open.remove(made)
    if made.seconds >= LONG:
        counted = f" {count(made.done - made.first, made.unit)} in" if made.done > made.first else ""
        # Of a stage within another that counts, such as a run of an experiment, the outer one's lines tell enough.
        log.log(logging.DEBUG if inner else logging.INFO, "%s:%s %s", name, counted, duration(made.seconds))


def under_way() -> tuple[Stage, ...]:
    """Open stages to show, outermost first: those with a total, and the innermost."""
    with _lock:
        return tuple(one for one in _open if one.total or one is _open[-1])


def count(n: int, unit: str) -> str:
    """``1,000 items``."""
    plural = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
    return f"{n:,} {unit if n == 1 else plural}"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"


def describe(shown: tuple[Stage, ...]) -> str:
    """A line for open stages, outermost first: ``training: 300 of 800 steps, 12 s, 20 s to go``."""
    texts = []
    for one in shown:
        parts = [f"{one.done:,} of {count(one.total, one.unit)}"] if one.total else []
        left = [] if one.left is None else [f"{duration(one.left)} to go"]
        texts.append(f"{one.name}: {', '.join([*parts, duration(one.seconds), *left])}")
    return "; ".join(texts)


@contextmanager
def levels(level: int, *names: str) -> Iterator[None]:
    """These loggers at a level, for the duration of a ``with`` block."""
    before = {logger: logger.level for logger in map(logging.getLogger, names)}
    try:
        for logger in before:
            logger.setLevel(level)
        yield
    finally:
        for logger, old in before.items():
            logger.setLevel(old)

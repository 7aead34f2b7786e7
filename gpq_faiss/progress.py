"""Progress: every part of the work that may take seconds opens a stage, which can be watched from outside.

The work only sets numbers; whoever watches (the command line: a bar, or lines) reads them when it likes, from a thread of its own.
A stage that took two seconds or more is logged when it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called with the items done and the items in all."""
LONG = 2.0
"""Seconds from which on a stage is worth a word."""
LOCK = threading.RLock()
"""Held while a stage is opened or closed; hold it to do something to a stage that must still be open."""
_open: list[Stage] = []


@dataclass(eq=False)
class Stage:
    """One part of the work.

    Attributes:
        name: what it is, as in "training".
        total: how many ``unit`` there are in all; 0: not known.
        unit: what is counted, in the singular.
        done: how many are done. Set by the work.
        first: how many were done when it began (a run that goes on).
        figures: by name, the latest of what the work wants to be seen. Set by the work.
        began: ``time.monotonic()``.
        ends: called when it ends, before anything else goes on.
    """

    name: str
    total: int = 0
    unit: str = "item"
    done: int = 0
    first: int = 0
    figures: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    ends: list[Callable[[], None]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.monotonic() - self.began

    @property
    def left(self) -> float | None:
        """Seconds to go, at the pace so far; None: nothing says."""
        here = self.done - self.first
        if here <= 0 or self.total <= 0:
            return None
        return self.seconds * max(self.total - self.done, 0) / here

    def advance(self, n: int = 1) -> None:
        """``n`` more are done."""
        self.done += n


@contextmanager
def stage(name: str, total: int = 0, unit: str = "item", *, done: int = 0) -> Iterator[Stage]:
    """Open a stage for the time of a ``with`` block.

    Args:
        name: what it is.
        total: how many ``unit`` there are in all; 0: not known.
        unit: what is counted, in the singular.
        done: how many of them were done before.
    """
    made = Stage(name, total, unit, done, done)
    with LOCK:
        inner = any(one.total for one in _open)
        _open.append(made)
    try:
        yield made
    finally:
        with LOCK:
            _open.remove(made)
            for end in made.ends:
                end()
    if made.seconds >= LONG:
        counted = f" {count(made.done - made.first, made.unit)} in" if made.done > made.first else ""
        # Of a stage within another that counts, such as a run of an experiment, the outer one's lines tell enough.
        log.log(logging.DEBUG if inner else logging.INFO, "%s:%s %s", name, counted, duration(made.seconds))


def under_way() -> tuple[Stage, ...]:
    """What of the open stages is worth showing, outermost first: those that count something, and the innermost."""
    with LOCK:
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
    return "; ".join(_text_of(one) for one in shown)


def _text_of(one: Stage) -> str:
    parts = [f"{one.done:,} of {count(one.total, one.unit)}"] if one.total else []
    parts.append(duration(one.seconds))
    if one.left is not None:
        parts.append(f"{duration(one.left)} to go")
    return f"{one.name}: {', '.join(parts)}"

"""Termination signals: Ctrl-C, SIGTERM and SIGHUP.

All have the same effect: work stops where it can be resumed, temporary files are removed, and the process ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENDING: list[int] = [signal.SIGTERM, signal.SIGHUP]
_met: list[int] = []  # numbers of the signals that _terminate was called for


class Terminated(KeyboardInterrupt):
    """A termination signal, handled like Ctrl-C; the exit code is 128 + ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def _terminate(number: int, _: Any) -> None:
    """Raises :class:`Terminated` once, so that a second signal does not interrupt the cleanup."""
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    _met.append(number)
    raise Terminated(number)


@contextlib.contextmanager
def _handling(handler: Callable[[int, Any], None], numbers: list[int], *known: Any) -> Iterator[None]:
    """Context in which ``handler`` takes these signals, where they have one of the ``known`` handlers; only in the main thread."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: old for number in numbers if main and (old := signal.getsignal(number)) in known}
    for number in before:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise :class:`Terminated`; for programs only, as libraries leave signals to their caller.

    A KeyboardInterrupt that a library raises at such a signal, as Ray does while it waits, leaves as :class:`Terminated` too.
    """
    _met.clear()
    with _handling(_terminate, _ENDING, signal.SIG_DFL):
        try:
            yield
        except KeyboardInterrupt as error:
            if _met and not isinstance(error, Terminated):
                raise Terminated(_met[0]) from None
            raise


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], bool]]:
    """Context that defers Ctrl-C, SIGTERM and SIGHUP; yields a check for one, which takes effect on exit, a second Ctrl-C immediately.

    Handlers set by the program, and other threads, are not affected.
    """
    held: list[int] = []

    def hold(number: int, _: Any) -> None:
        if held and number == signal.SIGINT:
            raise KeyboardInterrupt
        held.append(number)

    numbers = [signal.SIGINT, *_ENDING]
    try:
        with _handling(hold, numbers, signal.SIG_DFL, signal.default_int_handler, _terminate):
            yield lambda: bool(held)
    finally:
        if held:
            signal.raise_signal(held[0])

"""Termination signals: Ctrl-C, SIGTERM and SIGHUP.

All have the same effect: work stops where it can be resumed, temporary files are removed, and the process ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_met: list[int] = []
"""Numbers of the signals that :func:`terminate` was called for."""


class Terminated(KeyboardInterrupt):
    """A termination signal, handled like Ctrl-C.

    Attributes:
        number: of the signal; the exit code is 128 + number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def terminate(number: int, frame: Any) -> None:
    """A signal handler that raises :class:`Terminated` once, so that a second signal does not interrupt the cleanup."""
    del frame
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    _met.append(number)
    raise Terminated(number)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise :class:`Terminated` instead of ending the process.

    For programs only: libraries leave signals to their caller. No-op outside of the main thread. A KeyboardInterrupt that a library
    raises at such a signal, as Ray does while it waits, leaves as :class:`Terminated` too.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDING if main and signal.getsignal(number) is signal.SIG_DFL]
    _met.clear()
    for number in ours:
        signal.signal(number, terminate)
    try:
        yield
    except KeyboardInterrupt as error:
        if _met and not isinstance(error, Terminated):
            raise Terminated(_met[0]) from None
        raise
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def held_signals() -> Iterator[Callable[[], bool]]:
    """Context that defers Ctrl-C, SIGTERM and SIGHUP, so that the caller can stop where its work can be resumed.

    Yields a check for a pending signal, which takes effect on exit. A second Ctrl-C takes effect immediately. Handlers set by the program,
    and other threads, are not affected.
    """
    first: int | None = None
    main = threading.current_thread() is threading.main_thread()
    plain = {signal.SIGINT: (signal.default_int_handler,)} | dict.fromkeys(
        _ENDING, (signal.SIG_DFL, terminate)
    )
    before = {
        number: signal.getsignal(number)
        for number, handlers in plain.items()
        if main and signal.getsignal(number) in handlers
    }

    def hold(number: int, frame: Any) -> None:
        nonlocal first
        del frame
        if first is None:
            first = number
        elif number == signal.SIGINT:
            raise KeyboardInterrupt

    for number in before:
        signal.signal(number, hold)
    try:
        yield lambda: first is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if first is not None:
            signal.raise_signal(first)

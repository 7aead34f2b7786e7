"""Termination signals: Ctrl-C, SIGTERM and SIGHUP.

All have the same effect: work stops where it can be resumed, temporary files are removed, and the
process ends.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

_ENDING = signal.SIGTERM, signal.SIGHUP


def _terminate(number: int, _: Any) -> None:
    """Raise a KeyboardInterrupt that names the signal.

    Further ones are ignored, so that they do not interrupt the cleanup.
    """
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt(signal.Signals(number).name)


@contextlib.contextmanager
def _handling(
    handler: Callable[[int, Any], None], numbers: tuple[int, ...], *replaced: Any
) -> Iterator[None]:
    """Handle signals whose handler is one of ``replaced``; only in the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    previous = {
        number: signal.getsignal(number)
        for number in numbers
        if is_main and signal.getsignal(number) in replaced
    }
    for number in previous:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number, replaced_handler in previous.items():
            signal.signal(number, replaced_handler)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Make SIGTERM and SIGHUP raise a KeyboardInterrupt with the name of the signal.

    This is for programs only; libraries leave signals to their caller.
    """
    with _handling(_terminate, _ENDING, signal.SIG_DFL):
        yield


def keeping_sigterm() -> contextlib.AbstractContextManager[None]:
    """Return a context that restores the handler of SIGTERM, whatever its block sets."""
    handler: Any = signal.getsignal(signal.SIGTERM)
    return _handling(handler, (signal.SIGTERM,), handler)


@contextlib.contextmanager
def deferred_signals() -> Iterator[Callable[[], bool]]:
    """Defer Ctrl-C, SIGTERM and SIGHUP to the end of a ``with`` block.

    Yields a function that says whether there was such a signal. A second Ctrl-C takes effect
    immediately. Handlers set by the program, and other threads, are not affected.
    """
    pending: list[int] = []

    def defer(number: int, _: Any) -> None:
        if pending and number == signal.SIGINT:
            raise KeyboardInterrupt
        pending.append(number)

    usual = signal.SIG_DFL, signal.default_int_handler, _terminate
    try:
        with _handling(defer, (signal.SIGINT, *_ENDING), *usual):
            yield lambda: bool(pending)
    finally:
        if pending:
            signal.raise_signal(pending[0])

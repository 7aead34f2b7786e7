"""Signals that ask a process to end: ctrl-C, and SIGTERM and SIGHUP, which batch systems and closed terminals send.

All act alike: running work stops where it can be resumed, temporary files are removed, and the process ends.
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
    """A signal asked the process to end: met wherever ctrl-C is.

    Attributes:
        number: of the signal; a process that it ends gives 128 + number as its exit code.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def terminate(number: int, frame: Any) -> None:
    """A signal handler that raises :class:`Terminated`, once: a second signal does not cut the tidying up short."""
    del frame
    for other in _ENDING:
        signal.signal(other, signal.SIG_IGN)
    _met.append(number)
    raise Terminated(number)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise :class:`Terminated` in this thread, where they would end the process as they come.

    For programs: a library leaves signals to its caller. In any but the main thread, nothing changes. Where a library met the
    signal and raised a KeyboardInterrupt of its own, as Ray does while it waits, that leaves as :class:`Terminated` too.
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
    """Hold ctrl-C, SIGTERM and SIGHUP back, so that the caller can end where its work can be resumed.

    Yields whether there was one; the caller then leaves, and the signal has the effect that it would have had. A second
    ctrl-C has it at once. Handlers that the program has set itself stay as they are, and so do those of other threads.
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

"""What ``gpq`` says while it works: log lines, and how far it is: a line that is redrawn on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from gpq_faiss import progress as stages

log = logging.getLogger("gpq_faiss.progress")

# torch and matplotlib log at INFO what is no business of a user of gpq.
_OTHERS = ("torch", "matplotlib", "faiss", "onnxscript", "PIL")
_CLEAR = "\r\x1b[K"


class Watcher:
    """Shows the open stages of :mod:`gpq_faiss.progress` on stderr.

    Args:
        terminal: one line, redrawn; else a line now and then.
        look: seconds between two looks at the stages.
        first: seconds before a stage is shown at all.
        apart: seconds between two lines, at least.
    """

    def __init__(
        self, terminal: bool, *, look: float = 0.2, first: float = 0.8 * stages.LONG, apart: float = 10.0
    ) -> None:
        self.terminal, self.look, self.first, self.apart = terminal, look, first, apart
        self._announced: stages.Stage | None = None
        self._next = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="gpq progress")

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.terminal:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()

    def _watch(self) -> None:
        while not self._stop.wait(self.look):
            shown = stages.under_way()
            if not shown or shown[0].seconds < self.first:
                continue
            if self.terminal:
                width = 0
                with contextlib.suppress(OSError, ValueError):
                    width = os.get_terminal_size(sys.stderr.fileno()).columns
                # Some terminals (of containers, of `script`) do not say how wide they are.
                sys.stderr.write(f"{_CLEAR}{stages.describe(shown)[: (width or 80) - 1]}")
                sys.stderr.flush()
            else:
                self._write(shown)

    def _write(self, shown: tuple[stages.Stage, ...]) -> None:
        """A line, where one is due: soon for every outermost stage, then twenty or so for all of it."""
        now = time.monotonic()
        if shown[0] is self._announced and now < self._next:
            return
        self._announced = shown[0]
        whole = shown[0].seconds + (shown[0].left or 0)
        self._next = now + max(self.apart, whole / 20)
        log.info("%s", stages.describe(shown))


class _Formatter(logging.Formatter):
    """Messages, which take the place of the redrawn line."""

    def format(self, record: logging.LogRecord) -> str:
        return (_CLEAR if sys.stderr.isatty() else "") + super().format(record)


@contextmanager
def shown(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """While a command works: its log and its progress on stderr.

    Args:
        quiet: errors only.
        verbose: what is of interest to few as well, and the warnings of libraries.
    """
    package = logging.getLogger("gpq_faiss")
    before = package.level, {name: logging.getLogger(name).level for name in _OTHERS}
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    handler.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    logging.getLogger().addHandler(handler)
    package.setLevel(logging.DEBUG if verbose else logging.INFO)
    for name in _OTHERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            if not verbose:
                # Of libraries to programmers: Pillow's on odd tags, torch's on drivers. What matters to users is an error or a note.
                warnings.simplefilter("ignore")
            if quiet:
                yield
            else:
                with Watcher(sys.stderr.isatty()):
                    yield
    finally:
        logging.getLogger().removeHandler(handler)
        package.setLevel(before[0])
        for name, level in before[1].items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def only_warnings(name: str) -> Iterator[None]:
    """Without the log lines of the logger ``name`` below a warning."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)

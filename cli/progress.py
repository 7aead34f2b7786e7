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
from gpq_faiss.progress import levels

log = logging.getLogger("gpq_faiss.progress")

# torch and matplotlib log at INFO what is no business of a user of gpq.
_OTHERS = ("torch", "matplotlib", "faiss", "onnxscript", "PIL")
_CLEAR = "\r\x1b[K"


@contextmanager
def watched(
    terminal: bool, *, look: float = 0.2, first: float = 0.8 * stages.LONG, apart: float = 10.0
) -> Iterator[None]:
    """Context in which the open stages of :mod:`gpq_faiss.progress` are shown on stderr.

    Args:
        terminal: one line, redrawn; else a line now and then.
        look: seconds between two looks at the stages.
        first: seconds before a stage is shown at all.
        apart: seconds between two lines, at least.
    """
    ended = threading.Event()

    def watch() -> None:
        announced, due = None, 0.0
        while not ended.wait(look):
            under_way = stages.under_way()
            if not under_way or under_way[0].seconds < first:
                continue
            line, now = stages.describe(under_way), time.monotonic()
            if terminal:
                width = 0
                with contextlib.suppress(OSError, ValueError):
                    width = os.get_terminal_size(sys.stderr.fileno()).columns
                # Some terminals (of containers, of `script`) do not say how wide they are.
                sys.stderr.write(f"{_CLEAR}{line[: (width or 80) - 1]}")
                sys.stderr.flush()
            elif under_way[0] is not announced or now >= due:
                # Soon for every outermost stage, then twenty or so for all of it.
                announced, whole = under_way[0], under_way[0].seconds + (under_way[0].left or 0)
                due = now + max(apart, whole / 20)
                log.info("%s", line)

    thread = threading.Thread(target=watch, daemon=True, name="gpq progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if terminal:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


@contextmanager
def shown(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """While a command works: its log and its progress on stderr.

    Args:
        quiet: errors only.
        verbose: what is of interest to few as well, and the warnings of libraries.
    """
    terminal = sys.stderr.isatty()
    handler: logging.Handler = logging.StreamHandler(sys.stderr)
    # A message takes the place of the redrawn line.
    handler.setFormatter(logging.Formatter(f"{_CLEAR if terminal else ''}%(message)s"))
    handler.setLevel(logging.ERROR if quiet else logging.DEBUG if verbose else logging.INFO)
    logging.getLogger().addHandler(handler)
    own = levels(logging.DEBUG if verbose else logging.INFO, "gpq_faiss")
    watcher = contextlib.nullcontext() if quiet else watched(terminal)
    try:
        with own, levels(logging.ERROR, *_OTHERS), warnings.catch_warnings(), watcher:
            if not verbose:
                # Of libraries to programmers: Pillow's on odd tags, torch's on drivers. What matters to users is an error or a note.
                warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger().removeHandler(handler)

"""What ``gpq`` says while it works: log lines, and how far each stage is: a bar on a terminal, lines elsewhere.

A terminal shows all that a pipe shows, bars in place of the lines with the time to go.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpq_faiss import progress as stages

if TYPE_CHECKING:
    from gpq_faiss.progress import Stage

log = logging.getLogger("gpq_faiss.progress")

# torch and matplotlib log at INFO what is no business of a user of gpq.
_OTHERS = ("torch", "matplotlib", "faiss", "onnxscript", "PIL")


class Watcher:
    """Shows the open stages of :mod:`gpq_faiss.progress` on stderr.

    Args:
        terminal: bars, not lines.
        look: seconds between two looks at the stages.
        first: seconds before a stage is shown at all.
        apart: seconds between two lines, at least.
    """

    def __init__(
        self, terminal: bool, *, look: float = 0.2, first: float = 0.8 * stages.LONG, apart: float = 10.0
    ) -> None:
        self.terminal, self.look, self.first, self.apart = terminal, look, first, apart
        self._bars: dict[Stage, Any] = {}
        self._announced: Stage | None = None
        self._next = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="gpq progress")

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self.look):
            # A stage must not end between the look and what is shown of it.
            with stages.LOCK:
                shown = stages.under_way()
                if self.terminal:
                    self._draw(shown)
                else:
                    self._write(shown)

    def _write(self, shown: tuple[Stage, ...]) -> None:
        """A line, where one is due: soon for every outermost stage, then twenty or so for all of it."""
        if not shown or shown[0].seconds < self.first:
            return
        now = time.monotonic()
        if shown[0] is self._announced and now < self._next:
            return
        self._announced = shown[0]
        whole = shown[0].seconds + (shown[0].left or 0)
        self._next = now + max(self.apart, whole / 20)
        log.info("%s", stages.describe(shown))

    def _draw(self, shown: tuple[Stage, ...]) -> None:
        from tqdm import tqdm

        size: dict[str, Any] = {"ncols": 80, "nrows": 25}
        # Some terminals (of containers, of `script`) do not say how wide they are, for which tqdm would draw nothing.
        with contextlib.suppress(OSError, ValueError):
            if os.get_terminal_size(sys.stderr.fileno()).columns:
                size = {"dynamic_ncols": True}
        # A stage with a name alone is replaced by the one inside it.
        for stage in [stage for stage in self._bars if stage not in shown]:
            self._bars.pop(stage).close()
        for stage in shown:
            if stage.seconds < self.first:
                continue
            if stage not in self._bars:
                bar = tqdm(
                    desc=stage.name,
                    total=stage.total or None,
                    initial=stage.first,
                    unit=f" {stage.unit}",
                    unit_scale=stage.total > 100_000,
                    **size,
                    leave=False,
                    file=sys.stderr,
                    bar_format=None if stage.total else "{desc}: {elapsed}",
                )
                bar.start_t -= stage.seconds
                self._bars[stage] = bar
                stage.ends.append(functools.partial(self._forget, stage))
            bar = self._bars[stage]
            if stage.figures:
                bar.set_postfix({k: f"{v:.4f}" for k, v in stage.figures.items()}, refresh=False)
            bar.n = stage.done
            bar.refresh()

    def _forget(self, stage: Stage) -> None:
        if stage in self._bars:
            self._bars.pop(stage).close()


class _Handler(logging.StreamHandler[Any]):
    """Log lines on stderr, above the bars that are there."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm = sys.modules.get("tqdm")
        if tqdm is None:
            super().emit(record)
            return
        with tqdm.tqdm.external_write_mode(file=self.stream):
            super().emit(record)


@contextmanager
def shown(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """While a command works: its log and its progress on stderr.

    Args:
        quiet: errors only.
        verbose: what is of interest to few as well, and the warnings of libraries.
    """
    package = logging.getLogger("gpq_faiss")
    before = package.level, {name: logging.getLogger(name).level for name in _OTHERS}
    handler = _Handler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
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

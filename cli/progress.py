"""The output of ``gpq`` on stderr while it works.

It is the log, above the bars of :mod:`gpq_faiss.progress`.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from gpq_faiss.progress import levels

# Their messages at level INFO do not concern a user of gpq.
_LIBRARIES = ("torch", "matplotlib", "faiss", "onnxscript", "PIL")


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def shown(*, quiet: bool, verbose: bool) -> Iterator[None]:
    """Show the log and the progress of a command.

    Args:
        quiet: errors only.
        verbose: details and the warnings of libraries, too.
    """
    package = logging.DEBUG if verbose else logging.INFO
    level = logging.ERROR if quiet else package
    handler = _Handler(level)
    logging.getLogger().addHandler(handler)
    try:
        with (
            levels(package, "gpq_faiss"),
            levels(level, "gpq_faiss.progress"),
            levels(logging.ERROR, *_LIBRARIES),
            warnings.catch_warnings(),
        ):
            if not verbose:
                # Libraries warn programmers: Pillow of odd tags, torch of drivers.
                warnings.simplefilter("ignore")
            yield
    finally:
        logging.getLogger().removeHandler(handler)

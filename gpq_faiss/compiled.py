"""Loops compiled by Numba, kept in its cache."""

from __future__ import annotations

import contextlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

from .files import fingerprint

# Private parts of Numba, tried with 0.61 to 0.68. Without them loops are compiled in each process,
# and threads are somewhat slower.
FunctionCache: Any = object
_unused_counts = False
with contextlib.suppress(ImportError):
    from numba.core.caching import FunctionCache
with contextlib.suppress(ImportError):
    from numba.core.options import DefaultOptions

    _unused_counts = hasattr(DefaultOptions, "_nrt")

_log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])
_LONG = ("search", "search_together", "visit")  # loops of exact search, which take seconds


class _Cache(FunctionCache):  # type: ignore[misc]
    """A file cache of compiled code that never fails.

    Files that cannot be read are compiled again; code that cannot be written is not kept.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        # Numba looks for changes only in the file of a loop, but functions that the loop calls are
        # compiled with it.
        names = {str(getattr(value, "__module__", "")) for value in function.__globals__.values()}
        ours = sorted(name for name in names if name.partition(".")[0] == __package__)
        sources = [inspect.getsource(sys.modules[name]) for name in ours]
        self._cache_file._source_stamp = self._cache_file._source_stamp, fingerprint(*sources)

    def load_overload(self, *arguments: Any) -> Any:
        overload = None
        try:
            overload = super().load_overload(*arguments)
        except Exception:  # damaged files raise any error
            with contextlib.suppress(OSError):
                self.flush()
        if overload is None and self._py_func.__name__ in _LONG:
            _log.info("compiling the loops of exact search: some seconds, once per installation")
        return overload

    def save_overload(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError):
            super().save_overload(*arguments)


def options(*, counted: bool) -> dict[str, bool]:
    """Return the options of a loop; if ``counted``, references to its arrays are counted."""
    chosen = {"nogil": True, "boundscheck": False}
    return chosen | {"_nrt": counted} if _unused_counts else chosen


def compiled(function: Function, *, counted: bool = True) -> Function:
    """Compile a function on its first call.

    The machine code is cached beside the function's file, or in the user's cache folder; if neither
    can be written, it is compiled again in every process.
    """
    dispatcher: Any = cast(Any, numba.njit)(**options(counted=counted))(function)
    with contextlib.suppress(RuntimeError, OSError, AttributeError, TypeError):
        dispatcher._cache = _Cache(function)
    return cast(Function, dispatcher)


def inner(function: Function) -> Function:
    """Compile a function that makes no arrays and is called often by a compiled one.

    References to its arrays are not counted, since its caller holds them: threads would wait for
    each other at the counters.
    """
    return compiled(function, counted=False)

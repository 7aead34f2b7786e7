"""Plugins of other packages, found by entry points.

The groups are ``gpq_faiss.methods`` and ``gpq_faiss.backbones``. The name of an entry point is the
name that users give; its object is imported when the name is used. Built-in names cannot be
replaced.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from .errors import GpqError, UsageError, one_line

Kind = Literal["methods", "backbones"]


@dataclass(frozen=True)
class Plugin:
    """A plugin.

    Attributes:
        kind, name: its group of entry points, and its name there.
        origin: its package and version.
        entry: its entry point.
    """

    kind: Kind
    name: str
    origin: str
    entry: importlib.metadata.EntryPoint

    def load(self) -> Any:
        """Import the entry point's object.

        Raises:
            UsageError: the import fails.
        """
        with self.running("be loaded"):
            return self.entry.load()

    @contextlib.contextmanager
    def running(self, action: str) -> Iterator[None]:
        """Run code of the plugin's package, which may raise anything, in a ``with`` block.

        Raises:
            UsageError: the code fails; the message says that the plugin cannot ``action`` ("be
                loaded").
        """
        try:
            yield
        except GpqError:
            raise
        except Exception as error:
            raise self.error(
                f"cannot {action} ({type(error).__name__}: {one_line(error)})"
            ) from error

    def error(self, problem: str) -> UsageError:
        """Return an error such as ``"the method 'b' of mypackage 1.0 cannot be loaded (...)"``."""
        return UsageError(
            f"the {self.kind.removesuffix('s')} '{self.name}' of {self.origin} {problem}"
        )


@functools.cache
def _installed(kind: Kind) -> tuple[Plugin, ...]:
    """Return the plugins of all installed packages."""
    return tuple(
        Plugin(kind, entry.name, f"{entry.dist.name} {entry.dist.version}", entry)
        for entry in importlib.metadata.entry_points(group=f"gpq_faiss.{kind}")
        if entry.dist is not None
    )


def plugin_names(kind: Kind) -> list[str]:
    """Return the names of plugins in alphabetical order."""
    return sorted({plugin.name for plugin in _installed(kind)})


def find_plugin(kind: Kind, name: str, built_in: Container[str]) -> Plugin | None:
    """Return the plugin of a name; None if there is none.

    Raises:
        UsageError: the plugin has a built-in name, or two packages have a plugin of this name.
    """
    matches = [plugin for plugin in _installed(kind) if plugin.name == name]
    if matches and name in built_in:
        raise matches[0].error(
            "has a name that is built in: uninstall the package, or rename its entry point"
        )
    if len(matches) > 1:
        raise matches[0].error(f"is also provided by {matches[1].origin}: uninstall one of them")
    return matches[0] if matches else None
